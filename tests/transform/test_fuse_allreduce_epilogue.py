# SPDX-License-Identifier: Apache-2.0
"""Sums over ranks with the residual and the norm that follow them: what becomes one function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import tvm_ipc
from tests.transform.loads import power
from tvm_ipc import comm
from tvm_ipc.analysis.walk_and_rewrite_bindings import calls
from tvm_ipc.transform import FuseAllReduceEpilogue, collect_report

RMS, LAYER = "tvm_ipc.allreduce_rms_norm", "tvm_ipc.allreduce_layer_norm"


def test_rms_norm() -> None:
    @I.ir_module
    class Before:
        @R.function
        def main(
            part: R.Tensor(("n", 64), "float32"),
            residual: R.Tensor(("n", 64), "float32"),
            w: R.Tensor((64,), "float32"),
        ):
            with R.dataflow():
                total = R.ccl.allreduce(part, "sum", in_group=False)
                x = R.add(residual, total)
                y = R.nn.rms_norm(x, w, axes=[-1], epsilon=0.5)
                out = R.multiply(x, y)
                R.output(out)
            return out

    @I.ir_module
    class Expected:
        @R.function
        def main(
            part: R.Tensor(("n", 64), "float32"),
            residual: R.Tensor(("n", 64), "float32"),
            w: R.Tensor((64,), "float32"),
        ):
            n = T.int64()
            with R.dataflow():
                fused = R.call_dps_packed(
                    "tvm_ipc.allreduce_rms_norm",
                    (part, residual, w, R.prim_value(T.float64(0.5)), 0, 3, 0),
                    out_ty=[R.Tensor((n, 64), "float32"), R.Tensor((n, 64), "float32")],
                )
                x = fused[0]
                y = fused[1]
                out = R.multiply(x, y)
                R.output(out)
            return out

    tvm.ir.assert_structural_equal(FuseAllReduceEpilogue()(Before), Expected)


def test_layer_norm_with_casts_and_weights_that_come_late() -> None:
    """The residual is the first operand, and nothing but the norm uses the sum of both."""

    @I.ir_module
    class Before:
        @R.function
        def main(
            part: R.Tensor((4, 3, 8), "bfloat16"),
            residual: R.Tensor((4, 3, 8), "bfloat16"),
            w: R.Tensor((8,), "bfloat16"),
            b: R.Tensor((8,), "float32"),
        ):
            total = R.ccl.allreduce(part, "sum", in_group=True)
            x = R.add(total, residual)
            wide = R.astype(x, "float32")
            w32 = R.astype(w, "float32")
            y = R.nn.layer_norm(wide, w32, b, axes=[2], epsilon=0.5)
            z = R.astype(y, "float16")
            return z

    @I.ir_module
    class Expected:
        @R.function
        def main(
            part: R.Tensor((4, 3, 8), "bfloat16"),
            residual: R.Tensor((4, 3, 8), "bfloat16"),
            w: R.Tensor((8,), "bfloat16"),
            b: R.Tensor((8,), "float32"),
        ):
            w32 = R.astype(w, "float32")
            fused = R.call_dps_packed(
                "tvm_ipc.allreduce_layer_norm",
                (part, residual, w32, b, R.prim_value(T.float64(0.5)), 1, 2, 0),
                out_ty=[R.Tensor((4, 3, 8), "bfloat16"), R.Tensor((4, 3, 8), "float16")],
            )
            z = fused[1]
            return z

    fused = FuseAllReduceEpilogue("twoshot", num_groups=2)(Before)
    tvm.ir.assert_structural_equal(fused, Expected)


# ---- programs that differ in one thing ----------------------------------------------------------


class Program:
    """Makes a function; what a test changes is one of these methods' arguments."""

    def __init__(self, dtype: str = "float32", shape: tuple[int, ...] = (4, 8)) -> None:
        self.builder = relax.BlockBuilder()
        row = relax.TensorType(shape[-1:], dtype)
        names = ("part", "residual", "w", "b")
        types = (relax.TensorType(shape, dtype),) * 2 + (row, row)
        self.params = [relax.Var(name, ty) for name, ty in zip(names, types, strict=True)]
        self.part, self.residual, self.w, self.b = self.params

    def module(self, body: Callable[[Program], Any], *more: Any) -> tvm.IRModule:
        with self.builder.function("main", [*self.params, *more], pure=False):
            with self.builder.dataflow():
                result = self.builder.emit_output(body(self))
            self.builder.emit_func_output(result)
        return self.builder.get()

    def emit(self, call: Any) -> Any:
        return self.builder.emit(call)

    def total(self, part: Any = None) -> Any:
        return self.emit(relax.op.ccl.allreduce(self.part if part is None else part, "sum", False))

    def add(self, *operands: Any) -> Any:
        return self.emit(relax.op.add(*operands))

    def norm(self, x: Any, w: Any = None) -> Any:
        return self.emit(relax.op.nn.rms_norm(x, self.w if w is None else w, [-1], 1e-5))


