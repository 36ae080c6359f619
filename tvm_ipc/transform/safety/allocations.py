# SPDX-License-Identifier: Apache-2.0
"""Storages and tensors that a function makes, and whether each lies in its storage."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import tvm
from tvm import relax, tirx

from tvm_ipc.transform.ir.polynomials import Number
from tvm_ipc.transform.safety.buffers import Buffer, Storage, Value, objects, storage_of
from tvm_ipc.transform.safety.effects import Effects
from tvm_ipc.transform.safety.extents import Extents, Given
from tvm_ipc.transform.safety.hazards import Hazard, HazardKind
from tvm_ipc.transform.safety.statements import Argument, Statement, Statements

#: Where a tensor begins and ends, None where that is not known, and what is given by its extents.
_Span = tuple[Number | None, Number | None, Given]


class Allocations(Effects):
    """What a function allocates."""

    def __init__(
        self,
        name: str,
        extents: Extents,
        hazards: dict[tuple[Any, ...], Hazard],
        steps: Statements,
    ) -> None:
        super().__init__(name, extents, hazards)
        self._steps = steps
        self._spans: dict[Any, _Span] = {}
        self._kept: list[Any] = []

    def _alloc_storage(
        self, shape: Argument, item: float, scope: str | None, step: Statement
    ) -> Storage:
        """Make a storage, of a scope that may be unknown."""
        dims = self._dims(shape)
        size = None if dims is None else self._extents.size(dims, item)
        return Storage(str(step.bound.name), scope, size)

    def _alloc_tensor(
        self, source: Value, step: Statement, offset: Argument, shape: Argument, dtype: Argument
    ) -> Value:
        """Make a tensor that lies in what the source reaches."""
        begin, end, given = self._span(offset, shape, item_bytes(dtype))
        name = str(step.bound.name)
        extents, buffers = self._extents, []
        for thing in objects(source):
            buffer = Buffer(name, storage_of(thing), begin, end, given=given)
            buffers.append(buffer)
            limit = buffer.storage.size
            if begin is not None and not extents.at_most(0, begin, given):
                where = f"begins at byte {extents.text(begin)}"
                self._out_of_bounds(0, begin, buffer, where, step)
            if end is None or limit is None:
                continue
            if not extents.at_most(end, limit, given):
                where = f"ends at byte {extents.text(end)} of {extents.text(limit)}"
                self._out_of_bounds(end, limit, buffer, where, step)
        return frozenset(buffers)

    def _view(self, source: Value, step: Statement, offset: Argument, shape: Argument) -> Value:
        """Make a tensor that is a part of what the source reaches, from a byte on."""
        at, past, given = self._span(offset, shape, item_bytes_of(step.bound.ty))
        extents, parts = self._extents, []
        for thing in objects(source):
            if isinstance(thing, Storage) or thing.begin is None or at is None:
                parts.append(thing)
                continue
            end = None if past is None else extents.add(thing.begin, past)
            begin = extents.add(thing.begin, at)
            known = (*thing.given, *given)
            part = replace(thing, begin=begin, end=end, origin=thing.origin or thing, given=known)
            parts.append(part)
            if end is None or thing.end is None or extents.at_most(end, thing.end, known):
                continue
            where = f"ends at byte {extents.text(end)} of {extents.text(thing.end)}"
            self._out_of_bounds(end, thing.end, part, where, step)
        return frozenset(parts)

    def _out_of_bounds(
        self, low: Number, high: Number, buffer: Buffer, where: str, step: Statement
    ) -> None:
        """Report that low may be more than high."""
        beyond = self._extents.subtract(low, self._extents.add(high, 1))
        example = self._extents.example(*buffer.given, beyond)
        self._report(HazardKind.BOUNDS, buffer, step, where, example)

    def _alloc_alone(
        self, shape: Argument, dtype: Argument, scope: Argument, step: Statement
    ) -> Value:
        """Make a tensor in a storage of its own."""
        storage = self._alloc_storage(shape, item_bytes(dtype), text_of(scope), step)
        return frozenset({Buffer(storage.name, storage, 0, storage.size)})

    def _span(self, offset: Argument, shape: Argument, item: float) -> _Span:
        """Return where a tensor begins and ends, None where that is not known."""
        dims = self._dims(shape)
        at = int(offset.value) if type(offset) is tirx.IntImm else offset
        key = (
            at if type(at) is int else hash(at),
            type(offset) is int,
            item,
            *map(_key, dims or ()),
        )
        span = self._spans.get(key) if dims is not None else None
        if span is None:
            # The hash of an expression that is gone may be another's.
            self._kept += [offset, *(dims or ())]
            where = self._steps.variables[offset] if type(offset) is int else offset
            begin = self._extents.number(where)
            size = None if dims is None else self._extents.size(dims, item)
            end = None if begin is None or size is None else self._extents.add(begin, size)
            given = self._extents.given([size, *map(self._extents.number, dims or ())])
            span = begin, end, given
            if dims is not None:
                self._spans[key] = span
        return span

    def _dims(self, shape: Argument) -> Any:
        if type(shape) is relax.ShapeExpr:
            return shape.values[:]
        if type(shape) is int:
            ty = self._steps.variables[shape].ty
            if isinstance(ty, relax.ShapeType) and ty.values is not None:
                return ty.values[:]
        return None


def text_of(scope: Any) -> str | None:
    """Return a string constant, None for anything else."""
    return str(scope.value) if isinstance(scope, tvm.ir.StringImm) else None


def _key(dim: Any) -> Any:
    return int(dim.value) if type(dim) is tirx.IntImm else (hash(dim),)


def item_bytes(dtype: Any) -> float:
    """Return the bytes of an element, NaN where the type is not known."""
    return _bytes_of(str(dtype.value)) if isinstance(dtype, tvm.ir.GenericConst) else math.nan


def item_bytes_of(ty: Any) -> float:
    """Return the bytes of an element of a tensor, NaN where its type is not known."""
    known = isinstance(ty, relax.TensorType) and ty.dtype is not None
    return _bytes_of(str(ty.dtype.dtype)) if known else math.nan


def _bytes_of(name: str) -> float:
    if name not in _ITEM_BYTES:
        value = tvm.DataType(name)
        _ITEM_BYTES[name] = max(1, value.bits * value.lanes / 8)
    return _ITEM_BYTES[name]


_ITEM_BYTES: dict[str, float] = {}
