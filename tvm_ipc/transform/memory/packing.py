# SPDX-License-Identifier: Apache-2.0
"""Offsets for items that live at different times, so that they need little memory together.

The general problem is NP-hard. Several greedy orders are tried, each of which puts every item at
the lowest aligned offset, or into the tightest gap, between the items that are live together with
it and were placed before; then the item that ends highest is moved forward in the order, as long
as that helps. The search ends as soon as the result is as small as the largest sum of what is live
at once.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate
from operator import itemgetter

from tvm_ipc.transform.ir.live_ranges import LiveRange
from tvm_ipc.transform.ir.program import Region, exclusive

#: Above this many pairs of items that are live together, and this many an item, only the sweep
#: through time is used.
_MANY_PAIRS = 200_000
_MANY_PAIRS_EACH = 64
#: How much work the search for a better order may do: moves times items.
_SEARCH = 4000
_SIZE = itemgetter(0)


@dataclass(eq=False, slots=True)
class Item:
    """Something that needs `size` bytes during `live_range`."""

    size: int
    live_range: LiveRange


@dataclass(frozen=True)
class Packing:
    """Where the items lie."""

    offsets: tuple[int, ...]
    total: int  #: the highest end


def pack(items: Sequence[Item], alignment: int) -> Packing:
    """Return aligned offsets; items that are live together do not overlap."""
    if not items:
        return Packing((), 0)
    neighbours = _neighbours(items)
    if neighbours is None:
        return _sweep(items, alignment)
    if all(item.size % alignment == 0 for item in items):
        bound = most_live(items)
    else:
        bound = most_live([Item(align(item.size, alignment), item.live_range) for item in items])
    best: Packing | None = None
    best_order: list[int] = []
    for order in _orders(items, neighbours):
        for tightest in (False, True):
            packing = _place(items, neighbours, order, alignment, tightest)
            if best is None or packing.total < best.total:
                best, best_order = packing, order
            if best.total <= bound:
                return best
    assert best is not None
    return _search(items, neighbours, best_order, best, alignment, bound)


def most_live(items: Sequence[Item]) -> int:
    """Return the largest sum of sizes that are live at once: no packing needs less."""
    if not any(item.live_range.region.path for item in items):
        return _most_live_of_one_path(items)
    changes: dict[int, list[tuple[int, Region, Region]]] = defaultdict(list)
    for item in items:
        if item.size:
            for first, last, here in _stays(item.live_range):
                changes[first].append((item.size, item.live_range.region, here))
                changes[last + 1].append((-item.size, item.live_range.region, here))
    # After an if, of what comes from its two branches the larger one counts.
    needs: dict[Region, int] = defaultdict(int)

    def change(region: Region, here: Region, by: int) -> int:
        """Return by how much more is needed where `region` has ended, and not `here`."""
        while by and region is not here:
            before = needs[region]
            needs[region] = after = before + by
            assert region.parent is not None
            one, other = region.parent.branches
            beside = needs[other if region is one else one]
            by = max(after, beside) - max(before, beside)
            region = region.parent.region
        return by

    most = now = 0
    for event in sorted(changes):
        for by, region, here in sorted(changes[event], key=_SIZE):  # what ends comes first
            now += change(region, here, by)
        most = max(most, now)
    return most


def _stays(live_range: LiveRange) -> Iterator[tuple[int, int, Region]]:
    """Yield a live range in parts, each with the innermost region around its home that holds it."""
    here = live_range.region
    for first, last in live_range.spans:
        while first <= last:
            while here.parent is not None and not here.holds(first):
                here = here.parent.region
            end = last if here.parent is None else min(last, here.end)
            yield first, end, here
            first = end + 1


def _most_live_of_one_path(items: Sequence[Item]) -> int:
    changes: dict[int, int] = defaultdict(int)
    for item in items:
        for first, last in item.live_range.spans:
            changes[first] += item.size
            changes[last + 1] -= item.size
    return max(accumulate(changes[event] for event in sorted(changes)), default=0)


def align(offset: int, alignment: int) -> int:
    """Return the next multiple of the alignment."""
    return -(-offset // alignment) * alignment


def _neighbours(items: Sequence[Item]) -> list[list[int]] | None:
    """Return for each item those that are live together with it; None if they are too many."""
    spans = sorted(
        (first, last, index)
        for index, item in enumerate(items)
        for first, last in item.live_range.spans
    )
    lasts = sorted(last for _, last, _ in spans)
    pairs = sum(begun - bisect_left(lasts, first) for begun, (first, _, _) in enumerate(spans))
    if pairs > max(_MANY_PAIRS, _MANY_PAIRS_EACH * len(items)):
        return None
    homes = [item.live_range.region for item in items]
    result: list[set[int]] = [set() for _ in items]
    active: list[tuple[int, int]] = []
    for first, last, index in spans:
        active = [entry for entry in active if entry[0] >= first]
        home = homes[index]
        if home.holds(first):
            together = {other for _, other in active}
        else:
            together = {
                other
                for _, other in active
                if homes[other].holds(first) or not exclusive(home, homes[other])
            }
        result[index] |= together
        for other in together:
            result[other].add(index)
        active.append((last, index))
    return [sorted(others) for others in result]


def _orders(items: Sequence[Item], neighbours: list[list[int]]) -> Iterator[list[int]]:
    """Yield orders in which to place the items; the first is nearly always good enough."""
    indices = range(len(items))
    first = [item.live_range.first for item in items]
    length = [sum(b - a + 1 for a, b in item.live_range.spans) for item in items]
    size = [item.size for item in items]
    yield sorted(indices, key=lambda i: (-size[i], -length[i], first[i]))
    yield sorted(indices, key=lambda i: first[i])
    yield sorted(indices, key=lambda i: (-size[i] * length[i], first[i]))
    crowd = [size[index] + sum(size[i] for i in neighbours[index]) for index in indices]
    yield sorted(indices, key=lambda i: (-crowd[i], -size[i], first[i]))
    yield sorted(indices, key=lambda i: (-length[i], -size[i], first[i]))


def _place(
    items: Sequence[Item],
    neighbours: list[list[int]],
    order: Sequence[int],
    alignment: int,
    tightest: bool,
) -> Packing:
    offsets = [-1] * len(items)
    taken: list[list[tuple[int, int]]] = [[] for _ in items]  # by neighbours that have their place
    total = 0
    for index in order:
        size = items[index].size
        at, gap, end = -1, 0, 0
        for begin, stop in sorted(taken[index]):
            free = begin - end
            if free >= size and (at < 0 or (tightest and free < gap)):
                at, gap = end, free
                if not tightest:
                    break
            if stop > end:
                end = stop
        offsets[index] = at = at if at >= 0 else end
        total = max(total, at + size)
        if size:
            bytes_ = at, align(at + size, alignment)
            for other in neighbours[index]:
                if offsets[other] < 0:
                    taken[other].append(bytes_)
    return Packing(tuple(offsets), total)


def _search(
    items: Sequence[Item],
    neighbours: list[list[int]],
    order: list[int],
    best: Packing,
    alignment: int,
    bound: int,
) -> Packing:
    """Move the item that ends highest before those that lie below it."""
    packing, moved = best, set()
    for _ in range(_SEARCH // len(items)):
        if best.total <= bound:
            break
        place = {index: rank for rank, index in enumerate(order)}
        ends = [offset + item.size for offset, item in zip(packing.offsets, items, strict=True)]
        highest = max(range(len(items)), key=lambda i: ends[i])
        front = min((place[other] for other in neighbours[highest]), default=place[highest])
        if front >= place[highest] or (highest, front) in moved:
            break
        moved.add((highest, front))
        order = [*order[: place[highest]], *order[place[highest] + 1 :]]
        order.insert(front, highest)
        packing = min(
            (_place(items, neighbours, order, alignment, tightest) for tightest in (False, True)),
            key=lambda candidate: candidate.total,
        )
        if packing.total < best.total:
            best = packing
    return best


def _sweep(items: Sequence[Item], alignment: int) -> Packing:
    """Place items as they come, at the lowest free offset: fast, whatever is live together."""
    offsets = [0] * len(items)
    gaps = [(0, sys.maxsize)]  # what is free, from where to where, in order
    ends: list[tuple[int, int, int]] = []  # a heap: last event, from where, to where
    total = 0
    for index in sorted(range(len(items)), key=lambda i: items[i].live_range.first):
        item = items[index]
        if not item.size:
            continue
        while ends and ends[0][0] < item.live_range.first:
            _, begin, stop = heappop(ends)
            _free(gaps, begin, stop)
        place = next(i for i, (begin, stop) in enumerate(gaps) if stop - begin >= item.size)
        begin, stop = gaps[place]
        offsets[index] = begin
        end = align(begin + item.size, alignment)
        gaps[place : place + 1] = [(end, stop)] if end < stop else []
        heappush(ends, (item.live_range.last, begin, end))
        total = max(total, begin + item.size)
    return Packing(tuple(offsets), total)


def _free(gaps: list[tuple[int, int]], begin: int, stop: int) -> None:
    """Add a gap, joined with those beside it."""
    place = bisect_left(gaps, (begin, stop))
    left = right = place
    if left and gaps[left - 1][1] == begin:
        left -= 1
        begin = gaps[left][0]
    if right < len(gaps) and gaps[right][0] == stop:
        stop = gaps[right][1]
        right += 1
    gaps[left:right] = [(begin, stop)]
