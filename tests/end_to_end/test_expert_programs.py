# SPDX-License-Identifier: Apache-2.0
"""Programs that send rows whose numbers are known at run time, compiled and run against NumPy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax, tirx

import tvm_ipc
from tests.runtime.collective_cases import Array, numpy_type
from tests.runtime.ragged_rows import SPREADS, rows_of
from tests.runtime.tensors_of_ranks import arrays_on, put_each
from tvm_ipc import comm
from tvm_ipc.errors import TransformError, WorkerError
from tvm_ipc.spmd import LowerPlacements, parallelize

OpenSession = Callable[[int], tvm_ipc.Session]
#: How tokens choose their experts.
CHOICES = ("random", "one_expert", "none", "last_rank", "some")


@pytest.fixture(scope="module")
def opened() -> Iterator[OpenSession]:
    """Open sessions with a number of workers, each of them once."""
    with ExitStack() as sessions:

        @cache
        def open_session(ranks: int) -> tvm_ipc.Session:
            session = tvm_ipc.Session(ranks, threads=True, timeout=60)
            return sessions.enter_context(session)

        yield open_session


def compiled(session: tvm_ipc.Session, mod: tvm.IRModule) -> Any:
    pipeline = tvm_ipc.get_pipeline("llvm", session.num_workers)
    return session.load_vm_module(tvm.compile(mod, "llvm", relax_pipeline=pipeline))


def module_of(types: dict[str, tuple[Any, str]], make: Callable[..., Any]) -> tvm.IRModule:
    builder = relax.BlockBuilder()
    params = [relax.Var(name, relax.TensorType(*ty)) for name, ty in types.items()]
    with builder.function("main", params):
        with builder.dataflow():
            result = builder.emit_output(builder.normalize(make(builder, *params)))
        builder.emit_func_output(result)
    return builder.get()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_rows_of_a_program(ranks: int, opened: OpenSession) -> None:
    """Each kind of spread runs twice, so that memory is used again."""
    session = opened(ranks)
    n = tirx.Var("n", "int64")

    def make(builder: relax.BlockBuilder, x: relax.Var, counts: relax.Var) -> relax.Expr:
        shifted = builder.emit(relax.op.add(x, relax.const(1, "float32")))
        return comm.ragged_all_to_all(shifted, counts, n * ranks, workers=ranks)

    types = {"x": ((n, 70), "float32"), "counts": ((ranks, 2), "int64")}
    main = compiled(session, module_of(types, make))["main"]
    for spread in (*SPREADS, *SPREADS):
        for count in (0, 3, 200):
            rows = rows_of(spread, ranks, count, (70,), "float32", 2)
            result = main(put_each(session, rows.sends), put_each(session, rows.counts))
            for rank, right in enumerate(rows.received):
                found, received = arrays_on(result, rank)
                assert found.shape == (count * ranks, 70)
                np.testing.assert_array_equal(found[: len(right)], right + 1)
                np.testing.assert_array_equal(received, rows.counts[:, rank])


def test_more_rows_than_the_capacity(opened: OpenSession) -> None:
    session = opened(2)
    types = {"x": ((4, 6), "float32"), "counts": ((2,), "int64")}
    mod = module_of(types, lambda _, x, counts: comm.ragged_all_to_all(x, counts, 5, workers=2))
    main = compiled(session, mod)["main"]
    x = session.put(np.ones((4, 6), "float32"))
    main(x, session.put(np.array([3, 1])))
    with pytest.raises(WorkerError, match="worker 0 of the team receives 6 rows"):
        session.sync()
    main(x, session.put(np.array([2, 1])))
    session.sync()


@dataclass(frozen=True)
class Layer:
    """A mixture of experts, with the tokens of all ranks."""

    x: Array
    experts: Array
    weights: Array
    gate_up: Array
    down: Array

    def result(self) -> Array:
        """The result in float64."""
        x, weights, gate_up, down = (
            one.astype("float64") for one in (self.x, self.weights, self.gate_up, self.down)
        )
        total = np.zeros_like(x)
        inner = down.shape[2]
        for token, chosen in enumerate(self.experts):
            for choice, expert in enumerate(chosen):
                if not 0 <= expert < len(down):
                    continue
                both = gate_up[expert] @ x[token]
                gate = both[:inner] / (1 + np.exp(-both[:inner]))
                total[token] += weights[token, choice] * (down[expert] @ (gate * both[inner:]))
        return total

    def check(self, found: Array) -> None:
        tolerance = {2: 3e-2, 4: 1e-4}[found.dtype.itemsize]
        right = self.result()
        error = np.abs(found.astype("float64") - right).max(initial=0)
        assert error <= tolerance * max(1, np.abs(right).max(initial=0))


def layer_of(
    tokens: int, choices: int, experts: int, spread: str, dtype: str = "float32", ranks: int = 1
) -> Layer:
    random = np.random.default_rng((tokens, choices, experts, CHOICES.index(spread)))
    features, inner = 24, 10

    def draw(*shape: int) -> Array:
        return np.asarray(random.standard_normal(shape).astype(numpy_type(dtype)))

    chosen = np.stack(
        [random.permutation(experts)[:choices] for _ in range(tokens)] or [np.zeros(choices)]
    )[:tokens].astype("int64")
    if spread == "one_expert":
        chosen[:] = np.arange(choices)
    elif spread == "none":
        chosen[:] = -1
    elif spread == "last_rank":
        first = (ranks - 1) * -(-experts // ranks)
        chosen[:] = np.minimum(first + np.arange(choices), experts)
    elif spread == "some":
        chosen[random.random(chosen.shape) < 0.4] = random.choice([-1, experts])
    return Layer(
        draw(tokens, features),
        chosen,
        np.abs(draw(tokens, choices)).astype("float32"),
        draw(experts, 2 * inner, features),
        draw(experts, features, inner),
    )


def sharded_experts(matrices: Array, ranks: int) -> list[Array]:
    """The matrices of each rank, with zeros for experts that do not exist."""
    count = -(-len(matrices) // ranks)
    padded = np.zeros((count * ranks, *matrices.shape[1:]), matrices.dtype)
    padded[: len(matrices)] = matrices
    return list(padded.reshape(ranks, count, *matrices.shape[1:]))


@pytest.mark.parametrize(
    ("ranks", "experts", "choices", "dtype"),
    [
        (1, 3, 2, "float32"),
        (2, 4, 2, "float32"),
        (3, 4, 3, "float32"),
        (4, 9, 2, "float32"),
        (2, 5, 1, "bfloat16"),
        (3, 6, 2, "float16"),
    ],
)
def test_experts_of_other_ranks(
    ranks: int, experts: int, choices: int, dtype: str, opened: OpenSession
) -> None:
    """Each rank has tokens of its own, and each expert is on one rank."""
    session = opened(ranks)
    n = tirx.Var("n", "int64")
    count = -(-experts // ranks)
    types = {
        "x": ((n, 24), dtype),
        "experts": ((n, choices), "int64"),
        "weights": ((n, choices), "float32"),
        "gate_up": ((count, 20, 24), dtype),
        "down": ((count, 24, 10), dtype),
    }
    mod = module_of(types, lambda _, *operands: comm.moe(*operands, workers=ranks))
    main = compiled(session, mod)["main"]
    for spread in CHOICES:
        for tokens in (0, 1, 37):
            layer = layer_of(tokens * ranks, choices, experts, spread, dtype, ranks)
            operands = [np.split(x, ranks) for x in (layer.x, layer.experts, layer.weights)]
            operands += [sharded_experts(x, ranks) for x in (layer.gate_up, layer.down)]
            result = main(*(put_each(session, operand) for operand in operands))
            layer.check(np.concatenate([session.get(result, rank) for rank in range(ranks)]))


@pytest.mark.parametrize(("ranks", "experts"), [(2, 4), (3, 4), (4, 6)])
def test_experts_are_sharded_by_a_plan(ranks: int, experts: int, opened: OpenSession) -> None:
    """Also for fewer tokens than ranks, and tokens that the ranks do not divide."""
    session = opened(ranks)
    n = tirx.Var("n", "int64")
    types = {
        "x": ((n, 24), "float32"),
        "experts": ((n, 2), "int64"),
        "weights": ((n, 2), "float32"),
        "gate_up": ((experts, 20, 24), "float32"),
        "down": ((experts, 24, 10), "float32"),
    }
    mod = module_of(types, lambda _, *operands: comm.moe(*operands))
    plan = {"gate_up": comm.Shard(0), "down": comm.Shard(0)}
    parallel = parallelize(mod, plan, ranks)
    assert dict(parallel.collectives) == {"moe": 1, "allgather": 1}
    main = compiled(session, parallel.module)["main"]
    for tokens in (1, ranks, 29):
        layer = layer_of(tokens, 2, experts, "some")
        operands = [session.put(x) for x in (layer.x, layer.experts, layer.weights)]
        for name, x in (("gate_up", layer.gate_up), ("down", layer.down)):
            shards = [parallel.shards[name].shard(x, rank) for rank in range(ranks)]
            operands.append(put_each(session, shards))
        result = main(*operands)
        for rank in range(ranks):
            layer.check(session.get(result, rank))


def test_a_single_token_is_not_dispatched(opened: OpenSession) -> None:
    """Each rank runs its own experts on it, and one sum adds up their results."""
    session = opened(3)
    layer = layer_of(1, 3, 7, "random")
    names = ("x", "experts", "weights", "gate_up", "down")
    values = [getattr(layer, name) for name in names]
    types = {name: (x.shape, str(x.dtype)) for name, x in zip(names, values, strict=True)}
    mod = module_of(types, lambda _, *operands: comm.moe(*operands))
    parallel = parallelize(mod, {"gate_up": comm.Shard(0), "down": comm.Shard(0)}, 3)
    assert dict(parallel.collectives) == {"allreduce": 1}
    main = compiled(session, parallel.module)["main"]
    operands = [
        put_each(session, [parallel.shards[name].shard(x, rank) for rank in range(3)])
        if name in ("gate_up", "down")
        else session.put(x)
        for name, x in zip(names, values, strict=True)
    ]
    result = main(*operands)
    for rank in range(3):
        layer.check(session.get(result, rank))


def test_only_routed_tokens_move(opened: OpenSession) -> None:
    """A layer moves its tokens to their experts and back, and at most 5% more."""
    ranks, experts, tokens, choices, features = 4, 8, 120, 2, 256
    session = opened(ranks)
    types = {
        "x": ((tokens, features), "float32"),
        "experts": ((tokens, choices), "int64"),
        "weights": ((tokens, choices), "float32"),
        "gate_up": ((experts // ranks, 8, features), "float32"),
        "down": ((experts // ranks, features, 4), "float32"),
    }
    mod = module_of(types, lambda _, *operands: comm.moe(*operands, workers=ranks))
    main = compiled(session, mod)["main"]
    random = np.random.default_rng(0)
    chosen = random.integers(0, experts, (ranks, tokens, choices))
    operands = [
        put_each(session, list(chosen if name == "experts" else np.ones((ranks, *shape), dtype)))
        for name, (shape, dtype) in types.items()
    ]
    count = session.get_global_func("tvm_ipc.bytes_received")
    counts = []
    for _ in range(2):
        session.sync()
        total = count()
        counts.append([int(total.debug_get_from_remote(rank)) for rank in range(ranks)])
        main(*operands)
    moved = np.subtract(counts[1], counts[0])
    owners = chosen // (experts // ranks)
    for rank in range(ranks):
        sent = (owners[rank] != rank).sum()
        taken = sum((owners[other] == rank).sum() for other in range(ranks) if other != rank)
        routed = (sent + taken) * features * 4
        assert routed <= moved[rank] <= 1.05 * routed


MOE = {
    "x": ((8, 24), "float32"),
    "experts": ((8, 2), "int64"),
    "weights": ((8, 2), "float32"),
    "gate_up": ((4, 20, 24), "float32"),
    "down": ((4, 24, 10), "float32"),
}


@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_program_for_all_ranks_has_no_call_of_one_rank(is_sharded: bool) -> None:
    def make(builder: relax.BlockBuilder, *operands: relax.Var) -> relax.Expr:
        mesh = comm.Mesh({"ep": 2})
        *others, gate_up, down = operands
        placement = comm.Shard(0) if is_sharded else comm.Replica()
        placed = [builder.emit(comm.place(x, mesh, {"ep": placement})) for x in (gate_up, down)]
        return comm.moe(*others, *placed, workers=2)

    message = r"R.comm.moe, with workers=2, for one rank, but .* leave out workers and team"
    with pytest.raises(TransformError, match=message):
        LowerPlacements()(module_of(MOE, make))


def test_other_numbers_of_workers_are_refused(opened: OpenSession) -> None:
    mod = module_of(MOE, lambda _, *operands: comm.moe(*operands, workers=2))
    with pytest.raises(TransformError, match="moe over 2 workers, but the session has"):
        tvm_ipc.get_pipeline("llvm", 3)(mod)
    teams = module_of(MOE, lambda _, *operands: comm.moe(*operands, team=[[0, 1]]))
    with pytest.raises(TransformError, match=r"a collective \(moe\) over the team \[0, 1\], but"):
        tvm_ipc.get_pipeline("llvm", 3)(teams)
    library = tvm.compile(mod, "llvm", relax_pipeline=tvm_ipc.get_pipeline("llvm", 2))
    session = opened(3)
    main = session.load_vm_module(library)["main"]
    main(*(session.empty(*ty) for ty in MOE.values()))
    with pytest.raises(WorkerError, match="compiled for 2 workers"):
        session.sync()
