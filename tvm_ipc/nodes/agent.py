# SPDX-License-Identifier: Apache-2.0
"""The agent of a node: an MPI rank that joins the controller and starts the node's workers.

It ends when its connection to the controller does, and its workers with it. MPI may end agents, as
it does with all ranks when one of them ends; it never ends the controller, which is no rank.

    python -m tvm_ipc.nodes.agent NODES SECONDS

It has so many seconds to join; then it is ended from outside (`watcher.py`), for MPI may hang.
What else it must know is one line on the standard input of rank 0: the key of the session, and
where the controller listens.
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

from tvm_ipc import machine
from tvm_ipc.errors import IPCError
from tvm_ipc.nodes import watcher
from tvm_ipc.nodes.handshake import Key, Place, enter
from tvm_ipc.nodes.hub import NodeHub, Settings
from tvm_ipc.nodes.messages import MOST_BYTES, Messages
from tvm_ipc.nodes.mpi import load_mpi4py
from tvm_ipc.nodes.proof import digest
from tvm_ipc.runtime import config
from tvm_ipc.runtime.folder import Folder, remove_orphans
from tvm_ipc.runtime.starting import OWN_GROUP, passed

if TYPE_CHECKING:
    from tvm_ipc.nodes.engine import Engine

#: The launcher's daemon that started this process. Where it dies, another process is the parent.
_DAEMON: Final = os.getppid()
#: Seconds that rank 0 waits for its line: the controller wrote it before MPI started, or is gone.
LINE_SECONDS: Final = 10.0
#: Seconds that workers have to end by themselves, and MPI.
_GRACE: Final = 2.0
_MPI_GRACE: Final = 5
_ROUND: Final = 0.1
_PAUSE: Final = 0.005
#: A worker. It ends with its agent even if a signal ends that.
_WORKER: Final = """
import ctypes, json, os, sys
agent, *numbers, path = map(int, sys.argv[1:])
ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
if os.getppid() != agent:
    sys.exit(1)
sys.path[:] = json.loads(os.pread(path, os.fstat(path).st_size, 0))
os.close(path)
from tvm_ipc.runtime.worker import main
main(*numbers)
"""


class Agent:
    """What runs on a node, once MPI has told its number and the session's key.

    Parameters
    ----------
    world : MPI's, of all agents.
    told : "key", "addresses" where the controller listens, and "timeout" to get in.
    """

    def __init__(self, world: Any, told: dict[str, Any]) -> None:
        self._world = world
        self._node = int(world.rank)
        self._key = Key.from_text(str(told["key"]))
        self._addresses = [(str(host), int(port)) for host, port in told["addresses"]]
        self._timeout = float(told["timeout"])
        self._workers: dict[int, subprocess.Popen[bytes]] = {}
        self._hub: NodeHub | None = None
        self._folder = Folder()
        self._engine: Engine | None = None
        #: When the engine was seen to have ended; the end of another node, if that is why, is told
        #: before.
        self._engine_ended = 0.0
        self._connection = self._enter(Place(self._node, "agent"))
        self._controller = Messages(self._connection)

    @property
    def cut_off(self) -> bool:
        """Whether the controller was not reached any more."""
        return self._controller.cut_off

    def serve(self) -> None:
        """Do what the controller says until it is gone."""
        signal.signal(signal.SIGTERM, self._end_at_once)
        self._controller.send("facts", **self._facts())
        try:
            while not self._controller.ended:
                select.select([self._connection], [], [], _ROUND)
                for message in self._controller.hear():
                    self._obey(message)
                self._tell_who_ended()
                self._look_at_engine()
        except Exception as error:
            self._controller.send(
                "failed", why=f"{type(error).__name__}: {error}"[: MOST_BYTES // 8]
            )
            raise
        finally:
            self._end_workers(_GRACE)
            ended = self._engine is None or self._engine.close(_MPI_GRACE)
            if self._hub is not None and ended:
                self._hub.close()
            self._folder.remove()
            self._connection.close()

    def _enter(self, place: Place) -> socket.socket:
        return enter(self._key, place, self._addresses, self._timeout)

    def _facts(self) -> dict[str, Any]:
        return {
            "host": socket.gethostname(),
            "address": self._connection.getsockname()[0],
            "cores": machine.available_cores(),
            "python": sys.executable,
            "process": os.getpid(),
        }

    def _obey(self, message: dict[str, Any]) -> None:
        if message["what"] == "read":
            self._controller.send("read", digest=digest(Path(str(message["path"]))))
        elif message["what"] == "start":
            self._start(message)
        elif message["what"] == "kill":
            for worker in self._workers.values():
                worker.kill()
        else:
            raise IPCError(f"the controller says {message['what']!r}, which no agent knows")

    def _start(self, message: dict[str, Any]) -> None:
        """Start the workers, and open the hub that they join, which they need later."""
        from tvm_ipc.nodes.engine import Engine  # MPI's, which only agents load

        environment = config.without_mpi(
            config.worker_environment(int(message["threads"]), bool(message["compiler"]))
        )
        remove_orphans()
        environment = config.with_folder(environment, self._folder.path())
        told = {str(name): str(text) for name, text in message["environment"].items()}
        environment = config.with_settings(environment, told)
        numbers = (int(message["num_workers"]), int(message["num_groups"]))
        with passed([str(entry) for entry in message["path"]]) as path:
            for rank in message["ranks"]:
                self._start_worker(int(rank), numbers, environment, path)
        link = self._enter(Place(self._node, "hub"))
        self._hub = NodeHub(Settings.heard(message["hub"]), self._node, link)
        processes = {str(rank): worker.pid for rank, worker in self._workers.items()}
        self._engine = Engine(self._hub, self._world)
        invitation = self._hub.invitation.hex()
        self._controller.send("started", processes=processes, invitation=invitation)

    def _look_at_engine(self) -> None:
        if self._engine is None or self._engine.error is None:
            return
        self._engine_ended = self._engine_ended or time.monotonic()
        if time.monotonic() > self._engine_ended + _GRACE:
            raise IPCError(
                f"messages between nodes do not go on: {self._engine.error}"
            ) from self._engine.error

    def _start_worker(
        self, rank: int, numbers: tuple[int, int], environment: dict[str, str], path: int
    ) -> None:
        # Python starts it by vfork and exec: MPI, which this process has initialised, bears that.
        with self._enter(Place(self._node, "worker", rank)) as pipe:
            write = os.dup(pipe.fileno())
            try:
                arguments = (os.getpid(), rank, *numbers, pipe.fileno(), write, path)
                self._workers[rank] = subprocess.Popen(
                    [sys.executable, "-c", _WORKER, *map(str, arguments)],
                    env=environment,
                    pass_fds=(pipe.fileno(), write, path),
                    stdin=subprocess.DEVNULL,
                )
            finally:
                os.close(write)

    def _tell_who_ended(self) -> None:
        for rank, worker in list(self._workers.items()):
            code = worker.poll()
            if code is not None:
                del self._workers[rank]
                self._controller.send("ended", rank=rank, code=code)

    def _end_at_once(self, *_: object) -> None:
        """The launcher ends this agent, mostly since another one died: that one is to be named."""
        self._controller.send("ended by the launcher")
        for worker in self._workers.values():
            worker.kill()
        self._folder.remove()
        os._exit(128 + signal.SIGTERM)

    def _end_workers(self, seconds: float) -> None:
        """Workers whose pipes the controller closed end by themselves, unless they are stuck."""
        end = time.monotonic() + seconds
        for worker in self._workers.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.wait(max(0.0, end - time.monotonic()))
        for worker in self._workers.values():
            worker.kill()
            worker.wait()


def line_of(descriptor: int) -> bytes:
    """Read a line, after which the end need not come: Open MPI's launcher sends none."""
    line = bytearray()
    end = time.monotonic() + LINE_SECONDS
    while b"\n" not in line:
        ready, _, _ = select.select([descriptor], [], [], max(0.0, end - time.monotonic()))
        data = os.read(descriptor, MOST_BYTES) if ready else b""
        if not data or len(line) > MOST_BYTES:
            raise IPCError(
                f"the controller's line did not come in {LINE_SECONDS:g} s: {len(line)} bytes did"
                if not ready
                else f"the controller's line ended after {len(line)} bytes"
            )
        line += data
    return bytes(line.partition(b"\n")[0])


