# SPDX-License-Identifier: Apache-2.0
"""Walks through the bindings of functions and rewrites them; the rest stays the object it was.

    for binding, value in walk(function): ...               every binding, results with None

    rewrite(function, lambda binding, value: [other])       what stands in place of a binding
    begin_with(function, [check])                           more bindings before the first one
    change_functions(mod, lambda name, function: function)  every Relax function of a module

Branches and local functions are walked through and rewritten too. Here and in other walks over
whole functions, `array[:]` is a list of what an FFI array holds: to iterate over the array itself
takes three times as long. So does `isinstance` of a TVM object that is of another class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tvm
from tvm import relax
from tvm.relax.expr import _update_type

#: Given a binding and its value, what stands in its place, in order; None where nothing changes.
Change = Callable[[relax.Binding, relax.Expr], "Sequence[relax.Binding] | None"]
#: Given a sequence, more bindings at its end and its result, or None where nothing changes.
End = Callable[[relax.SeqExpr], "tuple[Sequence[relax.Binding], relax.Expr] | None"]


def walk(function: relax.Function) -> Iterator[tuple[relax.Binding | None, relax.Expr]]:
    """Yield every binding and its value, before what is inside of it, and results with None.

    TVM's `post_order_visit` looks into every type as well. Where weights are one tuple, of which
    each binding takes a field, that is quadratic in the number of weights.
    """
    return _walk(function.body)


def calls(function: relax.Function) -> Iterator[relax.Call]:
    """Yield every call that a variable is bound to, or that is a result."""
    return (value for _, value in walk(function) if type(value) is relax.Call)


def _walk(sequence: relax.Expr) -> Iterator[tuple[relax.Binding | None, relax.Expr]]:
    if not isinstance(sequence, relax.SeqExpr):
        yield None, sequence
        return
    for block in sequence.blocks:
        for binding in block.bindings[:]:
            value = binding.value
            yield binding, value
            kind = type(value)
            if kind is relax.If:
                yield from _walk(value.true_branch)
                yield from _walk(value.false_branch)
            elif kind is relax.Function:
                yield from _walk(value.body)
    yield None, sequence.body


def belongs_to_others(function: relax.Function) -> bool:
    """Whether a compiler, or a pass that fuses, has taken a function as a whole."""
    attributes = function.attrs or {}
    return any(key in attributes for key in ("Codegen", "Composite", "Primitive"))


def change_functions(
    mod: tvm.IRModule, change: Callable[[str, Any], Any], kind: type[Any] = relax.Function
) -> tvm.IRModule:
    """Return the module with its functions of a kind changed; itself if all stay what they are.

    `change` is given the name of a function and the function.
    """
    changed = {}
    for global_var, function in mod.functions_items():
        if isinstance(function, kind):
            new = change(str(global_var.name_hint), function)
            if new is not function:
                changed[global_var] = new
    if not changed:
        return mod
    result = mod.clone()
    for global_var, function in changed.items():
        result.update_func(global_var, function)
    return result


def _no_end(_: relax.SeqExpr) -> None:
    return None


def rewrite(function: relax.Function, change: Change, end: End = _no_end) -> relax.Function:
    """Return the function with bindings, and ends of sequences, changed; itself if none is.

    Among the new bindings the one that is replaced may be: with what changed inside of it.
    """
    body = function.body
    changed = _rewrite(body, change, end)
    return function if changed is body else with_body(function, changed)


def with_body(function: relax.Function, body: relax.Expr) -> relax.Function:
    """Return the function with another body, which has its type already."""
    return relax.Function(
        function.params, body, function.ret_ty, function.is_pure, function.attrs, function.span
    )


def begin_with(function: relax.Function, bindings: Sequence[relax.Binding]) -> relax.Function:
    """Return the function with more bindings before its first one."""
    body = function.body
    blocks = [relax.BindingBlock(bindings), *body.blocks]
    return with_body(function, typed(relax.SeqExpr(blocks, body.body, body.span), body.ty))


def with_value(binding: relax.Binding, value: relax.Expr) -> relax.Binding:
    """Return the binding of its variable to another value."""
    if isinstance(binding, relax.MatchCast):
        return relax.MatchCast(binding.var, value, binding.ty, binding.span)
    return relax.VarBinding(binding.var, value, binding.span)


def typed(expr: Any, ty: Any) -> Any:
    """Return the expression, which is new, with its type."""
    _update_type(expr, ty)
    return expr


def _rewrite(sequence: Any, change: Change, end: End) -> Any:
    if not isinstance(sequence, relax.SeqExpr):
        return sequence
    blocks = []
    changed = False
    for block in sequence.blocks:
        bindings: list[relax.Binding] = []
        same = True
        for binding in block.bindings[:]:
            value = binding.value
            replaced = change(binding, value)
            inner = _inside(binding, value, change, end) if type(value) in _NESTING else binding
            if replaced is None:
                bindings.append(inner)
                same = same and inner is binding
                continue
            same = False
            if inner is not binding:
                replaced = [inner if part.same_as(binding) else part for part in replaced]
            bindings += replaced
        changed = changed or not same
        blocks.append(block if same else type(block)(bindings, block.span))
    result = sequence.body
    ended = end(sequence)
    if ended is not None:
        more, result = ended
        if blocks and not isinstance(blocks[-1], relax.DataflowBlock):
            more = [*blocks.pop().bindings, *more]
        blocks.append(relax.BindingBlock(more))
    elif not changed:
        return sequence
    return typed(relax.SeqExpr(blocks, result, sequence.span), sequence.ty)


def _inside(binding: relax.Binding, value: Any, change: Change, end: End) -> relax.Binding:
    """Return the binding of an if or of a local function with the bindings in it changed."""
    if type(value) is relax.Function:
        inner = rewrite(value, change, end)
        return binding if inner is value else with_value(binding, inner)
    true, false = value.true_branch, value.false_branch
    then, other = _rewrite(true, change, end), _rewrite(false, change, end)
    if then is true and other is false:
        return binding
    return with_value(binding, typed(relax.If(value.cond, then, other, value.span), value.ty))


_NESTING = frozenset((relax.If, relax.Function))
