# SPDX-License-Identifier: Apache-2.0
"""Plans the storages and offsets of the tensors of a function.

Tensors are planned in groups of equal scope, device and unit of size. If an alignment for offsets
is given, one storage holds all tensors of a group, at offsets. A group has several storages, each
of which tensors reuse as a whole, if no alignment is given, if that needs less memory, or if the
memory of its scope has no address arithmetic. `tensors_on_streams` describes tensors that are used
while several streams of a GPU run.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any

from tvm import relax, tirx

from tvm_ipc.analysis.alias_facts import AliasFacts, Allocation
from tvm_ipc.analysis.branch_collective_groups import Counterparts
from tvm_ipc.analysis.ffi_arrays import as_list
from tvm_ipc.analysis.find_aliases import ModuleAliasFacts
from tvm_ipc.analysis.live_ranges import LiveRange, live_range
from tvm_ipc.analysis.program_order import Region, Step, ancestor, common_region
from tvm_ipc.analysis.shape_algebra import ShapeAlgebra, Size
from tvm_ipc.analysis.stream_regions import find_stream_regions
from tvm_ipc.packed_functions import IPC_MEMORY
from tvm_ipc.transform.memory_plan.exit_barrier_budget import (
    Arrangement,
    Block,
    GroupKey,
    GroupMemory,
    Unit,
    choose_barriers,
    read_ends,
)
from tvm_ipc.transform.memory_plan.packing import Item, align, most_live
from tvm_ipc.transform.memory_plan.redundant_exit_barriers import (
    BarrierCandidate,
    ExitBarriers,
    candidates,
)
from tvm_ipc.transform.memory_plan.tensors_on_streams import OnStreams
from tvm_ipc.transform.memory_plan.whole_storage_reuse import StorageRequest, pool

#: Scopes with byte addresses. In other scopes a tensor starts at the beginning of its storage.
PACKED_SCOPES = ("global", IPC_MEMORY)
#: Only the runtime of the device knows the size of a texture.
_TEXTURE = "global.texture"
_DYNAMIC_OUTPUT = "relax.memory_plan_dynamic_func_output"


@dataclass(frozen=True, eq=False)
class Tensor:
    """An allocation that is planned."""

    allocation: Allocation
    arguments: list[Any]  #: shape, dtype, device, scope
    dtype: str
    scope: str
    device: int
    size: Size

    @property
    def group(self) -> GroupKey:
        """The key of the tensors that it may share a storage with."""
        return self.scope, self.device, self.size.unit


@dataclass(eq=False)
class NewStorage:
    """A storage, and the position of the binding that allocates it."""

    scope: str
    device: int
    size: Size
    before: Step  #: the step that it is allocated before
    kill_after: Step | None = None  #: the step until which peers may read it
    early: bool = False  #: whether it is allocated before an `if` that contains its first tensor


@dataclass
class Plan:
    """The memory plan of one function."""

    facts: AliasFacts
    sizes: ShapeAlgebra
    tensors: dict[Allocation, Tensor] = field(default_factory=dict)
    unplanned: dict[Allocation, str] = field(default_factory=dict)  #: with the reason
    live_ranges: dict[Allocation, LiveRange] = field(default_factory=dict)
    storages: list[NewStorage] = field(default_factory=list)
    offset_in: dict[Allocation, tuple[NewStorage, int]] = field(default_factory=dict)
    #: The last event until which peers may read a tensor, with its region.
    peers_until: dict[Allocation, tuple[int, Region]] = field(default_factory=dict)
    #: Collectives without their exit barrier.
    without_barrier: dict[Step, BarrierCandidate] = field(default_factory=dict)
    with_barrier: dict[Step, str] = field(default_factory=dict)  #: the others, with the reason
    #: Groups of collectives that ranks in different branches may run as one call.
    groups: list[list[Step]] = field(default_factory=list)
    #: Collectives that a call in another function may match.
    cross_function: list[Step] = field(default_factory=list)
    drops_attribute: bool = False  #: whether the attribute for dynamic outputs is removed
    on_streams: OnStreams = field(default_factory=OnStreams)


def plan_function(
    module: ModuleAliasFacts,
    exit_barriers: ExitBarriers,
    counterparts: Counterparts,
    name: str,
    *,
    alignment: int | None,
    budget: int | None,
) -> Plan:
    """Return the plan of one Relax function of the module, which is not changed."""
    facts = module.of(name)
    assert facts is not None
    plan = Plan(facts, ShapeAlgebra(name, facts.program.function))
    outputs = _classify_allocations(plan)
    groups: dict[GroupKey, list[Tensor]] = {}
    for allocation, tensor in plan.tensors.items():
        groups.setdefault(tensor.group, []).append(tensor)
        plan.live_ranges[allocation] = live_range(allocation)
    plan.on_streams = OnStreams(find_stream_regions(facts.program), plan.live_ranges)
    plan.live_ranges |= plan.on_streams.longer
    plan.groups = counterparts.groups(facts.collectives)
    plan.cross_function = [
        step for step in facts.collectives if counterparts.crosses_functions(name, step)
    ]
    arrangements = _elide_barriers(plan, exit_barriers, groups, alignment, budget)
    for key, tensors in groups.items():
        arrangement = arrangements.get(key)
        if arrangement is None:
            arrangement = arrange(
                tensors, plan.live_ranges, alignment, plan.peers_until, plan.on_streams
            )
        for block in arrangement.blocks:
            _add_storage(plan, key, block)
    for tensor in outputs:
        plan.tensors[tensor.allocation] = tensor
        storage = NewStorage(tensor.scope, tensor.device, tensor.size, tensor.allocation.step)
        plan.storages.append(storage)
        plan.offset_in[tensor.allocation] = (storage, 0)
    return plan


def _elide_barriers(
    plan: Plan,
    exit_barriers: ExitBarriers,
    groups: Mapping[GroupKey, list[Tensor]],
    alignment: int | None,
    budget: int | None,
) -> dict[GroupKey, Arrangement]:
    """Decide which exit barriers are omitted, and extend the live ranges of their inputs.

    Return the arrangements that were computed for the decision.
    """
    provable, plan.with_barrier = candidates(plan.facts, exit_barriers)
    possible = []
    for candidate in provable:
        if not all(allocation in plan.tensors for allocation in candidate.inputs):
            plan.with_barrier[candidate.step] = "the size of its input is not known"
        elif plan.on_streams.involve(candidate):
            plan.with_barrier[candidate.step] = "its input is used while several streams run"
        else:
            possible.append(candidate)
    units = _group_candidates(plan, possible)
    possible = [candidate for unit in units for candidate in unit]
    if not possible:
        return {}
    inputs = {allocation for candidate in possible for allocation in candidate.inputs}
    memory = GroupMemory(
        {
            key: [
                (tensor.allocation, align(tensor.size.factor, alignment or 1)) for tensor in tensors
            ]
            for key, tensors in groups.items()
            if any(tensor.allocation in inputs for tensor in tensors)
        },
        plan.live_ranges,
        lambda key, live_ranges, ends: arrange(
            groups[key], live_ranges, alignment, ends, plan.on_streams
        ),
    )
    chosen, limits = choose_barriers(units, memory, budget)
    plan.without_barrier = {candidate.step: candidate for candidate in chosen}
    for candidate in possible:
        if candidate.step not in plan.without_barrier:
            key, _ = memory.size[candidate.inputs[0]]
            plan.with_barrier[candidate.step] = (
                f"without it {key[0]} would need more than "
                f"{plan.sizes.text(limits[key], key[2])} bytes"
            )
    ends = read_ends(chosen)
    plan.peers_until = {
        allocation: max(moments, key=lambda end: end[0]) for allocation, moments in ends.items()
    }
    plan.live_ranges = memory.extended_ranges(ends)
    return memory.arrangements(ends)


def _group_candidates(plan: Plan, possible: list[BarrierCandidate]) -> list[Unit]:
    """Return the barriers that can only be omitted together; note the others in the plan."""
    by_step = {candidate.step: candidate for candidate in possible}
    for step in plan.cross_function:
        if by_step.pop(step, None) is not None:
            plan.with_barrier[step] = "a call in another function may match it in another branch"
    units: list[Unit] = []
    for group in plan.groups:
        kept = next((step for step in group if step not in by_step), None)
        unit = tuple(by_step.pop(step) for step in group if step in by_step)
        if kept is None:
            units.append(unit)
            continue
        for candidate in unit:
            plan.with_barrier[candidate.step] = (
                f"the {kept.collective} that matches it in another branch keeps its barrier"
            )
    units += [(candidate,) for candidate in by_step.values()]
    return units


def arrange(
    tensors: list[Tensor],
    live_ranges: Mapping[Allocation, LiveRange],
    alignment: int | None,
    ends: Container[Allocation],
    on_streams: OnStreams,
) -> Arrangement:
    """Return the storages for the tensors of a group.

    Parameters
    ----------
    ends : the tensors whose live ranges are extended because peers read them.
    on_streams : the tensors that are used while several streams of a GPU run.
    """
    spans = [live_ranges[tensor.allocation] for tensor in tensors]
    items = [Item(tensor.size.factor, span) for tensor, span in zip(tensors, spans, strict=True)]
    if alignment is None or tensors[0].scope not in PACKED_SCOPES:
        return _arrange_pooled(tensors, items, ends)
    allocations = [tensor.allocation for tensor in tensors]
    packing, live = on_streams.pack(allocations, items, alignment)
    if packing.total > live:
        pooled = _arrange_pooled(tensors, items, ends)
        if pooled.size < packing.total:
            return pooled
    offsets = dict(zip(allocations, packing.offsets, strict=True))
    return Arrangement(packing.total, [Block(packing.total, offsets)])


def _arrange_pooled(
    tensors: list[Tensor], items: list[Item], ends: Container[Allocation]
) -> Arrangement:
    """Return the plan of TVM's planner, in which many tensors keep allocations of their own."""
    planned = [
        index
        for index, tensor in enumerate(tensors)
        if tensor.allocation.plain or tensor.allocation in ends
    ]
    requests = [
        StorageRequest(
            tensors[index].size.factor,
            tensors[index].dtype,
            tensors[index].allocation.step.index,
            items[index].live_range.last if tensors[index].allocation.uses else -1,
            tensors[index].allocation.plain,
        )
        for index in planned
    ]
    blocks = [
        Block(storage.size, {tensors[planned[member]].allocation: 0 for member in storage.members})
        for storage in pool(requests, exact=not tensors[0].size.static)
    ]
    unplanned = [items[index] for index in set(range(len(items))).difference(planned)]
    return Arrangement(sum(block.size for block in blocks) + most_live(unplanned), blocks)


