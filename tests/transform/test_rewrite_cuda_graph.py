# SPDX-License-Identifier: Apache-2.0
"""`RewriteCUDAGraph`: what graphs hold, and what they cannot."""

from __future__ import annotations

from typing import Any

import pytest
import tvm
from tvm import relax
from tvm.ir import assert_structural_equal
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from tests.transform.script_forms import alloc, alloc_in, alloc_storage
from tvm_ipc.analysis.walk_and_rewrite_bindings import calls
from tvm_ipc.gpu import RewriteCUDAGraph
from tvm_ipc.transform import collect_report, verify_cross_rank_safety

GRAPHS = {"relax.backend.use_cuda_graph": True}


@I.ir_module
class Exposing:
    """`a` is shown while kernels of static memory go on."""

    @T.prim_func(private=True)
    def step(a: T.Buffer((16,), "float32"), b: T.Buffer((16,), "float32")):
        for i in T.thread_binding(16, thread="threadIdx.x"):
            b[i] = a[i] + T.float32(1)

    @R.function
    def main() -> R.Tensor((16,), "float32"):
        R.func_attr({"relax.force_pure": True})
        cls = Exposing
        s = alloc_storage(512, "ipc_memory")
        a = alloc_in(s, 0, 16)
        b = alloc_in(s, 256, 16)
        _ = cls.step(b, a)
        shown: R.Any = R.call_packed("tvm_ipc.expose", a, 0, ty_args=(R.Any,))
        _1 = cls.step(a, b)
        rows: R.Tensor((16,), "float32") = R.call_packed(
            "tvm_ipc.peer_view", shown, 1, R.shape([16]), ty_args=(R.Tensor((16,), "float32"),)
        )
        out = alloc(16)
        _2 = cls.step(rows, out)
        _3: R.Tuple = R.call_packed("tvm_ipc.release", 0, shown, ty_args=(R.Tuple,))
        _4 = cls.step(b, a)
        return out


@I.ir_module
class Expected:
    @T.prim_func(private=True)
    def step(a: T.Buffer((16,), "float32"), b: T.Buffer((16,), "float32")):
        for i in T.thread_binding(16, thread="threadIdx.x"):
            b[i] = a[i] + T.float32(1)

    @R.function(private=True)
    def cuda_graph_alloc() -> R.Tuple(R.Any):
        R.func_attr({"relax.force_pure": True})
        s = alloc_storage(512, "ipc_memory")
        gv: R.Tuple(R.Any) = (s,)
        return gv

    @R.function(private=True)
    def main_cuda_graph_capture(
        b: R.Tensor((16,), "float32"), a: R.Tensor((16,), "float32")
    ) -> R.Tuple:
        R.func_attr({"relax.force_pure": True})
        cls = Expected
        _ = cls.step(b, a)
        gv: R.Tuple = R.tuple()
        return gv

    @R.function
    def main() -> R.Tensor((16,), "float32"):
        R.func_attr({"relax.force_pure": True})
        cls = Expected
        cached: R.Tuple(R.Any) = R.call_builtin_with_ctx(
            "vm.builtin.cuda_graph.get_cached_alloc",
            (cls.cuda_graph_alloc, 0),
            ty_args=(R.Tuple(R.Any),),
        )
        s: R.Any = cached[0]
        a = alloc_in(s, 0, 16)
        b = alloc_in(s, 256, 16)
        _: R.Tuple = R.call_builtin_with_ctx(
            "vm.builtin.cuda_graph.run_or_capture",
            (cls.main_cuda_graph_capture, (b, a), 0),
            ty_args=(R.Tuple,),
        )
        shown: R.Any = R.call_packed("tvm_ipc.expose", a, 0, ty_args=(R.Any,))
        _1: R.Tuple = R.call_builtin_with_ctx(
            "vm.builtin.cuda_graph.run_or_capture",
            (cls.main_cuda_graph_capture, (a, b), 1),
            ty_args=(R.Tuple,),
        )
        rows: R.Tensor((16,), "float32") = R.call_packed(
            "tvm_ipc.peer_view", shown, 1, R.shape([16]), ty_args=(R.Tensor((16,), "float32"),)
        )
        out = alloc(16)
        _2 = cls.step(rows, out)
        _3: R.Tuple = R.call_packed("tvm_ipc.release", 0, shown, ty_args=(R.Tuple,))
        _4: R.Tuple = R.call_builtin_with_ctx(
            "vm.builtin.cuda_graph.run_or_capture",
            (cls.main_cuda_graph_capture, (b, a), 2),
            ty_args=(R.Tuple,),
        )
        return out


def test_what_peers_are_told_of_is_done_each_time() -> None:
    with tvm.transform.PassContext(config=GRAPHS), collect_report() as report:
        found = RewriteCUDAGraph()(Exposing)
    assert_structural_equal(found, Expected, map_free_vars=True)
    (said,) = report.decisions
    assert (said.pass_name, said.function, said.verdict) == (
        "RewriteCUDAGraph",
        "main",
        "3 captured",
    )
    assert "1 x tvm_ipc.expose and their users stay outside" in said.reason


