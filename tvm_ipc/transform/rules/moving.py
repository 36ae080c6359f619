# SPDX-License-Identifier: Apache-2.0
"""Operators that move elements: they join and cut tensors, repeat and pad them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from tvm import relax

from tvm_ipc.comm.operator import constant, show_extent
from tvm_ipc.transform.rules import keeps
from tvm_ipc.transform.rules.operation import Operation, aligned, axes_of, axis_of, same
from tvm_ipc.transform.rules.rule import Labels, Part, Refusal, Rule, needs_all


def _permute_dims(op: Operation) -> Rule:
    ndim = op.ndim()
    axes = tuple(range(ndim))[::-1] if op.attrs.axes is None else axes_of(op.attrs.axes, ndim)
    return Rule((tuple(range(ndim)),), (axes,), keeps=keeps.all_alike, zeros=all)


def _broadcast_to(op: Operation) -> Rule:
    dims = op.made()

    def local(part: Part) -> relax.Expr:
        return relax.op.broadcast_to(part.call.args[0], relax.ShapeExpr(part.results[0]))

    return Rule(
        (aligned(op.dims(), dims),),
        (tuple(range(len(dims))),),
        keeps=keeps.all_alike,
        zeros=all,
        local=local,
    )


def _concat(op: Operation) -> Rule:
    if op.attrs.axis is None:
        raise Refusal("without an axis it joins tensors as vectors")
    labels = tuple(range(op.ndim()))
    return Rule(
        (labels,) * len(op.operands),
        (labels,),
        whole=needs_all(axis_of(op.attrs.axis, op.ndim())),
        keeps=keeps.all_alike,
        zeros=all,
    )


def _stack(op: Operation) -> Rule:
    ndim = op.ndim()
    labels = tuple(range(ndim))
    axis = axis_of(op.attrs.axis or 0, ndim + 1)
    made = (*labels[:axis], ndim, *labels[axis:])
    return Rule((labels,) * len(op.operands), (made,), keeps=keeps.all_alike, zeros=all)


def _split(op: Operation) -> Rule:
    labels = tuple(range(op.ndim()))
    return Rule(
        (labels,),
        (labels,) * len(op.results),
        whole=needs_all(axis_of(op.attrs.axis, op.ndim())),
        keeps=keeps.all_alike,
        zeros=all,
    )


def _strided_slice(op: Operation) -> Rule:
    """Axes that are not cut; a slice of all of an axis cuts nothing."""
    ndim, dims = op.ndim(), op.dims()
    given = [_values(x) for x in op.call.args[1:]]
    if any(one is None for one in given):
        raise Refusal("its axes and their ends are not known")
    axes = axes_of([constant(one) for one in given[0] or ()], ndim)
    begins, ends = given[1] or [], given[2] or []
    strides = given[3] if len(given) > 3 and given[3] else [1] * len(axes)
    cut = [
        k
        for k, axis in enumerate(axes)
        if not (
            constant(strides[k]) == 1
            and constant(begins[k]) == 0
            and _reaches(ends[k], dims[axis])
            and same(op.made()[axis], dims[axis])
        )
    ]
    labels = tuple(range(ndim))

    def local(part: Part) -> relax.Expr:
        x = part.call.args[0]
        if not cut:
            return x
        chosen = [[one[k] for k in cut] for one in (axes, begins, ends, strides)]
        return relax.op.strided_slice(x, *chosen, bool(op.attrs.assume_inbound))

    return Rule(
        (labels,),
        (labels,),
        whole=needs_all(*(axes[k] for k in cut)),
        keeps=keeps.all_alike,
        zeros=all,
        local=local,
    )


def _values(expr: relax.Expr) -> list[Any] | None:
    """Return the numbers of a tuple, which may be symbolic."""
    return list(expr.fields) if isinstance(expr, relax.Tuple) else None


def _reaches(end: Any, extent: Any) -> bool:
    number, of = constant(end), constant(extent)
    if number is not None:
        return number >= (of if of is not None else 2**31 - 1)
    return same(end, extent)


def _slice_scatter(op: Operation) -> Rule:
    labels = tuple(range(op.ndim()))
    axis = axis_of(op.attrs.axis, op.ndim())
    return Rule(
        (labels, labels), (labels,), whole=needs_all(axis), keeps=keeps.all_alike, zeros=all
    )


def _flip(op: Operation) -> Rule:
    labels = tuple(range(op.ndim()))
    whole = needs_all(axis_of(op.attrs.axis, op.ndim()))
    return Rule((labels,), (labels,), whole=whole, keeps=keeps.all_alike, zeros=all)


def _tile(op: Operation) -> Rule:
    repeats = [int(one) for one in op.attrs.repeats]
    dims = op.made()
    labels = tuple(len(dims) - op.ndim() + axis for axis in range(op.ndim()))
    first = len(dims) - len(repeats)
    whole = needs_all(*(first + k for k, count in enumerate(repeats) if count != 1))
    made = tuple(range(len(dims)))
    return Rule((labels,), (made,), whole=whole, keeps=keeps.all_alike, zeros=all)


def _repeat(op: Operation) -> Rule:
    """Each element stays beside its copies: parts stay parts if they are of equal extent."""
    ndim = op.ndim()
    if op.attrs.axis is None:
        raise Refusal("without an axis it repeats the elements of a vector")
    axis = axis_of(op.attrs.axis, ndim)
    extent = op.dims()[axis]
    repeated = show_extent(extent)

    def why_not(workers: int) -> str:
        number = constant(extent)
        even = number is not None and number % workers == 0
        return "" if even else f"{workers} ranks do not divide the {repeated} that it repeats"

    labels = tuple(range(ndim))
    return Rule((labels,), (labels,), among={axis: why_not}, keeps=keeps.all_alike, zeros=all)


def _pad(op: Operation) -> Rule:
    ndim = op.ndim()
    widths = [int(one) for one in op.attrs.pad_width]
    labels = tuple(range(ndim))
    padded = [axis for axis in labels if widths[2 * axis] or widths[2 * axis + 1]]
    zero = str(op.attrs.pad_mode) != "constant" or float(op.attrs.pad_value) == 0

    def zeros(have: Sequence[bool]) -> bool:
        return zero and all(have)

    def linear(here: Sequence[Any]) -> bool:
        return zero and keeps.all_sums(here)

    return Rule((labels,), (labels,), whole=needs_all(*padded), keeps=linear, zeros=zeros)


def _triangle(op: Operation) -> Rule:
    labels = tuple(range(op.ndim()))
    return Rule(
        (labels,), (labels,), whole=needs_all(*labels[-2:]), keeps=keeps.all_sums, zeros=all
    )


def _meshgrid(op: Operation) -> Rule:
    if str(op.attrs.indexing) == "xy":
        raise Refusal("for indexing='xy' TVM infers other extents than its kernel gives")
    operands: tuple[Labels, ...] = tuple((k,) for k in range(len(op.operands)))
    made = tuple(range(len(op.operands)))
    return Rule(operands, (made,) * len(op.results))


def _reverse_sequence(op: Operation) -> Rule:
    ndim = op.ndim()
    labels = tuple(range(ndim))
    batch = axis_of(op.attrs.batch_axis, ndim)
    whole = needs_all(axis_of(op.attrs.seq_axis, ndim))
    return Rule((labels, (batch,)), (labels,), whole=whole)


RULES: Final = {
    "permute_dims": _permute_dims,
    "broadcast_to": _broadcast_to,
    "concat": _concat,
    "stack": _stack,
    "split": _split,
    "strided_slice": _strided_slice,
    "slice_scatter": _slice_scatter,
    "flip": _flip,
    "tile": _tile,
    "repeat": _repeat,
    "nn.pad": _pad,
    "tril": _triangle,
    "triu": _triangle,
    "meshgrid": _meshgrid,
    "reverse_sequence": _reverse_sequence,
}
