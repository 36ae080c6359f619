# SPDX-License-Identifier: Apache-2.0
"""Operations of a team by CUDA kernels.

Mirrors csrc/cuda/kernels: team_operation_device_code.h (headers, meetings of blocks),
reduce_small_inputs_by_push.h, reduce_large_inputs_by_pull.h and
data_movement_collectives_device_code.h. A word carries its epoch: it is written in one step, and
what waits for it compares for equality. What members push lies in slot epoch % 2 of each other's
seats. An operation is one of

    push     everyone writes its data into the seats of all, and waits for that of all
    root     likewise, but for member 0 alone; the others hear from all by their headers
    pull     headers; read a slice of all inputs; write a scratch; a meeting; read all scratches
    move     headers; read all inputs; a meeting
    early    the same, but member 0, whose input stays as it is, does not wait for those who read it
    broken   everyone pushes and leaves, as after an error: `recover` follows
    recover  all have left; everyone zeroes its own seat; all have; the epochs begin again

The input is overwritten as soon as an operation has returned: the next one writes it, unless it is
a push. Channels are those of packets_model.py, whose `seq` is the tag of a header.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.model.model_checker import Model, Step, expect


@dataclass(frozen=True)
class Protocol:
    """The protocol as it is built; every other value is a mutation."""

    slots: int = 2
    header_slots: int = 2
    whole_words: bool = True
    all_hear_all: bool = True
    meets_in_the_middle: bool = True
    meets_at_the_end: bool = True
    who_leaves_early_tells: bool = True
    #: Its input is a copy, in the place where the next operation's goes.
    only_what_stays_leaves_early: bool = True
    zeroes_when_all_have_left: bool = True
    starts_when_all_have_zeroed: bool = True


class Member:
    """Writes what one member does."""

    def __init__(self, me: int, size: int, protocol: Protocol) -> None:
        self.me = me
        self.protocol = protocol
        self.peers = [i for i in range(size) if i != me]
        self.epoch = 0
        self.recoveries = 0
        self.operations = 0
        self.steps: list[Step] = []

    def cells(self) -> dict[Hashable, Any]:
        cells: dict[Hashable, Any] = {("input", self.me): None, ("scratch", self.me): None}
        cells[("left", self.me)] = cells[("zeroed", self.me)] = 0
        cells.update(dict.fromkeys(self.seat(), (0, None)))
        return cells

    def seat(self) -> list[Hashable]:
        """What others write into this member's seat: words of a tag and a value."""
        kinds = [("data", s) for s in range(self.protocol.slots)]
        kinds += [("header", s) for s in range(self.protocol.header_slots)]
        kinds += [("middle", 0), ("end", 0)]
        return [(kind, self.me, peer, slot) for kind, slot in kinds for peer in self.peers]

    def add(self, says: str, act: Any) -> None:
        self.steps.append(Step(says, act))

    def write(self, cell: Hashable, value: Any) -> None:
        self.add(f"write {cell} = {value}", lambda m: m.__setitem__(cell, value))

    def tell(self, kind: str, peer: int, slots: int, value: Any = None) -> None:
        cell, epoch = (kind, peer, self.me, self.epoch % slots), self.epoch
        if not self.protocol.whole_words and kind == "data":
            self.add(f"tag {cell} {epoch}", lambda m: m.__setitem__(cell, (epoch, m[cell][1])))
        self.write(cell, (epoch, value))

    def hear(self, kind: str, peer: int, slots: int, value: Any = None) -> None:
        cell, epoch = (kind, self.me, peer, self.epoch % slots), self.epoch

        def look(m: Any) -> bool:
            tag, found = m[cell]
            if tag != epoch:
                return False
            expect(found, value, f"{kind} of member {peer}")
            return True

        self.add(f"wait for {cell} of epoch {epoch}", look)

    def meet(self, kind: str, tells: bool = True, hears: bool = True) -> None:
        for peer in self.peers if tells else ():
            self.tell(kind, peer, 1)
        for peer in self.peers if hears else ():
            self.hear(kind, peer, 1)

    def headers(self) -> None:
        for peer in self.peers:
            self.tell("header", peer, self.protocol.header_slots)
        for peer in self.peers:
            self.hear("header", peer, self.protocol.header_slots)

    def read(self, what: str) -> None:
        for peer in self.peers:
            wanted = (peer, self.operations)
            cell = (what, peer)
            self.add(f"read {cell}", lambda m, c=cell, w=wanted: expect(m[c], w, str(c)))

    def do(self, operation: str) -> None:
        if operation == "recover":
            return self.recover()
        self.operations += 1
        self.epoch += 1
        mine = (self.me, self.operations)
        slots = self.protocol.slots
        if operation in ("push", "root", "broken"):
            to_all = operation != "root"
            for peer in self.peers:
                if to_all or peer == 0:
                    self.tell("data", peer, slots, mine)
            if operation == "root" and self.protocol.all_hear_all:
                self.headers()
            for peer in self.peers:
                if operation == "push" or (operation == "root" and self.me == 0):
                    self.hear("data", peer, slots, (peer, self.operations))
            return None
        self.write(("input", self.me), mine)
        self.headers()
        self.read("input")
        if operation == "early":
            leaves = self.me == 0 or not self.protocol.only_what_stays_leaves_early
            tells = self.protocol.who_leaves_early_tells or not leaves
            self.meet("end", tells=tells, hears=not leaves)
            if self.me != 0:
                self.write(("input", self.me), None)
            return None
        if operation == "move":
            if self.protocol.meets_at_the_end:
                self.meet("end")
            return None
        self.write(("scratch", self.me), mine)
        if self.protocol.meets_in_the_middle:
            self.meet("middle")
        self.read("scratch")
        return None

    def recover(self) -> None:
        self.recoveries += 1
        count = self.recoveries

        def all_have(what: str) -> None:
            for peer in self.peers:
                cell = (what, peer)
                self.add(f"wait for {cell}", lambda m, c=cell: m[c] >= count)

        self.write(("left", self.me), count)
        if self.protocol.zeroes_when_all_have_left:
            all_have("left")
        for cell in self.seat():
            self.write(cell, (0, None))
        self.write(("zeroed", self.me), count)
        if self.protocol.starts_when_all_have_zeroed:
            all_have("zeroed")
        self.epoch = 0


def operations(size: int, sequence: Sequence[str], protocol: Protocol | None = None) -> Model:
    """A team of so many members does these operations one after the other."""
    members = [Member(i, size, protocol or Protocol()) for i in range(size)]
    for operation in sequence:
        for member in members:
            member.do(operation)
    cells: dict[Hashable, Any] = {}
    for member in members:
        cells.update(member.cells())
    return Model(cells, {f"member {i}": member.steps for i, member in enumerate(members)})