def _classify_allocations(plan: Plan) -> list[Tensor]:
    """Record which allocations are planned, and why the others are not.

    Return the outputs that get a storage of their own, because an attribute requests it.
    """
    function = plan.facts.program.function
    attributes = function.attrs
    dynamic_output = bool(attributes is not None and attributes.get(_DYNAMIC_OUTPUT, 0))
    plan.drops_attribute = dynamic_output
    outputs = []
    for allocation in plan.facts.allocations:
        tensor = describe(plan.sizes, allocation)
        if tensor is None:
            plan.unplanned[allocation] = "its shape or its device is not known"
        elif tensor.scope.startswith(_TEXTURE):
            plan.unplanned[allocation] = "it is a texture"
            continue
        elif allocation.kept is not None:
            plan.unplanned[allocation] = allocation.kept
        elif allocation.returned:
            plan.unplanned[allocation] = "it is returned"
        else:
            plan.tensors[allocation] = tensor
            continue
        if tensor is not None and dynamic_output and not _is_static(tensor.arguments[0]):
            del plan.unplanned[allocation]
            outputs.append(tensor)
    return outputs


def describe(sizes: ShapeAlgebra, allocation: Allocation) -> Tensor | None:
    """Return the tensor of an allocation, None if its shape or its device is unknown."""
    arguments = as_list(allocation.call.args)
    shape, dtype, device, *scope = arguments
    if type(shape) is not relax.ShapeExpr or type(device) is not tirx.IntImm:
        return None
    name = str(scope[0].value) if scope else "global"
    kind = dtype.value
    size = sizes.of(as_list(shape.values), kind)
    return Tensor(allocation, arguments, str(kind), name, int(device.value), size)


def _is_static(shape: Any) -> bool:
    return all(isinstance(extent, tirx.IntImm) for extent in shape.values)


def _add_storage(plan: Plan, key: GroupKey, block: Block) -> None:
    """Add a storage to the plan, at a position in the program that reaches all of its tensors."""
    scope, device, unit = key
    steps = [allocation.step for allocation in block.offsets]
    regions = [step.region for step in steps]
    read_end: tuple[int, Region] | None = None
    for allocation in block.offsets:
        ends = [plan.peers_until.get(allocation), *plan.on_streams.ends.get(allocation, ())]
        for end in ends:
            if end is not None:
                regions.append(end[1])
                if read_end is None or end[0] > read_end[0]:
                    read_end = end
    region = common_region(regions)
    first = min(steps, key=lambda step: step.index)
    before = ancestor(first, region)
    kill_after = None
    if read_end is not None and read_end[0] > max(step.index for step in steps):
        kill_after = ancestor(plan.facts.program.points[read_end[0]], region)
    early = before is not first
    storage = NewStorage(scope, device, Size(block.size, unit), before, kill_after, early)
    plan.storages.append(storage)
    for allocation, offset in block.offsets.items():
        plan.offset_in[allocation] = (storage, offset)
