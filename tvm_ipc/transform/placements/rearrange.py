# SPDX-License-Identifier: Apache-2.0
"""Tensors along an axis of which ranks have other parts than consecutive ones of one size.

Collectives divide axes into consecutive parts. What a `Division` says beyond that is a table, the
indices that each rank has: before a collective a tensor is put into the order of its rows, after
one it is put back, and of what it has itself a rank takes its own row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import relax

from tvm_ipc import comm
from tvm_ipc.comm import Division, Shard
from tvm_ipc.comm.extents import constant
from tvm_ipc.comm.mesh import Teams
from tvm_ipc.comm.operator import dtype_of, extents

Table = np.ndarray[Any, Any]


class Rearrangement:
    """What is done with an axis of a tensor, in the function of one rank.

    Parameters
    ----------
    builder : of the function.
    team, workers : of the axis of the mesh along which it is divided.
    axis : of the tensor.
    """

    def __init__(self, builder: relax.BlockBuilder, team: Teams, workers: int, axis: int) -> None:
        self.builder, self.team, self.workers, self.axis = builder, team, workers, axis

    def ordered(self, x: relax.Expr, order: Table) -> relax.Expr:
        """Return what is at some indices of a tensor, zeros where an index is -1."""
        dims = extents(x.ty)
        assert dims is not None
        count = len(order)
        if (order == np.arange(count)).all():
            if constant(dims[self.axis]) == count:
                return x
            return self._emit(relax.op.strided_slice(x, [self.axis], [0], [count], [1]))
        index = relax.const(np.maximum(order, 0), "int64")
        found = self._emit(relax.op.take(x, index, self.axis))
        return self._zeroed(found, relax.const(order, "int64")) if (order < 0).any() else found

    def own(self, x: relax.Expr, rows: Table) -> tuple[relax.Expr, relax.Call]:
        """Return what is at those indices that a rank's row has, and what chose the row."""
        table = self._emit(relax.const(rows.ravel(), "int64"))
        chosen = comm.take_part(table, team=self.team, workers=self.workers)
        index = self._emit(chosen)
        if not (rows < 0).any():
            return relax.op.take(x, index, self.axis), chosen
        safe = self._emit(relax.op.maximum(index, relax.const(0, "int64")))
        return self._zeroed(self._emit(relax.op.take(x, safe, self.axis)), index), chosen

    def inside(self, division: Division) -> relax.Expr:
        """Return which places of a rank's part are no zeros, as int32."""
        table = division.table(self.workers)
        ones = self._emit(relax.const((table >= 0).astype("int32").ravel(), "int32"))
        return self._emit(comm.take_part(ones, team=self.team, workers=self.workers))

    def _zeroed(self, x: relax.Expr, index: relax.Expr) -> relax.Expr:
        dims = extents(x.ty)
        assert dims is not None
        shape = [dims[self.axis] if k == self.axis else 1 for k in range(len(dims))]
        if len(dims) > 1:
            index = self._emit(relax.op.reshape(index, shape))
        inside = self._emit(relax.op.greater_equal(index, relax.const(0, "int64")))
        return self._emit(relax.op.where(inside, x, relax.const(0, dtype_of(x.ty))))

    def _emit(self, value: relax.Expr) -> relax.Expr:
        return self.builder.emit(value)


def table_of(one: Shard, extent: Any, workers: int) -> Table:
    """Return the indices that each rank has."""
    return (one.division or Division.plain(int(extent), workers)).table(workers)


def places_in(one: Table, other: Table) -> Table | None:
    """Return where ranks that have one table find what another one says, None if they do not."""
    rows = []
    for have, wanted in zip(one, other, strict=True):
        known = {index: place for place, index in reversed(list(enumerate(have.tolist())))}
        known[-1] = -1
        if any(index not in known for index in wanted.tolist()):
            return None
        rows.append([known[index] for index in wanted.tolist()])
    found: Table = np.array(rows, np.int64).reshape(other.shape)
    return found


def order_of(table: Table) -> Table:
    """Return where in the rows, one after the other, each index of the axis is."""
    indices, places = np.unique(table, return_index=True)
    found: Table = places[indices >= 0]
    return found
