# SPDX-License-Identifier: Apache-2.0
"""Lay out a memory plan as rectangles: events from left to right, bytes from bottom to top.

A band stacks the storages of one memory scope and draws the tensors at their offsets in them.
Tensors outside the plan, for example results, have a second band.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tvm_ipc.tools.inspection.evaluate_symbolic_size_text import evaluate
from tvm_ipc.transform.report import FunctionPlan, PlannedTensor

OUTSIDE_PLAN = "a separate allocation"


@dataclass(frozen=True)
class Block:
    """The rectangle of a tensor."""

    tensor: PlannedTensor
    storage: str
    bottom: int  #: in bytes from the bottom of the band
    bytes: int


@dataclass(frozen=True)
class Shelf:
    """The rectangle of a storage."""

    name: str
    bottom: int
    bytes: int


@dataclass(frozen=True)
class Band:
    """The storages of one memory scope, or its tensors outside of storages."""

    scope: str
    own: bool  #: True for tensors outside of storages
    bytes: int
    shelves: tuple[Shelf, ...]
    blocks: tuple[Block, ...]
    live: tuple[int, ...]  #: live bytes at each event


def condense(plan: FunctionPlan) -> FunctionPlan:
    """Return the plan without events that neither use tensors, compute, nor communicate."""
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
    new_index = {old: new for new, old in enumerate(order)}
    if not order:
        return replace(plan, events=())

    def move(event: int) -> int:
        return new_index[min(max(event, order[0]), order[-1])]

    tensors = [
        replace(
            tensor,
            first=move(tensor.first),
            last=move(tensor.last),
            peers_until=None if tensor.peers_until is None else move(tensor.peers_until),
        )
        for tensor in plan.tensors
    ]
    transfers = [
        replace(
            transfer,
            first=move(transfer.first),
            last=move(transfer.last),
            starts=tuple(map(move, transfer.starts)),
            waits=tuple(map(move, transfer.waits)),
        )
        for transfer in plan.transfers
    ]
    events = tuple(plan.events[old] for old in order)
    return replace(plan, tensors=tuple(tensors), transfers=tuple(transfers), events=events)


def bands(plan: FunctionPlan, sizes: Mapping[str, int]) -> list[Band]:
    """Return the bands that are not empty: storages first, then by descending size."""
    scopes = dict.fromkeys(
        [*(storage.scope for storage in plan.storages), *(tensor.scope for tensor in plan.tensors)]
    )
    candidates = [
        make_band(plan, scope, sizes)
        for scope in scopes
        for make_band in (_planned_band, _unplanned_band)
    ]
    return sorted((band for band in candidates if band.bytes), key=lambda b: (b.own, -b.bytes))


def _planned_band(plan: FunctionPlan, scope: str, sizes: Mapping[str, int]) -> Band:
    shelves: dict[int, Shelf] = {}
    top = 0
    for index, storage in enumerate(plan.storages):
        if storage.scope == scope:
            size = size_in_bytes(storage.bytes, storage.size, sizes)
            shelves[index] = Shelf(storage.name, top, size)
            top += size
    blocks = []
    for tensor in plan.tensors:
        shelf = shelves.get(tensor.storage)
        if shelf is not None:
            offset = evaluate(tensor.offset, sizes) or 0
            size = size_in_bytes(tensor.bytes, tensor.size, sizes)
            blocks.append(Block(tensor, shelf.name, shelf.bottom + offset, size))
    live = _live(blocks, len(plan.events))
    return Band(scope, False, top, tuple(shelves.values()), tuple(blocks), live)


def _unplanned_band(plan: FunctionPlan, scope: str, sizes: Mapping[str, int]) -> Band:
    """Draw each tensor without a storage at the lowest free position."""
    unplanned = [tensor for tensor in plan.tensors if tensor.storage < 0 and tensor.scope == scope]
    blocks: list[Block] = []
    live: list[Block] = []
    for tensor in sorted(unplanned, key=lambda tensor: tensor.first):
        size = size_in_bytes(tensor.bytes, tensor.size, sizes)
        live = [block for block in live if until(block.tensor) >= tensor.first]
        bottom = 0
        for block in sorted(live, key=lambda block: block.bottom):
            if block.bottom - bottom >= size:
                break
            bottom = max(bottom, block.bottom + block.bytes)
        blocks.append(Block(tensor, OUTSIDE_PLAN, bottom, size))
        live.append(blocks[-1])
    top = max((block.bottom + block.bytes for block in blocks), default=0)
    return Band(scope, True, top, (), tuple(blocks), _live(blocks, len(plan.events)))


def until(tensor: PlannedTensor) -> int:
    """Return the last event at which a rank may use the tensor."""
    return max(tensor.last, tensor.peers_until or 0)


def size_in_bytes(constant: int | None, size: str, sizes: Mapping[str, int]) -> int:
    """Return a size in bytes; a symbolic one is evaluated for the values of its variables."""
    return constant if constant is not None else evaluate(size, sizes) or 0


def _live(blocks: list[Block], events: int) -> tuple[int, ...]:
    """Return the live bytes at each event."""
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
