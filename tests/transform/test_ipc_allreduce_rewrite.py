# SPDX-License-Identifier: Apache-2.0
"""IPCAllReduceRewrite: what upstream's pass does, and every all-reduce that it leaves behind."""

from __future__ import annotations

import pytest
import tvm
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from tvm_ipc.transform import IPCAllReduceRewrite, collect_report


def rewrite(module: tvm.IRModule, strategy: int = 1, **options: int) -> tvm.IRModule:
    return IPCAllReduceRewrite(strategy, **options)(module)


@I.ir_module
class Summed:
    """The input is an allocation that is reached through a variable."""

    @R.function(pure=False)
    def main(shape: R.Shape(["m", "n"])):
        m = T.int64()
        n = T.int64()
        x: R.Tensor((m, n), "float16") = R.builtin.alloc_tensor(
            R.shape([m, n]), R.dtype("float16"), R.prim_value(0), R.str("global")
        )
        send: R.Tensor((m, n), "float16") = x
        recv: R.Tensor((m, n), "float16") = R.builtin.alloc_tensor(
            R.shape([m, n]), R.dtype("float16"), R.prim_value(0), R.str("global")
        )
        _: R.Any = R.call_packed(
            "runtime.disco.allreduce", send, R.shape([0]), R.prim_value(True), recv
        )
        return recv


@pytest.mark.parametrize("strategy", range(4))
def test_a_sum_reads_its_input_where_peers_map_it(strategy):
    @I.ir_module
    class Expected:
        @R.function(pure=False)
        def main(shape: R.Shape(["m", "n"])):
            m = T.int64()
            n = T.int64()
            x: R.Tensor((m, n), "float16") = R.builtin.alloc_tensor(
                R.shape([m, n]), R.dtype("float16"), R.prim_value(0), R.str("ipc_memory")
            )
            send: R.Tensor((m, n), "float16") = x
            recv: R.Tensor((m, n), "float16") = R.builtin.alloc_tensor(
                R.shape([m, n]), R.dtype("float16"), R.prim_value(0), R.str("global")
            )
            _: R.Any = R.call_packed(
                "runtime.disco.cuda_ipc.custom_allreduce", send, R.prim_value(strategy), recv
            )
            return recv

    tvm.ir.assert_structural_equal(rewrite(Summed, strategy), Expected)


def test_the_scope_is_found_through_a_reshape():
    @I.ir_module
    class Before:
        @R.function(pure=False)
        def main(shape: R.Shape(["m", "n"])):
            m = T.int64()
            n = T.int64()
            x: R.Tensor((m, n), "float16") = R.builtin.alloc_tensor(
                R.shape([m, n]), R.dtype("float16"), R.prim_value(0), R.str("global")
            )
            send: R.Tensor((m * n,), "float16") = R.reshape(x, (m * n,))
            recv: R.Tensor((m * n,), "float16") = R.builtin.alloc_tensor(
                R.shape([m * n]), R.dtype("float16"), R.prim_value(0), R.str("global")
            )
            _: R.Any = R.call_packed(
                "runtime.disco.allreduce", send, R.shape([0]), R.prim_value(False), recv
            )
            return recv

    @I.ir_module
    class Expected:
        @R.function(pure=False)
        def main(shape: R.Shape(["m", "n"])) -> R.Tensor(("m * n",), "float16"):
            m = T.int64()
            n = T.int64()
            x: R.Tensor((m, n), "float16") = R.builtin.alloc_tensor(
                R.shape([m, n]), R.dtype("float16"), R.prim_value(0), R.str("ipc_memory")
            )
            send: R.Tensor((m * n,), "float16") = R.reshape(x, R.shape([m * n]))
            recv: R.Tensor((m * n,), "float16") = R.builtin.alloc_tensor(
                R.shape([m * n]), R.dtype("float16"), R.prim_value(0), R.str("global")
            )
            _: R.Any = R.call_packed(
                "runtime.disco.cuda_ipc.custom_allreduce", send, R.prim_value(1), recv
            )
            return recv

    tvm.ir.assert_structural_equal(rewrite(Before), Expected)


def test_a_parameter_is_copied_first():
    @I.ir_module
    class Before:
        @R.function(pure=False)
        def main(x: R.Tensor((4, "n"), "float32")):
            n = T.int64()
            recv: R.Tensor((4, n), "float32") = R.builtin.alloc_tensor(
                R.shape([4, n]), R.dtype("float32"), R.prim_value(0), R.str("global")
            )
            _: R.Any = R.call_packed(
                "runtime.disco.allreduce", x, R.shape([0]), R.prim_value(False), recv
            )
            return recv

    @I.ir_module
    class Expected:
        @R.function(pure=False)
        def main(x: R.Tensor((4, "n"), "float32")):
            n = T.int64()
            recv: R.Tensor((4, n), "float32") = R.builtin.alloc_tensor(
                R.shape([4, n]), R.dtype("float32"), R.prim_value(0), R.str("global")
            )
            x_ipc = R.builtin.alloc_tensor(
                R.shape([4, n]),
                R.dtype("float32"),
                R.prim_value(0),
                R.str("ipc_memory"),
            )
            _c: R.Any = R.call_packed("tvm_ipc.copy", x, x_ipc, ty_args=(R.Any,))
            _: R.Any = R.call_packed(
                "runtime.disco.cuda_ipc.custom_allreduce", x_ipc, R.prim_value(1), recv
            )
            return recv

    with collect_report() as report:
        after = rewrite(Before)
    tvm.ir.assert_structural_equal(after, Expected)
    verdicts = {
        decision.subject: (decision.verdict, decision.reason) for decision in report.decisions
    }
    assert verdicts["x"][0] == "copied" and verdicts["x"][1].startswith("n * 16 bytes from global")
    assert verdicts["allreduce of x (sum)"][0] == "rewritten"


def test_twice_is_once():
    once = rewrite(Summed)
    tvm.ir.assert_structural_equal(rewrite(once), once)


@pytest.mark.parametrize("strategy", [-1, 4, 1.5, "auto", None, True])
def test_refused_because_the_strategy_is_unknown(strategy):
    with pytest.raises(ValueError, match=r"0 \(ring\), 1 \(oneshot\), 2 \(twoshot\), 3 \(auto\)"):
        IPCAllReduceRewrite(strategy)


@pytest.mark.parametrize("groups", [0, -1, 1.5, "2", True])
def test_refused_because_the_number_of_groups_is_none(groups):
    with pytest.raises(ValueError, match="num_groups is a number of groups"):
        IPCAllReduceRewrite(1, num_groups=groups)