def test_streams_are_set_each_time() -> None:
    """Kernels on each stream are captured on their own; the host orders the streams."""

    @I.ir_module
    class Module:
        @T.prim_func(private=True)
        def step(a: T.Buffer((16,), "float32"), b: T.Buffer((16,), "float32")):
            for i in T.thread_binding(16, thread="threadIdx.x"):
                b[i] = a[i] + T.float32(1)

        @R.function
        def main(x: R.Tensor((16,), "float32")) -> R.Tensor((16,), "float32"):
            R.func_attr({"relax.force_pure": True})
            cls = Module
            s = alloc_storage(512)
            a = alloc_in(s, 0, 16)
            b = alloc_in(s, 256, 16)
            _: R.Tuple = R.call_packed("tvm_ipc.set_stream", 1, ty_args=(R.Tuple,))
            _1: R.Tuple = R.call_packed("tvm_ipc.wait_stream", 0, ty_args=(R.Tuple,))
            _2 = cls.step(a, a)
            _3: R.Tuple = R.call_packed("tvm_ipc.set_stream", 0, ty_args=(R.Tuple,))
            _4 = cls.step(b, b)
            _5: R.Tuple = R.call_packed("tvm_ipc.wait_stream", 1, ty_args=(R.Tuple,))
            return x

    with tvm.transform.PassContext(config=GRAPHS), collect_report() as report:
        found = RewriteCUDAGraph()(Module)
    (said,) = report.decisions
    assert said.verdict == "2 captured"
    assert "2 x tvm_ipc.set_stream, 2 x tvm_ipc.wait_stream" in said.reason
    names = [
        str(call.op.global_symbol).rpartition(".")[2]
        for call in calls(found["main"])
        if isinstance(call.op, relax.ExternFunc)
    ]
    assert names == ["set_stream", "wait_stream", "set_stream", "wait_stream"]
    assert verify_cross_rank_safety(found) == []


def test_works_are_posted_each_time() -> None:
    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor((16,), "float32")) -> R.Tensor((16,), "float32"):
            R.func_attr({"relax.force_pure": True})
            s = alloc_storage(512, "ipc_memory")
            a = alloc_in(s, 0, 16)
            b = alloc_in(s, 256, 16)
            work: R.Any = R.call_packed(
                "tvm_ipc.start", "tvm_ipc.allreduce", a, 0, 0, 3, 0, b, ty_args=(R.Any,)
            )
            _: R.Tuple = R.call_packed("tvm_ipc.wait", work, ty_args=(R.Tuple,))
            _1: R.Tuple = R.call_packed("tvm_ipc.allreduce", b, 0, 0, 3, 0, a, ty_args=(R.Tuple,))
            return x

    with tvm.transform.PassContext(config=GRAPHS):
        found = RewriteCUDAGraph()(Module)
    main, captured = found["main"].script(), found["main_cuda_graph_capture"].script()
    assert '"tvm_ipc.start"' in main and '"tvm_ipc.wait"' in main
    assert "tvm_ipc.allreduce" in captured  # the state of a collective is on the device
    assert "tvm_ipc.start" not in captured
    assert "tvm_ipc.wait" not in captured


@I.ir_module
class Views:
    """What is between the shows finds places of static memory alone."""

    @R.function
    def main() -> R.Tensor((8,), "float32"):
        R.func_attr({"relax.force_pure": True})
        s = alloc_storage(512, "ipc_memory")
        a = alloc_in(s, 0, 16)
        first: R.Any = R.call_packed("tvm_ipc.expose", a, 0, ty_args=(R.Any,))
        half: R.Tensor((8,), "float32") = R.call_packed(
            "tvm_ipc.view", a, 32, R.shape([8]), ty_args=(R.Tensor((8,), "float32"),)
        )
        second: R.Any = R.call_packed("tvm_ipc.expose", half, 0, ty_args=(R.Any,))
        rows: R.Tensor((8,), "float32") = R.call_packed(
            "tvm_ipc.peer_view", second, 1, R.shape([8]), ty_args=(R.Tensor((8,), "float32"),)
        )
        _: R.Tuple = R.call_packed("tvm_ipc.release", 0, first, second, ty_args=(R.Tuple,))
        return rows


def test_nothing_but_views_is_no_graph() -> None:
    with tvm.transform.PassContext(config=GRAPHS), collect_report() as report:
        found = RewriteCUDAGraph()(Views)
        assert "run_or_capture" in relax.transform.RewriteCUDAGraph()(Views).script()
    assert sorted(one.name_hint for one in found.get_global_vars()) == ["cuda_graph_alloc", "main"]
    relax.analysis.well_formed(found)
    callees = [str(call.op) for call in calls(found["main"])]
    assert callees.count('R.ExternFunc("tvm_ipc.view")') == 1
    assert "run_or_capture" not in found["main"].script()
    assert [one.verdict for one in report.decisions] == ["0 captured"]


