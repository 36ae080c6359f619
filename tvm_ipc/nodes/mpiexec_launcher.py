# SPDX-License-Identifier: Apache-2.0
"""Start one agent on each node through MPI's launcher, send them the secret, and end them.

The secret is on the first line of the launcher's standard input, which the launcher forwards to
rank 0. It is never on a command line or in an environment variable. Rank 0 broadcasts it through
MPI, which does not encrypt. On networks where others can read packets, use a tunnel.
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
from tvm_ipc.nodes.find_mpi_installation import OPEN_MPI, Mpi
from tvm_ipc.runtime import config, standard_fd_reservation
from tvm_ipc.runtime.scratch_dir import ScratchDir, remove_orphans
from tvm_ipc.runtime.start_child_process import ChildProcess, describe_exit_code, signal_name

#: The most bytes of each output of the launcher that an error shows.
_SHOWN_BYTES: Final = 4096


@dataclass(frozen=True)
class NodeAddresses:
    """The machines of the nodes, and how to reach them.

    Attributes
    ----------
    hosts : the name or address of a machine for each node, or a number of simulated nodes on this
        machine.
    network : the network between the nodes: the name of an interface, such as "eth0", or for Open
        MPI a network, such as "10.0.0.0/24". With None, MPI chooses.
    shell : a program that takes options, a host and a command, as ssh does; None for ssh.
    allocated : whether the user's launcher has started the agents; see
        `node_command_under_mpiexec.py`.
    """

    hosts: int | tuple[str, ...]
    network: str | None = None
    shell: Path | None = None
    allocated: bool = False

    def __post_init__(self) -> None:
        """Check that there is a node, and that no host looks like an option of the launcher."""
        if self.count < 1:
            raise IPCError(f"there must be at least one node; hosts is {self.hosts!r}")
        for host in () if isinstance(self.hosts, int) else self.hosts:
            # Hosts are joined into one argument of the launcher. A host must not look like an
            # option, a separator or a number of processes there.
            if not host.isprintable() or not host or host[0] == "-" or set(host) & set(" ,;:/"):
                raise IPCError(f"{host!r} is not a valid name of a machine")

    @property
    def one_machine(self) -> bool:
        """True if all nodes are known to be on this machine."""
        return isinstance(self.hosts, int) or (self.allocated and len(set(self.hosts)) == 1)

    @property
    def count(self) -> int:
        """The number of nodes."""
        return self.hosts if isinstance(self.hosts, int) else len(self.hosts)


def command_line(mpi: Mpi, addresses: NodeAddresses, program: Sequence[str]) -> list[str]:
    """Return the command that starts a program once on each node."""
    number = str(addresses.count)
    start = [str(mpi.mpiexec)]
    if mpi.kind == OPEN_MPI:
        if os.geteuid() == 0:
            start += ["--allow-run-as-root"]
        # Workers inherit the CPU binding of the agent, and would share one core.
        start += ["--bind-to", "none"]
        if isinstance(addresses.hosts, int):
            start += ["--host", f"localhost:{number}"]
            start += ["--mca", "pml", "ob1"]  # use TCP, as between machines
        else:
            start += ["--map-by", "node", "--host", ",".join(f"{h}:1" for h in addresses.hosts)]
        if addresses.network is not None:
            start += ["--prtemca", "prte_if_include", addresses.network]
            start += ["--mca", "btl_tcp_if_include", addresses.network]
        if addresses.shell is not None:
            start += ["--prtemca", "plm_ssh_agent", str(addresses.shell)]
    else:
        start += ["-bind-to", "none"]
        if addresses.network is not None:
            if "/" in addresses.network:
                raise IPCError(
                    f"network is {addresses.network}; MPICH takes the name of an interface, such "
                    "as eth0"
                )
            start += ["-iface", addresses.network]
        if not isinstance(addresses.hosts, int):
            start += ["-hosts", ",".join(addresses.hosts), "-ppn", "1"]
        if addresses.shell is not None:
            start += ["-launcher", "ssh", "-launcher-exec", str(addresses.shell)]
    return [*start, "-n", number, *program]


def _describe_request(
    mpi: Mpi, addresses: NodeAddresses, program: Sequence[str], folder: Path
) -> str:
    """Return a sentence about what the launcher was asked to do."""
    nodes = (
        f"{addresses.count} nodes of this machine"
        if isinstance(addresses.hosts, int)
        else f"the hosts {', '.join(addresses.hosts)} by {addresses.shell or 'ssh'}"
    )
    network = addresses.network or "one that MPI chooses"
    files = f", with temporary files in {folder}" if mpi.kind == OPEN_MPI else ""
    return (
        f"It was asked to start {' '.join(program)} on {nodes}, over the network {network}{files}"
    )


class Launcher:
    """A running launcher and its output.

    Parameters
    ----------
    mpi : the MPI of the launcher.
    addresses : the nodes.
    program : the command to start once on each node.
    first_line : the line for the standard input of rank 0, without a newline.
    """

    def __init__(
        self, mpi: Mpi, addresses: NodeAddresses, program: Sequence[str], first_line: str
    ) -> None:
        self._mpi = mpi
        #: Whether all agents have started. Until then, errors contain `asked`.
        self._passes_on = False
        #: The last bytes of each output. They are separate, so one cannot displace the other.
        self._output = {1: bytearray(), 2: bytearray()}
        self._lock = threading.Lock()
        #: The temporary files of Open MPI's launcher, which leaves them behind if it is killed.
        self._folder = ScratchDir()
        #: A sentence about the request to the launcher, which MPI's own errors lack.
        self.asked = _describe_request(mpi, addresses, program, self._folder.path())
        try:
            self.process = ChildProcess(
                command_line(mpi, addresses, program),
                env=config.of_launcher(self._folder.path()),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        except OSError as error:
            self._folder.remove()
            raise IPCError(f"the launcher of the nodes, {mpi}, does not start: {error}") from error
        stdin, stdout, stderr = self.process.stdin, self.process.stdout, self.process.stderr
        assert stdin is not None and stdout is not None and stderr is not None
        self._threads = [
            threading.Thread(target=self._read_output, args=(output, descriptor), daemon=True)
            for output, descriptor in ((stdout, 1), (stderr, 2))
        ]
        # A separate thread can block SIGPIPE without changing the signal mask of the caller.
        writer = threading.Thread(target=_write_line, args=(stdin, first_line.encode() + b"\n"))
        for thread in (*self._threads, writer):
            thread.start()
        writer.join()

    @property
    def output(self) -> str:
        """The end of the output of the launcher and of the processes that it started."""
        with self._lock:
            outputs = list(map(bytes, self._output.values()))
        texts = [output.decode(errors="replace").strip() for output in outputs]
        return "\n".join(text for text in texts if text)

    def pass_on(self) -> None:
        """From now on, print the output of the launcher on this process's own outputs."""
        self._passes_on = True

    def check(self) -> None:
        """Raise if the launcher has ended."""
        code = self.process.poll()
        if code is None:
            return
        for thread in self._threads:
            thread.join(0.5)  # for the rest of the output
        cause = signal_name(code) or describe_exit_code(code)
        output = self.output
        raise IPCError(
            f"the launcher of the nodes, {self._mpi}, ended with {cause}"
            + ("" if self._passes_on else f"\n{self.asked}")
            + (f"\nIt printed:\n{output}" if output else "")
        )

    def stop(self, seconds: float) -> None:
        """Wait until the launcher ends, as it does after all agents; after a timeout, end it."""
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
        remove_orphans()  # folders of killed agents on a shared file system

    def _read_output(self, output: IO[bytes], descriptor: int) -> None:
        """Collect an output of the launcher, and print it once `pass_on` was called."""
        _block_sigpipe()
        # The duplicate is the stream that the program had at the start, as for workers of one
        # machine. The descriptor itself may be another file later.
        stream = standard_fd_reservation.duplicate(descriptor)
        try:
            with output:
                while data := os.read(output.fileno(), 1 << 16):
                    with self._lock:
                        self._output[descriptor] += data
                        del self._output[descriptor][:-_SHOWN_BYTES]
                    if self._passes_on and stream is not None:
                        with contextlib.suppress(OSError):  # the reader of the stream is gone
                            os.write(stream, data)
        finally:
            if stream is not None:
                os.close(stream)


def _write_line(stdin: IO[bytes], line: bytes) -> None:
    _block_sigpipe()
    with contextlib.suppress(BrokenPipeError):  # the launcher has ended, which `check` reports
        stdin.write(line)
        stdin.flush()


def _block_sigpipe() -> None:
    """Make writes of this thread fail with EPIPE, even if the program has reset SIGPIPE."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})
