# SPDX-License-Identifier: Apache-2.0
"""Operators that take elements by index, and those that work along an axis.

An index that lies beyond the end of a part must not lead out of a tensor: it is 0 there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from tvm import relax

from tvm_ipc.comm.extents import constant, largest_part
from tvm_ipc.comm.operator import dtype_of
from tvm_ipc.comm.placements import reduces
from tvm_ipc.transform.rules import keeps
from tvm_ipc.transform.rules.operation import Operation, aligned, axis_of, same
from tvm_ipc.transform.rules.rule import Labels, Part, Refusal, Rule, needs_all


def _first(have: Sequence[bool]) -> bool:
    return have[0]


def _take(op: Operation) -> Rule:
    """Rows of a table that is divided by its rows: each rank has those that it knows, or zeros."""
    ndim = op.ndim()
    if op.attrs.axis is None and ndim != 1:
        raise Refusal("without an axis it takes elements of a vector")
    axis = axis_of(op.attrs.axis or 0, ndim)
    labels = tuple(range(ndim))
    indices = tuple(range(ndim, ndim + op.ndim(1)))
    mode = str(op.attrs.mode)

    def local(part: Part) -> relax.Expr:
        if axis not in part.workers:
            return part.call
        return _known_rows(op, part, axis, mode)

    can = reduces("sum", op.dtype()) and mode in ("fast", "clip", "wrap")
    return Rule(
        (labels, indices),
        ((*labels[:axis], *indices, *labels[axis + 1 :]),),
        reduced={axis: "sum"} if can else {},
        whole={} if can else needs_all(axis),
        plain=frozenset({axis}),
        keeps=keeps.first_alike,
        zeros=_first,
        beyond={1: 0},
        local=local,
    )


def _known_rows(op: Operation, part: Part, axis: int, mode: str) -> relax.Expr:
    """Return rows of the part of the table that a rank has, zeros in the place of others."""
    table, indices = part.call.args
    extent = op.dims()[axis]
    rows = largest_part(extent, part.workers[axis])
    dtype = dtype_of(indices.ty)
    index = part.emit(relax.op.astype(indices, "int64"))
    if mode == "wrap":
        index = part.emit(relax.op.floor_mod(index, _number(part, extent)))
    elif mode == "clip":
        most = part.emit(relax.op.subtract(_number(part, extent), relax.const(1, "int64")))
        least = relax.const(0, "int64")
        index = part.emit(relax.op.maximum(least, part.emit(relax.op.minimum(index, most))))
    rank = part.rank(axis)
    if op.ndim(1) == 0:
        rank = part.emit(relax.op.reshape(rank, ()))
    count = _number(part, rows)
    first = part.emit(relax.op.multiply(rank, count))
    index = part.emit(relax.op.subtract(index, first))
    known = part.emit(
        relax.op.logical_and(
            part.emit(relax.op.greater_equal(index, relax.const(0, "int64"))),
            part.emit(relax.op.less(index, count)),
        )
    )
    safe = part.emit(relax.op.where(known, index, relax.const(0, "int64")))
    safe = part.emit(relax.op.astype(safe, dtype))
    # Not the mode "fast", of which TVM warns users whenever it is compiled.
    taken = part.emit(relax.op.take(table, safe, axis, mode="clip"))
    before, after = axis, op.ndim() - axis - 1
    dims = [1] * before + list(known.ty.shape.values) + [1] * after
    if before or after:
        known = part.emit(relax.op.reshape(known, relax.ShapeExpr(dims)))
    return relax.op.where(known, taken, relax.const(0, op.dtype()))


def _number(part: Part, value: Any) -> relax.Expr:
    """Return an extent, which may be symbolic, as a tensor of one int64."""
    number = constant(value)
    if number is not None:
        return relax.const(number, "int64")
    return part.emit(relax.op.shape_to_tensor(relax.ShapeExpr([value])))


def _gather_elements(op: Operation) -> Rule:
    """The axes beside the one that is indexed, where all tensors have the same extent."""
    ndim = op.ndim()
    labels = tuple(range(ndim))
    whole = {axis_of(op.attrs.axis, ndim)}
    others = range(1, len(op.operands))
    for axis in labels:
        if not all(same(op.dims()[axis], op.dims(k)[axis]) for k in others):
            whole.add(axis)
    scatters = op.name == "scatter_elements"
    return Rule(
        (labels,) * len(op.operands),
        (labels,),
        whole=needs_all(*whole),
        keeps=(lambda _: False) if scatters else keeps.first_alike,
        zeros=(lambda have: have[0] and have[2]) if scatters else _first,
        beyond={1: 0},
    )


def _gather_nd(op: Operation) -> Rule:
    """The axes of the batch, and those that are not indexed."""
    ndim, batch = op.ndim(), int(op.attrs.batch_dims)
    indexed = constant(op.dims(1)[-1])
    if indexed is None:
        raise Refusal("it is not known how many axes it indexes")
    data = tuple(range(ndim))
    rest = data[batch + indexed :]
    more = tuple(range(ndim, ndim + op.ndim(1) - batch))
    whole = needs_all(*data[batch : batch + indexed], more[-1])
    made = (*data[:batch], *more[:-1], *rest)
    return Rule(
        (data, (*data[:batch], *more)),
        (made,),
        whole=whole,
        keeps=keeps.first_alike,
        zeros=_first,
        beyond={1: 0},
    )


def _scatter_nd(op: Operation) -> Rule:
    """The axes that are not indexed."""
    ndim = op.ndim()
    indexed = constant(op.dims(1)[-1])
    if indexed is None:
        raise Refusal("it is not known how many axes it indexes")
    data = tuple(range(ndim))
    more = tuple(range(ndim, ndim + op.ndim(1)))
    updates = (*more[:-1], *data[indexed:])
    return Rule((data, more, updates), (data,), whole=needs_all(*data[:indexed], *more))


def _index_tensor(op: Operation) -> Rule:
    """The axes that are not indexed, and those of the indices."""
    ndim = op.ndim()
    count = len(op.operands) - 1
    data = tuple(range(ndim))
    rest = ndim - count
    made = op.made()
    common = made[: len(made) - rest]
    indices: list[Labels] = [
        aligned(op.dims(k), common, first=ndim) for k in range(1, len(op.operands))
    ]
    labels = (*range(ndim, ndim + len(common)), *data[count:])
    return Rule(
        (data, *indices),
        (labels,),
        whole=needs_all(*data[:count]),
        keeps=keeps.first_alike,
        zeros=_first,
        beyond=dict.fromkeys(range(1, len(op.operands)), 0),
    )


def _one_hot(op: Operation) -> Rule:
    ndim = op.ndim()
    labels = tuple(range(ndim))
    axis = axis_of(op.attrs.axis, ndim + 1)
    return Rule((labels,), ((*labels[:axis], ndim, *labels[axis:]),))


def _along(op: Operation) -> Rule:
    """What needs all of an axis; the results may lack it."""
    ndim = op.ndim()
    labels = tuple(range(ndim))
    if op.attrs.axis is None and ndim != 1:
        made: Labels = (None,) * len(op.made())
        return Rule((labels,), (made,) * len(op.results), whole=needs_all(*labels))
    axis = axis_of(op.attrs.axis or 0, ndim)
    result = labels
    if len(op.made()) < ndim:
        result = (*labels[:axis], *labels[axis + 1 :])
    return Rule(
        (labels,),
        (result,) * len(op.results),
        whole=needs_all(axis),
        keeps=keeps.all_sums if op.name == "cumsum" else (lambda _: False),
        zeros=all if op.name in ("cumsum", "cumprod", "sort") else (lambda _: False),
    )


def _bucketize(op: Operation) -> Rule:
    labels = tuple(range(op.ndim()))
    boundaries = len(labels)
    return Rule((labels, (boundaries,)), (labels,), whole=needs_all(boundaries))


RULES: Final = {
    "take": _take,
    "gather_elements": _gather_elements,
    "scatter_elements": _gather_elements,
    "gather_nd": _gather_nd,
    "scatter_nd": _scatter_nd,
    "index_tensor": _index_tensor,
    "one_hot": _one_hot,
    "bucketize": _bucketize,
    **dict.fromkeys(("argmax", "argmin", "sort", "argsort", "topk", "cumsum", "cumprod"), _along),
}
