# SPDX-License-Identifier: Apache-2.0
"""What ranks show on their boards, read in each other's memory, and hide together.

Mirrors core/exposed_buffers.cc `Show` (refuse, write the memory's place, publish the number), `Of`
(wait for
the number, read the place, then the memory), `Hide` (a step in which all agree on the numbers, as
`Meeting::Enter`), and shm/exposed_buffers.cc `Peer`, which refuses what was hidden. A board has
two places
instead of 64, and numbers are counted modulo 8, so that they wrap. The memory that is shown is the
rank's `buffers`: it writes one again when what was shown there is hidden, at once.

The data is which rank shows it, and as which of all that it shows.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.model.model_checker import Memory, Model, Step, expect

NUMBERS = 8
PLACES = 2


@dataclass(frozen=True)
class Protocol:
    """The protocol as it is built; every other value is a mutation."""

    release_is_a_barrier: bool = True
    publishes_before_it_writes: bool = False
    waits_for_the_number: bool = True
    waits_for_any_number: bool = False
    refuses_a_place_that_is_open: bool = True
    compares_what_is_hidden: bool = True
    first_number: int = 0


def reached(a: int, b: int) -> bool:
    """shared_memory_layout.h Reached, in three bits instead of 32."""
    return (a - b) % NUMBERS < NUMBERS // 2


#: A step of a program, on its k-th tensor: ("expose", k), ("read", k), ("release", k, ...).
Action = tuple[Any, ...]


@dataclass
class Rank:
    """Writes the program of one rank."""

    me: int
    size: int
    protocol: Protocol

    def __post_init__(self) -> None:
        self.program: list[Step] = []
        self.step = 0
        self.open: dict[int, int] = {}  #: by place, which of what it shows

    def number(self, k: int) -> int:
        return (self.protocol.first_number + 1 + k) % NUMBERS

    def add(self, says: str, act: Any) -> None:
        self.program.append(Step(says, act))

    def write(self, cell: Hashable, value: Any) -> None:
        self.add(f"write {cell}", lambda m: m.__setitem__(cell, value))

    def peers(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.me]

    # ---- what a rank does ----------------------------------------------------------------

    def expose(self, k: int) -> None:
        number, me = self.number(k), self.me
        place = number % PLACES
        if self.protocol.refuses_a_place_that_is_open and place in self.open:
            self.add("is refused", lambda m: expect("a place", "free", "what it shows next"))
            return
        buffer = k % PLACES  # memory of what was hidden last
        self.write(("buffer", me, buffer), (me, k))
        publish = (("last", me), number)
        if self.protocol.publishes_before_it_writes:
            self.write(*publish)
        self.write(("place", me, place), (k, buffer))
        self.open[place] = k
        if not self.protocol.publishes_before_it_writes:
            self.write(*publish)

    def read(self, k: int) -> None:
        """Peer, and a kernel that reads what it gives."""
        number = self.number(k)
        for peer in self.peers():
            if self.protocol.waits_for_the_number:
                self.add(f"wait for number {number} of rank {peer}", self.arrived(peer, number))
            found = ("found", self.me, peer)
            self.add("read the place", self.copied(("place", peer, number % PLACES), found))
            self.add(f"read what rank {peer} shows", self.seen(found, peer, k))

    def arrived(self, peer: int, number: int) -> Any:
        last, first = ("last", peer), self.protocol.first_number
        if self.protocol.waits_for_any_number:
            return lambda m: m[last] != first
        return lambda m: reached(m[last], number)

    def copied(self, source: Hashable, target: Hashable) -> Any:
        return lambda m: m.__setitem__(target, m[source])

    def seen(self, found: Hashable, peer: int, k: int) -> Any:
        def look(m: Memory) -> None:
            place = m[found]
            expect(place is not None, True, "whether the place is written")
            expect(place[0], k, "what stands in the place")
            expect(m["buffer", peer, place[1]], (peer, k), f"the memory of rank {peer}")

        return look

    def release(self, *which: int) -> None:
        if self.protocol.release_is_a_barrier:
            self.step += 1
            step, me = self.step, self.me
            self.write(("released", me, step % 2), which)
            self.write(("seq", me, step % 2), step)
            for peer in self.peers():
                self.add(f"wait for rank {peer}", self.entered(peer, step))
                if self.protocol.compares_what_is_hidden:
                    self.add("compare", self.agrees(peer, step, which))
        self.open = {place: k for place, k in self.open.items() if k not in which}

    def entered(self, peer: int, step: int) -> Any:
        return lambda m: m["seq", peer, step % 2] >= step

    def agrees(self, peer: int, step: int, which: tuple[int, ...]) -> Any:
        return lambda m: expect(
            m["released", peer, step % 2], which, "disagreement: what is hidden"
        )


def of_programs(programs: Sequence[Sequence[Action]], protocol: Protocol | None = None) -> Model:
    """Ranks that show, read and hide; the n-th of what one shows belongs to the others' n-th."""
    protocol = protocol or Protocol()
    size = len(programs)
    cells: dict[Hashable, Any] = {}
    steps = {}
    for me, actions in enumerate(programs):
        cells["last", me] = protocol.first_number
        for place in range(PLACES):
            cells["place", me, place] = None
            cells["buffer", me, place] = None
            cells["seq", me, place] = 0
            cells["released", me, place] = None
        for peer in range(size):
            cells["found", me, peer] = None
        rank = Rank(me, size, protocol)
        for name, *which in actions:
            getattr(rank, name)(*which)
        steps[f"rank {me}"] = rank.program
    return Model(cells, steps)


def in_turn(rounds: int) -> list[Action]:
    """Two at a time: a chunk is read when it is needed, and both are hidden together."""
    actions: list[Action] = []
    for k in range(0, 2 * rounds, 2):
        actions += [
            ("expose", k),
            ("expose", k + 1),
            ("read", k),
            ("read", k + 1),
            ("release", k, k + 1),
        ]
    return actions


def overlapping(rounds: int) -> list[Action]:
    """The next one is shown before the last one is hidden."""
    actions: list[Action] = [("expose", 0)]
    for k in range(rounds):
        actions += [("expose", k + 1), ("read", k), ("release", k)]
    return actions
