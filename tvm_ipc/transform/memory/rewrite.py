# SPDX-License-Identifier: Apache-2.0
"""Replaces bindings of a function, and leaves every other one the object that it was."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tvm
from tvm import relax
from tvm.relax.expr import _update_type

from tvm_ipc.transform.bindings import with_body
from tvm_ipc.transform.ir.program import Program, Region, Step

#: Given a binding and its value, what stands in its place, in order; None where nothing changes.
Change = Callable[[relax.Binding, relax.Expr], Sequence[relax.Binding] | None]

_WITH_BINDINGS = frozenset((relax.If, relax.Function))


def rewrite(function: relax.Function, change: Change) -> relax.Function:
    """Return the function with its bindings changed, also those in branches and local functions."""
    body = _body(function.body, change)
    if body.same_as(function.body):
        return function
    return with_body(function, body)


def _body(body: Any, change: Change) -> Any:
    if not isinstance(body, relax.SeqExpr):
        return body
    blocks = []
    changed = False
    for block in body.blocks:
        bindings: list[relax.Binding] = []
        same = True
        for binding in block.bindings[:]:
            value = binding.value
            # Whether a TVM object is an instance of another class takes long to tell.
            inner = _inside(binding, value, change) if type(value) in _WITH_BINDINGS else binding
            replaced = change(binding, value)
            if replaced is None and inner is binding:
                bindings.append(binding)
                continue
            if replaced is None:
                replaced = [inner]
            elif inner is not binding:
                replaced = [inner if part is binding else part for part in replaced]
            same = same and len(replaced) == 1 and replaced[0] is binding
            bindings += replaced
        changed = changed or not same
        blocks.append(block if same else type(block)(bindings, block.span))
    if not changed:
        return body
    return typed(relax.SeqExpr(blocks, body.body, body.span), body.ty)


def _inside(binding: relax.Binding, value: Any, change: Change) -> relax.Binding:
    """Return the binding of an if or of a local function with the bindings in it changed."""
    if type(value) is relax.Function:
        inner = rewrite(value, change)
        if inner is value:
            return binding
        return relax.VarBinding(binding.var, inner, binding.span)
    then, other = _body(value.true_branch, change), _body(value.false_branch, change)
    if then.same_as(value.true_branch) and other.same_as(value.false_branch):
        return binding
    chosen = typed(relax.If(value.cond, then, other, value.span), value.ty)
    return relax.VarBinding(binding.var, chosen, binding.span)


def typed(expr: Any, ty: Any) -> Any:
    """Return the expression, which is new, with its type."""
    _update_type(expr, ty)
    return expr


def dtype_of(name: str) -> Any:
    """Return a type of elements as an argument."""
    return tvm.ir.GenericConst(tvm.DataType(name), relax.AnyType())


def replace(program: Program, bindings: Mapping[Step, Sequence[relax.Binding]]) -> relax.Function:
    """Return the function with other bindings in place of some steps."""
    touched: set[Region] = set()
    for step in bindings:
        region = step.region
        while region not in touched:
            touched.add(region)
            if region.parent is None:
                break
            region = region.parent.region

    def body(old: Any, region: Region) -> Any:
        if region not in touched:
            return old
        blocks: list[list[relax.Binding]] = [[] for _ in old.blocks]
        for step in region.steps:
            if step.branches and not touched.isdisjoint(step.branches):
                value = step.value
                then, other = step.branches
                new = relax.If(
                    value.cond, body(value.true_branch, then), body(value.false_branch, other)
                )
                inner = relax.VarBinding(step.var, typed(new, value.ty), step.binding.span)
            else:
                inner = step.binding
            new_ones = bindings.get(step)
            if new_ones is None:
                blocks[step.block].append(inner)
            else:
                blocks[step.block] += [inner if one is step.binding else one for one in new_ones]
        made = [type(block)(new, block.span) for block, new in zip(old.blocks, blocks, strict=True)]
        return typed(relax.SeqExpr(made, old.body, old.span), old.ty)

    function = program.function
    if not touched:
        return function
    return with_body(function, body(function.body, program.body))
