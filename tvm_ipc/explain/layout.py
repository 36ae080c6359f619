# SPDX-License-Identifier: Apache-2.0
"""A memory plan in the plane: events from left to right, bytes from the bottom up.

A band holds the storages of one memory scope, one above the other, in them the tensors at their
offsets. Tensors with allocations of their own, results for example, have a second band.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tvm_ipc.inspection.sizes import evaluate
from tvm_ipc.transform.report import FunctionPlan, PlannedTensor

OWN = "an allocation of its own"


@dataclass(frozen=True)
class Block:
    """A tensor and its place."""

    tensor: PlannedTensor
    storage: str
    bottom: int  #: in bytes from the bottom of the band
    bytes: int


@dataclass(frozen=True)
class Shelf:
    """A storage and its place."""

    name: str
    bottom: int
    bytes: int


@dataclass(frozen=True)
class Band:
    """What one memory scope has in storages, or outside of them."""

    scope: str
    own: bool  #: tensors with allocations of their own
    bytes: int
    shelves: tuple[Shelf, ...]
    blocks: tuple[Block, ...]
    live: tuple[int, ...]  #: bytes at each event


def condense(plan: FunctionPlan) -> FunctionPlan:
    """Return the plan without the events that concern no tensor, nor compute or move anything."""
    kept = {
        i
        for i, event in enumerate(plan.events)
        if event.collective is not None or event.computes is not None
    }
    for transfer in plan.transfers:
        kept |= {transfer.first, transfer.last, *transfer.starts, *transfer.waits}
    for tensor in plan.tensors:
        kept |= {tensor.first, tensor.last, until(tensor)}
    order = sorted(i for i in kept if 0 <= i < len(plan.events))
    places = {old: new for new, old in enumerate(order)}
    if not order:
        return replace(plan, events=())

    def place(event: int) -> int:
        return places[min(max(event, order[0]), order[-1])]

    tensors = [
        replace(
            tensor,
            first=place(tensor.first),
            last=place(tensor.last),
            peers_until=None if tensor.peers_until is None else place(tensor.peers_until),
        )
        for tensor in plan.tensors
    ]
    transfers = [
        replace(
            transfer,
            first=place(transfer.first),
            last=place(transfer.last),
            starts=tuple(map(place, transfer.starts)),
            waits=tuple(map(place, transfer.waits)),
        )
        for transfer in plan.transfers
    ]
    events = tuple(plan.events[old] for old in order)
    return replace(plan, tensors=tuple(tensors), transfers=tuple(transfers), events=events)


def bands(plan: FunctionPlan, sizes: Mapping[str, int]) -> list[Band]:
    """Place everything that has a size; storages before what has none, large bands first."""
    scopes = dict.fromkeys(
        [*(storage.scope for storage in plan.storages), *(tensor.scope for tensor in plan.tensors)]
    )
    found = [part(plan, scope, sizes) for scope in scopes for part in (_planned, _own)]
    return sorted((band for band in found if band.bytes), key=lambda b: (b.own, -b.bytes))


def _planned(plan: FunctionPlan, scope: str, sizes: Mapping[str, int]) -> Band:
    shelves: dict[int, Shelf] = {}
    top = 0
    for index, storage in enumerate(plan.storages):
        if storage.scope == scope:
            size = number(storage.bytes, storage.size, sizes)
            shelves[index] = Shelf(storage.name, top, size)
            top += size
    blocks = []
    for tensor in plan.tensors:
        shelf = shelves.get(tensor.storage)
        if shelf is not None:
            offset = evaluate(tensor.offset, sizes) or 0
            size = number(tensor.bytes, tensor.size, sizes)
            blocks.append(Block(tensor, shelf.name, shelf.bottom + offset, size))
    live = _live(blocks, len(plan.events))
    return Band(scope, False, top, tuple(shelves.values()), tuple(blocks), live)


def _own(plan: FunctionPlan, scope: str, sizes: Mapping[str, int]) -> Band:
    """Give tensors without a storage a place to be drawn at: the lowest that is free."""
    own = [tensor for tensor in plan.tensors if tensor.storage < 0 and tensor.scope == scope]
    blocks: list[Block] = []
    busy: list[Block] = []
    for tensor in sorted(own, key=lambda tensor: tensor.first):
        size = number(tensor.bytes, tensor.size, sizes)
        busy = [block for block in busy if until(block.tensor) >= tensor.first]
        bottom = 0
        for block in sorted(busy, key=lambda block: block.bottom):
            if block.bottom - bottom >= size:
                break
            bottom = max(bottom, block.bottom + block.bytes)
        blocks.append(Block(tensor, OWN, bottom, size))
        busy.append(blocks[-1])
    top = max((block.bottom + block.bytes for block in blocks), default=0)
    return Band(scope, True, top, (), tuple(blocks), _live(blocks, len(plan.events)))


def until(tensor: PlannedTensor) -> int:
    """Return the last event at which anybody may touch the tensor."""
    return max(tensor.last, tensor.peers_until or 0)


def number(known: int | None, size: str, sizes: Mapping[str, int]) -> int:
    """Return a size in bytes, for the values of its variables where it is symbolic."""
    return known if known is not None else evaluate(size, sizes) or 0


def _live(blocks: list[Block], events: int) -> tuple[int, ...]:
    change = [0] * (events + 1)
    for block in blocks:
        change[min(block.tensor.first, events)] += block.bytes
        change[min(until(block.tensor) + 1, events)] -= block.bytes
    total = 0
    result = []
    for step in change[:events]:
        total += step
        result.append(total)
    return tuple(result)
