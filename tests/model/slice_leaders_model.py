# SPDX-License-Identifier: Apache-2.0
"""Leaders of nodes reduce pieces: members meet in shared memory, leaders speak over the network.

Mirrors mpi/pipelined_internode_reduce.cc `ReduceAcross` and mpi/reduction_slice_leader.cc `Start`,
`Middle`, `End`. Two nodes have one lane, whose owner is the first member of each. A member shows
its elements of a piece in the first half of a staging buffer, and in the second half the leader
shows what a piece of before has come to. With one hop a leader says all to the other one; with two
each ends one half of the piece. Where one node wants the result it alone is told, but for the first
piece: of that each leader says something to the other one, so that nodes which do not agree find
that out. (Of a reduction that all want in parts, each leader says the other one's part: the
messages are those of one hop.)

The engine and the network are one here: messages of one phase arrive in the order in which they
were sent, those of different phases in any, and each is copied out of the sender's buffer at once
or when it arrives. What the engine does with them is in internode_ring_model.py and flush_model.py.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tests.model.model_checker import Memory, Model, Step, WrongError, expect


@dataclass(frozen=True)
class Protocol:
    """The protocol as it is built; every other value is a mutation."""

    waits_in_a_meeting: bool = True
    staging_buffers: int = 2
    results_have_a_half_of_their_own: bool = True
    each_piece_under_way_has_buffers: bool = True
    waits_for_its_sends: bool = True
    says_before_it_waits: bool = True
    shows_what_has_come_to_its_end: bool = True
    phases_have_tags_of_their_own: bool = True
    messages_of_a_tag_come_in_order: bool = True
    ends_in_another_buffer_than_it_said: bool = True
    says_of_the_first_piece_that_it_has_nothing: bool = True


@dataclass(frozen=True)
class Message:
    """What a leader says of a piece; `data` is None while it is in the buffer alone.

    It begins with the operation, which is the node that the result is for.
    """

    number: int
    buffer: Hashable
    operation: int | None
    data: Any


def reduction(
    protocol: Protocol | None = None,
    members: tuple[int, int] = (2, 1),
    pieces: int = 3,
    *,
    middle: int = 0,
    one: tuple[int, int] | None = None,
) -> Model:
    """Pieces are reduced; every member is to get all of them.

    With two hops `middle` is after how many others a half of a piece is reduced, else it is 0.
    `one` is the node for which the result is, as each of the nodes has it; None: for both.
    """
    return _Reduction(protocol or Protocol(), members, pieces, middle, one).model()


class _Reduction:
    def __init__(
        self,
        protocol: Protocol,
        members: tuple[int, int],
        pieces: int,
        middle: int,
        one: tuple[int, int] | None,
    ) -> None:
        self.one = one
        self.protocol, self.members, self.pieces = protocol, members, pieces
        self.two_hops = middle > 0
        self.middle, self.depth = middle, 2 * max(1, middle)
        self.buffers = self.depth if protocol.each_piece_under_way_has_buffers else self.depth - 1

    def model(self) -> Model:
        cells: dict[Hashable, Any] = {}
        programs: dict[str, list[Step]] = {}
        for node in (0, 1):
            for phase in (1, 2):
                cells.update({("way", node, phase): (), ("wanted", node, phase): ()})
            for piece in range(self.pieces):
                cells.update({("sent", node, piece, phase): False for phase in (1, 2)})
                cells.update({("came", node, piece, phase): False for phase in (1, 2)})
            for turn in range(self.depth):
                for what in ("own", "result", "said", "reduced"):
                    cells[what, node, turn] = None
        for node, count in enumerate(self.members):
            for member in range(count):
                cells["step", node, member] = 0
                for parity in (0, 1):
                    cells["elements", node, member, parity] = None
                cells.update({("ended", node, parity): None for parity in (0, 1)})
                programs[f"member {member} of {node}"] = list(self._member(node, member))
        ends = frozenset(programs)
        for node in (0, 1):
            for phase in (1, 2) if self.two_hops else (1,):
                acts: dict[str, Callable] = {"copy": self._copy, "deliver": self._deliver}
                for says, act in acts.items():
                    step = Step(says, partial(act, node=node, phase=phase), "again")
                    programs[f"network, {says} of {node} in phase {phase}"] = [step]
        return Model(cells, programs, frozenset(programs) - ends)

    # ---- members --------------------------------------------------------------------------------

    def _member(self, node: int, member: int) -> Iterable[Step]:
        leads = member == 0
        step = 0
        for turn in range(self.pieces + self.depth):
            starts, ended = turn < self.pieces, turn - self.depth
            half = turn - self.middle
            if leads and self.two_hops and 0 <= half < self.pieces:
                yield from self._half(node, half)
            if not starts and ended < 0:
                continue
            step += 1
            parity = step % self.protocol.staging_buffers
            if starts:
                act = partial(self._stage, node=node, member=member, piece=turn, parity=parity)
                yield Step(f"show its elements of piece {turn}", act)
            show = []
            if leads and ended >= 0:
                show = list(self._end(node, ended, parity))
            if self.protocol.shows_what_has_come_to_its_end:
                yield from show
            enter = partial(_enter, node=node, member=member, step=step)
            yield Step(f"enter step {step}", enter)
            if self.protocol.waits_in_a_meeting:
                met = partial(self._met, node=node, step=step)
                yield Step(f"meet in step {step}", met)
            if not self.protocol.shows_what_has_come_to_its_end:
                yield from show
            if leads and starts:
                yield from self._start(node, turn, parity)
            if ended >= 0 and self._told(node, node):
                copy = partial(self._result, node=node, piece=ended, parity=parity)
                yield Step(f"copy piece {ended}", copy)

    def _stage(self, m: Memory, *, node: int, member: int, piece: int, parity: int) -> None:
        m["elements", node, member, parity] = (piece, (node, member))

    def _met(self, m: Memory, *, node: int, step: int) -> bool:
        return all(m["step", node, i] >= step for i in range(self.members[node]))

    def _result(self, m: Memory, *, node: int, piece: int, parity: int) -> None:
        everybody = tuple((n, i) for n in (0, 1) for i in range(self.members[n]))
        whole = ((piece, everybody),) * (2 if self.two_hops else 1)
        expect(m[self._place(node, parity)], whole, f"piece {piece}")

    def _place(self, node: int, parity: int) -> Hashable:
        if self.protocol.results_have_a_half_of_their_own:
            return "ended", node, parity
        return "elements", node, 0, parity

    # ---- leaders --------------------------------------------------------------------------------

    def _start(self, node: int, piece: int, parity: int) -> Iterable[Step]:
        turn = piece % self.buffers

        def receive(m: Memory) -> None:
            if self._speaks(node, piece, node):
                self._post_receive(m, node, 1, ("said", node, turn), piece)
            if self.two_hops and self._told(node, node):
                self._post_receive(m, node, 2, ("reduced", node, turn), piece)

        def send(m: Memory) -> None:
            shown = [m["elements", node, i, parity] for i in range(self.members[node])]
            for i, one in enumerate(shown):
                expect(one, (piece, (node, i)), f"what member {i} shows")
            m["own", node, turn] = (piece, tuple(who for _, who in shown))
            if self._speaks(node, piece, 1 - node):
                self._post_send(m, node, 1, ("own", node, turn), piece)

        yield Step(f"receive piece {piece}", receive)
        if not self.protocol.says_before_it_waits:
            yield Step(f"wait for what is said of {piece}", self._wait(node, piece, 1))
        yield Step(f"send piece {piece}", send)

    def _half(self, node: int, piece: int) -> Iterable[Step]:
        turn = piece % self.buffers
        apart = self.protocol.ends_in_another_buffer_than_it_said
        result = ("result" if apart else "own", node, turn)

        def reduce(m: Memory) -> None:
            m[result] = self._sum(m, node, piece)

        def send(m: Memory) -> None:
            self._post_send(m, node, 2, result, piece)

        yield Step(f"wait for what is said of {piece}", self._wait(node, piece, 1))
        yield Step(f"end its half of piece {piece}", reduce)
        if self._told(node, 1 - node):
            yield Step(f"send the result of its half of {piece}", send)

    def _end(self, node: int, piece: int, parity: int) -> Iterable[Step]:
        turn = piece % self.buffers

        def show(m: Memory) -> None:
            if not self.two_hops:
                m[self._place(node, parity)] = (self._sum(m, node, piece),)
                return
            apart = self.protocol.ends_in_another_buffer_than_it_said
            halves = m["result" if apart else "own", node, turn], m["reduced", node, turn][1]
            m[self._place(node, parity)] = halves

        def sent(m: Memory) -> bool:
            first = not self._speaks(node, piece, 1 - node) or m["sent", node, piece, 1]
            second = not self.two_hops or not self._told(node, 1 - node)
            return first and (second or m["sent", node, piece, 2])

        last = 2 if self.two_hops else 1
        if self._told(node, node) if self.two_hops else self._speaks(node, piece, node):
            yield Step(f"wait for the end of piece {piece}", self._wait(node, piece, last))
            yield Step(f"show what piece {piece} came to", show)
        if self.protocol.waits_for_its_sends:
            yield Step(f"wait for its sends of {piece}", sent)

    def _told(self, by: int, node: int) -> bool:
        """Whether a node is told what comes out, as one of them has it."""
        return self.one is None or self.one[by] == node

    def _speaks(self, by: int, piece: int, node: int) -> bool:
        """Whether there is a message about what a node ends of a piece, as one of them has it."""
        first = self.protocol.says_of_the_first_piece_that_it_has_nothing and piece == 0
        return self.two_hops or first or self._told(by, node)

    def _wait(self, node: int, piece: int, phase: int) -> Callable[[Memory], bool]:
        def wait(m: Memory) -> bool:
            if not m["came", node, piece, phase]:
                return False
            cell = ("said" if phase == 1 else "reduced", node, piece % self.buffers)
            expect(m[cell][2], self.one and self.one[node], "the operation, of which nodes agree")
            expect(m[cell][0], (phase, piece), "the phase and number of what came")
            return True

        return wait

    def _sum(self, m: Memory, node: int, piece: int) -> Any:
        turn = piece % self.buffers
        both = [m["own", node, turn], m["said", node, turn][1]]
        for one in both:
            expect(one[0], piece, "the piece that is added")
        if node == 1:
            both.reverse()
        return piece, (*both[0][1], *both[1][1])

    # ---- the network ----------------------------------------------------------------------------

    def _tag(self, phase: int) -> int:
        return phase if self.protocol.phases_have_tags_of_their_own else 1

    def _post_receive(self, m: Memory, node: int, phase: int, cell: Hashable, piece: int) -> None:
        m["wanted", node, self._tag(phase)] += ((cell, piece, phase),)

    def _post_send(self, m: Memory, node: int, phase: int, cell: Hashable, piece: int) -> None:
        one = Message((phase, piece), cell, self.one and self.one[node], None)
        m["way", node, self._tag(phase)] += (one,)

    def _copy(self, m: Memory, *, node: int, phase: int) -> str | bool:
        way = m["way", node, phase]
        for i, one in enumerate(way):
            if one.data is None:
                copied = replace(one, data=m[one.buffer])
                m["way", node, phase] = (*way[:i], copied, *way[i + 1 :])
                m["sent", node, one.number[1], one.number[0]] = True
                return "again"
        return False

    def _deliver(self, m: Memory, *, node: int, phase: int) -> str | bool:
        way, wanted = m["way", node, phase], m["wanted", 1 - node, phase]
        if not way or not wanted:
            return False
        which = 0 if self.protocol.messages_of_a_tag_come_in_order else len(way) - 1
        one = way[which]
        cell, piece, wanted_phase = wanted[0]
        m["way", node, phase] = (*way[:which], *way[which + 1 :])
        m["wanted", 1 - node, phase] = wanted[1:]
        data = m[one.buffer] if one.data is None else one.data
        m[cell] = (one.number, data, one.operation)
        m["sent", node, one.number[1], one.number[0]] = True
        m["came", 1 - node, piece, wanted_phase] = True
        return "again"


def _enter(m: Memory, *, node: int, member: int, step: int) -> None:
    if m["step", node, member] != step - 1:
        raise WrongError("a step is left out")
    m["step", node, member] = step
