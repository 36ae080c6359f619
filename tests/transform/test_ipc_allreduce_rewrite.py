# SPDX-License-Identifier: Apache-2.0
"""IPCAllReduceRewrite: what upstream's pass does, and every all-reduce that it leaves behind."""

from __future__ import annotations

import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from tvm_ipc.packed_functions import AllReduceStrategy
from tvm_ipc.transform import IPCAllReduceRewrite, PlanMemoryScopes, collect_report
from tvm_ipc.transform.ipc_allreduce_rewrite import rewrite_allreduces


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
                "runtime.disco.allreduce", send, R.shape([0]), R.prim_value(True), recv
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
                "runtime.disco.allreduce", x, R.shape([0]), R.prim_value(True), recv
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


def test_the_rewriting_decides_nothing_about_memory():
    """That is planned afterwards, as it would be for calls that somebody else wrote."""
    rewritten = rewrite_allreduces(Summed, AllReduceStrategy.ONESHOT)
    assert "custom_allreduce" in rewritten.script() and "ipc_memory" not in rewritten.script()
    tvm.ir.assert_structural_equal(PlanMemoryScopes()(rewritten), rewrite(Summed))


def test_twice_is_once():
    once = rewrite(Summed)
    tvm.ir.assert_structural_equal(rewrite(once), once)


def reasons(module: tvm.IRModule, **options: int) -> list[tuple[str, str]]:
    """What was decided of each all-reduce, and why."""
    with collect_report() as report:
        rewrite(module, **options)
    decisions = [d for d in report.decisions if d.pass_name == "IPCAllReduceRewrite"]
    return [(d.verdict, d.reason) for d in decisions]


def reducing(dtype: str, kind: int, in_group: bool = True) -> tvm.IRModule:
    @I.ir_module
    class Module:
        @R.function(pure=False)
        def main(x: R.Tensor((8,), dtype), y: R.Tensor((8,), dtype)):
            _ = R.call_packed(
                "runtime.disco.allreduce", x, R.shape([kind]), R.prim_value(in_group), y
            )
            return R.tuple()

    return Module


def test_other_reductions_carry_what_they_reduce():
    after = rewrite(reducing("float32", 3), 2)
    call = after["main"].body.blocks[0].bindings[-1].value
    assert str(call.op.global_symbol) == "tvm_ipc.allreduce"
    assert [int(arg.value) for arg in call.args[1:5]] == [3, 1, 2, 0]  # max, group, two-shot, none


@pytest.mark.parametrize("kind", [0, 3, 8])
@pytest.mark.parametrize("in_group", [True, False])
def test_the_call_keeps_in_group(kind, in_group):
    """`custom_allreduce` sums in the group; all else has an argument for the team."""
    call = rewrite(reducing("float32", kind, in_group), 1)["main"].body.blocks[0].bindings[-1].value
    if kind == 0 and in_group:
        assert str(call.op.global_symbol) == "runtime.disco.cuda_ipc.custom_allreduce"
        assert int(call.args[1].value) == 1
    else:
        assert str(call.op.global_symbol) == "tvm_ipc.allreduce"
        assert [int(arg.value) for arg in call.args[1:5]] == [kind, in_group, 1, 0]


@pytest.mark.parametrize("in_group", [True, False])
def test_with_one_group_it_is_all_workers(in_group):
    after = rewrite(reducing("float32", 0, in_group), 1, num_groups=1)
    call = after["main"].body.blocks[0].bindings[-1].value
    assert str(call.op.global_symbol) == "tvm_ipc.allreduce"
    assert [int(arg.value) for arg in call.args[1:5]] == [0, 0, 1, 0]


@pytest.mark.parametrize("in_group", [True, False])
def test_with_groups_the_call_carries_the_group(in_group):
    after = rewrite(reducing("float32", 0, in_group), 1, num_groups=2)
    call = after["main"].body.blocks[0].bindings[-1].value
    assert str(call.op.global_symbol) == "tvm_ipc.allreduce"
    assert [int(arg.value) for arg in call.args[1:5]] == [0, in_group, 1, 0]