def fused(module: tvm.IRModule) -> list[str]:
    """The packed functions that the pass puts in, and those operators that are left."""
    names = []
    for call in calls(FuseAllReduceEpilogue()(module)["main"]):
        name = str(call.op.name)
        names.append(str(call.args[0].global_symbol) if "call_dps" in name else name)
    return [name for name in names if name in (RMS, LAYER) or "allreduce" in name]


def refusal(module: tvm.IRModule) -> str:
    """Why the only all-reduce is left alone; the module stays the object it was."""
    with collect_report() as report:
        result = FuseAllReduceEpilogue()(module)
    assert result.same_as(module)
    (decision,) = report.decisions
    assert decision.verdict == "skipped"
    assert decision.subject.startswith("allreduce of ")
    return decision.reason


def usual(p: Program) -> Any:
    return p.norm(p.add(p.residual, p.total()))


def test_the_report_says_what_was_fused() -> None:
    with collect_report() as report:
        FuseAllReduceEpilogue()(Program().module(usual))
    (decision,) = report.decisions
    assert decision.verdict == "fused"
    assert decision.subject == "allreduce of part (sum)"
    assert decision.reason.endswith(f"and its norm, in {RMS}")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", [(4, 8), (8,), (2, 3, 1), (0, 8)])
def test_types_and_shapes(dtype: str, shape: tuple[int, ...]) -> None:
    assert fused(Program(dtype, shape).module(usual)) == [RMS]


@pytest.mark.parametrize(
    ("team", "num_groups"),
    [("world", 2), ("group", 2), ([[0, 1], [3, 2]], 2), ([[0, 1], [3, 2]], 1)],
)
def test_collectives_of_ours(team: Any, num_groups: int) -> None:
    def body(p: Program) -> Any:
        return p.norm(p.add(p.emit(comm.allreduce(p.part, team=team)), p.residual))

    result = FuseAllReduceEpilogue(num_groups=num_groups)(Program().module(body))
    (call,) = (one for one in calls(result["main"]) if "call_dps" in str(one.op.name))
    given = call.args[1].fields[4]
    if isinstance(team, str):
        assert int(given) == ["world", "group"].index(team)
    else:
        assert [int(one) for one in given.values] == [2, 0, 1, 3, 2]


def test_without_groups_a_sum_in_the_group_is_one_over_all() -> None:
    def body(p: Program) -> Any:
        return p.norm(p.add(p.emit(relax.op.ccl.allreduce(p.part, "sum", True)), p.residual))

    for groups, team in ((1, 0), (2, 1), (None, 1)):
        result = FuseAllReduceEpilogue(num_groups=groups)(Program().module(body))
        (call,) = (one for one in calls(result["main"]) if "call_dps" in str(one.op.name))
        assert int(call.args[1].fields[4]) == team


def test_layers_one_after_the_other() -> None:
    def body(p: Program) -> Any:
        x, y = p.residual, p.part
        for _ in range(3):
            x = p.add(x, p.total(y))
            y = p.norm(x, p.add(p.w, p.w))
        return y

    assert fused(Program().module(body)) == [RMS] * 3


def test_two_norms_of_one_sum() -> None:
    """One is part of the function; the other one reads the new residual."""

    def body(p: Program) -> Any:
        x = p.add(p.residual, p.total())
        return p.emit(relax.op.multiply(p.norm(x), p.norm(x, p.b)))

    module = FuseAllReduceEpilogue()(Program().module(body))
    names = [str(one.op.name) for one in calls(module["main"])]
    assert names == ["relax.call_dps_packed", "relax.nn.rms_norm", "relax.multiply"]


def test_a_sum_of_two_sums() -> None:
    """One of them is the residual of the other one."""

    def body(p: Program) -> Any:
        return p.norm(p.add(p.total(), p.total(p.residual)))

    module = Program().module(body)
    with collect_report() as report:
        assert fused(module) == [RMS, "relax.ccl.allreduce"][::-1]
    reasons = [(one.verdict, one.reason) for one in report.decisions]
    assert reasons[1] == ("skipped", "it is the residual of another sum")


