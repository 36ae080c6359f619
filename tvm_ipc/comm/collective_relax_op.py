# SPDX-License-Identifier: Apache-2.0
"""The Relax operator of all collectives, `relax.comm.collective`, and its type inference.

Its first argument is the tensor. A rooted kind also takes the root, an index in the team that may
be symbolic. A `send_recv` takes its source and target if one of them is symbolic. A concatenation
of uneven shards takes the extent of the result, as a shape. The rest are attributes. The inferred
type holds on every rank: on ranks other than the root, `reduce` and `gather` return a tensor of the
same type with undefined values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Final

import tvm
from tvm import relax, tirx

from tvm_ipc import arguments
from tvm_ipc.comm.collective_attrs import CollectiveAttrs, check_attributes, reduction_of
from tvm_ipc.comm.extent_arithmetic import (
    constant,
    divides,
    format_extent,
    is_integer,
    largest_shard,
)
from tvm_ipc.packed_functions import KINDS, MAX_WORKERS, Kind
from tvm_ipc.tvm_moved_names import Analyzer

NAME: Final = "relax.comm.collective"


def collective(x: relax.Expr, *operands: Any, **attributes: Any) -> relax.Call:
    """Return a collective with attributes as in `CollectiveAttrs`.

    This is the form in which programs are printed; write programs with `allreduce` and so on.

    Parameters
    ----------
    x : the tensor of this rank.
    *operands : the root of a rooted kind, or the source and target of a `send_recv` in which one of
        them is symbolic; then the extent of the result if shards are uneven.
    **attributes : the attributes; `kind` is one of `KINDS`.

    Returns
    -------
    relax.Call
        The call of the operator.

    Raises
    ------
    ValueError
        An attribute does not exist or does not fit the kind, or an operand is missing.

    Examples
    --------
    >>> from tvm import relax
    >>> from tvm.script import relax as R
    >>> from tvm_ipc import comm
    >>> x = relax.Var("x", R.Tensor((4, 8), "float32"))
    >>> call = comm.collective(x, kind="allreduce", reduction="sum")
    >>> call
    R.comm.collective(x, kind="allreduce", reduction="sum")
    """
    names = [field.name for field in fields(CollectiveAttrs)]
    for name in attributes:
        arguments.one_of("collective: an attribute", name, names)
    if "kind" not in attributes:
        raise ValueError(f"collective: kind is missing; pass one of {', '.join(KINDS)}")
    return make(x, operands, CollectiveAttrs(**attributes))


def make(x: relax.Expr, operands: Sequence[Any], attrs: CollectiveAttrs) -> relax.Call:
    """Return a collective of a tensor; raise an error if the arguments are inconsistent."""
    if not isinstance(x, relax.Expr):
        raise arguments.wrong_type(f"{attrs.kind}: x", "an expression of a tensor", x)
    kind = check_attributes(attrs)
    _check_operands(kind, attrs, operands)
    return relax.Call(_OP, [x, *map(_as_argument, operands)], attrs.to_call_attrs())


def is_collective(value: Any) -> bool:
    """Return whether an expression is a call of `relax.comm.collective`."""
    return type(value) is relax.Call and bool(value.op.same_as(_OP))


def _as_argument(operand: Any) -> relax.Expr:
    return operand if isinstance(operand, relax.Expr) else relax.prim_value(constant(operand))


def _check_operands(kind: Kind, attrs: CollectiveAttrs, operands: Sequence[Any]) -> None:
    has_root = kind.rooted and attrs.root_rank is None
    wanted = ["the index of its root"] * has_root
    if kind.has_symbolic_pair and attrs.pairs is None:
        wanted += ["the index of the source", "the index of the target"]
    wanted += ["the extent of the result"] * (attrs.uneven and kind.concatenates)
    if len(operands) != len(wanted):
        raise ValueError(
            f"{kind.name}: found {len(operands)} operands besides the tensor; expected "
            f"{' and '.join(wanted) or 'none'}"
        )
    if kind.paired:
        for name, peer in zip(kind.pairs, operands, strict=False):
            _check_peer(kind, attrs, name, peer)
    if has_root:
        root = constant(operands[0])
        if root is None and not is_integer(operands[0]):
            index = "an index in a team, an integer that may be symbolic"
            raise arguments.wrong_type(f"{kind.name}: root", index, operands[0])
        if root is not None and not 0 <= root < (attrs.workers or MAX_WORKERS):
            team = f"a team of {attrs.workers}" if attrs.workers else "a team"
            raise ValueError(f"{kind.name}: root is an index in {team}, from 0 on, not {root}")
    if attrs.uneven and kind.concatenates:
        shape = operands[-1]
        if not isinstance(shape, relax.ShapeExpr) or len(shape.values) != 1:
            raise arguments.wrong_type(
                f"{kind.name}: the extent of the result", "a shape with one extent", shape
            )


def _check_peer(kind: Kind, attrs: CollectiveAttrs, name: str, peer: Any) -> None:
    """Raise an error for an operand of a symbolic pair that is not an index in the team."""
    index = constant(peer)
    if index is None and not is_integer(peer):
        wanted = "an index in a team, an integer that may be symbolic"
        raise arguments.wrong_type(f"{kind.name}: {name}", wanted, peer)
    if index is not None and not 0 <= index < attrs.workers:
        raise ValueError(
            f"{kind.name}: {name} is {index}; expected an index in a team of {attrs.workers}"
        )


def infer(call: relax.Call, _builder: relax.BlockBuilder | None = None) -> relax.TensorType:
    """Return the type of a collective's result; raise ValueError if its arguments do not fit."""
    attrs = CollectiveAttrs.of(call)
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
    if not (kind.splits or kind.concatenates):
        return ty
    if dims is None:  # the extents of the result, which differ from those of x, are unknown too
        return relax.TensorType(dtype=dtype_of(ty), vdevice=ty.vdevice, ndim=rank)
    if attrs.split_axis is not None:
        dims[attrs.split_axis] = shard_extent(kind, attrs, dims[attrs.split_axis])
    if attrs.concat_axis is not None:
        dims[attrs.concat_axis] = whole_extent(kind, attrs, dims[attrs.concat_axis], operands)
    return relax.TensorType(dims, dtype_of(ty), ty.vdevice)


