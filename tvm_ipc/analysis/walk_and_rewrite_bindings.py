# SPDX-License-Identifier: Apache-2.0
"""Walk through the bindings of functions, and rewrite them; unchanged IR is the same object.

    for binding, value in walk(function): ...               every binding, results with None
    for binding in bindings_of(function.body): ...          only those outside of branches

    rewrite(function, lambda binding, value: [new])         replace a binding by other ones
    edits.replace(var, [new]); edits.apply(function)        the same, for chosen variables
    begin_with(function, [check])                           more bindings before the first one
    change_functions(mod, lambda name, function: function)  every Relax function of a module

Branches and local functions are included. Here and in other walks over whole functions, `as_list`
converts FFI arrays, because iterating over an array itself takes five times as long. For a TVM
object of another class, `isinstance` takes three times as long as a comparison of `type`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tvm
from tvm import relax

from tvm_ipc.analysis.ffi_arrays import as_list
from tvm_ipc.tvm_private_names import update_type

#: Returns the bindings that replace a binding, from it and its value; None to keep it.
Change = Callable[[relax.Binding, relax.Expr], "Sequence[relax.Binding] | None"]
#: Returns bindings to append to a sequence, and its result; None to keep the sequence.
End = Callable[[relax.SeqExpr], "tuple[Sequence[relax.Binding], relax.Expr] | None"]


def walk(function: relax.Function) -> Iterator[tuple[relax.Binding | None, relax.Expr]]:
    """Yield every binding and its value in pre-order, and each result with None as its binding.

    TVM's `post_order_visit` also visits every type. If all weights are fields of one tuple, its
    time is quadratic in the number of weights.
    """
    return _walk(function.body)


def relax_functions(mod: tvm.IRModule) -> Iterator[tuple[tvm.ir.GlobalVar, relax.Function]]:
    """Return an iterator over the Relax functions of a module, with their global variables."""
    items = mod.functions_items()
    return ((variable, value) for variable, value in items if isinstance(value, relax.Function))


def calls(function: relax.Function) -> Iterator[relax.Call]:
    """Return an iterator over the calls that are bound to variables or are results."""
    return (value for _, value in walk(function) if type(value) is relax.Call)


def _walk(sequence: relax.Expr) -> Iterator[tuple[relax.Binding | None, relax.Expr]]:
    if not isinstance(sequence, relax.SeqExpr):
        yield None, sequence
        return
    for block in as_list(sequence.blocks):
        for binding in as_list(block.bindings):
            value = binding.value
            yield binding, value
            kind = type(value)
            if kind is relax.If:
                yield from _walk(value.true_branch)
                yield from _walk(value.false_branch)
            elif kind is relax.Function:
                yield from _walk(value.body)
    yield None, sequence.body


def bindings_of(sequence: relax.Expr) -> list[relax.Binding]:
    """Return the bindings of a sequence itself, without those of branches and local functions."""
    if not isinstance(sequence, relax.SeqExpr):
        return []
    return [binding for block in as_list(sequence.blocks) for binding in as_list(block.bindings)]


def has_dataflow(sequence: relax.Expr) -> bool:
    """Return whether a sequence, a branch or a local function of it has a dataflow block."""
    if not isinstance(sequence, relax.SeqExpr):
        return False
    if any(isinstance(block, relax.DataflowBlock) for block in as_list(sequence.blocks)):
        return True
    values = [binding.value for binding in bindings_of(sequence)]
    branches = [v for v in values if type(v) is relax.If]
    nested = [body for v in branches for body in (v.true_branch, v.false_branch)]
    nested += [v.body for v in values if type(v) is relax.Function]
    return any(map(has_dataflow, nested))


def belongs_to_others(function: relax.Function) -> bool:
    """Return whether a function belongs to a code generator or to a pass that fuses."""
    attributes = function.attrs or {}
    return any(key in attributes for key in ("Codegen", "Composite", "Primitive"))


def change_functions(
    mod: tvm.IRModule, change: Callable[[str, Any], Any], kind: type[Any] = relax.Function
) -> tvm.IRModule:
    """Return the module with its functions of a kind changed; itself if none changes.

    `change` takes the name of a function and the function, and returns the new function.
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
    """Return the function with bindings and ends of sequences replaced; itself if none is.

    The new bindings may include the replaced one, which then has the changes of its branches.
    """
    body = function.body
    changed = _rewrite(body, change, end)
    return function if changed is body else with_body(function, changed)


