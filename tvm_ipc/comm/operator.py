# SPDX-License-Identifier: Apache-2.0
"""The operator of all collectives, `relax.comm.collective`, and the type of what it gives.

Its arguments are the tensor; of a rooted kind the place of the root in the team, a number that may
be symbolic; and where parts that are joined are uneven, the extent of the whole, as a shape. The
rest are attributes. The type holds on every rank: a rank that is not the root gets a tensor of the
same type from `reduce` and `gather`, whose values nobody defined.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import tvm
from tvm import relax, tirx

from tvm_ipc import arguments
from tvm_ipc.comm.attributes import CollectiveAttrs, check_attributes, reduction_of
from tvm_ipc.comm.extents import constant, divides, is_integer, largest_part, show_extent
from tvm_ipc.comm.kinds import Kind
from tvm_ipc.contract import MAX_WORKERS, REDUCED_TYPES

NAME: Final = "relax.comm.collective"


def collective(x: relax.Expr, *operands: Any, **attributes: Any) -> relax.Call:
    """Return a collective with these attributes: see `CollectiveAttrs`.

    Programs are written with `allreduce` and the like; this is the form in which they are printed.
    """
    return make(x, operands, CollectiveAttrs(**attributes))


def make(x: relax.Expr, operands: Sequence[Any], attrs: CollectiveAttrs) -> relax.Call:
    """Return a collective of a tensor."""
    if not isinstance(x, relax.Expr):
        raise arguments.wrong_type(f"{attrs.kind}: x", "an expression of a tensor", x)
    kind = check_attributes(attrs)
    _check_operands(kind, attrs, operands)
    return relax.Call(tvm.ir.Op.get(NAME), [x, *map(_as_argument, operands)], attrs)


def _as_argument(operand: Any) -> relax.Expr:
    return operand if isinstance(operand, relax.Expr) else relax.prim_value(constant(operand))


def _check_operands(kind: Kind, attrs: CollectiveAttrs, operands: Sequence[Any]) -> None:
    wanted = ["the place of its root"] * kind.rooted
    wanted += ["the extent of the whole"] * (attrs.uneven and kind.joins)
    if len(operands) != len(wanted):
        needs = f"takes {' and '.join(wanted)}" if wanted else "takes nothing"
        raise ValueError(f"{kind.name}: it {needs} beside the tensor; found {len(operands)}")
    if kind.rooted:
        root = constant(operands[0])
        if root is None and not is_integer(operands[0]):
            number = "a place in a team, a number that may be symbolic"
            raise arguments.wrong_type(f"{kind.name}: root", number, operands[0])
        if root is not None and not 0 <= root < (attrs.workers or MAX_WORKERS):
            team = f"a team of {attrs.workers}" if attrs.workers else "a team"
            raise ValueError(f"{kind.name}: root is a place in {team}, from 0 on, not {root}")
    if attrs.uneven and kind.joins:
        shape = operands[-1]
        if not isinstance(shape, relax.ShapeExpr) or len(shape.values) != 1:
            one = "a shape with one extent"
            raise arguments.wrong_type(f"{kind.name}: the extent of the whole", one, shape)


def infer(call: relax.Call, _builder: relax.BlockBuilder | None = None) -> relax.TensorType:
    """Return the type of what a collective gives; raise ValueError where it breaks a rule."""
    attrs = call.attrs
    kind = check_attributes(attrs)
    tensor, *operands = call.args
    _check_operands(kind, attrs, operands)
    ty = tensor.ty
    if not isinstance(ty, relax.TensorType):
        raise ValueError(f"{kind.name}: x is a tensor, not {ty}")
    _check_dtype(kind, attrs, ty)
    dims = extents(ty)
    rank = int(ty.ndim)
    for axis in (attrs.split_axis, attrs.concat_axis):
        if axis is not None and not (0 <= axis < rank or (axis >= 0 and rank < 0)):
            raise ValueError(f"{kind.name}: there is no axis {axis} in {ty}")
    if not (kind.splits or kind.joins):
        return ty
    if dims is None:  # nor are those of what it gives, which are not those of x
        return relax.TensorType(dtype=dtype_of(ty), vdevice=ty.vdevice, ndim=rank)
    if kind.splits:
        dims[attrs.split_axis] = part(kind, attrs, dims[attrs.split_axis])
    if kind.joins:
        dims[attrs.concat_axis] = whole(kind, attrs, dims[attrs.concat_axis], operands)
    return relax.TensorType(dims, dtype_of(ty), ty.vdevice)


def _check_dtype(kind: Kind, attrs: CollectiveAttrs, ty: relax.TensorType) -> None:
    if not kind.reduces or ty.dtype is None:
        return
    dtype = dtype_of(ty)
    if dtype not in REDUCED_TYPES:
        raise ValueError(f"{kind.name}: the runtime does not reduce {dtype}")
    if not reduction_of(attrs).takes(dtype):
        raise ValueError(f"{kind.name}: there is no {attrs.reduction} of {dtype}")


def dtype_of(ty: relax.TensorType) -> str:
    """Return the type of a tensor's elements, "" where it is not known."""
    return "" if ty.dtype is None else str(ty.dtype.dtype)


def extents(ty: relax.TensorType) -> list[Any] | None:
    """Return the extents of a tensor, None where they are not known."""
    if ty.shape is None:
        return None
    shape = ty.shape.ty.values if ty.shape.ty is not None else None
    return None if shape is None else list(shape)


def same_extents(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether it is sure that shapes are equal."""
    analyzer = tvm.sym.Analyzer()
    return len(one) == len(other) and all(map(analyzer.can_prove_equal, one, other))


def part(kind: Kind, attrs: CollectiveAttrs, extent: relax.Expr) -> relax.Expr:
    """Return the extent of a rank's part, of the largest one if they are uneven."""
    if not (attrs.uneven or divides(attrs.workers, extent)):
        raise ValueError(
            f"{kind.name}: axis {attrs.split_axis} has the extent {show_extent(extent)}, which may "
            f"not be a multiple of {attrs.workers} workers; say uneven=True if parts may be smaller"
        )
    return largest_part(extent, attrs.workers)


def whole(
    kind: Kind, attrs: CollectiveAttrs, extent: relax.Expr, operands: Sequence[Any]
) -> relax.Expr:
    """Return the extent of what the parts of all ranks are together."""
    analyzer = tvm.sym.Analyzer()
    if not attrs.uneven:
        return analyzer.simplify(extent * attrs.workers)
    total = operands[-1].values[0]
    needed = largest_part(total, attrs.workers)
    if analyzer.can_prove(tirx.NE(needed, extent)):
        raise ValueError(
            f"{kind.name}: of an axis with the extent {show_extent(total)} a part among "
            f"{attrs.workers} workers has {show_extent(needed)}, and x has {show_extent(extent)}"
        )
    return total


def _no_gradient(*_: Any) -> Any:
    raise ValueError(f"{NAME} has no gradient; differentiate the program before it is distributed")


tvm.ir.register_op_attr(NAME, "FInferType", infer)
tvm.ir.register_op_attr(NAME, "FPurity", True)
tvm.ir.register_op_attr(NAME, "FPrimalGradient", _no_gradient)
tvm.ir.Op.get(NAME).set_attrs_type_key("tvm_ipc.CollectiveAttrs")
