# SPDX-License-Identifier: Apache-2.0
"""Programs for all ranks, lowered to what one runs, in real workers against NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tvm import relax, tirx
from tvm.relax import op

import tvm_ipc
from tests.end_to_end.placed_programs import Given, Program, module, run, session_of
from tvm_ipc.comm import Mesh, Partial, Replica, Shard, place
from tvm_ipc.errors import TransformError

MESHES = (Mesh({"tp": 2}), Mesh({"tp": 3}), Mesh({"tp": 4}), Mesh({"dp": 2, "tp": 2}, [2, 0, 3, 1]))
S0, S1, S2 = Shard(0), Shard(1), Shard(2)
R = Replica()
P = Partial()


@pytest.fixture(scope="module", params=MESHES, ids=str)
def opened(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Mesh]]:
    with session_of(request.param) as session:
        yield session, request.param


def emit(value: relax.Expr) -> relax.Var:
    return relax.BlockBuilder.current().emit(value)


def squared(x: Any) -> Any:
    return np.maximum(x, 0) * x


def mlp(x: Any, w1: Any, w2: Any) -> list[relax.Expr]:
    h = emit(op.matmul(x, w1))
    h = emit(op.multiply(emit(op.nn.relu(h)), h))
    return [op.matmul(h, w2)]


def mlp_of_exp(x: Any, w1: Any, w2: Any) -> list[relax.Expr]:
    return [op.matmul(emit(op.exp(emit(op.matmul(x, w1)))), w2)]


@pytest.mark.slow
def test_column_then_row_divided(opened: tuple[Any, Mesh]) -> None:
    """Inner axes that ranks divide, and that they do not; results in every place."""
    session, mesh = opened
    programs = {}
    wanted: dict[str, Given | None] = {
        "unsaid": None,
        "replica": {"tp": R},
        "rows": {"tp": S0},
        "columns": {"tp": S1},
        "partial": {"tp": P},
    }
    for inner in (24, 7, 1):
        for name, one in wanted.items():
            programs[f"{name}_{inner}"] = Program(
                mlp,
                [{}, {"tp": S1}, {"tp": S0}],
                [(5, 6), (6, inner), (inner, 8)],
                [one],
                lambda x, w1, w2: [squared(x @ w1) @ w2],
            )
        programs[f"exp_{inner}"] = Program(
            mlp_of_exp,
            [{}, {"tp": S1}, {"tp": S0}],
            [(5, 6), (6, inner), (inner, 8)],
            [None],
            lambda x, w1, w2: [np.exp(x @ w1) @ w2],
        )
    run(session, mesh, programs)


def test_sequence_parallel(opened: tuple[Any, Mesh]) -> None:
    """Rows are divided, gathered for the product, and scattered when its parts are summed."""
    session, mesh = opened

    def make(x: Any, gamma: Any, beta: Any, w1: Any, w2: Any) -> list[relax.Expr]:
        normed = emit(op.nn.layer_norm(x, gamma, beta, axes=[-1]))
        whole = emit(place(normed, mesh, {}))
        (y,) = mlp(whole, w1, w2)
        rows = emit(place(emit(y), mesh, {"tp": S0}))
        return [op.add(x, rows)]

    def numpy(x: Any, gamma: Any, beta: Any, w1: Any, w2: Any) -> list[Any]:
        mean, variance = x.mean(1, keepdims=True), x.var(1, keepdims=True)
        normed = (x - mean) / np.sqrt(variance + 1e-5) * gamma + beta
        return [x + squared(normed @ w1) @ w2]

    programs = {
        f"rows_{rows}": Program(
            make,
            [{"tp": S0}, {}, {}, {"tp": S1}, {"tp": S0}],
            [(rows, 6), (6,), (6,), (6, 12), (12, 6)],
            [{"tp": S0}],
            numpy,
        )
        for rows in (12, 5, 1)
    }
    run(session, mesh, programs)


def test_attention_with_divided_heads(opened: tuple[Any, Mesh]) -> None:
    session, mesh = opened
    tokens, heads, width = 5, 12, 4

    def make(x: Any, wq: Any, wk: Any, wv: Any, wo: Any) -> list[relax.Expr]:
        def split(w: Any) -> Any:
            y = emit(op.reshape(emit(op.matmul(x, w)), (2, tokens, heads, width)))
            return emit(op.permute_dims(y, [0, 2, 1, 3]))

        q, k, v = map(split, (wq, wk, wv))
        scores = emit(op.matmul(q, emit(op.permute_dims(k, [0, 1, 3, 2]))))
        scores = emit(op.multiply(scores, relax.const(0.5, "float32")))
        y = emit(op.matmul(emit(op.nn.softmax(scores)), v))
        y = emit(op.permute_dims(y, [0, 2, 1, 3]))
        return [op.matmul(emit(op.reshape(y, (2, tokens, heads * width))), wo)]

    def numpy(x: Any, wq: Any, wk: Any, wv: Any, wo: Any) -> list[Any]:
        def split(w: Any) -> Any:
            return (x @ w).reshape(2, tokens, heads, width).transpose(0, 2, 1, 3)

        q, k, v = map(split, (wq, wk, wv))
        scores = np.exp(q @ k.transpose(0, 1, 3, 2) * 0.5)
        y = scores / scores.sum(-1, keepdims=True) @ v
        return [y.transpose(0, 2, 1, 3).reshape(2, tokens, heads * width) @ wo]

    columns = {"tp": S1}
    batch: Given = {"dp": S0} if "dp" in mesh.axes else {}
    program = Program(
        make,
        [batch, columns, columns, columns, {"tp": S0}],
        [(2, tokens, 8), *[(8, heads * width)] * 3, (heads * width, 6)],
        [batch],
        numpy,
    )
    run(session, mesh, {"attention": program})


PLACES: list[Given] = [{}, {"tp": S0}, {"tp": S1}, {"tp": P}]
ON_TWO: list[Given] = [
    *PLACES,
    {"dp": S0},
    {"dp": S1},
    {"dp": S0, "tp": S1},
    {"dp": S1, "tp": S0},
    {"dp": P},
    {"dp": P, "tp": S0},
    {"dp": S1, "tp": P},
    {"dp": P, "tp": P},
]


@pytest.mark.parametrize(
    "shape",
    [
        (5, 7),
        (0, 5),
        pytest.param((4, 12), marks=pytest.mark.slow),
        pytest.param((1, 3), marks=pytest.mark.slow),
    ],
)
def test_from_each_place_to_each(opened: tuple[Any, Mesh], shape: tuple[int, int]) -> None:
    session, mesh = opened
    places = ON_TWO if "dp" in mesh.axes else PLACES
    programs = {}
    for i, source in enumerate(places):
        for k, target in enumerate(places):
            if any(one == P and source.get(name) != P for name, one in target.items()):
                continue  # refused
            programs[f"f{i}_{k}"] = Program(
                lambda x: [x], [source], [shape], [target], lambda x: [x]
            )
    run(session, mesh, programs)


def test_operands_that_lie_elsewhere(opened: tuple[Any, Mesh]) -> None:
    """A replicated operand is cut; a partial one is reduced, once."""
    session, mesh = opened

    def bias(x: Any, w: Any, b: Any) -> list[relax.Expr]:
        return [op.nn.relu(emit(op.add(emit(op.matmul(x, w)), b)))]

    def of_bias(x: Any, w: Any, b: Any) -> list[Any]:
        return [np.maximum(x @ w + b, 0)]

    shapes: list[tuple[Any, ...]] = [(5, 7), (7, 6), (6,)]
    givens: list[list[Given]] = [
        [{"tp": S1}, {"tp": S0}, {}],
        [{"tp": S1}, {}, {}],
        [{}, {"tp": S0}, {}],
        [{"tp": S0}, {}, {}],
        [{}, {"tp": S1}, {}],
        [{}, {"tp": S1}, {"tp": S0}],
        [{"tp": P}, {}, {}],
        [{"tp": P}, {"tp": S1}, {"tp": P}],
        [{"tp": P}, {"tp": S0}, {"tp": P}],
        [{"tp": S1}, {"tp": S0}, {"tp": P}],
        [{"tp": S1}, {"tp": P}, {"tp": S0}],
    ]
    programs = {
        f"f{k}": Program(bias, given, shapes, [None], of_bias) for k, given in enumerate(givens)
    }
    run(session, mesh, programs)


def test_sums_of_uneven_parts(opened: tuple[Any, Mesh]) -> None:
    """What is beyond the end is not zero before the sum."""
    session, mesh = opened

    def make(x: Any) -> list[relax.Expr]:
        y = emit(op.exp(x))
        return [op.sum(y, axis=0), op.sum(y, axis=1, keepdims=True), op.max(y, axis=1), y]

    def numpy(x: Any) -> list[Any]:
        y = np.exp(x)
        return [y.sum(0), y.sum(1, keepdims=True), y.max(1), y]

    programs = {
        f"of_{rows}": Program(
            make,
            [{"tp": S0}],
            [(rows, 4)],
            [{"tp": R}, {"tp": S0}, {"tp": S0}, {"tp": S0}],
            numpy,
        )
        for rows in (7, 8, 1)
    }
    run(session, mesh, programs)


def test_whole_numbers_are_not_divided_by_what_is_beyond_the_end(opened: tuple[Any, Mesh]) -> None:
    session, mesh = opened
    program = Program(
        lambda x, y: [op.floor_divide(x, y), op.floor_mod(x, y)],
        [{"tp": S0}, {"tp": S0}],
        [(5, 3), (5, 3)],
        [{"tp": S0}, None],
        lambda x, y: [x // y, x % y],
        "int32",
    )
    run(session, mesh, {"divided": program})


def test_symbolic_extents(opened: tuple[Any, Mesh]) -> None:
    """Rows that a parameter tells, and rows that are a multiple of the ranks."""
    session, mesh = opened
    n, m = tirx.Var("n", "int64"), tirx.Var("m", "int64")
    workers = mesh.extent("tp")

    def make(x: Any, w1: Any, w2: Any) -> list[relax.Expr]:
        (y,) = mlp(emit(place(x, mesh, {"tp": S0})), w1, w2)
        return [y]

    def numpy(x: Any, w1: Any, w2: Any) -> list[Any]:
        return [squared(x @ w1) @ w2]

    weights: list[tuple[Any, ...]] = [(6, 7), (7, 4)]
    cut = Program(make, [{}, {}, {}], [(n, 6), *weights], [None], numpy)
    run(session, mesh, {"cut": cut}, *([(rows, 6), *weights] for rows in (0, 1, 2, 5, 8, 33)))
    parts = Program(make, [{"tp": S0}, {}, {}], [(m * workers, 6), *weights], [None], numpy)
    run(
        session,
        mesh,
        {"parts": parts},
        *([(rows * workers, 6), *weights] for rows in (0, 1, 2, 7)),
    )


@pytest.mark.parametrize("ranks", [None, [0, 2]])
def test_a_mesh_of_other_ranks_than_the_session_has_is_refused(ranks: list[int] | None) -> None:
    """Also where nothing is exchanged: some workers would have no part."""
    mesh = Mesh({"tp": 2}, ranks)
    program = Program(lambda x: [op.exp(x)], [{"tp": S0}], [(4, 3)], [{"tp": S0}], np.exp)
    with pytest.raises(TransformError, match=r"places tensors on Mesh\(.*but world_size is 3"):
        tvm_ipc.get_pipeline("llvm", 3)(module(mesh, {"main": program}))
