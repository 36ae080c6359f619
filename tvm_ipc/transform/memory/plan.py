# SPDX-License-Identifier: Apache-2.0
"""Decides where the tensors of a function lie.

Tensors are planned in groups: of one scope, one device and one unit of size. With an alignment for
offsets one storage holds all of a group, at offsets; where whole storages passed from tensor to
tensor need less, where the memory of the scope has no movable addresses, and without an alignment,
a group has several.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tvm import relax, tirx

from tvm_ipc.contract import IPC_MEMORY
from tvm_ipc.transform.ir.aliases import ModuleFacts
from tvm_ipc.transform.ir.live_ranges import LiveRange, live_range
from tvm_ipc.transform.ir.program import Region, Step
from tvm_ipc.transform.ir.roots import Allocation, Facts
from tvm_ipc.transform.memory.barriers import GroupKey, Memory, Until, choose, until
from tvm_ipc.transform.memory.packing import Item, align, most_live, pack
from tvm_ipc.transform.memory.peers import Candidate, Meetings, candidates
from tvm_ipc.transform.memory.pooling import Request, pool
from tvm_ipc.transform.memory.sizes import Size, Sizes

#: Scopes whose memory is bytes at addresses. In others a tensor begins where its storage does.
PACKED_SCOPES = ("global", IPC_MEMORY)
#: The size of a texture is not that of its elements; only the device's runtime knows it.
_TEXTURE = "global.texture"
_DYNAMIC_OUTPUT = "relax.memory_plan_dynamic_func_output"


@dataclass(frozen=True)
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
        """The tensors that it may share a storage with."""
        return self.scope, self.device, self.size.unit


@dataclass
class Block:
    """A storage to be: tensors at offsets, in units of its group."""

    size: int
    offsets: dict[Allocation, int]


@dataclass
class Arrangement:
    """The storages of a group; tensors in none of them have allocations of their own."""

    size: int  #: the storages, and what is live at once of the other tensors
    blocks: list[Block]


@dataclass(eq=False)
class NewStorage:
    """A storage and the place of the binding that allocates it."""

    scope: str
    device: int
    size: Size
    before: Step
    kill_after: Step | None = None  #: peers may read it until then
    early: bool = False  #: before an `if` that its first tensor is in


@dataclass
class Plan:
    """What is to be done in one function."""

    facts: Facts
    sizes: Sizes
    tensors: dict[Allocation, Tensor] = field(default_factory=dict)
    unplanned: dict[Allocation, str] = field(default_factory=dict)  #: with the reason
    live_ranges: dict[Allocation, LiveRange] = field(default_factory=dict)
    storages: list[NewStorage] = field(default_factory=list)
    place: dict[Allocation, tuple[NewStorage, int]] = field(default_factory=dict)
    #: The event of the last meeting until which peers may read a tensor
    peers_until: dict[Allocation, tuple[int, Region]] = field(default_factory=dict)
    #: All-reduces that do without their exit barrier, with the meeting that stands for it
    without_barrier: dict[Step, Candidate] = field(default_factory=dict)
    with_barrier: dict[Step, str] = field(default_factory=dict)  #: the others, with the reason
    drops_attribute: bool = False


def plan_function(
    module: ModuleFacts,
    meetings: Meetings,
    name: str,
    *,
    alignment: int | None,
    budget: int | None,
) -> Plan:
    """Return the plan of one Relax function of the module; changes nothing."""
    facts = module.of(name)
    assert facts is not None
    plan = Plan(facts, Sizes(name, facts.program.function))
    outputs = _sort(plan)
    groups: dict[GroupKey, list[Tensor]] = {}
    for allocation, tensor in plan.tensors.items():
        groups.setdefault(tensor.group, []).append(tensor)
        plan.live_ranges[allocation] = live_range(allocation)
    ends = _barriers(plan, meetings, groups, alignment, budget)
    plan.live_ranges.update((one, live_range(one, until)) for one, until in ends.items())
    for key, tensors in groups.items():
        for block in arrange(tensors, plan.live_ranges, alignment, ends).blocks:
            _settle(plan, key, block)
    for tensor in outputs:
        plan.tensors[tensor.allocation] = tensor
        storage = NewStorage(tensor.scope, tensor.device, tensor.size, tensor.allocation.step)
        plan.storages.append(storage)
        plan.place[tensor.allocation] = (storage, 0)
    return plan


def _barriers(
    plan: Plan,
    meetings: Meetings,
    groups: Mapping[GroupKey, list[Tensor]],
    alignment: int | None,
    budget: int | None,
) -> Until:
    """Decide which exit barriers are left out; return how long that keeps the inputs live."""
    found, plan.with_barrier = candidates(plan.facts, meetings)
    possible = []
    for candidate in found:
        if all(allocation in plan.tensors for allocation in candidate.inputs):
            possible.append(candidate)
        else:
            plan.with_barrier[candidate.step] = "the size of its input is not known"
    if not possible:
        return {}
    inputs = {allocation for candidate in possible for allocation in candidate.inputs}
    memory = Memory(
        {
            key: [
                (tensor.allocation, align(tensor.size.factor, alignment or 1)) for tensor in tensors
            ]
            for key, tensors in groups.items()
            if any(tensor.allocation in inputs for tensor in tensors)
        },
        plan.live_ranges,
        lambda key, live_ranges, ends: arrange(groups[key], live_ranges, alignment, ends).size,
    )
    chosen, limits = choose(possible, memory, budget)
    plan.without_barrier = {candidate.step: candidate for candidate in chosen}
    for candidate in possible:
        if candidate.step not in plan.without_barrier:
            key, _ = memory.size[candidate.inputs[0]]
            plan.with_barrier[candidate.step] = (
                f"without it {key[0]} would need more than "
                f"{plan.sizes.text(limits[key], key[2])} bytes"
            )
    ends = until(chosen)
    plan.peers_until = {
        allocation: max(meetings, key=lambda end: end[0]) for allocation, meetings in ends.items()
    }
    return ends


def arrange(
    tensors: list[Tensor],
    live_ranges: Mapping[Allocation, LiveRange],
    alignment: int | None,
    ends: Until,
) -> Arrangement:
    """Return the storages for the tensors of a group."""
    spans = [live_ranges[tensor.allocation] for tensor in tensors]
    items = [Item(tensor.size.factor, span) for tensor, span in zip(tensors, spans, strict=True)]
    if alignment is None or tensors[0].scope not in PACKED_SCOPES:
        return _pooled(tensors, items, ends)
    packing = pack(items, alignment)
    if packing.total > most_live(items):
        pooled = _pooled(tensors, items, ends)
        if pooled.size < packing.total:
            return pooled
    offsets = {
        tensor.allocation: offset for tensor, offset in zip(tensors, packing.offsets, strict=True)
    }
    return Arrangement(packing.total, [Block(packing.total, offsets)])


def _pooled(tensors: list[Tensor], items: list[Item], ends: Until) -> Arrangement:
    """Return what TVM's plan would be: many tensors are left to allocations of their own."""
    planned = [
        index
        for index, tensor in enumerate(tensors)
        if tensor.allocation.plain or tensor.allocation in ends
    ]
    requests = [
        Request(
            tensors[index].size.factor,
            tensors[index].dtype,
            tensors[index].allocation.step.index,
            items[index].live_range.last if tensors[index].allocation.uses else -1,
            tensors[index].allocation.plain,
        )
        for index in planned
    ]
    found = pool(requests, exact=not tensors[0].size.static)
    blocks = [
        Block(one.size, {tensors[planned[member]].allocation: 0 for member in one.members})
        for one in found
    ]
    apart = set(range(len(items))).difference(planned)
    alone = [items[index] for index in apart]
    return Arrangement(sum(block.size for block in blocks) + most_live(alone), blocks)