@pytest.mark.parametrize(
    ("dtype", "kind", "reason"),
    [
        ("float8_e4m3fn", 0, "the runtime does not reduce float8_e4m3fn"),
        ("bool", 4, "there is no average of bool"),
        ("float32", 7, "there is no bxor of float32: bitwise reductions take integers"),
        ("float32", 9, "its arguments are not those of an all-reduce"),
    ],
)
def test_left_alone_because_the_runtime_cannot(dtype, kind, reason):
    before = reducing(dtype, kind)
    assert rewrite(before).same_as(before)
    ((verdict, why),) = reasons(before)
    assert verdict == "skipped" and why.startswith(reason)


def test_left_alone_because_it_comes_too_early():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((8,), "float32")):
            y = R.ccl.allreduce(x, "sum", False)
            z = R.call_dps_packed(
                "runtime.disco.allreduce",
                (y, R.shape([0]), R.prim_value(0)),
                out_ty=R.Tensor((8,), "float32"),
            )
            return z

    assert rewrite(Before).same_as(Before)
    assert reasons(Before) == [
        ("skipped", "it is not lowered yet; run LegalizeOps before"),
        ("skipped", "its output is not allocated; run CallTIRRewrite before"),
    ]


def test_left_alone_because_nothing_is_known_of_the_input():
    @I.ir_module
    class Before:
        @R.function(pure=False)
        def main(x: R.Tensor(dtype="float32"), y: R.Tensor((8,), "float32")):
            _ = R.call_packed("runtime.disco.allreduce", x, R.shape([0]), R.prim_value(0), y)
            return R.tuple()

    assert rewrite(Before).same_as(Before)
    assert reasons(Before)[0][1].startswith(
        "the type of its input does not suffice to allocate a copy"
    )


def test_one_call_that_is_bound_twice_is_two_allocations():
    """The same object stands for both, and only one is an input."""
    ty = relax.TensorType((8,), "float32")
    alloc = relax.op.builtin.alloc_tensor(relax.ShapeExpr([8]), "float32", 0, "global")
    send, recv, done = relax.Var("send", ty), relax.Var("recv", ty), relax.Var("_", relax.AnyType())
    args = [send, relax.ShapeExpr([0]), relax.prim_value(0), recv]
    call = relax.Call(relax.ExternFunc("runtime.disco.allreduce"), args, ty_args=[relax.AnyType()])
    pairs = [(send, alloc), (recv, alloc), (done, call)]
    block = relax.BindingBlock([relax.VarBinding(*pair) for pair in pairs])
    main = relax.Function([], relax.SeqExpr([block], recv), ty, is_pure=False)
    module = tvm.IRModule({"main": main.with_attr("global_symbol", "main")})
    bindings = rewrite(relax.transform.Normalize()(module))["main"].body.blocks[0].bindings
    scopes = [str(binding.value.args[3].value) for binding in bindings[:2]]
    assert scopes == ["ipc_memory", "global"]


def test_the_result_does_not_depend_on_what_is_registered(run_python):
    """Without our library, upstream's pass would change nothing."""
    code = """
import tvm
from tests.transform.test_ipc_allreduce_rewrite import Summed, rewrite
name = "runtime.disco.cuda_ipc.custom_allreduce"
print(tvm.get_global_func(name, allow_missing=True) is None)
print("custom_allreduce" in rewrite(Summed).script())
"""
    assert run_python(code, TVM_DEVICE_BACKEND_AUTOLOAD="0").split() == ["True", "True"]


@pytest.mark.parametrize("name", ["default", "oneshot", "twoshot", "auto"])
def test_a_strategy_has_a_name_too(name):
    assert IPCAllReduceRewrite(name).allreduce_strategy == AllReduceStrategy[name.upper()]


@pytest.mark.parametrize("strategy", [-1, 4, 1.5, "fastest", None, True])
def test_refused_because_the_strategy_is_unknown(strategy):
    known = r"'default' \(0\), 'oneshot' \(1\), 'twoshot' \(2\), 'auto' \(3\)"
    with pytest.raises(ValueError, match=rf"no all-reduce strategy .*; there are {known}"):
        IPCAllReduceRewrite(strategy)
