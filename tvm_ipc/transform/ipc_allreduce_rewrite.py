# SPDX-License-Identifier: Apache-2.0
"""Rewrites all-reduces to those that read their inputs where they lie, in memory that peers map.

Before:
    x = R.builtin.alloc_tensor(R.shape([4]), "float32", 0, "global")
    cls.f(p, x)
    R.call_packed("runtime.disco.allreduce", x, R.shape([0]), False, y)

After:
    x = R.builtin.alloc_tensor(R.shape([4]), "float32", 0, "ipc_memory")
    cls.f(p, x)
    R.call_packed("runtime.disco.cuda_ipc.custom_allreduce", x, 1, y)

Sums over all workers of a session without groups take upstream's form. Other reductions, and those
of sessions with groups, become "tvm_ipc.allreduce", which carries the reduction and the group.
Those of `tvm_ipc.comm` over other teams, and works, are calls of it already. They get the strategy
if theirs is "auto", which leaves it open.
Then `PlanMemoryScopes` puts inputs where they must be: the tensor is allocated there, or copied if
it is a parameter, say. The runtime never writes an input, so one that is needed later is safe.

Runs after `CallTIRRewrite` and before `StaticPlanBlockMemory`.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax

from tvm_ipc import arguments
from tvm_ipc.comm.operator import NAME as COLLECTIVE
from tvm_ipc.contract import REDUCED_TYPES, AllReduceStrategy, CollectiveFlag, ReduceKind, Team
from tvm_ipc.contract.collectives import ALLREDUCE, CUSTOM_ALLREDUCE, DISCO_ALLREDUCE
from tvm_ipc.contract.programs import POST
from tvm_ipc.transform.collection import no_collection
from tvm_ipc.transform.ir.collectives import Collective, match_collective, match_post, post_of
from tvm_ipc.transform.ir.rewrite import change_functions, rewrite, with_value
from tvm_ipc.transform.module_pass import module_pass, option
from tvm_ipc.transform.plan_memory_scopes import plan_memory_scopes
from tvm_ipc.transform.report import Decision, collecting, note
from tvm_ipc.transform.scopes.demands import ScopeRegistry

_NAME = "IPCAllReduceRewrite"


def _strategy(_: str, given: object) -> AllReduceStrategy:
    return AllReduceStrategy.of(given)


@module_pass
class IPCAllReduceRewrite:
    """Rewrite all-reduces to read their inputs where they lie, in memory that peers map.

    Parameters
    ----------
    allreduce_strategy : an `AllReduceStrategy`, or the number or name of one: 0 "ring",
        1 "oneshot", 2 "twoshot", 3 "auto", which is by size.
    num_groups : the number of groups of the session that will run the program.
    registry : demands for scopes; the default one if None.
    """

    allreduce_strategy: AllReduceStrategy | int | str = option(_strategy)
    num_groups: int = option(
        arguments.integer, "a number of groups, 1 or more", 1, default=1, kw_only=True
    )
    registry: ScopeRegistry | None = option(
        arguments.instance,
        ScopeRegistry,
        "a ScopeRegistry, or None for the one that all share",
        default=None,
        kw_only=True,
    )

    def apply(self, mod: tvm.IRModule) -> tvm.IRModule:
        """Return the rewritten module, with the inputs of its all-reduces in their scope."""
        strategy = AllReduceStrategy.of(self.allreduce_strategy)
        with no_collection():
            rewritten = rewrite_allreduces(mod, strategy, self.num_groups)
            return plan_memory_scopes(rewritten, self.registry)


@no_collection()
def rewrite_allreduces(
    module: tvm.IRModule, strategy: AllReduceStrategy, num_groups: int = 1
) -> tvm.IRModule:
    """Return the module with all-reduces that read their inputs where they lie.

    Where these lie is left to `plan_memory_scopes`.
    """

    def rewritten(name: str, function: relax.Function) -> relax.Function:
        def change(binding: relax.Binding, value: relax.Expr) -> list[relax.Binding] | None:
            new = _rewritten(name, value, strategy, num_groups)
            return None if new is None else [with_value(binding, new)]

        return rewrite(function, change)

    return change_functions(module, rewritten)


def _rewritten(
    function: str, call: relax.Expr, strategy: AllReduceStrategy, num_groups: int
) -> relax.Expr | None:
    """Return what an all-reduce of a function becomes, or None for what stays as it is."""
    if type(call) is not relax.Call:
        return None
    op = call.op
    if type(op) is tvm.ir.GlobalVar:  # most are, and to tell takes the least time
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
    if symbol == POST.name:
        posted = _with_strategy(function, match_post(call), strategy)
        return None if posted is None else post_of(posted)
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
    given: dict[str, int] = {"strategy": strategy, "flags": CollectiveFlag.NONE}
    if num_groups == 1:
        given["team"] = Team.WORLD
    if collective.kind == ReduceKind.SUM and num_groups == 1:
        target, reason = CUSTOM_ALLREDUCE, "a sum over all workers"
    else:
        world = given.get("team", collective.team) == Team.WORLD
        over = "all workers" if world else "the workers of each group"
        target, reason = ALLREDUCE, f"{collective.kind.name.lower()} over {over}"
    if collecting():
        note(Decision(_NAME, function, str(collective), "rewritten", f"{reason}: {target.name}"))
    return collective.as_call_of(target, given)


def _with_strategy(
    function: str, collective: Collective | None, strategy: AllReduceStrategy
) -> relax.Call | None:
    """Return a call of an all-reduce with the strategy, if it leaves that open."""
    if collective is None or collective.function is not ALLREDUCE:
        return None
    if strategy == AllReduceStrategy.AUTO or collective.numbers["strategy"] != strategy.AUTO:
        return None
    if collecting():
        reason = f"its strategy is {strategy.name.lower()}"
        note(Decision(_NAME, function, str(collective), "rewritten", reason))
    return collective.as_call_of(ALLREDUCE, {"strategy": strategy})


def _leave(function: str, subject: str, reason: str) -> None:
    note(Decision(_NAME, function, subject, "left alone", reason))


def _obstacle(collective: Collective, kind: ReduceKind) -> str:
    """Return why an all-reduce stays with the ordinary function, or nothing."""
    function = collective.function
    for what, names in (("input", function.reads), ("output", function.writes)):
        (tensor,) = collective.operands(names)
        ty = tensor.ty
        if not isinstance(ty, relax.TensorType) or ty.dtype is None or int(ty.ndim) < 0:
            return f"the type of its {what} says not enough of it to allocate a copy: {ty}"
        dtype = str(ty.dtype.dtype)
        if dtype not in REDUCED_TYPES:
            return f"the runtime does not reduce {dtype}"
        if not kind.takes(dtype):
            return "there is no average of bool"
    return ""


def _symbol(expr: Any) -> str:
    return str(expr.global_symbol) if isinstance(expr, relax.ExternFunc) else ""
