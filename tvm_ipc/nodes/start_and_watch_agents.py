# SPDX-License-Identifier: Apache-2.0
"""The controller's side of nodes: starts agents and workers, detects deaths, and cleans up."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

from tvm_ipc.errors import DeadlineError, IPCError, WorkerDiedError
from tvm_ipc.nodes.admission import Admission, describe_refused
from tvm_ipc.nodes.controller_agent_json_messages import Messages
from tvm_ipc.nodes.find_mpi_installation import Mpi, find_mpi, refuse_launched
from tvm_ipc.nodes.handshake import Key, PeerIdentity
from tvm_ipc.nodes.mpiexec_launcher import Launcher, NodeAddresses
from tvm_ipc.nodes.node_command_under_mpiexec import Allocated
from tvm_ipc.nodes.session_server_in_node_agent import Settings
from tvm_ipc.nodes.shm_probe import ShmProbe
from tvm_ipc.packed_functions import backend_of_nodes
from tvm_ipc.runtime import config
from tvm_ipc.runtime.start_child_process import (
    describe_exit_code,
    import_path,
    python_module,
)

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
_log: Final = logging.getLogger("tvm_ipc.nodes")


@dataclass(frozen=True)
class Workers:
    """The workers that agents start, and the settings of the session servers that the workers join.

    Attributes
    ----------
    ranks : the ranks of the worker processes of each node. Worker 0, of the first node, is a thread
        of the controller, and not among them.
    num_workers, num_groups : the numbers of workers and groups of the session.
    compiler : whether workers load TVM with its compiler.
    backend, timeout, arena_limit, instruction_set : settings of the session; 0 for the configured
        value.
    flat : whether sums across nodes have the same bits as on one machine.
    """

    ranks: Sequence[Sequence[int]]
    num_workers: int
    num_groups: int = 1
    compiler: bool = False
    backend: str = field(default_factory=backend_of_nodes)
    timeout: float = 0.0
    arena_limit: int = 0
    instruction_set: str = "auto"
    flat: bool = False

    def settings(self, addresses: NodeAddresses) -> Settings:
        """Return the settings that the session servers are opened with."""
        hosts = [""] * addresses.count if isinstance(addresses.hosts, int) else addresses.hosts
        return Settings(
            [f"{k} at {host}"[:_NAME] if host else str(k) for k, host in enumerate(hosts)],
            [len(ranks) + (k == 0) for k, ranks in enumerate(self.ranks)],
            self.backend,
            self.timeout,
            self.arena_limit,
            self.instruction_set,
            self.flat,
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
    def gone(self) -> bool:
        return self.agent is not None and self.agent.ended

    @property
    def ready(self) -> bool:
        return None not in (self.facts, self.shares_memory, self.processes)


class Nodes:
    """The agents and workers of all nodes. The pipes of workers are connections to this process.

    Parameters
    ----------
    addresses : the nodes.
    workers : the workers to start.
    address : the numeric address of this machine that agents connect to.
    timeout : the seconds for the whole start: to find MPI, and for all agents and workers to join.
    mpi : the MPI to use; found by default.
    program : a program to run instead of the agent, for tests.
    check : called repeatedly during the start; an exception that it raises ends the start.

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
        workers: Workers,
        *,
        address: str,
        timeout: float,
        mpi: Mpi | None = None,
        program: Sequence[str] | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        end = time.monotonic() + timeout
        if len(workers.ranks) != addresses.count:
            raise IPCError(
                f"there are {addresses.count} nodes, and ranks for {len(workers.ranks)}; pass one "
                "list of ranks for each node"
            )
        self._workers = workers
        self._addresses = addresses
        self.settings = workers.settings(addresses)
        self.nodes = tuple(_Node(k, tuple(ranks)) for k, ranks in enumerate(workers.ranks))
        #: The connections that are the pipes of the workers, by ranks.
        self.pipes: dict[int, socket.socket] = {}
        #: The connections to the session servers, by nodes.
        self.links: dict[int, socket.socket] = {}
        #: The exit codes of the workers that have ended, by ranks.
        self.ended: dict[int, int] = {}
        self._close: Callable[[int], None] = os.close
        self._failure: IPCError | None = None
        self._muted = False
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
                self._start(admission, probe, timeout, end, check)
            except BaseException:
                for connection in admission.admitted.values():
                    _hang_up(connection)
                self.pipes.clear()
                self.links.clear()
                self.close(0.0)
                raise
        self._launcher.pass_on()

    def check(self) -> None:
        """Raise if a worker, an agent or the launcher has ended, and again at each later call."""
        if self._failure is None:
            try:
                self._receive(None)
                self._launcher.check()
            except IPCError as error:
                self._failure = error
        if self._failure is not None:
            raise self._failure

    def keep(self, keep: Callable[[int], None], close: Callable[[int], None]) -> None:
        """Close the connections in forked children, with two functions of the native library.

        Parameters
        ----------
        keep : registers a descriptor.
        close : closes a descriptor, and removes it from the registered ones.
        """
        self._close = close
        agents = [node.agent.connection for node in self.nodes if node.agent is not None]
        for connection in [*self.pipes.values(), *agents]:
            keep(connection.fileno())

    def update(self) -> None:
        """Process the messages of agents that have arrived, which updates `ended`."""
        for node in self.nodes:
            self._receive_from(node, None)

    @property
    def gone(self) -> bool:
        """True if no agent is left."""
        return all(node.gone for node in self.nodes)

    def kill(self) -> None:
        """Ask the agents to kill their workers."""
        for node in self.nodes:
            if node.agent is not None:
                node.agent.send("kill")

    def where(self, rank: int) -> str:
        """Return the name of a worker's node, for error messages."""
        return str(next((node for node in self.nodes if rank in node.ranks), self.nodes[0]))

    def close(self, seconds: float = _GRACE) -> None:
        """End workers, agents and the launcher, which have some seconds to end by themselves.

        The descriptors of pipes stay open, and lead to /dev/null: Disco writes to them until its
        session object is destroyed, and a failed write would end the program.
        """
        self.mute()
        for connection in self.links.values():  # those that no session server has taken over
            connection.close()
        self.links.clear()
        for node in self.nodes:
            if node.agent is not None:
                node.agent.ended = True
                _hang_up(node.agent.connection, self._close)
        self._launcher.stop(seconds)

    def mute(self) -> None:
        """End the connections to workers, and discard what is still written to their pipes."""
        if self._muted:
            return
        self._muted = True
        devnull = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        try:
            for connection in self.pipes.values():
                duplicate = connection.dup()
                os.dup2(devnull, connection.fileno(), inheritable=False)
                _hang_up(duplicate)
        finally:
            os.close(devnull)

    def forget(self) -> None:
        """Close the descriptors of the pipes, when they are not used any more."""
        for connection in self.pipes.values():
            self._close(connection.detach())
        self.pipes.clear()

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
                    self.links[peer.node] = connection
                else:
                    self.pipes[peer.rank] = connection
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
        workers = self._workers
        shared = workers.num_workers if self._addresses.one_machine else 0
        sharing = shared or self.settings.ranks[node.number]
        node.threads = config.threads_per_worker(sharing, int(node.facts["cores"]))
        node.agent.send(
            "start",
            ranks=node.ranks,
            num_workers=workers.num_workers,
            num_groups=workers.num_groups,
            compiler=workers.compiler,
            threads=node.threads,
            environment=config.settings_for_nodes(),
            path=import_path(),
            server=self.settings.to_message,
        )

    def _receive(self, probe: ShmProbe | None) -> None:
        """Process the messages of all agents; raise if a worker or an agent has died.

        Parameters
        ----------
        probe : the shared-memory probe during the start; None later.
        """
        for node in self.nodes:
            self._receive_from(node, probe)
        if self.ended:
            node_of = {rank: node for node in self.nodes for rank in node.ranks}
            dead = sorted(self.ended.items())
            deaths = [
                f"worker {rank} of {node_of[rank]} {_describe_end(code)}" for rank, code in dead
            ]
            raise WorkerDiedError("; ".join(deaths), tuple(sorted(self.ended)))
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
            ranks = tuple(sorted(rank for node in dead_nodes for rank in self._all_ranks(node)))
            output = self._launcher.output
            raise WorkerDiedError(
                f"the agent of {' and of '.join(map(str, dead_nodes))} is gone, and with it "
                f"workers {list(ranks)}"
                + (f"\n{self._launcher.asked}" if probe is not None else "")
                + (f"\nThe launcher printed:\n{output}" if output else ""),
                ranks,
            )

    @staticmethod
    def _all_ranks(node: _Node) -> tuple[int, ...]:
        """Return the ranks of a node, which for the first node include rank 0."""
        return node.ranks if node.number else (0, *node.ranks)

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
                self.ended[message["rank"]] = int(message["code"])
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


def _hang_up(connection: socket.socket, close: Callable[[int], None] = os.close) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)  # ends it for duplicates of the descriptor too
    if connection.fileno() >= 0:
        close(connection.detach())


def _describe_end(code: int) -> str:
    if code < 0:
        return f"died of {signal.Signals(-code).name}"
    return f"ended with {describe_exit_code(code)}"
