# SPDX-License-Identifier: Apache-2.0
"""Operators that move elements: they join and cut tensors, repeat and pad them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, Final

from tvm import relax

from tvm_ipc.comm import Division, Placement, Shard
from tvm_ipc.comm.division import joined
from tvm_ipc.comm.extents import constant, show_extent
from tvm_ipc.transform.rules import keeps
from tvm_ipc.transform.rules.operation import Operation, aligned, axes_of, axis_of, same
from tvm_ipc.transform.rules.rule import (
    ALL_OF_IT,
    Labels,
    Part,
    Refusal,
    Related,
    Rule,
    needs_all,
    shard,
)


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
    """Along the axis that is joined a rank has its part of each operand, one after the other."""
    if op.attrs.axis is None:
        raise Refusal("without an axis it joins tensors as vectors")
    labels = tuple(range(op.ndim()))
    axis = axis_of(op.attrs.axis, op.ndim())
    extents = [constant(op.dims(k)[axis]) for k in range(len(op.operands))]
    known = [extent for extent in extents if extent]
    ends = [0, *accumulate(known)]

    def common(given: Mapping[int, Division | None], workers: int) -> Division | None:
        # To divide what is small costs a gather of all of it, sooner or later.
        if len(known) < len(extents) or 2 * sum(known[k] for k in given) < ends[-1]:
            return None
        plain = [Division.plain(extent, workers) for extent in known]
        return joined(given.get(k) or one for k, one in enumerate(plain))

    def of_operand(operand: int, division: Division, _: int) -> Division:
        piece = division.between(*ends[operand : operand + 2])
        assert piece is not None, "segments are of operands"
        return piece[0]

    def carry(label: int, division: Division | None, workers: int) -> list[Placement] | str:
        if label != axis:
            return [Shard(label, division)]
        return ALL_OF_IT if division is None else [shard(axis, division, workers)]

    return Rule(
        (labels,) * len(op.operands),
        (labels,),
        related={axis: Related(common, of_operand)},
        carry=carry,
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
    """Along the axis that is split whole segments of a division go into one result."""
    labels = tuple(range(op.ndim()))
    axis = axis_of(op.attrs.axis, op.ndim())
    ends = [0]
    for k in range(len(op.results)):
        extent = constant(op.made(k)[axis])
        ends.append(-1 if extent is None or ends[-1] < 0 else ends[-1] + extent)

    def pieces(division: Division) -> list[tuple[Division, int, int] | None]:
        return [division.between(*one) for one in pairwise(ends)]

    def carry(label: int, division: Division | None, workers: int) -> list[Placement] | str:
        if label != axis:
            return [Shard(label, division) for _ in op.results]
        if division is None:
            return ALL_OF_IT
        found: list[Placement] = []
        for piece in pieces(division):
            if piece is None:
                return f"it splits that axis within segments of {division}"
            found.append(shard(axis, piece[0], workers))
        return found

    def local(part: Part) -> relax.Expr:
        division = part.divisions.get(axis)
        if division is None:
            return part.call
        places = [piece[2] for piece in pieces(division) if piece is not None]
        return relax.op.split(part.call.args[0], places[:-1], axis)

    return Rule(
        (labels,),
        (labels,) * len(op.results),
        whole=needs_all(axis),
        carry=carry,
        keeps=keeps.all_alike,
        zeros=all,
        local=local,
    )


def _strided_slice(op: Operation) -> Rule:
    """Axes that are not cut, or between segments; a slice of all of an axis cuts nothing."""
    ndim, dims = op.ndim(), op.dims()
    axes, begins, ends, strides = _bounds(op)
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

    def piece(axis: int, division: Division) -> tuple[Division, int, int] | None:
        (k,) = (k for k in cut if axes[k] == axis)
        begin, end = (_place(one[k], dims[axis]) for one in (begins, ends))
        if constant(strides[k]) != 1 or begin is None or end is None:
            return None
        return division.between(begin, end)

    def carry(label: int, division: Division | None, workers: int) -> list[Placement] | str:
        if label not in [axes[k] for k in cut]:
            return [Shard(label, division)]
        found = division and piece(label, division)
        return [shard(label, found[0], workers)] if found else ALL_OF_IT

    def local(part: Part) -> relax.Expr:
        x = part.call.args[0]
        if not cut:
            return x
        chosen = [[one[k] for k in cut] for one in (axes, begins, ends, strides)]
        for place, axis in enumerate(chosen[0]):
            division = part.divisions.get(axis)
            found = division and piece(axis, division)
            if found:
                chosen[1][place], chosen[2][place] = found[1:]
        return relax.op.strided_slice(x, *chosen, bool(op.attrs.assume_inbound))

    return Rule(
        (labels,),
        (labels,),
        whole=needs_all(*(axes[k] for k in cut)),
        carry=carry,
        keeps=keeps.all_alike,
        zeros=all,
        local=local,
    )


def slices_of(op: Operation) -> Iterator[tuple[int, int, int]]:
    """Yield the axes that a slice cuts, where the slice begins and where it ends, if known."""
    for axis, *bounds, stride in zip(*_bounds(op), strict=True):
        begin, end = (_place(one, op.dims()[axis]) for one in bounds)
        if constant(stride) == 1 and begin is not None and end is not None and begin < end:
            yield axis, begin, end


def _bounds(op: Operation) -> tuple[Sequence[int], list[Any], list[Any], list[Any]]:
    """Return the axes of a slice, where they begin and end, and its strides."""
    given = [_values(x) for x in op.call.args[1:]]
    if any(one is None for one in given):
        raise Refusal("its axes and their ends are not known")
    axes = axes_of([constant(one) for one in given[0] or ()], op.ndim())
    strides = given[3] if len(given) > 3 and given[3] else [1] * len(axes)
    return axes, given[1] or [], given[2] or [], strides


def _values(expr: relax.Expr) -> list[Any] | None:
    """Return the numbers of a tuple, which may be symbolic."""
    return list(expr.fields) if isinstance(expr, relax.Tuple) else None


def _place(bound: Any, extent: Any) -> int | None:
    """Return where a bound is from the beginning of an axis, None where that is not known."""
    number, of = constant(bound), constant(extent)
    if number is None or of is None:
        return None
    return max(0, min(number + of if number < 0 else number, of))


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
    """Each element stays beside its copies; ranks that have the same elements share the copies."""
    ndim = op.ndim()
    if op.attrs.axis is None:
        raise Refusal("without an axis it repeats the elements of a vector")
    axis = axis_of(op.attrs.axis, ndim)
    extent = constant(op.dims()[axis])
    times = int(op.attrs.repeats)

    def carry(label: int, division: Division | None, workers: int) -> list[Placement] | str:
        if label != axis:
            return [Shard(label, division)]
        if extent is None:
            return f"the extent {show_extent(op.dims()[axis])} that it repeats is not known"
        if extent == 0 or times == 0:
            return [Shard(axis)]
        division = division or Division.plain(extent, workers)
        if len(set(division.copies_of(workers))) > 1:
            return f"of segments of {division} there are different numbers of copies"
        return [shard(axis, division.repeated(times, workers), workers)]

    def local(part: Part) -> relax.Expr:
        if axis not in part.workers:
            return part.call
        division, workers = part.divisions[axis], part.workers[axis]
        copies = 1 if division is None else division.copies(workers)
        return relax.op.repeat(part.call.args[0], -(-times // copies), axis)

    # Ranks that share copies unevenly have more of them than they should, beyond the end.
    labels = tuple(range(ndim))
    return Rule((labels,), (labels,), carry=carry, keeps=keeps.all_alike, local=local)


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
