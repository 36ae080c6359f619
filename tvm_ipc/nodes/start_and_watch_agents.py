# SPDX-License-Identifier: Apache-2.0
"""The worker pool of a session on several nodes: the controller's side of the agents.

It starts agents and workers, detects deaths, and cleans up.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NoReturn

import tvm_ffi

from tvm_ipc.errors import DeadlineError, IPCError, WorkerDiedError
from tvm_ipc.nodes.admission import Admission, describe_refused
from tvm_ipc.nodes.controller_agent_json_messages import Messages
from tvm_ipc.nodes.find_mpi_installation import Mpi, find_mpi, refuse_launched
from tvm_ipc.nodes.handshake import Key, PeerIdentity
from tvm_ipc.nodes.mpiexec_launcher import Launcher, NodeAddresses
from tvm_ipc.nodes.node_command_under_mpiexec import Allocated
from tvm_ipc.nodes.session_server_in_node_agent import Settings, ranks_of_nodes
from tvm_ipc.nodes.shm_probe import ShmProbe
from tvm_ipc.runtime import config
from tvm_ipc.runtime.process_pool import PoolWithPipes
from tvm_ipc.runtime.start_child_process import (
    describe_exit_code,
    import_path,
    python_module,
    signal_name,
)
from tvm_ipc.runtime.worker_pool_interface import PoolOfNodes, PoolRequest

#: Seconds that agents have to end by themselves: more than they grant their workers and MPI.
_GRACE: Final = 8.0
_ROUND: Final = 0.02
#: Agents do not need TVM's compiler. They do not use Open MPI's shared memory either: each node has
#: one agent, and the files would be left behind if an agent is killed.
_AGENT: Final = ("/usr/bin/env", "TVM_USE_RUNTIME_LIB=1", "OMPI_MCA_btl=^sm")
#: The most letters of a node's name in errors of the native library.
_NAME: Final = 55
#: Seconds to wait for the death of the agent that caused the deaths of others.
_CAUSE_SECONDS: Final = 1.0
#: Seconds within which an agent reports the end of a worker, or its own end is noticed.
_REPORT_SECONDS: Final = 1.5
#: Seconds between two checks for processes that have ended.
_CHECK_SECONDS: Final = 0.1
#: The bytes of a connection's send buffer.
_BUFFER: Final = 1 << 20
#: The share of the buffer that unread commands may fill. Each short command may be a packet, for
#: which the system counts up to fifteen times its bytes.
_SHARE: Final = 16
_open_nodes = tvm_ffi.get_global_func("tvm_ipc.session.open_nodes")
_keep_from_children = tvm_ffi.get_global_func("tvm_ipc.keep_from_children")
_close_kept = tvm_ffi.get_global_func("tvm_ipc.close_kept")
_log: Final = logging.getLogger("tvm_ipc.nodes")


def server_settings(addresses: NodeAddresses, request: PoolRequest) -> Settings:
    """Return the settings that the session servers of all nodes are opened with."""
    hosts = [""] * addresses.count if isinstance(addresses.hosts, int) else addresses.hosts
    ranks = ranks_of_nodes(request.shape[0], addresses.count)
    return Settings(
        [f"{k} at {host}"[:_NAME] if host else str(k) for k, host in enumerate(hosts)],
        [len(own) + (k == 0) for k, own in enumerate(ranks)],
        request.backend,
        request.settings.timeout,
        request.settings.arena_limit or 0,
        request.settings.instruction_set,
        request.flat,
    )


@dataclass
class _Node:
    """The controller's state of a node."""

    number: int
    ranks: tuple[int, ...]
    agent: Messages | None = None
    facts: dict[str, Any] | None = None
    #: Whether the node shares memory with the controller; None until it is known.
    shares_memory: bool | None = None
    processes: dict[int, int] | None = None
    #: The bytes that workers need to join the node's session server.
    invitation: bytes = b""
    #: The number of threads that each worker of the node may use.
    threads: int = 1
    #: Whether the launcher has ended the agent, mostly because another one died.
    ended_by_launcher: bool = False

    def __str__(self) -> str:
        host = f" ({self.facts['host']})" if self.facts else ""
        return f"node {self.number}{host}"

    @property
    def all_ranks(self) -> tuple[int, ...]:
        """The ranks of the node, which for the first node include rank 0."""
        return self.ranks if self.number else (0, *self.ranks)

    @property
    def gone(self) -> bool:
        return self.agent is not None and self.agent.ended

    @property
    def ready(self) -> bool:
        return None not in (self.facts, self.shares_memory, self.processes)