class Edits:
    """Changes at bindings, which their variables identify. `apply` makes all of them at once."""

    def __init__(self) -> None:
        # By the addresses of variables, which the function keeps alive: hashing them is slow.
        self._before: defaultdict[int, list[relax.Binding]] = defaultdict(list)
        self._after: defaultdict[int, list[relax.Binding]] = defaultdict(list)
        self._replaced: dict[int, Sequence[relax.Binding]] = {}

    def insert_before(self, var: Any, bindings: Sequence[relax.Binding]) -> None:
        """Insert bindings before that of a variable, after those that were inserted there."""
        self._before[var.__chandle__()] += bindings

    def insert_after(self, var: Any, bindings: Sequence[relax.Binding]) -> None:
        """Insert bindings after that of a variable, and after those that were inserted there."""
        self._after[var.__chandle__()] += bindings

    def replace(self, var: Any, bindings: Sequence[relax.Binding]) -> None:
        """Replace the binding of a variable; nothing replaces one that is removed."""
        self._replaced[var.__chandle__()] = bindings

    def replaces(self, var: Any) -> bool:
        """Return whether the binding of a variable is replaced or removed."""
        return var.__chandle__() in self._replaced

    def apply(self, function: relax.Function) -> relax.Function:
        """Return the changed function; itself if there are no changes."""
        changed = {*self._before, *self._after, *self._replaced}

        def change(binding: relax.Binding, _: relax.Expr) -> Sequence[relax.Binding] | None:
            key = binding.var.__chandle__()
            if key not in changed:
                return None
            replaced = self._replaced.get(key, (binding,))
            return [*self._before.get(key, ()), *replaced, *self._after.get(key, ())]

        return rewrite(function, change) if changed else function


def with_body(function: relax.Function, body: relax.Expr) -> relax.Function:
    """Return the function with another body, whose type is set already."""
    return relax.Function(
        function.params, body, function.ret_ty, function.is_pure, function.attrs, function.span
    )


def begin_with(function: relax.Function, bindings: Sequence[relax.Binding]) -> relax.Function:
    """Return the function with bindings inserted before its first one."""
    body = function.body
    blocks = [relax.BindingBlock(bindings), *body.blocks]
    return with_body(function, typed(relax.SeqExpr(blocks, body.body, body.span), body.ty))


def with_value(binding: relax.Binding, value: relax.Expr) -> relax.Binding:
    """Return a binding of the same variable to another value."""
    if type(binding) is relax.MatchCast:
        return relax.MatchCast(binding.var, value, binding.ty, binding.span)
    return relax.VarBinding(binding.var, value, binding.span)


def typed(expr: Any, ty: Any) -> Any:
    """Set the type of a new expression, and return it."""
    update_type(expr, ty)
    return expr


def _rewrite(sequence: Any, change: Change, end: End) -> Any:
    """Return the rewritten sequence, or itself if nothing changes."""
    if not isinstance(sequence, relax.SeqExpr):
        return sequence
    blocks = []
    changed = False
    for block in as_list(sequence.blocks):
        bindings: list[relax.Binding] = []
        is_same = True
        for binding in as_list(block.bindings):
            value = binding.value
            replaced = change(binding, value)
            inner = _inside(binding, value, change, end) if type(value) in _NESTING else binding
            if replaced is None:
                bindings.append(inner)
                is_same = is_same and inner is binding
                continue
            is_same = False
            if inner is not binding:
                replaced = [inner if new.same_as(binding) else new for new in replaced]
            bindings += replaced
        changed = changed or not is_same
        blocks.append(block if is_same else type(block)(bindings, block.span))
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
    """Return the binding of an if or of a local function with its inner bindings rewritten."""
    if type(value) is relax.Function:
        inner = rewrite(value, change, end)
        return binding if inner is value else with_value(binding, inner)
    true, false = value.true_branch, value.false_branch
    new_true, new_false = _rewrite(true, change, end), _rewrite(false, change, end)
    if new_true is true and new_false is false:
        return binding
    changed = relax.If(value.cond, new_true, new_false, value.span)
    return with_value(binding, typed(changed, value.ty))


_NESTING = frozenset((relax.If, relax.Function))
