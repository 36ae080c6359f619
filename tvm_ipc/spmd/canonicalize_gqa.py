# SPDX-License-Identifier: Apache-2.0
"""Canonicalization of grouped-query attention: three operators that repeat heads become one.

    (b, 2, n, w) -> expand_dims -> (b, 2, 1, n, w) -> broadcast_to -> (b, 2, 3, n, w)
                 -> reshape -> (b, 6, n, w)                     is R.repeat(x, 3, axis=1)

Ranks with copies of one head of keys split its repetitions among them. The rule of `R.repeat`
supports that, and those of the three operators do not.
"""

from __future__ import annotations

from tvm import relax

from tvm_ipc.analysis.walk_and_rewrite_bindings import rewrite, typed, walk, with_value
from tvm_ipc.comm.collective_relax_op import extents, same_extents
from tvm_ipc.comm.extent_arithmetic import constant
from tvm_ipc.spmd.rules.operation import short_name

_INSERTS = ("expand_dims", "reshape")


def canonicalize_gqa(function: relax.Function) -> relax.Function:
    """Return the function with R.repeat in place of three operators that repeat an axis."""
    values: dict[relax.Var, relax.Expr] = {
        binding.var: value for binding, value in walk(function) if binding is not None
    }

    def change(binding: relax.Binding, value: relax.Expr) -> list[relax.Binding] | None:
        match = _match_repeat(values, value)
        if match is None:
            return None
        x, times, axis = match
        return [with_value(binding, typed(relax.op.repeat(x, times, axis), value.ty))]

    changed = rewrite(function, change)
    return function if changed is function else relax.analysis.remove_all_unused(changed)


def _match_repeat(
    values: dict[relax.Var, relax.Expr], value: relax.Expr
) -> tuple[relax.Expr, int, int] | None:
    """Return the tensor that a reshape repeats, the count and the axis, or None."""
    wide = _operand(values, value, ("reshape",))
    narrow = _operand(values, wide, ("broadcast_to",))
    x = _operand(values, narrow, _INSERTS)
    if wide is None or narrow is None or x is None:
        return None
    result_dims, wide_dims, narrow_dims, dims = map(_dims, (value, wide, narrow, x))
    for axis in range(len(dims)):
        if (
            len(wide_dims) != len(dims) + 1
            or len(narrow_dims) != len(wide_dims)
            or len(result_dims) != len(dims)
        ):
            return None
        times = constant(wide_dims[axis + 1])
        if times is None or times < 2 or constant(dims[axis]) is None:
            continue
        before, after = dims[: axis + 1], dims[axis + 1 :]
        if (
            same_extents(narrow_dims, [*before, 1, *after])
            and same_extents(wide_dims, [*before, times, *after])
            and same_extents(result_dims, [*dims[:axis], dims[axis] * times, *after])
        ):
            return x, times, axis
    return None


def _operand(
    values: dict[relax.Var, relax.Expr], x: relax.Expr | None, names: tuple[str, ...]
) -> relax.Expr | None:
    """Return the operand of a value that is a call of one of some operators, or None."""
    while isinstance(x, relax.Var) and x in values:
        x = values[x]
    if not isinstance(x, relax.Call) or short_name(x) not in names:
        return None
    return x.args[0]


def _dims(x: relax.Expr) -> list[relax.Expr]:
    return extents(x.ty) or []
