# SPDX-License-Identifier: Apache-2.0
"""Planned programs from which one thing was taken that ranks or threads meet by."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import tvm
from tvm import relax

from tvm_ipc.contract import CollectiveFlag, Meeting, find

#: What a binding becomes: None where it is left out.
Change = Callable[[relax.Binding], "relax.Binding | None"]


def mutants(mod: tvm.IRModule) -> Iterator[tuple[str, tvm.IRModule]]:
    """Yield what was taken from a module's `main`, and the module without it.

    What is in branches comes first.
    """
    function = mod["main"]
    found = list(bindings(function.body))
    found.sort(key=lambda one: not one[1])
    for binding, _ in found:
        for what, change in changes(binding):
            yield what, with_body(mod, changed(function.body, change))


def changes(binding: relax.Binding) -> Iterator[tuple[str, Change]]:
    """Yield what can be taken from a binding, and what becomes of each then."""
    call = binding.value
    name = packed_name(call)
    if name is None:
        return
    function = find(name)
    short = name.rpartition(".")[2]
    posted = find(str(call.args[0].value)) if short == "post" else None
    if short == "post":
        yield f"{text(binding)} and its wait", lambda one: None if uses(one, binding) else one
    elif short == "wait" or (function is not None and function.meets is not Meeting.NONE):
        yield text(binding), lambda one: None if one.var.same_as(binding.var) else one
    if short == "hide" and len(call.args) > 2:
        for k in range(1, len(call.args)):
            rest = [arg for place, arg in enumerate(call.args) if place != k]
            yield f"argument {k} of {text(binding)}", replacing(binding, rest)
    collective = posted or function
    flag = collective.named("CollectiveFlag") if collective is not None else None
    if collective is not None and flag is not None:
        skipped = 1 if posted is not None else 0
        (at,) = collective.places((flag,), len(call.args) - skipped)
        if int(call.args[at + skipped].value) == CollectiveFlag.NONE:
            args = list(call.args)
            args[at + skipped] = relax.prim_value(int(CollectiveFlag.NO_EXIT_BARRIER))
            yield f"the end of {text(binding)}", replacing(binding, args)


def replacing(binding: relax.Binding, args: list[relax.Expr]) -> Change:
    call = binding.value
    other = relax.Call(call.op, args, call.attrs, call.ty_args)
    return lambda one: relax.VarBinding(one.var, other) if one.var.same_as(binding.var) else one


def packed_name(value: Any) -> str | None:
    is_packed = isinstance(value, relax.Call) and isinstance(value.op, relax.ExternFunc)
    return str(value.op.global_symbol) if is_packed else None


def uses(one: relax.Binding, binding: relax.Binding) -> bool:
    """Whether it is a binding, or the wait for it."""
    waits = packed_name(one.value) == "tvm_ipc.wait" and one.value.args[0].same_as(binding.var)
    return waits or one.var.same_as(binding.var)


def bindings(body: Any, in_branch: bool = False) -> Iterator[tuple[relax.Binding, bool]]:
    """Yield all bindings, and whether each is in a branch."""
    for block in body.blocks:
        for binding in block.bindings:
            yield binding, in_branch
            if isinstance(binding.value, relax.If):
                yield from bindings(binding.value.true_branch, True)
                yield from bindings(binding.value.false_branch, True)


def changed(body: Any, change: Change) -> relax.SeqExpr:
    blocks = []
    for block in body.blocks:
        kept = []
        for binding in block.bindings:
            value = binding.value
            if isinstance(value, relax.If):
                branches = changed(value.true_branch, change), changed(value.false_branch, change)
                kept.append(relax.VarBinding(binding.var, relax.If(value.cond, *branches)))
                continue
            after = change(binding)
            if after is not None:
                kept.append(after)
        blocks.append(relax.BindingBlock(kept))
    return relax.SeqExpr(blocks, body.body)


def with_body(mod: tvm.IRModule, body: relax.SeqExpr) -> tvm.IRModule:
    function = mod["main"]
    is_pure = bool(function.is_pure)
    main = relax.Function(function.params, body, function.ret_ty, is_pure, function.attrs)
    functions = {
        var: main if str(var.name_hint) == "main" else f for var, f in mod.functions_items()
    }
    return tvm.IRModule(functions, mod.attrs)


def text(binding: relax.Binding) -> str:
    return f"{binding.var.name} = {packed_name(binding.value)}"
