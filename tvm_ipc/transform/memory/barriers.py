# SPDX-License-Identifier: Apache-2.0
"""Which exit barriers are worth the memory that it takes to leave them out.

Without its barrier an all-reduce keeps its input live until the next meeting. In a chain of them
the inputs then alternate between two places instead of sharing one, so all barriers but the last
cost one more buffer together. What a storage may grow by is its budget; with a budget of 0 only
those barriers are left out that are free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

from tvm_ipc.transform.ir.aliases import Allocation
from tvm_ipc.transform.ir.program import Region
from tvm_ipc.transform.memory.lifetimes import Lifetime, lifetime
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
        total: Callable[[GroupKey, Mapping[Allocation, Lifetime], Until], int],
    ) -> None:
        self.groups = groups
        self._total = total
        self.size = {
            allocation: (key, size)
            for key, members in groups.items()
            for allocation, size in members
        }

    def total(self, key: GroupKey, ends: Until) -> int:
        """Return what a group needs, some lifetimes extended."""
        lifetimes = {
            allocation: lifetime(allocation, ends.get(allocation, ()))
            for allocation, _ in self.groups[key]
        }
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
    live: dict[GroupKey, dict[int, int]] = {key: {} for key in limits}

    def events(span: Lifetime) -> set[int]:
        return {event for first, last in span.spans for event in range(first, last + 1)}

    def change(key: GroupKey, more: Iterable[int], size: int) -> int:
        table = live[key]
        for event in more:
            table[event] = table.get(event, 0) + size
        return max((table[event] for event in more), default=0)

    for key in limits:
        for allocation, size in memory.groups[key]:
            change(key, events(lifetime(allocation)), size)
    chosen: list[Chance] = []
    ends: Until = {}
    order = sorted(
        chances,
        key=lambda one: (max(memory.size[part][1] for part in one.inputs), one.step.index),
    )
    for chance in order:
        added: list[tuple[GroupKey, set[int], int]] = []
        fits = True
        for allocation in chance.inputs:
            key, size = memory.size[allocation]
            before = lifetime(allocation, ends.get(allocation, ()))
            after = lifetime(allocation, [*ends.get(allocation, ()), chance.until])
            more = events(after) - events(before)
            added.append((key, more, size))
            fits = change(key, more, size) <= limits[key] and fits
        if fits:
            chosen.append(chance)
            for allocation in chance.inputs:
                ends.setdefault(allocation, []).append(chance.until)
        else:
            for key, more, size in added:
                change(key, more, -size)
    return chosen
