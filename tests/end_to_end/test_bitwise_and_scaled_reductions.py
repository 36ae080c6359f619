# SPDX-License-Identifier: Apache-2.0
"""Bitwise and scaled reductions, and messages whose ranks a program computes, against NumPy."""

from __future__ import annotations

from collections.abc import Callable
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
from tests.collective_results import reduced
from tvm_ipc import comm
from tvm_ipc.errors import WorkerError
from tvm_ipc.transform import ConvertToCCL, collect_report, verify_cross_rank_safety

Array = np.ndarray[Any, Any]
RANKS = pytest.mark.parametrize("ranks", [2, 3, 4])
SHAPE = (12, 5)


def program_of(
    *makes: Callable[[Any], relax.Call],
    dtype: str,
    ranks: int,
    shape: tuple[int, ...] = SHAPE,
) -> Any:
    """Compile a function that returns a collective of its parameter each."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(shape, dtype))
    with builder.function("main", [x]):
        with builder.dataflow():
            out = builder.emit_output(relax.Tuple([builder.emit(make(x)) for make in makes]))
        builder.emit_func_output(out)
    return compiled(builder.get(), ranks)


def compiled(module: tvm.IRModule, ranks: int) -> Any:
    pipeline = tvm_ipc.get_pipeline("llvm", ranks)
    with tvm.target.Target("llvm"):
        assert verify_cross_rank_safety(pipeline(module)) == []
    return tvm.compile(module, "llvm", relax_pipeline=pipeline)


def results_of(program: Any, xs: list[Array]) -> list[list[Array]]:
    """Return the results of each rank."""
    with tvm_ipc.Session(len(xs), threads=True, timeout=60) as session:
        x = session.empty(xs[0].shape, str(xs[0].dtype))
        for rank, value in enumerate(xs):
            x.debug_copy_from(rank, value)
        out = session.load_vm_module(program)["main"](x)
        found = [out.debug_get_from_remote(rank) for rank in range(len(xs))]
        return [[one.numpy() for one in results] for results in found]


@RANKS
@pytest.mark.parametrize("dtype", ["int8", "uint16", "int32", "uint64"])
def test_bitwise_reductions(dtype: str, ranks: int) -> None:
    limits = np.iinfo(dtype)
    draw = np.random.default_rng(ranks).integers
    xs = [draw(limits.min, limits.max, SHAPE, dtype, endpoint=True) for _ in range(ranks)]
    names = ("band", "bor", "bxor")
    program = program_of(
        *(lambda x, name=name: comm.allreduce(x, name) for name in names),
        lambda x: comm.reduce_scatter(x, "bxor", workers=ranks),
        lambda x: comm.reduce(x, "bor", root=1),
        dtype=dtype,
        ranks=ranks,
    )
    for rank, results in enumerate(results_of(program, xs)):
        for name, result in zip(names, results, strict=False):
            np.testing.assert_array_equal(result, reduced(xs, name))
        np.testing.assert_array_equal(results[3], np.split(reduced(xs, "bxor"), ranks)[rank])
        if rank == 1:
            np.testing.assert_array_equal(results[4], reduced(xs, "bor"))


def test_session_methods_reduce_bits() -> None:
    xs = np.array([[0b1100, 7, -1], [0b1010, 8, 5], [0b1111, 0, 3]], "int32")
    with tvm_ipc.Session(3, threads=True, timeout=60) as session:
        x = session.scatter(xs)
        for op, function in (("band", np.bitwise_and), ("bor", np.bitwise_or)):
            wanted = function.reduce(xs)
            np.testing.assert_array_equal(session.get(session.allreduce(x, op=op), 2), wanted)
        wanted = np.bitwise_xor.reduce(xs)
        np.testing.assert_array_equal(session.get(session.allreduce(x, op="bxor")), wanted)


@RANKS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32"])
def test_scaled_sums(dtype: str, ranks: int) -> None:
    """Each product is rounded to the type, and the sum once, as in a multiplication before."""
    scale = 3.0 if dtype == "int32" else 1 / 3
    kind = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    draw = np.random.default_rng(ranks).integers
    xs = [draw(-50, 50, SHAPE).astype(kind) for _ in range(ranks)]
    program = program_of(
        lambda x: comm.allreduce(x, scale=scale),
        lambda x: comm.reduce_scatter(x, scale=scale, workers=ranks),
        lambda x: comm.reduce(x, root=ranks - 1, scale=scale),
        dtype=dtype,
        ranks=ranks,
    )
    wide = "int32" if dtype == "int32" else "float32"
    total = np.zeros(SHAPE, wide)
    for x in xs:
        total = total + (x * np.asarray(scale, kind)).astype(wide)
    wanted = total.astype(kind)
    for rank, results in enumerate(results_of(program, xs)):
        np.testing.assert_array_equal(results[0], wanted)
        np.testing.assert_array_equal(results[1], np.split(wanted, ranks)[rank])
        if rank == ranks - 1:
            np.testing.assert_array_equal(results[2], wanted)


def test_where_scaled_sums_are_skipped_or_refused() -> None:
    @I.ir_module
    class Module:
        @R.function
        def main(
            x: R.Tensor((4, 64), "float32"),
            w: R.Tensor((64, 64), "float32"),
            residual: R.Tensor((4, 64), "float32"),
            norm: R.Tensor((64,), "float32"),
        ):
            with R.dataflow():
                lv = R.matmul(x, w)
                lv1 = R.comm.allreduce(lv, scale=0.5)
                lv2 = R.add(lv1, residual)
                gv = R.nn.rms_norm(lv2, norm, axes=[-1])
                R.output(gv)
            return gv

    with collect_report() as report, tvm.target.Target("llvm"):
        tvm_ipc.get_pipeline("llvm", 2, overlap=2)(Module)
        ConvertToCCL()(Module)
    reasons = {one.pass_name: one.reason for one in report.decisions if "scaled" in one.reason}
    assert reasons["FuseAllReduceEpilogue"].startswith("its sum is scaled")
    assert reasons["OverlapCommunication"].startswith("its sum is scaled")
    assert reasons["ConvertToCCL"] == "R.ccl has no scaled sums"

    x = relax.Var("x", relax.TensorType((4,), "float32"))
    with pytest.raises(ValueError, match="start: allreduce: scale is 2"):
        comm.start(comm.allreduce(x, scale=2), relax.Var("out", x.ty))


@I.ir_module
class Message:
    """A tensor for a rank that the caller chooses."""

    @R.function
    def main(x: R.Tensor((3, 4), "float32"), peers: R.Shape(["source", "target"])):
        source, target = T.int64(), T.int64()
        with R.dataflow():
            y = R.comm.send_recv(x, source, target, workers=2)
            R.output(y)
        return y


def message_among(ranks: int) -> tvm.IRModule:
    text = Message.script().replace("workers=2", f"workers={ranks}")
    return tvm.script.from_source(text)


@RANKS
def test_messages_between_ranks_that_the_program_computes(ranks: int) -> None:
    module = message_among(ranks)
    tvm.ir.assert_structural_equal(tvm.script.from_source(module.script()), module)
    program = compiled(module, ranks)
    xs = np.random.default_rng(ranks).random((ranks, 3, 4), "float32")
    with tvm_ipc.Session(ranks, threads=True, timeout=60) as session:
        function, x = session.load_vm_module(program)["main"], session.scatter(xs)
        for source in range(ranks):
            for target in range(ranks):  # oneself included
                out = function(x, tvm_ffi.Shape([source, target]))
                for rank in range(ranks):
                    wanted = xs[source] if rank == target else 0 * xs[source]
                    np.testing.assert_array_equal(session.get(out, rank), wanted)
        for peers, message in (
            ([0, ranks], f"the target of a send_recv is not an index in its team of {ranks}"),
            ([0, -1], "the target of a send_recv is not an index in its team"),
            ([-1, 0], "the source of a send_recv is negative; pass an index from 0 to"),
            ([ranks, 0], f"there is no source {ranks} in a team of {ranks}"),
        ):
            with pytest.raises(WorkerError, match=message):
                session.get(function(x, tvm_ffi.Shape(peers)))


@RANKS
def test_a_message_to_oneself(ranks: int) -> None:
    program = program_of(
        lambda x: comm.send_recv(x, source=1, target=1, workers=ranks),
        lambda x: comm.permute(x, [[k, k] for k in range(ranks)], workers=ranks),
        dtype="float32",
        ranks=ranks,
    )
    xs = [np.full(SHAPE, rank + 1, "float32") for rank in range(ranks)]
    for rank, (message, everyone) in enumerate(results_of(program, xs)):
        np.testing.assert_array_equal(message, xs[1] if rank == 1 else 0 * xs[1])
        np.testing.assert_array_equal(everyone, xs[rank])


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda x: comm.allreduce(x, "max", scale=2), ValueError, "scale is 2.0; expected None"),
        (lambda x: comm.allreduce(x, scale="a"), TypeError, "allreduce: scale is a finite number"),
        (lambda x: comm.reduce(x, scale=np.inf), ValueError, "reduce: scale is a finite number"),
        (
            lambda x: relax.BlockBuilder().normalize(
                comm.allreduce(relax.Var("i", relax.TensorType((4,), "int32")), scale=0.5)
            ),
            ValueError,
            "allreduce: scale is 0.5, but x has the type int32; expected an integer",
        ),
        (lambda x: comm.send_recv(x, x, 0, workers=2), TypeError, "send_recv: source is an index"),
        (
            lambda x: comm.collective(x, 2, 0, kind="send_recv", workers=2),
            ValueError,
            "send_recv: source is 2; expected an index in a team of 2",
        ),
        (
            lambda x: comm.collective(x, 0, kind="send_recv", workers=2),
            ValueError,
            "expected the index of the source and the index of the target",
        ),
    ],
)
def test_refused(make: Callable[[Any], relax.Call], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make(relax.Var("x", relax.TensorType((4,), "float32")))
