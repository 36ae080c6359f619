# SPDX-License-Identifier: Apache-2.0
"""One operator where a program spells the repetition of heads as three.

    (b, 2, n, w) -> expand_dims -> (b, 2, 1, n, w) -> broadcast_to -> (b, 2, 3, n, w)
                 -> reshape -> (b, 6, n, w)                     is R.repeat(x, 3, axis=1)

Ranks that have copies of a head share what it is repeated to, which no operator of the three shows.
"""

from __future__ import annotations

from tvm import relax

from tvm_ipc.comm.extents import constant
from tvm_ipc.comm.operator import extents, same_extents
from tvm_ipc.transform.ir.rewrite import rewrite, typed, walk, with_value
from tvm_ipc.transform.rules.operation import short_name

_INSERTS = ("expand_dims", "reshape")


def with_repeats(function: relax.Function) -> relax.Function:
    """Return the function with R.repeat where it is spelled as three operators."""
    values: dict[relax.Var, relax.Expr] = {
        binding.var: value for binding, value in walk(function) if binding is not None
    }

    def change(binding: relax.Binding, value: relax.Expr) -> list[relax.Binding] | None:
        found = _repeated(values, value)
        if found is None:
            return None
        x, times, axis = found
        return [with_value(binding, typed(relax.op.repeat(x, times, axis), value.ty))]

    changed = rewrite(function, change)
    return function if changed is function else relax.analysis.remove_all_unused(changed)


def _repeated(
    values: dict[relax.Var, relax.Expr], value: relax.Expr
) -> tuple[relax.Expr, int, int] | None:
    """Return what a reshape repeats, how often, and along which axis; None if it does not."""
    wide = _operand(values, value, ("reshape",))
    narrow = _operand(values, wide, ("broadcast_to",))
    x = _operand(values, narrow, _INSERTS)
    if wide is None or narrow is None or x is None:
        return None
    made, wide_, narrow_, dims = (_dims(one) for one in (value, wide, narrow, x))
    for axis in range(len(dims)):
        if len(wide_) != len(dims) + 1 or len(narrow_) != len(wide_) or len(made) != len(dims):
            return None
        times = constant(wide_[axis + 1])
        if times is None or times < 2 or constant(dims[axis]) is None:
            continue
        before, after = dims[: axis + 1], dims[axis + 1 :]
        if (
            same_extents(narrow_, [*before, 1, *after])
            and same_extents(wide_, [*before, times, *after])
            and same_extents(made, [*dims[:axis], dims[axis] * times, *after])
        ):
            return x, times, axis
    return None


def _operand(
    values: dict[relax.Var, relax.Expr], x: relax.Expr | None, names: tuple[str, ...]
) -> relax.Expr | None:
    """Return what an operator is given, None if a value is none of those operators."""
    while isinstance(x, relax.Var) and x in values:
        x = values[x]
    if not isinstance(x, relax.Call) or short_name(x) not in names:
        return None
    return x.args[0]


def _dims(x: relax.Expr) -> list[relax.Expr]:
    return extents(x.ty) or []
