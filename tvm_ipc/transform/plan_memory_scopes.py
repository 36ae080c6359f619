# SPDX-License-Identifier: Apache-2.0
"""The pass `PlanMemoryScopes`, which plans the memory scope of every tensor."""

from __future__ import annotations

import tvm

from tvm_ipc import arguments
from tvm_ipc.transform.gc_paused import gc_paused
from tvm_ipc.transform.memory_scopes.collect import collect
from tvm_ipc.transform.memory_scopes.copy_costs import describe, find_frequencies
from tvm_ipc.transform.memory_scopes.copy_sites import CopyPlan, plan_copies
from tvm_ipc.transform.memory_scopes.copy_validity import CopyValidity
from tvm_ipc.transform.memory_scopes.make_allocations_explicit import lower_calls
from tvm_ipc.transform.memory_scopes.operator_scope_demands import (
    DEFAULT_REGISTRY,
    GLOBAL,
    ScopeRegistry,
)
from tvm_ipc.transform.memory_scopes.rewrite import Rewriter
from tvm_ipc.transform.memory_scopes.scopes_of_prim_func_params import PrimFuncParams
from tvm_ipc.transform.memory_scopes.solve import PLAIN, Solution, is_satisfied, solve
from tvm_ipc.transform.memory_scopes.specialise_primfuncs_for_scopes import (
    SpecialisedCalls,
    specialise_callees,
)
from tvm_ipc.transform.module_pass import ModulePass, module_pass, option
from tvm_ipc.transform.report import Decision, collecting, note

_NAME = "PlanMemoryScopes"


@module_pass
class PlanMemoryScopes(ModulePass):
    """Give every tensor the memory scope that its uses demand, and insert copies where they clash.

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

    Scopes are demanded by

    - operators and packed functions, for an operand or for the result (see `demand_scope`);
    - buffer parameters of PrimFuncs with a scope. A parameter in "global" accepts any scope, unless
      the attribute "tvm_ipc.param_scopes" of the PrimFunc pins it. The attribute lists a scope for
      each parameter, "" where unspecified;
    - allocations in a scope other than "global";
    - the memory scope of a VDevice in a type, and `R.to_vdevice` if only the scope changes;
    - `y = R.hint_on_device(x, device, scope)`, which this pass removes;
    - the attribute "tvm_ipc.param_scopes" of a Relax function, for the arguments of its callers.

    Entry points otherwise take and return "global" memory. Tensors without demands stay in
    "global", and tensors in planned storage keep its scope. A PrimFunc is specialised if an operand
    is in an opaque scope, which code must be compiled for; if that is impossible, the operand is
    copied.

    Run this pass after `CallTIRRewrite` and before `StaticPlanBlockMemory`; calls that still
    allocate their outputs are lowered if there is anything to plan. It cannot allocate in dataflow
    blocks and pure functions. `EraseMemoryScopes` afterwards removes transparent scopes from
    PrimFuncs.

    Parameters
    ----------
    registry : the scopes and demands; None for those of `register_scope` and `demand_scope`.
    specialise_transparent : specialise PrimFuncs also for transparent scopes.

    Raises
    ------
    TransformError
        Demands contradict each other, a scope is unknown, or the module is malformed. The input
        module is unchanged.

    Examples
    --------
    The input of the all-reduce is a parameter, so it is copied:

    >>> import tvm
    >>> from tvm_ipc.transform import PlanMemoryScopes
    >>> mod = tvm.script.from_source('''
    ... @I.ir_module
    ... class Model:
    ...     @R.function(pure=False)
    ...     def main(p: R.Tensor((4,), "float32"), z: R.Tensor((4,), "float32")):
    ...         allreduce = "runtime.disco.cuda_ipc.custom_allreduce"
    ...         R.call_packed(allreduce, p, 1, z, ty_args=(R.Tuple,))
    ...         return z
    ... ''')
    >>> "tvm_ipc.copy" in PlanMemoryScopes()(mod).script()
    True
    """

    registry: ScopeRegistry | None = option(
        arguments.instance,
        ScopeRegistry,
        "a ScopeRegistry, or None for the one that all share",
        default=None,
        kw_only=True,
    )
    specialise_transparent: bool = option(arguments.flag, default=False, kw_only=True)

    @gc_paused()
    def apply(self, mod: tvm.IRModule) -> tvm.IRModule:
        """Return the module with scopes planned."""
        transparent = self.specialise_transparent
        return plan_memory_scopes(mod, self.registry, specialise_transparent=transparent)


@gc_paused()
def plan_memory_scopes(
    module: tvm.IRModule,
    registry: ScopeRegistry | None = None,
    *,
    specialise_transparent: bool = False,
) -> tvm.IRModule:
    """Return a module that satisfies every scope demand; other passes call this function."""
    registry = registry or DEFAULT_REGISTRY
    primfuncs = PrimFuncParams(module)
    program = collect(module, registry, primfuncs, every=specialise_transparent)
    if is_satisfied(program, registry, specialise_transparent):
        return module
    if program.allocating:
        lowered = lower_calls(module, program.allocating)
        return plan_memory_scopes(lowered, registry, specialise_transparent=specialise_transparent)
    find_frequencies(program)
    solution = solve(program, registry, primfuncs, CopyValidity(program, primfuncs, registry))
    plan = plan_copies(solution)
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
    """Note the chosen scopes, the copies and the specialised functions in the report."""
    for leaf, sites in solution.program.allocs.items():
        scope = solution.scopes[leaf]
        if scope in (PLAIN, GLOBAL) or leaf in solution.program.fixed:
            continue
        for function, step in sites:
            _note(function.name, str(step.var.name), f"in {scope}", "calls that use it require it")
    for copy in [*plan.copies, *plan.results, *plan.around]:
        uses = ", ".join(dict.fromkeys(map(str, copy.uses)))
        fixed = solution.program.fixed.get(copy.tensor.leaf)
        origin = f"; it {fixed[1]}" if fixed else ""
        size = describe(copy.tensor.root.ty)
        reason = f"{size} from {copy.source_scope} to {copy.scope} for {uses}{origin}"
        for use in copy.uses:
            if use.param is not None and use.exact is None:
                reason += f"; not specialised: {solution.primfuncs.refusal(*use.param)}"
        _note(copy.function.name, copy.tensor.root.name, "copied", reason)
    for new_name, (name, scopes) in specialised.demands.items():
        accepted = ", ".join(f"{scope} in parameter {k}" for k, scope in scopes)
        _note(name, new_name, "specialised", f"takes {accepted}")


def _note(function: str, subject: str, verdict: str, reason: str) -> None:
    note(Decision(_NAME, function, subject, verdict, reason))
