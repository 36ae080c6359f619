# SPDX-License-Identifier: Apache-2.0
"""Relax operators for mixtures of experts whose experts are sharded over the ranks of a team.

    rows, row_experts, received, positions = R.comm.moe_dispatch(
        x, experts, capacity, num_experts=8, workers=2
    )
    y = R.comm.expert_matmul(rows, row_experts, weight)  # and so on
    z = R.comm.moe_combine(y, received, positions, weights, workers=2)

Rank r of a team has the experts r * n to (r + 1) * n - 1, where n is the number of experts divided
by that of ranks, rounded up. `moe` is the whole feed-forward of such a mixture. With one worker the
operators do the same without communication.
"""

from __future__ import annotations

from typing import Any, Final

import tvm
from tvm import relax, tirx, topi
from tvm_ffi.dataclasses import py_class

from tvm_ipc import arguments
from tvm_ipc.comm import expert_kernels as kernels
from tvm_ipc.comm.collective_relax_op import dtype_of
from tvm_ipc.comm.extent_arithmetic import constant, format_extent
from tvm_ipc.comm.ragged_all_to_all_op import NAME as RAGGED_ALL_TO_ALL
from tvm_ipc.comm.ragged_all_to_all_op import (
    RaggedAttrs,
    capacity_operand,
    check_team,
    expression,
    ragged_all_to_all,
    ragged_attrs,
    register,
    shaped,
    team_options,
)
from tvm_ipc.tvm_moved_names import Analyzer

DISPATCH: Final = "relax.comm.moe_dispatch"
COMBINE: Final = "relax.comm.moe_combine"
MATMUL: Final = "relax.comm.expert_matmul"
MOE: Final = "relax.comm.moe"
#: The operators that exchange rows if they have more than one worker.
RAGGED_OPERATORS: Final = (RAGGED_ALL_TO_ALL, DISPATCH, COMBINE, MOE)
#: The activations of `moe`, and their operators.
ACTIVATIONS: Final = {"silu": relax.op.nn.silu, "gelu": relax.op.nn.gelu, "relu": relax.op.nn.relu}


@py_class("tvm_ipc.DispatchAttrs")
class DispatchAttrs(tvm.ir.Attrs):  # type: ignore[misc]
    """Attributes of the operator `relax.comm.moe_dispatch`.

    Attributes
    ----------
    num_experts : the number of experts of all ranks of a team.
    team : "world", "group", or the teams into which the ranks are split.
    workers : the number of ranks in a team.
    backend : the backend that runs it; "auto" is the backend of the session.

    Examples
    --------
    >>> from tvm import relax
    >>> from tvm.script import relax as R
    >>> from tvm_ipc import comm
    >>> x = relax.Var("x", R.Tensor((5, 8), "float32"))
    >>> experts = relax.Var("experts", R.Tensor((5, 2), "int64"))
    >>> comm.moe_dispatch(x, experts, num_experts=6, workers=2).attrs.num_experts
    6
    """

    num_experts: int
    team: Any = "world"
    workers: int = 1
    backend: str = "auto"


@py_class("tvm_ipc.MoeAttrs")
class MoeAttrs(tvm.ir.Attrs):  # type: ignore[misc]
    """Attributes of the operator `relax.comm.moe`.

    Attributes
    ----------
    activation : one of `ACTIVATIONS`.
    team : "world", "group", or the teams into which the ranks are split.
    workers : the number of ranks in a team.
    backend : the backend that runs it; "auto" is the backend of the session.

    Examples
    --------
    >>> from tvm import relax
    >>> from tvm.script import relax as R
    >>> from tvm_ipc import comm
    >>> x = relax.Var("x", R.Tensor((5, 8), "float32"))
    >>> experts = relax.Var("experts", R.Tensor((5, 2), "int64"))
    >>> weights = relax.Var("weights", R.Tensor((5, 2), "float32"))
    >>> gate_up = relax.Var("gate_up", R.Tensor((3, 12, 8), "float32"))
    >>> down = relax.Var("down", R.Tensor((3, 8, 6), "float32"))
    >>> comm.moe(x, experts, weights, gate_up, down, workers=2).attrs.activation
    'silu'
    """

    activation: str = "silu"
    team: Any = "world"
    workers: int = 1
    backend: str = "auto"