class NodePool(PoolWithPipes, PoolOfNodes):
    """Worker processes on several nodes. Their pipes are connections to this process.

    Parameters
    ----------
    addresses : the nodes.
    request : the workers to start. Its `check` is called repeatedly during the start.
    address : the numeric address of this machine that agents connect to.
    timeout : the seconds for the whole start: to find MPI, and for all agents and workers to join.
    mpi : the MPI to use; found by default.
    program : a program to run instead of the agent, for tests.

    Attributes
    ----------
    nodes : the state of each node.
    connections : the connections to workers, by ranks, until they are handed over as their pipes.
    exit_codes : the exit codes of the workers that have ended, by ranks.

    Raises
    ------
    IPCError
        There is no MPI, or an agent failed or runs other versions. The message has the output of
        the launcher.
    DeadlineError
        A process did not join in time.
    """

    def __init__(
        self,
        addresses: NodeAddresses,
        request: PoolRequest,
        *,
        address: str,
        timeout: float,
        mpi: Mpi | None = None,
        program: Sequence[str] | None = None,
    ) -> None:
        end = time.monotonic() + timeout
        super().__init__()
        #: Without `check`, which refers to the session: the pool would keep it alive.
        self._request = replace(request, check=lambda: None)
        self._addresses = addresses
        self._settings = server_settings(addresses, request)
        ranks = ranks_of_nodes(request.shape[0], addresses.count)
        self.nodes = tuple(_Node(k, tuple(own)) for k, own in enumerate(ranks))
        self.connections: dict[int, socket.socket] = {}
        #: The connections to the session servers, by nodes.
        self._links: dict[int, socket.socket] = {}
        self.exit_codes: dict[int, int] = {}
        self._failure: IPCError | None = None
        self._alarming = False
        self._checked = time.monotonic()
        self._lock = threading.RLock()
        key = Key.new()
        expected = [PeerIdentity(node.number, "agent") for node in self.nodes]
        expected += [PeerIdentity(node.number, "server") for node in self.nodes]
        expected += [PeerIdentity(n.number, "worker", rank) for n in self.nodes for rank in n.ranks]
        with Admission(key, expected, address) as admission, ShmProbe() as probe:
            line = {"key": key.text, "addresses": [admission.address], "timeout": timeout}
            agent = program or [
                *_AGENT,
                *python_module("tvm_ipc.nodes.agent"),
                *(str(addresses.count), str(timeout)),
            ]
            self._launcher = _launch(addresses, json.dumps(line), mpi, agent)
            try:
                self._start(admission, probe, timeout, end, request.check)
            except BaseException:
                for connection in admission.admitted.values():
                    _hang_up(connection)
                self.connections.clear()
                self._links.clear()
                self.finish(0.0)
                raise
        self._launcher.pass_on()
        agents = [node.agent.connection for node in self.nodes if node.agent is not None]
        for connection in [*self.connections.values(), *agents]:
            _keep_from_children(connection.fileno())
        self._hand_over_connections()

    @property
    def threads(self) -> int:
        """The number of threads that each worker may use."""
        return min(node.threads for node in self.nodes)

    @property
    def first_ranks(self) -> tuple[int, ...]:
        """The first rank of each node."""
        ranks = self._settings.ranks
        return tuple(sum(ranks[:node]) for node in range(len(ranks)))

    @property
    def facts(self) -> tuple[dict[str, Any], ...]:
        """The host, address, cores and ranks of each node."""
        return tuple(
            {
                **{name: (node.facts or {}).get(name) for name in ("host", "address", "cores")},
                "ranks": node.all_ranks,
            }
            for node in self.nodes
        )

    def where(self, rank: int) -> str:
        """Return the name of a worker's node, for error messages."""
        return str(next(node for node in self.nodes if rank in node.all_ranks))

    def open(self, session: Any, device_ids: Any, timeout: float, room: int) -> None:
        """Open the controller's session server, and connect it to those of the nodes."""
        links = [self._links.pop(node.number).detach() for node in self.nodes]
        _open_nodes(
            session,
            self._settings.backend,
            device_ids,
            timeout,
            room,
            list(self._settings.names),
            tvm_ffi.Shape(self._settings.ranks),
            [node.invitation for node in self.nodes],
            tvm_ffi.Shape(links),
        )

    def room(self) -> int:
        """Return how many bytes of commands a worker may leave unread before a write blocks."""
        return self._smallest_buffer // _SHARE

    def _hand_over_connections(self) -> None:
        """Make the connections the pipes of the workers, which are read and written alike."""
        sizes = []
        for connection in self.connections.values():
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
            sizes.append(connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF))
        self._smallest_buffer = min(sizes, default=_BUFFER)
        files = {rank: connection.fileno() for rank, connection in self.connections.items()}
        self.offer({rank: (file, file) for rank, file in files.items()})
        for connection in self.connections.values():
            connection.detach()
        self.connections.clear()

    # ---- deaths ---------------------------------------------------------------------------

    def check(self) -> None:
        """Raise if a worker, an agent or the launcher has ended, and again at each later call."""
        with self._lock:
            if self._failure is None:
                try:
                    self._receive(None)
                    self._launcher.check()
                except IPCError as error:
                    self._failure = error
            if self._failure is not None:
                raise self._failure

    def ended(self, wait: Iterable[int] = ()) -> dict[int, int]:
        """Return the exit codes of the workers whose end the agents have reported."""
        with self._lock:
            for node in self.nodes:
                self._receive_from(node, None)
            return dict(self.exit_codes)

    def alarming(self) -> bool:
        """Return whether an agent or the launcher has ended; checked every `_CHECK_SECONDS`."""
        if not self._alarming and time.monotonic() > self._checked + _CHECK_SECONDS:
            self._checked = time.monotonic()
            try:
                self.check()
            except WorkerDiedError:
                # The session servers report the death of a worker themselves, with more details.
                self._alarming = not self.exit_codes
            except IPCError:
                self._alarming = True
        return self._alarming

    def cause(self) -> tuple[str, tuple[int, ...]] | None:
        """Return a description of the death, and the ranks that died, if they are known."""
        end = time.monotonic() + _REPORT_SECONDS
        while time.monotonic() < end:
            try:
                self.check()
            except WorkerDiedError as error:
                return str(error), error.ranks
            except IPCError as error:
                return str(error), ()
            time.sleep(_ROUND)
        return None

    # ---- the end --------------------------------------------------------------------------

    def kill(self) -> None:
        """Ask the agents to kill their workers."""
        with self._lock:
            for node in self.nodes:
                if node.agent is not None:
                    node.agent.send("kill")

    def join(self, seconds: float) -> None:
        """Wait for all workers to end; kill those that take longer."""
        end = time.monotonic() + seconds
        while self._any_left() and time.monotonic() < end:
            time.sleep(_ROUND)
        if self._any_left():
            self.kill()

    def _any_left(self) -> bool:
        with self._lock:
            num_workers = sum(len(node.ranks) for node in self.nodes)
            return len(self.ended()) < num_workers and not all(n.gone for n in self.nodes)

    def finish(self, seconds: float | None = None) -> None:
        """End workers, agents and the launcher, which have some seconds to end by themselves.

        The descriptors of pipes stay open, and lead to /dev/null: Disco writes to them until its
        session object is destroyed, and a failed write would end the program.
        """
        self.mute()
        for connection in self._links.values():  # those that no session server has taken over
            connection.close()
        self._links.clear()
        for node in self.nodes:
            if node.agent is not None:
                node.agent.ended = True
                _hang_up(node.agent.connection)
        self._launcher.stop(_GRACE if seconds is None else seconds)

    # ---- the start ------------------------------------------------------------------------

    def _start(
        self,
        admission: Admission,
        probe: ShmProbe,
        timeout: float,
        end: float,
        check: Callable[[], None],
    ) -> None:
        """Admit agents, session servers and workers, and answer agents, until all are ready."""
        while not all(node.ready for node in self.nodes) or admission.missing:
            for peer, connection in admission.poll(_ROUND).items():
                if peer.role == "agent":
                    self._add_agent(self.nodes[peer.node], connection, probe)
                elif peer.role == "server":
                    self._links[peer.node] = connection
                else:
                    self.connections[peer.rank] = connection
            if not admission.missing:
                time.sleep(_ROUND)
            if admission.refused:
                raise IPCError(describe_refused(admission))
            self._receive(probe)
            self._launcher.check()
            check()
            if time.monotonic() > end:
                self._raise_late(admission, timeout)

    def _raise_late(self, admission: Admission, timeout: float) -> NoReturn:
        """Raise a DeadlineError that names the agents, or else the processes, that are missing."""
        missing = admission.missing
        absent = {peer.node for peer in missing if peer.role == "agent"}
        late = [str(peer) for peer in missing if peer.role == "agent" or peer.node not in absent]
        late = late or [str(node) for node in self.nodes if not node.ready]
        raise DeadlineError(
            f"nodes did not start within {timeout:g} s: {', '.join(late)}; {admission.pending} "
            f"connections to {admission.address[0]}:{admission.address[1]} came without the "
            f"secret. {self._launcher.asked}. The launcher printed:\n"
            f"{self._launcher.output or '(nothing)'}"
        )

    def _add_agent(self, node: _Node, connection: socket.socket, probe: ShmProbe) -> None:
        node.agent = Messages(connection)
        node.agent.send("read", path=str(probe.path))

    def _start_node(self, node: _Node) -> None:
        """Let an agent start its workers, after its facts and its answer to the probe arrived."""
        assert node.agent is not None and node.facts is not None
        if node.number == 0 and not node.shares_memory:
            raise IPCError(
                f"hosts: {node} does not share memory with this program; the first node must be "
                "this machine, because worker 0 is a thread of this program"
            )
        num_workers, num_groups = self._request.shape
        sharing = num_workers if self._addresses.one_machine else len(node.all_ranks)
        node.threads = config.threads_per_worker(sharing, int(node.facts["cores"]))
        node.agent.send(
            "start",
            ranks=node.ranks,
            num_workers=num_workers,
            num_groups=num_groups,
            compiler=self._request.compiler,
            threads=node.threads,
            environment=config.settings_for_nodes(),
            path=import_path(),
            server=self._settings.to_message,
        )

    def _receive(self, probe: ShmProbe | None) -> None:
        """Process the messages of all agents; raise if a worker or an agent has died.

        Parameters
        ----------
        probe : the shared-memory probe during the start; None later.
        """
        for node in self.nodes:
            self._receive_from(node, probe)
        if self.exit_codes:
            deaths = [
                f"worker {rank} of {self.where(rank)} {_describe_end(code)}"
                for rank, code in sorted(self.exit_codes.items())
            ]
            raise WorkerDiedError("; ".join(deaths), tuple(sorted(self.exit_codes)))
        gone = [node for node in self.nodes if node.gone]
        end = time.monotonic() + _CAUSE_SECONDS
        while gone and all(n.ended_by_launcher for n in gone) and time.monotonic() < end:
            time.sleep(_ROUND)  # the agent that died first is not known yet
            for node in self.nodes:
                self._receive_from(node, probe)
            gone = [node for node in self.nodes if node.gone]
        causes = [node for node in gone if not node.ended_by_launcher]
        if gone and not causes:
            self._launcher.check()
        if gone:
            dead_nodes = causes or gone
            ranks = tuple(sorted(rank for node in dead_nodes for rank in node.all_ranks))
            output = self._launcher.output
            raise WorkerDiedError(
                f"the agent of {' and of '.join(map(str, dead_nodes))} is gone, and with it "
                f"workers {list(ranks)}"
                + (f"\n{self._launcher.asked}" if probe is not None else "")
                + (f"\nThe launcher printed:\n{output}" if output else ""),
                ranks,
            )

    def _receive_from(self, node: _Node, probe: ShmProbe | None) -> None:
        if node.agent is not None:
            for message in node.agent.receive():
                self._process(node, message, probe)

    def _process(self, node: _Node, message: dict[str, Any], probe: ShmProbe | None) -> None:
        kind = message.pop("kind")
        try:
            if kind == "facts":
                node.facts = {**message, "host": str(message["host"])}
                _log.debug("%s: %s", node, message)
            elif kind == "read" and probe is not None:
                node.shares_memory = message["digest"] == probe.digest
                self._start_node(node)
            elif kind == "started":
                node.invitation = bytes.fromhex(message["invitation"])
                node.processes = {int(rank): int(p) for rank, p in message["processes"].items()}
            elif kind == "ended":
                if message["rank"] not in node.ranks:
                    raise ValueError(f"rank {message['rank']} belongs to another node")
                self.exit_codes[message["rank"]] = int(message["code"])
            elif kind == "ended by the launcher":
                node.ended_by_launcher = True
            elif kind == "failed":
                raise IPCError(f"the agent of {node} failed: {message['why']}")
            else:
                raise IPCError(f"the agent of {node} sent the unexpected message {kind!r}")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise IPCError(
                f"the agent of {node} sent a malformed message {kind!r}: {error!r}"
            ) from None


def _launch(
    addresses: NodeAddresses, first_line: str, mpi: Mpi | None, program: Sequence[str]
) -> Launcher | Allocated:
    if addresses.allocated:
        return Allocated(first_line)
    refuse_launched()
    return Launcher(find_mpi() if mpi is None else mpi, addresses, program, first_line)


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)  # ends it for duplicates of the descriptor too
    if connection.fileno() >= 0:
        _close_kept(connection.detach())


def _describe_end(code: int) -> str:
    killer = signal_name(code)
    return f"died of {killer}" if killer else f"ended with {describe_exit_code(code)}"
