# SPDX-License-Identifier: Apache-2.0
"""The steps of collectives, as `Team::Enter` (group.cc) and the ways of allreduce.cc take them.

Every value says who made it in which operation, so that a read of anything older or newer shows.
A mutation breaks one thing that the protocol needs.
"""

from __future__ import annotations

from dataclasses import dataclass

from explorer import Memory, Process

MUTATIONS = (
    "no exit barrier",
    "one slot compared by equality",
    "flag zeroed after the exchange",
    "one slot",
    "one staging buffer",
    "publish before write",
)


@dataclass
class Rank:
    """Builds the actions of one rank for a sequence of collectives."""

    me: int
    size: int
    mutation: str = ""
    first_step: int = 0
    step_bits: int = 32

    def __post_init__(self) -> None:
        self.process = Process(f"rank {self.me}")
        self.step = self.first_step
        self.peers = [q for q in range(self.size) if q != self.me]

    def _wrap(self, step: int) -> int:
        return step % (1 << self.step_bits)

    def _slot(self, rank: int, step: int) -> tuple[str, int, int]:
        one = self.mutation.startswith("one slot") or "zeroed" in self.mutation
        return ("slot", rank, 0 if one else step & 1)

    def _buffer(self, rank: int, step: int) -> tuple[str, int, int]:
        return ("buffer", rank, 0 if self.mutation == "one staging buffer" else step & 1)

    def reached(self, seen: object, step: int) -> bool:
        """`Reached` of control.h: a signed difference, so that steps may wrap."""
        if self.mutation == "one slot compared by equality" or "zeroed" in self.mutation:
            return seen == step
        assert isinstance(seen, int)
        half = 1 << (self.step_bits - 1)
        return (seen - step) % (1 << self.step_bits) < half

    def enter(self, operation: object, staged: object = None) -> None:
        """`Team::Enter`, with what was staged in `Team::NextBuffer` before it."""
        self.step = self._wrap(self.step + 1)
        step, process = self.step, self.process
        slot, initial = self._slot(self.me, step), self._wrap(self.first_step)

        def stage() -> None:
            if staged is not None:
                process.write(self._buffer(self.me, step), staged)
            process.write(("descriptor", *slot), (operation, step))

        if self.mutation != "publish before write":
            stage()
        process.write(slot, step)
        if self.mutation == "publish before write":
            stage()
        for q in self.peers:
            theirs = self._slot(q, step)

            def ready(memory: Memory, theirs: object = theirs) -> bool:
                return self.reached(memory.get(theirs, initial), step)

            process.wait(f"rank {q} in step {step}", ready)
            process.expect(("descriptor", *theirs), (operation, step))
        if "zeroed" in self.mutation:
            process.write(slot, 0)

    def eager(self, operation: object) -> None:
        """`Eager`: one step, no exit barrier."""
        self.enter(operation, staged=("sent", self.me, operation))
        for q in self.peers:
            self.process.expect(self._buffer(q, self.step), ("sent", q, operation))

    def direct(self, operation: object, exit_barrier: bool = True) -> None:
        """`Direct`: peers read the input in place; it is written again right after."""
        self.process.write(("input", self.me), ("sent", self.me, operation))
        self.enter(operation)
        for q in self.peers:
            self.process.expect(("input", q), ("sent", q, operation))
        if exit_barrier and self.mutation != "no exit barrier":
            self.enter((operation, "exit"))

    def sliced(self, operation: object, pieces: int = 2) -> None:
        """`Sliced`: each rank reduces its slice of a piece, then gathers the slices of all."""
        self.process.write(("input", self.me), ("sent", self.me, operation))
        self.enter(operation)
        for piece in range(pieces):
            for q in self.peers:
                self.process.expect(("input", q), ("sent", q, operation))
            self.enter(operation, staged=("reduced", self.me, operation, piece))
            for q in self.peers:
                slices = ("reduced", q, operation, piece)
                self.process.expect(self._buffer(q, self.step), slices)

    def relayed(self, operation: object) -> None:
        """`Relayed`: a piece is staged in one step, its reduced slices in the next."""
        self.enter(operation, staged=("sent", self.me, operation))
        for q in self.peers:
            self.process.expect(self._buffer(q, self.step), ("sent", q, operation))
        self.enter(operation, staged=("reduced", self.me, operation))
        for q in self.peers:
            self.process.expect(self._buffer(q, self.step), ("reduced", q, operation))


def ranks(
    size: int, ways: list[str], mutation: str = "", first_step: int = 0, step_bits: int = 32
) -> list[Process]:
    """All ranks of a team that do these collectives one after the other."""
    result = []
    for me in range(size):
        rank = Rank(me, size, mutation, first_step, step_bits)
        for operation, way in enumerate(ways):
            getattr(rank, way)(operation)
        result.append(rank.process)
    return result
