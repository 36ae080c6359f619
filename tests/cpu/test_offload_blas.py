# SPDX-License-Identifier: Apache-2.0
"""OffloadBLAS: which products become calls, and that they give what TVM's kernels give."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import tvm_ipc
from tests.cpu.blas_programs import (
    CASES,
    FUNCTION,
    arguments,
    built,
    calls,
    offload,
    op,
    operators,
    product,
    random,
    randoms,
    run,
    same_as_tvm,
)
from tests.one_function_modules import one_function
from tests.transform.loads import power
from tvm_ipc.cpu import OffloadBLAS
from tvm_ipc.transform import collect_report

# ---- what becomes a call --------------------------------------------------------------------


def test_linear_layer_with_everything() -> None:
    @I.ir_module
    class Before:
        @R.function
        def main(
            x: R.Tensor(("n", 32), "float32"),
            w: R.Tensor((8, 32), "float32"),
            bias: R.Tensor((8,), "float32"),
            residual: R.Tensor(("n", 8), "float32"),
        ) -> R.Tensor(("n", 8), "float16"):
            with R.dataflow():
                wt = R.permute_dims(w)
                y0 = R.matmul(x, wt)
                y1 = R.add(y0, bias)
                y2 = R.nn.gelu(y1)
                y3 = R.add(residual, y2)
                y4 = R.astype(y3, "float16")
                R.output(y4)
            return y4

    @I.ir_module
    class Expected:
        @R.function
        def main(
            x: R.Tensor(("n", 32), "float32"),
            w: R.Tensor((8, 32), "float32"),
            bias: R.Tensor((8,), "float32"),
            residual: R.Tensor(("n", 8), "float32"),
        ) -> R.Tensor(("n", 8), "float16"):
            n = T.int64()
            with R.dataflow():
                y4 = R.call_dps_packed(
                    "tvm_ipc.blas.matmul",
                    (
                        *(R.prim_value(0), R.prim_value(1), R.prim_value(0x141), R.prim_value(0)),
                        *(x, w, bias, residual),
                    ),
                    out_ty=R.Tensor((n, 8), "float16"),
                )
                R.output(y4)
            return y4

    after = offload(Before)
    tvm.ir.assert_structural_equal(after, Expected)
    same_as_tvm(
        Before,
        randoms((5, 32), (8, 32), (8,), (5, 8)),
        2e-3,
    )


@pytest.mark.parametrize("case", CASES)
def test_cases(case: str) -> None:
    shapes, body, expected = CASES[case]
    mod = built(shapes, "float32", body)
    assert sorted(calls(offload(mod))) == sorted(expected)
    same_as_tvm(mod, arguments(case))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_types(dtype: str) -> None:
    mod = built(
        [("n", 24), (24, 16), (16,)], dtype, lambda e, x, w, b: op.add(e(op.matmul(x, w)), b)
    )
    assert calls(offload(mod)) == [(0, 0, 1)]
    values = randoms((6, 24), (24, 16), (16,), dtype=dtype)
    found = run(offload(mod), values)
    x, w, b = (a.astype("float64") for a in values)
    tolerance = {"float16": 5e-3, "bfloat16": 5e-2, "float64": 1e-12}[dtype]
    np.testing.assert_allclose(found, x @ w + b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_extreme_numbers_come_out_as_from_the_kernels_of_tvm(dtype: str) -> None:
    info = ml_dtypes.finfo(dtype)
    least, most = float(info.smallest_subnormal), float(info.max)
    numbers = [0.0, least, float(info.tiny), 1.0, 20.0, 90.0, most, np.inf, np.nan]
    x = np.array([sign * number for number in numbers for sign in (1, -1)])[:, None].astype(dtype)
    shapes = [x.shape, (1, 2), (2,)]
    given = [x, np.ones((1, 2), dtype), np.full((2,), -0.0, dtype)]

    def steps(e: Any, x: Any, w: Any, zeros: Any) -> Any:
        activations = (op.nn.relu, op.nn.gelu, op.nn.gelu_tanh, op.nn.silu)
        results = [e(activation(e(op.matmul(x, w)))) for activation in activations]
        # A zero of either sign is what comes next to it.
        results.append(e(op.nn.relu(e(op.multiply(e(op.matmul(x, w)), zeros)))))
        cast = "bfloat16" if dtype == "float16" else "float16"
        results.append(e(op.astype(e(op.nn.relu(e(op.matmul(x, w)))), cast)))
        return relax.Tuple([e(op.astype(result, "float64")) for result in results])

    mod = built(shapes, dtype, steps)
    assert len(calls(offload(mod))) == 6
    for number, (ours, theirs) in enumerate(
        zip(results(offload(mod), given), results(mod, given), strict=True)
    ):
        np.testing.assert_allclose(ours, theirs, rtol=2e-2, atol=1e-5, err_msg=str(number))
        same = np.signbit(ours) == np.signbit(theirs)
        if dtype == "bfloat16":  # whose instructions take numbers that are not normal for zeros
            same |= np.abs(x.astype("float64")) == least
        assert (same | np.isnan(ours)).all(), f"{number}: {ours[~same]} instead of {theirs[~same]}"


def results(mod: Any, given: list[Any]) -> list[Any]:
    machine = relax.VirtualMachine(tvm.compile(mod, "llvm", relax_pipeline="default"), tvm.cpu())
    with np.errstate(all="ignore"):
        return [one.numpy() for one in machine["main"](*map(tvm.runtime.tensor, given))]


def test_sum_in_float32_and_cast() -> None:
    mod = built(
        [("n", 24), (24, 16)],
        "bfloat16",
        lambda e, x, w: op.astype(e(op.matmul(x, w, out_dtype="float32")), "bfloat16"),
    )
    after = offload(mod)
    assert calls(after) == [(0, 0, 0)]
    assert operators(after) == []


def test_twenty_sizes_of_one_module() -> None:
    mod = built(
        [("n", 32), (32, 48), (48,)],
        "float32",
        lambda e, x, w, b: op.nn.relu(e(op.add(e(op.matmul(x, w)), b))),
    )
    executable = tvm.compile(mod, "llvm", relax_pipeline=tvm_ipc.get_pipeline("llvm", 1, blas=True))
    assert FUNCTION in executable.as_text()
    machine = relax.VirtualMachine(executable, tvm.cpu())
    w, b = randoms((32, 48), (48,))
    for n in [*range(10), 15, 16, 17, 31, 33, 64, 100, 257, 1000, 1025]:
        x = random((n, 32), "float32", n)
        found = machine["main"](*map(tvm.runtime.tensor, (x, w, b))).numpy()
        np.testing.assert_allclose(found, np.maximum(x @ w + b, 0), rtol=1e-4, atol=1e-5)


def test_branches_and_bindings_outside_of_dataflow() -> None:
    @I.ir_module
    class Before:
        @R.function
        def main(
            c: R.Tensor((), "bool"), x: R.Tensor((4, 8), "float32"), w: R.Tensor((8, 8), "float32")
        ) -> R.Tensor((4, 8), "float32"):
            if c:
                y0 = R.matmul(x, w)
                y = R.nn.relu(y0)
            else:
                wt = R.permute_dims(w)
                y = R.matmul(x, wt)
            z = R.matmul(y, w)
            return z

    after = offload(Before)
    assert operators(after) == []
    x, w = randoms((4, 8), (8, 8))
    for c in (False, True):
        expected = (np.maximum(x @ w, 0) if c else x @ w.T) @ w
        np.testing.assert_allclose(run(after, [np.array(c), x, w]), expected, rtol=1e-4, atol=1e-5)


@I.ir_module
class Overwriting:
    """The input of a product, or what it is permuted from, is written in place afterwards."""

    @T.prim_func(private=True, s_tir=True)
    def zero(x: T.Buffer((8, 8), "float32")):
        for i, j in T.grid(8, 8):
            with T.sblock("zero"):
                vi, vj = T.axis.remap("SS", [i, j])
                x[vi, vj] = T.float32(0)

    @R.function
    def main(
        x: R.Tensor((8, 8), "float32"), w: R.Tensor((8, 8), "float32"), b: R.Tensor((8,), "float32")
    ) -> R.Tuple(R.Tensor((8, 8), "float32"), R.Tensor((8, 8), "float32")):
        cls = Overwriting
        with R.dataflow():
            w0 = R.add(w, w)
            wt = R.permute_dims(w0)
            y = R.matmul(x, w0)
            w1 = R.call_tir_inplace(
                cls.zero, (w0,), inplace_indices=[0], out_ty=R.Tensor((8, 8), "float32")
            )
            y1 = R.add(y, b)
            z = R.matmul(y1, wt)
            u = R.add(z, w1)
            R.output(y1, u)
        return (y1, u)


def test_nothing_is_read_after_it_was_overwritten() -> None:
    after = offload(Overwriting)
    # The bias stays behind, and the permutation before; the last sum can be taken along.
    assert calls(after) == [(0, 0, 0), (0, 0, 1)]
    assert operators(after) == ["relax.add", "relax.call_tir_inplace", "relax.permute_dims"]
    x, w, b = randoms((8, 8), (8, 8), (8,))
    executable = tvm.compile(after, "llvm")
    machine = relax.VirtualMachine(executable, tvm.cpu())
    y1, u = machine["main"](*map(tvm.runtime.tensor, (x, w, b)))
    np.testing.assert_allclose(y1.numpy(), x @ (w + w) + b, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(u.numpy(), y1.numpy() @ (w + w).T, rtol=1e-4, atol=1e-4)


def test_weights_are_read_past_writes_of_something_else() -> None:
    def body(emit: Any, x: Any, w: Any, b: Any) -> Any:
        cache = emit(relax.op.builtin.alloc_tensor(x.ty.shape, "float32", 0, "global"))
        weights = emit(relax.Tuple([w, b]))
        wt = emit(op.permute_dims(emit(relax.TupleGetItem(weights, 0))))
        noted = emit(
            relax.op.call_inplace_packed(
                "vm.builtin.copy", cache, inplace_indices=[0], ty_args=cache.ty
            )
        )
        y = emit(op.matmul(x, wt))
        return op.add(emit(op.add(y, emit(relax.TupleGetItem(weights, 1)))), noted)

    mod = built([(8, 8), (8, 8), (8,)], "float32", body)
    assert calls(offload(mod)) == [(0, 1, 0x11)]


@pytest.mark.parametrize("how", ["parameter", "packed", "branch", "function"])
def test_what_may_be_overwritten_by_another_name_is_not_read_late(how: str) -> None:
    makes = {
        "parameter": ["o = v"],
        "packed": [
            'o = R.call_packed("blas.test.last", w, ty_args=(R.Tensor((8, 8), "float32"),))'
        ],
        "branch": ["if c:", "    o = w", "else:", "    o = v"],
        "function": ["o = cls.same(w)"],
    }[how]
    makes = "\n        ".join(makes)
    mod = tvm.script.from_source(
        f"""
