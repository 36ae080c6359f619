# SPDX-License-Identifier: Apache-2.0
"""Starts one agent on each node through MPI's launcher, tells them the secret, and ends them.

The secret is the first line of the launcher's standard input, which it passes on to rank 0: it is
on no command line and in no environment, of no machine. Rank 0 gives it to the others by MPI, which
encrypts nothing: who can read the packets between nodes can read the secret. Where such people are,
go through a tunnel.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from tvm_ipc.errors import IPCError
from tvm_ipc.nodes.mpi import OPEN_MPI, Mpi
from tvm_ipc.runtime import config
from tvm_ipc.runtime.folder import Folder, remove_orphans
from tvm_ipc.runtime.starting import OWN_GROUP

#: Bytes of each of the launcher's outputs that an error shows.
_KEPT: Final = 4096


@dataclass(frozen=True)
class Places:
    """Where nodes are.

    Attributes
    ----------
    hosts : the names or addresses of machines, one for each node, or how many nodes this machine
        is to be.
    network : the network between them, such as "10.0.0.0/24" for Open MPI, or the name of an
        interface, such as "eth0", for both; None leaves it to MPI.
    shell : a program that is given options, a host and a command, as ssh is; None means ssh.
    allocated : the user's launcher has started the agents (`allocation.py`).
    """

    hosts: int | tuple[str, ...]
    network: str | None = None
    shell: Path | None = None
    allocated: bool = False

    def __post_init__(self) -> None:
        if self.count < 1:
            raise IPCError(f"there must be at least one node; hosts is {self.hosts!r}")
        for host in () if isinstance(self.hosts, int) else self.hosts:
            # It becomes a part of a list in one argument; nothing in it may look like another, or
            # like a number of processes.
            if not host.isprintable() or not host or host[0] == "-" or set(host) & set(" ,;:/"):
                raise IPCError(f"{host!r} is no name of a machine")

    @property
    def one_machine(self) -> bool:
        """Whether all nodes are known to be on this machine."""
        return isinstance(self.hosts, int) or (self.allocated and len(set(self.hosts)) == 1)

    @property
    def count(self) -> int:
        """How many nodes there are."""
        return self.hosts if isinstance(self.hosts, int) else len(self.hosts)


def command_line(mpi: Mpi, places: Places, program: Sequence[str]) -> list[str]:
    """Return what starts a program once on each node."""
    number = str(places.count)
    start = [str(mpi.mpiexec)]
    if mpi.kind == OPEN_MPI:
        if os.geteuid() == 0:
            start += ["--allow-run-as-root"]
        # Workers inherit what the agent is bound to, and would share one core.
        start += ["--bind-to", "none"]
        if isinstance(places.hosts, int):
            start += ["--host", f"localhost:{number}"]
            start += ["--mca", "pml", "ob1"]  # by TCP, as between machines
        else:
            start += ["--map-by", "node", "--host", ",".join(f"{h}:1" for h in places.hosts)]
        if places.network is not None:
            start += ["--prtemca", "prte_if_include", places.network]
            start += ["--mca", "btl_tcp_if_include", places.network]
        if places.shell is not None:
            start += ["--prtemca", "plm_ssh_agent", str(places.shell)]
    else:
        start += ["-bind-to", "none"]
        if places.network is not None:
            if "/" in places.network:
                raise IPCError(
                    f"MPICH takes the name of an interface, such as eth0, and not {places.network}"
                )
            start += ["-iface", places.network]
        if not isinstance(places.hosts, int):
            start += ["-hosts", ",".join(places.hosts), "-ppn", "1"]
        if places.shell is not None:
            start += ["-launcher", "ssh", "-launcher-exec", str(places.shell)]
    return [*start, "-n", number, *program]


class Launcher:
    """A launcher that runs, and what it said.

    Parameters
    ----------
    program : what to start once on each node.
    first_line : what rank 0 is told, without the end of the line.
    """

    def __init__(self, mpi: Mpi, places: Places, program: Sequence[str], first_line: str) -> None:
        self._mpi = mpi
        #: The ends of both outputs, each for itself: much of one must not push out the other.
        self._said = {1: bytearray(), 2: bytearray()}
        self._passes_on = False
        self._lock = threading.Lock()
        #: For temporary files of Open MPI's launcher, which leaves them behind where it is killed.
        self._folder = Folder()
        try:
            self.process: subprocess.Popen[bytes] = subprocess.Popen(
                command_line(mpi, places, program),
                env=config.of_launcher(self._folder.path()),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                **OWN_GROUP,
            )
        except OSError as error:
            self._folder.remove()
            raise IPCError(f"the launcher of the nodes, {mpi}, does not start: {error}") from error
        stdin, stdout, stderr = self.process.stdin, self.process.stdout, self.process.stderr
        assert stdin is not None and stdout is not None and stderr is not None
        self._threads = [
            threading.Thread(target=self._hear, args=(output, to), daemon=True)
            for output, to in ((stdout, 1), (stderr, 2))
        ]
        for thread in self._threads:
            thread.start()
        with contextlib.suppress(BrokenPipeError):  # it has ended, which `check` tells
            stdin.write(first_line.encode() + b"\n")
            stdin.flush()

    @property
    def said(self) -> str:
        """The end of what the launcher and those that it started have said."""
        with self._lock:
            texts = [bytes(said).decode(errors="replace").strip() for said in self._said.values()]
        return "\n".join(text for text in texts if text)

    def pass_on(self) -> None:
        """Print what comes from now on, on this process's own outputs."""
        self._passes_on = True

    def check(self) -> None:
        """Raise if the launcher has ended."""
        code = self.process.poll()
        if code is None:
            return
        for thread in self._threads:
            thread.join(0.5)  # what it said last is on its way
        how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        raise IPCError(
            f"the launcher of the nodes, {self._mpi}, ended with {how}"
            + (f"\nIt said:\n{said}" if (said := self.said) else "")
        )

    def stop(self, seconds: float) -> None:
        """Wait for the launcher to end, as it does when all agents have; then end it and them."""
        end = time.monotonic() + seconds
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, end - time.monotonic()))
        for signal_, patience in ((signal.SIGTERM, 3.0), (signal.SIGKILL, None)):
            if self.process.poll() is None:
                self.process.send_signal(signal_)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(patience)
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        for thread in self._threads:
            thread.join(1.0)
        self._folder.remove()
        remove_orphans()  # of agents that were killed, where they shared a file system

    def _hear(self, output: IO[bytes], to: int) -> None:
        with output:
            while data := os.read(output.fileno(), 1 << 16):
                with self._lock:
                    self._said[to] += data
                    del self._said[to][:-_KEPT]
                if self._passes_on:
                    with contextlib.suppress(OSError):  # ours is closed
                        os.write(to, data)