def test_a_cast_that_others_use_stays() -> None:
    def body(p: Program) -> Any:
        x = p.add(p.residual, p.total())
        wide = p.emit(relax.op.astype(x, "float32"))
        y = p.norm(wide, p.emit(relax.op.astype(p.w, "float32")))
        return p.emit(relax.op.multiply(wide, y))

    assert refusal(Program("float16").module(body)) == (
        "the sum is used before a weight of the norm is bound"
    )

    def weight_first(p: Program) -> Any:
        weight = p.emit(relax.op.astype(p.w, "float32"))
        x = p.add(p.residual, p.total())
        wide = p.emit(relax.op.astype(x, "float32"))
        return p.emit(relax.op.multiply(wide, p.norm(wide, weight)))

    module = FuseAllReduceEpilogue()(Program("float16").module(weight_first))
    names = [str(one.op.name).rpartition(".")[2] for one in calls(module["main"])]
    assert names == ["astype", "call_dps_packed", "astype", "multiply"]


# ---- what is left alone -------------------------------------------------------------------------


def test_another_reduction() -> None:
    def body(p: Program) -> Any:
        return p.norm(p.add(p.residual, p.emit(relax.op.ccl.allreduce(p.part, "avg", False))))

    assert refusal(Program().module(body)) == "it is not a sum"


def test_a_sum_that_others_use() -> None:
    def body(p: Program) -> Any:
        total = p.total()
        return p.emit(relax.op.multiply(total, p.norm(p.add(p.residual, total))))

    reason = "the addition is not the only use of its result"
    assert refusal(Program().module(body)) == reason

    def with_itself(p: Program) -> Any:
        total = p.total()
        return p.norm(p.add(total, total))

    assert refusal(Program().module(with_itself)) == reason


def test_no_addition() -> None:
    reason = "its result is not added to a residual"
    assert refusal(Program().module(lambda p: p.norm(p.total()))) == reason
    assert refusal(Program().module(lambda p: p.total())) == reason


def test_no_norm() -> None:
    reason = "its sum with the residual is not normalized"
    assert refusal(Program().module(lambda p: p.add(p.residual, p.total()))) == reason

    def weight(p: Program) -> Any:
        """What is added is the weight of a norm, which is none of it."""
        added = p.add(p.b, p.emit(relax.op.ccl.allreduce(p.w, "sum", False)))
        return p.norm(p.part, added)

    assert refusal(Program().module(weight)) == reason


def test_a_cast_to_less() -> None:
    def body(p: Program) -> Any:
        half = p.emit(relax.op.astype(p.add(p.residual, p.total()), "float16"))
        return p.norm(half, p.emit(relax.op.astype(p.w, "float16")))

    assert refusal(Program().module(body)) == "its sum with the residual is not normalized"


@pytest.mark.parametrize(
    ("axes", "over"), [([0], "axis 0"), ([0, 1], "the axes [0, 1]"), ([-2], "axis 0")]
)
def test_other_axes(axes: list[int], over: str) -> None:
    def body(p: Program) -> Any:
        weight = relax.op.zeros((8,) * len(axes), "float32")
        x = p.add(p.residual, p.total())
        return p.emit(relax.op.nn.rms_norm(x, p.emit(weight), axes, 1e-5))

    found = refusal(Program(shape=(8, 8)).module(body))
    assert found == f"the norm is over {over}; expected the last axis"


@pytest.mark.parametrize("option", ["center", "scale"])
def test_a_norm_without_one_of_its_parameters(option: str) -> None:
    def body(p: Program) -> Any:
        x = p.add(p.residual, p.total())
        return p.emit(relax.op.nn.layer_norm(x, p.w, p.b, [-1], 1e-5, **{option: False}))

    reason = "the norm has no bias or no weight"
    assert refusal(Program().module(body)) == reason


@pytest.mark.parametrize("shape", [(8,), (1, 8), (4, 1), ()])
def test_a_residual_that_is_broadcast(shape: tuple[int, ...]) -> None:
    small = relax.Var("small", relax.TensorType(shape, "float32"))
    module = Program().module(lambda p: p.norm(p.add(small, p.total())), small)
    assert "is broadcast to that of the sum" in refusal(module) or shape == ()
    if shape == ():
        assert refusal(module) == "the residual has no axis"


def test_a_sum_that_is_broadcast() -> None:
    small = relax.Var("small", relax.TensorType((1, 8), "float32"))
    module = Program().module(lambda p: p.norm(p.add(p.residual, p.total(small))), small)
    assert "the residual of shape" in refusal(module)


