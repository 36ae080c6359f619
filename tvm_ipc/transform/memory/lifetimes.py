# SPDX-License-Identifier: Apache-2.0
"""When an allocation is live: the events between its first and its last use on some path.

A lifetime is a list of spans of events, since a tensor that a later branch alone reads is not live
in the other branch. It begins with the first use, not with the allocation, which writes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm_ipc.transform.ir.aliases import Allocation
from tvm_ipc.transform.ir.program import Region, common_region


@dataclass(eq=False, slots=True)
class Lifetime:
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


def lifetime(allocation: Allocation, more: Sequence[tuple[int, Region]] = ()) -> Lifetime:
    """Return the lifetime, extended to more (event, region) pairs.

    Their regions are that of a use or one around it.
    """
    home = allocation.step.region
    uses = allocation.uses  # in the order of the program
    if not uses:
        start = allocation.step.index
        return Lifetime(((start, start),), home)
    if not more and all(use.region is home for use in uses):
        return Lifetime(((uses[0].event, uses[-1].event),), home)
    last: dict[int, tuple[int, Region]] = {}
    for event, region in [*((use.event, use.region) for use in uses), *more]:
        known = last.get(id(region))
        if known is None or known[0] < event:
            last[id(region)] = (event, region)
    start = _within(uses[0].event, uses[0].region, home)
    spans: list[tuple[int, int]] = []
    for event, region in last.values():
        spans += _path(start, home, event, region)
    return Lifetime(_merge(spans), home)


def _within(event: int, region: Region, home: Region) -> int:
    """Return the event of `home` at which what happens in `region` begins."""
    if region is home or not region.within(home):
        return event
    return region.path[len(home.path)][0].entry


def _path(start: int, home: Region, event: int, region: Region) -> list[tuple[int, int]]:
    """Return the spans from an event in `home` to one in `region`, which comes later."""
    depth = len(common_region(home, region))
    spans = []
    at, here = start, home
    while len(here.path) > depth:  # out of the branches that only the start lies in
        spans.append((at, here.end))
        outer = here.parent
        assert outer is not None
        at, here = outer.index, outer.region
    for step, branch in region.path[depth:]:  # into those that only the event lies in
        spans.append((at, step.entry))
        at = step.branches[branch].begin
    spans.append((at, event))
    return [(first, last) for first, last in spans if first <= last]


def _merge(spans: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    merged: list[tuple[int, int]] = []
    for first, last in sorted(spans):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return tuple(merged)