@I.ir_module
class Module:
    @R.function(private=True)
    def same(a: R.Tensor((8, 8), "float32")) -> R.Tensor((8, 8), "float32"):
        return a

    @R.function(pure=False)
    def main(
        c: R.Tensor((), "bool"),
        x: R.Tensor((8, 8), "float32"),
        w: R.Tensor((8, 8), "float32"),
        v: R.Tensor((8, 8), "float32"),
    ):
        cls = Module
        wt = R.permute_dims(w)
        {makes}
        _ = R.call_packed("blas.test.clear", o)
        y = R.matmul(x, wt)
        return y
"""
    )
    tvm_ffi.register_global_func("blas.test.last", lambda *given: given[-1], override=True)
    tvm_ffi.register_global_func(
        "blas.test.clear", lambda one: one.copyfrom(np.zeros((8, 8), "float32")), override=True
    )
    x, w = randoms((8, 8), (8, 8))
    machine = relax.VirtualMachine(tvm.compile(offload(mod), "llvm"), tvm.cpu())
    weight = tvm.runtime.tensor(w)  # it is passed twice
    found = machine["main"](
        tvm.runtime.tensor(np.array(True)), tvm.runtime.tensor(x), weight, weight
    )
    np.testing.assert_allclose(found.numpy(), x @ w.T, rtol=1e-4, atol=1e-5)


def test_permutation_of_another_dataflow_block_is_left() -> None:
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((4, 8), "float32"), w: R.Tensor((8, 8), "float32")) -> R.Tensor(
            (4, 8), "float32"
        ):
            with R.dataflow():
                v = R.add(w, w)
                vt = R.permute_dims(v)
                R.output(vt)
            x2 = R.add(x, x)
            with R.dataflow():
                y = R.matmul(x2, vt)
                R.output(y)
            return y

    after = offload(Before)
    assert calls(after) == [(0, 0, 0)]
    assert operators(after) == ["relax.add", "relax.permute_dims"]


def test_order_of_a_bias_that_comes_later() -> None:
    def body(emit: Any, x: Any, w: Any, b: Any) -> Any:
        y = emit(op.matmul(x, w))
        doubled = emit(op.add(b, b))
        return op.add(y, doubled)

    mod = built([("n", 24), (24, 16), (16,)], "float32", body)
    assert calls(offload(mod)) == [(0, 0, 1)]
    same_as_tvm(mod, randoms((3, 24), (24, 16), (16,)))


# ---- what stays with TVM, and why -----------------------------------------------------------


def reasons(mod: Any, min_work: int | None = None) -> list[str]:
    with collect_report() as report:
        offload(mod, min_work)
    left = [d for d in report.decisions if d.verdict == "left to TVM"]
    assert all(d.pass_name == "OffloadBLAS" and "matmul" in d.subject for d in left)
    return [d.reason for d in left]


def test_reasons_to_leave_a_product() -> None:
    small = product((4, 4), (4, 4))
    assert reasons(small) == ["it has 64 multiplications; a call pays from 4096 on"]
    assert reasons(small, 64) == []
    half = product(("n", 4), (4, 4), dtype="float16")
    assert reasons(half) == ["it has 128 multiplications; a call pays from 256 on"]
    integers = product((64, 64), (64, 64), dtype="int32")
    assert reasons(integers) == ["BLAS has no matmul of the types int32 x int32 -> int32"]
    small_floats = product((64, 64), (64, 64), dtype="float8_e4m3fn")
    assert "BLAS has no matmul of the types" in reasons(small_floats)[0]
    wider = built(
        [(64, 64), (64, 64)], "float32", lambda e, x, w: op.matmul(x, w, out_dtype="float64")
    )
    assert reasons(wider) == ["BLAS does not accumulate float32 to float64"]


def test_product_of_unknown_shape() -> None:
    unknown = relax.TensorType(ndim=2, dtype="float32")
    mod = one_function(lambda _, x, w: op.matmul(x, w), {"x": unknown, "w": (64, 64)})
    assert reasons(mod) == ["the shape of the result is unknown before the program runs"]


def test_product_on_a_gpu() -> None:
    @I.ir_module
    class Module:
        I.module_global_infos({"vdevice": [I.vdevice({"kind": "cuda", "arch": "sm_90"})]})

        @R.function
        def main(
            x: R.Tensor((64, 64), "float32", "cuda:0"), w: R.Tensor((64, 64), "float32", "cuda:0")
        ) -> R.Tensor((64, 64), "float32", "cuda:0"):
            with R.dataflow():
                y = R.matmul(x, w)
                R.output(y)
            return y

    assert reasons(Module) == ["a is on the device cuda"]


def test_permutation_that_leaves_no_dimension_dense() -> None:
    mod = built(
        [(5, 8, 64), (64, 8, 3)],
        "float32",
        lambda e, x, w: op.matmul(e(op.permute_dims(x, [2, 0, 1])), w),
    )
    assert calls(offload(mod)) == [(0, 0, 0)]
    assert operators(offload(mod)) == ["relax.permute_dims"]
    same_as_tvm(mod, randoms((5, 8, 64), (64, 8, 3)))


def test_functions_of_other_compilers() -> None:
    mod = product((64, 64), (64, 64))
    mod["main"] = mod["main"].with_attr("Codegen", "another")
    assert OffloadBLAS(0)(mod).script() == mod.script()


@pytest.mark.parametrize(
    ("min_work", "kind"),
    [("many", TypeError), (True, TypeError), (1.5, TypeError), (-1, ValueError)],
)
def test_wrong_options(min_work: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="OffloadBLAS: min_work is"):
        OffloadBLAS(min_work)


# ---- in the pipeline ------------------------------------------------------------------------


def pipeline_decisions(target: str, **options: Any) -> tuple[str, list[Any]]:
    mod = product(("n", 64), (64, 64))
    with collect_report() as report:
        after = tvm_ipc.get_pipeline(target, 1, **options)(mod)
    found = [d for d in report.decisions if d.subject == "BLAS"]
    return after.script(), [(d.pass_name, d.verdict, d.reason) for d in found]


def test_pipeline_says_whether_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    text, (decision,) = pipeline_decisions("llvm")
    assert FUNCTION in text
    assert decision[:2] == ("get_pipeline", "used")
    assert "scipy-openblas64 0." in decision[2]
    text, (decision,) = pipeline_decisions("llvm", blas=False)
    assert FUNCTION not in text
    assert decision == ("get_pipeline", "not used", "get_pipeline was given blas=False")
    monkeypatch.setattr(tvm_ipc.cpu.openblas_discovery, "_PACKAGE", "no_such_package")
    text, (decision,) = pipeline_decisions("llvm")
    assert FUNCTION not in text
    assert decision[1:] == ("not used", "scipy-openblas64 is not installed")
    text, _ = pipeline_decisions("llvm", blas=True)
    assert FUNCTION in text, "compiled for another machine"


def test_pipeline_for_a_gpu_refuses() -> None:
    with pytest.raises(ValueError, match="blas is for CPUs, not for 'cuda'"):
        tvm_ipc.get_pipeline({"kind": "cuda", "arch": "sm_90"}, 1, blas=True)


def test_linear_in_the_size_of_the_module() -> None:
    def module(layers: int) -> tvm.IRModule:
        def body(emit: Any, x: Any, w: Any, b: Any) -> Any:
            for _ in range(layers - 1):
                x = emit(op.nn.relu(emit(op.add(emit(op.matmul(x, emit(op.permute_dims(w)))), b))))
            return op.matmul(x, w)

        return built([("n", 64), (64, 64), (64,)], "float32", body)

    modules = {layers: module(layers) for layers in (25, 50, 100)}
    assert power(lambda layers: OffloadBLAS()(modules[layers]), 25) < 1.1
    assert len(calls(OffloadBLAS()(modules[100]))) == 100


def test_module_goes_through_json() -> None:
    mod = offload(product(("n", 64), (64, 64)))
    assert tvm_ffi.structural_equal(tvm.ir.load_json(tvm.ir.save_json(mod)), mod)
