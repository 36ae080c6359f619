# SPDX-License-Identifier: Apache-2.0
"""The agent of a node: a rank of MPI that connects to the controller and starts the node's workers.

    python -m tvm_ipc.nodes.agent NODES SECONDS

The agent has SECONDS to join. After that, `agent_startup_watchdog.py` ends it from outside, because
MPI may hang. Rank 0 reads one line from its standard input: the key of the session, and the
addresses that the controller listens on.

The agent and its workers end when the connection to the controller ends. MPI ends all agents if
one of them dies. It never ends the controller, which is not a rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from tvm_ipc import this_machine
from tvm_ipc.errors import IPCError
from tvm_ipc.nodes import agent_startup_watchdog
from tvm_ipc.nodes.controller_agent_json_messages import MOST_BYTES, Messages
from tvm_ipc.nodes.find_mpi_installation import load_mpi4py
from tvm_ipc.nodes.handshake import Key, PeerIdentity, enter
from tvm_ipc.nodes.session_server_in_node_agent import NodeSessionServer, Settings
from tvm_ipc.nodes.shm_probe import digest
from tvm_ipc.runtime import config, standard_fd_reservation
from tvm_ipc.runtime.scratch_dir import ScratchDir, remove_orphans
from tvm_ipc.runtime.start_child_process import (
    WORKER_PROGRAM,
    ChildProcess,
    end_within,
    passed,
    python_script,
    start_python,
)

if TYPE_CHECKING:
    from tvm_ipc.nodes.mpi_progress_thread import Engine

#: The launcher's daemon that started this process. If it dies, the parent process changes.
_DAEMON: Final = os.getppid()
#: Seconds that rank 0 waits for its line. The controller writes it before MPI starts, or is dead.
LINE_SECONDS: Final = 10.0
#: Seconds that workers have to end by themselves, and that MPI has.
_GRACE: Final = 2.0
_MPI_GRACE: Final = 5
_ROUND: Final = 0.1
_PAUSE: Final = 0.005


class Agent:
    """The agent of this node, after the start of MPI.

    Parameters
    ----------
    world : the communicator of all agents. The rank is the number of the node.
    line : the content of the controller's line: "key", "addresses" that the controller listens on,
        and "timeout", the seconds to join.
    """

    def __init__(self, world: Any, line: dict[str, Any]) -> None:
        self._world = world
        self._node = int(world.rank)
        self._key = Key.from_text(str(line["key"]))
        self._addresses = [(str(host), int(port)) for host, port in line["addresses"]]
        self._timeout = float(line["timeout"])
        self._workers: dict[int, ChildProcess] = {}
        self._server: NodeSessionServer | None = None
        self._folder = ScratchDir()
        self._engine: Engine | None = None
        #: When the engine's error was noticed. It is reported after a grace period, so the death of
        #: another node, which may be the cause, is reported first.
        self._engine_ended = 0.0
        self._connection = self._enter(PeerIdentity(self._node, "agent"))
        self._controller = Messages(self._connection)

    @property
    def cut_off(self) -> bool:
        """True if the controller could not be reached any more."""
        return self._controller.cut_off

    def serve(self) -> None:
        """Execute the controller's commands until the connection ends."""
        signal.signal(signal.SIGTERM, self._end_at_once)
        self._controller.send("facts", **self._facts())
        try:
            while not self._controller.ended:
                select.select([self._connection], [], [], _ROUND)
                for message in self._controller.receive():
                    self._execute(message)
                self._report_ended_workers()
                self._check_engine()
        except Exception as error:
            self._controller.send(
                "failed", why=f"{type(error).__name__}: {error}"[: MOST_BYTES // 8]
            )
            raise
        finally:
            self._end_workers(_GRACE)
            engine_ended = self._engine is None or self._engine.close(_MPI_GRACE)
            if self._server is not None and engine_ended:
                self._server.close()
            self._folder.remove()
            self._connection.close()

    def _enter(self, identity: PeerIdentity) -> socket.socket:
        return enter(self._key, identity, self._addresses, self._timeout)

    def _facts(self) -> dict[str, Any]:
        return {
            "host": socket.gethostname(),
            "address": self._connection.getsockname()[0],
            "cores": this_machine.available_cores(),
            "python": sys.executable,
            "process": os.getpid(),
        }

    def _execute(self, message: dict[str, Any]) -> None:
        if message["kind"] == "read":
            self._controller.send("read", digest=digest(Path(str(message["path"]))))
        elif message["kind"] == "start":
            self._start(message)
        elif message["kind"] == "kill":
            for worker in self._workers.values():
                worker.kill()
        else:
            raise IPCError(f"the controller sent the unknown message {message['kind']!r}")

    def _start(self, message: dict[str, Any]) -> None:
        """Start the workers, and while they load TVM, the session server that they join."""
        from tvm_ipc.nodes.mpi_progress_thread import Engine  # loads MPI

        environment = config.without_mpi(
            config.worker_environment(int(message["threads"]), bool(message["compiler"]))
        )
        environment = config.with_folder(environment, self._folder.path())
        settings = {str(name): str(text) for name, text in message["environment"].items()}
        environment = config.with_settings(environment, settings)
        numbers = (int(message["num_workers"]), int(message["num_groups"]))
        with passed([str(entry) for entry in message["path"]]) as path:
            for rank in message["ranks"]:
                self._start_worker(int(rank), numbers, environment, path)
        remove_orphans()  # while the workers load TVM
        link = self._enter(PeerIdentity(self._node, "server"))
        self._server = NodeSessionServer(Settings.from_message(message["server"]), self._node, link)
        processes = {str(rank): worker.pid for rank, worker in self._workers.items()}
        self._engine = Engine(self._server, self._world)
        invitation = self._server.invitation.hex()
        self._controller.send("started", processes=processes, invitation=invitation)

    def _check_engine(self) -> None:
        if self._engine is None or self._engine.error is None:
            return
        self._engine_ended = self._engine_ended or time.monotonic()
        if time.monotonic() > self._engine_ended + _GRACE:
            raise IPCError(
                f"the engine that moves data between nodes has failed: {self._engine.error}"
            ) from self._engine.error

    def _start_worker(
        self, rank: int, numbers: tuple[int, int], environment: dict[str, str], path: int
    ) -> None:
        # Python uses vfork and exec here, which is safe after the initialization of MPI.
        with self._enter(PeerIdentity(self._node, "worker", rank)) as pipe:
            write = os.dup(pipe.fileno())
            try:
                # In the agent's group, so that the launcher ends it too.
                self._workers[rank] = start_python(
                    WORKER_PROGRAM,
                    rank,
                    *numbers,
                    pipe.fileno(),
                    write,
                    path=path,
                    files=(pipe.fileno(), write),
                    dies_with_parent=True,
                    own_group=False,
                    env=environment,
                )
            finally:
                os.close(write)

    def _report_ended_workers(self) -> None:
        for rank, worker in list(self._workers.items()):
            code = worker.poll()
            if code is not None:
                del self._workers[rank]
                self._controller.send("ended", rank=rank, code=code)

    def _end_at_once(self, *_: object) -> None:
        """Handle SIGTERM: the launcher ends this agent, mostly because another agent died.

        The message lets the controller name the other agent as the cause.
        """
        self._controller.send("ended by the launcher")
        for worker in self._workers.values():
            worker.kill()
        self._folder.remove()
        os._exit(128 + signal.SIGTERM)

    def _end_workers(self, seconds: float) -> None:
        """Wait for workers, which end when the controller closes their pipes; kill the others."""
        end_within(seconds, self._workers.values())


def line_of(descriptor: int) -> bytes:
    """Read a line from a descriptor.

    It does not wait for the end of the file, because Open MPI's launcher sends none.
    """
    line = bytearray()
    end = time.monotonic() + LINE_SECONDS
    while b"\n" not in line:
        ready, _, _ = select.select([descriptor], [], [], max(0.0, end - time.monotonic()))
        data = os.read(descriptor, MOST_BYTES) if ready else b""
        if not data or len(line) > MOST_BYTES:
            raise IPCError(
                f"the controller's line did not arrive within {LINE_SECONDS:g} s: {len(line)} "
                "bytes arrived"
                if not ready
                else f"the controller's line ended after {len(line)} bytes"
            )
        line += data
    return bytes(line.partition(b"\n")[0])


def share(world: Any, mpi: Any, line: bytes) -> dict[str, Any]:
    """Broadcast the line of rank 0, and return its JSON object; empty if there is no line.

    The line is sent as bytes, and nothing is pickled. Ranks may wait for a long time, so they sleep
    instead of spinning.
    """
    length = bytearray(len(line).to_bytes(8, "big"))
    _broadcast(world, mpi, length)
    data = bytearray(line.ljust(int.from_bytes(length, "big"), b"\0"))
    if not data:
        return {}
    _broadcast(world, mpi, data)
    content = json.loads(data)
    if not isinstance(content, dict):
        raise IPCError("the controller's line is not a JSON object")
    return content


def _broadcast(world: Any, mpi: Any, data: bytearray) -> None:
    request = world.Ibcast([data, mpi.BYTE], root=0)
    while not request.Test():
        time.sleep(_PAUSE)


def end_with_mpi(mpi: Any) -> None:
    """Finalize MPI, which waits for the other agents; after a timeout, end all agents."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_MPI_GRACE)
    mpi.Finalize()
    signal.alarm(0)


def end_with_daemon() -> None:
    """End this process, and the launcher's daemon that started it, with its temporary files.

    The launcher cannot be reached, and its daemon would wait for it a quarter of an hour or more.
    If the daemon has died, the parent of this process is an unrelated one, and is not ended.
    """
    agent_startup_watchdog.end_daemon(_DAEMON, config.folder_of_daemon(), os.getppid())
    os._exit(1)


def abort(world: Any, error: Exception) -> NoReturn:
    """End all agents, because this one has failed."""
    sys.stderr.write(f"tvm_ipc: the agent of node {world.rank} ends: {error}\n")
    sys.stderr.flush()
    world.Abort(1)
    os._exit(1)


@contextlib.contextmanager
def watched(seconds: float) -> Iterator[None]:
    """End this process and the daemon that started it if the block takes longer.

    The process is also ended if the daemon dies meanwhile.
    """
    numbers = (os.getpid(), _DAEMON, seconds)
    script = python_script(agent_startup_watchdog.__file__)
    with ChildProcess(
        [*script, *map(str, numbers), config.folder_of_daemon()],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
    ) as watchdog:
        try:
            yield
        finally:
            watchdog.kill()


def main(nodes: int, seconds: float) -> None:
    """Run the agent of this node, which must join the controller within some seconds."""
    standard_fd_reservation.fill()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if ignored, the exit codes of workers are lost
    with watched(seconds):
        mpi = load_mpi4py()
        from tvm_ipc.nodes.mpi_progress_thread import version

        world = mpi.COMM_WORLD
        if world.size != nodes:
            sys.exit(
                f"tvm_ipc: this agent is rank {world.rank} of {world.size}; expected {nodes} "
                "agents. The launcher belongs to another MPI than that of mpi4py "
                f"({version()}); use the launcher of that MPI"
            )
        try:
            line = line_of(0) if world.rank == 0 else b""
            agent = Agent(world, share(world, mpi, line))
        except Exception as error:
            abort(world, error)
    try:
        agent.serve()
    except Exception as error:
        with watched(_MPI_GRACE):  # an abort may hang too, as it waits for the launcher
            abort(world, error)
    if agent.cut_off:
        end_with_daemon()
    end_with_mpi(mpi)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
