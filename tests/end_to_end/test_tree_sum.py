# SPDX-License-Identifier: Apache-2.0
"""The reduction "tree_sum" in programs and passes, against a tree in NumPy, bit for bit."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

import tvm_ipc
from tests.end_to_end.test_bitwise_and_scaled_reductions import (
    SHAPE,
    compiled,
    program_of,
    results_of,
)
from tests.runtime.collective_cases import reduce
from tvm_ipc import comm
from tvm_ipc.packed_functions import ReduceKind
from tvm_ipc.transform import ConvertToCCL, FuseAllReduceEpilogue, collect_report

Array = np.ndarray[Any, Any]


def drawn(ranks: int, dtype: str, shape: tuple[int, ...] = SHAPE) -> Array:
    """Return values of each rank whose sums depend on the order."""
    random = np.random.default_rng(ranks)
    values = random.normal(size=(ranks, *shape)) * 2.0 ** random.integers(-6, 6, (ranks, *shape))
    kind = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    return np.asarray((values * 100 if "int" in dtype else values).astype(kind))


def tree(xs: Array) -> Array:
    return reduce(xs, ReduceKind.TREE_SUM)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64", "int32"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
def test_operators(ranks: int, dtype: str) -> None:
    xs = drawn(ranks, dtype, (ranks * 12, 5))
    scale = 3.0 if dtype == "int32" else 1 / 3
    program = program_of(
        lambda x: comm.allreduce(x, "tree_sum"),
        lambda x: comm.reduce_scatter(x, "tree_sum", workers=ranks),
        lambda x: comm.reduce(x, "tree_sum", root=ranks - 1),
        lambda x: comm.allreduce(x, "tree_sum", scale=scale),
        dtype=dtype,
        ranks=ranks,
        shape=xs[0].shape,
    )
    scaled = np.asarray(xs * np.asarray(scale, xs.dtype), xs.dtype)
    for rank, results in enumerate(results_of(program, list(xs))):
        np.testing.assert_array_equal(results[0], tree(xs))
        np.testing.assert_array_equal(results[1], np.split(tree(xs), ranks)[rank])
        if rank == ranks - 1:
            np.testing.assert_array_equal(results[2], tree(xs))
        np.testing.assert_array_equal(results[3], tree(scaled))


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_it_differs_from_the_sum_from_four_ranks_on(ranks: int) -> None:
    xs = drawn(ranks, "float32", (1000,))
    with tvm_ipc.Session(ranks, threads=True, timeout=60) as session:
        x = session.scatter(xs)
        found = [session.get(session.allreduce(x, op="tree_sum"), rank) for rank in range(ranks)]
        total = session.get(session.allreduce(x, op="sum"))
    for one in found:
        np.testing.assert_array_equal(one, tree(xs))
    assert np.array_equal(found[0], total) == (ranks < 4)


@pytest.mark.parametrize("kind", ["reduce_scatter", "allreduce"])
def test_overlap_keeps_it(kind: str) -> None:
    """The matmul multiplies by one, so that only the reduction rounds."""
    ranks, rows, width = 4, 64, 32
    xs = drawn(ranks, "float32", (rows, width))
    module = matmul_before(kind, ranks, rows, width)
    pipeline = tvm_ipc.get_pipeline("llvm", ranks, overlap=2)
    with collect_report() as report:
        program = tvm.compile(module, "llvm", relax_pipeline=pipeline)
    verdicts = [one.verdict for one in report.decisions if one.pass_name == "OverlapCommunication"]
    assert verdicts == ["in 2 chunks"]
    with tvm_ipc.Session(ranks, threads=True, timeout=60) as session:
        main = session.load_vm_module(program)["main"]
        out = main(session.scatter(xs), np.eye(width, dtype="float32"))
        found = [session.get(out, rank) for rank in range(ranks)]
    total = tree(xs)
    assert not np.array_equal(total, reduce(xs, ReduceKind.SUM))
    for rank, one in enumerate(found):
        wanted = total if kind == "allreduce" else np.split(total, ranks)[rank]
        np.testing.assert_array_equal(one, wanted)


def matmul_before(kind: str, ranks: int, rows: int, width: int) -> tvm.IRModule:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((rows, width), "float32"))
    w = relax.Var("w", relax.TensorType((width, width), "float32"))
    with builder.function("main", [x, w]):
        with builder.dataflow():
            y = builder.emit(relax.op.matmul(x, w))
            if kind == "allreduce":
                out = builder.emit_output(comm.allreduce(y, "tree_sum"))
            else:
                out = builder.emit_output(comm.reduce_scatter(y, "tree_sum", workers=ranks))
        builder.emit_func_output(out)
    return builder.get()


@I.ir_module
class WithNorm:
    @R.function
    def main(
        x: R.Tensor((4, 64), "float32"),
        residual: R.Tensor((4, 64), "float32"),
        norm: R.Tensor((64,), "float32"),
    ):
        with R.dataflow():
            lv = R.comm.allreduce(x, "tree_sum")
            lv1 = R.add(lv, residual)
            lv2 = R.nn.rms_norm(lv1, norm, axes=[-1])
            gv = (lv1, lv2)
            R.output(gv)
        return gv


def test_no_norm_is_fused_into_it() -> None:
    with collect_report() as report:
        after = FuseAllReduceEpilogue()(WithNorm)
    tvm.ir.assert_structural_equal(after, WithNorm)
    (decision,) = report.decisions
    assert decision.verdict == "skipped"
    assert decision.reason == "it is a tree_sum, but the fused kernels add in rank order"

    ranks = 4
    xs = drawn(ranks, "float32", (4, 64))
    residual = drawn(1, "float32", (4, 64))[0]
    program = compiled(WithNorm, ranks)
    with tvm_ipc.Session(ranks, threads=True, timeout=60) as session:
        main = session.load_vm_module(program)["main"]
        added = main(session.scatter(xs), residual, np.ones(64, "float32"))
        for rank in range(ranks):
            found = added.debug_get_from_remote(rank)[0].numpy()
            np.testing.assert_array_equal(found, tree(xs) + residual)


def test_inputs_are_read_in_place() -> None:
    module = matmul_before("allreduce", 4, 8, 32)
    with collect_report() as report, tvm.target.Target("llvm"):
        tvm_ipc.get_pipeline("llvm", 4, blas=False)(module)
    (decision,) = (one for one in report.decisions if one.pass_name == "PlanMemoryScopes")
    assert decision.verdict == "in ipc_memory"


def test_tvm_has_no_operator_for_it() -> None:
    x = relax.Var("x", relax.TensorType((4,), "float32"))
    for reduction in ("tree_sum", "bxor"):
        builder = relax.BlockBuilder()
        value = relax.Var("x", relax.TensorType((4,), "int32"))
        with builder.function("main", [value]):
            builder.emit_func_output(builder.emit(comm.allreduce(value, reduction)))
        with collect_report() as report:
            ConvertToCCL()(builder.get())
        assert [one.reason for one in report.decisions] == [f"R.ccl has no {reduction}"]
    with pytest.raises(AssertionError, match="tree_sum"):
        relax.op.ccl.allreduce(x, "tree_sum")