def moe_dispatch(
    x: relax.Expr,
    experts: relax.Expr,
    capacity: Any = None,
    *,
    num_experts: int,
    team: Any = "world",
    workers: int | None = None,
    backend: str = "auto",
) -> relax.Call:
    """Send each token to the ranks of its experts.

    Parameters
    ----------
    x : the tokens of this rank, of the shape (tokens, features).
    experts : the experts of each token, of the shape (tokens, choices) and the type int64. Numbers
        below 0, or from `num_experts` on, stand for no expert.
    capacity : the most rows that a rank receives. None means the number of rows if every rank sends
        all of its tokens to experts of one rank.
    num_experts : the number of experts of all ranks.
    team : "world", "group", a team of ranks, or the teams into which the ranks are split.
    workers : the number of ranks in a team; required for "world" and "group".
    backend : the backend that runs it; "auto" is the backend of the session.

    Returns
    -------
    relax.Call
        The call, with the type of a tuple: the received rows, of the shape (capacity, features);
        the expert of each row among those of this rank, -1 for rows that were not received; the
        number of rows for each expert of this rank, of each sender; and the position of each pair
        of token and choice among the rows that this rank sent, for `moe_combine`.

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
    ... def main(x: R.Tensor((5, 8), "float32"), experts: R.Tensor((5, 2), "int64")):
    ...     return R.comm.moe_dispatch(x, experts, num_experts=6, workers=2)
    ... ''')
    >>> [list(map(int, field.shape.values)) for field in main.ret_ty.fields]
    [[20, 8], [20], [2, 3], [5, 2]]
    """
    name = "moe_dispatch"
    wanted = "the number of experts of all ranks, 1 or more"
    num_experts = arguments.integer(f"{name}: num_experts", num_experts, wanted, 1, 2**31 - 1)
    attrs = DispatchAttrs(num_experts=num_experts, **team_options(name, team, workers, backend))
    x, experts = expression(name, "x", x), expression(name, "experts", experts)
    if capacity is None:
        tokens, choices = shaped(name, "experts", experts, (2,), "int64")
        capacity = Analyzer().simplify(tokens * choices * int(attrs.workers))
    operands = [x, experts, capacity_operand(name, capacity)]
    return relax.Call(tvm.ir.Op.get(DISPATCH), operands, attrs)


def moe_combine(
    rows: relax.Expr,
    received: relax.Expr,
    positions: relax.Expr,
    weights: relax.Expr,
    *,
    team: Any = "world",
    workers: int | None = None,
    backend: str = "auto",
) -> relax.Call:
    """Send rows back to the ranks of their tokens, and add up the rows of each token.

    Parameters
    ----------
    rows : a row for each row that `moe_dispatch` returned, of the shape (capacity, features).
    received : the third result of `moe_dispatch`.
    positions : the fourth result of `moe_dispatch`.
    weights : the weight of each choice of a token, of the shape (tokens, choices).
    team : "world", "group", a team of ranks, or the teams into which the ranks are split.
    workers : the number of ranks in a team; required for "world" and "group".
    backend : the backend that runs it; "auto" is the backend of the session.

    Returns
    -------
    relax.Call
        The call, with the type of the weighted sums: (tokens, features) of the type of `rows`. They
        are accumulated in float32 or wider.

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
    ... def main(
    ...     rows: R.Tensor((20, 8), "float32"),
    ...     received: R.Tensor((2, 3), "int64"),
    ...     positions: R.Tensor((5, 2), "int64"),
    ...     weights: R.Tensor((5, 2), "float32"),
    ... ):
    ...     return R.comm.moe_combine(rows, received, positions, weights, workers=2)
    ... ''')
    >>> main.ret_ty
    R.Tensor((5, 8), dtype="float32")
    """
    name = "moe_combine"
    operands = {"rows": rows, "received": received, "positions": positions, "weights": weights}
    args = [expression(name, operand, value) for operand, value in operands.items()]
    return relax.Call(tvm.ir.Op.get(COMBINE), args, ragged_attrs(name, team, workers, backend))


