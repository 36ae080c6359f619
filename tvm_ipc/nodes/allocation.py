# SPDX-License-Identifier: Apache-2.0
"""Nodes that a launcher of the user's has started: `mpiexec -n 2 tvm-ipc node -- python main.py`.

Each rank is an agent. That of rank 0 runs the program as a child, which is no rank of MPI, and is
told by it, over a pair of sockets, what agents otherwise hear from their launcher.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
from collections.abc import Sequence
from typing import Any, Final

from tvm_ipc.errors import IPCError
from tvm_ipc.nodes.agent import Agent, abort, end_with_mpi, line_of, share
from tvm_ipc.nodes.mpi import load_mpi4py
from tvm_ipc.runtime import config
from tvm_ipc.runtime.starting import OWN_GROUP

_NAME_BYTES: Final = 256
_ROUND: Final = 0.02
_USAGE: Final = "mpiexec -n 2 tvm-ipc node -- python main.py"


class Allocated:
    """To a controller, what a `Launcher` is: the agents are there, and wait for their line."""

    said = ""
    #: The connection to the agent that has started this program, until it is used.
    _connection: socket.socket | None = None
    _used = False

    def __init__(self, first_line: str) -> None:
        found = config.allocation()
        assert found is not None
        if Allocated._used:
            raise IPCError(
                "the agents of this allocation have served a session; a program that tvm-ipc node "
                "runs may open one with hosts='allocation'"
            )
        Allocated._used = True
        self._connection = socket.socket(fileno=found[0])
        self._connection.set_inheritable(False)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # which `check` tells
            self._connection.sendall(first_line.encode() + b"\n")

    def pass_on(self) -> None:
        """What agents print is the launcher's."""

    def check(self) -> None:
        """Raise if the first agent has ended."""
        if self._ended(0.0):
            raise IPCError("the agent that runs this program has ended, as its launcher may say")

    def stop(self, seconds: float) -> None:
        """Wait for the first agent to be done with MPI."""
        assert self._connection is not None
        if self._connection.fileno() >= 0:
            self._ended(seconds)
            self._connection.close()

    def _ended(self, seconds: float) -> bool:
        assert self._connection is not None
        ready, _, _ = select.select([self._connection], [], [], seconds)
        return bool(ready)  # it never says anything


def names_of_nodes() -> tuple[str, ...] | None:
    """Return the hosts of the nodes that a launcher gave to this program; None if none did."""
    found = config.allocation()
    return None if found is None else found[1]


def main(command: Sequence[str]) -> int:
    """Be the agent of this node; on rank 0 run a program, whose exit code is returned."""
    mpi = load_mpi4py()
    from tvm_ipc.nodes.engine import version

    world = mpi.COMM_WORLD
    if world.size < 2:
        raise IPCError(
            f"node: this is the only rank, where there should be one for each node: {_USAGE}, with "
            f"the launcher of {version()}"
        )
    own = bytearray(socket.gethostname().encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0"))
    names = bytearray(_NAME_BYTES * world.size)
    world.Allgather([own, mpi.BYTE], [names, mpi.BYTE])
    hosts = [
        bytes(names[at : at + _NAME_BYTES]).rstrip(b"\0").decode()
        for at in range(0, len(names), _NAME_BYTES)
    ]
    return _first(world, mpi, list(command), hosts) if world.rank == 0 else _other(world, mpi)


def _first(world: Any, mpi: Any, command: list[str], hosts: list[str]) -> int:
    ours, theirs = socket.socketpair()
    with ours:
        try:
            with theirs:
                program: subprocess.Popen[bytes] = subprocess.Popen(
                    command,
                    env=config.of_allocation(theirs.fileno(), hosts),
                    pass_fds=[theirs.fileno()],
                    **OWN_GROUP,
                )
        except OSError as error:
            share(world, mpi, b"")
            end_with_mpi(mpi)
            raise IPCError(f"node: {command[0]} does not start: {error}") from error

        # MPI's launcher ends ranks and their group; the program hears of it by its session.
        def end(*_: object) -> None:
            program.terminate()
            os._exit(128 + signal.SIGTERM)

        signal.signal(signal.SIGTERM, end)
        line = b""
        while not line and program.poll() is None:
            if not select.select([ours], [], [], _ROUND)[0]:
                continue
            if not ours.recv(1, socket.MSG_PEEK):
                break  # it has ended, or wants no session
            line = line_of(ours.fileno())
        _serve(world, mpi, line)
        end_with_mpi(mpi)
    signal.signal(signal.SIGTERM, lambda *_: program.terminate())
    code = program.wait()
    return code if code >= 0 else 128 - code


def _other(world: Any, mpi: Any) -> int:
    _serve(world, mpi, b"")
    end_with_mpi(mpi)
    return 0


def _serve(world: Any, mpi: Any, line: bytes) -> None:
    try:
        told = share(world, mpi, line)
        if told:
            Agent(world, told).serve()
    except Exception as error:
        abort(world, error)
