# SPDX-License-Identifier: Apache-2.0
"""Products for the BLAS through TVM's tools for external compilers."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from tests.cpu.blas_programs import (
    CASES,
    arguments,
    built,
    calls,
    offload,
    operators,
    product,
    randoms,
    run,
)
from tvm_ipc import cpu, transform
from tvm_ipc.cpu import blas_patterns
from tvm_ipc.transform import collect_report


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_partitions_by_pattern(case: str, merge: bool) -> None:
    shapes, body, _ = CASES[case]
    mod = built(shapes, "float32", body)
    parts = relax.transform.FuseOpsByPattern(blas_patterns(), annotate_codegen=not merge)(mod)
    if merge:
        parts = relax.transform.MergeCompositeFunctions()(parts)
    assert any("Codegen" in (f.attrs or {}) for f in parts.functions.values())
    with collect_report() as report:
        after = offload(parts, None)
    if case != "permutation used elsewhere":  # which TVM's matcher does not look through
        assert sorted(calls(after)) == sorted(calls(offload(mod)))
    assert {d.verdict for d in report.decisions} == {"offloaded to BLAS"}
    assert [str(one.name_hint) for one in after.get_global_vars()] == ["main"]
    found, expected = (run(one, arguments(case)) for one in (after, mod))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_function_literal_with_more_than_a_product() -> None:
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor(("n", 8), "float32"), w: R.Tensor((8, 8), "float32")) -> R.Tensor(
            ("n", 8), "float32"
        ):
            n = T.int64()

            @R.function
            def part(a: R.Tensor(("m", 8), "float32"), b: R.Tensor((8, 8), "float32")) -> R.Tensor(
                ("m", 8), "float32"
            ):
                R.func_attr({"Codegen": "blas"})
                with R.dataflow():
                    y = R.matmul(a, b)
                    z = R.tanh(y)
                    R.output(z)
                return z

            r: R.Tensor((n, 8), "float32") = part(x, w)
            return r

    after = offload(Before)
    assert calls(after) == [(0, 0, 0)]
    assert operators(after) == ["relax.tanh"]
    x, w = randoms((5, 8), (8, 8))
    np.testing.assert_allclose(run(after, [x, w]), np.tanh(x @ w), rtol=1e-5, atol=1e-6)


def test_entry_for_the_blas() -> None:
    mod = product(("n", 24), (24, 16))
    mod["main"] = mod["main"].with_attr("Codegen", "blas")
    after = offload(mod)
    x, w = randoms((5, 24), (24, 16))
    assert calls(after) == [(0, 0, 0)]
    np.testing.assert_allclose(run(after, [x, w]), x @ w, rtol=1e-5, atol=1e-5)


def test_codegen_alone() -> None:
    mod = product(("n", 24), (24, 16))
    parts = relax.transform.FuseOpsByPattern(blas_patterns(), annotate_codegen=True)(mod)
    after = transform.RunModuleCodegen("blas", cpu.compile_blas)(parts)
    x, w = randoms((5, 24), (24, 16))
    np.testing.assert_allclose(run(after, [x, w]), x @ w, rtol=1e-5, atol=1e-5)


def test_a_function_of_the_module_that_is_for_the_blas_keeps_its_other_attributes() -> None:
    @I.ir_module
    class Before:
        @R.function
        def main(a: R.Tensor(("n", 8), "float32"), b: R.Tensor((8, 8), "float32")) -> R.Tensor(
            ("n", 8), "float32"
        ):
            R.func_attr({"Codegen": "blas", "tir_var_upper_bound": {"n": 16}})
            with R.dataflow():
                y = R.matmul(a, b)
                R.output(y)
            return y

    after = cpu.OffloadBLAS()(Before)["main"]
    assert "Codegen" not in after.attrs
    assert {str(k): int(v) for k, v in after.attrs["tir_var_upper_bound"].items()} == {"n": 16}
    assert "tvm_ipc.blas.matmul" in str(after)
