# SPDX-License-Identifier: Apache-2.0
"""Canonicalization of batched matmuls whose batch and head axes torch.export has merged.

Before:
    q = R.reshape(queries, (b * h, n, d))
    k = R.reshape(keys, (b * h, d, n))
    s = R.matmul(q, k)
    scores = R.reshape(s, (b, h, n, n))

After:
    scores = R.matmul(queries, keys)

A shard of the heads is one block of `h`, but would be `b` separate blocks of `b * h`. A weight that
is broadcast over the batch is also replaced by the weight itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import relax

from tvm_ipc.analysis.walk_and_rewrite_bindings import rewrite, walk, with_value
from tvm_ipc.comm.collective_relax_op import extents, same_extents
from tvm_ipc.spmd.rules.operation import short_name


def canonicalize_bmm(function: relax.Function) -> relax.Function:
    """Return the function with matmuls over separate batch and head axes."""
    builder = relax.BlockBuilder()
    value_of = {binding.var: value for binding, value in walk(function) if binding is not None}
    #: Matmuls with separate axes, by those with merged axes.
    separate: dict[relax.Var, relax.Var] = {}

    def change(binding: relax.Binding, value: relax.Expr) -> list[relax.Binding] | None:
        name = short_name(value) if isinstance(value, relax.Call) else ""
        if name == "reshape" and value.args[0] in separate:
            product = separate[value.args[0]]
            same_shape = same_extents(_dims(product), _dims(binding.var))
            return [with_value(binding, product)] if same_shape else None
        if name != "matmul":
            return None
        a, b = value.args
        operands = _before_reshape(value_of, a, b)
        if operands is None:
            weight = _before_broadcast(value_of, a, b)
            if weight is None:
                return None
            call = relax.Call(value.op, [a, weight], value.attrs)
            return [with_value(binding, builder.normalize(call))]
        call = builder.normalize(relax.Call(value.op, operands, value.attrs))
        var = type(binding.var)(f"{binding.var.name}_apart", call.ty)
        separate[binding.var] = var
        merged = builder.normalize(relax.op.reshape(var, relax.ShapeExpr(_dims(binding.var))))
        return [relax.VarBinding(var, call), with_value(binding, merged)]

    changed = rewrite(function, change)
    return function if changed is function else relax.analysis.remove_all_unused(changed)


def _before_reshape(
    value_of: dict[relax.Var, relax.Expr], a: relax.Expr, b: relax.Expr
) -> list[relax.Expr] | None:
    """Return the operands before their batch axes were merged, or None if they were not."""
    sources = [_operand(value_of, operand, "reshape") for operand in (a, b)]
    if any(source is None for source in sources):
        return None
    dims = [_dims(source) for source in sources]
    merged = [_dims(operand) for operand in (a, b)]
    if any(len(extents) != 3 for extents in merged) or min(map(len, dims)) < 4:
        return None
    kept = all(same_extents(old[-2:], new[-2:]) for old, new in zip(dims, merged, strict=True))
    return sources if kept and same_extents(dims[0][:-2], dims[1][:-2]) else None


def _before_broadcast(
    value_of: dict[relax.Var, relax.Expr], a: relax.Expr, b: relax.Expr
) -> relax.Expr | None:
    """Return the matrix that `b` broadcasts over the batch of `a`, or None."""
    source = _operand(value_of, b, "broadcast_to")
    if source is None or len(_dims(source)) != 2 or len(_dims(b)) < 3:
        return None
    for_batches = same_extents(_dims(a)[:-2], _dims(b)[:-2])
    return source if for_batches and same_extents(_dims(source), _dims(b)[-2:]) else None


def _operand(value_of: dict[relax.Var, relax.Expr], x: relax.Expr, operator: str) -> Any:
    value = value_of.get(x) if isinstance(x, relax.Var) else None
    if isinstance(value, relax.Call) and short_name(value) == operator:
        return value.args[0]
    return None


def _dims(x: relax.Expr) -> Sequence[Any]:
    """Return the extents of a tensor, or an empty list if they are unknown."""
    return extents(x.ty) or []
