# SPDX-License-Identifier: Apache-2.0
"""Plans where tensors lie: which share a storage, as long as peers may read them.

Before:
    a = R.builtin.alloc_tensor(R.shape([64]), "float32", 0, "global")
    cls.f(x, a)
    b = R.builtin.alloc_tensor(R.shape([64]), "float16", 0, "global")
    cls.g(a, b)
    c = R.builtin.alloc_tensor(R.shape([32]), "float32", 0, "global")
    cls.h(b, c)

After `StaticPlanBlockMemory()`, as after TVM's: whole storages go from tensor to tensor of a type,
and any pass that lowers TVM's plans lowers this one:
    storage = R.memory.alloc_storage(R.shape([256]), 0, "global", "uint8")
    a = R.memory.alloc_tensor(storage, 0, R.shape([64]), "float32", 0)
    cls.f(x, a)
    storage1 = R.memory.alloc_storage(R.shape([128]), 0, "global", "uint8")
    b = R.memory.alloc_tensor(storage1, 0, R.shape([64]), "float16", 0)
    cls.g(a, b)
    c = R.memory.alloc_tensor(storage, 0, R.shape([32]), "float32", 0)
    cls.h(b, c)

After `StaticPlanBlockMemory(packed=True)`: tensors of any type lie in one storage, at offsets that
`LowerGPUIPCAllocStorage` or `LowerPackedAllocTensor` of ours must lower:
    storage = R.memory.alloc_storage(R.shape([384]), 0, "global", "uint8")
    a = R.memory.alloc_tensor(storage, 0, R.shape([64]), "float32", 0)
    cls.f(x, a)
    b = R.memory.alloc_tensor(storage, 256, R.shape([64]), "float16", 0)
    cls.g(a, b)
    c = R.memory.alloc_tensor(storage, 0, R.shape([32]), "float32", 0)
    cls.h(b, c)

The input of a collective that peers read in place is live until all have read it. Where a later
collective that all of them pass proves it, the input stays until that one has returned, and the
first loses its exit barrier:

    R.call_packed("tvm_ipc.allreduce", s, 0, 0, 3, 1, x)        # flag 1: no exit barrier
    ...
    R.call_packed("runtime.disco.allgather", y, 0, z)
    R.memory.kill_storage(storage)                              # of s, not before

Where tensors side by side rely on `tir_var_upper_bound`, the function begins with a check of it:
    R.call_packed("tvm_ipc.require_bounds", "main: n", n, 0, 16)

Tensors that somebody may hold after the function keep their `builtin.alloc_tensor`.

Runs after `CallTIRRewrite` (and `IPCAllReduceRewrite`), which make the allocations; before
`LowerGPUIPCAllocStorage` and `KillAfterLastUse`.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax, tirx

from tvm_ipc import arguments
from tvm_ipc.contract import CollectiveFlag, programs
from tvm_ipc.transform.collection import no_collection
from tvm_ipc.transform.ir.aliases import ModuleFacts
from tvm_ipc.transform.ir.build import do, dtype_of
from tvm_ipc.transform.ir.program import Step
from tvm_ipc.transform.ir.rewrite import begin_with, change_functions, rewrite, with_value
from tvm_ipc.transform.ir.roots import Allocation
from tvm_ipc.transform.memory.describe import decisions, function_plan
from tvm_ipc.transform.memory.peers import Meetings
from tvm_ipc.transform.memory.plan import NewStorage, Plan, plan_function
from tvm_ipc.transform.module_pass import module_pass, option
from tvm_ipc.transform.report import collecting, note, note_plan

_STORAGE = tvm.ir.Op.get("relax.memory.alloc_storage")
_TENSOR = tvm.ir.Op.get("relax.memory.alloc_tensor")
_KILL = tvm.ir.Op.get("relax.memory.kill_storage")
_REQUIRE_BOUNDS = relax.ExternFunc(programs.REQUIRE_BOUNDS.name)
_DYNAMIC_OUTPUT = "relax.memory_plan_dynamic_func_output"


def plan_memory(
    mod: tvm.IRModule,
    *,
    packed: bool = False,
    alignment: int = 64,
    barrier_budget: int | None = None,
) -> list[Plan]:
    """Return the plan of every Relax function; changes nothing."""
    arguments.instance("plan_memory: mod", mod, tvm.IRModule, "an IRModule")
    packed = arguments.flag("plan_memory: packed", packed)
    alignment = _alignment("plan_memory: alignment", alignment)
    barrier_budget = _budget("plan_memory: barrier_budget", barrier_budget)
    module = ModuleFacts(mod)
    meetings = Meetings(module)
    return [
        plan_function(
            module,
            meetings,
            name,
            alignment=alignment if packed else None,
            budget=barrier_budget,
        )
        for name, function in module.functions.items()
        if isinstance(function, relax.Function)
    ]


def _alignment(name: str, given: object) -> int:
    wanted = "a number of bytes that is a power of two, at most 2**30"
    number = arguments.integer(name, given, wanted, 1, 1 << 30)
    if number & (number - 1):
        raise arguments.wrong_value(name, wanted, given)
    return number


def _budget(name: str, given: object) -> int | None:
    wanted = "a number of bytes, 0 or more and below 2**63, or None"
    return None if given is None else arguments.integer(name, given, wanted, 0, (1 << 63) - 1)


@module_pass
class StaticPlanBlockMemory:
    """Plan the memory of every function.

    Parameters
    ----------
    packed : whether tensors may lie at offsets of a storage. That takes less memory, and needs
        `LowerGPUIPCAllocStorage` or `LowerPackedAllocTensor` of this package later: kernels refuse
        what TVM's passes make of an offset.
    alignment : what offsets are multiples of, in bytes: 64 suits CPUs, 256 GPUs.
    barrier_budget : by how many bytes a storage of `ipc_memory` may grow so that collectives can
        leave out their exit barriers; 0 leaves out those that cost nothing. The default is the
        largest input of a collective that could do without, in that storage: one more buffer. A
        storage whose size is symbolic grows by the default or not at all.
    """

    packed: bool = option(arguments.flag, default=False, kw_only=True)
    alignment: int = option(_alignment, default=64, kw_only=True)
    barrier_budget: int | None = option(_budget, default=None, kw_only=True)

    def apply(self, mod: tvm.IRModule) -> tvm.IRModule:
        """Return the module with every plan applied."""
        with no_collection():
            plans = plan_memory(
                mod,
                packed=self.packed,
                alignment=self.alignment,
                barrier_budget=self.barrier_budget,
            )
            by_name = {plan.facts.program.name: plan for plan in plans}
            result = change_functions(mod, lambda name, _: _apply(by_name[name]))
        if collecting():
            for plan in plans:
                for decision in decisions(plan):
                    note(decision)
                note_plan(function_plan(plan))
        return result


def _apply(plan: Plan) -> relax.Function:
    """Return the function with the storages of the plan."""
    variables = {
        storage: relax.Var(f"storage{number or ''}", relax.AnyType())
        for number, storage in enumerate(plan.storages)
    }
    bindings: dict[Step, list[relax.Binding]] = {}
    for allocation in plan.place:
        bindings[allocation.step] = [_alloc_tensor(plan, variables, allocation)]
    for step, flags in _flags(plan).items():
        assert step.collective is not None
        bindings[step] = [with_value(step.binding, step.collective.with_flags(flags))]
    for storage in reversed(plan.storages):
        first = bindings.setdefault(storage.before, [storage.before.binding])
        first.insert(0, _alloc_storage(plan, variables[storage], storage))
    for storage in plan.storages:
        if storage.kill_after is not None:
            last = bindings.setdefault(storage.kill_after, [storage.kill_after.binding])
            last.append(do(_KILL, [variables[storage]]))
    # By their addresses, which the function keeps where they are.
    replaced = {step.binding.__chandle__(): new for step, new in bindings.items()}
    function = plan.facts.program.function
    if replaced:
        function = rewrite(function, lambda binding, _: replaced.get(binding.__chandle__()))
    function = _with_required_bounds(function, plan)
    return function.without_attr(_DYNAMIC_OUTPUT) if plan.drops_attribute else function


def _with_required_bounds(function: relax.Function, plan: Plan) -> relax.Function:
    """Let the function check the bounds on which tensors rely that lie side by side.

    Beyond them a tensor would reach into its neighbour. What has a storage to itself needs no
    check: that it is in the storage is checked when it is made.
    """
    shared = {storage for storage, offset in plan.place.values() if offset}
    extents = (
        extent
        for one, (storage, _offset) in plan.place.items()
        if storage in shared
        for extent in plan.tensors[one].arguments[0].values
    )
    checks = []
    for var, least, most in plan.sizes.bounds(extents):
        what = tvm.ir.StringImm(f"{plan.facts.program.name}: {var.name}")
        arguments = [what, *(relax.prim_value(one) for one in (var, least, most))]
        checks.append(do(_REQUIRE_BOUNDS, arguments))
    return begin_with(function, checks) if checks else function


def _flags(plan: Plan) -> dict[Step, CollectiveFlag]:
    """Return the flags of the collectives that have other ones now."""
    barrier = CollectiveFlag.NO_EXIT_BARRIER
    flags = {}
    for step in [*plan.without_barrier, *plan.with_barrier]:
        collective = step.collective
        assert collective is not None and collective.flags is not None
        given = collective.flags
        if step in plan.without_barrier:
            wanted = given | barrier
        elif any(plan.facts.roots(one) & plan.place.keys() for one in collective.peers_read):
            wanted = given & ~barrier  # others may use the memory of its input now
        else:
            continue
        if wanted != given:
            flags[step] = wanted
    return flags


def _alloc_storage(plan: Plan, var: Any, storage: NewStorage) -> relax.Binding:
    size = plan.sizes.expr(storage.size.factor, storage.size.unit)
    if storage.early and not plan.sizes.is_sum(storage.size.unit):
        # The tensors may never be there, and then nothing says that their extents have a size.
        size = tirx.Max(size, tirx.IntImm("int64", 0))
    arguments = [
        relax.ShapeExpr([size]),
        relax.prim_value(storage.device),
        tvm.ir.StringImm(storage.scope),
        dtype_of("uint8"),
    ]
    return relax.VarBinding(var, relax.Call(_STORAGE, arguments, ret_ty=relax.AnyType()))


def _alloc_tensor(plan: Plan, variables: dict[NewStorage, Any], allocation: Allocation) -> Any:
    storage, offset = plan.place[allocation]
    step = allocation.step
    shape, dtype, device, *_ = plan.tensors[allocation].arguments
    at = plan.sizes.expr(offset, storage.size.unit)
    call = relax.Call(_TENSOR, [variables[storage], at, shape, dtype, device], ret_ty=step.var.ty)
    return relax.VarBinding(step.var, call)
