# SPDX-License-Identifier: Apache-2.0
"""Finds and rewrites what variables are bound to, and leaves everything else as it is.

Here and in other walks over whole functions, `array[:]` is a list of what an FFI array holds: to
iterate over the array itself takes three times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from tvm import relax
from tvm.relax.expr import _update_type

#: Given a binding and whether it is in a dataflow block, a new value for it, or None.
Change = Callable[[relax.Binding, bool], "relax.Expr | None"]


def calls(function: relax.Function) -> Iterator[relax.Call]:
    """Yield every call that a variable is bound to, in branches and local functions too.

    TVM's `post_order_visit` looks into every type as well. Where weights are one tuple, of which
    each binding takes a field, that is quadratic in the number of weights.
    """
    yield from _calls(function.body)


def values(function: relax.Function) -> Iterator[relax.Expr]:
    """Yield what variables are bound to, and results, in branches and local functions too."""
    yield from _values(function.body)


def variables(function: relax.Function) -> Iterator[relax.Var]:
    """Yield every variable that is bound, in branches and local functions too."""
    yield from function.params
    yield from _variables(function.body)


def _variables(sequence: relax.Expr) -> Iterator[relax.Var]:
    if not isinstance(sequence, relax.SeqExpr):
        return
    for block in sequence.blocks:
        for binding in block.bindings[:]:
            value = binding.value
            if isinstance(value, relax.If):
                yield from _variables(value.true_branch)
                yield from _variables(value.false_branch)
            elif isinstance(value, relax.Function):
                yield from variables(value)
            yield binding.var


def _values(sequence: relax.Expr) -> Iterator[relax.Expr]:
    if not isinstance(sequence, relax.SeqExpr):
        yield sequence
        return
    for block in sequence.blocks:
        for binding in block.bindings[:]:
            value = binding.value
            yield value
            if isinstance(value, relax.If):
                yield from _values(value.true_branch)
                yield from _values(value.false_branch)
            elif isinstance(value, relax.Function):
                yield from _values(value.body)
    yield sequence.body


def _calls(sequence: relax.Expr) -> Iterator[relax.Call]:
    if isinstance(sequence, relax.Call):
        yield sequence
    if not isinstance(sequence, relax.SeqExpr):
        return
    for block in sequence.blocks:
        for binding in block.bindings[:]:
            value = binding.value
            kind = type(value)  # told faster than whether it is an instance
            if kind is relax.Call:
                yield value
            elif kind is relax.If:
                yield from _calls(value.true_branch)
                yield from _calls(value.false_branch)
            elif kind is relax.Function:
                yield from _calls(value.body)


def map_values(function: relax.Function, change: Change) -> relax.Function:
    """Return a function in which bindings have new values; itself if none has.

    Branches and local functions are visited too. A new value is taken as it is.
    """
    body = _sequence(function.body, change)
    if body is None:
        return function
    return with_body(function, body)


def with_body(function: relax.Function, body: relax.Expr) -> relax.Function:
    """Return the function with another body, which has its type already."""
    return relax.Function(
        function.params, body, function.ret_ty, function.is_pure, function.attrs, function.span
    )


def begin_with(function: relax.Function, bindings: Sequence[relax.Binding]) -> relax.Function:
    """Return the function with more bindings before its first one."""
    body = function.body
    blocks = [relax.BindingBlock(bindings), *body.blocks]
    begun = relax.SeqExpr(blocks, body.body, body.span)
    _update_type(begun, body.ty)
    return with_body(function, begun)


def _sequence(sequence: relax.Expr, change: Change) -> relax.SeqExpr | None:
    """Return what a sequence becomes, or None if it stays."""
    if not isinstance(sequence, relax.SeqExpr):
        return None
    blocks, changed = [], False
    for block in sequence.blocks:
        dataflow = isinstance(block, relax.DataflowBlock)
        bindings, new = block.bindings[:], False
        for index, binding in enumerate(bindings):
            value = _value(binding, change, dataflow)
            if value is not None:
                new = True
                if isinstance(binding, relax.MatchCast):
                    bindings[index] = relax.MatchCast(binding.var, value, binding.ty, binding.span)
                else:
                    bindings[index] = relax.VarBinding(binding.var, value, binding.span)
        blocks.append(type(block)(bindings, block.span) if new else block)
        changed |= new
    if not changed:
        return None
    result = relax.SeqExpr(blocks, sequence.body, sequence.span)
    _update_type(result, sequence.ty)
    return result


def _value(binding: relax.Binding, change: Change, dataflow: bool) -> relax.Expr | None:
    value = binding.value
    if isinstance(value, relax.If):
        true = _sequence(value.true_branch, change)
        false = _sequence(value.false_branch, change)
        if true is None and false is None:
            return None
        result = relax.If(
            value.cond, true or value.true_branch, false or value.false_branch, value.span
        )
        _update_type(result, value.ty)
        return result
    if isinstance(value, relax.Function):
        function = map_values(value, change)
        return None if function.same_as(value) else function
    return change(binding, dataflow)
