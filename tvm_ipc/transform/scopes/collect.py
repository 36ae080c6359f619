# SPDX-License-Identifier: Apache-2.0
"""Collects the facts of a module: its tensor values, and what each place needs of them."""

from __future__ import annotations

import tvm
from tvm import relax

from tvm_ipc.errors import TransformError
from tvm_ipc.transform.ir.program import Region, Step, linearise
from tvm_ipc.transform.scopes.calls import Calls
from tvm_ipc.transform.scopes.demands import GLOBAL, ScopeRegistry
from tvm_ipc.transform.scopes.facts import (
    VALUE,
    FunctionFacts,
    FunctionValue,
    ScopedUse,
    ScopeFacts,
    TensorRoot,
    Value,
    pairs,
    tensors,
)
from tvm_ipc.transform.scopes.primfunc import PARAM_SCOPES, PrimFuncs


def collect(
    module: tvm.IRModule, registry: ScopeRegistry, primfuncs: PrimFuncs, *, every: bool
) -> ScopeFacts:
    """Return the facts of a module, or raise a TransformError that names what is malformed.

    Calls that demand nothing are left out, unless some scope is opaque or `every` one is asked for:
    they take what they get.
    """
    program = _Collector(module, registry, primfuncs, every).run()
    if program.opaque and not every:
        program = _Collector(module, registry, primfuncs, True).run()
    return program


class _Collector(Calls):
    def run(self) -> ScopeFacts:
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
            self.visit_function(facts)
        for facts in self.program.functions:
            if facts.value.escapes:
                self.fix_boundary(facts)
        scopes = {scope for scope, _ in self.program.fixed.values()}
        scopes.update(use.exact for use in self.program.uses if use.exact is not None)
        self.program.opaque = not all(self.registry.scopes[scope] for scope in scopes)
        return self.program

    # Functions.

    def declare(self, name: str, function: relax.Function, *, local: bool) -> FunctionFacts:
        if not isinstance(function.body, relax.SeqExpr):
            raise TransformError(
                f"PlanMemoryScopes: the body of function {name!r} is a "
                f"{type(function.body).__name__}, not a sequence of bindings; run "
                "relax.transform.Normalize"
            )
        params = tuple(self.fresh(param.ty, TensorRoot(param)) for param in function.params)
        # Nothing is read from the root of a result.
        returned = self.fresh(function.ret_ty, TensorRoot(relax.Var(name)))
        value = FunctionValue(name, params, returned, local)
        result = FunctionFacts(name, function, value, linearise(name, function))
        attrs = function.attrs or {}
        result.pure = bool(function.is_pure) and not bool(attrs.get("relax.force_pure", False))
        bounds = attrs.get("tir_var_upper_bound", None)
        result.bounds = {str(k): int(v) for k, v in bounds.items()} if bounds else {}
        self.program.functions.append(result)
        return result

    def fix_boundary(self, facts: FunctionFacts) -> None:
        given = self.param_scopes(facts)
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

    def visit_function(self, facts: FunctionFacts) -> None:
        for param, value in zip(facts.function.params, facts.value.params, strict=True):
            self.values[hash(param)] = value
        self.function = facts
        self.visit_region(facts.program.body)
        result, what = facts.value.result, f"result of {facts.name!r}"
        self.leave(facts.program.body, facts.function.body.body, result, what)

    # Sequences of bindings.

    def visit_region(self, region: Region) -> None:
        for step in self.function.program.steps[region]:
            self.step = step
            self.values[hash(step.var)] = self.visit_binding(step)

    def leave(self, region: Region, body: relax.Expr, result: Value, what: str) -> None:
        """Note that the value at the end of a region goes on as `result`."""
        for path, tensor, target in pairs(self.value_of(body), result):
            use = ScopedUse(tensor, self.function, region, None, path, what, same=target.leaf)
            self.program.uses.append(use)

    def visit_binding(self, step: Step) -> Value:
        var, value = step.var, step.value
        kind = type(value)  # told faster than whether it is an instance
        if type(step.binding) is relax.MatchCast and kind is not relax.Call:
            return self.rerooted(self.value_of(value), TensorRoot(var))
        if kind is relax.Call:
            return self.visit_call(var, value)
        if kind is relax.If:
            return self.visit_if(step)
        if kind is relax.Function:
            return self.visit_local_function(step)
        if kind is relax.SeqExpr:
            raise TransformError(
                f"PlanMemoryScopes: in function {self.function.name!r} {var.name} is bound to "
                "a sequence of bindings; run relax.transform.Normalize"
            )
        return self.annotated(var, self.value_of(value), (VALUE,))

    def visit_if(self, step: Step) -> Value:
        var, value = step.var, step.value
        result = self.fresh(var.ty, TensorRoot(var))
        for region, branch in zip(
            step.branches, (value.true_branch, value.false_branch), strict=True
        ):
            if not isinstance(branch, relax.SeqExpr):
                raise TransformError(
                    f"PlanMemoryScopes: in function {self.function.name!r} a branch of {var.name} "
                    "is no sequence of bindings; run relax.transform.Normalize"
                )
            self.visit_region(region)
            self.leave(region, branch.body, result, f"result {var.name} of an if")
        return result

    def visit_local_function(self, step: Step) -> Value:
        outer = self.function
        facts = self.declare(f"{outer.name}.{step.var.name}", step.value, local=True)
        self.values[hash(step.var)] = facts.value  # it may call itself
        self.private = True
        self.visit_function(facts)
        self.function, self.step = outer, step
        facts.outer = outer
        return facts.value
