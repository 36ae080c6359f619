# SPDX-License-Identifier: Apache-2.0
"""Nodes that the user's own launcher starts: `mpiexec -n 2 tvm-ipc node -- python main.py`.

Each rank is an agent. Rank 0 runs the program as a child process, which is not a rank of MPI. The
program sends the controller's line to rank 0 through a pair of sockets.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from collections.abc import Sequence
from typing import Any, Final

from tvm_ipc.errors import IPCError
from tvm_ipc.nodes.agent import Agent, abort, end_with_mpi, line_of, share
from tvm_ipc.nodes.find_mpi_installation import load_mpi4py
from tvm_ipc.runtime import config, standard_fd_reservation
from tvm_ipc.runtime.start_child_process import ChildProcess

_NAME_BYTES: Final = 256
_ROUND: Final = 0.02
_USAGE: Final = "mpiexec -n 2 tvm-ipc node -- python main.py"


class Allocated:
    """Stands in for a `Launcher` in the controller: the agents run, and wait for their line."""

    output = ""
    asked = "The launcher of the allocation has started the agents, with its own options"
    _used = False

    def __init__(self, first_line: str) -> None:
        allocation = config.allocation()
        assert allocation is not None
        if Allocated._used:
            raise IPCError(
                "the agents of this allocation have served a session; a program that tvm-ipc node "
                "runs may open only one session with hosts='allocation'"
            )
        Allocated._used = True
        #: The connection to the agent that has started this program.
        self._connection = socket.socket(fileno=allocation[0])
        self._connection.set_inheritable(False)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # `check` reports it
            self._connection.sendall(first_line.encode() + b"\n", socket.MSG_NOSIGNAL)

    def pass_on(self) -> None:
        """Do nothing: the user's launcher prints the output of the agents."""

    def check(self) -> None:
        """Raise if the first agent has ended."""
        if self._ended(0.0):
            raise IPCError(
                "the agent that runs this program has ended; see the output of its launcher"
            )

    def stop(self, seconds: float) -> None:
        """Wait for the first agent to finalize MPI."""
        if self._connection.fileno() >= 0:
            self._ended(seconds)
            self._connection.close()

    def _ended(self, seconds: float) -> bool:
        ready, _, _ = select.select([self._connection], [], [], seconds)
        return bool(ready)  # the agent sends nothing, so this is the end of the connection


def names_of_nodes() -> tuple[str, ...] | None:
    """Return the hosts of this program's allocation; None outside of an allocation."""
    allocation = config.allocation()
    return None if allocation is None else allocation[1]


def main(command: Sequence[str]) -> int:
    """Run the agent of this node; on rank 0, also run a program and return its exit code."""
    standard_fd_reservation.fill()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if ignored, exit codes are lost
    mpi = load_mpi4py()
    from tvm_ipc.nodes.mpi_progress_thread import version

    world = mpi.COMM_WORLD
    if world.size < 2:
        raise IPCError(
            f"node: this is the only rank; there must be one rank for each node: {_USAGE}, with "
            f"the launcher of {version()}"
        )
    own_name = bytearray(socket.gethostname().encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0"))
    names = bytearray(_NAME_BYTES * world.size)
    world.Allgather([own_name, mpi.BYTE], [names, mpi.BYTE])
    hosts = [
        bytes(names[at : at + _NAME_BYTES]).rstrip(b"\0").decode()
        for at in range(0, len(names), _NAME_BYTES)
    ]
    if world.rank == 0:
        return _run_rank_0(world, mpi, list(command), hosts)
    return _run_other_rank(world, mpi)


def _run_rank_0(world: Any, mpi: Any, command: list[str], hosts: list[str]) -> int:
    agent_end, program_end = socket.socketpair()
    with agent_end:
        try:
            with program_end:
                program = ChildProcess(
                    command,
                    stdin=None,
                    env=config.of_allocation(program_end.fileno(), hosts),
                    pass_fds=[program_end.fileno()],
                )
        except OSError as error:
            share(world, mpi, b"")
            end_with_mpi(mpi)
            raise IPCError(f"node: {command[0]} does not start: {error}") from error

        # The launcher ends ranks and their process group. The program has a group of its own.
        def end(*_: object) -> None:
            program.terminate()
            os._exit(128 + signal.SIGTERM)

        signal.signal(signal.SIGTERM, end)
        line = b""
        while not line and program.poll() is None:
            if not select.select([agent_end], [], [], _ROUND)[0]:
                continue
            if not agent_end.recv(1, socket.MSG_PEEK):
                break  # the program has ended, or opens no session
            line = line_of(agent_end.fileno())
        _serve(world, mpi, line)
        end_with_mpi(mpi)
    signal.signal(signal.SIGTERM, lambda *_: program.terminate())
    code = program.wait()
    return code if code >= 0 else 128 - code


def _run_other_rank(world: Any, mpi: Any) -> int:
    _serve(world, mpi, b"")
    end_with_mpi(mpi)
    return 0


def _serve(world: Any, mpi: Any, line: bytes) -> None:
    try:
        content = share(world, mpi, line)
        if content:
            Agent(world, content).serve()
    except Exception as error:
        abort(world, error)
