# SPDX-License-Identifier: Apache-2.0
"""Legalization of collectives: `LegalizeOps` lowers them to calls of packed functions.

Before, with 2 workers:
    y = R.comm.allgather(x, axis=1, ...)          # x: (3, 4)

After:
    lv = R.call_dps_packed("tvm_ipc.allgather", (x, R.shape([2, 0, 1]), 0), R.Tensor((2, 3, 4)))
    lv1 = R.permute_dims(lv, [1, 0, 2])
    y = R.reshape(lv1, (3, 8))

Packed functions concatenate shards in memory. Along axis 0 no data has to be moved; along other
axes the lowered program transposes.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax, te, tirx

from tvm_ipc.comm.collective_attrs import CollectiveAttrs, kind_of, reduction_of, sources
from tvm_ipc.comm.collective_op_constructors import OPERATORS
from tvm_ipc.comm.collective_relax_op import NAME, infer, shard_extent
from tvm_ipc.comm.extent_arithmetic import constant, divides, largest_shard
from tvm_ipc.packed_functions import AllReduceStrategy, CollectiveFlag, Parameter, Team
from tvm_ipc.packed_functions.collective_declarations import ALLREDUCE, DISCO_ALLREDUCE
from tvm_ipc.packed_functions.program_function_declarations import TEAM_INDEX
from tvm_ipc.tvm_moved_names import Analyzer


def legalize(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """Return the lowered form of a collective."""
    # A module may come from elsewhere with types that were not inferred from these attributes.
    ty = infer(call)
    attrs = CollectiveAttrs.of(call)
    kind = kind_of(attrs)
    if _differ(ty, call.ty):
        raise ValueError(
            f"{kind.name}: the module specifies the type {call.ty}; expected {ty}, which its "
            "arguments determine"
        )
    tensor, *operands = call.args
    if not isinstance(ty.shape, relax.ShapeExpr) or ty.dtype is None:
        raise ValueError(
            f"{kind.name}: x is {tensor.ty}; expected a tensor with known extents and element "
            "type; specify them, for example with R.match_cast"
        )
    extent = operands[-1].values[0] if kind.concatenates and attrs.uneven else None
    if extent is not None:
        tensor = _cast_to_shard(builder, tensor, int(attrs.concat_axis or 0), attrs.workers, extent)
    if attrs.root_rank is not None:
        return _with_root_outside(builder, tensor, attrs, extent)
    if attrs.scale is not None:
        factor = relax.const(attrs.scale, str(ty.dtype.dtype))
        tensor = builder.emit(relax.op.multiply(tensor, factor))
    if not kind.communicates:
        return _own_shard(builder, tensor, attrs)
    if attrs.split_axis is not None:
        tensor = _shards_first(builder, tensor, attrs, attrs.split_axis)
    received = builder.emit(_call(tensor, operands, attrs))
    if attrs.concat_axis is not None:
        return _concatenated(builder, received, attrs.concat_axis, extent)
    return received


def _with_root_outside(
    builder: relax.BlockBuilder, tensor: relax.Expr, attrs: CollectiveAttrs, extent: Any
) -> relax.Expr:
    """Return the result of a rooted collective whose root is not in the team.

    It becomes one or two collectives of a team to which the root is added.
    """
    (team,) = ([int(rank) for rank in ranks] for ranks in attrs.team)
    root, backend = int(attrs.root_rank or 0), attrs.backend
    added: dict[str, Any] = {"team": [*team, root], "backend": backend}
    if attrs.kind == "reduce":
        options: dict[str, Any] = {"scale": attrs.scale, "backend": backend}
        total = OPERATORS["reduce"](tensor, attrs.reduction, team=team, **options)
        ends = {"team": [team[0], root], "backend": backend}
        return OPERATORS["send_recv"](builder.emit(total), 0, 1, **ends)
    if attrs.kind == "broadcast":
        return OPERATORS["broadcast"](tensor, len(team), **added)
    extents = tensor.ty.shape.ty.values
    if attrs.kind == "gather":
        axis = int(attrs.concat_axis or 0)
        shards = builder.emit(OPERATORS["gather"](tensor, len(team), axis=axis, **added))
        # Without the last shard, which is the root's own.
        return builder.call_te(_slice, shards, axis, extent or extents[axis] * len(team))
    axis = int(attrs.split_axis or 0)
    length = shard_extent(kind_of(attrs), attrs, extents[axis])
    padded = builder.emit_te(_padded, tensor, axis, length * (len(team) + 1))
    return OPERATORS["scatter"](padded, len(team), axis=axis, **added)


def _differ(inferred: relax.TensorType, annotated: object) -> bool:
    """Return whether the shape that a module annotates provably differs from the inferred one."""
    if not isinstance(annotated, relax.TensorType):
        return False
    shapes = [ty.shape for ty in (inferred, annotated)]
    if not all(isinstance(shape, relax.ShapeExpr) for shape in shapes):
        return False
    expected, actual = ([*shape.values] for shape in shapes)
    analyzer = Analyzer()
    return len(expected) != len(actual) or any(
        analyzer.can_prove(tirx.NE(a, b)) for a, b in zip(expected, actual, strict=True)
    )


def _call(tensor: relax.Expr, operands: list[relax.Expr], attrs: CollectiveAttrs) -> relax.Call:
    """Return the call of the packed function, whose result has the received shards in axis 0."""
    kind = kind_of(attrs)
    ty = tensor.ty
    dims = list(ty.shape.ty.values)
    if kind.splits and not kind.concatenates:
        dims = dims[1:]
    elif kind.concatenates and not kind.splits:
        dims = [tirx.IntImm("int64", attrs.workers), *dims]
    out = relax.TensorType(dims, str(ty.dtype.dtype), ty.vdevice)
    if kind.function is ALLREDUCE and isinstance(attrs.team, str):
        # The call that TVM lowers its own operator to, so that passes treat both alike.
        reduction = relax.ShapeExpr([reduction_of(attrs)])
        in_group = relax.prim_value(tirx.IntImm("bool", attrs.team == "group"))
        args = [tensor, reduction, in_group]
        return relax.op.call_dps_packed(DISCO_ALLREDUCE.name, args, out_ty=out)
    args = packed_arguments(tensor, operands, attrs)
    return relax.op.call_dps_packed(kind.function.name, args, out_ty=out)


def packed_arguments(
    tensor: relax.Expr, operands: list[relax.Expr], attrs: CollectiveAttrs
) -> list[relax.Expr]:
    """Return the arguments of the packed function, except the last, its output."""
    return [
        tensor if parameter.name == "send" else _argument(parameter, operands, attrs)
        for parameter in kind_of(attrs).function.parameters[:-1]
    ]


def _argument(
    parameter: Parameter, operands: list[relax.Expr], attrs: CollectiveAttrs
) -> relax.Expr:
    """Return the argument for a parameter of a packed function."""
    if parameter.name == "root":
        return operands[0]
    if parameter.name == "parts":
        return relax.ShapeExpr([])  # shards of equal size
    if parameter.name == "sources":
        return relax.ShapeExpr(sources(attrs, operands))
    if parameter.type == "Team":
        return team_argument(attrs.team)
    if parameter.type == "ReduceKind":
        return relax.prim_value(int(reduction_of(attrs)))
    number: dict[str, int] = {
        "AllReduceStrategy": AllReduceStrategy.AUTO,
        "CollectiveFlag": CollectiveFlag.NONE,
    }
    return relax.prim_value(int(number[parameter.type]))


def team_argument(team: Any) -> relax.Expr:
    """Return a team as packed functions take it."""
    if isinstance(team, str):
        return relax.prim_value(int(Team[team.upper()]))
    return relax.ShapeExpr([len(team[0]), *(rank for ranks in team for rank in ranks)])


def _own_shard(
    builder: relax.BlockBuilder, tensor: relax.Expr, attrs: CollectiveAttrs
) -> relax.Expr:
    """Return the rank's shard of a tensor, copied by a kernel that takes the rank's team index."""
    axis = int(attrs.split_axis or 0)
    length = shard_extent(kind_of(attrs), attrs, tensor.ty.shape.ty.values[axis])
    index_ty = relax.TensorType((), "int64", tensor.ty.vdevice)
    call = relax.op.call_dps_packed(TEAM_INDEX.name, [team_argument(attrs.team)], out_ty=index_ty)
    return builder.call_te(_slice_at, tensor, builder.emit(call), axis, length)


def _slice_at(tensor: te.Tensor, team_index: te.Tensor, axis: int, length: relax.Expr) -> te.Tensor:
    """Return `length` rows of a tensor along an axis, with zeros for rows beyond its end."""
    extent = tensor.shape[axis]
    shape = [*tensor.shape[:axis], length, *tensor.shape[axis + 1 :]]

    def element(*index: tirx.Var) -> relax.Expr:
        at = team_index() * length + index[axis]
        value = tensor(*index[:axis], at, *index[axis + 1 :])
        return tirx.if_then_else(at < extent, value, tirx.const(0, tensor.dtype))

    return te.compute(shape, element, name="part")


def _shards_first(
    builder: relax.BlockBuilder, tensor: relax.Expr, attrs: CollectiveAttrs, axis: int
) -> relax.Expr:
    """Return the shards of a tensor along an axis, stacked in a new axis 0."""
    workers = attrs.workers
    extents = list(tensor.ty.shape.ty.values)
    length = shard_extent(kind_of(attrs), attrs, extents[axis])
    if not divides(workers, extents[axis]):
        tensor = builder.emit_te(_padded, tensor, axis, length * workers)
    dims = [*extents[:axis], tirx.IntImm("int64", workers), length, *extents[axis + 1 :]]
    shards = builder.emit(reshaped(builder, tensor, dims))
    if axis == 0:
        return shards
    order = [axis, *range(axis), *range(axis + 1, len(dims))]
    return builder.emit(relax.op.permute_dims(shards, order))


def _cast_to_shard(
    builder: relax.BlockBuilder, tensor: relax.Expr, axis: int, workers: int, extent: relax.Expr
) -> relax.Expr:
    """Return the tensor, with a match_cast to the shard's extent unless it is proven."""
    dims = list(tensor.ty.shape.ty.values)
    length = largest_shard(extent, workers)
    if Analyzer().can_prove_equal(length, dims[axis]):
        return tensor
    dims[axis] = length
    ty = relax.TensorType(dims, str(tensor.ty.dtype.dtype), tensor.ty.vdevice)
    return builder.match_cast(tensor, ty)