def test_sizes_that_graphs_are_captured_for() -> None:
    @I.ir_module
    class Module:
        @T.prim_func(private=True)
        def step(var_a: T.handle, var_b: T.handle):
            n = T.int64()
            a = T.match_buffer(var_a, (n,), "float32")
            b = T.match_buffer(var_b, (n,), "float32")
            for i in T.thread_binding(n, thread="blockIdx.x"):
                b[i] = a[i] + T.float32(1)

        @R.function
        def main(x: R.Tensor(("n",), "float32")) -> R.Tensor(("n",), "float32"):
            n = T.int64()
            R.func_attr(
                {
                    "relax.force_pure": True,
                    "relax.rewrite_cuda_graph.capture_symbolic_vars": ["n"],
                    "tir_var_upper_bound": {"n": 64},
                }
            )
            cls = Module
            s = alloc_storage(512, "ipc_memory")
            a = alloc_in(s, 0, n)
            b = alloc_in(s, 256, n)
            _ = cls.step(x, a)
            _1 = cls.step(a, b)
            shown: R.Any = R.call_packed("tvm_ipc.expose", b, 0, ty_args=(R.Any,))
            _2: R.Tuple = R.call_packed("tvm_ipc.release", 0, shown, ty_args=(R.Tuple,))
            half: R.Tensor((n,), "float32") = R.call_packed(
                "tvm_ipc.view", a, 0, R.shape([n]), ty_args=(R.Tensor((n,), "float32"),)
            )
            other: R.Any = R.call_packed("tvm_ipc.expose", half, 0, ty_args=(R.Any,))
            _3: R.Tuple = R.call_packed("tvm_ipc.release", 0, other, ty_args=(R.Tuple,))
            return x

    with tvm.transform.PassContext(config=GRAPHS), collect_report() as report:
        found = RewriteCUDAGraph()(Module)
    text = found.script()
    assert "run_or_capture" in text
    assert "tvm_ipc.expose" in found["main"].script()
    held = {one.name_hint for one in found.get_global_vars() if "capture" in one.name_hint}
    assert not any("tvm_ipc.expose" in found[name].script() for name in held)
    assert [one.verdict for one in report.decisions] == [f"{len(held)} captured"]


@pytest.mark.parametrize("config", [{}, {"relax.backend.use_cuda_graph": False}])
def test_without_graphs_nothing_changes(config: dict[str, Any]) -> None:
    with tvm.transform.PassContext(config=config), collect_report() as report:
        assert RewriteCUDAGraph()(Exposing).same_as(Exposing)
    assert not report.decisions


def test_what_has_no_shows_becomes_what_tvm_makes_of_it() -> None:
    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor((16,), "float32")) -> R.Tensor((16,), "float32"):
            R.func_attr({"relax.force_pure": True})
            s = alloc_storage(512, "ipc_memory")
            a = alloc_in(s, 0, 16)
            b = alloc_in(s, 256, 16)
            _: R.Tuple = R.call_packed(
                "runtime.disco.allreduce", a, 0, False, b, ty_args=(R.Tuple,)
            )
            return x

    with tvm.transform.PassContext(config=GRAPHS):
        assert_structural_equal(
            RewriteCUDAGraph()(Module), relax.transform.RewriteCUDAGraph()(Module)
        )


@I.ir_module
class Counting:
    """Rows of static memory are sent by counts that kernels compute."""

    @T.prim_func(private=True)
    def step(a: T.Buffer((16,), "float32"), b: T.Buffer((16,), "float32")):
        for i in T.thread_binding(16, thread="threadIdx.x"):
            b[i] = a[i] + T.float32(1)

    @R.function
    def main() -> R.Tensor((16,), "float32"):
        R.func_attr({"relax.force_pure": True})
        cls = Counting
        s = alloc_storage(512, "ipc_memory")
        a = alloc_in(s, 0, 16)
        b = alloc_in(s, 128, 16)
        counts = R.memory.alloc_tensor(s, 256, R.shape([2]), "int64")
        received = R.memory.alloc_tensor(s, 384, R.shape([2]), "int64")
        _ = cls.step(b, a)
        _1: R.Tuple = R.call_packed(
            "tvm_ipc.ragged_all_to_all", a, counts, 0, 0, b, received, ty_args=(R.Tuple,)
        )
        out = alloc(16)
        _2 = cls.step(b, out)
        return out


def test_counts_are_read_in_each_call() -> None:
    with tvm.transform.PassContext(config=GRAPHS), collect_report() as report:
        captured = RewriteCUDAGraph()(Counting)
    outside = [str(call.op) for call in calls(captured["main"])]
    assert any("tvm_ipc.ragged_all_to_all" in name for name in outside)
    assert all(
        "ragged" not in captured[name].script()
        for name in captured.get_global_vars()
        if "capture" in str(name.name_hint)
    )
    (decision,) = report.decisions
    assert "1 x tvm_ipc.ragged_all_to_all" in decision.reason
