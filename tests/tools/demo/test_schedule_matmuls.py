# SPDX-License-Identifier: Apache-2.0
"""Scheduled kernels compute what unscheduled ones do, for any number of rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax, tirx

import tvm_ipc
from tvm_ipc.examples.tensor_parallel_decoder.decoder_config import DTYPES
from tvm_ipc.examples.tensor_parallel_decoder.random_weights import numpy_dtype
from tvm_ipc.examples.tensor_parallel_decoder.schedule_matmuls import schedule_matmuls

INNER, OUTER = 40, 72


def linear(builder: Any, x: Any, weight: Any, dtype: str) -> Any:
    """A product, and what may follow it."""
    y = builder.emit(relax.op.matmul(x, weight, out_dtype="float32"))
    return y if dtype == "float32" else builder.emit(relax.op.astype(y, dtype))


def module(dtype: str) -> tvm.IRModule:
    """`many`, `five` and `one`: the norm of x, multiplied, and a bias added."""
    builder = relax.BlockBuilder()
    for name, rows in (("many", tirx.Var("n", "int64")), ("five", 5), ("one", 1)):
        parameters = [
            relax.Var("x", relax.TensorType((rows, INNER), dtype)),
            relax.Var("scale", relax.TensorType((INNER,), dtype)),
            relax.Var("weight", relax.TensorType((INNER, OUTER), dtype)),
            relax.Var("bias", relax.TensorType((rows, OUTER), dtype)),
        ]
        x, scale, weight, bias = parameters
        with builder.function(name, parameters):
            with builder.dataflow():
                x = builder.emit(relax.op.nn.rms_norm(x, scale, axes=[-1]))
                y = linear(builder, x, weight, dtype)
                result = builder.emit_output(relax.op.add(y, bias))
            builder.emit_func_output(result)
    return builder.get()


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_and_products(dtype: str) -> None:
    target = tvm_ipc.cpu_target()
    pipeline = tvm_ipc.get_pipeline(target, 1, blas=False, schedule=schedule_matmuls)
    machine = relax.VirtualMachine(
        relax.build(module(dtype), target, relax_pipeline=pipeline), tvm.cpu()
    )
    random = np.random.default_rng(0)
    tolerance = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 8e-2}[dtype]
    for name, rows in [("one", 1), ("five", 5), *(("many", n) for n in (1, 5, 6, 7, 13))]:
        shapes = [(rows, INNER), (INNER,), (INNER, OUTER), (rows, OUTER)]
        given = [random.standard_normal(s, "float32").astype(numpy_dtype(dtype)) for s in shapes]
        found = machine[name](*map(tvm.runtime.tensor, given)).numpy()
        x, scale, weight, bias = (array.astype("float64") for array in given)
        x = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + 1e-5) * scale
        expected = x @ weight + bias
        np.testing.assert_allclose(
            found.astype("float64"), expected, atol=tolerance * np.abs(expected).max()
        )


def test_many_rows_are_tiled_packed_and_widened_once() -> None:
    target = tvm_ipc.cpu_target()
    with target:
        fused = tvm.transform.Sequential(
            [
                relax.transform.LegalizeOps(),
                relax.transform.AnnotateTIROpPattern(),
                relax.transform.FuseOps(),
                relax.transform.FuseTIR(),
                schedule_matmuls,
            ]
        )(module("float16"))
    scripts = [
        function.script()
        for variable, function in fused.functions_items()
        if "matmul" in variable.name_hint
    ]
    tiled = [script for script in scripts if "T.unroll(T.int64(6))" in script]
    assert len(scripts) == 3
    assert len(tiled) == 2
    for script in tiled:
        assert "T.vectorized" in script
        # The panel of weights is widened where it is written, and read as it is.
        assert 'weight_global[v0, v1] = T.Cast("float32"' in script
        assert 'T.Cast("float16", weight_global' not in script
