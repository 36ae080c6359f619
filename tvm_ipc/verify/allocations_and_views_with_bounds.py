# SPDX-License-Identifier: Apache-2.0
"""Create the storages, tensors and views that a function allocates, and check their bounds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import tvm
from tvm import relax, tirx

from tvm_ipc.analysis.polynomials import Number
from tvm_ipc.tvm_moved_names import GenericConst
from tvm_ipc.verify.access_checker import AccessChecker
from tvm_ipc.verify.hazard_types_and_messages import HazardKind
from tvm_ipc.verify.known_calls import text_of
from tvm_ipc.verify.relax_as_plain_statements import Argument, Statement, extents_of
from tvm_ipc.verify.storage_and_buffer_types import Buffer, Storage, Value, objects
from tvm_ipc.verify.symbolic_inequalities import Assumptions, Extents

#: The begin and the end of a tensor (None: unknown), and the numbers that its existence implies
#: not to be negative.
_Span = tuple[Number | None, Number | None, Assumptions]


class Allocations:
    """Creates storages, tensors and views for the allocations of one function."""

    def __init__(
        self, variables: Mapping[int, Any], extents: Extents, accesses: AccessChecker
    ) -> None:
        self._variables = variables  #: by hash
        self._extents = extents
        self._accesses = accesses
        self._spans: dict[Any, _Span] = {}
        self._assumed: Number | None = None
        self._kept: list[Any] = []  #: expressions whose hash is a key of `_spans`

    def assume(self, number: Number | None) -> Number | None:
        """Assume from now on that a number is not negative; return the one assumed before."""
        before, self._assumed = self._assumed, number
        self._spans.clear()
        return before

    def storage(self, shape: Argument, item: float, scope: str | None, step: Statement) -> Storage:
        """Return a new storage, in a memory scope that may be unknown (None)."""
        dims = self._dims(shape)
        size = None if dims is None else self._extents.size(dims, item)
        return Storage(str(step.bound.name), scope, size)

    def tensor(
        self, source: Value, step: Statement, offset: Argument, shape: Argument, dtype: Argument
    ) -> Value:
        """Return a tensor that is allocated in the storages that `source` reaches."""
        begin, end, assumptions = self._span(offset, shape, item_bytes(dtype))
        name = str(step.bound.name)
        extents, buffers = self._extents, []
        for memory in objects(source):
            buffer = Buffer(name, memory.storage, begin, end, assumptions=assumptions)
            buffers.append(buffer)
            limit = buffer.storage.size
            if begin is not None and not extents.at_most(0, begin, assumptions):
                where = f"begins at byte {extents.text(begin)}"
                self._report_bounds(0, begin, buffer, where, step)
            self._check_end(buffer, limit, step)
        return frozenset(buffers)

    def view(
        self,
        source: Value,
        step: Statement,
        offset: Argument,
        shape: Argument,
        *,
        checks_end: bool = True,
    ) -> Value:
        """Return a view of the memory that `source` reaches, which begins at a byte offset."""
        start, stop, assumptions = self._span(offset, shape, _item_bytes_of_type(step.bound.ty))
        extents, views = self._extents, []
        for memory in objects(source):
            if isinstance(memory, Storage) or memory.begin is None or start is None:
                views.append(memory)
                continue
            end = None if stop is None else extents.add(memory.begin, stop)
            begin = extents.add(memory.begin, start)
            combined = (*memory.assumptions, *assumptions)
            origin = memory.origin or memory
            view = replace(memory, begin=begin, end=end, origin=origin, assumptions=combined)
            views.append(view)
            if checks_end:
                self._check_end(view, memory.end, step)
        return frozenset(views)

    def tensor_with_storage(
        self, shape: Argument, dtype: Argument, scope: Argument, step: Statement
    ) -> Value:
        """Return a tensor in a new storage of its own."""
        storage = self.storage(shape, item_bytes(dtype), text_of(scope), step)
        return frozenset({Buffer(storage.name, storage, 0, storage.size)})

    def _check_end(self, buffer: Buffer, limit: Number | None, step: Statement) -> None:
        """Report a buffer that may end after the limit."""
        extents, end = self._extents, buffer.end
        if end is None or limit is None or extents.at_most(end, limit, buffer.assumptions):
            return
        where = f"ends at byte {extents.text(end)} of {extents.text(limit)}"
        self._report_bounds(end, limit, buffer, where, step)

    def _report_bounds(
        self, low: Number, high: Number, buffer: Buffer, where: str, step: Statement
    ) -> None:
        """Report a buffer that is out of bounds if `low` is more than `high`."""
        excess = self._extents.subtract(low, self._extents.add(high, 1))
        example = self._extents.example(*buffer.assumptions, excess)
        self._accesses.report(HazardKind.BOUNDS, buffer, step, where, example)

    def _span(self, offset: Argument, shape: Argument, item: float) -> _Span:
        """Return the span of a tensor, computed once for equal arguments."""
        dims = self._dims(shape)
        start = int(offset.value) if type(offset) is tirx.IntImm else offset
        key = (
            start if type(start) is int else hash(start),
            type(offset) is int,
            item,
            *map(_key, dims or ()),
        )
        span = self._spans.get(key) if dims is not None else None
        if span is None:
            # A deleted expression could share its hash with a later one.
            self._kept += [offset, *(dims or ())]
            begins_at = self._variables[offset] if type(offset) is int else offset
            begin = self._extents.number(begins_at)
            size = None if dims is None else self._extents.size(dims, item)
            end = None if begin is None or size is None else self._extents.add(begin, size)
            implied = [size, *map(self._extents.number, dims or ()), self._assumed]
            assumptions = self._extents.assumptions(implied)
            span = begin, end, assumptions
            if dims is not None:
                self._spans[key] = span
        return span

    def _dims(self, shape: Argument) -> Any:
        """Return the extents of a shape, None if they are unknown."""
        return extents_of(self._variables[shape].ty if type(shape) is int else shape)


def _key(dim: Any) -> Any:
    return int(dim.value) if type(dim) is tirx.IntImm else (hash(dim),)


def item_bytes(dtype: Any) -> float:
    """Return the bytes of an element, NaN if the data type is unknown."""
    return _bytes_of(str(dtype.value)) if isinstance(dtype, GenericConst) else math.nan


def _item_bytes_of_type(ty: Any) -> float:
    """Return the bytes of an element of a tensor of a type, NaN if its data type is unknown."""
    has_dtype = isinstance(ty, relax.TensorType) and ty.dtype is not None
    return _bytes_of(str(ty.dtype.dtype)) if has_dtype else math.nan


@cache
def _bytes_of(dtype: str) -> float:
    parsed = tvm.DataType(dtype)
    return float(max(1, parsed.bits * parsed.lanes / 8))