def _check_dtype(kind: Kind, attrs: CollectiveAttrs, ty: relax.TensorType) -> None:
    if not kind.reduces or ty.dtype is None:
        return
    dtype = dtype_of(ty)
    reduction = reduction_of(attrs)
    if not reduction.takes(dtype):
        raise ValueError(f"{kind.name}: {reduction.refusal(dtype)}")
    if attrs.scale is not None and "float" not in dtype and not attrs.scale.is_integer():
        raise ValueError(
            f"{kind.name}: scale is {attrs.scale}, but x has the type {dtype}; expected an integer"
        )


def dtype_of(ty: relax.TensorType) -> str:
    """Return the element type of a tensor, "" if it is unknown."""
    return "" if ty.dtype is None else str(ty.dtype.dtype)


def extents(ty: relax.TensorType) -> list[Any] | None:
    """Return the extents of a tensor, None if they are unknown."""
    if ty.shape is None:
        return None
    shape = ty.shape.ty.values if ty.shape.ty is not None else None
    return None if shape is None else shape[:]  # a list, in less than half the time of list(shape)


def same_extents(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Return whether two shapes are provably equal."""
    analyzer = Analyzer()
    return len(a) == len(b) and all(map(analyzer.can_prove_equal, a, b))


def shard_extent(kind: Kind, attrs: CollectiveAttrs, extent: relax.Expr) -> relax.Expr:
    """Return the extent of a shard, of the largest one if shards are uneven."""
    if not (attrs.uneven or divides(attrs.workers, extent)):
        raise ValueError(
            f"{kind.name}: axis {attrs.split_axis} has the extent {format_extent(extent)}, which "
            f"may not be a multiple of {attrs.workers} workers; pass uneven=True to allow shards "
            "of unequal size"
        )
    return largest_shard(extent, attrs.workers)


def whole_extent(
    kind: Kind, attrs: CollectiveAttrs, extent: relax.Expr, operands: Sequence[Any]
) -> relax.Expr:
    """Return the extent of the concatenated shards of all ranks."""
    analyzer = Analyzer()
    if not attrs.uneven:
        return analyzer.simplify(extent * attrs.workers)
    total = operands[-1].values[0]
    needed = largest_shard(total, attrs.workers)
    if analyzer.can_prove(tirx.NE(needed, extent)):
        raise ValueError(
            f"{kind.name}: x has the extent {format_extent(extent)} along axis "
            f"{attrs.concat_axis}; expected {format_extent(needed)}, the shard of an axis with the "
            f"extent {format_extent(total)} on {attrs.workers} workers"
        )
    return total


def _no_gradient(*_: Any) -> Any:
    raise ValueError(f"{NAME} has no gradient; differentiate the program before it is distributed")


tvm.ir.register_op_attr(NAME, "FInferType", infer)
tvm.ir.register_op_attr(NAME, "FPurity", True)
tvm.ir.register_op_attr(NAME, "FPrimalGradient", _no_gradient)
_OP: Final = tvm.ir.Op.get(NAME)
_OP.set_attrs_type_key("ir.DictAttrs")