def share(world: Any, mpi: Any, line: bytes) -> dict[str, Any]:
    """Return what rank 0's line says, on all ranks; nothing if that has none.

    Nothing is pickled: it goes as bytes. Ranks may wait for long, and sleep.
    """
    length = bytearray(len(line).to_bytes(8, "big"))
    _broadcast(world, mpi, length)
    data = bytearray(line.ljust(int.from_bytes(length, "big"), b"\0"))
    if not data:
        return {}
    _broadcast(world, mpi, data)
    told = json.loads(data)
    if not isinstance(told, dict):
        raise IPCError("the controller's line is no JSON object")
    return told


def _broadcast(world: Any, mpi: Any, data: bytearray) -> None:
    request = world.Ibcast([data, mpi.BYTE], root=0)
    while not request.Test():
        time.sleep(_PAUSE)


def end_with_mpi(mpi: Any) -> None:
    """End MPI, which waits for the other agents; if one of them never comes, end all."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_MPI_GRACE)
    mpi.Finalize()
    signal.alarm(0)


def end_with_daemon() -> None:
    """End this process, and the launcher's daemon that started it, with its temporary files.

    The launcher cannot be reached, and its daemon would wait for it, a quarter of an hour or more.
    If the daemon has died, the parent of this process is another one, and none of ours.
    """
    watcher.end_daemon(_DAEMON, config.folder_of_daemon(), os.getppid())
    os._exit(1)


def abort(world: Any, error: Exception) -> NoReturn:
    """End all agents, since this one has failed."""
    sys.stderr.write(f"tvm_ipc: the agent of node {world.rank} ends: {error}\n")
    sys.stderr.flush()
    world.Abort(1)
    os._exit(1)


@contextlib.contextmanager
def watched(seconds: float) -> Iterator[None]:
    """End this process, and the daemon that started it, if the block takes longer.

    It is ended too when the daemon dies meanwhile.
    """
    numbers = (os.getpid(), _DAEMON, seconds)
    command = [sys.executable, "-I", "-S", watcher.__file__, *map(str, numbers)]
    with subprocess.Popen(
        [*command, config.folder_of_daemon()],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        **OWN_GROUP,
    ) as beside:
        try:
            yield
        finally:
            beside.kill()


def main(nodes: int, seconds: float) -> None:
    """Run the agent of this node, which has so many seconds to join the controller."""
    with watched(seconds):
        mpi = load_mpi4py()
        from tvm_ipc.nodes.engine import version

        world = mpi.COMM_WORLD
        if world.size != nodes:
            sys.exit(
                f"tvm_ipc: this agent is rank {world.rank} of {world.size}, and there should be "
                f"{nodes} agents: the launcher is not of the MPI that mpi4py is for "
                f"({version()})"
            )
        try:
            line = line_of(0) if world.rank == 0 else b""
            agent = Agent(world, share(world, mpi, line))
        except Exception as error:
            abort(world, error)
    try:
        agent.serve()
    except Exception as error:
        with watched(_MPI_GRACE):  # an abort waits for the launcher too
            abort(world, error)
    if agent.cut_off:
        end_with_daemon()
    end_with_mpi(mpi)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
