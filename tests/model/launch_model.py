# SPDX-License-Identifier: Apache-2.0
"""Ranks that are threads of one process launch kernels that wait for each other.

Mirrors csrc/cuda: `Operation::LaunchTogether`, point_to_point.cc, exposed_buffer_peer_copies.cc.
Each rank has a stream, whose kernels run one after the other. A call that changes memory or loads
code ("free") waits until what all streams have been given has ended, and keeps the other threads
from launching until then, as the driver may. Nobody wants a rank to hang who makes the same
operations as its peers. They are

    all       a kernel of each rank, which end when all of them have begun
    send, recv   a piece of a message: piece m needs the room that piece m - 2 had
    show, peer   a kernel that tells, and one that waits for it
    free      a call that waits for devices
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.model.model_checker import Model, Step


@dataclass(frozen=True)
class Protocol:
    """The protocol as it is built; every other value is a mutation."""

    meets_before: bool = True
    meets_after: bool = True
    receives_what_was_sent: bool = True
    sends_where_there_is_room: bool = True
    may_be_ahead: int = 2
    launches_before_it_shows: bool = True


class Rank:
    """Writes what one thread and its stream do."""

    def __init__(self, me: int, size: int, protocol: Protocol) -> None:
        self.me, self.protocol = me, protocol
        self.peers = [i for i in range(size) if i != me]
        self.thread: list[Step] = []
        self.stream: list[Step] = []
        self.cells: dict[Hashable, Any] = {}
        self.launches = 0
        self.numbers: dict[str, int] = {}

    def number(self, what: str) -> int:
        self.numbers[what] = self.numbers.get(what, 0) + 1
        return self.numbers[what]

    # ---- what the thread does -----------------------------------------------------------------

    def tell(self, what: Hashable) -> None:
        self.cells[what] = False
        self.thread.append(Step(f"tell {what}", lambda m: m.__setitem__(what, True)))

    def hear(self, what: Hashable) -> None:
        self.thread.append(Step(f"hear {what}", lambda m: m[what]))

    def meet(self, name: str) -> None:
        self.tell((name, self.me))
        for peer in self.peers:
            self.hear((name, peer))

    def launch(self, kernel: Hashable, waits_for: Sequence[Hashable] = ()) -> None:
        """Give the stream a kernel, which ends when these others have begun."""
        number, self.launches = self.launches, self.launches + 1
        given, me = ("given", self.me), self.me
        self.cells[("begun", kernel)] = False

        def give(m: Any) -> bool | None:
            if m["lock"] not in (None, me):
                return False
            m[given] = number + 1
            return None

        def begin(m: Any) -> bool | None:
            if m[given] <= number:
                return False
            m[("begun", kernel)] = True
            return None

        def end(m: Any) -> bool | None:
            if not all(m[("begun", other)] for other in waits_for):
                return False
            m[("done", me)] = number + 1
            return None

        self.thread.append(Step(f"launch {kernel}", give))
        self.stream += [Step(f"begin {kernel}", begin), Step(f"end {kernel}", end)]

    def free(self) -> None:
        me, everyone = self.me, [self.me, *self.peers]

        def lock(m: Any) -> bool | None:
            if m["lock"] is not None:
                return False
            m["lock"] = me
            return None

        def wait(m: Any) -> bool | None:
            if any(m[("done", r)] != m[("given", r)] for r in everyone):
                return False
            m["lock"] = None
            return None

        self.thread += [Step("lock the driver", lock), Step("wait for all streams", wait)]

    # ---- operations ---------------------------------------------------------------------------

    def do(self, what: str) -> None:
        peer, protocol = self.peers[0], self.protocol
        if what == "free":
            self.free()
        elif what == "all":
            name = f"all {self.number('all')}"
            if protocol.meets_before:
                self.meet(f"about to {name}")
            self.launch((name, self.me), [(name, other) for other in self.peers])
            if protocol.meets_after:
                self.meet(f"launched {name}")
        elif what in ("send", "recv"):
            src, dst = (self.me, peer) if what == "send" else (peer, self.me)
            number = self.number(f"piece {src} {dst}")
            name = (src, dst, number)
            room = (src, dst, number - 2)  # a packet's, on the device
            if what == "send":
                ahead = number - protocol.may_be_ahead
                if protocol.sends_where_there_is_room and ahead > 0:
                    self.hear(("received", src, dst, ahead))
                self.launch(("send", *name), [("recv", *room)] if number > 2 else [])
                self.tell(("sent", *name))
            else:
                if protocol.receives_what_was_sent:
                    self.hear(("sent", *name))
                self.launch(("recv", *name), [("send", *name)])
                self.tell(("received", *name))
        elif what == "show":
            name = ("show", self.number("show"))
            steps = [
                lambda: self.launch((*name, self.me)),
                lambda: self.tell(("board", name, self.me)),
            ]
            for step in steps if protocol.launches_before_it_shows else reversed(steps):
                step()
        elif what == "peer":
            name = ("show", self.numbers["show"])
            self.hear(("board", name, peer))
            self.launch(("await", *name, self.me), [(*name, peer)])


def launches(programs: Sequence[Sequence[str]], protocol: Protocol | None = None) -> Model:
    """Each rank does the operations of its own program."""
    ranks = [Rank(i, len(programs), protocol or Protocol()) for i in range(len(programs))]
    cells: dict[Hashable, Any] = {"lock": None}
    steps: dict[str, list[Step]] = {}
    for rank, program in zip(ranks, programs, strict=True):
        cells[("given", rank.me)] = cells[("done", rank.me)] = 0
        for operation in program:
            rank.do(operation)
        steps[f"thread {rank.me}"], steps[f"stream {rank.me}"] = rank.thread, rank.stream
        cells.update(rank.cells)
    return Model(cells, steps)
