# SPDX-License-Identifier: Apache-2.0
"""Live ranges and offsets of tensors that are used while several streams of a GPU run.

On several streams, a binding may run before, during or after the bindings of another stream, until
the streams are joined. So a tensor that is used there is live from the fork to the join, except
that tensors which are used on one stream alone may share memory with each other:

    set_stream(1); wait_stream(0)
    matmul(x, w, a); copy(a, y)      # a and b share memory: both are used on stream 1
    matmul(z, w, b); copy(b, y)
    set_stream(0)
    matmul(x, v, c); copy(c, y)      # c has memory of its own
    wait_stream(1)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tvm_ipc.analysis.alias_facts import Allocation
from tvm_ipc.analysis.live_ranges import LiveRange, live_range, live_throughout
from tvm_ipc.analysis.program_order import Region, Step
from tvm_ipc.analysis.stream_regions import StreamRegion
from tvm_ipc.transform.memory_plan.packing import Item, Packing, align, most_live, pack
from tvm_ipc.transform.memory_plan.redundant_exit_barriers import BarrierCandidate


class OnStreams:
    """The tensors of a function that are used while several streams run.

    Attributes
    ----------
    longer : their live ranges, each extended to the regions in which the tensor is used.
    ends : the ends of these regions, until which storages of the tensors must not be freed.
    """

    def __init__(
        self,
        regions: Sequence[StreamRegion] = (),
        live_ranges: Mapping[Allocation, LiveRange] | None = None,
    ) -> None:
        self._regions = regions
        self.longer: dict[Allocation, LiveRange] = {}
        self.ends: dict[Allocation, list[tuple[int, Region]]] = {}
        #: The region and the stream of tensors that are used on one stream alone, and where they
        #: are live on it.
        self._alone: dict[Allocation, tuple[StreamRegion, int, LiveRange]] = {}
        for allocation, live in (live_ranges or {}).items() if regions else ():
            self._add(allocation, live)

    def _add(self, allocation: Allocation, live: LiveRange) -> None:
        used = self._used(live)
        if not used:
            return
        self.ends[allocation] = [(region.end, region.last.region) for region in used]
        longer = live
        for region in used:
            longer = live_throughout(longer, region.begin, region.end)
        self.longer[allocation] = longer
        stream = used[0].stream_of(use.point for use in allocation.uses)
        if stream is not None and allocation.step.region is used[0].first.region:
            self._alone[allocation] = used[0], stream, live

    def _used(self, live: LiveRange) -> list[StreamRegion]:
        return [
            region
            for region in self._regions
            if any(first <= region.end and region.begin <= last for first, last in live.spans)
        ]

    def last_step(self, allocation: Allocation) -> Step | None:
        """Return the end of the region in which a tensor has its last use, None if it has none.

        The tensor, which has an allocation of its own, must not be freed before.
        """
        if not self._regions or not allocation.uses:
            return None
        live = live_range(allocation)
        for region in self._used(live):
            if live.last <= region.end and region.last.region.within(allocation.step.region):
                return region.last
        return None

    def involve(self, candidate: BarrierCandidate) -> bool:
        """Return whether a collective may read, or be replaced as a barrier, on several streams."""
        return any(allocation in self.longer for allocation in candidate.inputs) or any(
            region.holds(candidate.substitute.index) for region in self._regions
        )

    def pack(
        self, allocations: Sequence[Allocation], items: Sequence[Item], alignment: int
    ) -> tuple[Packing, int]:
        """Return offsets for tensors with items, and a lower bound of the memory.

        Tensors that are used on one stream alone are packed on their own, to one item.
        """
        groups: dict[tuple[StreamRegion, int], list[int]] = {}
        apart: list[int] = []
        for number, allocation in enumerate(allocations):
            if allocation in self._alone:
                region, stream, _ = self._alone[allocation]
                groups.setdefault((region, stream), []).append(number)
            else:
                apart.append(number)
        packings = [
            self._pack_group(group, allocations, items, alignment) for group in groups.values()
        ]
        outer = [items[number] for number in apart]
        for group, packing in zip(groups.values(), packings, strict=True):
            outer.append(Item(packing.total, items[group[0]].live_range))
        live = most_live(outer)
        whole = pack(outer, alignment, live)
        offsets = [0] * len(items)
        starts = iter(whole.offsets)
        for number in apart:
            offsets[number] = next(starts)
        for group, packing in zip(groups.values(), packings, strict=True):
            start = next(starts)
            for number, offset in zip(group, packing.offsets, strict=True):
                offsets[number] = start + offset
        return Packing(tuple(offsets), whole.total), live

    def _pack_group(
        self,
        group: Sequence[int],
        allocations: Sequence[Allocation],
        items: Sequence[Item],
        alignment: int,
    ) -> Packing:
        """Return offsets for tensors that are used on the same stream alone."""
        inner = [Item(items[n].size, self._alone[allocations[n]][2]) for n in group]
        packing = pack(inner, alignment)
        return Packing(packing.offsets, align(packing.total, alignment))
