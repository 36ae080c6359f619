# SPDX-License-Identifier: Apache-2.0
"""Decides which exit barriers to omit within a memory budget.

Without its exit barrier a collective keeps its input live until its team synchronizes again. In a
chain of collectives the inputs then alternate between two buffers instead of sharing one, so that
omitting all barriers except the last costs one more buffer in total. The budget is the number of
bytes that a storage may grow by. With a budget of 0 only barriers that cost no memory are omitted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from tvm_ipc.analysis.alias_facts import Allocation
from tvm_ipc.analysis.live_ranges import LiveRange, extended, live_range
from tvm_ipc.analysis.program_order import Region
from tvm_ipc.transform.memory_plan.redundant_exit_barriers import BarrierCandidate

#: Scope, device index and unit of size of the tensors that may share a storage.
GroupKey: TypeAlias = "tuple[str, int, int]"
#: Barriers that are either all omitted or all kept, in the order of the program.
Unit: TypeAlias = "tuple[BarrierCandidate, ...]"
#: By allocation, the events until which peers may read it, with their regions.
ReadEnds: TypeAlias = "dict[Allocation, list[tuple[int, Region]]]"


@dataclass
class Block:
    """A planned storage: tensors at offsets, in units of its group."""

    size: int
    offsets: dict[Allocation, int]


@dataclass
class Arrangement:
    """The storages of a group; the remaining tensors keep allocations of their own."""

    size: int  #: the total of the storages, and the most that is live of the other tensors
    blocks: list[Block]


class GroupMemory:
    """The memory that groups of tensors need, for chosen ends of their live ranges."""

    def __init__(
        self,
        groups: Mapping[GroupKey, Sequence[tuple[Allocation, int]]],
        live_ranges: Mapping[Allocation, LiveRange],
        arrange: Callable[[GroupKey, Mapping[Allocation, LiveRange], ReadEnds], Arrangement],
    ) -> None:
        self.groups = groups
        self.live_ranges = live_ranges  #: with all barriers kept
        self._arrange = arrange
        #: By group, the last arrangement and the ends that it was computed for.
        self._arranged: dict[GroupKey, tuple[ReadEnds, Arrangement]] = {}
        self._extended: tuple[ReadEnds, dict[Allocation, LiveRange]] = {}, dict(live_ranges)
        self.size = {
            allocation: (key, size)
            for key, members in groups.items()
            for allocation, size in members
        }

    def total(self, key: GroupKey, ends: ReadEnds) -> int:
        """Return the memory that a group needs with the given ends."""
        arrangement = self._arrange(key, self.extended_ranges(ends), ends)
        self._arranged[key] = ends, arrangement
        return arrangement.size

    def extended_ranges(self, ends: ReadEnds) -> dict[Allocation, LiveRange]:
        """Return all live ranges, extended to the given ends."""
        if self._extended[0] != ends:
            longer = {
                allocation: live_range(allocation, moments) for allocation, moments in ends.items()
            }
            self._extended = ends, {**self.live_ranges, **longer}
        return self._extended[1]

    def arrangements(self, ends: ReadEnds) -> dict[GroupKey, Arrangement]:
        """Return the arrangements that were last computed for the given ends."""
        return {
            key: arrangement
            for key, (arranged_ends, arrangement) in self._arranged.items()
            if arranged_ends == ends
        }


def read_ends(candidates: Iterable[BarrierCandidate]) -> ReadEnds:
    """Return the ends of the reads of the inputs if the barriers are omitted."""
    result: ReadEnds = {}
    for candidate in candidates:
        for allocation in candidate.inputs:
            result.setdefault(allocation, []).append(candidate.read_end)
    return result


def choose_barriers(
    units: Sequence[Unit], memory: GroupMemory, budget: int | None
) -> tuple[list[BarrierCandidate], dict[GroupKey, int]]:
    """Return the barriers to omit, and the memory limit of each group.

    The barriers of a unit are either all omitted or all kept.
    """
    limits = _limits(_members(units), memory, budget)
    if _fits(units, memory, limits):
        return _members(units), limits
    chosen = _affordable(units, memory, limits)
    # The live bytes fit, but the packing may not. Keep the barriers with the largest inputs then.
    while chosen and not _fits(chosen, memory, limits):
        chosen = chosen[: len(chosen) // 2]
    return _members(chosen), limits


def _members(units: Iterable[Unit]) -> list[BarrierCandidate]:
    return [candidate for unit in units for candidate in unit]


def _limits(
    candidates: Sequence[BarrierCandidate], memory: GroupMemory, budget: int | None
) -> dict[GroupKey, int]:
    """Return the memory that each group may need: its memory with all barriers, plus the budget."""
    largest: dict[GroupKey, int] = {}
    for candidate in candidates:
        for allocation in candidate.inputs:
            key, size = memory.size[allocation]
            largest[key] = max(largest.get(key, size), size)
    limits = {}
    for key, size in largest.items():
        if budget is not None:
            size = budget if key[2] == 0 else 0  # bytes do not compare with symbolic sizes
        limits[key] = memory.total(key, {}) + size
    return limits


def _fits(units: Sequence[Unit], memory: GroupMemory, limits: Mapping[GroupKey, int]) -> bool:
    """Return whether every group stays within its limit if the units are omitted."""
    ends = read_ends(_members(units))
    return all(memory.total(key, ends) <= limit for key, limit in limits.items())


def _affordable(
    units: Sequence[Unit], memory: GroupMemory, limits: Mapping[GroupKey, int]
) -> list[Unit]:
    """Return units, those with small inputs first, whose live bytes stay within the limits."""
    live_ranges = dict(memory.live_ranges)
    events = 1 + max(span.last for span in live_ranges.values())
    events = max(events, 1 + max(candidate.substitute.index for candidate in _members(units)))
    live = {key: _live_bytes(memory.groups[key], live_ranges, events) for key in limits}
    chosen: list[Unit] = []
    order = sorted(
        units,
        key=lambda unit: (
            max(
                memory.size[allocation][1] for candidate in unit for allocation in candidate.inputs
            ),
            unit[0].step.index,
        ),
    )
    for unit in order:
        added: list[tuple[Any, int]] = []  # parts of `live`, and what was added to them
        longer: dict[Allocation, LiveRange] = {}
        fits = True
        for allocation, read_end in (
            (allocation, candidate.read_end)
            for candidate in unit
            for allocation in candidate.inputs
        ):
            key, size = memory.size[allocation]
            current = longer.get(allocation, live_ranges[allocation])
            longer[allocation] = extended(current, *read_end)
            for first, last in _subtract(longer[allocation].spans, current.spans):
                span = live[key][first : last + 1]
                span += size
                fits = fits and int(span.max()) <= limits[key]
                added.append((span, size))
        if fits:
            chosen.append(unit)
            live_ranges.update(longer)
        else:
            for span, size in added:
                span -= size
    return chosen


def _live_bytes(
    members: Sequence[tuple[Allocation, int]],
    live_ranges: Mapping[Allocation, LiveRange],
    events: int,
) -> Any:
    """Return for each event how many bytes of a group are live."""
    changes = np.zeros(events + 1, np.int64)
    for allocation, size in members:
        for first, last in live_ranges[allocation].spans:
            changes[first] += size
            changes[last + 1] -= size
    return changes.cumsum()


def _subtract(
    spans: Sequence[tuple[int, int]], contained: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, int]]:
    """Yield the spans without those that they contain, all in order."""
    remaining = deque(contained)
    for first, last in spans:
        while remaining and remaining[0][1] <= last:
            begin, end = remaining.popleft()
            if first < begin:
                yield first, begin - 1
            first = end + 1
        if first <= last:
            yield first, last
