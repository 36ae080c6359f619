# SPDX-License-Identifier: Apache-2.0
"""Sharding rules of operators that take or write elements by index.

Indices in the padding of a shard are set to 0, so that they stay within the tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from tvm import relax
from tvm.relax import op as R  # noqa: N812 - as programs are written

from tvm_ipc.comm.collective_relax_op import dtype_of
from tvm_ipc.comm.extent_arithmetic import constant, largest_shard
from tvm_ipc.comm.placements import reduces
from tvm_ipc.spmd.rules.axis_label_rule import (
    Labels,
    LocalCall,
    Refusal,
    Rule,
    first_partial_alike,
    needs_all,
)
from tvm_ipc.spmd.rules.operation import Operation, aligned, axis_of, same


def _first(zeros: Sequence[bool]) -> bool:
    return zeros[0]


def _take(op: Operation) -> Rule:
    """Return the rule of a take.

    From a table that is sharded by rows, each rank takes the rows that it has, and zeros for the
    others; the sum over the ranks is the result.
    """
    labels, ndim = op.labels, op.ndim()
    if op.attrs.axis is None and ndim != 1:
        raise Refusal("without an axis it takes elements of a vector")
    axis = axis_of(op.attrs.axis or 0, ndim)
    indices = tuple(range(ndim, ndim + op.ndim(1)))
    mode = str(op.attrs.mode)

    def local(local_call: LocalCall) -> relax.Expr:
        if axis not in local_call.workers:
            return local_call.call
        return _take_local_rows(op, local_call, axis, mode)

    can_sum = reduces("sum", op.dtype()) and mode in ("fast", "clip", "wrap")
    return Rule(
        (labels, indices),
        ((*labels[:axis], *indices, *labels[axis + 1 :]),),
        reduced={axis: "sum"} if can_sum else {},
        whole={} if can_sum else needs_all(axis),
        contiguous=frozenset({axis}),
        partial_linear=first_partial_alike,
        preserves_zeros=_first,
        padding={1: 0},
        local=local,
    )


def _take_local_rows(op: Operation, local_call: LocalCall, axis: int, mode: str) -> relax.Expr:
    """Return the taken rows that are in the rank's shard of the table, and zeros for the others."""
    table, indices = local_call.call.args
    extent = op.dims()[axis]
    rows = largest_shard(extent, local_call.workers[axis])
    emit, zero = local_call.emit, relax.const(0, "int64")
    index = emit(R.astype(indices, "int64"))
    if mode == "wrap":
        index = emit(R.floor_mod(index, _number(local_call, extent)))
    elif mode == "clip":
        last = emit(R.subtract(_number(local_call, extent), relax.const(1, "int64")))
        index = emit(R.maximum(zero, emit(R.minimum(index, last))))
    rank = local_call.rank(axis)
    if op.ndim(1) == 0:
        rank = emit(R.reshape(rank, ()))
    count = _number(local_call, rows)
    index = emit(R.subtract(index, emit(R.multiply(rank, count))))
    is_not_before = emit(R.greater_equal(index, zero))
    in_shard = emit(R.logical_and(is_not_before, emit(R.less(index, count))))
    safe = emit(R.astype(emit(R.where(in_shard, index, zero)), dtype_of(indices.ty)))
    # TVM prints a warning whenever it compiles the mode "fast".
    taken = emit(R.take(table, safe, axis, mode="clip"))
    before, after = axis, op.ndim() - axis - 1
    dims = [1] * before + list(in_shard.ty.shape.values) + [1] * after
    if before or after:
        in_shard = emit(R.reshape(in_shard, relax.ShapeExpr(dims)))
    return R.where(in_shard, taken, relax.const(0, op.dtype()))


def _number(local_call: LocalCall, value: Any) -> relax.Expr:
    """Return an extent, which may be symbolic, as an int64 tensor of one element."""
    number = constant(value)
    if number is not None:
        return relax.const(number, "int64")
    return local_call.emit(relax.op.shape_to_tensor(relax.ShapeExpr([value])))


def _gather_elements(op: Operation) -> Rule:
    """Return the rule of a gather or scatter of elements.

    Ranks share the axes that are not indexed and have the same extent in all tensors.
    """
    others = range(1, len(op.operands))
    whole = [
        axis
        for axis in op.labels
        if axis == op.axis or not all(same(op.dims()[axis], op.dims(k)[axis]) for k in others)
    ]
    scatters = op.name == "scatter_elements"
    return Rule(
        (op.labels,) * len(op.operands),
        (op.labels,),
        whole=needs_all(*whole),
        partial_linear=(lambda _: False) if scatters else first_partial_alike,
        preserves_zeros=(lambda zeros: zeros[0] and zeros[2]) if scatters else _first,
        padding={1: 0},
    )


def _gather_nd(op: Operation) -> Rule:
    """Return the rule of a gather_nd: ranks share the batch axes and those not indexed."""
    data, ndim, batch = op.labels, op.ndim(), int(op.attrs.batch_dims)
    indexed = _number_of_indexed_axes(op)
    rest = data[batch + indexed :]
    index_labels = tuple(range(ndim, ndim + op.ndim(1) - batch))
    whole = needs_all(*data[batch : batch + indexed], index_labels[-1])
    result_labels = (*data[:batch], *index_labels[:-1], *rest)
    return Rule(
        (data, (*data[:batch], *index_labels)),
        (result_labels,),
        whole=whole,
        partial_linear=first_partial_alike,
        preserves_zeros=_first,
        padding={1: 0},
    )


def _scatter_nd(op: Operation) -> Rule:
    """Return the rule of a scatter_nd: ranks share the axes that are not indexed."""
    data, ndim, indexed = op.labels, op.ndim(), _number_of_indexed_axes(op)
    index_labels = tuple(range(ndim, ndim + op.ndim(1)))
    updates = (*index_labels[:-1], *data[indexed:])
    return Rule(
        (data, index_labels, updates), (data,), whole=needs_all(*data[:indexed], *index_labels)
    )


def _number_of_indexed_axes(op: Operation) -> int:
    indexed = constant(op.dims(1)[-1])
    if indexed is None:
        raise Refusal("it is not known how many axes it indexes")
    return indexed


def _index_tensor(op: Operation) -> Rule:
    """Return the rule of tensor indexing: ranks share index axes and the axes not indexed."""
    data, ndim = op.labels, op.ndim()
    count = len(op.operands) - 1
    dims = op.result_dims()
    common = dims[: len(dims) - (ndim - count)]
    indices: list[Labels] = [
        aligned(op.dims(k), common, first=ndim) for k in range(1, len(op.operands))
    ]
    labels = (*range(ndim, ndim + len(common)), *data[count:])
    return Rule(
        (data, *indices),
        (labels,),
        whole=needs_all(*data[:count]),
        partial_linear=first_partial_alike,
        preserves_zeros=_first,
        padding=dict.fromkeys(range(1, len(op.operands)), 0),
    )


def _one_hot(op: Operation) -> Rule:
    labels, ndim = op.labels, op.ndim()
    axis = axis_of(op.attrs.axis, ndim + 1)
    return Rule((labels,), ((*labels[:axis], ndim, *labels[axis:]),))


RULES: Final = {
    "take": _take,
    "gather_elements": _gather_elements,
    "scatter_elements": _gather_elements,
    "gather_nd": _gather_nd,
    "scatter_nd": _scatter_nd,
    "index_tensor": _index_tensor,
    "one_hot": _one_hot,
}
