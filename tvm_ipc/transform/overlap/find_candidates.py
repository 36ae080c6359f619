# SPDX-License-Identifier: Apache-2.0
"""Analysis that finds matmuls whose rows are gathered before them or summed over ranks after them.

    whole = R.comm.allgather(x, axis=a)       y = R.matmul(x, w, out_dtype="float32")
    h = R.matmul(whole, w)                    h = R.astype(y, "bfloat16")
    z = R.nn.relu(R.add(h, bias))             z = R.comm.reduce_scatter(h, "sum", axis=a)
                                              or R.comm.allreduce(h, "sum")

The rows of a matmul are independent of each other, and so are those of elementwise operators after
it. Any number of rows can therefore be computed as soon as they are available. Several matmuls may
share a gathered tensor. Reshapes that preserve rows, such as that of a batch to a matrix, may stand
between.

The analysis returns candidates; the pass replaces them by chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from tvm import relax, tirx

from tvm_ipc import arguments
from tvm_ipc.analysis.elementwise_ops import BROADCASTING, UNARY
from tvm_ipc.analysis.program_order import Step
from tvm_ipc.analysis.shape_algebra import product_of
from tvm_ipc.analysis.uses import Uses, binds
from tvm_ipc.calibration import COLLECTIVES
from tvm_ipc.comm.collective_attrs import CollectiveAttrs, kind_of
from tvm_ipc.comm.collective_relax_op import dtype_of, extents, is_collective, same_extents
from tvm_ipc.comm.extent_arithmetic import constant, divides, format_extent
from tvm_ipc.packed_functions.program_function_declarations import KERNEL_ALIGNMENT
from tvm_ipc.transform.convert_from_and_to_ccl import from_ccl
from tvm_ipc.transform.overlap.candidate_types import (
    Candidate,
    MatmulChain,
    NotOverlappableError,
    RowLayout,
    unit_of,
)
from tvm_ipc.tvm_moved_names import Analyzer

_MATMUL: Final = "relax.matmul"
_RESHAPE: Final = "relax.reshape"
#: Operators that map zeros to zeros.
_KEEP_ZEROS: Final = ("relax.astype", "relax.negative", _RESHAPE)
_OTHER_USE: Final = "an operator other than a matmul uses the gathered tensor"
_ELEMENTWISE: Final = tuple(f"relax.{name}" for name in (*UNARY, *BROADCASTING))


def collective_of(step: Step) -> CollectiveAttrs | None:
    """Return the attributes of the gather or reduction at a step, None for anything else."""
    if not isinstance(step.binding, relax.VarBinding):
        return None
    attrs = _attrs_of(step)
    return attrs if attrs is not None and attrs.kind in COLLECTIVES else None


def unsupported_kind(step: Step) -> str | None:
    """Return the kind of a collective that is neither a gather nor a reduction to all ranks."""
    attrs = _attrs_of(step) if isinstance(step.binding, relax.VarBinding) else None
    if attrs is None or attrs.kind in COLLECTIVES or not kind_of(attrs).communicates:
        return None
    return str(attrs.kind)


def _attrs_of(step: Step) -> CollectiveAttrs | None:
    """Return the attributes of a collective, None for anything else."""
    value = step.value
    if not is_collective(value):
        value = from_ccl(value)
    return CollectiveAttrs.of(value) if is_collective(value) else None


def find_candidate(step: Step, attrs: CollectiveAttrs, ranks: int | None, uses: Uses) -> Candidate:
    """Return the candidate of a collective; raise the reason if it cannot be overlapped."""
    if ranks is None:
        raise NotOverlappableError("the number of ranks in its team is unknown; pass world_size")
    if ranks == 1:
        raise NotOverlappableError("its team has one rank")
    find = _find_gather if attrs.kind == "allgather" else _find_sum
    site = find(step, attrs, ranks, uses)
    if any(constant(extent) == 0 for extent in site.input_layout.shape[: site.input_layout.axis]):
        raise NotOverlappableError("it has no blocks of rows")
    shard_bytes = site.rows * _constant_row_bytes(site.input_layout)
    # Kernels read the shards of an all-gather from their beginning; others are slices.
    sliced = site.kind != "allgather" or site.input_layout.blocks != 1
    misalignment = tirx.floormod(shard_bytes, KERNEL_ALIGNMENT)
    if sliced and not Analyzer().can_prove_equal(misalignment, 0):
        raise NotOverlappableError(
            f"a rank has {format_extent(shard_bytes)} bytes of rows; expected a multiple of "
            f"{KERNEL_ALIGNMENT}, the alignment that kernels need"
        )
    check_written(site, uses)
    return site


def _constant_row_bytes(layout: RowLayout) -> int:
    if not isinstance(layout.row_bytes, int):
        raise NotOverlappableError("the extents of its rows are unknown")
    return layout.row_bytes


def check_written(site: Candidate, uses: Uses) -> None:
    """Raise an error if a tensor may be written between a collective and its matmuls."""
    if uses.written(*_span(site)):
        raise NotOverlappableError("a call before the last matmul may write into its inputs")


def _span(site: Candidate) -> tuple[int, int]:
    """Return the first and the last step of a candidate."""
    events = [site.collective.entry]
    events += [bound.entry for chain in site.chains for bound in chain.steps]
    return min(events), max(events)


def find_gather(step: Step, attrs: CollectiveAttrs, ranks: int, uses: Uses) -> Candidate:
    """Return the candidate of an all-gather whose result is multiplied without a reshape."""
    if attrs.uneven:
        raise NotOverlappableError("its shards are uneven")
    site = _find_gather(step, attrs, ranks, uses)
    if any(chain.reshape for chain in site.chains):
        raise NotOverlappableError(_OTHER_USE)
    return site


def _find_gather(step: Step, attrs: CollectiveAttrs, ranks: int, uses: Uses) -> Candidate:
    gathered = step.var
    shape = _shape("the gathered tensor", gathered)
    operand = step.value.args[0]
    axis = int(attrs.concat_axis or 0)
    if not isinstance(operand, relax.Var):
        raise NotOverlappableError("its operand is not a variable")
    chains = []
    for user, reshape in _users_by_rows(gathered, uses):
        if not user.shares_block(step) or not binds(user, _MATMUL):
            raise NotOverlappableError(_OTHER_USE)
        chain = MatmulChain(user, [], reshape)
        _check_matmul(user.value, gathered if reshape is None else reshape.var)
        _check_axis(axis, shape)
        _collect_epilogue(chain, len(shape), axis, uses)
        chains.append(chain)
    if not chains:
        raise NotOverlappableError("the gathered tensor is not used")
    rows = _shape("its operand", operand)[axis]
    row_shape = [*shape[:axis], rows * ranks, *shape[axis + 1 : -1]]
    input_layout = RowLayout([*row_shape, shape[-1]], axis, dtype_of(gathered.ty))
    output_layouts = [_layout(chain, row_shape, axis) for chain in chains]
    return Candidate(
        step, attrs, ranks, chains, rows, operand, input_layout, output_layouts, shape[axis]
    )


def _users_by_rows(variable: Any, uses: Uses) -> Iterator[tuple[Step, Step | None]]:
    """Yield each user of a tensor; for a user of its reshape, also the reshape."""
    for user in uses.users[variable]:
        if binds(user, _RESHAPE) and _keeps_rows(user) and uses.users[user.var]:
            for reshape_user in uses.users[user.var]:
                yield reshape_user, user
        else:
            yield user, None


def _find_sum(step: Step, attrs: CollectiveAttrs, ranks: int, uses: Uses) -> Candidate:
    partial = step.value.args[0]
    shape = _shape("its operand", partial)
    if attrs.scale is not None:
        raise NotOverlappableError("its sum is scaled; multiply an operand of the matmul instead")
    scatters = attrs.kind == "reduce_scatter"
    chain = MatmulChain(_find_matmul(partial, step, uses), [])
    operand = chain.matmul.value.args[0]
    _check_matmul(chain.matmul.value, operand)
    inner = _shape("the left operand of the matmul", operand)[-1]
    if scatters:
        axis, extent = int(attrs.split_axis or 0), shape[int(attrs.split_axis or 0)]
        _check_axis(axis, shape)
        rows: Any = _shape("its result", step.var)[axis]
        row_shape = [*shape[:axis], rows * ranks, *shape[axis + 1 : -1]]
    else:
        axis, extent, row_shape = 0, _simplified_product(shape[:-1]), [1]
    _collect_epilogue(chain, len(row_shape) + 1, axis, uses)
    if not chain.last.var.same_as(partial):
        raise NotOverlappableError("an operator after the matmul also needs other rows")
    if len(uses.users[partial]) != 1:
        raise NotOverlappableError("the result of the matmul has other uses")
    input_layout = RowLayout([*row_shape, inner], axis, dtype_of(operand.ty))
    output_layouts = [_layout(chain, row_shape, axis)]
    if scatters:
        if attrs.uneven and any(not binds(user, *_KEEP_ZEROS) for user in chain.epilogue):
            raise NotOverlappableError(
                "its shards are uneven, and an operator after the matmul does not map the padding, "
                "which is zero, to zeros"
            )
        return Candidate(
            step, attrs, ranks, [chain], rows, operand, input_layout, output_layouts, extent
        )
    for layout in (input_layout, *output_layouts):
        _constant_row_bytes(layout)
    unit = unit_of([input_layout, *output_layouts])
    rows, remainder = _split_evenly(extent, ranks, unit)
    if constant(rows) == 0 and constant(extent) != 0:
        needed = arguments.counted(unit, "row")
        raise NotOverlappableError(
            f"it has {format_extent(extent)} row{'s' * (constant(extent) != 1)}; expected at least "
            f"{needed} for each of {ranks} ranks"
        )
    input_layout.shape[0] = output_layouts[0].shape[0] = rows * ranks
    return Candidate(
        step,
        attrs,
        ranks,
        [chain],
        rows,
        operand,
        input_layout,
        output_layouts,
        extent,
        remainder,
    )


def _split_evenly(extent: Any, ranks: int, unit: int) -> tuple[Any, Any]:
    """Return the number of rows of each rank, a multiple of `unit`, and the remainder."""
    analyzer, number = Analyzer(), constant(extent)
    if number is not None:
        rows = number // (ranks * unit) * unit
        return rows, number - ranks * rows
    rows = analyzer.simplify(tirx.floordiv(extent, ranks * unit) * unit)
    remainder = analyzer.simplify(extent - rows * ranks)
    return rows, 0 if divides(ranks * unit, extent) else remainder


def _simplified_product(shape: list[Any]) -> Any:
    product = product_of(shape)
    return product if isinstance(product, int) else Analyzer().simplify(product)


def _find_matmul(partial: Any, collective: Step, uses: Uses) -> Step:
    """Return the matmul from which elementwise operators compute a value."""
    while True:
        step = uses.binding_of(partial)
        if step is None or not step.shares_block(collective):
            break
        if binds(step, _MATMUL):
            return step
        if not (binds(step, *_ELEMENTWISE) or (binds(step, _RESHAPE) and _keeps_rows(step))):
            break
        partial = step.value.args[0]
    raise NotOverlappableError("its operand is not the result of a matmul")


def _keeps_rows(reshape: Step) -> bool:
    """Return whether a reshape preserves the last axis."""
    before, after = (
        extents(tensor.ty) if isinstance(tensor.ty, relax.TensorType) else None
        for tensor in (reshape.value.args[0], reshape.var)
    )
    if not before or not after or min(len(before), len(after)) < 2:
        return False
    return constant(before[-1]) != 0 and same_extents(before[-1:], after[-1:])


def _check_matmul(matmul: relax.Call, left: Any) -> None:
    first, second = matmul.args
    if not isinstance(left, relax.Var) or not first.same_as(left):
        raise NotOverlappableError("its rows are not those of the matmul's left operand")
    if second.same_as(left) or not isinstance(second.ty, relax.TensorType) or second.ty.ndim != 2:
        raise NotOverlappableError("the right operand of the matmul is not a matrix")


def _check_axis(axis: int, shape: list[Any]) -> None:
    if axis >= len(shape) - 1:
        raise NotOverlappableError("its axis is the last one, which does not enumerate rows")


def _collect_epilogue(chain: MatmulChain, ndim: int, axis: int, uses: Uses) -> None:
    """Add the operators after a matmul that work row by row, until a result has other uses.

    Parameters
    ----------
    chain : the matmul, to which the operators are added.
    ndim : the number of axes of the tensor that is gathered or summed.
    axis : its axis of rows.
    """
    # After a reshape, only the last axis is known to be within a row.
    same_shape = chain.reshape is None and int(chain.matmul.var.ty.ndim) == ndim
    while True:
        variable = chain.last.var
        users = uses.users[variable]
        if len(users) != 1 or not users[0].shares_block(chain.matmul):
            return
        (user,) = users
        if binds(user, _RESHAPE) and _keeps_rows(user):
            same_shape = False
        else:
            within = ndim - axis - 1 if same_shape else 1
            if not binds(user, *_ELEMENTWISE) or not _by_rows(user, variable, within):
                return
        chain.epilogue.append(user)


def _by_rows(user: Step, variable: Any, within: int) -> bool:
    """Return whether each row of a result depends on one row of a variable and on no other rows.

    Parameters
    ----------
    user : the binding of the result.
    variable : the variable, an operand of the result.
    within : the number of last axes that are within a row.
    """
    result, ty = user.var.ty, variable.ty
    if not isinstance(result, relax.TensorType) or not same_extents(
        extents(result) or [], extents(ty) or []
    ):
        return False
    for operand in user.value.args:
        if operand.same_as(variable) or not isinstance(operand.ty, relax.TensorType):
            continue
        dims = extents(operand.ty)
        if dims is None:
            return False
        leading = dims[: max(0, len(dims) - within)]
        if any(constant(extent) != 1 for extent in leading):
            return False
    return True


def _layout(chain: MatmulChain, rows: list[Any], axis: int) -> RowLayout:
    last = chain.last.var
    return RowLayout([*rows, _shape("the result of the matmul", last)[-1]], axis, dtype_of(last.ty))


def _shape(description: str, tensor: Any) -> list[Any]:
    """Return the shape of a tensor; raise an error that names it if the shape is unknown."""
    ty = tensor.ty
    dims = extents(ty) if isinstance(ty, relax.TensorType) and ty.dtype is not None else None
    if dims is not None and ty.vdevice is not None:
        raise NotOverlappableError(f"{description} is bound to a device")
    if dims is None:
        raise NotOverlappableError(f"the shape of {description} is unknown")
    return dims
