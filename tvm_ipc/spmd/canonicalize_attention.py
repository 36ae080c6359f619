# SPDX-License-Identifier: Apache-2.0
"""Canonicalization of attention as torch.export writes it.

Batched matmuls whose batch and head axes were merged get separate axes again. A shard of the heads
is one block of `h`, but would be `b` separate blocks of `b * h`:

    before:                                                 after:
    q = R.reshape(queries, (b * h, n, d))                   scores = R.matmul(queries, keys)
    k = R.reshape(keys, (b * h, d, n))
    s = R.matmul(q, k)
    scores = R.reshape(s, (b, h, n, n))

A weight that is broadcast over the batch is replaced by the weight itself. In grouped-query
attention three operators that repeat heads become one:

    (b, 2, n, w) -> expand_dims -> (b, 2, 1, n, w) -> broadcast_to -> (b, 2, 3, n, w)
                 -> reshape -> (b, 6, n, w)                     is R.repeat(x, 3, axis=1)

Ranks with copies of one head of keys split its repetitions among them. The rule of `R.repeat`
supports that, and those of the three operators do not.
"""

from __future__ import annotations

from tvm import relax

from tvm_ipc.analysis.resolve_variables import Values, values_of
from tvm_ipc.analysis.walk_and_rewrite_bindings import Change, rewrite, typed, with_value
from tvm_ipc.comm.collective_relax_op import same_extents
from tvm_ipc.comm.extent_arithmetic import constant
from tvm_ipc.spmd.rules.operation import dims_of, operand_of, short_name


def canonicalize_attention(function: relax.Function) -> relax.Function:
    """Return the function with separate axes of heads, which one operator repeats."""
    for changes in (_split_merged_heads, _repeat_heads):
        changed = rewrite(function, changes(values_of(function)))
        if changed is not function:
            function = relax.analysis.remove_all_unused(changed)
    return function


def _split_merged_heads(values: Values) -> Change:
    """Return the change of matmuls to matmuls over separate batch and head axes."""
    builder = relax.BlockBuilder()
    #: Matmuls with separate axes, by those with merged axes.
    separate: dict[relax.Var, relax.Var] = {}

    def change(binding: relax.Binding, value: relax.Expr) -> list[relax.Binding] | None:
        name = short_name(value)
        if name == "reshape" and value.args[0] in separate:
            product = separate[value.args[0]]
            same_shape = same_extents(dims_of(product), dims_of(binding.var))
            return [with_value(binding, product)] if same_shape else None
        if name != "matmul":
            return None
        a, b = value.args
        operands = _before_reshape(values, a, b)
        if operands is None:
            weight = _before_broadcast(values, a, b)
            if weight is None:
                return None
            call = relax.Call(value.op, [a, weight], value.attrs)
            return [with_value(binding, builder.normalize(call))]
        call = builder.normalize(relax.Call(value.op, operands, value.attrs))
        var = type(binding.var)(f"{binding.var.name}_apart", call.ty)
        separate[binding.var] = var
        merged = builder.normalize(relax.op.reshape(var, relax.ShapeExpr(dims_of(binding.var))))
        return [relax.VarBinding(var, call), with_value(binding, merged)]

    return change


def _before_reshape(values: Values, a: relax.Expr, b: relax.Expr) -> list[relax.Expr] | None:
    """Return the operands before their batch axes were merged, or None if they were not."""
    sources = [operand_of(values, operand, "reshape") for operand in (a, b)]
    if any(source is None for source in sources):
        return None
    dims = [dims_of(source) for source in sources]
    merged = [dims_of(operand) for operand in (a, b)]
    if any(len(extents) != 3 for extents in merged) or min(map(len, dims)) < 4:
        return None
    kept = all(same_extents(old[-2:], new[-2:]) for old, new in zip(dims, merged, strict=True))
    return sources if kept and same_extents(dims[0][:-2], dims[1][:-2]) else None


def _before_broadcast(values: Values, a: relax.Expr, b: relax.Expr) -> relax.Expr | None:
    """Return the matrix that `b` broadcasts over the batch of `a`, or None."""
    source: relax.Expr | None = operand_of(values, b, "broadcast_to")
    if source is None or len(dims_of(source)) != 2 or len(dims_of(b)) < 3:
        return None
    for_batches = same_extents(dims_of(a)[:-2], dims_of(b)[:-2])
    return source if for_batches and same_extents(dims_of(source), dims_of(b)[-2:]) else None


def _repeat_heads(values: Values) -> Change:
    """Return the change of three operators that repeat an axis to `R.repeat`."""

    def change(binding: relax.Binding, value: relax.Expr) -> list[relax.Binding] | None:
        match = _match_repeat(values, value)
        if match is None:
            return None
        x, times, axis = match
        return [with_value(binding, typed(relax.op.repeat(x, times, axis), value.ty))]

    return change


def _match_repeat(values: Values, value: relax.Expr) -> tuple[relax.Expr, int, int] | None:
    """Return the tensor that a reshape repeats, the count and the axis, or None."""
    wide = operand_of(values, value, "reshape")
    narrow = operand_of(values, wide, "broadcast_to")
    x = operand_of(values, narrow, "expand_dims", "reshape")
    if wide is None or narrow is None or x is None:
        return None
    result_dims, wide_dims, narrow_dims, dims = map(dims_of, (value, wide, narrow, x))
    if len(wide_dims) != len(dims) + 1:
        return None
    for axis in range(len(dims)):
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
