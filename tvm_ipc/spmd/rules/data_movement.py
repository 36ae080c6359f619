# SPDX-License-Identifier: Apache-2.0
"""Sharding rules of operators that move elements: join, split, slice, repeat and pad."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Final

from tvm import relax

from tvm_ipc.comm import Division, Placement, Shard
from tvm_ipc.comm.axis_block_sharding import concatenated
from tvm_ipc.comm.extent_arithmetic import constant, format_extent
from tvm_ipc.spmd.rules.axis_label_rule import (
    ALL_OF_IT,
    MOVES,
    Labels,
    LocalCall,
    Refusal,
    Related,
    Rule,
    all_partial_sums,
    needs_all,
    shard,
)
from tvm_ipc.spmd.rules.elementwise import same_axes
from tvm_ipc.spmd.rules.operation import Operation, aligned, axes_of, axis_of, same


def _permute_dims(op: Operation) -> Rule:
    axes = op.labels[::-1] if op.attrs.axes is None else axes_of(op.attrs.axes, op.ndim())
    return Rule((op.labels,), (axes,), **MOVES)


def _broadcast_to(op: Operation) -> Rule:
    dims = op.result_dims()

    def local(local_call: LocalCall) -> relax.Expr:
        shape = relax.ShapeExpr(local_call.results[0])
        return relax.op.broadcast_to(local_call.call.args[0], shape)

    return Rule((aligned(op.dims(), dims),), (tuple(range(len(dims))),), local=local, **MOVES)


def _concat(op: Operation) -> Rule:
    """Return the rule of a concat: a rank joins its shard of each operand along the joined axis."""
    if op.attrs.axis is None:
        raise Refusal("without an axis it joins tensors as vectors")
    axis = op.axis
    extents = [constant(op.dims(k)[axis]) for k in range(len(op.operands))]
    known_extents = [extent for extent in extents if extent]
    ends = [0, *accumulate(known_extents)]

    def common(divisions: Mapping[int, Division | None], workers: int) -> Division | None:
        # Shard the result only if at least half of it is sharded already: it may be gathered later.
        if (
            len(known_extents) < len(extents)
            or 2 * sum(known_extents[k] for k in divisions) < ends[-1]
        ):
            return None
        plain = [Division.plain(extent, workers) for extent in known_extents]
        return concatenated(divisions.get(k) or default for k, default in enumerate(plain))

    def of_operand(operand: int, division: Division, _: int) -> Division:
        piece = division.between(*ends[operand : operand + 2])
        assert piece is not None, "segments are of operands"
        return piece[0]

    def propagate(division: Division | None, workers: int) -> list[Placement] | str:
        return ALL_OF_IT if division is None else [shard(axis, division, workers)]

    return Rule(
        (op.labels,) * len(op.operands),
        (op.labels,),
        related={axis: Related(common, of_operand)},
        propagate={axis: propagate},
        **MOVES,
    )


def _stack(op: Operation) -> Rule:
    axis = axis_of(op.attrs.axis or 0, op.ndim() + 1)
    result = (*op.labels[:axis], op.ndim(), *op.labels[axis:])
    return Rule((op.labels,) * len(op.operands), (result,), **MOVES)


def _split(op: Operation) -> Rule:
    """Return the rule of a split: along the split axis a result takes whole segments."""
    axis = op.axis
    ends = [0]
    for k in range(len(op.results)):
        extent = constant(op.result_dims(k)[axis])
        ends.append(-1 if extent is None or ends[-1] < 0 else ends[-1] + extent)

    def pieces(division: Division) -> list[tuple[Division, int, int] | None]:
        return [division.between(*bounds) for bounds in pairwise(ends)]

    def propagate(division: Division | None, workers: int) -> list[Placement] | str:
        if division is None:
            return ALL_OF_IT
        placements: list[Placement] = []
        for piece in pieces(division):
            if piece is None:
                return f"it splits that axis within segments of {division}"
            placements.append(shard(axis, piece[0], workers))
        return placements

    def local(local_call: LocalCall) -> relax.Expr:
        division = local_call.divisions.get(axis)
        if division is None:
            return local_call.call
        local_ends = [piece[2] for piece in pieces(division) if piece is not None]
        return relax.op.split(local_call.call.args[0], local_ends[:-1], axis)

    return Rule(
        (op.labels,),
        (op.labels,) * len(op.results),
        whole=needs_all(axis),
        propagate={axis: propagate},
        local=local,
        **MOVES,
    )


def _strided_slice(op: Operation) -> Rule:
    """Return the rule of a slice: ranks share uncut axes, and cut ones that keep whole segments."""
    dims = op.dims()
    axes, begins, ends, strides = _bounds(op)
    cut = {
        axis: k
        for k, axis in enumerate(axes)
        if not (
            constant(strides[k]) == 1
            and constant(begins[k]) == 0
            and _reaches(ends[k], dims[axis])
            and same(op.result_dims()[axis], dims[axis])
        )
    }

    def piece(axis: int, division: Division | None) -> tuple[Division, int, int] | None:
        k = cut[axis]
        begin, end = (_position(bounds[k], dims[axis]) for bounds in (begins, ends))
        if division is None or constant(strides[k]) != 1 or begin is None or end is None:
            return None
        return division.between(begin, end)

    def propagate(axis: int, division: Division | None, workers: int) -> list[Placement] | str:
        kept = piece(axis, division)
        return [shard(axis, kept[0], workers)] if kept else ALL_OF_IT

    def local(local_call: LocalCall) -> relax.Expr:
        x = local_call.call.args[0]
        if not cut:
            return x
        *bounds, cut_strides = (
            [values[k] for k in cut.values()] for values in (begins, ends, strides)
        )
        for position, axis in enumerate(cut):
            if kept := piece(axis, local_call.divisions.get(axis)):
                bounds[0][position], bounds[1][position] = kept[1:]
        return relax.op.strided_slice(
            x, list(cut), *bounds, cut_strides, bool(op.attrs.assume_inbound)
        )

    return Rule(
        (op.labels,),
        (op.labels,),
        whole=needs_all(*cut),
        propagate={axis: partial(propagate, axis) for axis in cut},
        local=local,
        **MOVES,
    )


def slices_of(op: Operation) -> Iterator[tuple[int, int, int]]:
    """Yield each axis of a slice with its begin and end, if they are constants."""
    for axis, *bounds, stride in zip(*_bounds(op), strict=True):
        begin, end = (_position(bound, op.dims()[axis]) for bound in bounds)
        if constant(stride) == 1 and begin is not None and end is not None and begin < end:
            yield axis, begin, end


def _bounds(op: Operation) -> tuple[Sequence[int], list[Any], list[Any], list[Any]]:
    """Return the axes, begins, ends and strides of a slice, which may be symbolic."""
    operands = op.call.args[1:]
    if not all(isinstance(x, relax.Tuple) for x in operands):
        raise Refusal("its axes and bounds are not known")
    axes, begins, ends, *strides = (list(x.fields) for x in operands)
    ones = [1] * len(axes)
    return axes_of(map(constant, axes), op.ndim()), begins, ends, (strides and strides[0]) or ones


def _position(bound: Any, extent: Any) -> int | None:
    """Return a bound as a position from the begin of the axis, or None if it is not constant."""
    number, size = constant(bound), constant(extent)
    if number is None or size is None:
        return None
    return max(0, min(number + size if number < 0 else number, size))


def _reaches(end: Any, extent: Any) -> bool:
    """Return whether a slice provably ends at the end of the axis."""
    number, size = constant(end), constant(extent)
    if number is not None:
        return number >= (size if size is not None else 2**31 - 1)
    return same(end, extent)


def _tile(op: Operation) -> Rule:
    repeats = [int(count) for count in op.attrs.repeats]
    result = tuple(range(len(op.result_dims())))
    first = len(result) - len(repeats)
    whole = needs_all(*(first + k for k, count in enumerate(repeats) if count != 1))
    return Rule((result[len(result) - op.ndim() :],), (result,), whole=whole, **MOVES)


def _repeat(op: Operation) -> Rule:
    """Return the rule of a repeat: ranks with the same elements split the copies among them."""
    if op.attrs.axis is None:
        raise Refusal("without an axis it repeats the elements of a vector")
    axis = op.axis
    extent = constant(op.dims()[axis])
    times = int(op.attrs.repeats)

    def propagate(division: Division | None, workers: int) -> list[Placement] | str:
        if extent is None:
            return f"the extent {format_extent(op.dims()[axis])} that it repeats is not known"
        if extent == 0 or times == 0:
            return [Shard(axis)]
        division = division or Division.plain(extent, workers)
        if len(set(division.copies_of(workers))) > 1:
            return f"segments of {division} are on different numbers of ranks"
        return [shard(axis, division.repeated(times, workers), workers)]

    def local(local_call: LocalCall) -> relax.Expr:
        if axis not in local_call.workers:
            return local_call.call
        division, workers = local_call.divisions[axis], local_call.workers[axis]
        copies = 1 if division is None else division.copies(workers)
        return relax.op.repeat(local_call.call.args[0], -(-times // copies), axis)

    # Padding may not be zero: where copies do not split evenly, some ranks have extra ones there.
    linear = MOVES["partial_linear"]
    return Rule(
        (op.labels,), (op.labels,), propagate={axis: propagate}, partial_linear=linear, local=local
    )


def _pad(op: Operation) -> Rule:
    widths = [int(width) for width in op.attrs.pad_width]
    padded = [axis for axis in op.labels if widths[2 * axis] or widths[2 * axis + 1]]
    pads_zeros = str(op.attrs.pad_mode) != "constant" or float(op.attrs.pad_value) == 0
    behavior: dict[str, Any] = {"partial_linear": all_partial_sums, "preserves_zeros": all}
    whole = needs_all(*padded)
    return Rule((op.labels,), (op.labels,), whole=whole, **(behavior if pads_zeros else {}))


def _meshgrid(op: Operation) -> Rule:
    if str(op.attrs.indexing) == "xy":
        raise Refusal("for indexing='xy' TVM infers other extents than its kernel gives")
    operands: tuple[Labels, ...] = tuple((k,) for k in range(len(op.operands)))
    result_labels = tuple(range(len(op.operands)))
    return Rule(operands, (result_labels,) * len(op.results))


def _reverse_sequence(op: Operation) -> Rule:
    batch = axis_of(op.attrs.batch_axis, op.ndim())
    whole = needs_all(axis_of(op.attrs.seq_axis, op.ndim()))
    return Rule((op.labels, (batch,)), (op.labels,), whole=whole)


_TRIANGLE: Final = same_axes(
    lambda op: op.labels[-2:], partial_linear=all_partial_sums, preserves_zeros=all
)
RULES: Final = {
    "permute_dims": _permute_dims,
    "broadcast_to": _broadcast_to,
    "concat": _concat,
    "stack": _stack,
    "split": _split,
    "strided_slice": _strided_slice,
    **dict.fromkeys(("slice_scatter", "flip"), same_axes(lambda op: [op.axis], **MOVES)),
    "tile": _tile,
    "repeat": _repeat,
    "nn.pad": _pad,
    **dict.fromkeys(("tril", "triu"), _TRIANGLE),
    "meshgrid": _meshgrid,
    "reverse_sequence": _reverse_sequence,
}
