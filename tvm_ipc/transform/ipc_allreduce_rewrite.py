# SPDX-License-Identifier: Apache-2.0
"""The pass `IPCAllReduceRewrite`, which lets all-reduces read their inputs from peers' memory."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax

from tvm_ipc import arguments
from tvm_ipc.analysis.collective_calls import Collective, match_collective, match_start, start_of
from tvm_ipc.analysis.walk_and_rewrite_bindings import change_functions, rewrite, with_value
from tvm_ipc.comm.collective_relax_op import NAME as COLLECTIVE
from tvm_ipc.packed_functions import (
    AllReduceStrategy,
    CollectiveFlag,
    ReduceKind,
    Team,
)
from tvm_ipc.packed_functions.collective_declarations import (
    ALLREDUCE,
    CUSTOM_ALLREDUCE,
    DISCO_ALLREDUCE,
)
from tvm_ipc.packed_functions.program_function_declarations import START
from tvm_ipc.transform.gc_paused import gc_paused
from tvm_ipc.transform.memory_scopes.operator_scope_demands import ScopeRegistry
from tvm_ipc.transform.module_pass import ModulePass, module_pass, option
from tvm_ipc.transform.plan_memory_scopes import plan_memory_scopes
from tvm_ipc.transform.report import Decision, collecting, note

_NAME = "IPCAllReduceRewrite"


def _strategy(_: str, value: object) -> AllReduceStrategy:
    return AllReduceStrategy.of(value)


@module_pass
class IPCAllReduceRewrite(ModulePass):
    """Rewrite all-reduces so that each rank reads the inputs of its peers in place.

    Before:

        x = R.builtin.alloc_tensor(R.shape([4]), "float32", 0, "global")
        cls.f(p, x)
        R.call_packed("runtime.disco.allreduce", x, R.shape([0]), True, y)

    After:

        x = R.builtin.alloc_tensor(R.shape([4]), "float32", 0, "ipc_memory")
        cls.f(p, x)
        R.call_packed("runtime.disco.cuda_ipc.custom_allreduce", x, 1, y)

    Like TVM's pass, it makes sums in the group calls of `custom_allreduce`, as above, which sums
    over the workers of the caller's group. If a session has one group, these are all workers. Sums
    over all workers (`in_group=False`) and other reductions become calls of `tvm_ipc.allreduce`,
    which has arguments for the reduction, the team and the exit barrier. TVM's pass drops
    `in_group`. All-reduces of `tvm_ipc.comm` over other teams, and asynchronous all-reduces,
    already call `tvm_ipc.allreduce`. This pass sets their strategy if it is "auto".

    The pass then plans memory scopes as `PlanMemoryScopes` does. Inputs are allocated in
    `ipc_memory`, which peers can read, or copied there if that is impossible, for example if they
    are parameters. The runtime never writes to an input, so the program may use it afterwards.

    Run this pass after `CallTIRRewrite` and before `StaticPlanBlockMemory`.

    Parameters
    ----------
    allreduce_strategy : an `AllReduceStrategy`, or its number or name: 0 "default", 1 "oneshot",
        2 "twoshot", or 3 "auto", which selects by size and number of ranks.
    num_groups : the number of groups of the session that will run the program, or None if it is
        unknown. The results do not depend on it. With 1, all-reduces in the group are over all
        workers, so `StaticPlanBlockMemory` can drop more exit barriers. With a number, all
        all-reduces become calls of `tvm_ipc.allreduce`.
    registry : the scopes and demands to use. None selects those that were registered with
        `register_scope` and `demand_scope`.

    Examples
    --------
    >>> import tvm
    >>> from tvm.relax.transform import CallTIRRewrite, RemovePurityChecking, ToNonDataflow
    >>> from tvm_ipc.transform import IPCAllReduceRewrite, LegalizeOps
    >>> mod = tvm.script.from_source('''
    ... @I.ir_module
    ... class Model:
    ...     @R.function
    ...     def main(x: R.Tensor((4,), "float32")):
    ...         return R.ccl.allreduce(R.exp(x), "sum")
    ... ''')
    >>> passes = [LegalizeOps(), ToNonDataflow(), RemovePurityChecking(), CallTIRRewrite()]
    >>> mod = tvm.transform.Sequential([*passes, IPCAllReduceRewrite("auto")])(mod)
    >>> mod.script().count("runtime.disco.cuda_ipc.custom_allreduce")
    1
    """

    allreduce_strategy: AllReduceStrategy | int | str = option(_strategy)
    num_groups: int | None = option(
        arguments.integer, "a number of groups, 1 or more, or None", 1, default=None, kw_only=True
    )
    registry: ScopeRegistry | None = option(
        arguments.instance,
        ScopeRegistry,
        "a ScopeRegistry, or None for the one that all share",
        default=None,
        kw_only=True,
    )

    @gc_paused()
    def apply(self, mod: tvm.IRModule) -> tvm.IRModule:
        """Return the module with rewritten all-reduces, whose inputs are in the scope they need."""
        strategy = AllReduceStrategy.of(self.allreduce_strategy)
        rewritten = rewrite_allreduces(mod, strategy, self.num_groups)
        return plan_memory_scopes(rewritten, self.registry)


@gc_paused()
def rewrite_allreduces(
    module: tvm.IRModule, strategy: AllReduceStrategy, num_groups: int | None = None
) -> tvm.IRModule:
    """Return the module with all-reduces that read their inputs in place.

    The caller plans the memory scopes of the inputs with `plan_memory_scopes`.
    """

    def rewrite_function(name: str, function: relax.Function) -> relax.Function:
        def change(binding: relax.Binding, value: relax.Expr) -> list[relax.Binding] | None:
            new = _rewrite_call(name, value, strategy, num_groups)
            return None if new is None else [with_value(binding, new)]

        return rewrite(function, change)

    return change_functions(module, rewrite_function)


def _rewrite_call(
    function: str, call: relax.Expr, strategy: AllReduceStrategy, num_groups: int | None
) -> relax.Expr | None:
    """Return the new form of an all-reduce, or None for an expression that does not change."""
    if type(call) is not relax.Call:
        return None
    op = call.op
    if type(op) is tvm.ir.GlobalVar:  # the most frequent case, and the cheapest check
        return None
    if type(op) is tvm.ir.Op:
        name = str(op.name)
        is_comm = name == COLLECTIVE and call.attrs.kind == "allreduce"
        if is_comm or name == "relax.ccl.allreduce":
            _leave(function, "allreduce", "it is not lowered yet; run LegalizeOps before")
        elif name == "relax.call_dps_packed" and _symbol(call.args[0]) == DISCO_ALLREDUCE.name:
            reason = "its output is not allocated; run CallTIRRewrite before"
            _leave(function, "allreduce", reason)
        return None
    symbol = _symbol(op)
    if symbol == ALLREDUCE.name:
        return _with_strategy(function, match_collective(call), strategy)
    if symbol == START.name:
        started = _with_strategy(function, match_start(call), strategy)
        return None if started is None else start_of(started)
    if symbol != DISCO_ALLREDUCE.name:
        return None
    collective = match_collective(call)
    if collective is None or collective.kind is None:
        _leave(function, "allreduce", f"its arguments are not those of an all-reduce: {call}")
        return None
    reason = _obstacle(collective, collective.kind)
    if reason:
        _leave(function, str(collective), reason)
        return None
    values: dict[str, int] = {"strategy": strategy, "flags": CollectiveFlag.NONE}
    if num_groups == 1:
        values["team"] = Team.WORLD
    is_group_sum = collective.kind == ReduceKind.SUM and collective.team == Team.GROUP
    target = CUSTOM_ALLREDUCE if num_groups is None and is_group_sum else ALLREDUCE
    if collecting():
        is_world = values.get("team", collective.team) == Team.WORLD
        workers = "all workers" if is_world else "the workers of each group"
        reason = f"{collective.kind.name.lower()} over {workers}, which {target.name} computes"
        note(Decision(_NAME, function, str(collective), "rewritten", reason))
    return collective.as_call_of(target, values)


def _with_strategy(
    function: str, collective: Collective | None, strategy: AllReduceStrategy
) -> relax.Call | None:
    """Return an all-reduce with the strategy if its own is "auto", and None otherwise."""
    if collective is None or collective.function is not ALLREDUCE:
        return None
    if strategy == AllReduceStrategy.AUTO or collective.numbers["strategy"] != strategy.AUTO:
        return None
    if collecting():
        reason = f"its strategy is {strategy.name.lower()}"
        note(Decision(_NAME, function, str(collective), "rewritten", reason))
    return collective.as_call_of(ALLREDUCE, {"strategy": strategy})


def _leave(function: str, subject: str, reason: str) -> None:
    note(Decision(_NAME, function, subject, "skipped", reason))


def _obstacle(collective: Collective, kind: ReduceKind) -> str:
    """Return why an all-reduce cannot be rewritten, or "" if it can."""
    function = collective.function
    for role, names in (("input", function.reads), ("output", function.writes)):
        (tensor,) = collective.operands(names)
        ty = tensor.ty
        if not isinstance(ty, relax.TensorType) or ty.dtype is None or int(ty.ndim) < 0:
            return f"the type of its {role} does not suffice to allocate a copy: {ty}"
        dtype = str(ty.dtype.dtype)
        if not kind.takes(dtype):
            return kind.refusal(dtype)
    return ""


def _symbol(expr: Any) -> str:
    return str(expr.global_symbol) if isinstance(expr, relax.ExternFunc) else ""
