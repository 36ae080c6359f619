# SPDX-License-Identifier: Apache-2.0
"""TVM's `RewriteCUDAGraph`, and what no graph can hold stays outside of the graphs.

Before:
    cls.add(a, b, part)
    shown = R.call_packed("tvm_ipc.show", part, 0)

After:
    R.call_builtin_with_ctx(
        "vm.builtin.cuda_graph.run_or_capture", (cls.main_cuda_graph_capture, (a, b, part), 0))
    shown = R.call_packed("tvm_ipc.show", part, 0)

A graph repeats what a device did, and nothing that its host did. Collectives are kernels whose
state is on the device, so graphs hold them as they hold other kernels. To show a tensor, or to post
a work, is something between hosts: peers are told of it each time. TVM's pass takes every packed
function with static arguments for something that can be captured, and would have it done once. What
uses a tensor that was shown, or a work, is not static then, and stays outside too. Nor is there a
graph of nothing but views, which would be launched for no kernel.

Runs where TVM's does: after `StaticPlanBlockMemory`, before allocations are lowered. Like TVM's it
does nothing unless the pass context has `relax.backend.use_cuda_graph`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

import tvm
from tvm import relax
from tvm.relax.utils import copy_with_new_vars

from tvm_ipc.contract import find
from tvm_ipc.transform.ir.build import replace_call
from tvm_ipc.transform.ir.rewrite import calls, change_functions, rewrite, with_value
from tvm_ipc.transform.ir.views import VIEWS
from tvm_ipc.transform.module_pass import module_pass
from tvm_ipc.transform.report import Decision, note

_NAME: Final = "RewriteCUDAGraph"
_SWITCH: Final = "relax.backend.use_cuda_graph"
_PURE: Final = tvm.ir.Op.get("relax.call_pure_packed")  # which TVM's pass captures nowhere
_RUN: Final = "vm.builtin.cuda_graph.run_or_capture"
#: What finds a place in memory, and launches nothing.
_ADDRESSES: Final = VIEWS | {"relax.memory.alloc_tensor"}


@module_pass
class RewriteCUDAGraph:
    """Let CUDA graphs hold what depends on nothing but static memory, and what they can hold."""

    def apply(self, mod: tvm.IRModule) -> tvm.IRModule:
        """Return the module with captured functions, where the pass context asks for them."""
        if not dict(tvm.transform.PassContext.current().config).get(_SWITCH, False):
            return mod
        rewritten = relax.transform.RewriteCUDAGraph()(change_functions(mod, _set_apart))
        rewritten = _without_idle_graphs(rewritten)
        for name, outside in sorted(_outside(mod).items()):
            _note(name, rewritten[name], outside)
        return change_functions(rewritten, _as_before)


def stays_outside(call: relax.Call) -> bool:
    """Whether a call begins something that a graph cannot repeat."""
    if not isinstance(call.op, relax.ExternFunc):
        return False
    function = find(str(call.op.global_symbol))
    return function is not None and bool(function.shows or function.posts)


def _set_apart(_name: str, function: relax.Function) -> relax.Function:
    def change(binding: relax.Binding, value: relax.Expr) -> Sequence[relax.Binding] | None:
        if type(value) is not relax.Call or not stays_outside(value):
            return None
        return [with_value(binding, replace_call(value, _PURE, [value.op, *value.args]))]

    return rewrite(function, change)


def _as_before(_name: str, function: relax.Function) -> relax.Function:
    def change(binding: relax.Binding, value: relax.Expr) -> Sequence[relax.Binding] | None:
        if type(value) is not relax.Call or not value.op.same_as(_PURE):
            return None
        callee, *arguments = value.args
        call = replace_call(value, callee, arguments)
        return [with_value(binding, call)] if stays_outside(call) else None

    return rewrite(function, change)


def _without_idle_graphs(mod: tvm.IRModule) -> tvm.IRModule:
    """Return the module with what launches nothing where its graph was."""
    functions = {
        variable: function
        for variable, function in mod.functions_items()
        if isinstance(function, relax.Function)
    }
    captured = {
        graph
        for function in functions.values()
        for call in calls(function)
        # What depends on symbolic sizes is given them, too.
        if (graph := _captured(call)) is not None and len(call.args[1].fields) == 3
    }
    idle = {graph for graph in captured if _launches_nothing(functions[graph])}
    if not idle:
        return mod

    def change(binding: relax.Binding, value: relax.Expr) -> Sequence[relax.Binding] | None:
        graph = _captured(value) if type(value) is relax.Call else None
        if graph not in idle:
            return None
        given = value.args[1].fields[1]
        inside = copy_with_new_vars(functions[graph])
        inside = inside.bind_params(dict(zip(inside.params, given.fields, strict=True)))
        bindings = [one for block in inside.body.blocks for one in block.bindings]
        return [*bindings, with_value(binding, inside.body.body)]

    result = change_functions(mod, lambda _, function: rewrite(function, change))
    for one in idle:
        del result[one]
    return result


def _launches_nothing(function: relax.Function) -> bool:
    return all(_name(call) in _ADDRESSES for call in calls(function))


def _name(call: relax.Call) -> str:
    op = call.op
    return str(getattr(op, "global_symbol", None) or getattr(op, "name", ""))


def _captured(call: relax.Call) -> tvm.ir.GlobalVar | None:
    """Return the function that a call captures, or repeats; None if it is something else."""
    if len(call.args) != 2 or _name(call) != "relax.call_builtin_with_ctx":
        return None
    callee, given = call.args
    is_capture = isinstance(callee, relax.ExternFunc) and str(callee.global_symbol) == _RUN
    return given.fields[0] if is_capture else None


def _outside(mod: tvm.IRModule) -> dict[str, Counter[str]]:
    """Return what stays outside, by function: how often each packed function is called."""
    return {
        str(variable.name_hint): Counter(
            str(call.op.global_symbol) for call in calls(function) if stays_outside(call)
        )
        for variable, function in mod.functions_items()
        if isinstance(function, relax.Function)
    }


def _note(name: str, function: relax.Function, outside: Counter[str]) -> None:
    graphs = sum(_captured(call) is not None for call in calls(function))
    if not graphs and not outside:
        return
    reason = "what depends on static memory alone is captured"
    if outside:
        which = ", ".join(f"{count} x {callee}" for callee, count in sorted(outside.items()))
        reason += f"; outside, with what uses them: {which}, of which peers are told each time"
    note(Decision(_NAME, name, "CUDA graphs", f"{graphs} captured", reason))
