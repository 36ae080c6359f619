# SPDX-License-Identifier: Apache-2.0
"""The pass `RewriteCUDAGraph`, which captures kernels and collectives in CUDA graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

import tvm
from tvm import relax
from tvm.relax.utils import copy_with_new_vars

from tvm_ipc.analysis.binding_builders import replace_call
from tvm_ipc.analysis.views_and_writes_of_calls import name_of_callee, operator_of, viewed
from tvm_ipc.analysis.walk_and_rewrite_bindings import (
    bindings_of,
    calls,
    change_functions,
    relax_functions,
    rewrite,
    with_value,
)
from tvm_ipc.packed_functions import find
from tvm_ipc.transform.module_pass import ModulePass, module_pass
from tvm_ipc.transform.report import Decision, note

_NAME: Final = "RewriteCUDAGraph"
_SWITCH: Final = "relax.backend.use_cuda_graph"
_PURE: Final = tvm.ir.Op.get("relax.call_pure_packed")  # TVM's pass never captures this operator
_RUN: Final = "vm.builtin.cuda_graph.run_or_capture"


@module_pass
class RewriteCUDAGraph(ModulePass):
    """Capture calls in CUDA graphs as TVM's pass does, except those that a graph cannot repeat.

    Before:

        cls.add(a, b, total)
        exposed = R.call_packed("tvm_ipc.expose", total, 0)

    After:

        R.call_builtin_with_ctx(
            "vm.builtin.cuda_graph.run_or_capture", (cls.main_cuda_graph_capture, (a, b, total), 0))
        exposed = R.call_packed("tvm_ipc.expose", total, 0)

    A graph repeats the work of a device, but not that of the host. Collectives are kernels with
    state on the device, so graphs capture them like other kernels. To expose a tensor or to start
    an asynchronous collective, however, hosts must communicate each time, and to send rows by their
    counts, the host must read the counts. Calls that set the stream of a rank, or let streams wait,
    order what the host enqueues, graphs included. TVM's pass captures every packed function with
    static arguments, and would execute these only once. This pass keeps them out of graphs, with
    all calls that depend on an exposed tensor or a request. It also removes graphs that consist
    only of views and would launch no kernel.

    Like TVM's pass, it runs after `StaticPlanBlockMemory` and before allocations are lowered, and
    does nothing unless the pass context has `relax.backend.use_cuda_graph`.

    Examples
    --------
    >>> import tvm
    >>> from tvm_ipc.gpu import RewriteCUDAGraph
    >>> mod = tvm.script.from_source('''
    ... @I.ir_module
    ... class Model:
    ...     @T.prim_func(private=True)
    ...     def add(a: T.Buffer((4,), "float32"), b: T.Buffer((4,), "float32")):
    ...         for i in range(4):
    ...             b[i] = a[i] + T.float32(1)
    ...
    ...     @R.function(pure=False)
    ...     def main():
    ...         cls = Model
    ...         s = R.memory.alloc_storage(R.shape([16]), 0, "global", "uint8")
    ...         a = R.memory.alloc_tensor(s, 0, R.shape([4]), "float32")
    ...         t = R.memory.alloc_storage(R.shape([16]), 0, "global", "uint8")
    ...         b = R.memory.alloc_tensor(t, 0, R.shape([4]), "float32")
    ...         cls.add(a, b)
    ...         cls.add(b, a)
    ...         return R.tuple()
    ... ''')
    >>> with tvm.transform.PassContext(config={"relax.backend.use_cuda_graph": True}):
    ...     captured = RewriteCUDAGraph()(mod)
    >>> captured.script().count("cuda_graph.run_or_capture")
    1
    """

    def apply(self, mod: tvm.IRModule) -> tvm.IRModule:
        """Return the module with captured functions, if the pass context enables CUDA graphs."""
        if not uses_cuda_graphs():
            return mod
        rewritten = relax.transform.RewriteCUDAGraph()(change_functions(mod, _make_pure))
        rewritten = _inline_idle_graphs(rewritten)
        for name, outside in sorted(_count_outside_calls(mod).items()):
            _note(name, rewritten[name], outside)
        return change_functions(rewritten, _make_impure)


def uses_cuda_graphs() -> bool:
    """Return whether the current pass context enables CUDA graphs."""
    return bool(dict(tvm.transform.PassContext.current().config).get(_SWITCH, False))


def stays_outside(call: relax.Call) -> bool:
    """Return whether a call does something on the host that a graph cannot repeat."""
    if not isinstance(call.op, relax.ExternFunc):
        return False
    function = find(str(call.op.global_symbol))
    if function is None:
        return False
    return bool(
        function.exposes or function.starts or function.host_reads or function.orders_streams
    )


def _make_pure(_name: str, function: relax.Function) -> relax.Function:
    """Return a function in which calls that stay outside are pure, so TVM does not capture them."""

    def change(binding: relax.Binding, value: relax.Expr) -> Sequence[relax.Binding] | None:
        if type(value) is not relax.Call or not stays_outside(value):
            return None
        return [with_value(binding, replace_call(value, _PURE, [value.op, *value.args]))]

    return rewrite(function, change)


def _make_impure(_name: str, function: relax.Function) -> relax.Function:
    """Return a function with the changes of `_make_pure` undone."""

    def change(binding: relax.Binding, value: relax.Expr) -> Sequence[relax.Binding] | None:
        if type(value) is not relax.Call or not value.op.same_as(_PURE):
            return None
        callee, *arguments = value.args
        call = replace_call(value, callee, arguments)
        return [with_value(binding, call)] if stays_outside(call) else None

    return rewrite(function, change)


def _inline_idle_graphs(mod: tvm.IRModule) -> tvm.IRModule:
    """Return the module with captured functions that launch no kernel inlined."""
    functions = dict(relax_functions(mod))
    captured = {
        graph
        for function in functions.values()
        for call in calls(function)
        # Graphs that depend on symbolic sizes have a further argument.
        if (graph := _captured(call)) is not None and len(call.args[1].fields) == 3
    }
    idle = {graph for graph in captured if _launches_nothing(functions[graph])}
    if not idle:
        return mod

    def change(binding: relax.Binding, value: relax.Expr) -> Sequence[relax.Binding] | None:
        graph = _captured(value) if type(value) is relax.Call else None
        if graph not in idle:
            return None
        args = value.args[1].fields[1]
        body = copy_with_new_vars(functions[graph])
        body = body.bind_params(dict(zip(body.params, args.fields, strict=True)))
        return [*bindings_of(body.body), with_value(binding, body.body.body)]

    result = change_functions(mod, lambda _, function: rewrite(function, change))
    for graph in idle:
        del result[graph]
    return result


def _launches_nothing(function: relax.Function) -> bool:
    return all(
        viewed(call) is not None or name_of_callee(call.op) == "relax.memory.alloc_tensor"
        for call in calls(function)
    )


def _captured(call: relax.Call) -> tvm.ir.GlobalVar | None:
    """Return the function that a call captures or repeats, None for any other call."""
    if len(call.args) != 2 or operator_of(call) != "relax.call_builtin_with_ctx":
        return None
    callee, args = call.args
    return args.fields[0] if name_of_callee(callee) == _RUN else None


def _count_outside_calls(mod: tvm.IRModule) -> dict[str, Counter[str]]:
    """Return for each function the number of calls that stay outside, by packed function."""
    return {
        str(variable.name_hint): Counter(
            str(call.op.global_symbol) for call in calls(function) if stays_outside(call)
        )
        for variable, function in relax_functions(mod)
    }


def _note(name: str, function: relax.Function, outside: Counter[str]) -> None:
    graphs = sum(_captured(call) is not None for call in calls(function))
    if not graphs and not outside:
        return
    reason = "calls that depend only on static memory are captured"
    if outside:
        listed = ", ".join(f"{count} x {callee}" for callee, count in sorted(outside.items()))
        reason += f"; {listed} and their users stay outside, since the host acts in each call"
    note(Decision(_NAME, name, "CUDA graphs", f"{graphs} captured", reason))
