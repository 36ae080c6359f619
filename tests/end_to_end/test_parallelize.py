# SPDX-License-Identifier: Apache-2.0
"""Models that are cut by a plan, in real workers, against the model on one device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from random import Random
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op
from tvm.relax.distributed import DeviceMesh
from tvm.relax.distributed import Placement as DistPlacement

import tvm_ipc
from tests.end_to_end.operator_cases import CASES, Draw
from tests.end_to_end.placed_programs import compare, put, session_of
from tests.end_to_end.small_decoder import FUSED_PLAN, PLAN, Decoder, whole_model
from tests.end_to_end.test_placed_operators import FAST_TO_COMPILE
from tests.one_function_modules import one_function
from tvm_ipc import parallelize
from tvm_ipc.comm import Mesh, Shard
from tvm_ipc.spmd import Parallelized

WHOLE_VOCABULARY = {**PLAN, "model.embed_tokens": "embedding_rowwise"}


def run(made: Parallelized, name: str, arrays: Sequence[Any], session: Any = None) -> list[Any]:
    """Return what each rank gets, given whole arrays."""
    ranks = made.mesh.ranks
    if session is None:
        with session_of(made.mesh) as opened:
            return run(made, name, arrays, opened)
    pipeline = tvm_ipc.get_pipeline("llvm", len(ranks))
    executable = tvm.compile(made.module, FAST_TO_COMPILE, relax_pipeline=pipeline)
    function = session.load_vm_module(executable)[name]
    by_parameter = {one.parameter: one for one in made.shards.values()}
    references = []
    params = [str(one.name) for one in made.module[name].params]
    for parameter, array in zip(params, arrays, strict=True):
        parts = {
            rank: by_parameter[parameter].shard(array, rank) if parameter in by_parameter else array
            for rank in ranks
        }
        references.append(put(session, parts))
    result = function(*references)
    return [result.debug_get_from_remote(rank) for rank in ranks]


@cache
def expected_of(**sizes: int) -> tuple[Decoder, list[Any], Any]:
    """Return a model, what it is given, and what it gives on one device."""
    decoder = Decoder(**sizes)
    ids = np.random.default_rng(0).integers(0, decoder.vocabulary, (1, 7))
    arrays = [ids, *decoder.values().values()]
    return decoder, arrays, whole_model(decoder)(*arrays)


def check(plan: Any, mesh: Any, **sizes: int) -> Parallelized:
    decoder, arrays, expected = expected_of(**sizes)
    made = parallelize(decoder.module, plan, mesh)
    for found in run(made, "main", arrays):
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-5)
    return made


@pytest.mark.parametrize("mesh", [2, 3, 4])
def test_a_decoder(mesh: int) -> None:
    """Two sums a layer and one of the embedding, and the columns of the last product.

    Three and four ranks divide neither two heads of keys and values, nor six heads of queries.
    """
    made = check(WHOLE_VOCABULARY, mesh)
    assert made.collectives == {"allreduce": 5, "allgather": 1}
    whole = sum(np.prod(shape) * 4 for shape in Decoder().weights.values())
    assert whole / mesh <= made.bytes_per_rank < whole / mesh * 1.4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "sizes", "queries", "keys"),
    [
        # Four ranks have the first head of keys, and two heads of queries each.
        (8, {"heads": 16, "kv_heads": 2}, (8, 64), (4, 64)),
        (8, {"heads": 8, "kv_heads": 1}, (4, 32), (4, 32)),
        # Two ranks have three heads of queries: two and one.
        (4, {"heads": 6, "kv_heads": 2}, (8, 24), (4, 24)),
        # Both heads on each rank are fewer bytes than three heads of queries on two of three.
        (3, {"heads": 6, "kv_heads": 2}, (8, 24), (8, 24)),
        # No head is in two parts: two heads on two ranks, one on the third one.
        (3, {"heads": 5, "kv_heads": 5}, (8, 20), (8, 20)),
        (4, {"heads": 2, "kv_heads": 2}, (4, 8), (4, 8)),
    ],
)
def test_heads_that_ranks_do_not_divide(
    mesh: int, sizes: dict[str, int], queries: tuple[int, int], keys: tuple[int, int]
) -> None:
    """A rank has the heads of keys and values that its heads of queries need: two sums a layer."""
    made = check(PLAN, mesh, layers=1, length=7, **sizes)
    assert made.collectives == {"allreduce": 2, "allgather": 1}
    attention = "model.layers.0.self_attn."
    assert made.shards[f"{attention}q_proj.weight"].shard_shape == queries
    assert made.shards[f"{attention}o_proj.weight"].shard_shape == queries[::-1]
    for one in ("k_proj", "v_proj"):
        assert made.shards[f"{attention}{one}.weight"].shard_shape == keys


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "heads", "kv_heads", "fused"),
    [
        (1, 6, 2, "32"),
        (2, 6, 2, "24/2+8/2+8/2"),
        (3, 6, 2, "2/3x12+2/3x4+2/3x4"),
        (4, 6, 2, "2/2x3/2x4+8/2+8/2"),
        (8, 16, 2, "64/8+8/2+8/2"),
    ],
)
def test_fused_weights(mesh: int, heads: int, kv_heads: int, fused: str) -> None:
    """Queries, keys and values in one weight are divided one by one, and so are gate and up."""
    made = check(FUSED_PLAN, mesh, layers=2, heads=heads, kv_heads=kv_heads, fused=True)
    if mesh == 1:
        return
    assert made.collectives == {"allreduce": 4, "allgather": 1}
    for one in ("weight", "bias"):
        cut = made.shards[f"model.layers.1.self_attn.qkv_proj.{one}"]
        assert cut.placements == (Shard(0, fused),)
    cut = made.shards["model.layers.0.mlp.gate_up_proj.weight"]
    assert cut.placements == (Shard(0, f"22/{mesh}+22/{mesh}"),)


@pytest.mark.parametrize("order", ["3 h w", "h 3 w"])
@pytest.mark.parametrize("mesh", [2, 3, 4])
def test_fused_weights_in_one_reshape(mesh: int, order: str) -> None:
    """Three in one weight whose inputs come first, in both orders, as vision models have them."""
    heads, width = 5, 4
    axis = order.split().index("3")
    shape = [{"3": 3, "h": heads, "w": width}[one] for one in order.split()]

    def result(emit: Any, x: Any, w: Any, out: Any) -> Any:
        y = emit(op.reshape(op.matmul(x, w), (7, *shape)))
        q, k, v = (
            emit(op.squeeze(op.strided_slice(y, [axis + 1], [one], [one + 1]), [axis + 1]))
            for one in range(3)
        )
        q, k, v = (emit(op.permute_dims(one, [1, 0, 2])) for one in (q, k, v))
        scores = op.nn.softmax(op.matmul(q, op.permute_dims(k, [0, 2, 1])), -1)
        z = emit(op.permute_dims(op.matmul(scores, v), [1, 0, 2]))
        return op.matmul(op.reshape(z, (7, heads * width)), out)

    shapes = {"x": (7, 6), "w": (6, 3 * heads * width), "out": (heads * width, 6)}
    mod = one_function(result, shapes, num_input=1)
    made = parallelize(mod, {"w": Shard(1), "out": Shard(0)}, mesh)
    assert made.collectives == {"allreduce": 1}
    random = np.random.default_rng(0)
    given = [random.uniform(-1, 1.5, one).astype("float32") for one in shapes.values()]
    y = np.moveaxis((given[0] @ given[1]).reshape(7, *shape), axis + 1, 0)
    q, k, v = y.transpose(0, 2, 1, 3)
    e = np.exp(q @ k.swapaxes(1, 2))
    right = (e / e.sum(-1, keepdims=True) @ v).transpose(1, 0, 2).reshape(7, 20) @ given[2]
    for found in run(made, "main", given):
        np.testing.assert_allclose(found.numpy(), right, rtol=1e-4, atol=1e-5)


def test_two_axes_of_a_mesh() -> None:
    mesh = Mesh({"dp": 2, "tp": 2}, [2, 0, 3, 1])
    plan = {pattern: {"tp": style} for pattern, style in PLAN.items()}
    plan["layers.*.mlp.up_proj"] = {"dp": "rowwise", "tp": "colwise"}
    check(plan, mesh)


SEQUENCE = {
    **WHOLE_VOCABULARY,
    "layers.*.*_layernorm": "sequence_parallel",
    "model.norm": "sequence_parallel",
}


class Divided:
    """A placement of PyTorch, which is recognised by its name."""

    def __init__(self, dim: int) -> None:
        self.dim = dim


Divided.__name__ = "Shard"


class RowwiseParallel:
    """The style of PyTorch."""

    def __init__(self, output_layouts: Any) -> None:
        self.output_layouts = (output_layouts,)


class SequenceParallel:
    """The style of PyTorch."""

    sequence_sharding = (Divided(1),)


#: As PyTorch's tutorial has it for Llama.
OF_TORCH = {
    **dict.fromkeys(PLAN, "ColwiseParallel"),
    "model.embed_tokens": RowwiseParallel(Divided(1)),
    "layers.*.self_attn.o_proj": RowwiseParallel(Divided(1)),
    "layers.*.mlp.down_proj": RowwiseParallel(Divided(1)),
    "layers.*.*_layernorm": SequenceParallel(),
    "model.norm": SequenceParallel(),
}


@pytest.mark.slow
@pytest.mark.parametrize("plan", [SEQUENCE, OF_TORCH], ids=["transformers", "torch"])
@pytest.mark.parametrize("mesh", [2, 3])
def test_activations_are_divided_along_the_sequence(plan: Any, mesh: int) -> None:
    """A reduce-scatter and an all-gather stand where an all-reduce was; the length is odd."""
    made = check(plan, mesh)
    assert made.collectives == {"reduce_scatter": 5, "allgather": 6}


def test_collectives_of_a_divided_sequence_are_overlapped() -> None:
    """Products are beside each of them, but for the lookup of tokens and the result."""
    made = parallelize(Decoder(length=8, width=8, inner=32).module, SEQUENCE, 2)
    with tvm_ipc.transform.collect_report() as report:
        tvm_ipc.transform.OverlapCommunication(chunks=2)(made.module)
    sites = [one.subject.split(" of ")[0] for one in report.decisions if "chunks" in one.verdict]
    assert sites == [*["allgather", "reduce_scatter"] * 4, "allgather"]


def test_sequences_of_two_axes_of_a_mesh() -> None:
    """The batch, of one, is not divided along the other axis; weights are."""
    mesh = Mesh({"dp": 2, "tp": 2}, [2, 0, 3, 1])
    plan: dict[str, Any] = {pattern: {"tp": style} for pattern, style in SEQUENCE.items()}
    plan["layers.*.mlp.up_proj"] = {"dp": "rowwise", "tp": "colwise"}
    made = check(plan, mesh)
    assert made.collectives["reduce_scatter"] == 5


def test_a_sequence_of_one_is_not_divided() -> None:
    """In a step of decode there is nothing to divide, which the report says."""
    decoder = Decoder(length=1)
    with tvm_ipc.transform.collect_report() as report:
        made = parallelize(decoder.module, SEQUENCE, 2)
    assert made.collectives == {"allreduce": 5, "allgather": 1}
    left = [one for one in report.decisions if one.verdict == "not sharded"]
    assert len(left) == 5
    assert "has fewer elements than the 2 ranks" in left[0].reason


def test_an_axis_that_activations_do_not_have() -> None:
    with pytest.raises(ValueError, match=r"the result of 'model.norm.weight' is .*shards axis 4"):
        SequenceParallel.sequence_sharding = (Divided(4),)
        try:
            parallelize(Decoder().module, {"model.norm": SequenceParallel()}, 2)
        finally:
            SequenceParallel.sequence_sharding = (Divided(1),)


def test_nothing_is_divided() -> None:
    made = parallelize(Decoder().module, {"lm_head": "replicated"}, 2)
    assert made.collectives == {}


@pytest.mark.slow
def test_every_operator_on_parts_that_do_not_meet(pytestconfig: pytest.Config) -> None:
    """Operands that are divided in any way: nothing is refused, and all is right.

    A sixth of them are run, all of them in more rounds than one.
    """
    share = 6 if pytestconfig.getoption("--operator-rounds") == 1 else 1
    mesh = Mesh({"dp": 2, "tp": 2}, [2, 0, 3, 1])
    builder = relax.BlockBuilder()
    plan: dict[str, Any] = {}
    drawn_of = {}
    for index, case in enumerate(CASES):
        drawn = case.draw(Draw(index))
        name = f"f{index}"
        random = Random(index)
        params = []
        for k, one in enumerate(drawn.params):
            params.append(relax.Var(f"{name}_p{k}", relax.TensorType(one.shape, one.dtype)))
            axes = random.sample(range(len(one.shape)), min(len(one.shape), 2))
            lie = dict(zip(random.sample(["dp", "tp"], 2), map(Shard, axes), strict=False))
            if lie:
                plan[f"{name}_p{k}"] = lie
        with builder.function(name, params):
            with builder.dataflow():
                made = builder.emit(drawn.make(*params))
                result = made
                if isinstance(made.ty, relax.TupleType):
                    fields = [relax.TupleGetItem(made, k) for k in range(len(made.ty.fields))]
                    result = relax.Tuple([builder.emit(field) for field in fields])
                out = builder.emit_output(result)
            builder.emit_func_output(out)
        drawn_of[name] = drawn
    whole = builder.get()
    parallel = parallelize(whole, plan, mesh)
    drawn_of = dict(list(drawn_of.items())[::share])
    functions = {}
    for name in drawn_of:
        functions[name] = parallel.module[name]
        functions[f"{name}_whole"] = whole[name].with_attr("global_symbol", f"{name}_whole")
    pipeline = tvm_ipc.get_pipeline("llvm", 4)
    executable = tvm.compile(tvm.IRModule(functions), FAST_TO_COMPILE, relax_pipeline=pipeline)
    with session_of(mesh) as session:
        loaded = session.load_vm_module(executable)
        for name, drawn in drawn_of.items():
            random_ = np.random.default_rng(1)
            arrays = [one.values(random_) for one in drawn.params]
            parts = [
                {r: parallel.shards[f"{name}_p{k}"].shard(array, r) for r in mesh.ranks}
                for k, array in enumerate(arrays)
            ]
            found = loaded[name](*(put(session, one) for one in parts))
            replicas = [dict.fromkeys(mesh.ranks, array) for array in arrays]
            right = loaded[f"{name}_whole"](*(put(session, one) for one in replicas))
            results = {rank: _fields(found.debug_get_from_remote(rank)) for rank in mesh.ranks}
            for k, one in enumerate(_fields(right.debug_get_from_remote(0))):
                ranks = {rank: results[rank][k] for rank in mesh.ranks}
                compare(mesh, ranks, one, {}, f"{CASES[int(name[1:])].names}, result {k}")


def _fields(result: Any) -> list[Any]:
    if hasattr(result, "numpy"):
        return [np.array(result.numpy())]
    return [np.array(one.numpy()) for one in result]


def test_the_way_that_moves_the_fewest_bytes() -> None:
    """The vector is gathered, not the matrix."""

    def collectives(first: Any, second: Any) -> list[str]:
        mod = one_function(lambda _, x, y: op.add(x, y), {"long": (8, 64), "short": (8, 1)})
        made = parallelize(mod, {"long": first, "short": second}, 2)
        return [one.subject.removesuffix(" along 'tp'") for one in made.decisions]

    assert collectives(Shard(1), Shard(0)) == ["allgather of short", "allgather of gv"]
    assert collectives(Shard(0), Shard(0)) == ["allgather of gv"]


@pytest.mark.parametrize("axis", [0, 1])
def test_tuples(axis: int) -> None:
    """One that is bound to a variable, and whose fields are divided or have to be gathered."""
    mod = one_function(
        lambda emit, x: op.concat(emit(op.split(x, 2, axis=1)), axis=0), {"x": (4, 6)}
    )
    made = parallelize(mod, {"x": Shard(axis)}, 2)
    array = np.arange(24, dtype="float32").reshape(4, 6)
    for found in run(made, "main", [array]):
        assert np.array_equal(found.numpy(), np.concatenate(np.split(array, 2, 1)))


def test_a_sum_that_is_used_twice_is_reduced_once() -> None:

    def result(emit: Any, x: Any, w: Any) -> Any:
        y = emit(op.matmul(x, w))
        return emit(op.add(op.exp(y), op.nn.relu(op.reshape(y, (4, 8)))))

    mod = one_function(result, {"x": (4, 6), "w": (6, 8)})
    assert parallelize(mod, {"w": Shard(0)}, 2).collectives == {"allreduce": 1}


@pytest.mark.parametrize(
    ("plan", "sums"),
    [
        ({"experts.up": "colwise", "experts.down": "rowwise", "experts": "moe_tp_experts"}, 1),
        ({"experts.up": "grouped_gemm", "experts.down": "grouped_gemm"}, 2),
    ],
)
def test_experts(plan: Any, sums: int) -> None:
    """Of each expert a rank has some rows or columns, or it has all of some experts.

    Each of three tokens is given to one expert, as mixtures of experts are exported.
    """

    def result(emit: Any, x: Any, expert: Any, up: Any, down: Any) -> Any:
        h = emit(op.permute_dims(op.take(up, expert, 0), [0, 2, 1]))
        h = emit(op.nn.relu(op.matmul(x, h)))
        return op.matmul(h, emit(op.permute_dims(op.take(down, expert, 0), [0, 2, 1])))

    x, up, down = (3, 1, 6), (4, 5, 6), (4, 6, 5)
    expert = relax.TensorType((3,), "int64")
    params = {"x": x, "expert": expert, "experts.up": up, "experts.down": down}
    made = parallelize(one_function(result, params, num_input=2), plan, 2)
    assert made.collectives == {"allreduce": sums}
    random = np.random.default_rng(0)
    rows, ups, downs = (random.uniform(-1, 1.2, s).astype("float32") for s in (x, up, down))
    of = np.array([3, 0, 3])
    h = np.maximum(rows @ ups[of].transpose(0, 2, 1), 0)
    expected = h @ downs[of].transpose(0, 2, 1)
    for found in run(made, "main", [rows, of, ups, downs]):
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-5)


def annotated(x: relax.Expr, text: str) -> relax.Call:
    placement = DistPlacement.from_text(text)
    return op.distributed.annotate_sharding(x, DeviceMesh((2,), [0, 1]), placement)


@pytest.mark.parametrize("mesh", [2, Mesh({"workers": 2}), Mesh({"axis0": 2})])
def test_annotations_of_tvm_are_a_plan(mesh: Any) -> None:
    """R.dist's device mesh is the mesh that is given, whatever its axis is called."""
    shapes = {"x": (5, 6), "up": (6, 9), "down": (9, 6)}

    def result(emit: Any, x: Any, up: Any, down: Any) -> Any:
        h = emit(op.nn.relu(op.matmul(x, emit(annotated(up, "S[1]")))))
        return op.matmul(h, emit(annotated(down, "S[0]")))

    made = parallelize(one_function(result, shapes, num_input=1), {}, mesh)
    assert made.collectives == {"allreduce": 1}
    assert [one.placements for one in made.shards.values()] == [(Shard(1),), (Shard(0),)]
    x, up, down = (
        np.random.default_rng(0).uniform(-1, 1.2, shape).astype("float32")
        for shape in shapes.values()
    )
    expected = np.maximum(x @ up, 0) @ down
    for found in run(made, "main", [x, up, down]):
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-5)


def test_annotations_that_differ_are_refused() -> None:
    """Two functions that share a weight, which is divided in two ways."""

    def function(text: str) -> relax.Function:
        return one_function(lambda emit, w: op.exp(emit(annotated(w, text))), {"w": (6, 8)})["main"]

    mod = tvm.IRModule({"prefill": function("S[0]"), "decode": function("S[1]")})
    with pytest.raises(ValueError, match=r"places 'w' on S\[.\] along 'axis0', and function"):
        parallelize(mod, {}, 2)
