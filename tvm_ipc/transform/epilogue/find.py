# SPDX-License-Identifier: Apache-2.0
"""An all-reduce with what follows it, as one function has it.

    total = R.ccl.allreduce(part, "sum")
    x = R.add(residual, total)                the residual may be the first or the second operand
    wide = R.astype(x, "float32")             where there is a cast
    y = R.nn.rms_norm(wide, weight, axes=[-1])
    z = R.astype(y, "bfloat16")               where there is a cast

Analysis only: `find_epilogue` returns facts, and the pass puts calls in their places.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import tvm
from tvm import relax

from tvm_ipc.comm.operator import NAME as COLLECTIVE
from tvm_ipc.comm.operator import dtype_of, same_extents
from tvm_ipc.contract.collectives import ALLREDUCE_LAYER_NORM, ALLREDUCE_RMS_NORM
from tvm_ipc.transform.ir.uses import Place, Uses, binds, operator_of

NORMS: Final = {
    "relax.nn.rms_norm": ALLREDUCE_RMS_NORM,
    "relax.nn.layer_norm": ALLREDUCE_LAYER_NORM,
}
_FLOATS: Final = ("float16", "bfloat16", "float32")
_TARGETS: Final = ("llvm", "c", "cuda")


@dataclass
class AllReduceEpilogue:
    """An all-reduce with what follows it that one function does."""

    allreduce: Place
    addition: Place
    norm: Place
    residual: Any
    weights: list[Any]  #: and the bias of a LayerNorm
    casts: list[Place]  #: before the norm, if only it uses that, and after it
    result: Any  #: the variable that gets what is normalised
    at: Place  #: after which the call stands


class CannotFuseError(Exception):
    """Why an all-reduce is left alone."""


def find_epilogue(allreduce: Place, uses: Uses, removed: set[Any]) -> AllReduceEpilogue:
    """Return what follows an all-reduce, or raise why it cannot be fused."""
    total = allreduce.binding.var
    if reduction_of(allreduce.binding.value) != "sum":
        raise CannotFuseError("it is not a sum")
    addition = _only_user(total, uses)
    if addition.block is not allreduce.block or not binds(addition, "relax.add"):
        raise CannotFuseError("no addition of a residual follows")
    if addition.binding.var in removed:
        raise CannotFuseError("it is the residual of another sum")
    first, second = addition.binding.value.args
    residual = second if _same(first, total) else first
    _check_tensor("the sum", total)
    _check_residual(residual, total)
    norm, cast = _norm(addition, uses)
    casts = []
    if cast is not None and len(uses.users[cast.binding.var]) == 1:
        casts.append(cast)
    weights = list(norm.binding.value.args[1:])
    for weight in weights:
        _check_weight(weight, total)
    result = norm.binding.var
    following = uses.users[result]
    if len(following) == 1 and following[0].block is norm.block:
        (last,) = following
        if binds(last, "relax.astype") and _dtype(last.binding.var) in _FLOATS:
            casts.append(last)
            result = last.binding.var
    _check_tensor("the norm", result)
    at = _where(addition, weights, [cast] if cast in casts else [], uses)
    if uses.written(allreduce.at, norm.at):
        raise CannotFuseError("a call before the norm may write into what is read")
    return AllReduceEpilogue(allreduce, addition, norm, residual, weights, casts, result, at)


def _only_user(total: Any, uses: Uses) -> Place:
    users = uses.users[total]
    if len(users) != 1 or users[0].binding is None:
        raise CannotFuseError("more than an addition uses its result, or nothing does")
    return users[0]


def _norm(addition: Place, uses: Uses) -> tuple[Place, Place | None]:
    """Return the norm of what was added, and the cast before it."""
    why = "no norm of what is added follows"
    for user in uses.users[addition.binding.var]:
        cast = None
        candidates = [user]
        if user.block is addition.block and binds(user, "relax.astype"):
            if _dtype(user.binding.var) != "float32":
                continue
            cast = user
            candidates = uses.users[user.binding.var]
        for norm in candidates:
            if norm.block is not addition.block or not binds(norm, *NORMS):
                continue
            value = norm.binding.value
            if not _same(value.args[0], (cast or addition).binding.var):
                continue  # it is the weight
            why = _norm_refusal(value, addition.binding.var)
            if not why:
                return norm, cast
    raise CannotFuseError(why)


def _norm_refusal(norm: relax.Call, x: Any) -> str:
    axes = [int(axis) % int(x.ty.ndim) for axis in norm.attrs.axes]
    if axes != [int(x.ty.ndim) - 1]:
        return f"the norm is over the axes {axes}, not over the last one alone"
    if operator_of(norm) == "relax.nn.layer_norm" and not (norm.attrs.center and norm.attrs.scale):
        return "the norm does without its bias or without its weight"
    return ""


def _check_tensor(what: str, tensor: Any) -> None:
    ty = tensor.ty
    if not isinstance(ty, relax.TensorType) or not isinstance(ty.shape, relax.ShapeExpr):
        raise CannotFuseError(f"the shape of {what} is not known")
    if int(ty.ndim) == 0:
        raise CannotFuseError(f"{what} has no axis")
    if _dtype(tensor) not in _FLOATS:
        raise CannotFuseError(
            f"{what} is {_dtype(tensor) or 'of no known type'}, which has no kernel"
        )
    if ty.vdevice is not None and str(ty.vdevice.target.kind.name) not in _TARGETS:
        raise CannotFuseError(f"{what} lives on {ty.vdevice.target.kind.name}")


def _check_residual(residual: Any, total: Any) -> None:
    if not isinstance(residual, relax.Var | tvm.ir.GenericConst):
        raise CannotFuseError("the residual is no tensor")
    _check_tensor("the residual", residual)
    if not same_extents(residual.ty.shape.values, total.ty.shape.values):
        shapes = f"{residual.ty.shape}, and the sum is {total.ty.shape}"
        raise CannotFuseError(f"the residual is {shapes}: it is broadcast")


def _check_weight(weight: Any, total: Any) -> None:
    _check_tensor("a weight of the norm", weight)
    if not same_extents(weight.ty.shape.values, list(total.ty.shape.values)[-1:]):
        raise CannotFuseError(f"a weight of the norm is {weight.ty.shape}, which is no row")


def _where(addition: Place, weights: list[Any], gone: list[Place], uses: Uses) -> Place:
    """Return the place after which all is there that the call reads."""
    at = addition
    for weight in weights:
        if _same(weight, addition.binding.var):
            raise CannotFuseError("what is added is a weight of its own norm")
        place = uses.places.get(weight) if isinstance(weight, relax.Var) else None
        if place is not None and place.at > at.at:
            at = place
    users = [user for user in uses.users[addition.binding.var] if user not in gone]
    if any(user.at <= at.at for user in users):
        raise CannotFuseError("what is added is used before a weight of the norm is there")
    return at


def is_allreduce(value: Any) -> bool:
    """Whether a value is an all-reduce that is still an operator."""
    name = operator_of(value)
    return name == "relax.ccl.allreduce" or (
        name == COLLECTIVE and str(value.attrs.kind) == "allreduce"
    )


def reduction_of(allreduce: relax.Call) -> str:
    """Return the name of the reduction."""
    attrs = allreduce.attrs
    return str(attrs.reduction if operator_of(allreduce) == COLLECTIVE else attrs.op_type)


def _same(expr: Any, variable: Any) -> bool:
    return isinstance(expr, relax.Var) and bool(expr.same_as(variable))


def _dtype(tensor: Any) -> str:
    return dtype_of(tensor.ty) if isinstance(tensor.ty, relax.TensorType) else ""
