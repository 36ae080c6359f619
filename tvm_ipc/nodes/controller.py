# SPDX-License-Identifier: Apache-2.0
"""The controller's side of nodes: starts agents and workers, hears of deaths, leaves nothing."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tvm_ipc.contract import backend_of_nodes
from tvm_ipc.errors import DeadlineError, IPCError, WorkerDiedError
from tvm_ipc.nodes.allocation import Allocated
from tvm_ipc.nodes.door import Door
from tvm_ipc.nodes.handshake import Key, Place
from tvm_ipc.nodes.hub import Settings
from tvm_ipc.nodes.launcher import Launcher, Places
from tvm_ipc.nodes.messages import Messages
from tvm_ipc.nodes.mpi import Mpi, find_mpi, refuse_launched
from tvm_ipc.nodes.proof import Proof
from tvm_ipc.runtime import config
from tvm_ipc.runtime.starting import import_path

#: Seconds that agents have to end by themselves: their workers' and MPI's, and some.
_GRACE: Final = 8.0
_ROUND: Final = 0.02
#: An agent compiles nothing. A node has one: Open MPI's shared memory would only be left behind
#: where an agent is killed, or alone under another MPI's launcher.
_AGENT: Final = (
    *("/usr/bin/env", "TVM_USE_RUNTIME_LIB=1", "OMPI_MCA_btl=^sm"),
    *(sys.executable, "-m", "tvm_ipc.nodes.agent"),
)
#: Letters of a node's name in errors of the native library.
_NAME: Final = 55
#: Seconds in which the death of an agent is heard after those that it caused.
_CAUSE_SECONDS: Final = 1.0
_log: Final = logging.getLogger("tvm_ipc.nodes")


@dataclass(frozen=True)
class Workers:
    """The workers that agents are to start, and the hubs that these join.

    Attributes
    ----------
    ranks : of each node, those of its workers. Worker 0, of the first node, is a thread of the
        controller.
    num_workers, num_groups : of the session.
    compiler : whether workers load all of TVM.
    backend, timeout, arena_limit, instruction_set : of the session; 0 means the configured value.
    flat : whether sums across nodes have one machine's bits.
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

    def settings(self, places: Places) -> Settings:
        """Return what the hubs are opened with."""
        hosts = [""] * places.count if isinstance(places.hosts, int) else places.hosts
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
    """What the controller knows of a node."""

    number: int
    ranks: tuple[int, ...]
    agent: Messages | None = None
    facts: dict[str, Any] | None = None
    #: Whether a file of the controller's shared memory is there too.
    shares_memory: bool | None = None
    processes: dict[int, int] | None = None
    #: What its workers join its hub with.
    invitation: bytes = b""
    #: How many threads each of its workers may use.
    threads: int = 1
    #: The launcher has ended the agent, mostly since another one died.
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
    """Agents on nodes, and their workers, whose pipes are connections to this process.

    Parameters
    ----------
    address : the numeric address of this machine that agents connect to.
    timeout : seconds for all agents and workers to join.
    program : what to run instead of the agent, for tests.
    check : called now and then meanwhile; may raise what ends the start.

    Raises
    ------
    IPCError
        There is no MPI, an agent failed, or runs other versions; it says what the launcher said.
    DeadlineError
        Somebody did not join in time; it names who.
    """

    def __init__(
        self,
        places: Places,
        workers: Workers,
        *,
        address: str,
        timeout: float,
        mpi: Mpi | None = None,
        program: Sequence[str] | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        if len(workers.ranks) != places.count:
            raise IPCError(f"{places.count} nodes have ranks of {len(workers.ranks)}")
        self._workers = workers
        self._places = places
        self.settings = workers.settings(places)
        self.nodes = tuple(_Node(k, tuple(ranks)) for k, ranks in enumerate(workers.ranks))
        #: Of each rank, the connection that is its pipe.
        self.pipes: dict[int, socket.socket] = {}
        #: Of each node, the connection to its hub.
        self.links: dict[int, socket.socket] = {}
        #: How workers have ended.
        self.ended: dict[int, int] = {}
        self._close: Callable[[int], None] = os.close
        self._why: IPCError | None = None
        self._muted = False
        key = Key.new()
        expected = [Place(node.number, "agent") for node in self.nodes]
        expected += [Place(node.number, "hub") for node in self.nodes]
        expected += [Place(n.number, "worker", rank) for n in self.nodes for rank in n.ranks]
        with Door(key, expected, address) as door, Proof() as proof:
            told = {"key": key.text, "addresses": [door.address], "timeout": timeout}
            agent = program or [*_AGENT, str(places.count), str(timeout)]
            self._launcher = _launch(places, json.dumps(told), mpi, agent)
            try:
                self._start(door, proof, timeout, check)
            except BaseException:
                for connection in door.joined.values():
                    _hang_up(connection)
                self.pipes.clear()
                self.links.clear()
                self.close(0.0)
                raise
        self._launcher.pass_on()

    def check(self) -> None:
        """Raise if a worker, an agent or the launcher has ended; from then on always."""
        if self._why is None:
            try:
                self._hear(None)
                self._launcher.check()
            except IPCError as error:
                self._why = error
        if self._why is not None:
            raise self._why

    def keep(self, keep: Callable[[int], None], close: Callable[[int], None]) -> None:
        """Keep connections from processes that are forked: by these functions of the library."""
        self._close = close
        agents = [node.agent.connection for node in self.nodes if node.agent is not None]
        for connection in [*self.pipes.values(), *agents]:
            keep(connection.fileno())

    def hear(self) -> None:
        """Take note of what agents have said; who has ended is in `ended`."""
        for node in self.nodes:
            self._hear_agent(node, None)

    @property
    def gone(self) -> bool:
        """Whether no agent is left to say anything."""
        return all(node.gone for node in self.nodes)

    def kill(self) -> None:
        """Kill the workers, those that agents can reach."""
        for node in self.nodes:
            if node.agent is not None:
                node.agent.send("kill")

    def where(self, rank: int) -> str:
        """Return the node of a worker, as errors name it."""
        return str(next((node for node in self.nodes if rank in node.ranks), self.nodes[0]))

    def close(self, seconds: float = _GRACE) -> None:
        """End workers, agents and the launcher, for which they have so long.

        The descriptors of pipes stay, and lead nowhere: Disco writes to them until its session
        object is gone, and a write that fails would be the program's end.
        """
        self.mute()
        for connection in self.links.values():  # that no hub has taken
            connection.close()
        self.links.clear()
        for node in self.nodes:
            if node.agent is not None:
                node.agent.ended = True
                _hang_up(node.agent.connection, self._close)
        self._launcher.stop(seconds)

    def mute(self) -> None:
        """Let what is still written to workers go nowhere, and their connections end."""
        if self._muted:
            return
        self._muted = True
        nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        try:
            for connection in self.pipes.values():
                own = connection.dup()
                os.dup2(nowhere, connection.fileno(), inheritable=False)
                _hang_up(own)
        finally:
            os.close(nowhere)

    def forget(self) -> None:
        """Close the descriptors of the pipes, once nobody uses them."""
        for connection in self.pipes.values():
            self._close(connection.detach())
        self.pipes.clear()

    def _start(self, door: Door, proof: Proof, timeout: float, check: Callable[[], None]) -> None:
        end = time.monotonic() + timeout
        while not all(node.ready for node in self.nodes) or door.missing:
            for place, connection in door.poll(_ROUND).items():
                if place.role == "agent":
                    self._greet(self.nodes[place.node], connection, proof)
                elif place.role == "hub":
                    self.links[place.node] = connection
                else:
                    self.pipes[place.rank] = connection
            if not door.missing:
                time.sleep(_ROUND)
            if door.refused:
                raise IPCError("; ".join(f"{who} {why}" for who, why in door.refused.items()))
            self._hear(proof)
            self._launcher.check()
            check()
            if time.monotonic() > end:
                absent = {p.node for p in door.missing if p.role == "agent"}
                late = [str(p) for p in door.missing if p.role == "agent" or p.node not in absent]
                late = late or [str(node) for node in self.nodes if not node.ready]
                raise DeadlineError(
                    f"nodes did not start within {timeout:g} s: {', '.join(late)}; "
                    f"{door.strangers} connections to {door.address[0]}:{door.address[1]} came "
                    f"without the secret. The launcher said:\n{self._launcher.said or '(nothing)'}"
                )

    def _greet(self, node: _Node, connection: socket.socket, proof: Proof) -> None:
        node.agent = Messages(connection)
        node.agent.send("read", path=str(proof.path))

    def _let_start(self, node: _Node) -> None:
        """The agent has told its facts, and whether it shares memory with this process."""
        assert node.agent is not None and node.facts is not None
        if node.number == 0 and not node.shares_memory:
            raise IPCError(
                f"hosts: the first node is to be on this machine, for worker 0 is a thread of "
                f"this program; {node} has other shared memory"
            )
        workers = self._workers
        shared = workers.num_workers if self._places.one_machine else 0
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
            hub=self.settings.told,
        )

    def _hear(self, proof: Proof | None) -> None:
        """Hear all agents; raise if one tells of a death or is gone."""
        for node in self.nodes:
            self._hear_agent(node, proof)
        if self.ended:
            where = {rank: node for node in self.nodes for rank in node.ranks}
            dead = sorted(self.ended.items())
            told = [f"worker {rank} of {where[rank]} {_how(code)}" for rank, code in dead]
            raise WorkerDiedError("; ".join(told), tuple(sorted(self.ended)))
        gone = [node for node in self.nodes if node.gone]
        end = time.monotonic() + _CAUSE_SECONDS
        while gone and all(n.ended_by_launcher for n in gone) and time.monotonic() < end:
            time.sleep(_ROUND)  # the cause is on its way
            for node in self.nodes:
                self._hear_agent(node, proof)
            gone = [node for node in self.nodes if node.gone]
        causes = [node for node in gone if not node.ended_by_launcher]
        if gone and not causes:
            self._launcher.check()
        if gone:
            which = causes or gone
            ranks = tuple(sorted(rank for node in which for rank in self._all_ranks(node)))
            raise WorkerDiedError(
                f"the agent of {' and of '.join(map(str, which))} is gone, and with it workers "
                f"{list(ranks)}"
                + (f"\nThe launcher said:\n{said}" if (said := self._launcher.said) else ""),
                ranks,
            )

    @staticmethod
    def _all_ranks(node: _Node) -> tuple[int, ...]:
        """Those of its workers; the first node has rank 0 too."""
        return node.ranks if node.number else (0, *node.ranks)

    def _hear_agent(self, node: _Node, proof: Proof | None) -> None:
        if node.agent is not None:
            for message in node.agent.hear():
                self._take(node, message, proof)

    def _take(self, node: _Node, message: dict[str, Any], proof: Proof | None) -> None:
        what = message.pop("what")
        try:
            if what == "facts":
                node.facts = {**message, "host": str(message["host"])}
                _log.debug("%s: %s", node, message)
            elif what == "read" and proof is not None:
                node.shares_memory = message["digest"] == proof.digest
                self._let_start(node)
            elif what == "started":
                node.invitation = bytes.fromhex(message["invitation"])
                node.processes = {int(rank): int(p) for rank, p in message["processes"].items()}
            elif what == "ended":
                if message["rank"] not in node.ranks:
                    raise ValueError(f"rank {message['rank']} is another node's")
                self.ended[message["rank"]] = int(message["code"])
            elif what == "ended by the launcher":
                node.ended_by_launcher = True
            elif what == "failed":
                raise IPCError(f"the agent of {node} failed: {message['why']}")
            else:
                raise IPCError(f"the agent of {node} says {what!r}, which nobody knows")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise IPCError(
                f"the agent of {node} says {what!r} without what it needs: {error}"
            ) from None


def _launch(
    places: Places, first_line: str, mpi: Mpi | None, program: Sequence[str]
) -> Launcher | Allocated:
    if places.allocated:
        return Allocated(first_line)
    refuse_launched()
    return Launcher(find_mpi() if mpi is None else mpi, places, program, first_line)


def _hang_up(connection: socket.socket, close: Callable[[int], None] = os.close) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)  # whoever else has the descriptor, or waits on it
    if connection.fileno() >= 0:
        close(connection.detach())


def _how(code: int) -> str:
    return f"ended with exit code {code}" if code >= 0 else f"died of {signal.Signals(-code).name}"
