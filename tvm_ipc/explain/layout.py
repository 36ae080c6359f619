# SPDX-License-Identifier: Apache-2.0
"""A memory plan in the plane: events from left to right, bytes from the bottom up.

A band holds what one memory scope has: its storages one above the other, in them the tensors at
their offsets. Tensors with an allocation of their own, results for example, lie above them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tvm_ipc.explain.sizes import evaluate
from tvm_ipc.transform.report import FunctionPlan, PlannedTensor

OWN = "own allocations"


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
    """What one memory scope has."""

    scope: str
    bytes: int  #: the storages, and the tensors above them
    planned: int  #: the storages
    shelves: tuple[Shelf, ...]
    blocks: tuple[Block, ...]
    live: tuple[int, ...]  #: bytes at each event


def bands(plan: FunctionPlan, sizes: Mapping[str, int]) -> list[Band]:
    """Place everything that has a size; scopes with the most bytes come first."""
    scopes = dict.fromkeys(
        [*(storage.scope for storage in plan.storages), *(tensor.scope for tensor in plan.tensors)]
    )
    found = [_band(plan, scope, sizes) for scope in scopes]
    return sorted((band for band in found if band.bytes), key=lambda band: -band.bytes)


def _band(plan: FunctionPlan, scope: str, sizes: Mapping[str, int]) -> Band:
    shelves: dict[int, Shelf] = {}
    top = 0
    for index, storage in enumerate(plan.storages):
        if storage.scope == scope:
            size = number(storage.bytes, storage.size, sizes)
            shelves[index] = Shelf(storage.name, top, size)
            top += size
    planned = top
    blocks = []
    own = []
    for tensor in plan.tensors:
        shelf = shelves.get(tensor.storage)
        size = number(tensor.bytes, tensor.size, sizes)
        if shelf is not None:
            offset = evaluate(tensor.offset, sizes) or 0
            blocks.append(Block(tensor, shelf.name, shelf.bottom + offset, size))
        elif tensor.scope == scope and tensor.storage < 0:
            own.append((tensor, size))
    for tensor, bottom, size in _stack(own):
        blocks.append(Block(tensor, OWN, planned + bottom, size))
        top = max(top, planned + bottom + size)
    if own:
        shelves[-1] = Shelf(OWN, planned, top - planned)
    live = _live(blocks, len(plan.events))
    return Band(scope, top, planned, tuple(shelves.values()), tuple(blocks), live)


def until(tensor: PlannedTensor) -> int:
    """Return the last event at which anybody may touch the tensor."""
    return max(tensor.last, tensor.peers_until or 0)


def number(known: int | None, size: str, sizes: Mapping[str, int]) -> int:
    """Return a size in bytes, for the values of its variables where it is symbolic."""
    return known if known is not None else evaluate(size, sizes) or 0


def _stack(tensors: list[tuple[PlannedTensor, int]]) -> list[tuple[PlannedTensor, int, int]]:
    """Give tensors without a storage a place to be drawn at: the lowest that is free."""
    placed: list[tuple[PlannedTensor, int, int]] = []
    live: list[tuple[PlannedTensor, int, int]] = []
    for tensor, size in sorted(tensors, key=lambda entry: entry[0].first):
        live = [entry for entry in live if until(entry[0]) >= tensor.first]
        bottom = 0
        for _, start, length in sorted(live, key=lambda entry: entry[1]):
            if start - bottom >= size:
                break
            bottom = max(bottom, start + length)
        live.append((tensor, bottom, size))
        placed.append(live[-1])
    return placed


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
