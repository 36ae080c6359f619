# SPDX-License-Identifier: Apache-2.0
"""Programs whose sums, residuals and norms are one function: planned, checked, and run."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm import relax, tirx

import tvm_ipc
from tests.end_to_end.host_programs import packed_names, racing
from tests.runtime.tensors_of_ranks import put_each
from tvm_ipc.errors import WorkerError
from tvm_ipc.packed_functions import CollectiveFlag
from tvm_ipc.transform import collect_report, verify_cross_rank_safety
from tvm_ipc.verify.hazard_types_and_messages import HazardKind

Array = np.ndarray[Any, Any]
NAMES = ("allreduce_rms_norm", "allreduce_layer_norm")
LAYERS = 2
TOLERANCE = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 8e-2}


def norm(name: str, x: Any, weight: Any, bias: Any) -> relax.Call:
    if name == "allreduce_rms_norm":
        return relax.op.nn.rms_norm(x, weight, [-1], 1e-5)
    return relax.op.nn.layer_norm(x, weight, bias, [-1], 1e-5)


def blocks(name: str, rows: Any, hidden: int, dtype: str, *, one_more: bool = False) -> Any:
    """Layers of a decoder without what is between their sums: y is doubled there.

    With `one_more` weights are what has to be added to 1, and float32 as the norms are.
    """
    builder = relax.BlockBuilder()
    n = tirx.Var("n", "int64") if rows is None else rows
    matrix, row = relax.TensorType((n, hidden), dtype), relax.TensorType((hidden,), dtype)
    params = [relax.Var("x", matrix), relax.Var("w", row), relax.Var("b", row)]
    with builder.function("main", params):
        with builder.dataflow():
            x, weight, bias = params
            y = x
            for _ in range(LAYERS):
                y = builder.emit(relax.op.add(y, y))
                x = builder.emit(
                    relax.op.add(x, builder.emit(relax.op.ccl.allreduce(y, "sum", False)))
                )
                if one_more:
                    wide = builder.emit(relax.op.astype(x, "float32"))
                    w32 = builder.emit(relax.op.astype(weight, "float32"))
                    w32 = builder.emit(relax.op.add(w32, relax.const(1, "float32")))
                    b32 = builder.emit(relax.op.astype(bias, "float32"))
                    y = builder.emit(norm(name, wide, w32, b32))
                    y = builder.emit(relax.op.astype(y, dtype))
                else:
                    y = builder.emit(norm(name, x, weight, bias))
            out = builder.emit_output(relax.op.concat([x, y], axis=1))
        builder.emit_func_output(out)
    return builder.get()


def expected(name: str, xs: list[Array], w: Array, b: Array, *, one_more: bool) -> list[Array]:
    """What each rank gets, in float64 but for what is rounded to the type of the tensors."""
    dtype = xs[0].dtype
    weight = w.astype("float64") + one_more
    residuals, ys = list(xs), list(xs)
    for _ in range(LAYERS):
        total = np.sum([(y + y).astype("float32") for y in ys], axis=0).astype(dtype)
        residuals = [(x + total).astype(dtype) for x in residuals]
        ys = []
        for residual in residuals:
            x = residual.astype("float64")
            mean = x.mean(-1, keepdims=True) if name == "allreduce_layer_norm" else 0
            scale = 1 / np.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5)
            bias = b.astype("float64") if name == "allreduce_layer_norm" else 0
            ys.append(((x - mean) * scale * weight + bias).astype(dtype))
    return [np.concatenate([x, y], 1) for x, y in zip(residuals, ys, strict=True)]


@pytest.mark.parametrize("one_more", [False, True])
@pytest.mark.parametrize(
    "dtype", ["float32", pytest.param("float16", marks=pytest.mark.slow), "bfloat16"]
)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_programs(ranks: int, name: str, dtype: str, one_more: bool) -> None:
    pipeline = tvm_ipc.get_pipeline("llvm", ranks)
    module = blocks(name, None, 48, dtype, one_more=one_more)
    assert packed_names(pipeline(module)).count(f"tvm_ipc.{name}") == LAYERS
    program = tvm.compile(module, "llvm", relax_pipeline=pipeline)
    random = np.random.default_rng(0)
    kind = getattr(ml_dtypes, dtype, dtype)
    w, b = (random.standard_normal(48).astype(kind) for _ in range(2))
    with tvm_ipc.Session(ranks, threads=True, timeout=60) as session:
        main = session.load_vm_module(program)["main"]
        for rows in (5, 0, 1, 200):
            xs = [random.standard_normal((rows, 48)).astype(kind) for _ in range(ranks)]
            x = put_each(session, xs)
            out = main(x, w, b)
            for rank, wanted in enumerate(expected(name, xs, w, b, one_more=one_more)):
                found = session.get(out, rank=rank).astype("float64")
                np.testing.assert_allclose(
                    found, wanted.astype("float64"), TOLERANCE[dtype], TOLERANCE[dtype]
                )


@pytest.mark.parametrize("name", NAMES)
def test_fused_and_in_parts(name: str) -> None:
    """The new residual has the same bits; norms differ by roundings, which the next sum has."""
    module = blocks(name, 64, 96, "float32")
    x = np.random.default_rng(0).standard_normal((64, 96)).astype("float32")
    ones = np.ones(96, "float32")
    results = []
    with tvm_ipc.Session(2, threads=True, timeout=60) as session:
        for fuse in (True, False):
            pipeline = tvm_ipc.get_pipeline("llvm", 2, fuse_epilogue=fuse)
            program = tvm.compile(module, "llvm", relax_pipeline=pipeline)
            out = session.load_vm_module(program)["main"](session.put(x), ones, ones)
            results.append(session.get(out, rank=1))
    np.testing.assert_allclose(*results, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", NAMES)
def test_inputs_are_placed_and_barriers_left_out(name: str) -> None:
    with collect_report() as report:
        mod = tvm_ipc.get_pipeline("llvm", 2)(blocks(name, 64, 96, "float32"))
    verdicts = [
        one.verdict
        for one in report.decisions
        if one.pass_name == "StaticPlanBlockMemory" and one.subject.startswith(name)
    ]
    assert verdicts == ["barrier left out", "barrier kept"]
    assert "tvm_ipc.copy" not in packed_names(mod)
    assert "runtime.disco.cuda_ipc.alloc_storage" in packed_names(mod)


@pytest.mark.parametrize("name", NAMES)
def test_a_race_is_found(name: str) -> None:
    matrices = dict.fromkeys(("send", "residual", "residual_out", "norm_out"), (64, 64))
    shapes = {**matrices, "weight": (64,), "bias": (64,)}

    def kinds(flags: int, *, waits: bool, **written: str) -> list[HazardKind]:
        numbers = {"team": 0, "strategy": 3, "flags": int(flags), "epsilon": 1e-5}
        mod = racing(name, shapes, numbers, waits=waits, **written)
        return [hazard.kind for hazard in verify_cross_rank_safety(mod)]

    late = CollectiveFlag.NO_EXIT_BARRIER
    assert HazardKind.WRITE in kinds(late, waits=False)
    assert kinds(late, waits=True) == []
    assert kinds(CollectiveFlag.NONE, waits=False) == []
    # What peers do not read may be written at once.
    assert kinds(late, waits=False, written="residual") == [HazardKind.FREE]


def test_another_number_of_workers_is_refused() -> None:
    pipeline = tvm_ipc.get_pipeline("llvm", 2)
    program = tvm.compile(blocks(NAMES[0], 4, 8, "float32"), "llvm", relax_pipeline=pipeline)
    with tvm_ipc.Session(3, threads=True, timeout=60) as session:
        session.load_vm_module(program)
        with pytest.raises(WorkerError, match="compiled for 2 workers"):
            session.sync()
