# SPDX-License-Identifier: Apache-2.0
"""The pass `StaticPlanBlockMemory`, which plans the memory of every function."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax, tirx

from tvm_ipc import arguments
from tvm_ipc.analysis.alias_facts import Allocation
from tvm_ipc.analysis.binding_builders import do, dtype_of
from tvm_ipc.analysis.branch_collective_groups import Counterparts
from tvm_ipc.analysis.ffi_arrays import as_list
from tvm_ipc.analysis.find_aliases import ModuleAliasFacts
from tvm_ipc.analysis.program_order import Step
from tvm_ipc.analysis.walk_and_rewrite_bindings import (
    Edits,
    begin_with,
    change_functions,
    with_value,
)
from tvm_ipc.packed_functions import CollectiveFlag
from tvm_ipc.packed_functions.program_function_declarations import REQUIRE_BOUNDS
from tvm_ipc.transform.gc_paused import gc_paused
from tvm_ipc.transform.memory_plan.plan_function_storages import NewStorage, Plan, plan_function
from tvm_ipc.transform.memory_plan.plan_report import decisions, function_plan
from tvm_ipc.transform.memory_plan.redundant_exit_barriers import ExitBarriers
from tvm_ipc.transform.module_pass import ModulePass, module_pass, option
from tvm_ipc.transform.report import collecting, note, note_plan
from tvm_ipc.tvm_moved_names import StringImm

_STORAGE = tvm.ir.Op.get("relax.memory.alloc_storage")
_TENSOR = tvm.ir.Op.get("relax.memory.alloc_tensor")
_KILL = tvm.ir.Op.get("relax.memory.kill_storage")
_KILL_TENSOR = tvm.ir.Op.get("relax.memory.kill_tensor")
_REQUIRE_BOUNDS = relax.ExternFunc(REQUIRE_BOUNDS.name)
_DYNAMIC_OUTPUT = "relax.memory_plan_dynamic_func_output"


def plan_memory(
    mod: tvm.IRModule,
    *,
    packed: bool = False,
    alignment: int = 64,
    barrier_budget: int | None = None,
) -> list[Plan]:
    """Return the memory plan of every Relax function, without changing the module.

    Parameters
    ----------
    mod : a module in destination-passing form, as for `StaticPlanBlockMemory`.
    packed : see `StaticPlanBlockMemory`.
    alignment : see `StaticPlanBlockMemory`.
    barrier_budget : see `StaticPlanBlockMemory`.

    Returns
    -------
    list of Plan
        A plan for each Relax function, with its tensors and storages.

    Examples
    --------
    >>> import tvm
    >>> from tvm_ipc.transform import plan_memory
    >>> mod = tvm.script.from_source('''
    ... @I.ir_module
    ... class Model:
    ...     @R.function(pure=False)
    ...     def main(x: R.Tensor((64,), "float32")):
    ...         a = R.builtin.alloc_tensor(R.shape([64]), R.dtype("float32"), 0, "global")
    ...         R.call_packed("tvm_ipc.copy", x, a, ty_args=(R.Tuple,))
    ...         b = R.builtin.alloc_tensor(R.shape([64]), R.dtype("float16"), 0, "global")
    ...         R.call_packed("tvm_ipc.clear", b, ty_args=(R.Tuple,))
    ...         return R.tuple()
    ... ''')
    >>> (plan,) = plan_memory(mod, packed=True)
    >>> len(plan.tensors), len(plan.storages)
    (2, 1)
    """
    arguments.instance("plan_memory: mod", mod, tvm.IRModule, "an IRModule")
    packed = arguments.flag("plan_memory: packed", packed)
    alignment = _alignment("plan_memory: alignment", alignment)
    barrier_budget = _budget("plan_memory: barrier_budget", barrier_budget)
    module = ModuleAliasFacts(mod)
    exit_barriers, counterparts = ExitBarriers(module), Counterparts(module)
    return [
        plan_function(
            module,
            exit_barriers,
            counterparts,
            name,
            alignment=alignment if packed else None,
            budget=barrier_budget,
        )
        for name, function in module.functions.items()
        if isinstance(function, relax.Function)
    ]


def _alignment(name: str, value: object) -> int:
    """Return an alignment, or raise an error that names the argument."""
    wanted = "a number of bytes that is a power of two, at most 2**30"
    number = arguments.integer(name, value, wanted, 1, 1 << 30)
    if number & (number - 1):
        raise arguments.wrong_value(name, wanted, value)
    return number


def _budget(name: str, value: object) -> int | None:
    """Return a budget, or raise an error that names the argument."""
    wanted = "a number of bytes, 0 or more and below 2**63, or None"
    return None if value is None else arguments.integer(name, value, wanted, 0, (1 << 63) - 1)


@module_pass
class StaticPlanBlockMemory(ModulePass):
    """Plan the memory of every function: let tensors share storages, and omit exit barriers.

    Before:

        a = R.builtin.alloc_tensor(R.shape([64]), "float32", 0, "global")
        cls.f(x, a)
        b = R.builtin.alloc_tensor(R.shape([64]), "float16", 0, "global")
        cls.g(a, b)
        c = R.builtin.alloc_tensor(R.shape([32]), "float32", 0, "global")
        cls.h(b, c)

    After `StaticPlanBlockMemory()`, tensors of one type reuse whole storages. TVM's own
    `StaticPlanBlockMemory` returns plans of the same form, so the same passes lower both:

        storage = R.memory.alloc_storage(R.shape([256]), 0, "global", "uint8")
        a = R.memory.alloc_tensor(storage, 0, R.shape([64]), "float32", 0)
        cls.f(x, a)
        storage1 = R.memory.alloc_storage(R.shape([128]), 0, "global", "uint8")
        b = R.memory.alloc_tensor(storage1, 0, R.shape([64]), "float16", 0)
        cls.g(a, b)
        c = R.memory.alloc_tensor(storage, 0, R.shape([32]), "float32", 0)
        cls.h(b, c)

    After `StaticPlanBlockMemory(packed=True)`, tensors of any type share one storage, at offsets.
    `tvm_ipc.transform.LowerGPUIPCAllocStorage` or `LowerPackedAllocTensor` must lower this plan:

        storage = R.memory.alloc_storage(R.shape([384]), 0, "global", "uint8")
        a = R.memory.alloc_tensor(storage, 0, R.shape([64]), "float32", 0)
        cls.f(x, a)
        b = R.memory.alloc_tensor(storage, 256, R.shape([64]), "float16", 0)
        cls.g(a, b)
        c = R.memory.alloc_tensor(storage, 0, R.shape([32]), "float32", 0)
        cls.h(b, c)

    If peers read the input of a collective in place, the input is live until all of them have read
    it. A collective usually ends with an exit barrier, which waits for these reads. If every path
    from such a collective reaches another one that synchronizes the same ranks, the pass omits the
    exit barrier of the first, and keeps its input live until the second returns:

        R.call_packed("tvm_ipc.allreduce", s, 0, 0, 3, 1, x)        # flag 1: no exit barrier
        ...
        R.call_packed("runtime.disco.allgather", y, 0, z)
        R.memory.kill_storage(storage)                              # the storage of s

    If tensors share a storage, and their offsets rely on the bounds of a shape variable (the
    function attribute `tir_var_upper_bound`), the function first checks the bounds:

        R.call_packed("tvm_ipc.require_bounds", "main: n", n, 0, 16)

    Tensors that may be referenced after the function returns keep their `builtin.alloc_tensor`.

    Run this pass after `CallTIRRewrite` (and `IPCAllReduceRewrite`), which insert the allocations,
    and before `LowerGPUIPCAllocStorage` and `KillAfterLastUse`.

    Parameters
    ----------
    packed : whether tensors may have offsets in a storage. This takes less memory. It needs
        `LowerGPUIPCAllocStorage` or `LowerPackedAllocTensor` of this package, because kernels
        reject the tensors that TVM's own passes create at an offset.
    alignment : the alignment of offsets in bytes: 64 is suitable for CPUs, and 256 for GPUs.
    barrier_budget : the number of bytes by which the `ipc_memory` of a function may grow so that
        exit barriers can be omitted. With 0, a barrier is omitted only if that takes no more
        memory. With None, the default, the memory may grow by one buffer: the largest input of the
        collectives whose exit barriers could be omitted. Storages of symbolic size grow only if
        this is None, because their sizes cannot be compared with a number of bytes.

    Examples
    --------
    Two tensors of different types share a storage, because only one of them is live at a time.

    >>> import tvm
    >>> from tvm_ipc.transform import StaticPlanBlockMemory
    >>> mod = tvm.script.from_source('''
    ... @I.ir_module
    ... class Model:
    ...     @R.function(pure=False)
    ...     def main(x: R.Tensor((64,), "float32")):
    ...         a = R.builtin.alloc_tensor(R.shape([64]), R.dtype("float32"), 0, "global")
    ...         R.call_packed("tvm_ipc.copy", x, a, ty_args=(R.Tuple,))
    ...         b = R.builtin.alloc_tensor(R.shape([64]), R.dtype("float16"), 0, "global")
    ...         R.call_packed("tvm_ipc.clear", b, ty_args=(R.Tuple,))
    ...         return R.tuple()
    ... ''')
    >>> planned = StaticPlanBlockMemory(packed=True)(mod)
    >>> planned.script().count("R.memory.alloc_storage")
    1
    """

    packed: bool = option(arguments.flag, default=False, kw_only=True)
    alignment: int = option(_alignment, default=64, kw_only=True)
    barrier_budget: int | None = option(_budget, default=None, kw_only=True)

    @gc_paused()
    def apply(self, mod: tvm.IRModule) -> tvm.IRModule:
        """Return the module with the plan of every function applied."""
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
    edits = Edits()
    for allocation in plan.offset_in:
        edits.replace(allocation.step.var, [_alloc_tensor(plan, variables, allocation)])
    for step, flags in _changed_flags(plan).items():
        assert step.collective is not None
        edits.replace(step.var, [with_value(step.binding, step.collective.with_flags(flags))])
    for storage in plan.storages:
        allocation = _alloc_storage(plan, variables[storage], storage)
        edits.insert_before(storage.before.var, [allocation])
        if storage.kill_after is not None:
            edits.insert_after(storage.kill_after.var, [do(_KILL, [variables[storage]])])
    for allocation in plan.unplanned:
        last = None if allocation.returned else plan.on_streams.last_step(allocation)
        if last is not None:
            edits.insert_after(last.var, [do(_KILL_TENSOR, [allocation.step.var])])
    function = _with_required_bounds(edits.apply(plan.facts.program.function), plan)
    return function.without_attr(_DYNAMIC_OUTPUT) if plan.drops_attribute else function


def _with_required_bounds(function: relax.Function, plan: Plan) -> relax.Function:
    """Return a function that first checks the bounds that tensors in shared storages rely on.

    A tensor larger than its bounds allow would overlap its neighbor. A tensor that does not share
    its storage needs no check here, because its allocation checks that it fits in the storage.
    """
    shared = {storage for storage, offset in plan.offset_in.values() if offset}
    extents = (
        extent
        for allocation, (storage, _offset) in plan.offset_in.items()
        if storage in shared
        for extent in as_list(plan.tensors[allocation].arguments[0].values)
    )
    checks = []
    for var, least, most in plan.sizes.bounds(extents):
        label = StringImm(f"{plan.facts.program.name}: {var.name}")
        numbers = [relax.prim_value(value) for value in (var, least, most)]
        checks.append(do(_REQUIRE_BOUNDS, [label, *numbers]))
    return begin_with(function, checks) if checks else function


def _changed_flags(plan: Plan) -> dict[Step, CollectiveFlag]:
    """Return the new flags of the collectives whose flags change."""
    barrier = CollectiveFlag.NO_EXIT_BARRIER
    flags = {}
    for step in [*plan.without_barrier, *plan.with_barrier]:
        collective = step.collective
        assert collective is not None and collective.flags is not None
        old = collective.flags
        if step in plan.without_barrier:
            new = old | barrier
        elif any(plan.facts.objects(x) & plan.offset_in.keys() for x in collective.peers_read):
            new = old & ~barrier  # other tensors may reuse the memory of its input now
        else:
            continue
        if new != old:
            flags[step] = new
    for group in [*plan.groups, *([step] for step in plan.cross_function)]:
        omitted = [step for step in group if barrier in flags.get(step, _old_flags(step))]
        if len(omitted) < len(group) or group[0] in plan.cross_function:
            flags |= {step: flags.get(step, _old_flags(step)) & ~barrier for step in omitted}
    return flags


def _old_flags(step: Step) -> CollectiveFlag:
    """Return the flags of a collective before this pass."""
    assert step.collective is not None
    return step.collective.flags or CollectiveFlag.NONE


def _alloc_storage(plan: Plan, var: Any, storage: NewStorage) -> relax.Binding:
    size = plan.sizes.expr(storage.size.factor, storage.size.unit)
    if storage.early and not plan.sizes.is_sum(storage.size.unit):
        # The storage is allocated before a branch. If the branch does not run, the extents of its
        # tensors may be negative.
        size = tirx.Max(size, tirx.IntImm("int64", 0))
    arguments = [
        relax.ShapeExpr([size]),
        relax.prim_value(storage.device),
        StringImm(storage.scope),
        dtype_of("uint8"),
    ]
    return relax.VarBinding(var, relax.Call(_STORAGE, arguments, ret_ty=relax.AnyType()))


def _alloc_tensor(plan: Plan, variables: dict[NewStorage, Any], allocation: Allocation) -> Any:
    storage, offset = plan.offset_in[allocation]
    step = allocation.step
    shape, dtype, device, *_ = plan.tensors[allocation].arguments
    start = plan.sizes.expr(offset, storage.size.unit)
    arguments = [variables[storage], start, shape, dtype, device]
    call = relax.Call(_TENSOR, arguments, ret_ty=step.var.ty)
    return relax.VarBinding(step.var, call)
