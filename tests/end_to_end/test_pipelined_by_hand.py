# SPDX-License-Identifier: Apache-2.0
"""A gather and a matmul in chunks, pipelined by hand: gathers of later chunks are on their way."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

import tvm_ipc
from tests.end_to_end.compare_with_numpy import Example, compare_with_numpy, verified
from tests.end_to_end.host_programs import OPTIMIZATIONS, HostBuilder, packed_names
from tvm_ipc import comm
from tvm_ipc.errors import TransformError

ROWS, INNER, COLUMNS = 3, 16, 32


class Pipeline(HostBuilder):
    """Builds the program: each rank has ROWS rows of each chunk; every rank gets all products."""

    def __init__(self, ranks: int, chunks: int, streams: int, forgotten: int = -1) -> None:
        self.ranks, self.chunks, self.streams = ranks, chunks, min(streams, chunks)
        self.forgotten = forgotten  #: the chunk that nobody waits for
        super().__init__()

    def slice(self, tensor: Any, index: int, *shape: int) -> Any:
        return self.builder.emit(comm.view(tensor, index * prod(shape), shape))

    def module(self) -> tvm.IRModule:
        rows = self.ranks * ROWS
        x = relax.Var("x", relax.TensorType((self.chunks, ROWS, INNER), "float32"))
        weight = relax.Var("weight", relax.TensorType((INNER, COLUMNS), "float32"))
        kernel = self.add_matmul(rows, INNER, COLUMNS)
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
                self.call(kernel, whole, weight, part)
            self.builder.emit_func_output(out)
        return self.builder.get()


@pytest.mark.parametrize("streams", [1, 2, 3])
@pytest.mark.parametrize(("ranks", "chunks"), [(2, 1), (2, 4), (3, 5), (4, 3)])
def test_products_are_those_of_the_whole(ranks: int, chunks: int, streams: int) -> None:
    module = Pipeline(ranks, chunks, streams).module()
    weight = np.arange(INNER * COLUMNS, dtype="float32").reshape(INNER, COLUMNS)

    def example(repetition: int) -> Example:
        drawn = np.random.default_rng(repetition).integers(0, 5, (ranks, chunks, ROWS, INNER))
        xs = drawn.astype("float32")
        return xs, [weight], [np.concatenate(list(xs), axis=1) @ weight] * ranks

    compare_with_numpy(verified(module, ranks), ranks, map(example, range(5)))


def packed_calls(module: tvm.IRModule) -> list[str]:
    """The works that are posted and waited for, in their order."""
    return [name for name in packed_names(module) if name in ("tvm_ipc.start", "tvm_ipc.wait")]


@OPTIMIZATIONS
def test_passes_leave_works_and_waits_in_their_order(transform: tvm.transform.Pass) -> None:
    module = Pipeline(2, 4, 2).module()
    after = transform(module)
    assert packed_calls(after) == packed_calls(module)
    assert len(packed_calls(after)) == 8


@pytest.mark.parametrize("forgotten", range(4))
def test_a_forgotten_wait_is_refused(forgotten: int) -> None:
    with pytest.raises(TransformError, match="before the request that writes it has ended"):
        tvm_ipc.get_pipeline("llvm", 2)(Pipeline(2, 4, 2, forgotten).module())
