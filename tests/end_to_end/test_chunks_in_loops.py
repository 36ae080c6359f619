# SPDX-License-Identifier: Apache-2.0
"""Any number of chunks and of blocks of rows, in loops, in workers, against NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax, tirx

import tvm_ipc
from tests.collective_results import cut, results_of
from tests.end_to_end.compare_with_numpy import Example, compare_with_numpy, compiled
from tests.end_to_end.test_marked_for_streams import examples, linear
from tvm_ipc import comm
from tvm_ipc.comm import Mesh
from tvm_ipc.transform import PipelineAllGather, collect_report, verify_cross_rank_safety
from tvm_ipc.verify.evaluate_at_sample_points import evaluate

CHUNKS = (1, 0, 2, 3, 4, 7, 64, 1024)
#: Two shapes of a rank's rows in a chunk: one that processors like, and one that they do not.
ROWS = {"aligned": (4, 32, 16), "not aligned": (1, 5, 3)}


def shapes(ranks: int, chunks: Any, rows: str = "aligned") -> tuple[tuple[Any, int, int, int], int]:
    """The shape of x for all ranks, and the number of columns of the result."""
    count, inner, columns = ROWS[rows]
    return (chunks, ranks, count, inner), columns


def decision(report: Any, subject: str) -> tuple[str, str]:
    (found,) = [one for one in report.decisions if one.subject.startswith(subject)]
    return found.verdict, found.reason


def on_a_link(session: Any, number: int) -> None:
    """Delay data where there are few chunks."""
    session.emulate_link(*((1e-4, 0.0, 5e-4) if number < 20 else ()))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("streams", [1, 2, 4])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_one_program_for_any_number_of_chunks(ranks: int, streams: int, rows: str) -> None:
    n = tirx.Var("n", "int64")
    shape, columns = shapes(ranks, n, rows)
    module = linear(Mesh({"d": ranks}), "d", shape, columns)
    with collect_report() as report:
        program = compiled(module, ranks, streams=streams, blas=rows == "aligned")
    at_a_time = f"their rows are gathered asynchronously, {streams} at a time, in a loop"
    assert decision(report, "stream=0") == ("in n chunks", at_a_time)
    team = [tuple(range(ranks))]
    values = (examples(team, shapes(ranks, chunks, rows)[0], columns) for chunks in CHUNKS)
    compare_with_numpy(program, ranks, chain.from_iterable(values), on_a_link)


def test_two_matmuls_of_a_gather_along_an_axis_of_a_mesh() -> None:
    """Each of two teams has its own chunks; their number and their rows are known at run time."""
    n, m = tirx.Var("n", "int64"), tirx.Var("m", "int64")
    mesh = Mesh({"x": 2, "y": 2})
    program = compiled(linear(mesh, "y", (n, 2, m, 16), 8, shared=True), 4, blas=False)
    values = (
        examples(mesh.teams("y"), (chunks, 2, rows, 16), 8, shared=True)
        for chunks, rows in ((3, 4), (0, 4), (1, 1), (2, 7), (9, 3), (4, 0))
    )
    compare_with_numpy(program, 4, chain.from_iterable(values))


N = tirx.Var("n", "int64")


@pytest.mark.parametrize(
    ("chunks", "rows", "inner"),
    [(N * 2, 4, 16), (N + 1, 3, 5), (N, N, 16), (N, 4, N + 1), (N, N * 2, 3)],
    ids=str,
)
def test_sizes_are_expressions(chunks: Any, rows: Any, inner: Any) -> None:
    """The functions of a loop get sizes that the types of their tensors do not define."""
    module = linear(Mesh({"d": 2}), "d", (chunks, 2, rows, inner), 8, shared=True)
    main = module["main"]
    told = relax.Var("told", relax.ShapeType([N]))
    ret_ty, attrs = main.ret_ty, main.attrs
    main = relax.Function([*main.params, told], main.body, ret_ty, main.is_pure, attrs)
    program = compiled(tvm.IRModule({"main": main}), 2)

    def cases(n: int) -> Iterator[Example]:
        first, *rest = (evaluate(tirx.convert(size), lambda _: n) for size in (chunks, rows, inner))
        for values, others, wanted in examples([(0, 1)], (first, 2, *rest), 8, shared=True):
            yield values, [*others, tvm.runtime.ShapeTuple([n])], wanted

    compare_with_numpy(program, 2, chain.from_iterable(map(cases, (1, 0, 2, 7, 20))))


@pytest.mark.parametrize(("chunks", "streams"), [(9, 2), (64, 1), (1024, 2), (37, 3), (20, 9)])
def test_a_large_number_of_chunks(chunks: int, streams: int) -> None:
    shape, columns = shapes(3, chunks)
    with collect_report() as report:
        program = compiled(linear(Mesh({"d": 3}), "d", shape, columns), 3, streams=streams)
    assert decision(report, "stream=0")[0] == f"in {chunks} chunks"
    assert decision(report, "stream=0")[1].endswith("in a loop")
    compare_with_numpy(program, 3, examples([(0, 1, 2)], shape, columns))


@pytest.mark.parametrize(
    ("shape", "axis", "chunks"),
    [
        ((64, 16), 0, 16),  # chunks of 4 rows
        ((192, 5), 0, 12),  # 16 rows, which are aligned together
        ((8, 6, 16), 1, 24),  # three chunks for each of 8 blocks
        ((100, 16), 0, 13),  # the last one is smaller
        ((5, 10, 16), 1, 15),  # the last one of each block is smaller
    ],
)
def test_gathers_in_many_chunks(shape: tuple[int, ...], axis: int, chunks: int) -> None:
    ranks, columns = 2, 8
    x = relax.Var("x", relax.TensorType(shape, "float32"))
    w = relax.Var("w", relax.TensorType((shape[-1], columns), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x, w]):
        with builder.dataflow():
            whole = builder.emit(comm.allgather(x, axis=axis, workers=ranks))
            out = builder.emit_output(relax.op.matmul(whole, w))
        builder.emit_func_output(out)
    with collect_report() as report:
        program = compiled(PipelineAllGather(chunks)(builder.get()), ranks, blas=False)
    verdict, reason = decision(report, "allgather of x")
    assert verdict == f"in {chunks} chunks"
    assert reason == "2 at a time, in a loop"

    def example(seed: int) -> Example:
        drawn = np.random.default_rng(seed)
        xs = drawn.integers(-3, 4, (ranks, *shape)).astype("float32")
        weight = drawn.integers(-3, 4, (shape[-1], columns)).astype("float32")
        return xs, [weight], [np.concatenate(list(xs), axis) @ weight] * ranks

    compare_with_numpy(program, ranks, map(example, range(3)), on_a_link)


# ---- blocks of rows ---------------------------------------------------------------------------


def batched(kind: str, ranks: int, blocks: Any, rows: int, *, flat: bool) -> tvm.IRModule:
    """A batch of rows that are gathered before matmuls, or summed after one."""
    gathers, inner, columns = kind == "allgather", 16, 32
    own = -(-rows // ranks) if gathers else rows
    x = relax.Var("x", relax.TensorType((blocks, own, inner), "float32"))
    weights = [relax.Var(name, relax.TensorType((inner, columns), "float32")) for name in "wv"]
    builder = relax.BlockBuilder()

    def product(left: Any, right: Any) -> Any:
        if flat:
            left = builder.emit(relax.op.reshape(left, (blocks * rows, inner)))
        y = builder.emit(relax.op.matmul(left, right))
        return builder.emit(relax.op.reshape(y, (blocks, rows, columns))) if flat else y

    with builder.function("main", [x, *weights]):
        with builder.dataflow():
            if gathers:
                extent = {} if rows % ranks == 0 else {"extent": rows}
                whole = builder.emit(comm.allgather(x, axis=1, workers=ranks, **extent))
                results = [builder.emit(relax.op.nn.relu(product(whole, w))) for w in weights]
            else:
                y = product(x, weights[0])
                uneven = rows % ranks != 0
                summed = comm.reduce_scatter(y, axis=1, workers=ranks, uneven=uneven)
                results = [builder.emit(summed)]
            out = builder.emit_output(relax.Tuple(results))
        builder.emit_func_output(out)
    return builder.get()


def batches(kind: str, ranks: int, rows: int, sizes: tuple[int, ...]) -> Iterator[Example]:
    for blocks in sizes:
        drawn = np.random.default_rng(blocks)
        weights = [drawn.integers(-4, 5, (16, 32)).astype("float32") for _ in range(2)]
        xs = drawn.integers(-4, 5, (ranks, blocks, rows, 16)).astype("float32")
        if kind == "allgather":
            wanted = [[np.maximum(xs[0] @ w, 0) for w in weights]] * ranks
            yield cut(xs[0], ranks, 1), weights, wanted
        else:
            sums = results_of(kind, [x @ weights[0] for x in xs], axis=1)
            yield list(xs), weights, [[one] for one in sums]


@pytest.mark.parametrize("flat", [False, True], ids=["stacked", "flat"])
@pytest.mark.parametrize(("ranks", "rows", "chunks"), [(2, 8, 1), (3, 7, 2), (3, 6, 4), (4, 8, 3)])
@pytest.mark.parametrize("kind", ["allgather", "reduce_scatter"])
def test_any_number_of_blocks(kind: str, ranks: int, rows: int, chunks: int, flat: bool) -> None:
    n = tirx.Var("n", "int64")
    module = batched(kind, ranks, n, rows, flat=flat)
    with collect_report() as report:
        program = compiled(module, ranks, overlap=chunks, blas=False)
    verdict, reason = decision(report, kind)
    assert verdict == f"in {chunks} chunks"
    assert "in a loop over n blocks of rows" in reason
    compare_with_numpy(program, ranks, batches(kind, ranks, rows, (3, 0, 1, 2, 4, 7, 64, 200)))
    lowered = tvm_ipc.get_pipeline("llvm", ranks, overlap=chunks, blas=False)(module)
    assert [one for one in verify_cross_rank_safety(lowered) if not one.unknown] == []


@pytest.mark.parametrize("kind", ["allgather", "reduce_scatter"])
def test_many_blocks(kind: str) -> None:
    """More blocks than a rank can expose tensors."""
    with collect_report() as report:
        program = compiled(batched(kind, 2, 100, 8, flat=True), 2, overlap=2)
    assert decision(report, kind)[0] == "in 2 chunks"
    compare_with_numpy(program, 2, batches(kind, 2, 8, (100,)))


@pytest.mark.parametrize("kind", ["allgather", "reduce_scatter"])
def test_two_axes_of_blocks(kind: str) -> None:
    """The numbers of blocks and of columns are known at run time."""
    n, m, k = (tirx.Var(name, "int64") for name in "nmk")
    ranks, rows, gathers = 3, 6, kind == "allgather"
    shape = (n, m, rows // ranks if gathers else rows, 16)
    params = [
        relax.Var("x", relax.TensorType(shape, "float32")),
        relax.Var("w", relax.TensorType((16, k * 16), "float32")),
        relax.Var("told", relax.ShapeType([k])),
    ]
    builder = relax.BlockBuilder()
    with builder.function("main", params):
        with builder.dataflow():
            x, w, _ = params
            left = builder.emit(comm.allgather(x, axis=2, workers=ranks)) if gathers else x
            y = builder.emit(relax.op.matmul(left, w))
            y = y if gathers else builder.emit(comm.reduce_scatter(y, axis=2, workers=ranks))
            out = builder.emit_output(y)
        builder.emit_func_output(out)
    with collect_report() as report:
        program = compiled(builder.get(), ranks, overlap=3)
    assert "in a loop over n * m blocks of rows" in decision(report, kind)[1]

    def example(sizes: tuple[int, int, int]) -> Example:
        *blocks, columns = sizes
        drawn = np.random.default_rng(sum(sizes))
        weight = drawn.integers(-4, 5, (16, columns * 16)).astype("float32")
        xs = drawn.integers(-4, 5, (ranks, *blocks, rows, 16)).astype("float32")
        others = [weight, tvm.runtime.ShapeTuple([columns])]
        if gathers:
            return cut(xs[0], ranks, 2), others, [xs[0] @ weight] * ranks
        return list(xs), others, results_of(kind, [x @ weight for x in xs], axis=2)

    sizes = ((1, 1, 1), (0, 3, 2), (3, 0, 1), (2, 5, 3), (7, 3, 1))
    compare_with_numpy(program, ranks, map(example, sizes))
