# SPDX-License-Identifier: Apache-2.0
"""What a planned program without branches does on every rank, one clock for each.

Passes and their checker share the contract's words on which team contains another. This shares
nothing with them: it runs the function on all ranks, each of which knows how far others are, and
no more. A rank that writes memory has to know that all who may read it have gone on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import relax, tirx

from tvm_ipc.packed_functions import CollectiveFlag, Function, Sync, find


@dataclass(frozen=True)
class Bytes:
    """Where a tensor lies."""

    storage: int
    begin: int
    end: int

    def overlaps(self, other: Bytes) -> bool:
        return self.storage == other.storage and self.begin < other.end and other.begin < self.end


@dataclass
class Ranks:
    """How far each rank knows each to be, and what others may read of its memory."""

    world: int
    clocks: list[list[int]] = field(default_factory=list)
    reads: list[tuple[int, Bytes, list[int], int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clocks = [[0] * self.world for _ in range(self.world)]

    def meet(self, teams: list[list[int]]) -> None:
        """Let the ranks of each team wait until all of them have come."""
        for team in teams:
            known = np.max([self.clocks[rank] for rank in team], axis=0).tolist()
            for rank in team:
                self.clocks[rank] = list(known)

    def early(self, what: Bytes | None) -> list[tuple[int, int]]:
        """Return who writes memory, or frees all of it, that somebody may still read."""
        return [
            (rank, reader)
            for rank, memory, readers, step in self.reads
            if what is None or memory.overlaps(what)
            for reader in readers
            if self.clocks[rank][reader] <= step
        ]


def races(mod: tvm.IRModule, world: int, rows: int) -> list[str]:
    """Return the writes of `main` that come too early on some rank, where its `n` is `rows`."""
    ranks = Ranks(world)
    places: dict[Any, Bytes] = {}
    found = []
    (block,) = mod["main"].body.blocks
    for step, binding in enumerate(block.bindings):
        value = binding.value
        collective = None
        if isinstance(value, relax.Var):
            places[binding.var] = places.get(value, Bytes(-1, 0, 0))
        elif isinstance(value, relax.Call):
            place = _allocated(value, places, step, rows)
            if place is not None:
                places[binding.var] = place
                continue
            known = isinstance(value.op, relax.ExternFunc) and find(str(value.op.global_symbol))
            if known and known.sync in (Sync.PARTIAL, Sync.BARRIER):
                collective = known
                teams = _teams(known, value, world)
                if known.sync is Sync.BARRIER:
                    ranks.meet(teams)
            if not isinstance(value.op, tvm.ir.Op):  # the last argument is what it writes
                written = places.get(value.args[-1])
                if written is not None:
                    found += [
                        f"{binding.var}: rank {rank} writes what rank {reader} may read"
                        for rank, reader in ranks.early(written)
                    ]
        for rank in range(world):
            ranks.clocks[rank][rank] = step + 1
        if collective is not None and _leaves_out(collective, value):
            for team in teams:
                for rank in team:
                    for name in collective.peers_read:
                        (at,) = collective.positions((name,), len(value.args))
                        readers = [other for other in team if other != rank]
                        ranks.reads.append((rank, places[value.args[at]], readers, step))
    found += [f"the end: rank {rank}, read by {reader}" for rank, reader in ranks.early(None)]
    return found


def _allocated(call: relax.Call, places: dict[Any, Bytes], step: int, rows: int) -> Bytes | None:
    """Return where the tensor lies that a call makes, None for another call."""
    name = call.op.name if isinstance(call.op, tvm.ir.Op) else ""
    if name == "relax.reshape":
        return places.get(call.args[0], Bytes(-1, 0, 0))
    if name == "relax.memory.alloc_storage":
        return Bytes(step, 0, number_of(call.args[0].values[0], rows))
    if name not in ("relax.memory.alloc_tensor", "relax.builtin.alloc_tensor"):
        return None
    whole = name == "relax.builtin.alloc_tensor"
    shape, dtype = (call.args[0], call.args[1]) if whole else (call.args[2], call.args[3])
    size = allocated_bytes(shape, dtype, rows)
    if whole:
        return Bytes(step, 0, size)
    begin = number_of(call.args[1], rows)
    return Bytes(places[call.args[0]].storage, begin, begin + size)


def allocated_bytes(shape: Any, dtype: Any, rows: int | Mapping[str, int]) -> int:
    """Return the bytes of a tensor of a shape."""
    name = str(dtype.value if hasattr(dtype, "value") else getattr(dtype, "dtype", dtype))
    return prod(number_of(one, rows) for one in shape.values) * np.dtype(name).itemsize


def number_of(extent: Any, rows: int | Mapping[str, int]) -> int:
    """Return a number where all variables are `rows`, or what it has for their names."""
    extent = extent.value if isinstance(extent, tvm.ir.GenericConst) else extent
    if isinstance(extent, (int, tirx.IntImm)):
        return int(extent)
    analyzer = tvm.sym.Analyzer()

    def bind(var: Any) -> None:
        value = rows if isinstance(rows, int) else rows[str(var.name)]
        analyzer.bind(var, tirx.IntImm(str(var.ty), value))

    tvm_ffi.structural_walk(extent, [(tvm.ir.Var, bind)])
    return int(analyzer.simplify(extent))


def _teams(function: Function, call: relax.Call, world: int) -> list[list[int]]:
    """Return the teams of a collective; in these programs there are no groups."""
    name = function.parameter_of_type("Team")
    if name is None:
        return [list(range(world))]
    (at,) = function.positions((name,), len(call.args))
    given = call.args[at]
    if not isinstance(given, relax.ShapeExpr):
        return [list(range(world))]
    size, *members = map(int, given.values)
    return [members[first : first + size] for first in range(0, len(members), size)]


def _leaves_out(function: Function, call: relax.Call) -> bool:
    name = function.parameter_of_type("CollectiveFlag")
    if name is None:
        return False
    (at,) = function.positions((name,), len(call.args))
    return bool(int(call.args[at].value) & CollectiveFlag.NO_EXIT_BARRIER)
