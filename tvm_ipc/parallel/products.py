# SPDX-License-Identifier: Apache-2.0
"""Products of batches that were joined with heads, which torch.export makes of larger ones.

Before:
    q = R.reshape(queries, (b * h, n, d))
    k = R.reshape(keys, (b * h, d, n))
    s = R.matmul(q, k)
    scores = R.reshape(s, (b, h, n, n))

After:
    scores = R.matmul(queries, keys)

What a rank has of the heads is one piece of `h`, and of `b * h` it would be `b` pieces. Likewise a
weight that was repeated for each row of a batch is multiplied as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import relax

from tvm_ipc.comm.operator import extents, same_extents
from tvm_ipc.transform.ir.rewrite import rewrite, walk, with_value
from tvm_ipc.transform.rules.operation import short_name


def with_batches(function: relax.Function) -> relax.Function:
    """Return the function with products of batches and heads as they were before being joined."""
    builder = relax.BlockBuilder()
    made = {one.var: value for one, value in walk(function) if one is not None}
    apart: dict[relax.Var, relax.Var] = {}  #: products with their batches, by those without

    def change(binding: relax.Binding, value: relax.Expr) -> list[relax.Binding] | None:
        name = short_name(value) if isinstance(value, relax.Call) else ""
        if name == "reshape" and value.args[0] in apart:
            whole = apart[value.args[0]]
            alike = same_extents(_dims(whole), _dims(binding.var))
            return [with_value(binding, whole)] if alike else None
        if name != "matmul":
            return None
        a, b = value.args
        found = _before_joining(made, a, b)
        if found is None:
            weight = _repeated(made, a, b)
            if weight is None:
                return None
            call = relax.Call(value.op, [a, weight], value.attrs)
            return [with_value(binding, builder.normalize(call))]
        call = builder.normalize(relax.Call(value.op, found, value.attrs))
        var = type(binding.var)(f"{binding.var.name}_apart", call.ty)
        apart[binding.var] = var
        joined = builder.normalize(relax.op.reshape(var, relax.ShapeExpr(_dims(binding.var))))
        return [relax.VarBinding(var, call), with_value(binding, joined)]

    changed = rewrite(function, change)
    return function if changed is function else relax.analysis.remove_all_unused(changed)


def _before_joining(
    made: dict[relax.Var, relax.Expr], a: relax.Expr, b: relax.Expr
) -> list[relax.Expr] | None:
    """Return the operands whose axes but the last two were joined, None where none were."""
    sources = [_operand(made, one, "reshape") for one in (a, b)]
    if any(one is None for one in sources):
        return None
    dims = [_dims(one) for one in sources]
    joined = [_dims(one) for one in (a, b)]
    if any(len(one) != 3 for one in joined) or min(map(len, dims)) < 4:
        return None
    kept = all(same_extents(one[-2:], other[-2:]) for one, other in zip(dims, joined, strict=True))
    return sources if kept and same_extents(dims[0][:-2], dims[1][:-2]) else None


def _repeated(made: dict[relax.Var, relax.Expr], a: relax.Expr, b: relax.Expr) -> relax.Expr | None:
    """Return the matrix that `b` is once for each batch of `a`, None where it is not."""
    source = _operand(made, b, "broadcast_to")
    if source is None or len(_dims(source)) != 2 or len(_dims(b)) < 3:
        return None
    for_batches = same_extents(_dims(a)[:-2], _dims(b)[:-2])
    return source if for_batches and same_extents(_dims(source), _dims(b)[-2:]) else None


def _operand(made: dict[relax.Var, relax.Expr], x: relax.Expr, operator: str) -> Any:
    value = made.get(x) if isinstance(x, relax.Var) else None
    if isinstance(value, relax.Call) and short_name(value) == operator:
        return value.args[0]
    return None


def _dims(x: relax.Expr) -> Sequence[Any]:
    """Return the extents of a tensor, none where they are not known."""
    return extents(x.ty) or []
