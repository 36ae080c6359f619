# SPDX-License-Identifier: Apache-2.0
"""What `LegalizeOps` makes of collectives: calls of packed functions, which know no axes.

Before, with 2 workers:
    y = R.comm.allgather(x, axis=1, ...)          # x: (3, 4)

After:
    lv = R.call_dps_packed("tvm_ipc.allgather", (x, R.shape([2, 0, 1]), 0), R.Tensor((2, 3, 4)))
    lv1 = R.permute_dims(lv, [1, 0, 2])
    y = R.reshape(lv1, (3, 8))

The parts of the ranks lie one after the other in memory: along axis 0 nothing has to be moved.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax, te, tirx

from tvm_ipc.comm.attributes import CollectiveAttrs, kind_of, reduction_of, sources
from tvm_ipc.comm.extents import constant, divides, largest_part
from tvm_ipc.comm.kinds import KINDS
from tvm_ipc.comm.operator import NAME, infer, part
from tvm_ipc.contract import AllReduceStrategy, CollectiveFlag, Parameter, Team
from tvm_ipc.contract.collectives import DISCO_ALLREDUCE
from tvm_ipc.contract.programs import PLACE_IN_TEAM


def legalize(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """Return what a collective becomes."""
    attrs = call.attrs
    # A module may come from elsewhere with types that nobody has inferred from these attributes.
    ty = infer(call)
    kind = kind_of(attrs)
    if _differ(ty, call.ty):
        raise ValueError(f"{kind.name}: it gives {ty}, and the module says {call.ty}")
    tensor, *operands = call.args
    if not isinstance(ty.shape, relax.ShapeExpr) or ty.dtype is None:
        raise ValueError(
            f"{kind.name}: to lower it, extents and type of x have to be known, and x is "
            f"{tensor.ty}; name them, with R.match_cast for one"
        )
    extent = operands[-1].values[0] if kind.joins and attrs.uneven else None
    if extent is not None:
        tensor = _checked(builder, tensor, int(attrs.concat_axis or 0), attrs.workers, extent)
    if kind is KINDS["take_part"]:
        return _own_part(builder, tensor, attrs)
    if attrs.split_axis is not None:
        tensor = _parts_first(builder, tensor, attrs, attrs.split_axis)
    received = builder.emit(_call(tensor, operands, attrs))
    if attrs.concat_axis is not None:
        return _joined(builder, received, attrs.concat_axis, extent)
    return received


def _differ(ty: relax.TensorType, said: object) -> bool:
    """Whether a type is certainly not the one that a module says."""
    if not isinstance(said, relax.TensorType):
        return False
    shapes = [one.shape for one in (ty, said)]
    if not all(isinstance(shape, relax.ShapeExpr) for shape in shapes):
        return False
    extents, others = ([*shape.values] for shape in shapes)
    analyzer = tvm.sym.Analyzer()
    return len(extents) != len(others) or any(
        analyzer.can_prove(tirx.NE(a, b)) for a, b in zip(extents, others, strict=True)
    )


def _call(tensor: relax.Expr, operands: list[relax.Expr], attrs: CollectiveAttrs) -> relax.Call:
    """Return the call of the packed function, with what the ranks receive part after part."""
    kind = kind_of(attrs)
    ty = tensor.ty
    dims = list(ty.shape.ty.values)
    if kind.splits and not kind.joins:
        dims = dims[1:]
    elif kind.joins and not kind.splits:
        dims = [tirx.IntImm("int64", attrs.workers), *dims]
    out = relax.TensorType(dims, str(ty.dtype.dtype), ty.vdevice)
    if kind is KINDS["allreduce"] and isinstance(attrs.team, str):
        # As TVM makes it of its own operator, so that passes treat both alike.
        reduction = relax.ShapeExpr([reduction_of(attrs)])
        in_group = relax.prim_value(tirx.IntImm("bool", attrs.team == "group"))
        given = [tensor, reduction, in_group]
        return relax.op.call_dps_packed(DISCO_ALLREDUCE.name, given, out_ty=out)
    given = packed_arguments(tensor, operands, attrs)
    return relax.op.call_dps_packed(kind.function.name, given, out_ty=out)


def packed_arguments(
    tensor: relax.Expr, operands: list[relax.Expr], attrs: CollectiveAttrs
) -> list[relax.Expr]:
    """Return what the packed function is given, but for its last parameter: what it writes."""
    return [
        tensor if parameter.name == "send" else _argument(parameter, operands, attrs)
        for parameter in kind_of(attrs).function.parameters[:-1]
    ]


def _argument(
    parameter: Parameter, operands: list[relax.Expr], attrs: CollectiveAttrs
) -> relax.Expr:
    """Return what a parameter of a packed function is given."""
    if parameter.name == "root":
        return operands[0]
    if parameter.name == "parts":
        return relax.ShapeExpr([])  # all are equal
    if parameter.name == "sources":
        return relax.ShapeExpr(sources(attrs))
    if parameter.type == "Team":
        return team_argument(attrs.team)
    if parameter.type == "ReduceKind":
        return relax.prim_value(int(reduction_of(attrs)))
    number = {"AllReduceStrategy": AllReduceStrategy.AUTO, "CollectiveFlag": CollectiveFlag.NONE}
    return relax.prim_value(int(number[parameter.type]))


def team_argument(team: Any) -> relax.Expr:
    """Return a team as packed functions take it."""
    if isinstance(team, str):
        return relax.prim_value(int(Team[team.upper()]))
    return relax.ShapeExpr([len(team[0]), *(rank for ranks in team for rank in ranks)])


def _own_part(
    builder: relax.BlockBuilder, tensor: relax.Expr, attrs: CollectiveAttrs
) -> relax.Expr:
    """Return the rank's part of a tensor, which a kernel takes by the rank's place in its team."""
    axis = int(attrs.split_axis or 0)
    length = part(kind_of(attrs), attrs, tensor.ty.shape.ty.values[axis])
    told = relax.TensorType((), "int64", tensor.ty.vdevice)
    call = relax.op.call_dps_packed(PLACE_IN_TEAM.name, [team_argument(attrs.team)], out_ty=told)
    return builder.call_te(_part_at, tensor, builder.emit(call), axis, length)


def _part_at(tensor: te.Tensor, place: te.Tensor, axis: int, length: relax.Expr) -> te.Tensor:
    """Return so many rows of a tensor along an axis, with zeros for those after its end."""
    extent = tensor.shape[axis]
    shape = [*tensor.shape[:axis], length, *tensor.shape[axis + 1 :]]

    def element(*index: tirx.Var) -> relax.Expr:
        at = place() * length + index[axis]
        value = tensor(*index[:axis], at, *index[axis + 1 :])
        return tirx.if_then_else(at < extent, value, tirx.const(0, tensor.dtype))

    return te.compute(shape, element, name="part")


def _parts_first(
    builder: relax.BlockBuilder, tensor: relax.Expr, attrs: CollectiveAttrs, axis: int
) -> relax.Expr:
    """Return the parts of a tensor along an axis, one after the other."""
    workers = attrs.workers
    extents = list(tensor.ty.shape.ty.values)
    length = part(kind_of(attrs), attrs, extents[axis])
    if not divides(workers, extents[axis]):
        tensor = builder.emit_te(_padded, tensor, axis, length * workers)
    dims = [*extents[:axis], tirx.IntImm("int64", workers), length, *extents[axis + 1 :]]
    parts = builder.emit(reshaped(builder, tensor, dims))
    if axis == 0:
        return parts
    order = [axis, *range(axis), *range(axis + 1, len(dims))]
    return builder.emit(relax.op.permute_dims(parts, order))


def _checked(
    builder: relax.BlockBuilder, tensor: relax.Expr, axis: int, workers: int, extent: relax.Expr
) -> relax.Expr:
    """Return a part of which it is sure that it is as long as those of the whole."""
    dims = list(tensor.ty.shape.ty.values)
    length = largest_part(extent, workers)
    if tvm.sym.Analyzer().can_prove_equal(length, dims[axis]):
        return tensor
    dims[axis] = length
    ty = relax.TensorType(dims, str(tensor.ty.dtype.dtype), tensor.ty.vdevice)
    return builder.match_cast(tensor, ty)


def _padded(tensor: te.Tensor, axis: int, extent: relax.Expr) -> te.Tensor:
    """Return the tensor with zeros after its end along an axis."""
    shape = [*tensor.shape[:axis], extent, *tensor.shape[axis + 1 :]]

    def element(*index: tirx.Var) -> relax.Expr:
        inside = index[axis] < tensor.shape[axis]
        return tirx.if_then_else(inside, tensor(*index), tirx.const(0, tensor.dtype))

    return te.compute(shape, element, name="pad")


def _joined(
    builder: relax.BlockBuilder,
    parts: relax.Expr,
    axis: int,
    extent: relax.Expr | None,
) -> relax.Expr:
    """Return parts that lie one after the other, joined along an axis, up to an extent."""
    count, *dims = parts.ty.shape.ty.values
    if axis:
        order = [*range(1, axis + 1), 0, *range(axis + 1, len(dims) + 1)]
        parts = builder.emit(relax.op.permute_dims(parts, order))
    dims[axis] = dims[axis] * count
    joined = reshaped(builder, parts, dims)
    if extent is None or tvm.sym.Analyzer().can_prove_equal(extent, dims[axis]):
        return joined
    return builder.call_te(_cut, builder.emit(joined), axis, extent)


def reshaped(builder: relax.BlockBuilder, tensor: relax.Expr, dims: list[relax.Expr]) -> relax.Call:
    """Return a tensor with other extents.

    An extent of 0 means to TVM's operator the extent that was there, and constants without elements
    cannot be loaded: a kernel makes a tensor that has none.
    """
    if any(constant(extent) == 0 for extent in dims):
        return builder.call_te(_nothing, tensor, dims)
    return relax.op.reshape(tensor, relax.ShapeExpr(dims))


def _nothing(tensor: te.Tensor, shape: list[relax.Expr]) -> te.Tensor:
    """Return a tensor without elements."""
    return te.compute(shape, lambda *_: tirx.const(0, tensor.dtype), name="nothing")


def _cut(tensor: te.Tensor, axis: int, extent: relax.Expr) -> te.Tensor:
    """Return what is before the end along an axis."""
    shape = [*tensor.shape[:axis], extent, *tensor.shape[axis + 1 :]]
    return te.compute(shape, lambda *index: tensor(*index), name="cut")


tvm.ir.register_op_attr(NAME, "FLegalize", legalize)
