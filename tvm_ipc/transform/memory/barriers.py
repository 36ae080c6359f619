# SPDX-License-Identifier: Apache-2.0
"""Which exit barriers are worth the memory that it takes to leave them out.

Without its barrier a collective keeps its input live until the next meeting. In a chain of them
the inputs then alternate between two places instead of sharing one, so all barriers but the last
cost one more buffer together. What a storage may grow by is its budget; with a budget of 0 only
those barriers are left out that are free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from tvm_ipc.transform.ir.live_ranges import LiveRange, extended, live_range
from tvm_ipc.transform.ir.program import Region
from tvm_ipc.transform.ir.roots import Allocation
from tvm_ipc.transform.memory.levels import Levels
from tvm_ipc.transform.memory.peers import Candidate

#: Scope, device index and unit of size of the tensors that may share a storage.
GroupKey: TypeAlias = "tuple[str, int, int]"
#: The meetings until which peers may read an allocation.
Until: TypeAlias = "dict[Allocation, list[tuple[int, Region]]]"


class Memory:
    """The groups of tensors that inputs of collectives belong to, and what they need."""

    def __init__(
        self,
        groups: Mapping[GroupKey, Sequence[tuple[Allocation, int]]],
        live_ranges: Mapping[Allocation, LiveRange],
        total: Callable[[GroupKey, Mapping[Allocation, LiveRange], Until], int],
    ) -> None:
        self.groups = groups
        self.live_ranges = live_ranges  #: no barrier left out
        self._total = total
        self.size = {
            allocation: (key, size)
            for key, members in groups.items()
            for allocation, size in members
        }

    def total(self, key: GroupKey, ends: Until) -> int:
        """Return what a group needs, some live ranges extended."""
        live_ranges = {
            **self.live_ranges,
            **{one: live_range(one, until) for one, until in ends.items()},
        }
        return self._total(key, live_ranges, ends)


def until(candidates: Iterable[Candidate]) -> Until:
    """Return how long the inputs stay where these barriers are left out."""
    result: Until = {}
    for candidate in candidates:
        for allocation in candidate.inputs:
            result.setdefault(allocation, []).append(candidate.until)
    return result


def choose(
    candidates: Sequence[Candidate], memory: Memory, budget: int | None
) -> tuple[list[Candidate], dict[GroupKey, int]]:
    """Return the barriers to leave out, and what each group may then need."""
    limits = _limits(candidates, memory, budget)
    if _fits(candidates, memory, limits):
        return list(candidates), limits
    chosen = _affordable(candidates, memory, limits)
    # What is live at once fits; whether the packing does is tried, large inputs given up first.
    while chosen and not _fits(chosen, memory, limits):
        chosen = chosen[: len(chosen) // 2]
    return chosen, limits


def _limits(
    candidates: Sequence[Candidate], memory: Memory, budget: int | None
) -> dict[GroupKey, int]:
    largest: dict[GroupKey, int] = {}
    for candidate in candidates:
        for allocation in candidate.inputs:
            key, size = memory.size[allocation]
            largest[key] = max(largest.get(key, size), size)
    limits = {}
    for key, size in largest.items():
        if budget is not None:
            size = budget if key[2] == 0 else 0  # bytes say nothing of symbolic sizes
        limits[key] = memory.total(key, {}) + size
    return limits


def _fits(candidates: Sequence[Candidate], memory: Memory, limits: Mapping[GroupKey, int]) -> bool:
    ends = until(candidates)
    return all(memory.total(key, ends) <= limit for key, limit in limits.items())


def _affordable(
    candidates: Sequence[Candidate], memory: Memory, limits: Mapping[GroupKey, int]
) -> list[Candidate]:
    """Return those, small ones first, with which what is live at once stays in the limits."""
    live_ranges = dict(memory.live_ranges)
    events = 1 + max(span.last for span in live_ranges.values())
    events = max(events, 1 + max(candidate.meeting.index for candidate in candidates))
    live: dict[GroupKey, Levels] = {}
    for key in limits:
        live[key] = Levels(events)
        for allocation, size in memory.groups[key]:
            for first, last in live_ranges[allocation].spans:
                live[key].add(first, last, size)
    chosen: list[Candidate] = []
    order = sorted(
        candidates,
        key=lambda one: (max(memory.size[part][1] for part in one.inputs), one.step.index),
    )
    for candidate in order:
        added: list[tuple[Levels, int, int, int]] = []
        longer: dict[Allocation, LiveRange] = {}
        fits = True
        for allocation in candidate.inputs:
            key, size = memory.size[allocation]
            known = live_ranges[allocation]
            longer[allocation] = extended(known, *candidate.until)
            for first, last in _without(longer[allocation].spans, known.spans):
                fits = live[key].add(first, last, size) <= limits[key] and fits
                added.append((live[key], first, last, size))
        if fits:
            chosen.append(candidate)
            live_ranges.update(longer)
        else:
            for levels, first, last, size in added:
                levels.add(first, last, -size)
    return chosen


def _without(
    spans: Sequence[tuple[int, int]], others: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, int]]:
    """Yield the parts of spans that lie in none of the others, which are parts of them."""
    rest = deque(others)
    for first, last in spans:
        while rest and rest[0][1] <= last:
            begin, end = rest.popleft()
            if first < begin:
                yield first, begin - 1
            first = end + 1
        if first <= last:
            yield first, last
