# SPDX-License-Identifier: Apache-2.0
"""Layers on different ranks, which send to the next ones, against one device."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.relax import op

import tvm_ipc
from tests.end_to_end.placed_programs import put, session_of
from tests.end_to_end.small_decoder import PLAN, Decoder
from tests.end_to_end.test_placed_operators import FAST_TO_COMPILE
from tests.one_function_modules import functions, one_function
from tvm_ipc import parallelize
from tvm_ipc.analysis.walk_and_rewrite_bindings import rewrite, with_value
from tvm_ipc.comm import Mesh, Shard, allreduce, place
from tvm_ipc.errors import TransformError, WorkerDiedError
from tvm_ipc.transform import collect_report

SIZES = [(8, 6), (6, 7), (7, 30), (30, 5)]


def mlp(sizes: Any = SIZES, rows: int = 1, independent: bool = False) -> tvm.IRModule:
    """Return products one after the other, or of one input, and a mean that no weight is used for.

    The first one is a result too, unless they are independent: then it is the last one alone.
    """
    n = tirx.Var("n", "int64") * rows
    shapes = {f"fc{k}.weight": size for k, size in enumerate(sizes)}

    def result(emit: Any, x: Any, *weights: Any) -> Any:
        y = x
        first = None
        for weight in weights:
            given = x if independent else y
            y = emit(op.tanh(emit(op.matmul(given, weight))))
            first = y if first is None else first
        mean = emit(op.mean(x, [1], keepdims=True))
        y = emit(op.add(y, mean))
        return relax.Tuple([y, relax.Tuple([mean if independent else first, mean])])

    return one_function(result, {"x": (n, sizes[0][0]), **shapes}, num_input=1)


def expected(x: Any, weights: Any) -> tuple[Any, Any, Any]:
    y, first = x, None
    for weight in weights:
        y = np.tanh(y @ weight)
        first = y if first is None else first
    mean = x.mean(1, keepdims=True)
    return y + mean, first, mean


def values(sizes: Any = SIZES) -> dict[str, Any]:
    random = np.random.default_rng(1)
    return {
        f"fc{k}.weight": (random.uniform(-1, 1.2, size) / size[0] ** 0.5).astype("float32")
        for k, size in enumerate(sizes)
    }


def compiled(made: Any) -> Any:
    pipeline = tvm_ipc.get_pipeline("llvm", len(made.mesh.ranks))
    return tvm.compile(made.module, FAST_TO_COMPILE, relax_pipeline=pipeline)


@pytest.mark.parametrize(
    ("mesh", "stages", "has"),
    [
        (Mesh({"pp": 2}), None, [0, 0, 1, 1]),
        (Mesh({"pp": 2}), ["fc1"], [0, 1, 1, 1]),
        (Mesh({"pp": 3}, [2, 0, 1]), ["fc1", "fc3"], [0, 1, 1, 2]),
        (Mesh({"dp": 2, "pp": 2}, [3, 1, 0, 2]), ["fc2"], [0, 0, 1, 1]),
        (Mesh({"pp": 2, "tp": 2}), ["fc2"], [0, 0, 1, 1]),
        (Mesh({"pp": 1}), None, [0, 0, 0, 0]),
    ],
)
def test_stages_of_products(mesh: Mesh, stages: list[str] | None, has: list[int]) -> None:
    """Results are on the ranks of the stage that makes them; others have nothing of them."""
    plan: dict[str, Any] = {"x": {"dp": Shard(0)}} if "dp" in mesh.axes else {}
    if "tp" in mesh.axes:
        plan = {"fc0": Shard(1), "fc1": Shard(0), "fc2": Shard(1), "fc3": Shard(0)}
    made = parallelize(mlp(rows=mesh.axes.get("dp", 1)), plan, mesh, stages=stages)
    ranks = list(zip(*mesh.teams("pp"), strict=True))
    for k, stage in enumerate(has):
        assert made.shards[f"fc{k}.weight"].ranks == tuple(sorted(ranks[stage]))
    weights = values()
    with session_of(mesh) as session:
        own = tvm_ipc.load_weights(session, weights, made.shards)
        for name, one in own.items():
            for rank in mesh.ranks:
                shape = one.debug_get_from_remote(rank).shape
                known = rank in (made.shards[name].ranks or ())
                assert tuple(shape) == (made.shards[name].shard_shape if known else (0, 0))
        main = session.load_vm_module(compiled(made))["main"]
        for rows in (4, 1):
            rows *= mesh.axes.get("dp", 1)
            x = np.random.default_rng(rows).uniform(-1, 1, (rows, 8)).astype("float32")
            cut = made.shards.get("x")
            given = [x if cut is None else cut.shard(x, rank) for rank in range(len(mesh.ranks))]
            if cut is not None:  # every stage is given its inputs
                assert set(cut.ranks or ()) == set(mesh.ranks)
            result = main(put(session, given), *own.values())
            y, first, mean = expected(x, weights.values())
            for rank in mesh.ranks:
                found, (found_first, found_mean) = result.debug_get_from_remote(rank)
                if rank in ranks[has[0]]:
                    np.testing.assert_allclose(found_first.numpy(), first, 1e-4, 1e-5)
                else:
                    assert found_first is None
                if rank in ranks[-1]:
                    np.testing.assert_allclose(found.numpy(), y, 1e-4, 1e-5)
                    np.testing.assert_allclose(found_mean.numpy(), mean, 1e-4, 1e-5)
                else:
                    assert found is None and found_mean is None


@pytest.mark.parametrize(
    ("mesh", "collectives"),
    [
        (Mesh({"pp": 3}), {"send_recv": 2}),
        (Mesh({"pp": 2, "tp": 2}), {"send_recv": 1, "allreduce": 4, "allgather": 1}),
    ],
)
def test_a_decoder(mesh: Mesh, collectives: dict[str, int]) -> None:
    """What is sent is the residual alone; masks and angles each stage computes."""
    decoder = Decoder(layers=2)
    made = parallelize(decoder.module, PLAN if "tp" in mesh.axes else {}, mesh)
    assert made.collectives == collectives
    assert sum(made.bytes_of_rank(r) for r in mesh.ranks) < 1.2 * sum(
        one.bytes or 0 for one in made.shards.values()
    )
    weights = decoder.values()
    whole = relax.VirtualMachine(tvm.compile(decoder.module, FAST_TO_COMPILE), tvm.cpu())
    with session_of(mesh) as session:
        own = tvm_ipc.load_weights(session, weights, made.shards)
        main = session.load_vm_module(compiled(made))["main"]
        for length in (5, 1):
            ids = np.arange(length)[None] * 7 % 37
            wanted = whole["main"](*map(tvm.runtime.tensor, [ids, *weights.values()])).numpy()
            result = main(session.put(ids), *own.values())
            np.testing.assert_allclose(session.get(result, mesh.ranks[-1]), wanted, 1e-4, 1e-5)
            with pytest.raises(TypeError, match="rank 0 holds a NoneType"):
                session.get(result, 0)


# ---- caches, and calls one after the other -----------------------------------------------------


def cached(layers: int = 3, hidden: int = 6) -> tvm.IRModule:
    """Return layers of attention that starts with rows, and goes on with one more."""

    def result(emit: Any, y: Any, *others: Any) -> Any:
        past, weights = others[: -3 * layers], others[-3 * layers :]
        kept = []
        for layer in range(layers):
            k, q, o = weights[3 * layer : 3 * layer + 3]
            keys = emit(op.matmul(y, k))
            if past:
                keys = emit(op.concat([past[layer], keys], 0))
            kept.append(keys)
            scores = emit(op.matmul(op.matmul(y, q), op.permute_dims(keys)))
            y = emit(op.add(y, op.matmul(emit(op.matmul(op.nn.softmax(scores), keys)), o)))
        return relax.Tuple([y, *kept])

    n, m = tirx.Var("n", "int64"), tirx.Var("m", "int64")
    past = {f"past_{k}": (m, hidden) for k in range(layers)}
    weights = {f"layers.{k}.{one}": (hidden, hidden) for k in range(layers) for one in "kqo"}
    made: dict[str, Any] = {
        "prefill": (result, {"x": (n, hidden), **weights}),
        "decode": (result, {"x": (1, hidden), **past, **weights}),
    }
    return functions(made, inputs={"prefill": 1, "decode": 1 + layers})


@pytest.mark.parametrize("stages", [None, ["layers.2"]])
def test_tokens_one_after_the_other(stages: list[str] | None) -> None:
    """Each rank keeps the rows of its layers, and is given nothing of the others."""
    module = cached()
    plan = {"q": Shard(1), "k": Shard(1), "o": Shard(0)}
    mesh = Mesh({"pp": 2, "tp": 2})
    made = parallelize(module, plan, mesh, stages=stages, caches=["past_*"])
    random = np.random.default_rng(0)
    names = [name for name, one in made.shards.items() if not one.is_input]
    weights = {
        one: random.uniform(-1, 1.2, (6, 6)).astype("float32") / np.float32(3) for one in names
    }
    whole = relax.VirtualMachine(tvm.compile(module, FAST_TO_COMPILE), tvm.cpu())
    with session_of(mesh) as session:
        program = session.load_vm_module(compiled(made))
        own = list(tvm_ipc.load_weights(session, weights, made.shards).values())
        field = session.get_global_func("ffi.ArrayGetItem")  # None on ranks of other stages
        past: list[Any] = []
        result: Any = None
        for step in range(4):
            x = random.uniform(-1, 1, (1 if step else 3, 6)).astype("float32")
            name = "decode" if step else "prefill"
            parts = [field(result, k + 1) for k in range(len(past))]
            given = map(tvm.runtime.tensor, [x, *past, *weights.values()])
            y, *past = (one.numpy() for one in whole[name](*given))
            result = program[name](session.put(x), *parts, *own)
            for rank in range(4):
                found, *kept = result.debug_get_from_remote(rank)
                assert (found is None) == (rank < 2)
                if found is not None:
                    np.testing.assert_allclose(found.numpy(), y, 1e-4, 1e-5)
                for k, one in enumerate(kept):
                    cut = made.shards[f"past_{k}"]
                    assert cut.ranks == made.shards[f"layers.{k}.k"].ranks
                    assert (one is None) == (rank not in (cut.ranks or ()))
                    if one is not None:
                        np.testing.assert_allclose(
                            one.numpy(), cut.shard(past[k], rank), 1e-4, 1e-5
                        )


def test_micro_batches() -> None:
    """Calls are not waited for: a stage goes on with the next one while others have the first."""
    made = parallelize(mlp(), {}, Mesh({"pp": 3}), stages=["fc1", "fc3"])
    weights = values()
    with session_of(made.mesh) as session:
        own = tvm_ipc.load_weights(session, weights, made.shards)
        main = session.load_vm_module(compiled(made))["main"]
        x = np.random.default_rng(0).uniform(-1, 1, (11, 8)).astype("float32")
        results = [main(session.put(part), *own.values()) for part in np.array_split(x, 5)]
        found = [one.debug_get_from_remote(2)[0].numpy() for one in results]
        wanted = expected(x, weights.values())[0]
        np.testing.assert_allclose(np.concatenate(found), wanted, 1e-4, 1e-5)


def test_a_stage_that_dies() -> None:
    """Whoever waits for it, or for what it would send on, ends; there is one exception."""
    made = parallelize(mlp(), {}, Mesh({"pp": 3}), stages=["fc1", "fc3"])
    weights = values()
    program = compiled(made)
    with tvm_ipc.Session(3, timeout=60) as session:
        own = tvm_ipc.load_weights(session, weights, made.shards)
        main = session.load_vm_module(program)["main"]
        x = session.put(np.ones((2, 8), "float32"))
        main(x, *own.values())
        session.sync()
        os.kill(session.pids[1], signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match="rank 1"):
            session.get(main(x, *own.values()), rank=2)


def test_what_is_sent_to_nobody() -> None:
    """Whoever changes what one stage runs is told before the program runs who would wait."""
    made = parallelize(mlp(), {}, Mesh({"pp": 2}), stages=["fc2"])
    functions = {str(var.name_hint): (var, one) for var, one in made.module.functions_items()}
    var, stage = functions["main_stage_1"]

    def change(binding: Any, value: Any) -> Any:
        received = isinstance(value, relax.Call) and hasattr(value.attrs, "team")
        return [with_value(binding, value.args[0])] if received else None

    alone = tvm.IRModule(dict(made.module.functions_items()))
    alone.update_func(var, rewrite(stage, change))
    for module, found in ((made.module, []), (alone, ["rank 0 may be waiting indefinitely"])):
        with collect_report() as report, tvm.target.Target("llvm"):
            tvm_ipc.get_pipeline("llvm", 2)(module)
        unsafe = [one for one in report.decisions if one.pass_name == "VerifyCrossRankSafety"]
        assert len(unsafe) == len(found)
        assert all(text in one.reason for text, one in zip(found, unsafe, strict=True))


# ---- what is refused -----------------------------------------------------------------------------


def test_a_stage_without_a_layer() -> None:
    with pytest.raises(ValueError, match=r"3 stages along 'pp', and the program has 2 layers, fc0"):
        parallelize(mlp(SIZES[:2]), {}, Mesh({"pp": 3}))
    with pytest.raises(ValueError, match="stage 1, which begins with 'fc2', uses no weight"):
        parallelize(mlp(), {}, Mesh({"pp": 3}), stages=["fc2", "fc1"])
    idle = mlp([(8, 6), (8, 7)], independent=True)
    with pytest.raises(TransformError, match="stage 0 computes nothing that a later stage"):
        parallelize(idle, {}, Mesh({"pp": 2}), stages=["fc1"])
    with pytest.raises(ValueError, match="stage 0 uses no weight"):
        parallelize(mlp(), {}, Mesh({"pp": 2}), stages=["fc0"])


def test_stages_that_are_not_there() -> None:
    with pytest.raises(ValueError, match="'fc7' matches no parameter; similar names are 'fc3'"):
        parallelize(mlp(), {}, Mesh({"pp": 2}), stages=["fc7"])
    with pytest.raises(ValueError, match=r"has 3 stages along 'pp', but \['fc1'\] has 1 pat"):
        parallelize(mlp(), {}, Mesh({"pp": 3}), stages=["fc1"])
    with pytest.raises(ValueError, match="has 1 stage along 'pp'"):
        parallelize(mlp(), {}, Mesh({"tp": 2}), stages=["fc1"])


def test_what_is_divided_among_stages() -> None:
    with pytest.raises(ValueError, match="no weight is sharded along 'pp'"):
        parallelize(mlp(), {"fc1": {"pp": Shard(0)}}, Mesh({"pp": 2, "tp": 2}))
    with pytest.raises(ValueError, match="no axis along which weights are sharded"):
        parallelize(mlp(), {"fc1": Shard(0)}, Mesh({"pp": 2}))
    mesh = Mesh({"pp": 2})
    mod = one_function(
        lambda emit, x, w: op.matmul(op.matmul(x, emit(place(w, mesh, {"pp": Shard(0)}))), w),
        dict.fromkeys("xw", (4, 4)),
        num_input=1,
    )
    with pytest.raises(TransformError, match="shards w along 'pp'"):
        parallelize(mod, {}, mesh)


def test_a_collective_of_all_ranks() -> None:
    mod = one_function(
        lambda emit, x, w, v: op.matmul(emit(allreduce(emit(op.matmul(x, w)))), v),
        dict.fromkeys("xwv", (4, 4)),
        num_input=1,
    )
    with pytest.raises(TransformError, match="has a collective of all ranks"):
        parallelize(mod, {}, Mesh({"pp": 2}))
