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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from tvm_ipc.errors import DeadlineError, IPCError, WorkerDiedError
from tvm_ipc.nodes.door import Door
from tvm_ipc.nodes.handshake import Key, Place
from tvm_ipc.nodes.launcher import Launcher, Places
from tvm_ipc.nodes.messages import Messages
from tvm_ipc.nodes.mpi import Mpi, find_mpi, refuse_launched
from tvm_ipc.nodes.proof import Proof

#: Seconds that agents have to end by themselves: their workers' and MPI's, and some.
_GRACE: Final = 8.0
_ROUND: Final = 0.02
#: An agent compiles nothing. A node has one: Open MPI's shared memory would only be left behind
#: where an agent is killed, or alone under another MPI's launcher.
_AGENT: Final = (
    *("/usr/bin/env", "TVM_USE_RUNTIME_LIB=1", "OMPI_MCA_btl=^sm"),
    *(sys.executable, "-m", "tvm_ipc.nodes.agent"),
)
#: Seconds in which the death of an agent is heard after those that it caused.
_CAUSE_SECONDS: Final = 1.0
_log: Final = logging.getLogger("tvm_ipc.nodes")


@dataclass(frozen=True)
class Workers:
    """The workers that agents are to start.

    Attributes
    ----------
    ranks : of each node, those of its workers.
    num_workers, num_groups : of the session.
    compiler : whether workers load all of TVM.
    """

    ranks: Sequence[Sequence[int]]
    num_workers: int
    num_groups: int = 1
    compiler: bool = False


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
    ) -> None:
        if len(workers.ranks) != places.count:
            raise IPCError(f"{places.count} nodes have ranks of {len(workers.ranks)}")
        refuse_launched()
        mpi = find_mpi() if mpi is None else mpi
        self._workers = workers
        self.nodes = tuple(_Node(k, tuple(ranks)) for k, ranks in enumerate(workers.ranks))
        #: Of each rank, the connection that is its pipe.
        self.pipes: dict[int, socket.socket] = {}
        self._ended: dict[int, int] = {}
        self._why: IPCError | None = None
        key = Key.new()
        expected = [Place(node.number, "agent") for node in self.nodes]
        expected += [Place(n.number, "worker", rank) for n in self.nodes for rank in n.ranks]
        with Door(key, expected, address) as door, Proof() as proof:
            told = {"key": key.text, "addresses": [door.address], "timeout": timeout}
            command = program or [*_AGENT, str(places.count)]
            self._launcher = Launcher(mpi, places, command, json.dumps(told))
            try:
                self._start(door, proof, timeout)
            except BaseException:
                for connection in door.joined.values():
                    _hang_up(connection)
                self.pipes.clear()
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

    def close(self, seconds: float = _GRACE) -> None:
        """End workers, agents and the launcher, for which they have so long.

        The descriptors of pipes stay, and lead nowhere: Disco writes to them until its session
        object is gone, and a write that fails would be the program's end.
        """
        nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        try:
            for connection in self.pipes.values():
                own = connection.dup()
                os.dup2(nowhere, connection.fileno(), inheritable=False)
                _hang_up(own)
        finally:
            os.close(nowhere)
        for node in self.nodes:
            if node.agent is not None:
                _hang_up(node.agent.connection)
        self._launcher.stop(seconds)

    def forget(self) -> None:
        """Close the descriptors of the pipes, once nobody uses them."""
        for connection in self.pipes.values():
            connection.close()
        self.pipes.clear()

    def _start(self, door: Door, proof: Proof, timeout: float) -> None:
        end = time.monotonic() + timeout
        while not all(node.ready for node in self.nodes) or door.missing:
            for place, connection in door.poll(_ROUND).items():
                if place.role == "agent":
                    self._greet(self.nodes[place.node], connection, proof)
                else:
                    self.pipes[place.rank] = connection
            if not door.missing:
                time.sleep(_ROUND)
            if door.refused:
                raise IPCError("; ".join(f"{who} {why}" for who, why in door.refused.items()))
            self._hear(proof)
            self._launcher.check()
            if time.monotonic() > end:
                late = [*map(str, door.missing)] or [str(n) for n in self.nodes if not n.ready]
                raise DeadlineError(
                    f"nodes did not start within {timeout:g} s: {', '.join(late)}; "
                    f"{door.strangers} connections to {door.address[0]}:{door.address[1]} came "
                    f"without the secret. The launcher said:\n{self._launcher.said or '(nothing)'}"
                )

    def _greet(self, node: _Node, connection: socket.socket, proof: Proof) -> None:
        workers = self._workers
        node.agent = Messages(connection)
        node.agent.send("read", path=str(proof.path))
        node.agent.send(
            "start",
            ranks=node.ranks,
            num_workers=workers.num_workers,
            num_groups=workers.num_groups,
            compiler=workers.compiler,
        )

    def _hear(self, proof: Proof | None) -> None:
        """Hear all agents; raise if one tells of a death or is gone."""
        for node in self.nodes:
            self._hear_agent(node, proof)
        if self._ended:
            where = {rank: node for node in self.nodes for rank in node.ranks}
            dead = sorted(self._ended.items())
            told = [f"worker {rank} of {where[rank]} {_how(code)}" for rank, code in dead]
            raise WorkerDiedError("; ".join(told), tuple(sorted(self._ended)))
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
            ranks = tuple(sorted(rank for node in which for rank in node.ranks))
            raise WorkerDiedError(
                f"the agent of {' and of '.join(map(str, which))} is gone, and with it workers "
                f"{list(ranks)}. The launcher said:\n{self._launcher.said or '(nothing)'}",
                ranks,
            )

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
            elif what == "started":
                node.processes = {int(rank): int(p) for rank, p in message["processes"].items()}
            elif what == "ended":
                if message["rank"] not in node.ranks:
                    raise ValueError(f"rank {message['rank']} is another node's")
                self._ended[message["rank"]] = int(message["code"])
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


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)  # whoever else has the descriptor, or waits on it
    connection.close()


def _how(code: int) -> str:
    return f"ended with exit code {code}" if code >= 0 else f"died of {signal.Signals(-code).name}"