def _padded(tensor: te.Tensor, axis: int, extent: relax.Expr) -> te.Tensor:
    """Return the tensor padded with zeros at its end along an axis."""
    shape = [*tensor.shape[:axis], extent, *tensor.shape[axis + 1 :]]

    def element(*index: tirx.Var) -> relax.Expr:
        inside = index[axis] < tensor.shape[axis]
        return tirx.if_then_else(inside, tensor(*index), tirx.const(0, tensor.dtype))

    return te.compute(shape, element, name="pad")


def _concatenated(
    builder: relax.BlockBuilder,
    shards: relax.Expr,
    axis: int,
    extent: relax.Expr | None,
) -> relax.Expr:
    """Return shards stacked in axis 0, concatenated along an axis and cut off at an extent."""
    count, *dims = shards.ty.shape.ty.values
    if axis:
        order = [*range(1, axis + 1), 0, *range(axis + 1, len(dims) + 1)]
        shards = builder.emit(relax.op.permute_dims(shards, order))
    dims[axis] = dims[axis] * count
    whole = reshaped(builder, shards, dims)
    if extent is None or Analyzer().can_prove_equal(extent, dims[axis]):
        return whole
    return builder.call_te(_slice, builder.emit(whole), axis, extent)


def reshaped(builder: relax.BlockBuilder, tensor: relax.Expr, dims: list[relax.Expr]) -> relax.Call:
    """Return a tensor with other extents.

    A kernel creates a tensor without elements: TVM's operator takes an extent of 0 to mean the
    previous extent, and constants without elements cannot be loaded.
    """
    if any(constant(extent) == 0 for extent in dims):
        return builder.call_te(_empty, tensor, dims)
    return relax.op.reshape(tensor, relax.ShapeExpr(dims))


def _empty(tensor: te.Tensor, shape: list[relax.Expr]) -> te.Tensor:
    """Return a tensor without elements."""
    return te.compute(shape, lambda *_: tirx.const(0, tensor.dtype), name="nothing")


def _slice(tensor: te.Tensor, axis: int, extent: relax.Expr) -> te.Tensor:
    """Return the first `extent` rows of a tensor along an axis."""
    shape = [*tensor.shape[:axis], extent, *tensor.shape[axis + 1 :]]
    return te.compute(shape, lambda *index: tensor(*index), name="cut")


tvm.ir.register_op_attr(NAME, "FLegalize", legalize)
