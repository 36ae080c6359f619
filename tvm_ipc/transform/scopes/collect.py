# SPDX-License-Identifier: Apache-2.0
"""Collects the facts of a module: its tensor values, and what each place needs of them."""

from __future__ import annotations

from itertools import pairwise

import tvm
from tvm import relax

from tvm_ipc.errors import TransformError
from tvm_ipc.transform.scopes.calls import Calls
from tvm_ipc.transform.scopes.demands import GLOBAL, ScopeRegistry
from tvm_ipc.transform.scopes.facts import (
    VALUE,
    FunctionFacts,
    FunctionValue,
    Program,
    Region,
    Root,
    Use,
    Value,
    pairs,
    tensors,
)
from tvm_ipc.transform.scopes.primfunc import PARAM_SCOPES, PrimFuncs


def collect(
    module: tvm.IRModule,
    registry: ScopeRegistry,
    primfuncs: PrimFuncs,
    eager: bool = False,
) -> Program:
    """Return the facts of a module, or raise a TransformError that names what is malformed.

    Parameters
    ----------
    eager : read the calls of all PrimFuncs at once.
    """
    return _Collector(module, registry, primfuncs).run(eager)


class _Collector(Calls):
    def run(self, eager: bool) -> Program:
        for global_var, function in self.program.module.functions_items():
            name = str(global_var.name_hint)
            if isinstance(function, relax.Function):
                attrs = function.attrs or {}
                facts = self.declare(name, function, local=False)
                facts.value.escapes = "global_symbol" in attrs
                self.globals[name] = facts
            else:
                self.globals[name] = function
        self.private = not all(facts.value.escapes for facts in self.program.functions)
        functions = [value for value in self.globals.values() if isinstance(value, FunctionFacts)]
        for facts in functions:
            self.visit_function(facts, None)
        for facts in self.program.functions:
            if facts.value.escapes:
                self.fix_boundary(facts)
        scopes = {scope for scope, _ in self.program.fixed.values()}
        scopes.update(use.exact for use in self.program.uses if use.exact is not None)
        self.program.opaque = not all(self.registry.scopes[scope] for scope in scopes)
        self.program.read_deferred = self.read_deferred
        if self.program.opaque or eager:
            self.read_deferred()
        return self.program

    # Functions.

    def declare(self, name: str, function: relax.Function, *, local: bool) -> FunctionFacts:
        result: FunctionFacts = FunctionFacts(name, function, FunctionValue(name, (), None, local))
        result.value.params = tuple(self.fresh(p.ty, Root(p), result) for p in function.params)
        # Nothing is read from the root of a result.
        result.value.result = self.fresh(function.ret_ty, Root(relax.Var(name)), result)
        attrs = function.attrs or {}
        result.pure = bool(function.is_pure) and not bool(attrs.get("relax.force_pure", False))
        bounds = attrs.get("tir_var_upper_bound", None)
        result.bounds = {str(k): int(v) for k, v in bounds.items()} if bounds else {}
        self.program.functions.append(result)
        return result

    def fix_boundary(self, facts: FunctionFacts) -> None:
        given = self.param_scopes(facts)
        whole = [one.leaf for one in tensors(facts.value.params)]
        for one, other in pairwise(whole):  # a caller may pass one tensor twice
            self.program.unite(one, other)
        for scope, value in zip(given, facts.value.params, strict=True):
            for tensor in tensors(value):
                self.program.fixed.setdefault(
                    tensor.leaf,
                    (
                        scope or GLOBAL,
                        f"is a parameter of {facts.name!r}, which is called from outside",
                    ),
                )
        for tensor in tensors(facts.value.result):
            self.program.fixed.setdefault(
                tensor.leaf, (GLOBAL, f"is returned by {facts.name!r} to the outside")
            )

    def param_scopes(self, facts: FunctionFacts) -> list[str]:
        count = len(facts.function.params)
        given = (facts.function.attrs or {}).get(PARAM_SCOPES, None)
        if given is None:
            return [""] * count
        scopes = [str(scope) for scope in given]
        if len(scopes) != count:
            raise TransformError(
                f"PlanMemoryScopes: function {facts.name!r} has {count} parameters, and its "
                f"attribute {PARAM_SCOPES!r} names {len(scopes)} scopes; name one for each"
            )
        for scope in scopes:
            self.check_scope(scope, f"the attribute {PARAM_SCOPES!r} of function {facts.name!r}")
        return scopes

    def visit_function(self, facts: FunctionFacts, parent: Region | None) -> None:
        for param, value in zip(facts.function.params, facts.value.params, strict=True):
            self.values[hash(param)] = value
        saved = (getattr(self, "function", None), getattr(self, "region", None), self.index)
        self.function = facts
        body = facts.function.body
        if not isinstance(body, relax.SeqExpr):
            raise TransformError(
                f"PlanMemoryScopes: the body of function {facts.name!r} is a "
                f"{type(body).__name__}, not a sequence of bindings; run relax.transform.Normalize"
            )
        facts.region = self.visit_sequence(body, parent, self.index, 1.0)
        self.leave(facts.region, body.body, facts.value.result, f"result of {facts.name!r}")
        self.function, self.region, self.index = saved  # type: ignore[assignment]

    # Sequences of bindings.

    def visit_sequence(
        self, sequence: relax.SeqExpr, parent: Region | None, at: int, frequency: float
    ) -> Region:
        region = Region(self.function, parent, at, frequency, sequence)
        region.depth = parent.depth + 1 if parent else 0
        for block in sequence.blocks:
            dataflow = isinstance(block, relax.DataflowBlock)
            for binding in block.bindings[:]:
                region.bindings.append(binding)
                region.dataflow.append(dataflow)
        for index, binding in enumerate(region.bindings):
            self.region, self.index = region, index
            self.number += 1
            region.numbers.append(self.number)
            self.visit_binding(binding, binding.value)
        self.region, self.index = region, len(region.bindings)
        self.number += 1
        region.numbers.append(self.number)
        return region

    def leave(self, region: Region, body: relax.Expr, result: Value, what: str) -> None:
        """Note that the value at the end of a region goes on as `result`."""
        value = self.value_of(body)
        for path, tensor, target in pairs(value, result):
            self.program.unite(tensor.leaf, target.leaf)
            self.program.uses.append(
                Use(tensor, region, len(region.bindings), path, what, same=target.leaf)
            )

    def visit_binding(self, binding: relax.Binding, value: relax.Expr) -> None:
        var = binding.var
        kind = type(value)  # told faster than whether it is an instance
        if type(binding) is relax.MatchCast and kind is not relax.Call:
            result = self.rerooted(self.value_of(value), Root(var))
        elif kind is relax.Call:
            result = self.visit_call(var, value)
        elif kind is relax.If:
            result = self.visit_if(var, value)
        elif kind is relax.Function:
            result = self.visit_local_function(var, value)
        elif kind is relax.SeqExpr:
            raise TransformError(
                f"PlanMemoryScopes: in function {self.function.name!r} {var.name} is bound to "
                "a sequence of bindings; run relax.transform.Normalize"
            )
        else:
            result = self.annotated(var, self.value_of(value), (VALUE,))
        self.values[hash(var)] = result

    def visit_if(self, var: relax.Var, value: relax.If) -> Value:
        region, index = self.region, self.index
        result = self.fresh(var.ty, Root(var))
        children = region.children.setdefault(index, [])
        for branch in (value.true_branch, value.false_branch):
            if not isinstance(branch, relax.SeqExpr):
                raise TransformError(
                    f"PlanMemoryScopes: in function {self.function.name!r} a branch of {var.name} "
                    "is no sequence of bindings; run relax.transform.Normalize"
                )
            child = self.visit_sequence(branch, region, index, region.frequency / 2)
            children.append(child)
            self.leave(child, branch.body, result, f"result {var.name} of an if")
        self.region, self.index = region, index
        return result

    def visit_local_function(self, var: relax.Var, value: relax.Function) -> Value:
        facts = self.declare(f"{self.function.name}.{var.name}", value, local=True)
        self.values[hash(var)] = facts.value  # it may call itself
        self.private = True
        region, index = self.region, self.index
        self.visit_function(facts, None)
        self.region, self.index = region, index
        assert facts.region is not None
        facts.region.outer = region
        region.children.setdefault(index, []).append(facts.region)
        return facts.value
