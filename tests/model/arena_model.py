# SPDX-License-Identifier: Apache-2.0
"""Growing the arena, and peers that read what lies in it.

Mirrors arena_allocator.cc `Allocate`, `Grow` and `Trim`, rank_runtime_state.cc `MakeArena` (commit
and release pages), allreduce.cc `AllReduce` and `Direct` (offsets travel with the step; nothing is
exchanged when an arena grows). Every rank allocates a block, writes it, shows its offset, reads the
blocks of its peers, frees its own after the exit step, and gives the pages back. Ranks keep other
blocks in between, so that the offsets differ from rank to rank and from one time to the next.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from tests.model.model_checker import Memory, Model, Step, WrongError, expect

PAGES = 3


@dataclass(frozen=True)
class Protocol:
    """The protocol as it is built; every other value is a mutation."""

    commits_before_it_hands_out: bool = True
    commits_before_it_publishes: bool = True
    frees_after_the_exit_step: bool = True


def growth(size: int = 2, rounds: int = 3, protocol: Protocol | None = None) -> Model:
    """Ranks whose arenas grow, are read by peers, and shrink."""
    protocol = protocol or Protocol()
    cells: dict[Hashable, Any] = {}
    programs = {}
    for me in range(size):
        for page in range(PAGES):
            cells["committed", me, page] = False
            cells["data", me, page] = None
        for slot in (0, 1):
            cells["seq", me, slot] = 0
            cells["offset", me, slot] = None
        programs[f"rank {me}"] = [
            step for n in range(rounds) for step in _round(me, size, n, protocol)
        ]
    return Model(cells, programs)


def _page(rank: int, number: int) -> int:
    """Where a rank's block lies this time; a page below it is in other use now and then."""
    return (rank + number) % PAGES


def _touch(m: Memory, rank: int, page: int) -> None:
    if not m["committed", rank, page]:
        raise WrongError(f"page {page} of rank {rank} is touched without memory behind it")


def _round(me: int, size: int, number: int, protocol: Protocol) -> list[Step]:
    page = _page(me, number)
    entry, leaving = 2 * number + 1, 2 * number + 2
    peers = [i for i in range(size) if i != me]

    def commit(m: Memory) -> None:
        m["committed", me, page] = True

    def write(m: Memory) -> None:
        _touch(m, me, page)
        m["data", me, page] = (me, number)

    def write_blindly(m: Memory) -> None:  # as if the memory would be there in time
        m["data", me, page] = (me, number)

    def release(m: Memory) -> None:
        m["committed", me, page] = False
        m["data", me, page] = None

    def show(step: int) -> list[Step]:
        slot = step % 2
        return [
            Step(f"show page {page}", lambda m: m.__setitem__(("offset", me, slot), page)),
            Step(f"publish step {step}", lambda m: m.__setitem__(("seq", me, slot), step)),
        ]

    def wait(step: int) -> list[Step]:
        return [
            Step(f"wait for rank {peer}", lambda m, p=peer: m["seq", p, step % 2] >= step)
            for peer in peers
        ]

    def read(peer: int) -> Step:
        def act(m: Memory) -> None:
            shown = m["offset", peer, entry % 2]
            _touch(m, peer, shown)
            expect(m["data", peer, shown], (peer, number), f"rank {peer}'s block")

        return Step(f"read rank {peer}'s block", act)

    commits, writes = Step(f"commit page {page}", commit), Step("write the block", write)
    if not protocol.commits_before_it_hands_out:
        head = [writes, commits, *show(entry)]
    elif not protocol.commits_before_it_publishes:
        head = [Step("write the block", write_blindly), *show(entry), commits]
    else:
        head = [commits, writes, *show(entry)]
    reads = [*wait(entry), *(read(peer) for peer in peers)]
    gives_back = Step("free and trim", release)
    leave = [*show(leaving), *wait(leaving)]
    tail = [*leave, gives_back] if protocol.frees_after_the_exit_step else [gives_back, *leave]
    return [*head, *reads, *tail]
