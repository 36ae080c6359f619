# SPDX-License-Identifier: Apache-2.0
"""What is made of operands that are divided in different ways: joined axes, and shared heads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op
from tvm.script import ir as I
from tvm.script import relax as R

import tvm_ipc
from tests.end_to_end.placed_programs import put, session_of
from tests.end_to_end.test_placed_operators import FAST_TO_COMPILE
from tests.one_function_modules import one_function
from tvm_ipc import parallelize
from tvm_ipc.analysis.walk_and_rewrite_bindings import rewrite
from tvm_ipc.comm import Mesh, Shard, place
from tvm_ipc.errors import TransformError
from tvm_ipc.spmd import LowerPlacements, Parallelized

ROWS, HIDDEN, WIDTH = 3, 5, 4


def run(made: Parallelized, arrays: list[Any], module: tvm.IRModule | None = None) -> list[Any]:
    """Return what each rank gets of whole inputs and weights."""
    ranks = made.mesh.ranks
    program = tvm.compile(
        made.module if module is None else module,
        FAST_TO_COMPILE,
        relax_pipeline=tvm_ipc.get_pipeline("llvm", len(ranks)),
    )
    with session_of(made.mesh) as session:
        given = [put(session, dict.fromkeys(ranks, arrays[0]))]
        for cut, array in zip(made.shards.values(), arrays[1:], strict=True):
            given.append(put(session, {rank: cut.shard(array, rank) for rank in ranks}))
        out = session.load_vm_module(program)["main"](*given)
        return [session.get(out, rank) for rank in ranks]


def draw(*shapes: tuple[int, ...]) -> list[Any]:
    drawn = np.random.default_rng(0)
    return [drawn.uniform(-1, 1, shape).astype("float32") for shape in shapes]


@I.ir_module
class Joined:
    """Two products side by side, of which a third one is made."""

    @R.function
    def main(
        x: R.Tensor((3, 5), "float32"),
        one: R.Tensor((7, 5), "float32"),
        two: R.Tensor((12, 5), "float32"),
        down: R.Tensor((5, 19), "float32"),
    ):
        R.func_attr({"num_input": 1})
        with R.dataflow():
            first = R.matmul(x, R.permute_dims(one))
            second = R.matmul(x, R.permute_dims(two))
            both = R.exp(R.concat((first, second), axis=-1))
            y = R.matmul(both, R.permute_dims(down))
            R.output(y)
        return y


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_an_axis_that_is_joined_of_divided_ones(workers: int) -> None:
    """Each rank joins its parts, and the next weight is divided as these are."""
    plan = {"one": Shard(0), "two": Shard(0), "down": Shard(1)}
    made = parallelize(Joined, plan, workers)
    assert made.collectives == {"allreduce": 1}
    (lies,) = made.shards["down"].placements
    assert str(lies) == f"S[1: 7/{workers}+12/{workers}]"
    x, one, two, down = arrays = draw((3, 5), (7, 5), (12, 5), (5, 19))
    wanted = np.exp(np.concatenate((x @ one.T, x @ two.T), axis=-1)) @ down.T
    for found in run(made, arrays):
        np.testing.assert_allclose(found, wanted, rtol=1e-4)


def test_little_that_is_divided_is_gathered() -> None:
    """Otherwise all of the result would have to be, where it is needed."""
    made = parallelize(Joined, {"one": Shard(0)}, 2)
    assert made.collectives == {"allgather": 1}
    gathered = [one for one in made.decisions if one.subject.startswith("allgather")]
    assert "first" in gathered[0].subject


def attention(queries: int, keys: int) -> tvm.IRModule:
    """Attention of some heads of queries, several of which share keys and values."""
    shapes = {
        "x": (1, ROWS, HIDDEN),
        "q": (queries * WIDTH, HIDDEN),
        "k": (keys * WIDTH, HIDDEN),
        "v": (keys * WIDTH, HIDDEN),
        "o": (HIDDEN, queries * WIDTH),
    }

    def result(emit: Any, x: Any, q: Any, k: Any, v: Any, o: Any) -> Any:
        def product(x: Any, w: Any) -> Any:
            return emit(op.matmul(x, emit(op.permute_dims(w))))

        heads = [
            emit(op.reshape(product(x, w), (1, ROWS, count, WIDTH)))
            for w, count in ((q, queries), (k, keys), (v, keys))
        ]
        seen = emit(op.nn.attention(*heads))
        return product(emit(op.reshape(seen, (1, ROWS, queries * WIDTH))), o)

    return one_function(result, shapes, num_input=1)


def repeated(mod: tvm.IRModule) -> tvm.IRModule:
    """Heads of keys and values as often as TVM's own kernel wants them."""
    functions = {}
    for name, function in mod.functions_items():
        functions[name] = rewrite(function, _repeat)
    return tvm.IRModule(functions)


