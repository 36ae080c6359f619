# SPDX-License-Identifier: Apache-2.0
"""A reduction across nodes: shared memory inside of a node, messages between the nodes.

Mirrors csrc/mpi/pipelined_internode_reduce.cc and reduction_slice_leader.cc with one hop: on each
of two nodes an owner of a lane and one more member. In each turn both show their part of a piece,
and the owner what has come out of an earlier one, in one of two staging buffers by the step's
parity; they meet; then the owner says what it read to the other node, out of a buffer of its wire,
and both copy what came out. The network takes messages whenever it likes, in order, out of the
buffers and into them.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from tests.model.model_checker import Memory, Model, Step, expect

NODES = (0, 1)


@dataclass(frozen=True)
class Protocol:
    """The protocol as it is built; every other value is a mutation."""

    pieces: int = 3
    depth: int = 2
    stages: int = 2
    buffers: int = 2
    waits_until_sent: bool = True
    ends_before_it_meets: bool = True
    reads_after_it_meets: bool = True


@dataclass(frozen=True)
class Node:
    """Writes what the owner and the other member of a node do."""

    number: int
    protocol: Protocol

    def at(self, what: str, who: str = "", number: int = 0) -> Hashable:
        return (what, self.number, who, number)

    def cells(self) -> dict[Hashable, Any]:
        stages, buffers = range(self.protocol.stages), range(self.protocol.buffers)
        members = ("owner", "member")
        return {
            **{self.at("step", who): 0 for who in members},
            **{self.at("shown", who, i): None for who in members for i in stages},
            **{self.at("result", "owner", i): None for i in stages},
            **{self.at(what, "", i): None for what in ("out", "in") for i in buffers},
            # Buffers that were posted and not yet used, and how many were.
            **{self.at(what): () for what in ("sends", "receives")},
            **{self.at(what): 0 for what in ("sent", "came")},
        }

    def program(self, who: str) -> list[Step]:
        steps: list[Step] = []
        step = 0
        for turn in range(self.protocol.pieces + self.protocol.depth):
            starts, ends = turn < self.protocol.pieces, turn >= self.protocol.depth
            if not starts and not ends:
                continue
            step += 1
            stage, ended = step % self.protocol.stages, turn - self.protocol.depth
            if starts:
                steps.append(self.write(self.at("shown", who, stage), turn))
            end = self.end(ended, stage) if who == "owner" and ends else []
            meet = self.meet(who, step)
            start: list[Step] = []
            if starts and who == "owner":
                shown = self.at("shown", "member", stage)
                start = [self.read(shown, turn), *self.send(turn)]
            first = self.protocol.reads_after_it_meets
            meets_and_reads = [*meet, *start] if first else [*start, *meet]
            before = self.protocol.ends_before_it_meets
            steps += [*end, *meets_and_reads] if before else [*meets_and_reads, *end]
            if ends:
                steps.append(self.read(self.at("result", "owner", stage), ended))
        return steps

    def meet(self, who: str, step: int) -> list[Step]:
        other = self.at("step", "member" if who == "owner" else "owner")
        return [
            self.write(self.at("step", who), step),
            Step(f"wait for step {step}", lambda m: m[other] >= step),
        ]

    def send(self, piece: int) -> list[Step]:
        buffer = piece % self.protocol.buffers

        def post(what: str) -> Step:
            def act(m: Memory) -> None:
                m[self.at(what)] += (buffer,)

            return Step(f"post {what} {buffer}", act)

        return [post("receives"), self.write(self.at("out", "", buffer), piece), post("sends")]

    def end(self, piece: int, stage: int) -> list[Step]:
        came, sent, buffer = self.at("came"), self.at("sent"), piece % self.protocol.buffers
        steps = [
            Step(f"wait for piece {piece}", lambda m: m[came] > piece),
            self.read(self.at("in", "", buffer), piece),
            self.read(self.at("out", "", buffer), piece),
            self.write(self.at("result", "owner", stage), piece),
        ]
        if self.protocol.waits_until_sent:
            steps.append(Step(f"wait until {piece} is sent", lambda m: m[sent] > piece))
        return steps

    def network(self, to: Node) -> list[Step]:
        """Move the next message to the other node, over and over."""

        def move(m: Memory) -> str | bool:
            sends, receives = m[self.at("sends")], m[to.at("receives")]
            if not sends or not receives:
                return False
            m[to.at("in", "", receives[0])] = m[self.at("out", "", sends[0])]
            m[self.at("sends")], m[to.at("receives")] = sends[1:], receives[1:]
            m[self.at("sent")] += 1
            m[to.at("came")] += 1
            return "again"

        return [Step("move a message", move, "again")]

    @staticmethod
    def write(cell: Hashable, value: Any) -> Step:
        return Step(f"write {cell} = {value}", lambda m: m.__setitem__(cell, value))

    @staticmethod
    def read(cell: Hashable, wanted: Any) -> Step:
        return Step(f"read {cell}", lambda m: expect(m[cell], wanted, str(cell)))


def reduction(protocol: Protocol | None = None) -> Model:
    """Two nodes with two members each."""
    protocol = protocol or Protocol()
    nodes = [Node(number, protocol) for number in NODES]
    cells = {cell: value for node in nodes for cell, value in node.cells().items()}
    programs = {
        f"{who} of node {node.number}": node.program(who)
        for node in nodes
        for who in ("owner", "member")
    }
    networks = {f"network of {i}": nodes[i].network(nodes[1 - i]) for i in NODES}
    return Model(cells, {**programs, **networks}, frozenset(networks))