def _sort(plan: Plan) -> list[Tensor]:
    """Tell what is planned from what is not; return the outputs that get a storage by request."""
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
        if tensor is not None and dynamic_output and not _static(tensor.arguments[0]):
            del plan.unplanned[allocation]
            outputs.append(tensor)
    return outputs


def describe(sizes: Sizes, allocation: Allocation) -> Tensor | None:
    """Return what an allocation asks for, if that is known."""
    arguments = allocation.call.args[:]
    shape, dtype, device, *scope = arguments
    if type(shape) is not relax.ShapeExpr or type(device) is not tirx.IntImm:
        return None
    name = str(scope[0].value) if scope else "global"
    kind = dtype.value
    size = sizes.of(shape.values[:], kind)
    return Tensor(allocation, arguments, str(kind), name, int(device.value), size)


def _static(shape: Any) -> bool:
    return all(isinstance(extent, tirx.IntImm) for extent in shape.values)


def _settle(plan: Plan, key: GroupKey, block: Block) -> None:
    """Find the place of the storage in the program."""
    scope, device, unit = key
    steps = [allocation.step for allocation in block.offsets]
    path = steps[0].region.path
    until: tuple[int, Region] | None = None
    for allocation in block.offsets:
        end = plan.peers_until.get(allocation)
        if end is not None and (until is None or end[0] > until[0]):
            until = end
        for region in [allocation.step.region, *([end[1]] if end else [])]:
            path = path[: _shared(path, region)]
    first = min(steps, key=lambda step: step.index)
    before = _ancestor(first, len(path))
    kill_after = None
    if until is not None and until[0] > max(step.index for step in steps):
        kill_after = _ancestor(plan.facts.program.events[until[0]], len(path))
    early = before is not first
    storage = NewStorage(scope, device, Size(block.size, unit), before, kill_after, early)
    plan.storages.append(storage)
    for allocation, offset in block.offsets.items():
        plan.place[allocation] = (storage, offset)


def _shared(path: tuple[tuple[Step, int], ...], region: Region) -> int:
    length = 0
    for a, b in zip(path, region.path, strict=False):
        if a != b:
            break
        length += 1
    return length


def _ancestor(step: Step, depth: int) -> Step:
    """Return the step, or the if around it, whose region has this many ifs around it."""
    return step if len(step.region.path) == depth else step.region.path[depth][0]
