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

A scope is demanded by

- an operator or packed function, as `demand_scope` says: of an operand, or of its result;
- a buffer parameter of a PrimFunc that has a scope. One in "global" takes any scope, unless the
  attribute "tvm_ipc.param_scopes" of the PrimFunc says so too: a list of a scope a parameter,
  "" where nothing is said;
- an allocation in a scope other than "global";
- the memory scope of a VDevice in a type, and `R.to_vdevice` where only the scope changes;
- an annotation: `y = R.hint_on_device(x, device, scope)`, which this pass takes out, and
  "tvm_ipc.param_scopes" of a Relax function, for what callers hand over.

What is called from outside takes and returns "global" memory otherwise. What nothing is demanded
of stays in "global". A PrimFunc whose operand is in a scope that code must be compiled for is
specialised; one that cannot be gets a copy. What lies in planned storage stays there.

Works on modules after `CallTIRRewrite`, or does what that does if anything is to plan; in dataflow
blocks and pure functions nothing can be allocated. Runs before `StaticPlanBlockMemory`.
`EraseMemoryScopes` then takes scopes of ours out of PrimFuncs.
"""

from __future__ import annotations

import tvm

from tvm_ipc import arguments
from tvm_ipc.transform.collection import no_collection
from tvm_ipc.transform.module_pass import module_pass, option
from tvm_ipc.transform.report import Decision, collecting, note
from tvm_ipc.transform.scopes.collect import collect
from tvm_ipc.transform.scopes.demands import DEFAULT_REGISTRY, GLOBAL, ScopeRegistry
from tvm_ipc.transform.scopes.lower_calls import lower_calls
from tvm_ipc.transform.scopes.place import CopyPlan, place_copies
from tvm_ipc.transform.scopes.primfunc import PrimFuncs
from tvm_ipc.transform.scopes.rewrite import Rewriter
from tvm_ipc.transform.scopes.satisfied import is_satisfied
from tvm_ipc.transform.scopes.sizes import describe, find_frequencies
from tvm_ipc.transform.scopes.solve import PLAIN, Solution, solve
from tvm_ipc.transform.scopes.specialised_calls import SpecialisedCalls, specialise_callees
from tvm_ipc.transform.scopes.staleness import Staleness

_NAME = "PlanMemoryScopes"


@module_pass
class PlanMemoryScopes:
    """Give every tensor the scope that is demanded of it, with a copy where demands clash.

    Parameters
    ----------
    registry : scopes and demands; those of `register_scope` and `demand_scope` if None.
    specialise_transparent : specialise PrimFuncs also for scopes that "global" code works on.

    Raises
    ------
    TransformError
        Demands contradict each other, a scope is unknown, or the module is malformed; the module
        that was given is as it was.
    """

    registry: ScopeRegistry | None = option(
        arguments.instance,
        ScopeRegistry,
        "a ScopeRegistry, or None for the one that all share",
        default=None,
        kw_only=True,
    )
    specialise_transparent: bool = option(arguments.flag, default=False, kw_only=True)

    def apply(self, mod: tvm.IRModule) -> tvm.IRModule:
        """Return the module with scopes planned."""
        transparent = self.specialise_transparent
        with no_collection():
            return plan_memory_scopes(mod, self.registry, specialise_transparent=transparent)


@no_collection()
def plan_memory_scopes(
    module: tvm.IRModule,
    registry: ScopeRegistry | None = None,
    *,
    specialise_transparent: bool = False,
) -> tvm.IRModule:
    """Return a module in which every demand for a scope is met, for passes to build on."""
    registry = registry or DEFAULT_REGISTRY
    primfuncs = PrimFuncs(module)
    program = collect(module, registry, primfuncs, every=specialise_transparent)
    if is_satisfied(program, registry, specialise_transparent):
        return module
    if program.allocating:
        lowered = lower_calls(module, program.allocating)
        return plan_memory_scopes(lowered, registry, specialise_transparent=specialise_transparent)
    find_frequencies(program)
    solution = solve(program, registry, primfuncs, Staleness(program, primfuncs, registry))
    plan = place_copies(solution)
    specialised = specialise_callees(solution, plan, specialise_transparent)
    functions = list(Rewriter(solution, plan, specialised).functions())
    if not functions:
        return module
    result = module.clone()
    for global_var, primfunc in specialised.added.values():
        result[global_var] = primfunc
    for name, function in functions:
        result.update_func(result.get_global_var(name), function)
    for name in specialised.removed:
        del result[name]
    if collecting():
        _report(solution, plan, specialised)
    return result


def _report(solution: Solution, plan: CopyPlan, specialised: SpecialisedCalls) -> None:
    for leaf, sites in solution.program.allocs.items():
        scope = solution.scopes[leaf]
        if scope in (PLAIN, GLOBAL) or leaf in solution.program.fixed:
            continue
        for function, step in sites:
            _note(function.name, str(step.var.name), f"in {scope}", "what uses it needs it there")
    for copy in [*plan.copies, *plan.results, *plan.around]:
        uses = ", ".join(dict.fromkeys(map(str, copy.uses)))
        fixed = solution.program.fixed.get(copy.tensor.leaf)
        because = f"; it {fixed[1]}" if fixed else ""
        size = describe(copy.tensor.root.ty)
        reason = f"{size} from {copy.source_scope} to {copy.scope} for {uses}{because}"
        for use in copy.uses:
            if use.param is not None and use.exact is None:
                reason += f"; not specialised: {solution.primfuncs.refusal(*use.param)}"
        _note(copy.function.name, copy.tensor.root.name, "copied", reason)
    for unique, (name, scopes) in specialised.demands.items():
        taken = ", ".join(f"{scope} in parameter {k}" for k, scope in scopes)
        _note(name, unique, "specialised", f"takes {taken}")


def _note(function: str, subject: str, verdict: str, reason: str) -> None:
    note(Decision(_NAME, function, subject, verdict, reason))
