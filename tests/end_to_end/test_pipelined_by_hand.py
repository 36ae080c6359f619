# SPDX-License-Identifier: Apache-2.0
"""A gather and a matmul in chunks, pipelined by hand: gathers of later chunks are on their way."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax, te

import tvm_ipc
from tvm_ipc import comm
from tvm_ipc.analysis.walk_and_rewrite_bindings import calls
from tvm_ipc.errors import TransformError
from tvm_ipc.transform import verify_cross_rank_safety

ROWS, INNER, COLUMNS = 3, 16, 32


def linear(gathered: te.Tensor, weight: te.Tensor) -> te.Tensor:
    k = te.reduce_axis((0, INNER))
    shape = (gathered.shape[0], COLUMNS)
    return te.compute(shape, lambda i, j: te.sum(gathered[i, k] * weight[k, j], axis=k))


class Pipeline:
    """Builds the program: each rank has ROWS rows of each chunk; every rank gets all products."""

    def __init__(self, ranks: int, chunks: int, streams: int, forgotten: int = -1) -> None:
        self.ranks, self.chunks, self.streams = ranks, chunks, min(streams, chunks)
        self.forgotten = forgotten  #: the chunk that nobody waits for
        self.builder = relax.BlockBuilder()

    def slice(self, tensor: Any, index: int, *shape: int) -> Any:
        return self.builder.emit(comm.view(tensor, index * prod(shape), shape))

    def empty(self, *shape: int) -> Any:
        extents = relax.ShapeExpr(shape)
        return self.builder.emit(relax.op.builtin.alloc_tensor(extents, "float32", 0, "global"))

    def module(self) -> tvm.IRModule:
        rows = self.ranks * ROWS
        x = relax.Var("x", relax.TensorType((self.chunks, ROWS, INNER), "float32"))
        weight = relax.Var("weight", relax.TensorType((INNER, COLUMNS), "float32"))
        a, b = te.placeholder((rows, INNER), "float32"), te.placeholder((INNER, COLUMNS), "float32")
        kernel = te.create_prim_func([a, b, linear(a, b)])
        kernel = kernel.with_attr("global_symbol", "linear")
        linear_var = self.builder.add_func(kernel, "linear")
        with self.builder.function("main", [x, weight], pure=False):
            gathered, out = (
                self.empty(self.streams, rows, INNER),
                self.empty(self.chunks, rows, COLUMNS),
            )
            works: dict[int, Any] = {}

            def post(chunk: int) -> None:
                gather = comm.allgather(self.slice(x, chunk, ROWS, INNER), workers=self.ranks)
                recv = self.slice(gathered, chunk % self.streams, rows, INNER)
                works[chunk] = self.builder.emit(comm.start(gather, recv))

            for chunk in range(self.streams - 1):
                post(chunk)
            for chunk in range(self.chunks):
                if chunk + self.streams - 1 < self.chunks:
                    post(chunk + self.streams - 1)
                if chunk != self.forgotten:
                    self.builder.emit(comm.wait(works[chunk]))
                whole = self.slice(gathered, chunk % self.streams, rows, INNER)
                part = self.slice(out, chunk, rows, COLUMNS)
                call = relax.Call(linear_var, [whole, weight, part], ty_args=[relax.TupleType([])])
                self.builder.emit(call)
            self.builder.emit_func_output(out)
        return self.builder.get()


@pytest.mark.parametrize("streams", [1, 2, 3])
@pytest.mark.parametrize(("ranks", "chunks"), [(2, 1), (2, 4), (3, 5), (4, 3)])
def test_products_are_those_of_the_whole(ranks: int, chunks: int, streams: int) -> None:
    module = Pipeline(ranks, chunks, streams).module()
    pipeline = tvm_ipc.get_pipeline("llvm", ranks)
    assert verify_cross_rank_safety(pipeline(module)) == []
    program = tvm.compile(module, "llvm", relax_pipeline=pipeline)
    weight = np.arange(INNER * COLUMNS, dtype="float32").reshape(INNER, COLUMNS)
    with tvm_ipc.Session(ranks, threads=True, timeout=60) as session:
        main = session.load_vm_module(program)["main"]
        x, w = session.empty((chunks, ROWS, INNER), "float32"), session.put(weight)
        for repetition in range(5):
            drawn = np.random.default_rng(repetition).integers(0, 5, (ranks, chunks, ROWS, INNER))
            xs = drawn.astype("float32")
            for rank, value in enumerate(xs):
                x.debug_copy_from(rank, value)
            out = main(x, w)
            for rank in range(ranks):
                wanted = np.concatenate(list(xs), axis=1) @ weight
                np.testing.assert_array_equal(session.get(out, rank=rank), wanted)


def packed_calls(module: tvm.IRModule) -> list[str]:
    """The works that are posted and waited for, in their order."""
    names = [
        str(call.op.global_symbol)
        for call in calls(module["main"])
        if isinstance(call.op, relax.ExternFunc)
    ]
    return [name for name in names if name in ("tvm_ipc.start", "tvm_ipc.wait")]


@pytest.mark.parametrize(
    "transform",
    [
        relax.transform.DeadCodeElimination(),
        relax.transform.EliminateCommonSubexpr(),
        relax.transform.CanonicalizeBindings(),
        relax.transform.FoldConstant(),
        relax.transform.KillAfterLastUse(),
    ],
    ids=lambda one: str(one.info.name),
)
def test_passes_leave_works_and_waits_in_their_order(transform: tvm.transform.Pass) -> None:
    module = Pipeline(2, 4, 2).module()
    after = transform(module)
    assert packed_calls(after) == packed_calls(module)
    assert len(packed_calls(after)) == 8


@pytest.mark.parametrize("forgotten", range(4))
def test_a_forgotten_wait_is_refused(forgotten: int) -> None:
    with pytest.raises(TransformError, match="before the request that writes it has ended"):
        tvm_ipc.get_pipeline("llvm", 2)(Pipeline(2, 4, 2, forgotten).module())
