# SPDX-License-Identifier: Apache-2.0
"""Products along an axis that is marked for streams, in workers, against NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.relax import op

from tests.end_to_end.compare_with_numpy import Example, compare_with_numpy, compiled
from tvm_ipc.comm import Mesh, Replica, Shard, place
from tvm_ipc.transform import collect_report

Array = np.ndarray[Any, Any]
ROUNDS = 5


def linear(
    mesh: Mesh, axis: str, shape: tuple[Any, ...], columns: int, *, shared: bool = False
) -> tvm.IRModule:
    """x in chunks (axis 0), of which each rank along an axis of the mesh has some rows (axis 1).

    Gives relu(x @ weight.T + bias); and, where `shared`, x @ weight.T, too.
    """
    inner = shape[-1]
    params = [
        relax.Var("x", relax.TensorType(shape, "float32")),
        relax.Var("weight", relax.TensorType((columns, inner), "float32")),
        relax.Var("bias", relax.TensorType((columns,), "float32")),
    ]
    builder = relax.BlockBuilder()
    emit = builder.emit
    with builder.function("main", params):
        x, weight, bias = params
        with builder.dataflow():
            mine = emit(place(x, mesh, {axis: Shard(1)}))
            whole = emit(place(mine, mesh, {axis: Replica()}))
            transposed = emit(op.permute_dims(weight))
            y = emit(op.nn.relu(emit(op.add(emit(op.matmul(whole, transposed)), bias))))
            results = [builder.emit_output(place(y, mesh, {}, stream=0))]
            if shared:
                results.append(builder.emit_output(op.matmul(whole, transposed)))
        builder.emit_func_output(relax.Tuple(results) if shared else results[0])
    return builder.get()


def whole_numbers(seed: int, shape: tuple[int, ...]) -> Array:
    return np.random.default_rng(seed).integers(-3, 4, shape).astype("float32")


def in_chunks(module: tvm.IRModule, ranks: int, chunks: int, **options: Any) -> Any:
    with collect_report() as report:
        program = compiled(module, ranks, **options)
    verdicts = [one.verdict for one in report.decisions if one.subject.startswith("stream=0")]
    assert verdicts == [f"in {chunks} chunks"]
    return program


def examples(
    teams: Any, shape: tuple[int, ...], columns: int, *, shared: bool = False
) -> Iterator[Example]:
    """Fresh values for each team; first some that would stay where nothing is written."""
    weight, bias = whole_numbers(1, (columns, shape[-1])), whole_numbers(2, (columns,))
    for round_ in range(ROUNDS):
        first, wanted = {}, {}
        for team in teams:
            x = whole_numbers(10 * round_ + team[0], shape)
            if round_ == 0:
                x = np.full_like(x, np.nan)
            products = x @ weight.T
            # What is no number is 0 after ReLU, as TVM has it.
            results = [np.nan_to_num(np.maximum(products + bias, 0)), products]
            first.update(zip(team, np.split(x, len(team), axis=1), strict=True))
            wanted.update(dict.fromkeys(team, results[: 1 + shared]))
        yield first, [weight, bias], wanted


def on_a_link(session: Any, _number: int) -> None:
    session.emulate_link(latency=1e-4, jitter=1e-3)


@pytest.mark.parametrize("streams", [1, 2, 3])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_chunks(ranks: int, streams: int) -> None:
    """In 8 chunks, some shapes that processors like and some that they do not."""
    for rows, inner, columns, blas in ((4, 32, 16, True), (1, 5, 3, False)):
        shape = (8, ranks, rows, inner)
        module = linear(Mesh({"d": ranks}), "d", shape, columns)
        program = in_chunks(module, ranks, 8, streams=streams, blas=blas)
        world = [tuple(range(ranks))]
        compare_with_numpy(program, ranks, examples(world, shape, columns), on_a_link)


@pytest.mark.parametrize("axis", ["x", "y"])
def test_along_an_axis_of_a_mesh(axis: str) -> None:
    mesh, shape = Mesh({"x": 2, "y": 2}), (3, 4, 16)
    program = in_chunks(linear(mesh, axis, shape, 8, shared=True), 4, 3, blas=False)
    compare_with_numpy(program, 4, examples(mesh.teams(axis), shape, 8, shared=True))


def test_numbers_of_rows_that_are_known_where_it_runs() -> None:
    n = tirx.Var("n", "int64")
    program = in_chunks(linear(Mesh({"d": 2}), "d", (3, 2, n, 16), 8), 2, 3)
    for_rows = (
        examples([(0, 1)], (3, 2, rows, 16), 8) for rows in (0, 1, 2, 3, 7, 16, 33, 64, 100, 257)
    )
    compare_with_numpy(program, 2, chain.from_iterable(for_rows))