def _repeat(binding: relax.Binding, value: relax.Expr) -> list[relax.Binding] | None:
    if not isinstance(value, relax.Call) or getattr(value.op, "name", "") != "relax.nn.attention":
        return None
    queries, keys = (int(one.ty.shape.values[2]) for one in value.args[:2])
    builder = relax.BlockBuilder()
    made: list[relax.Binding] = []
    for one in value.args[1:3]:
        call = builder.normalize(op.repeat(one, queries // keys, 2))
        made.append(relax.VarBinding(relax.DataflowVar("repeated", call.ty), call))
    call = builder.normalize(op.nn.attention(value.args[0], *(one.var for one in made)))
    return [*made, relax.VarBinding(binding.var, call)]


@pytest.mark.parametrize(
    ("queries", "keys", "workers"), [(6, 2, 2), (6, 2, 4), (6, 3, 2), (4, 1, 4), (4, 1, 3)]
)
def test_heads_of_queries_that_share_keys(queries: int, keys: int, workers: int) -> None:
    """More ranks than heads of keys, or none that divide them: copies of these, and no gather."""
    plan = {"q": Shard(0), "k": Shard(0), "v": Shard(0), "o": Shard(1)}
    made = parallelize(attention(queries, keys), plan, workers)
    assert made.collectives == {"allreduce": 1}
    arrays = draw(
        (1, ROWS, HIDDEN),
        *((heads * WIDTH, HIDDEN) for heads in (queries, keys, keys)),
        (HIDDEN, queries * WIDTH),
    )
    wanted = _attended(*arrays, queries, keys)
    for found in run(made, arrays, repeated(made.module)):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def _attended(x: Any, q: Any, k: Any, v: Any, o: Any, queries: int, keys: int) -> Any:
    heads = [(x @ w.T).reshape(1, ROWS, -1, WIDTH).transpose(0, 2, 1, 3) for w in (q, k, v)]
    k, v = (np.repeat(one, queries // keys, 1) for one in heads[1:])
    scores = np.exp(heads[0] @ k.transpose(0, 1, 3, 2) / np.sqrt(WIDTH))
    seen = scores / scores.sum(-1, keepdims=True) @ v
    return seen.transpose(0, 2, 1, 3).reshape(1, ROWS, -1) @ o.T


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        ({0: "S[2]"}, "the shards of the queries do not match its 2 heads of keys and values"),
        ({0: "S[2: 6/2]", 1: "S[2: 2/2]"}, "which are different divisions of one axis for it"),
        ({1: "S[2]", 2: "S[2: 2/2]"}, "which are different divisions of one axis for it"),
    ],
)
def test_heads_that_are_not_divided_alike_are_refused(lie: dict[int, str], reason: str) -> None:
    """In a program that says places itself nothing is moved that it does not say."""
    mesh = Mesh({"tp": 4})

    def result(emit: Any, *params: Any) -> Any:
        placed = [place(one, mesh, {"tp": lie.get(k, "R")}) for k, one in enumerate(params)]
        return op.nn.attention(*map(emit, placed))

    shapes = {name: (1, ROWS, heads, WIDTH) for name, heads in (("q", 6), ("k", 2), ("v", 2))}
    mod = one_function(result, shapes)
    with pytest.raises(TransformError, match=reason):
        LowerPlacements()(mod)
