# SPDX-License-Identifier: Apache-2.0
"""Calls of packed functions in programs, and the checks of what they are given."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tvm
from tvm import relax, tirx

from tvm_ipc import arguments
from tvm_ipc.comm.attributes import NAMED_TEAMS, teams_of
from tvm_ipc.comm.extents import item_bytes
from tvm_ipc.comm.legalize import team_argument


def packed(name: str, given: Sequence[Any], ty: Any) -> relax.Call:
    """Return a call; numbers among the arguments may be Python's."""
    operands = [relax.prim_value(one) if isinstance(one, int) else one for one in given]
    return relax.Call(relax.ExternFunc(name), operands, ty_args=[ty])


def tensor_of(name: str, tensor: Any) -> tuple[relax.TensorType, int]:
    """Return the type of a tensor, and how many bytes an element has."""
    known = isinstance(tensor, relax.Expr) and isinstance(tensor.ty, relax.TensorType)
    if not known or tensor.ty.dtype is None:
        raise arguments.wrong_type(name, "a tensor of a known type", tensor)
    return tensor.ty, item_bytes(tensor.ty.dtype.dtype)


def part_type(whole: relax.TensorType, extents: Sequence[Any]) -> relax.TensorType:
    """Return the type of a part of a tensor."""
    return relax.TensorType(extents, str(whole.dtype.dtype), whole.vdevice)


def number(name: str, wanted: str, given: Any, least: float = 0) -> Any:
    """Return a number, which may be symbolic."""
    symbolic = isinstance(given, relax.Expr) and tvm.ir.is_prim_expr(given)
    return given if symbolic else arguments.integer(name, given, wanted, least)


def listed(name: str, wanted: str, given: Any) -> list[Any]:
    """Return what is in a list, a tuple, or a shape."""
    if isinstance(given, relax.Tuple):
        return list(given.fields)
    if isinstance(given, (str, bytes, dict, set, relax.Expr)) or not hasattr(given, "__iter__"):
        raise arguments.wrong_type(name, wanted, given)
    try:
        return list(given)
    except (TypeError, ValueError):
        raise arguments.wrong_type(name, wanted, given) from None


def extents_of(name: str, shape: Any) -> list[Any]:
    """Return the extents of a shape, which may be symbolic."""
    wanted = "extents from 0 on"
    extents = listed(name, wanted, shape)
    try:
        return [number(name, wanted, extent) for extent in extents]
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name} is {wanted}, not {arguments.show(shape)}") from None


def team_of(function: str, team: Any) -> relax.Expr:
    """Return a team, as the functions of this package take it, as packed functions do."""
    if isinstance(team, str):
        return team_argument(arguments.one_of(f"{function}: team", team, NAMED_TEAMS))
    return team_argument(teams_of(function, team))


def count(ty: relax.TensorType) -> Any:
    """Return how many elements a tensor has, None where that is not known."""
    return product(ty.shape.values) if isinstance(ty.shape, relax.ShapeExpr) else None


def product(extents: Iterable[Any]) -> Any:
    """Return how many elements there are."""
    size: Any = tirx.IntImm("int64", 1)
    for extent in extents:
        size = size * extent
    return size
