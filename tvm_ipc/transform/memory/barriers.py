# SPDX-License-Identifier: Apache-2.0
"""Which exit barriers are worth the memory that it takes to leave them out.

Without its barrier an all-reduce keeps its input live until the next meeting. In a chain of them
the inputs then alternate between two places instead of sharing one, so all barriers but the last
cost one more buffer together. What a storage may grow by is its budget; with a budget of 0 only
those barriers are left out that are free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from tvm_ipc.transform.ir.lifetimes import Lifetime, extended, lifetime
from tvm_ipc.transform.ir.program import Region
from tvm_ipc.transform.ir.roots import Allocation
from tvm_ipc.transform.memory.levels import Levels
from tvm_ipc.transform.memory.peers import Chance

#: Scope, device index and unit of size of the tensors that may share a storage.
GroupKey: TypeAlias = "tuple[str, int, int]"
#: The meetings until which peers may read an allocation.
Until: TypeAlias = "dict[Allocation, list[tuple[int, Region]]]"


class Memory:
    """The groups of tensors that inputs of all-reduces belong to, and what they need."""

    def __init__(
        self,
        groups: Mapping[GroupKey, Sequence[tuple[Allocation, int]]],
        lifetimes: Mapping[Allocation, Lifetime],
        total: Callable[[GroupKey, Mapping[Allocation, Lifetime], Until], int],
    ) -> None:
        self.groups = groups
        self.lifetimes = lifetimes  #: no barrier left out
        self._total = total
        self.size = {
            allocation: (key, size)
            for key, members in groups.items()
            for allocation, size in members
        }

    def total(self, key: GroupKey, ends: Until) -> int:
        """Return what a group needs, some lifetimes extended."""
        lifetimes = {**self.lifetimes, **{one: lifetime(one, until) for one, until in ends.items()}}
        return self._total(key, lifetimes, ends)


def until(chances: Iterable[Chance]) -> Until:
    """Return how long the inputs stay where these barriers are left out."""
    result: Until = {}
    for chance in chances:
        for allocation in chance.inputs:
            result.setdefault(allocation, []).append(chance.until)
    return result


def choose(
    chances: Sequence[Chance], memory: Memory, budget: int | None
) -> tuple[list[Chance], dict[GroupKey, int]]:
    """Return the barriers to leave out, and what each group may then need."""
    limits = _limits(chances, memory, budget)
    if _fits(chances, memory, limits):
        return list(chances), limits
    chosen = _affordable(chances, memory, limits)
    # What is live at once fits; whether the packing does is tried, large inputs given up first.
    while chosen and not _fits(chosen, memory, limits):
        chosen = chosen[: len(chosen) // 2]
    return chosen, limits


def _limits(chances: Sequence[Chance], memory: Memory, budget: int | None) -> dict[GroupKey, int]:
    largest: dict[GroupKey, int] = {}
    for chance in chances:
        for allocation in chance.inputs:
            key, size = memory.size[allocation]
            largest[key] = max(largest.get(key, 0), size)
    limits = {}
    for key, size in largest.items():
        if budget is not None:
            size = budget if key[2] == 0 else 0  # bytes say nothing of symbolic sizes
        limits[key] = memory.total(key, {}) + size
    return limits


def _fits(chances: Sequence[Chance], memory: Memory, limits: Mapping[GroupKey, int]) -> bool:
    ends = until(chances)
    return all(memory.total(key, ends) <= limit for key, limit in limits.items())


def _affordable(
    chances: Sequence[Chance], memory: Memory, limits: Mapping[GroupKey, int]
) -> list[Chance]:
    """Return those, small ones first, with which what is live at once stays in the limits."""
    lifetimes = dict(memory.lifetimes)
    events = 1 + max(span.last for span in lifetimes.values())
    events = max(events, 1 + max(chance.meeting.index for chance in chances))
    live: dict[GroupKey, Levels] = {}
    for key in limits:
        live[key] = Levels(events)
        for allocation, size in memory.groups[key]:
            for first, last in lifetimes[allocation].spans:
                live[key].add(first, last, size)
    chosen: list[Chance] = []
    order = sorted(
        chances,
        key=lambda one: (max(memory.size[part][1] for part in one.inputs), one.step.index),
    )
    for chance in order:
        added: list[tuple[Levels, int, int, int]] = []
        longer: dict[Allocation, Lifetime] = {}
        fits = True
        for allocation in chance.inputs:
            key, size = memory.size[allocation]
            known = lifetimes[allocation]
            longer[allocation] = extended(known, *chance.until)
            for first, last in _without(longer[allocation].spans, known.spans):
                fits = live[key].add(first, last, size) <= limits[key] and fits
                added.append((live[key], first, last, size))
        if fits:
            chosen.append(chance)
            lifetimes.update(longer)
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