def test_a_shape_that_is_not_known() -> None:
    unknown = relax.Var("unknown", relax.TensorType(ndim=2, dtype="float32"))
    module = Program().module(lambda p: p.norm(p.add(unknown, p.total())), unknown)
    assert refusal(module) == "the shape of the residual is unknown"
    module = Program().module(lambda p: p.norm(p.add(p.residual, p.total(unknown))), unknown)
    assert refusal(module) == "the shape of the sum is unknown"


def test_a_type_without_a_kernel() -> None:
    module = Program("float64").module(usual)
    assert refusal(module) == "the sum is float64, for which there is no kernel"


def test_a_write_in_between() -> None:
    """Nobody knows what a packed function does with the residual."""

    def body(p: Program) -> Any:
        total = p.total()
        ty = relax.AnyType()
        p.emit(relax.Call(relax.ExternFunc("change"), [p.residual], ty_args=[ty]))
        return p.norm(p.add(p.residual, total))

    p = Program()
    with p.builder.function("main", p.params, pure=False):
        p.builder.emit_func_output(body(p))
    reason = "a call before the norm may write into its inputs"
    assert refusal(p.builder.get()) == reason


@pytest.mark.parametrize(
    ("weight", "reason"),
    [
        (lambda p, x: x, "the sum is a weight of its own norm"),
        (
            lambda p, x: p.emit(relax.op.negative(x)),
            "the sum is used before a weight of the norm is bound",
        ),
    ],
)
def test_a_weight_that_is_made_of_what_is_added(weight: Any, reason: str) -> None:
    def body(p: Program) -> Any:
        x = p.add(p.residual, p.total())
        return p.norm(x, weight(p, x))

    assert refusal(Program(shape=(8,)).module(body)) == reason


def test_a_cast_that_is_the_weight_too() -> None:
    def body(p: Program) -> Any:
        wide = p.emit(relax.op.astype(p.add(p.residual, p.total()), "float32"))
        return p.norm(wide, wide)

    reason = "the sum is used before a weight of the norm is bound"
    assert refusal(Program("float16", (8,)).module(body)) == reason


def test_a_match_cast_is_no_norm() -> None:
    def body(p: Program) -> Any:
        x = p.add(p.residual, p.total())
        unknown = relax.TensorType(ndim=2, dtype="float32")
        return p.builder.match_cast(relax.op.nn.rms_norm(x, p.w, [-1], 1e-5), unknown)

    assert refusal(Program().module(body)) == "its sum with the residual is not normalized"


def test_a_norm_in_a_branch() -> None:
    @I.ir_module
    class Branch:
        @R.function
        def main(
            x: R.Tensor((4, 8), "float32"), w: R.Tensor((8,), "float32"), c: R.Tensor((), "bool")
        ):
            total = R.ccl.allreduce(x, "sum", in_group=False)
            y = R.add(x, total)
            if c:
                z = R.nn.rms_norm(y, w, axes=[-1])
            else:
                z = R.negative(y)
            return z

    assert refusal(Branch) == "its sum with the residual is not normalized"


def test_branches_have_sites_of_their_own() -> None:
    @I.ir_module
    class Branch:
        @R.function
        def main(
            x: R.Tensor((4, 8), "float32"), w: R.Tensor((8,), "float32"), c: R.Tensor((), "bool")
        ):
            if c:
                total = R.ccl.allreduce(x, "sum", in_group=False)
                y = R.add(x, total)
                z = R.nn.rms_norm(y, w, axes=[-1])
            else:
                z = R.negative(x)
            return z

    assert fused(Branch) == [RMS]


def test_other_modules_stay_the_objects_they_were() -> None:
    p = Program()
    module = p.module(lambda p: p.norm(p.add(p.residual, p.part)))
    with collect_report() as report:
        assert FuseAllReduceEpilogue()(module).same_as(module)
    assert report.decisions == []


def test_the_pipeline_does_it_on_cpus_where_it_may() -> None:
    for options, found in (({}, True), ({"fuse_epilogue": False}, False)):
        pipeline = tvm_ipc.get_pipeline("llvm", 2, **options)
        names = [
            str(call.op.global_symbol)
            for call in calls(pipeline(Program().module(usual))["main"])
            if isinstance(call.op, relax.ExternFunc)
        ]
        assert (RMS in names) == found


def test_work_grows_with_the_number_of_sums() -> None:
    def fuse(layers: int) -> None:
        def body(p: Program) -> Any:
            x, y = p.residual, p.part
            for _ in range(layers):
                x = p.add(x, p.total(y))
                y = p.norm(x)
            return y

        FuseAllReduceEpilogue()(modules.setdefault(layers, Program().module(body)))

    modules: dict[int, tvm.IRModule] = {}
    for layers in (8, 16, 32):
        fuse(layers)
    assert power(fuse, 8) < 1.1
