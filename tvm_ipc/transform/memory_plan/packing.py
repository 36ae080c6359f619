# SPDX-License-Identifier: Apache-2.0
"""Assigns offsets to items with live ranges so that they need little memory in total.

The problem is NP-hard. Several greedy orders are tried. Each order assigns every item the lowest
aligned offset, or the tightest gap, among the items that are live at the same time and already have
an offset. Then the item with the highest end is moved forward in the order, as long as that helps.
The search stops at the lower bound, which is the largest sum of sizes that are live at once.
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

from tvm_ipc.analysis.live_ranges import LiveRange
from tvm_ipc.analysis.program_order import Region, exclusive

#: With more pairs of items that are live together than both limits, in total and on average per
#: item, only the sweep through time is used.
_MANY_PAIRS = 200_000
_MANY_PAIRS_EACH = 64
#: The most work of the search for a better order, in moves times items.
_SEARCH = 4000
_SIZE = itemgetter(0)


@dataclass(eq=False, slots=True)
class Item:
    """An item that needs `size` bytes during `live_range`."""

    size: int
    live_range: LiveRange


@dataclass(frozen=True)
class Packing:
    """The offsets of the items."""

    offsets: tuple[int, ...]
    total: int  #: the highest end


def pack(items: Sequence[Item], alignment: int, live: int | None = None) -> Packing:
    """Return aligned offsets such that items that are live together do not overlap.

    Parameters
    ----------
    live : the result of `most_live` for the items, if the caller has computed it.
    """
    if not items:
        return Packing((), 0)
    neighbours = _neighbours(items)
    if neighbours is None:
        return _sweep(items, alignment)
    if all(item.size % alignment == 0 for item in items):
        bound = most_live(items) if live is None else live
    else:
        bound = most_live([Item(align(item.size, alignment), item.live_range) for item in items])
    best: Packing | None = None
    best_order: list[int] = []
    for order in _orders(items, neighbours):
        for tightest in (False, True):
            packing = _assign_offsets(items, neighbours, order, alignment, tightest)
            if best is None or packing.total < best.total:
                best, best_order = packing, order
            if best.total <= bound:
                return best
    assert best is not None
    return _search_orders(items, neighbours, best_order, best, alignment, bound)


def most_live(items: Sequence[Item]) -> int:
    """Return the largest sum of sizes that are live at once, a lower bound of every packing."""
    if not any(item.live_range.region.path for item in items):
        return _most_live_of_one_path(items)
    changes: dict[int, list[tuple[int, Region, Region]]] = defaultdict(list)
    for item in items:
        if item.size:
            for first, last, current in _split_by_region(item.live_range):
                changes[first].append((item.size, item.live_range.region, current))
                changes[last + 1].append((-item.size, item.live_range.region, current))
    # Items of the two branches of an if may be live after it. Only one branch has run, so that the
    # larger sum counts.
    live_after: dict[Region, int] = defaultdict(int)

    def change(region: Region, current: Region, by: int) -> int:
        """Change what is live after `region`; return the change of what is live in `current`."""
        while by and region is not current:
            before = live_after[region]
            live_after[region] = after = before + by
            assert region.parent is not None
            then, otherwise = region.parent.branches
            sibling = live_after[otherwise if region is then else then]
            by = max(after, sibling) - max(before, sibling)
            region = region.parent.region
        return by

    most = now = 0
    for event in sorted(changes):
        for by, region, current in sorted(changes[event], key=_SIZE):  # ends before beginnings
            now += change(region, current, by)
        most = max(most, now)
    return most


def _split_by_region(live_range: LiveRange) -> Iterator[tuple[int, int, Region]]:
    """Split a live range at the ends of regions.

    Yield for each span the innermost region that contains it, among the region of the allocation
    and those around it.
    """
    current = live_range.region
    for first, last in live_range.spans:
        while first <= last:
            while current.parent is not None and not current.holds(first):
                current = current.parent.region
            end = last if current.parent is None else min(last, current.end)
            yield first, end, current
            first = end + 1


def _most_live_of_one_path(items: Sequence[Item]) -> int:
    """Return the result of `most_live` for items that are all allocated outside branches."""
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
    """Return, for each item, the items that are live at the same time; None if too many."""
    spans = sorted(
        (first, last, index)
        for index, item in enumerate(items)
        for first, last in item.live_range.spans
    )
    ends = sorted(last for _, last, _ in spans)
    pairs = sum(begun - bisect_left(ends, first) for begun, (first, _, _) in enumerate(spans))
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
    """Yield orders in which to assign offsets; the first is nearly always good enough."""
    indices = range(len(items))
    first = [item.live_range.first for item in items]
    length = [sum(b - a + 1 for a, b in item.live_range.spans) for item in items]
    size = [item.size for item in items]
    yield sorted(indices, key=lambda i: (-size[i], -length[i], first[i]))
    yield sorted(indices, key=lambda i: first[i])
    yield sorted(indices, key=lambda i: (-size[i] * length[i], first[i]))
    pressure = [size[index] + sum(size[i] for i in neighbours[index]) for index in indices]
    yield sorted(indices, key=lambda i: (-pressure[i], -size[i], first[i]))
    yield sorted(indices, key=lambda i: (-length[i], -size[i], first[i]))


def _assign_offsets(
    items: Sequence[Item],
    neighbours: list[list[int]],
    order: Sequence[int],
    alignment: int,
    tightest: bool,
) -> Packing:
    """Assign offsets in the given order, each in the lowest or in the tightest gap."""
    offsets = [-1] * len(items)
    taken: list[list[tuple[int, int]]] = [[] for _ in items]  # by neighbours that have an offset
    total = 0
    for index in order:
        size = items[index].size
        offset, gap, end = -1, 0, 0
        for begin, stop in sorted(taken[index]):
            free = begin - end
            if free >= size and (offset < 0 or (tightest and free < gap)):
                offset, gap = end, free
                if not tightest:
                    break
            if stop > end:
                end = stop
        offsets[index] = offset = offset if offset >= 0 else end
        total = max(total, offset + size)
        if size:
            span = offset, align(offset + size, alignment)
            for neighbour in neighbours[index]:
                if offsets[neighbour] < 0:
                    taken[neighbour].append(span)
    return Packing(tuple(offsets), total)


def _search_orders(
    items: Sequence[Item],
    neighbours: list[list[int]],
    order: list[int],
    best: Packing,
    alignment: int,
    bound: int,
) -> Packing:
    """Move the item with the highest end before its neighbours in the order, repeatedly."""
    packing, moved = best, set()
    for _ in range(_SEARCH // len(items)):
        if best.total <= bound:
            break
        position = {index: k for k, index in enumerate(order)}
        ends = [offset + item.size for offset, item in zip(packing.offsets, items, strict=True)]
        highest = max(range(len(items)), key=lambda i: ends[i])
        old = position[highest]
        front = min((position[neighbour] for neighbour in neighbours[highest]), default=old)
        if front >= old or (highest, front) in moved:
            break
        moved.add((highest, front))
        order = [*order[:old], *order[old + 1 :]]
        order.insert(front, highest)
        packing = min(
            (
                _assign_offsets(items, neighbours, order, alignment, tightest)
                for tightest in (False, True)
            ),
            key=lambda candidate: candidate.total,
        )
        if packing.total < best.total:
            best = packing
    return best


def _sweep(items: Sequence[Item], alignment: int) -> Packing:
    """Assign each item the lowest free offset in the order in which they become live.

    It is fast even if many items are live together.
    """
    offsets = [0] * len(items)
    gaps = [(0, sys.maxsize)]  # free spans of offsets, in order
    ends: list[tuple[int, int, int]] = []  # a heap of last event, first offset and end offset
    total = 0
    for index in sorted(range(len(items)), key=lambda i: items[i].live_range.first):
        item = items[index]
        if not item.size:
            continue
        while ends and ends[0][0] < item.live_range.first:
            _, begin, stop = heappop(ends)
            _add_gap(gaps, begin, stop)
        gap = next(i for i, (begin, stop) in enumerate(gaps) if stop - begin >= item.size)
        begin, stop = gaps[gap]
        offsets[index] = begin
        end = align(begin + item.size, alignment)
        gaps[gap : gap + 1] = [(end, stop)] if end < stop else []
        heappush(ends, (item.live_range.last, begin, end))
        total = max(total, begin + item.size)
    return Packing(tuple(offsets), total)


def _add_gap(gaps: list[tuple[int, int]], begin: int, stop: int) -> None:
    """Add a gap, merged with adjacent ones."""
    left = right = bisect_left(gaps, (begin, stop))
    if left and gaps[left - 1][1] == begin:
        left -= 1
        begin = gaps[left][0]
    if right < len(gaps) and gaps[right][0] == stop:
        stop = gaps[right][1]
        right += 1
    gaps[left:right] = [(begin, stop)]
