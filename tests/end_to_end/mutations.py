# SPDX-License-Identifier: Apache-2.0
"""Planned programs from which one thing was taken that ranks or threads meet by."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import tvm
from tvm import relax

from tvm_ipc.packed_functions import CollectiveFlag, Sync, find

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
    posted = find(str(call.args[0].value)) if short == "start" else None
    if short == "start":
        yield f"{text(binding)} and its wait", lambda one: None if uses(one, binding) else one
    elif short == "wait" or (function is not None and function.sync is not Sync.NONE):
        yield text(binding), lambda one: None if one.var.same_as(binding.var) else one
    if short == "release" and len(call.args) > 2:
        for k in range(1, len(call.args)):
            rest = [arg for place, arg in enumerate(call.args) if place != k]
            yield f"argument {k} of {text(binding)}", replacing(binding, rest)
    collective = posted or function
    flag = collective.parameter_of_type("CollectiveFlag") if collective is not None else None
    if collective is not None and flag is not None:
        skipped = 1 if posted is not None else 0
        (at,) = collective.positions((flag,), len(call.args) - skipped)
        if int(call.args[at + skipped].value) == CollectiveFlag.NONE:
            args = list(call.args)
            args[at + skipped] = relax.prim_value(int(CollectiveFlag.NO_EXIT_BARRIER))
            yield f"the end of {text(binding)}", replacing(binding, args)


def swaps(mod: tvm.IRModule) -> Iterator[tuple[str, tvm.IRModule]]:
    """Yield modules in which two collectives of one branch have changed places, and which."""
    main = mod["main"].body
    for body in bodies(main):
        steps = [binding for block in body.blocks for binding in block.bindings]
        calls = [k for k, one in enumerate(steps) if meets(one)]
        for first, second in pairwise(calls):
            # The second one comes before the first one, unless it needs what is between them.
            made = {one.var for one in steps[first:second]}
            args = [one for one in steps[second].value.args if isinstance(one, relax.Var)]
            needs = any(one in made for one in args)
            rest = [*steps[:first], *steps[first + 1 : second]]
            ends = [steps[second], steps[first]]
            new = [*rest, *ends] if needs else [*rest[:first], *ends, *rest[first:]]
            new += steps[second + 1 :]
            other = relax.SeqExpr([relax.BindingBlock(new)], body.body)
            what = f"{text(steps[second])} before {text(steps[first])}"
            yield what, with_body(mod, with_other(main, body, other))


def other_kinds(mod: tvm.IRModule) -> Iterator[tuple[str, tvm.IRModule]]:
    """Yield modules in which a collective of a branch reduces otherwise, and which."""
    body = mod["main"].body
    for binding, in_branch in bindings(body):
        name = packed_name(binding.value)
        function = find(name) if in_branch and name is not None else None
        kind = function.parameter_of_type("ReduceKind") if function is not None else None
        if function is not None and kind is not None:
            args = list(binding.value.args)
            (at,) = function.positions((kind,), len(args))
            args[at] = relax.prim_value(3 - int(args[at].value))
            yield (
                f"{text(binding)} otherwise",
                with_body(mod, changed(body, replacing(binding, args))),
            )


def aliases(mod: tvm.IRModule, rng: random.Random) -> Iterator[tuple[str, tvm.IRModule]]:
    """Yield modules in which a tensor is stored where another one is, and which."""
    body = mod["main"].body
    tensors = list(allocated(body, {}))
    for one, storages in rng.sample(tensors, len(tensors)):
        other, _ = rng.choice(tensors)
        storage, offset = other.value.args[:2]
        same = storage.same_as(one.value.args[0]) and int_of(offset) == int_of(one.value.args[1])
        if same or storage not in storages:
            continue
        args = [storage, offset, *one.value.args[2:]]
        what = f"{one.var.name} where {other.var.name} is"
        yield what, with_body(mod, changed(body, replacing(one, args)))


def allocated(body: Any, storages: dict[Any, None]) -> Iterator[tuple[relax.Binding, set[Any]]]:
    """Yield the tensors in storages, and which storages there are where they are allocated."""
    storages = dict(storages)
    for block in body.blocks:
        for binding in block.bindings:
            value = binding.value
            if isinstance(value, relax.If):
                yield from allocated(value.true_branch, storages)
                yield from allocated(value.false_branch, storages)
            name = getattr(getattr(value, "op", None), "name", "")
            if name == "relax.memory.alloc_storage":
                storages[binding.var] = None
            elif name == "relax.memory.alloc_tensor":
                yield binding, set(storages)


def int_of(expr: Any) -> Any:
    value = getattr(expr, "value", None)
    return int(value) if isinstance(value, int) else str(expr)


def meets(binding: relax.Binding) -> bool:
    function = find(packed_name(binding.value) or "")
    return function is not None and function.sync in (Sync.BARRIER, Sync.PARTIAL)


def bodies(body: Any) -> Iterator[Any]:
    """Yield a body, and those of branches within it."""
    yield body
    for block in body.blocks:
        for binding in block.bindings:
            if isinstance(binding.value, relax.If):
                yield from bodies(binding.value.true_branch)
                yield from bodies(binding.value.false_branch)


def with_other(body: Any, old: Any, new: Any) -> Any:
    """Return a body with another one in the place of one within it."""
    if body.same_as(old):
        return new
    blocks = []
    for block in body.blocks:
        kept = []
        for binding in block.bindings:
            value = binding.value
            if isinstance(value, relax.If):
                branches = value.true_branch, value.false_branch
                branches = [with_other(one, old, new) for one in branches]
                kept.append(relax.VarBinding(binding.var, relax.If(value.cond, *branches)))
            else:
                kept.append(binding)
        blocks.append(relax.BindingBlock(kept))
    return relax.SeqExpr(blocks, body.body)


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
