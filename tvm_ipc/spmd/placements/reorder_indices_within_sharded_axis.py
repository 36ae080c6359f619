# SPDX-License-Identifier: Apache-2.0
"""Reordering of axes whose shards are not consecutive blocks of one size.

Collectives split axes into consecutive blocks. A `Division` is therefore turned into a table with
one row of indices for each rank. Before a reduce-scatter the axis is put into the order of the
table, after an all-gather it is put back, and from a replicated tensor a rank takes its own row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import relax

from tvm_ipc import comm
from tvm_ipc.comm import Division, Shard
from tvm_ipc.comm.collective_relax_op import dtype_of, extents
from tvm_ipc.comm.extent_arithmetic import constant
from tvm_ipc.comm.mesh import Teams

Table = np.ndarray[Any, Any]


class Rearrangement:
    """Emits the reordering of one axis of a tensor in the function that one rank runs.

    Parameters
    ----------
    builder : builds the function.
    team, workers : the teams along the axis of the mesh that shards the tensor, and their size.
    axis : the axis of the tensor.
    """

    def __init__(self, builder: relax.BlockBuilder, team: Teams, workers: int, axis: int) -> None:
        self.builder, self.team, self.workers, self.axis = builder, team, workers, axis

    def ordered(self, x: relax.Expr, order: Table) -> relax.Expr:
        """Return the elements at some indices of the axis, with zeros for the index -1."""
        dims = extents(x.ty)
        assert dims is not None
        count = len(order)
        if (order == np.arange(count)).all():
            if constant(dims[self.axis]) == count:
                return x
            return self._emit(relax.op.strided_slice(x, [self.axis], [0], [count], [1]))
        index = relax.const(np.maximum(order, 0), "int64")
        taken = self._emit(relax.op.take(x, index, self.axis))
        return self._zeroed(taken, relax.const(order, "int64")) if (order < 0).any() else taken

    def own(self, x: relax.Expr, rows: Table) -> tuple[relax.Expr, relax.Call]:
        """Return the elements at the indices of the rank's row, and the call that takes the row."""
        table = self._emit(relax.const(rows.ravel(), "int64"))
        take_row = comm.take_shard(table, team=self.team, workers=self.workers)
        index = self._emit(take_row)
        if not (rows < 0).any():
            return relax.op.take(x, index, self.axis), take_row
        safe = self._emit(relax.op.maximum(index, relax.const(0, "int64")))
        return self._zeroed(self._emit(relax.op.take(x, safe, self.axis)), index), take_row

    def is_element(self, division: Division) -> relax.Expr:
        """Return an int32 mask that is 1 for the elements of a rank's shard, and 0 in padding."""
        table = division.table(self.workers)
        ones = self._emit(relax.const((table >= 0).astype("int32").ravel(), "int32"))
        return self._emit(comm.take_shard(ones, team=self.team, workers=self.workers))

    def _zeroed(self, x: relax.Expr, index: relax.Expr) -> relax.Expr:
        dims = extents(x.ty)
        assert dims is not None
        shape = [dims[self.axis] if k == self.axis else 1 for k in range(len(dims))]
        if len(dims) > 1:
            index = self._emit(relax.op.reshape(index, shape))
        is_element = self._emit(relax.op.greater_equal(index, relax.const(0, "int64")))
        return self._emit(relax.op.where(is_element, x, relax.const(0, dtype_of(x.ty))))

    def _emit(self, value: relax.Expr) -> relax.Expr:
        return self.builder.emit(value)


def table_of(placement: Shard, extent: Any, workers: int) -> Table:
    """Return the indices that each rank has, one row for each rank."""
    return (placement.division or Division.plain(int(extent), workers)).table(workers)


def positions_in(current: Table, target: Table) -> Table | None:
    """Return the positions of the target's indices in the shards that ranks have.

    Returns None if a rank lacks an index that it has in the target.
    """
    rows = []
    for current_row, target_row in zip(current, target, strict=True):
        in_order = reversed(list(enumerate(current_row.tolist())))
        position_of = {index: position for position, index in in_order}
        position_of[-1] = -1
        if any(index not in position_of for index in target_row.tolist()):
            return None
        rows.append([position_of[index] for index in target_row.tolist()])
    positions: Table = np.array(rows, np.int64).reshape(target.shape)
    return positions


def order_of(table: Table) -> Table:
    """Return the position of each index of the axis in the concatenated rows of a table."""
    indices, first_positions = np.unique(table, return_index=True)
    positions: Table = first_positions[indices >= 0]
    return positions
