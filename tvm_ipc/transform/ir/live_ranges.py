# SPDX-License-Identifier: Apache-2.0
"""Live ranges of allocations: the events between first and last use on some path.

It is a list of spans of events, since a tensor that a later branch alone reads is not live in the
other branch. It begins with the first use, not with the allocation, which writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tvm_ipc.transform.ir.program import Region
from tvm_ipc.transform.ir.roots import Allocation


@dataclass(eq=False, slots=True)
class LiveRange:
    """Spans of events, first and last included, in order and apart."""

    spans: tuple[tuple[int, int], ...]
    region: Region  #: where the tensor is allocated

    @property
    def first(self) -> int:
        """The first event."""
        return self.spans[0][0]

    @property
    def last(self) -> int:
        """The last event."""
        return self.spans[-1][1]


def live_range(allocation: Allocation, more: Sequence[tuple[int, Region]] = ()) -> LiveRange:
    """Return the live range, extended to more (event, region) pairs.

    Their regions are that of a use or one around it.
    """
    home = allocation.step.region
    uses = allocation.uses  # in the order of the program
    if not uses:
        start = allocation.step.index
        return LiveRange(((start, start),), home)
    if not more and all(use.region is home for use in uses):
        return LiveRange(((uses[0].event, uses[-1].event),), home)
    start = _within(uses[0].event, uses[0].region, home)
    moments = [*((use.event, use.region) for use in uses), *more]
    return LiveRange(_paths(start, home, moments), home)


def extended(known: LiveRange, event: int, region: Region) -> LiveRange:
    """Return a live range, extended as `live_range` would."""
    more = _paths(known.first, known.region, [(event, region)])
    return LiveRange(_merge([*known.spans, *more]), known.region)


def _within(event: int, region: Region, home: Region) -> int:
    """Return the event of `home` at which what happens in `region` begins."""
    if region is home or not region.within(home):
        return event
    return region.path[len(home.path)][0].entry


def _paths(
    start: int, home: Region, moments: Iterable[tuple[int, Region]]
) -> tuple[tuple[int, int], ...]:
    """Return the spans from an event in `home` to moments, which come later."""
    last: dict[Region, int] = {}
    top = home
    for event, region in moments:
        # Into the branches that the moment lies in, seen from inside.
        while last.get(region, -1) < event:
            known = region in last
            last[region] = event
            if region.begin <= home.begin and home.end <= region.end:
                if len(region.path) < len(top.path):
                    top = region
                break
            if known:
                break  # and so are those around it
            outer = region.parent
            assert outer is not None
            event, region = outer.entry, outer.region
    spans: list[tuple[int, int]] = []
    at, here = start, home
    while here is not top:  # out of the branches that only the start lies in
        spans.append((at, here.end))
        last.pop(here, None)
        outer = here.parent
        assert outer is not None
        at, here = outer.index, outer.region
    spans.append((at, last.pop(top)))
    spans += [(region.begin, end) for region, end in last.items()]
    return _merge([(first, last) for first, last in spans if first <= last])


def _merge(spans: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    merged: list[tuple[int, int]] = []
    for first, last in sorted(spans):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return tuple(merged)