def expert_matmul(rows: relax.Expr, row_experts: relax.Expr, weight: relax.Expr) -> relax.Call:
    """Return each row times the transposed matrix of its expert.

    Parameters
    ----------
    rows : the rows, of the shape (rows, inputs).
    row_experts : the expert of each row, an int64; -1 gives a row of zeros.
    weight : the matrix of each expert, of the shape (experts, outputs, inputs).

    Returns
    -------
    relax.Call
        The call, with the type of (rows, outputs). Sums are accumulated in float32 or wider.

    Raises
    ------
    ValueError
        Operands of wrong types are errors when the program is built.

    Examples
    --------
    >>> import tvm
    >>> main = tvm.script.from_source('''
    ... @R.function
    ... def main(
    ...     rows: R.Tensor((20, 8), "float32"),
    ...     row_experts: R.Tensor((20,), "int64"),
    ...     weight: R.Tensor((3, 16, 8), "float32"),
    ... ):
    ...     return R.comm.expert_matmul(rows, row_experts, weight)
    ... ''')
    >>> main.ret_ty
    R.Tensor((20, 16), dtype="float32")
    """
    operands = {"rows": rows, "row_experts": row_experts, "weight": weight}
    args = [expression("expert_matmul", operand, value) for operand, value in operands.items()]
    return relax.Call(tvm.ir.Op.get(MATMUL), args)


def moe(
    x: relax.Expr,
    experts: relax.Expr,
    weights: relax.Expr,
    gate_up: relax.Expr,
    down: relax.Expr,
    *,
    activation: str = "silu",
    team: Any = "world",
    workers: int | None = None,
    backend: str = "auto",
) -> relax.Call:
    """Return the feed-forward of a mixture of experts.

    An expert computes `down @ (activation(gate @ x) * (up @ x))`. Tokens are dispatched to the
    ranks of their experts and the results combined, which moves only the rows of the tokens. In a
    program for all ranks (`comm.place`), leave out `workers` and `team`: if the experts are sharded
    along their first axis, `LowerPlacements` shards the tokens and sets them.

    Parameters
    ----------
    x : the tokens of this rank, of the shape (tokens, features).
    experts : the experts of each token, of the shape (tokens, choices) and the type int64. Other
        numbers than those of experts stand for no expert.
    weights : the weight of each choice of a token, of the shape (tokens, choices).
    gate_up : the matrices of the experts of this rank, of the shape (experts, 2 * inner, features):
        those of the gate, then those that its result is multiplied with.
    down : the matrices of the experts of this rank, of the shape (experts, features, inner).
    activation : "silu", "gelu" or "relu".
    team : "world", "group", a team of ranks, or the teams into which the ranks are split.
    workers : the number of ranks in a team, among which the experts are sharded. None means the
        size of `team`, and that the caller has all experts if `team` is "world" or "group".
    backend : the backend that runs it; "auto" is the backend of the session.

    Returns
    -------
    relax.Call
        The call, with the type of `x`.

    Raises
    ------
    ValueError
        The team, the number of workers or the activation is wrong. Operands of wrong types are
        errors when the program is built.

    Examples
    --------
    >>> import tvm
    >>> main = tvm.script.from_source('''
    ... @R.function
    ... def main(
    ...     x: R.Tensor((5, 8), "float32"),
    ...     experts: R.Tensor((5, 2), "int64"),
    ...     weights: R.Tensor((5, 2), "float32"),
    ...     gate_up: R.Tensor((3, 12, 8), "float32"),
    ...     down: R.Tensor((3, 8, 6), "float32"),
    ... ):
    ...     return R.comm.moe(x, experts, weights, gate_up, down, workers=2)
    ... ''')
    >>> main.ret_ty
    R.Tensor((5, 8), dtype="float32")
    """
    name = "moe"
    arguments.one_of(f"{name}: activation", activation, ACTIVATIONS)
    if isinstance(team, str) and workers is None:
        workers = 1
    attrs = MoeAttrs(activation=activation, **team_options(name, team, workers, backend))
    operands = {"x": x, "experts": experts, "weights": weights, "gate_up": gate_up, "down": down}
    args = [expression(name, operand, value) for operand, value in operands.items()]
    return relax.Call(tvm.ir.Op.get(MOE), args, attrs)


