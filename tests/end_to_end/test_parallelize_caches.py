# SPDX-License-Identifier: Apache-2.0
"""Keys and values of earlier tokens, of which each rank keeps those of its heads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.relax import op

import tvm_ipc
from tests.end_to_end.placed_programs import put, session_of
from tests.end_to_end.test_placed_operators import FAST_TO_COMPILE
from tests.one_function_modules import functions, one_function
from tvm_ipc import parallelize
from tvm_ipc.comm import Mesh, Replica, Shard
from tvm_ipc.spmd import Parallelized

HIDDEN, WIDTH = 12, 4
PLAN = {"q": Shard(0), "k": Shard(0), "v": Shard(0), "o": Shard(1)}


def attention(heads: int, kv_heads: int, batch: int = 1) -> tvm.IRModule:
    """Attention that starts with tokens, and goes on with one more after those of before."""

    def result(emit: Any, x: Any, *others: Any) -> Any:
        *past, q, k, v, o = others
        rows = x.ty.shape.values[1]

        def linear(x: Any, weight: Any) -> Any:
            return emit(op.matmul(x, op.permute_dims(weight)))

        def split(x: Any, count: int) -> Any:
            x = emit(op.reshape(x, (batch, rows, count, WIDTH)))
            return emit(op.permute_dims(x, [0, 2, 1, 3]))

        q, k, v = (split(linear(x, w), n) for w, n in ((q, heads), (k, kv_heads), (v, kv_heads)))
        if past:
            k, v = (emit(op.concat(both, 2)) for both in zip(past, (k, v), strict=True))
        total = k.ty.shape.values[2]
        wide = []
        for one in (k, v):
            one = emit(op.expand_dims(one, 2))
            one = emit(op.broadcast_to(one, (batch, kv_heads, heads // kv_heads, total, WIDTH)))
            wide.append(emit(op.reshape(one, (batch, heads, total, WIDTH))))
        scores = emit(op.matmul(q, op.permute_dims(wide[0], [0, 1, 3, 2])))
        y = emit(op.permute_dims(emit(op.matmul(op.nn.softmax(scores), wide[1])), [0, 2, 1, 3]))
        y = linear(emit(op.reshape(y, (batch, rows, heads * WIDTH))), o)
        return relax.Tuple([y, k, v])

    weights = dict.fromkeys("kv", (kv_heads * WIDTH, HIDDEN))
    weights = {"q": (heads * WIDTH, HIDDEN), **weights, "o": (HIDDEN, heads * WIDTH)}
    past = dict.fromkeys(("past_k", "past_v"), (batch, kv_heads, tirx.Var("m", "int64"), WIDTH))
    x = (batch, tirx.Var("n", "int64"), HIDDEN)
    made: dict[str, Any] = {
        "prefill": (result, {"x": x, **weights}),
        "decode": (result, {"x": (batch, 1, HIDDEN), **past, **weights}),
    }
    return functions(made, inputs={"prefill": 1, "decode": 3})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "heads", "kv_heads", "kept"),
    [(1, 6, 2, 2), (2, 6, 2, 1), (3, 6, 2, 2), (4, 6, 2, 1), (4, 5, 5, 2), (8, 8, 2, 1)],
)
def test_tokens_one_after_the_other(workers: int, heads: int, kv_heads: int, kept: int) -> None:
    """Two functions that share weights: a sum each, and no gather, for a rank keeps its heads."""
    module = attention(heads, kv_heads)
    made = parallelize(module, PLAN, workers, caches=["past_*"])
    if workers > 1:
        assert made.collectives == {"allreduce": 2}
    check(module, made, 1, kept)


def test_keys_of_a_fused_weight() -> None:
    """Pieces of what is made of a weight are the same in all functions, with a cache or without."""

    def prefill(emit: Any, x: Any, kv: Any) -> Any:
        keys = emit(op.strided_slice(emit(op.matmul(x, kv)), [1], [0], [2 * WIDTH]))
        return op.reshape(keys, (3, 2, WIDTH))

    def decode(emit: Any, x: Any, past: Any, kv: Any) -> Any:
        return op.concat([past, emit(prefill(emit, x, kv))], 0)

    x, kv = {"x": (3, HIDDEN)}, {"kv": (HIDDEN, 4 * WIDTH)}
    past = {"past": (tirx.Var("m", "int64"), 2, WIDTH)}
    both = {"prefill": (prefill, {**x, **kv}), "decode": (decode, {**x, **past, **kv})}
    mod = functions(both, inputs={"prefill": 1, "decode": 2})
    made = parallelize(mod, {"kv": Shard(1)}, 2, caches=["past"])
    assert made.shards["past"].placements == (Shard(1),)
    assert made.collectives == {}


@pytest.mark.parametrize("mesh", [Mesh({"dp": 2, "tp": 2}, [2, 0, 3, 1]), Mesh({"dp": 3})])
def test_batches_and_heads(mesh: Mesh) -> None:
    """Both are divided in the caches; rows of all batches are in the other result alone."""
    batch, heads = 2 * mesh.extent("dp"), 6
    module = attention(heads, 2, batch)
    plan: dict[str, Any] = {"x": {"dp": Shard(0)}}
    if "tp" in mesh.axes:
        plan |= {name: {"tp": one} for name, one in PLAN.items()}
    made = parallelize(module, plan, mesh, caches=["past_*"])
    sums = {"allreduce": 2} if "tp" in mesh.axes else {}
    assert made.collectives == {**sums, "allgather": 2}
    check(module, made, 2, 1 if sums else 2)


def check(module: tvm.IRModule, made: Parallelized, rows: int, kept: int) -> None:
    """Run a prompt and three tokens, and compare with one device; ranks have rows of the caches."""
    workers = len(made.mesh.ranks)
    assert made.shards["past_k"].shard_shape[1] == made.shards["past_v"].shard_shape[1] == kept
    random = np.random.default_rng(0)
    weights = [
        random.uniform(-1, 1.3, made.shards[one].shape).astype("float32")
        for one in ("q", "k", "v", "o")
    ]
    whole = relax.VirtualMachine(tvm.compile(module, FAST_TO_COMPILE), tvm.cpu())
    pipeline = tvm_ipc.get_pipeline("llvm", workers)
    executable = tvm.compile(made.module, FAST_TO_COMPILE, relax_pipeline=pipeline)
    batch = int(module["decode"].params[0].ty.shape.values[0])

    def parts(name: str, array: Any) -> list[Any]:
        cut = made.shards.get(name)
        return [array if cut is None else cut.shard(array, rank) for rank in range(workers)]

    with session_of(made.mesh) as session:
        program = session.load_vm_module(executable)
        own_weights = [
            put(session, parts(one, weight))
            for one, weight in zip(("q", "k", "v", "o"), weights, strict=True)
        ]
        past: list[Any] = []
        own: list[Any] = []
        for step in range(4):
            x = random.uniform(-1, 1, (batch, 1 if step else 3, HIDDEN)).astype("float32")
            name = "decode" if step else "prefill"
            given = map(tvm.runtime.tensor, [x, *past, *weights])
            right, *past = (one.numpy() for one in whole[name](*given))
            result = program[name](put(session, parts("x", x)), *own, *own_weights)
            ranks = [
                [one.numpy() for one in result.debug_get_from_remote(rank)]
                for rank in range(workers)
            ]
            own = []
            for k in range(2):
                of_ranks = [found[k + 1] for found in ranks]
                wanted = parts("past_k", past[k])
                for one, part in zip(of_ranks, wanted, strict=True):
                    assert one.shape == (rows, kept, 3 + step, WIDTH)
                    np.testing.assert_allclose(one, part, rtol=1e-4, atol=1e-5)
                own.append(put(session, of_ranks))
            for found, *_ in ranks:
                np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-5)


def test_caches_of_heads_that_are_not_divided() -> None:
    """Where one product needs parts of heads alone, caches are parts, and weights are whole."""
    module, caches = attention(4, 2), ["past_k", "past_v"]
    made = parallelize(module, {"o": Shard(1)}, 2, caches=caches)
    assert made.shards["past_k"].placements == (Shard(1),)
    assert made.shards["k"].placements == (Replica(),)
    assert made.collectives == {"allreduce": 2}
    made = parallelize(module, {"o": Shard(0)}, 2, caches=caches)
    assert made.shards["past_k"].placements == (Replica(),)


def test_caches_that_there_are_not() -> None:
    with pytest.raises(ValueError, match="'pass_k' matches no input; similar names are 'past_k'"):
        parallelize(attention(4, 2), PLAN, 2, caches=["pass_k"])
    with pytest.raises(ValueError, match="'past_k' is in caches and in the plan"):
        parallelize(attention(4, 2), {**PLAN, "past_k": Shard(1)}, 2, caches=["past_*"])


def test_plans_that_are_found_have_caches_follow() -> None:
    """That keys and values stay where they are is free, so that it pays to divide heads."""
    made = parallelize(attention(8, 4), "auto", 2, caches=["past_*"])
    assert made.collectives == {"allreduce": 2}, "one in each function"
    assert [made.shards[name].placements for name in ("past_k", "q", "o")] == [
        (Shard(1),),
        (Shard(0),),
        (Shard(1),),
    ]


@pytest.mark.parametrize(
    ("workers", "heads", "kv_heads", "collectives"),
    [
        (2, 6, 2, {"allreduce": 3}),
        # Ranks that have the same head count it once.
        (4, 6, 2, {"allreduce": 3}),
        # All heads of keys are on each rank, and nothing has to be added for their norm.
        (3, 12, 1, {"allreduce": 2}),
    ],
)
def test_norms_of_all_heads(
    workers: int, heads: int, kv_heads: int, collectives: dict[str, int]
) -> None:
    """Of queries and keys before they are heads: a number of each row is summed over ranks."""

    def result(emit: Any, x: Any, q: Any, k: Any, q_norm: Any, k_norm: Any, o: Any) -> Any:
        def normed(weight: Any, scale: Any, count: int) -> Any:
            y = emit(op.matmul(x, op.permute_dims(weight)))
            return emit(op.reshape(emit(op.nn.rms_norm(y, scale, axes=-1)), (5, count, WIDTH)))

        queries, keys = normed(q, q_norm, heads), normed(k, k_norm, kv_heads)
        y = emit(op.multiply(queries, emit(op.repeat(keys, heads // kv_heads, axis=1))))
        return op.matmul(emit(op.reshape(y, (5, heads * WIDTH))), o)

    rows = {"q": heads * WIDTH, "k": kv_heads * WIDTH}
    shapes: dict[str, Any] = {"x": (5, HIDDEN), **{k: (n, HIDDEN) for k, n in rows.items()}}
    shapes |= {f"{k}_norm": (n,) for k, n in rows.items()}
    mod = one_function(result, {**shapes, "o": (heads * WIDTH, HIDDEN)})
    plan = {"q": Shard(0), "k": Shard(0), "q_norm": Shard(0), "k_norm": Shard(0), "o": Shard(0)}
    parallel = parallelize(mod, plan, workers)
    assert parallel.collectives == collectives
    random = np.random.default_rng(0)
    names = [*shapes, "o"]
    arrays = {"x": random.uniform(-1, 1.3, (5, HIDDEN)).astype("float32")}
    for one in names[1:]:
        arrays[one] = random.uniform(-1, 1.3, parallel.shards[one].shape).astype("float32")

    def norm(one: str, count: int) -> Any:
        y = arrays["x"] @ arrays[one].T
        y = y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-5) * arrays[f"{one}_norm"]
        return y.reshape(5, count, WIDTH)

    both = norm("q", heads) * np.repeat(norm("k", kv_heads), heads // kv_heads, 1)
    wanted = both.reshape(5, -1) @ arrays["o"]
    pipeline = tvm_ipc.get_pipeline("llvm", workers)
    executable = tvm.compile(parallel.module, FAST_TO_COMPILE, relax_pipeline=pipeline)
    with session_of(parallel.mesh) as session:
        given = [put(session, [arrays["x"]] * workers)]
        for one in names[1:]:
            cut = parallel.shards[one]
            given.append(put(session, [cut.shard(arrays[one], rank) for rank in range(workers)]))
        found = session.load_vm_module(executable)["main"](*given)
        for rank in range(workers):
            np.testing.assert_allclose(
                found.debug_get_from_remote(rank).numpy(), wanted, 1e-4, 1e-4
            )
