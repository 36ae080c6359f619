# SPDX-License-Identifier: Apache-2.0
"""Calls of packed functions in programs, and the checks of their arguments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tvm
from tvm import relax, tirx

from tvm_ipc import arguments
from tvm_ipc.comm.collective_attrs import NAMED_TEAMS, teams_of
from tvm_ipc.comm.extent_arithmetic import item_bytes
from tvm_ipc.comm.legalize import team_argument


def packed_call(name: str, args: Sequence[Any], ty: Any) -> relax.Call:
    """Return a call of a packed function; arguments may be Python integers."""
    operands = [relax.prim_value(arg) if isinstance(arg, int) else arg for arg in args]
    return relax.Call(relax.ExternFunc(name), operands, ty_args=[ty])


def tensor_of(name: str, tensor: Any) -> tuple[relax.TensorType, int]:
    """Return the type of a tensor, and the size of an element in bytes."""
    is_tensor = isinstance(tensor, relax.Expr) and isinstance(tensor.ty, relax.TensorType)
    if not is_tensor or tensor.ty.dtype is None:
        raise arguments.wrong_type(name, "a tensor of a known type", tensor)
    return tensor.ty, item_bytes(tensor.ty.dtype.dtype)


def slice_type(whole: relax.TensorType, extents: Sequence[Any]) -> relax.TensorType:
    """Return the type of a slice of a tensor."""
    return relax.TensorType(extents, str(whole.dtype.dtype), whole.vdevice)


def number(name: str, wanted: str, value: Any, least: float = 0) -> Any:
    """Return an integer argument, which may be symbolic."""
    symbolic = isinstance(value, relax.Expr) and tvm.ir.is_prim_expr(value)
    return value if symbolic else arguments.integer(name, value, wanted, least)


def as_list(name: str, wanted: str, value: Any) -> list[Any]:
    """Return the items of a list, a tuple, or a shape."""
    if isinstance(value, relax.Tuple):
        return list(value.fields)
    if isinstance(value, (str, bytes, dict, set, relax.Expr)) or not hasattr(value, "__iter__"):
        raise arguments.wrong_type(name, wanted, value)
    try:
        return list(value)
    except (TypeError, ValueError):
        raise arguments.wrong_type(name, wanted, value) from None


def extents_of(name: str, shape: Any) -> list[Any]:
    """Return the extents of a shape, which may be symbolic."""
    wanted = "extents from 0 on"
    extents = as_list(name, wanted, shape)
    try:
        return [number(name, wanted, extent) for extent in extents]
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name} is {wanted}, not {arguments.quote(shape)}") from None


def team_of(function: str, team: Any) -> relax.Expr:
    """Return the team argument of a packed function for the `team` argument of this package."""
    if isinstance(team, str):
        return team_argument(arguments.one_of(f"{function}: team", team, NAMED_TEAMS))
    return team_argument(teams_of(function, team))


def count(ty: relax.TensorType) -> Any:
    """Return the number of elements of a tensor, None if it is unknown."""
    return product(ty.shape.values) if isinstance(ty.shape, relax.ShapeExpr) else None


def product(extents: Iterable[Any]) -> Any:
    """Return the product of extents, which may be symbolic."""
    size: Any = tirx.IntImm("int64", 1)
    for extent in extents:
        size = size * extent
    return size