def experts_per_rank(num_experts: int, workers: int) -> int:
    """Return the number of experts that a rank has at most."""
    return -(-num_experts // workers)


# ---- type inference ----


def _require(name: str, what: str, found: Any, expected: Any) -> None:
    """Raise ValueError if two extents provably differ."""
    if Analyzer().can_prove(tirx.NE(_int64(found), _int64(expected))):
        raise ValueError(
            f"{name}: {what} has the extent {format_extent(found)}; expected "
            f"{format_extent(expected)}"
        )


def _int64(extent: Any) -> Any:
    return tirx.IntImm("int64", extent) if isinstance(extent, int) else extent


def _known(name: str, what: str, extent: Any) -> int:
    number = constant(extent)
    if number is None:
        raise ValueError(f"{name}: {what} has the extent {extent}; expected a known number")
    return number


def _infer_dispatch(call: relax.Call, _builder: Any = None) -> relax.TupleType:
    name = "moe_dispatch"
    check_team(name, call.attrs)
    x, experts, capacity = call.args
    tokens, features = shaped(name, "x", x, (2,))
    dims = shaped(name, "experts", experts, (2,), "int64")
    _require(name, "axis 0 of experts", dims[0], tokens)
    _known(name, "axis 1 of experts", dims[1])
    workers = int(call.attrs.workers)
    groups = experts_per_rank(int(call.attrs.num_experts), workers)
    (rows,) = capacity_operand(name, capacity).values
    device = x.ty.vdevice
    return relax.TupleType(
        [
            relax.TensorType([rows, features], dtype_of(x.ty), device),
            relax.TensorType([rows], "int64", device),
            relax.TensorType([workers, groups], "int64", device),
            relax.TensorType(dims, "int64", device),
        ]
    )


def _infer_combine(call: relax.Call, _builder: Any = None) -> relax.TensorType:
    name = "moe_combine"
    check_team(name, call.attrs)
    rows, received, positions, weights = call.args
    _, features = shaped(name, "rows", rows, (2,))
    senders, _ = shaped(name, "received", received, (2,), "int64")
    _require(name, "axis 0 of received", senders, int(call.attrs.workers))
    tokens, choices = shaped(name, "positions", positions, (2,), "int64")
    for axis, (found, expected) in enumerate(
        zip(shaped(name, "weights", weights, (2,)), (tokens, choices), strict=True)
    ):
        _require(name, f"axis {axis} of weights", found, expected)
    return relax.TensorType([tokens, features], dtype_of(rows.ty), rows.ty.vdevice)


def _infer_matmul(call: relax.Call, _builder: Any = None) -> relax.TensorType:
    name = "expert_matmul"
    rows, row_experts, weight = call.args
    count, inputs = shaped(name, "rows", rows, (2,))
    (own,) = shaped(name, "row_experts", row_experts, (1,), "int64")
    _, outputs, inner = shaped(name, "weight", weight, (3,), dtype_of(rows.ty))
    _require(name, "row_experts", own, count)
    _require(name, "axis 2 of weight", inner, inputs)
    return relax.TensorType([count, outputs], dtype_of(rows.ty), rows.ty.vdevice)


def _infer_moe(call: relax.Call, _builder: Any = None) -> relax.TensorType:
    name = "moe"
    attrs = call.attrs
    check_team(name, attrs)
    arguments.one_of(f"{name}: activation", str(attrs.activation), ACTIVATIONS)
    x, experts, weights, gate_up, down = call.args
    tokens, features = shaped(name, "x", x, (2,))
    chosen = shaped(name, "experts", experts, (2,), "int64")
    _known(name, "axis 1 of experts", chosen[1])
    weighted = shaped(name, "weights", weights, (2,))
    dtype = dtype_of(x.ty)
    groups, twice, inputs = shaped(name, "gate_up", gate_up, (3,), dtype)
    own, outputs, inner = shaped(name, "down", down, (3,), dtype)
    for what, found, expected in (
        ("axis 0 of experts", chosen[0], tokens),
        ("axis 0 of weights", weighted[0], tokens),
        ("axis 1 of weights", weighted[1], chosen[1]),
        ("axis 2 of gate_up", inputs, features),
        ("axis 1 of down", outputs, features),
        ("axis 0 of down", own, groups),
        ("axis 1 of gate_up", twice, inner * 2),
    ):
        _require(name, what, found, expected)
    _known(name, "axis 0 of gate_up", groups)
    return x.ty


# ---- lowering ----


def _legalize_dispatch(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    _infer_dispatch(call)
    x, experts, capacity = call.args
    attrs = call.attrs
    workers, num_experts = int(attrs.workers), int(attrs.num_experts)
    groups = experts_per_rank(num_experts, workers)
    last = workers * groups
    choices = int(experts.ty.shape.values[1])

    def emit_te(function: Any, *args: Any) -> relax.Var:
        return builder.emit(builder.call_te(function, *args))

    keys = emit_te(kernels.sort_keys, experts, num_experts, last)
    order = builder.emit(_argsort(builder, keys))
    inverse = builder.emit(_argsort(builder, order))
    counts = emit_te(kernels.count_keys, keys, workers, groups)
    rows = emit_te(kernels.sorted_rows, x, order, choices)
    sent = builder.emit(_exchange(rows, counts, capacity, attrs))
    received_rows, received = (builder.emit(relax.TupleGetItem(sent, k)) for k in range(2))
    ends = emit_te(kernels.ends_of, received)
    (count,) = capacity.values
    row_experts = emit_te(kernels.experts_of_rows, ends, groups, count)
    positions = emit_te(kernels.positions_of, experts, inverse, num_experts)
    return relax.Tuple([received_rows, row_experts, received, positions])


def _argsort(builder: relax.BlockBuilder, x: relax.Var) -> relax.Call:
    """Return the order that sorts a vector. TVM dispatches its own operator before legalization."""
    target = tvm.target.Target.current(allow_none=True)
    on_gpu = target is not None and "gpu" in target.keys
    argsort = topi.gpu.argsort if on_gpu else topi.argsort
    return builder.call_te(argsort, x, axis=0, is_ascend=True, dtype="int64")


def _exchange(rows: relax.Expr, counts: relax.Expr, capacity: Any, attrs: Any) -> relax.Call:
    return relax.Call(
        tvm.ir.Op.get(RAGGED_ALL_TO_ALL),
        [rows, counts, capacity],
        RaggedAttrs(team=attrs.team, workers=attrs.workers, backend=attrs.backend),
    )


def _legalize_combine(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    _infer_combine(call)
    rows, received, positions, weights = call.args
    counts = builder.emit(builder.call_te(kernels.rows_by_sender, received))
    tokens, choices = positions.ty.shape.values
    capacity = relax.ShapeExpr([Analyzer().simplify(tokens * choices)])
    sent = builder.emit(_exchange(rows, counts, capacity, call.attrs))
    returned = builder.emit(relax.TupleGetItem(sent, 0))
    return builder.call_te(kernels.weighted_sum, returned, positions, weights)


def _legalize_matmul(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    _infer_matmul(call)
    return builder.call_te(kernels.matmul_by_expert, *call.args)


def _legalize_moe(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    _infer_moe(call)
    x, experts, weights, gate_up, down = call.args
    attrs = call.attrs
    workers = int(attrs.workers)
    team = {"team": attrs.team, "workers": workers, "backend": str(attrs.backend)}
    count = int(gate_up.ty.shape.values[0]) * workers
    sent = builder.emit(moe_dispatch(x, experts, num_experts=count, **team))
    rows, row_experts, received, positions = (
        builder.emit(relax.TupleGetItem(sent, k)) for k in range(4)
    )
    both = builder.emit(expert_matmul(rows, row_experts, gate_up))
    halves = builder.emit(relax.op.split(both, 2, axis=1))
    gate, up = (builder.emit(relax.TupleGetItem(halves, k)) for k in range(2))
    active = builder.emit(ACTIVATIONS[str(attrs.activation)](gate))
    inner = builder.emit(relax.op.multiply(active, up))
    results = builder.emit(expert_matmul(inner, row_experts, down))
    return moe_combine(results, received, positions, weights, **team)


register(DISPATCH, _infer_dispatch, _legalize_dispatch, "tvm_ipc.DispatchAttrs")
register(COMBINE, _infer_combine, _legalize_combine, "tvm_ipc.RaggedAttrs")
register(MATMUL, _infer_matmul, _legalize_matmul, "")
register(MOE, _infer_moe, _legalize_moe, "tvm_ipc.MoeAttrs")

__all__ = ["expert_matmul", "moe", "moe_combine", "moe_dispatch", "ragged_all_to_all"]
