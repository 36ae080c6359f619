# SPDX-License-Identifier: Apache-2.0
"""The Relax operator `relax.comm.ragged_all_to_all`: rows whose numbers are known at run time.

    received, received_counts = R.comm.ragged_all_to_all(x, counts, capacity, workers=4)

Each rank knows at run time how many of its rows every other rank gets. Extents in a program must
not depend on such values, so the result has room for `capacity` rows. Only the rows that are sent
move.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import tvm
from tvm import relax, te, tirx
from tvm_ffi.dataclasses import py_class

from tvm_ipc import arguments
from tvm_ipc.comm.collective_attrs import KNOWN_BACKENDS, NAMED_TEAMS, teams_of
from tvm_ipc.comm.collective_relax_op import dtype_of, extents
from tvm_ipc.comm.extent_arithmetic import constant, format_extent, is_integer
from tvm_ipc.comm.legalize import team_argument
from tvm_ipc.packed_functions import MAX_WORKERS, CollectiveFlag
from tvm_ipc.packed_functions.collective_declarations import RAGGED_ALL_TO_ALL

NAME: Final = "relax.comm.ragged_all_to_all"
_CAPACITY: Final = "the most rows that a rank receives, a number or a symbolic int64"


@py_class("tvm_ipc.RaggedAttrs")
class RaggedAttrs(tvm.ir.Attrs):  # type: ignore[misc]
    """Attributes of the operators that send a number of rows known at run time.

    Attributes
    ----------
    team : "world", "group", or the teams into which the ranks are split.
    workers : the number of ranks in a team.
    backend : the backend that runs it; "auto" is the backend of the session.

    Examples
    --------
    >>> from tvm import relax
    >>> from tvm.script import relax as R
    >>> from tvm_ipc import comm
    >>> x = relax.Var("x", R.Tensor((4, 8), "float32"))
    >>> counts = relax.Var("counts", R.Tensor((2,), "int64"))
    >>> comm.ragged_all_to_all(x, counts, 8, workers=2).attrs.workers
    2
    """

    team: Any = "world"
    workers: int = 1
    backend: str = "auto"


def ragged_all_to_all(
    x: relax.Expr,
    counts: relax.Expr,
    capacity: Any,
    *,
    team: Any = "world",
    workers: int | None = None,
    backend: str = "auto",
) -> relax.Call:
    """Return the rows that all ranks send to this one, in the order of the team.

    The rows of `x` are in the order of their receivers, and `counts` has the number of rows for
    each. Rows of `x` beyond their sum are not sent. Rows of the result beyond those received are
    undefined. A rank that receives more than `capacity` rows raises an error.

    Parameters
    ----------
    x : the rows of this rank: a tensor whose first axis counts rows.
    counts : the number of rows for each rank, an int64 tensor with the first extent `workers`. With
        a second axis, its sum is the number of rows; the receiver gets all of these numbers, such
        as the number of rows for each of its experts.
    capacity : the most rows that a rank receives, which is the first extent of the result; a number
        or a symbolic integer.
    team : "world", "group", a team of ranks, or the teams into which the ranks are split, as
        `Mesh.teams` returns them.
    workers : the number of ranks in a team; required for "world" and "group".
    backend : the backend that runs it; "auto" is the backend of the session.

    Returns
    -------
    relax.Call
        The call, with the type of a tuple: `capacity` rows, and the counts of each sender for this
        rank, in the shape of `counts`.

    Raises
    ------
    ValueError
        The team or the number of workers is missing or wrong. Operands of wrong types are errors
        when the program is built.

    Examples
    --------
    >>> import tvm
    >>> main = tvm.script.from_source('''
    ... @R.function
    ... def main(x: R.Tensor((4, 8), "float32"), counts: R.Tensor((2,), "int64")):
    ...     return R.comm.ragged_all_to_all(x, counts, 8, workers=2)
    ... ''')
    >>> rows, counts = main.ret_ty.fields
    >>> rows, counts
    (R.Tensor((8, 8), dtype="float32"), R.Tensor((2,), dtype="int64"))
    """
    name = "ragged_all_to_all"
    attrs = ragged_attrs(name, team, workers, backend)
    operands = [expression(name, "x", x), expression(name, "counts", counts)]
    operands.append(capacity_operand(name, capacity))
    return relax.Call(tvm.ir.Op.get(NAME), operands, attrs)


def ragged_attrs(name: str, team: Any, workers: int | None, backend: str) -> RaggedAttrs:
    """Return the attributes for a team; raise an error that begins with `name`."""
    return RaggedAttrs(**team_options(name, team, workers, backend))


def team_options(name: str, team: Any, workers: int | None, backend: str) -> dict[str, Any]:
    """Return the attributes `team`, `workers` and `backend` of the arguments of an operator."""
    if workers is not None:
        wanted = f"the number of ranks in a team, 1 to {MAX_WORKERS}, or None"
        workers = arguments.integer(f"{name}: workers", workers, wanted, 1, MAX_WORKERS)
    if isinstance(team, str):
        arguments.one_of(f"{name}: team", team, NAMED_TEAMS)
        if workers is None:
            raise ValueError(
                f"{name}: workers is None for the team {team!r}; expected 1 to {MAX_WORKERS}, "
                "since the result depends on the number of ranks in a team"
            )
    else:
        teams = teams_of(name, team)
        if workers not in (None, len(teams[0])):
            raise ValueError(f"{name}: workers is {workers}, but a team has {len(teams[0])} ranks")
        team, workers = [list(ranks) for ranks in teams], len(teams[0])
    arguments.one_of(f"{name}: backend", backend, KNOWN_BACKENDS)
    return {"team": team, "workers": workers, "backend": backend}


def expression(name: str, operand: str, value: Any) -> relax.Expr:
    """Return an operand; raise TypeError unless it is an expression."""
    if not isinstance(value, relax.Expr):
        raise arguments.wrong_type(f"{name}: {operand}", "an expression of a tensor", value)
    return value


def capacity_operand(name: str, capacity: Any) -> relax.ShapeExpr:
    """Return the operand that specifies the capacity of a result."""
    if isinstance(capacity, relax.ShapeExpr):  # the form in which programs are printed
        if len(capacity.values) != 1:
            raise arguments.wrong_value(f"{name}: capacity", _CAPACITY, capacity)
        return capacity
    if not isinstance(capacity, relax.Expr):
        capacity = arguments.integer(f"{name}: capacity", capacity, _CAPACITY, 0, 2**63 - 1)
    elif not is_integer(capacity) or str(capacity.ty) != "int64":
        raise arguments.wrong_type(f"{name}: capacity", _CAPACITY, capacity)
    return relax.ShapeExpr([capacity])


def check_team(name: str, attrs: Any) -> None:
    """Raise ValueError unless the team and the number of workers of a module fit together."""
    team_options(name, attrs.team, int(attrs.workers), str(attrs.backend))


def shaped(
    name: str, operand: str, value: relax.Expr, ndims: Sequence[int], dtype: str = ""
) -> list[Any]:
    """Return the extents of an operand; raise ValueError if its type is wrong.

    Parameters
    ----------
    name : the name of the operator, for error messages.
    operand : the name of the operand.
    value : the operand.
    ndims : the numbers of axes that it may have; any if there are none.
    dtype : the element type that it must have; any if "".
    """
    ty = value.ty
    axes = " or ".join(f"{ndim} axes" for ndim in ndims) or "axes"
    wanted = f"a tensor with {axes} of known extents{f' and the type {dtype}' * bool(dtype)}"
    dims = extents(ty) if isinstance(ty, relax.TensorType) else None
    fits = dims is not None and (len(dims) in ndims if ndims else dims)
    if dims is None or not fits or not dtype_of(ty) or dtype not in ("", dtype_of(ty)):
        raise ValueError(f"{name}: {operand} is {ty}; expected {wanted}")
    return dims


def infer(call: relax.Call, _builder: relax.BlockBuilder | None = None) -> relax.TupleType:
    """Return the type of the result; raise ValueError if the operands do not fit."""
    name = "ragged_all_to_all"
    check_team(name, call.attrs)
    x, counts, capacity = call.args
    _, *row = shaped(name, "x", x, ())
    dims = shaped(name, "counts", counts, (1, 2), "int64")
    workers = int(call.attrs.workers)
    if constant(dims[0]) != workers:
        raise ValueError(
            f"{name}: counts has the first extent {format_extent(dims[0])}; expected {workers}, "
            "the number of workers"
        )
    rows = capacity_operand(name, capacity).values[0]
    return relax.TupleType(
        [
            relax.TensorType([rows, *row], dtype_of(x.ty), x.ty.vdevice),
            relax.TensorType(dims, "int64", counts.ty.vdevice),
        ]
    )


def legalize(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """Return the call of the packed function."""
    x, counts, _ = call.args
    ty = infer(call)
    attrs = call.attrs
    if int(attrs.workers) == 1:
        # The rows of the only rank stay where they are.
        rows = builder.call_te(_resized, x, ty.fields[0].shape.values[0])
        return relax.Tuple([builder.emit(rows), counts])
    args = [x, counts, team_argument(attrs.team), relax.prim_value(int(CollectiveFlag.NONE))]
    return relax.op.call_dps_packed(RAGGED_ALL_TO_ALL.name, args, out_ty=list(ty.fields))


def _resized(x: te.Tensor, rows: relax.Expr) -> te.Tensor:
    """Return the first rows of a tensor, with zeros beyond its end."""

    def element(*index: tirx.Var) -> relax.Expr:
        return tirx.if_then_else(index[0] < x.shape[0], x(*index), tirx.const(0, x.dtype))

    return te.compute([rows, *x.shape[1:]], element, name="rows")


def no_gradient(name: str) -> Any:
    """Return a gradient function that raises an error."""

    def raise_error(*_: Any) -> Any:
        raise ValueError(
            f"{name} has no gradient; differentiate the program before it is distributed"
        )

    return raise_error


def register(name: str, infer_type: Any, lower: Any, attrs_type: str) -> None:
    """Register a pure operator with its type inference and its lowering."""
    tvm.ir.register_op_attr(name, "FInferType", infer_type)
    tvm.ir.register_op_attr(name, "FPurity", True)
    tvm.ir.register_op_attr(name, "FLegalize", lower)
    tvm.ir.register_op_attr(name, "FPrimalGradient", no_gradient(name))
    if attrs_type:
        tvm.ir.Op.get(name).set_attrs_type_key(attrs_type)


register(NAME, infer, legalize, "tvm_ipc.RaggedAttrs")
