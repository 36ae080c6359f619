# SPDX-License-Identifier: Apache-2.0
"""Compute the live ranges of allocations: the events between first and last use on some path.

A live range is a list of spans of events: a tensor that only one branch reads later is not live in
the other branch. It begins with the first use, because the allocation writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tvm_ipc.analysis.alias_facts import Allocation
from tvm_ipc.analysis.program_order import Region


@dataclass(eq=False, slots=True)
class LiveRange:
    """Disjoint spans of events in order; each includes its first and its last event."""

    spans: tuple[tuple[int, int], ...]
    region: Region  #: where the tensor is allocated

    @property
    def first(self) -> int:
        """Return the first event."""
        return self.spans[0][0]

    @property
    def last(self) -> int:
        """Return the last event."""
        return self.spans[-1][1]


def live_range(allocation: Allocation, more: Sequence[tuple[int, Region]] = ()) -> LiveRange:
    """Return the live range of an allocation, extended to more pairs of an event and its region.

    Each region is that of a use of the allocation, or one around it.
    """
    home = allocation.step.region
    uses = allocation.uses  # in the order of the program
    if not uses:
        start = allocation.step.index
        return LiveRange(((start, start),), home)
    if not more and all(use.region is home for use in uses):
        return LiveRange(((uses[0].point, uses[-1].point),), home)
    start = _within(uses[0].point, uses[0].region, home)
    later = [*((use.point, use.region) for use in uses), *more]
    return LiveRange(_paths(start, home, later), home)


def extended(live: LiveRange, point: int, region: Region) -> LiveRange:
    """Return a live range extended to an event and its region, as by `live_range`."""
    more = _paths(live.first, live.region, [(point, region)])
    return LiveRange(_merge([*live.spans, *more]), live.region)


def live_throughout(live: LiveRange, first: int, last: int) -> LiveRange:
    """Return a live range that also includes all events from one to another."""
    return LiveRange(_merge([*live.spans, (first, last)]), live.region)


def _within(point: int, region: Region, home: Region) -> int:
    """Return the event of `home` that contains an event of `region`."""
    if region is home or not region.within(home):
        return point
    return region.path[len(home.path)][0].entry


def _paths(
    start: int, home: Region, later: Iterable[tuple[int, Region]]
) -> tuple[tuple[int, int], ...]:
    """Return the spans of all paths from an event in `home` to later events."""
    last: dict[Region, int] = {}
    top = home
    for event, region in later:
        # Enter the branches around the event, from inside out.
        while last.get(region, -1) < event:
            is_entered = region in last
            last[region] = event
            if region.begin <= home.begin and home.end <= region.end:
                if len(region.path) < len(top.path):
                    top = region
                break
            if is_entered:
                break  # and so are the regions around it
            outer = region.parent
            assert outer is not None
            event, region = outer.entry, outer.region
    spans: list[tuple[int, int]] = []
    at, here = start, home
    while here is not top:  # leave the branches that contain only the start
        spans.append((at, here.end))
        last.pop(here, None)
        outer = here.parent
        assert outer is not None
        at, here = outer.index, outer.region
    spans.append((at, last.pop(top)))
    spans += [(region.begin, end) for region, end in last.items()]
    return _merge([(first, last) for first, last in spans if first <= last])


def _merge(spans: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return spans in order, with overlapping and adjacent ones merged."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(spans):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return tuple(merged)
