# SPDX-License-Identifier: Apache-2.0
"""Plans the memory scope of every tensor.

Before:
    x = R.builtin.alloc_tensor(R.shape([4]), "float32", 0, "global")
    cls.f(p, x)
    R.call_packed("runtime.disco.cuda_ipc.custom_allreduce", x, 1, y)
    R.call_packed("runtime.disco.cuda_ipc.custom_allreduce", p, 1, z)     # p is a parameter

After:
    x = R.builtin.alloc_tensor(R.shape([4]), "float32", 0, "ipc_memory")
    cls.f(p, x)
    R.call_packed("runtime.disco.cuda_ipc.custom_allreduce", x, 1, y)
    p_ipc = R.builtin.alloc_tensor(R.shape([4]), "float32", 0, "ipc_memory")
    R.call_packed("tvm_ipc.copy", p, p_ipc)
    R.call_packed("runtime.disco.cuda_ipc.custom_allreduce", p_ipc, 1, z)
"""

from __future__ import annotations

import tvm

from tvm_ipc.transform.report import Decision, note
from tvm_ipc.transform.scopes.collect import collect
from tvm_ipc.transform.scopes.demands import DEFAULT_REGISTRY, ScopeRegistry
from tvm_ipc.transform.scopes.effects import Effects
from tvm_ipc.transform.scopes.place import Plan, place_copies
from tvm_ipc.transform.scopes.primfunc import PrimFuncs
from tvm_ipc.transform.scopes.rewrite import Rewriter
from tvm_ipc.transform.scopes.sizes import describe, find_frequencies
from tvm_ipc.transform.scopes.solve import solve

_NAME = "PlanMemoryScopes"


@tvm.transform.module_pass(opt_level=0, name=_NAME)
class PlanMemoryScopes:
    """Give every tensor the scope that is demanded of it, with a copy where demands clash."""

    def __init__(self, registry: ScopeRegistry | None = None) -> None:
        if registry is not None and not isinstance(registry, ScopeRegistry):
            raise TypeError(f"registry is a ScopeRegistry, not {type(registry).__name__}")
        self.registry = registry

    def transform_module(
        self, mod: tvm.IRModule, _context: tvm.transform.PassContext
    ) -> tvm.IRModule:
        """Return the module with scopes planned; the one that was given is as it was."""
        return plan_memory_scopes(mod, self.registry)


def plan_memory_scopes(module: tvm.IRModule, registry: ScopeRegistry | None = None) -> tvm.IRModule:
    """Return a module in which every demand for a scope is met."""
    registry = registry or DEFAULT_REGISTRY
    program = collect(module, registry)
    primfuncs = PrimFuncs(module)
    find_frequencies(program)
    solution = solve(program, registry, primfuncs, Effects(program, primfuncs))
    plan = place_copies(solution)
    rewriter = Rewriter(solution, plan, {})
    if not rewriter.changes:
        return module
    result = module.clone()
    for name, function in rewriter.functions():
        result.update_func(result.get_global_var(name), function)
    _report(plan)
    return result


def _report(plan: Plan) -> None:
    for copy in [*plan.copies, *plan.results, *plan.around]:
        fixed = ", ".join(dict.fromkeys(use.what for use in copy.uses))
        note(
            Decision(
                _NAME,
                copy.region.function.name,
                copy.tensor.root.name,
                "copied",
                f"{describe(copy.tensor.root.ty)} from {copy.source_scope} to {copy.scope} for "
                f"{fixed}",
            )
        )
