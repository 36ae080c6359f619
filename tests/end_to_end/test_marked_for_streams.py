# SPDX-License-Identifier: Apache-2.0
"""Products along an axis that is marked for streams, in workers, against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.relax import op

import tvm_ipc
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


def compiled(module: tvm.IRModule, ranks: int, chunks: int, **options: Any) -> Any:
    with collect_report() as report:
        pipeline = tvm_ipc.get_pipeline("llvm", ranks, **options)
        program = tvm.compile(module, "llvm", relax_pipeline=pipeline)
    verdicts = [one.verdict for one in report.decisions if one.subject.startswith("stream=0")]
    assert verdicts == [f"in {chunks} chunks"]
    return program


def check(
    session: Any,
    main: Any,
    teams: Any,
    shape: tuple[int, ...],
    columns: int,
    *,
    shared: bool = False,
) -> None:
    """Fresh values in the same buffers; first some that would stay where nothing is written."""
    weight, bias = whole_numbers(1, (columns, shape[-1])), whole_numbers(2, (columns,))
    chunks, rows, *rest = shape
    place_of = {rank: (team, place) for team in teams for place, rank in enumerate(team)}
    each = rows // len(teams[0])
    given = session.empty((chunks, each, *rest), "float32")
    constants = session.put(weight), session.put(bias)
    for round_ in range(ROUNDS):
        xs = {team: whole_numbers(10 * round_ + team[0], shape) for team in teams}
        if round_ == 0:
            xs = {team: np.full_like(x, np.nan) for team, x in xs.items()}
        for rank, (team, place_) in place_of.items():
            given.debug_copy_from(rank, xs[team][:, each * place_ : each * (place_ + 1)])
        out = main(given, *constants)
        for rank, (team, _) in place_of.items():
            products = xs[team] @ weight.T
            found = out.debug_get_from_remote(rank)
            # What is no number is 0 after ReLU, as TVM has it.
            wanted = np.nan_to_num(np.maximum(products + bias, 0))
            np.testing.assert_array_equal((found[0] if shared else found).numpy(), wanted)
            if shared:
                np.testing.assert_array_equal(found[1].numpy(), products)


@pytest.mark.parametrize("streams", [1, 2, 3])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_chunks(ranks: int, streams: int) -> None:
    """In 8 chunks, some shapes that processors like and some that they do not."""
    with tvm_ipc.Session(ranks, threads=True, timeout=60) as session:
        session.emulate_link(latency=1e-4, jitter=1e-3)
        for rows, inner, columns, blas in ((4, 32, 16, True), (1, 5, 3, False)):
            shape = (8, ranks, rows, inner)
            module = linear(Mesh({"d": ranks}), "d", shape, columns)
            program = compiled(module, ranks, 8, streams=streams, blas=blas)
            check(
                session,
                session.load_vm_module(program)["main"],
                [tuple(range(ranks))],
                shape,
                columns,
            )


@pytest.mark.parametrize("axis", ["x", "y"])
def test_along_an_axis_of_a_mesh(axis: str) -> None:
    mesh, shape = Mesh({"x": 2, "y": 2}), (3, 4, 16)
    program = compiled(linear(mesh, axis, shape, 8, shared=True), 4, 3, blas=False)
    with tvm_ipc.Session(4, threads=True, timeout=60) as session:
        main = session.load_vm_module(program)["main"]
        check(session, main, mesh.teams(axis), shape, 8, shared=True)


def test_numbers_of_rows_that_are_known_where_it_runs() -> None:
    n = tirx.Var("n", "int64")
    program = compiled(linear(Mesh({"d": 2}), "d", (3, 2, n, 16), 8), 2, 3)
    with tvm_ipc.Session(2, threads=True, timeout=60) as session:
        main = session.load_vm_module(program)["main"]
        for rows in (0, 1, 2, 3, 7, 16, 33, 64, 100, 257):
            check(session, main, [(0, 1)], (3, 2, rows, 16), 8)
