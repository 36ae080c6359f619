# SPDX-License-Identifier: Apache-2.0
"""Programs with one annotation, whose weights are sharded by what follows from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op
from tvm.relax.distributed import DeviceMesh
from tvm.relax.distributed import Placement as DistPlacement
from tvm.script.parser import ir as I
from tvm.script.parser import relax as R
from tvm.script.parser import tirx as T

import tvm_ipc
from tests.end_to_end.placed_programs import put, session_of
from tests.end_to_end.test_parallelize import run
from tests.end_to_end.test_placed_operators import FAST_TO_COMPILE
from tests.one_function_modules import functions, one_function
from tvm_ipc import parallelize
from tvm_ipc.analysis.walk_and_rewrite_bindings import typed
from tvm_ipc.comm import Mesh, Shard, place
from tvm_ipc.errors import TransformError
from tvm_ipc.spmd import LowerPlacements, Parallelized
from tvm_ipc.spmd.op_costs import nominal

WORKERS = pytest.mark.parametrize("workers", [2, 3, 4])


def random(*shapes: Sequence[int]) -> list[Any]:
    generator = np.random.default_rng(7)
    return [generator.uniform(-1, 1.2, shape).astype("float32") for shape in shapes]


def annotate(x: relax.Expr, text: str, mesh: Sequence[int] = (2,)) -> relax.Call:
    """Return TVM's annotation of a tensor."""
    grid = DeviceMesh(mesh, list(range(int(np.prod(mesh)))))
    return op.distributed.annotate_sharding(x, grid, DistPlacement.from_text(text))


def check(found: Sequence[Any], expected: Any) -> None:
    for result in found:
        np.testing.assert_allclose(result.numpy(), expected, rtol=1e-4, atol=1e-5)


def placements(made: Parallelized) -> dict[str, str]:
    """Return the placements of the parameters that are sharded."""
    texts = {name: ", ".join(map(str, spec.placements)) for name, spec in made.shards.items()}
    return {name: text for name, text in texts.items() if "S" in text}


def gelu(x: Any) -> Any:
    from math import erf

    return x * 0.5 * (1 + np.vectorize(erf)(x / np.sqrt(2)))


MLP = {"x": (6, 8), "up": (8, 12), "down": (12, 8)}


def mlp(
    workers: int, text: str = "S[1]", shapes: Any = MLP, const: bool = False, **options: Any
) -> tvm.IRModule:
    """Return an MLP whose activation is annotated."""

    def result(emit: Any, x: Any, up: Any, down: Any) -> Any:
        h = emit(op.nn.gelu(emit(op.matmul(x, up))))
        if const:
            h = emit(op.add(h, relax.const(2.0, "float32")))
        return op.matmul(emit(annotate(h, text, (workers,))), down)

    return one_function(result, shapes, **options)


@WORKERS
@pytest.mark.parametrize("const", [False, True])
def test_an_mlp(workers: int, const: bool) -> None:
    """Both weights are sharded by the annotation between them."""
    made = parallelize(mlp(workers, const=const), {}, workers)
    assert placements(made) == {"up": "S[1]", "down": "S[0]"}
    assert made.collectives == {"allreduce": 1}
    x, up, down = random(*MLP.values())
    check(run(made, "main", [x, up, down]), (gelu(x @ up) + 2 * const) @ down)


@pytest.mark.parametrize("workers", [2, 4])
def test_extents_that_ranks_do_not_divide(workers: int) -> None:
    """The constant is not added in the padding."""
    shapes = {"x": (5, 7), "up": (7, 9), "down": (9, 7)}
    made = parallelize(mlp(workers, shapes=shapes, const=True), {}, workers)
    assert placements(made) == {"up": "S[1]", "down": "S[0]"}
    assert made.collectives == {"allreduce": 1}
    x, up, down = random(*shapes.values())
    check(run(made, "main", [x, up, down]), (gelu(x @ up) + 2) @ down)


@WORKERS
def test_dynamic_shapes(workers: int) -> None:
    """Each extent is a symbol; the sharded one is a multiple of the ranks."""
    m, k, n, o = (tvm.tirx.Var(name, "int64") for name in "mkno")
    shapes = {"x": (m, k), "up": (k, n), "down": (n, o)}
    made = parallelize(mlp(workers, shapes=shapes, const=True), {}, workers)
    assert placements(made) == {"up": "S[1]", "down": "S[0]"}
    assert made.collectives == {"allreduce": 1}
    assert "n_shard" in made.module.script()
    x, up, down = random((5, 7), (7, 12), (12, 6))
    check(run(made, "main", [x, up, down]), (gelu(x @ up) + 2) @ down)
    with pytest.raises(ValueError, match=r"axis 1 of 'up' is n_shard \* \d, a multiple of the"):
        made.shards["up"].shard(np.zeros((7, 13), "float32"), 0)


def test_symbols_of_results() -> None:
    """Ranks need the extents of results, so a parameter with such an extent stays whole."""
    m = tvm.tirx.Var("m", "int64")
    shapes = {"x": (m, 8), "up": (8, 12), "down": (12, 8)}
    made = parallelize(mlp(2, "S[0]", shapes), {}, 2)
    assert placements(made) == {}
    assert made.collectives == {"allgather": 1}
    x, up, down = random((5, 8), (8, 12), (12, 8))
    check(run(made, "main", [x, up, down]), gelu(x @ up) @ down)


def run_with_tuple(made: Parallelized, x: Any, weights: Sequence[Any]) -> list[Any]:
    """Return what each rank gets from a function whose second parameter is a tuple."""
    ranks = made.mesh.ranks
    main = typed(made.module.get_global_var("main"), made.module["main"].ty)
    shapes = [spec.shard_shape for name, spec in made.shards.items() if name.startswith("w.")]
    params = [relax.Var("x", made.module["main"].params[0].ty)]
    params += [relax.Var(f"w{k}", R.Tensor(s, "float32").as_ty()) for k, s in enumerate(shapes)]
    call = relax.Call(main, [params[0], relax.Tuple(params[1:])])
    builder = relax.BlockBuilder(made.module)
    with builder.function("separate", params):
        builder.emit_func_output(builder.emit(call))
    pipeline = tvm_ipc.get_pipeline("llvm", len(ranks))
    program = tvm.compile(builder.get(), FAST_TO_COMPILE, relax_pipeline=pipeline)
    with session_of(made.mesh) as session:
        references = [put(session, dict.fromkeys(ranks, x))]
        for k, weight in enumerate(weights):
            spec = made.shards[f"w.{k}"]
            references.append(put(session, {rank: spec.shard(weight, rank) for rank in ranks}))
        result = session.load_vm_module(program)["separate"](*references)
        return [result.debug_get_from_remote(rank) for rank in ranks]


def tuple_mlp(workers: int) -> tvm.IRModule:
    """Return an MLP with a tuple of weights, and a PrimFunc between its matmuls."""
    return tvm.script.from_source(f"""
@I.ir_module(s_tir=True)
class Module:
    I.module_global_infos({{"mesh": [R.device_mesh(({workers},), I.Range(0, {workers}))]}})

    @T.prim_func(private=True, s_tir=True)
    def halves(
        whole: T.Buffer((8, 12), "float32"),
        top: T.Buffer((4, 12), "float32"),
        bottom: T.Buffer((4, 12), "float32"),
    ):
        for i, j in T.grid(4, 12):
            with T.sblock("top"):
                row, column = T.axis.remap("SS", [i, j])
                top[row, column] = whole[row, column]
        for i, j in T.grid(4, 12):
            with T.sblock("bottom"):
                row, column = T.axis.remap("SS", [i, j])
                bottom[row, column] = whole[row + 4, column]

    @R.function
    def main(
        x: R.Tensor((8, 8), "float32"),
        w: R.Tuple(R.Tensor((8, 12), "float32"), R.Tensor((12, 8), "float32")),
    ) -> R.Tensor((4, 8), "float32"):
        cls = Module
        up = w[0]
        h = R.nn.gelu(R.matmul(x, up))
        parts = R.call_tir(
            cls.halves, [h], out_ty=[R.Tensor((4, 12), "float32"), R.Tensor((4, 12), "float32")]
        )
        top = parts[0]
        placed = R.dist.annotate_sharding(top, device_mesh="mesh[0]", placement="S[1]")
        down = w[1]
        return R.matmul(placed, down)
""")


@WORKERS
def test_a_tuple_of_weights_and_a_primfunc(workers: int) -> None:
    """The PrimFunc is compiled for the columns of a rank."""
    made = parallelize(tuple_mlp(workers), {}, workers)
    assert placements(made) == {"w.0": "S[1]", "w.1": "S[0]"}
    assert made.collectives == {"allreduce": 1}
    fields = made.module["main"].params[1].ty.fields
    assert [int(field.shape[k]) for field, k in zip(fields, (1, 0), strict=True)] == [
        12 // workers,
        12 // workers,
    ]
    x, up, down = random((8, 8), (8, 12), (12, 8))
    check(run_with_tuple(made, x, [up, down]), gelu(x @ up)[:4] @ down)


def scripted_mlp(workers: int) -> tvm.IRModule:
    """Return an MLP with a constant whose device mesh is one of the module."""
    return tvm.script.from_source(f"""
@I.ir_module
class Module:
    I.module_global_infos({{"mesh": [R.device_mesh(({workers},), I.Range(0, {workers}))]}})

    @R.function
    def main(
        x: R.Tensor((6, 8), "float32"),
        up: R.Tensor((8, 12), "float32"),
        down: R.Tensor((12, 8), "float32"),
    ) -> R.Tensor((6, 8), "float32"):
        h = R.add(R.nn.gelu(R.matmul(x, up)), R.const(2, "float32"))
        placed = R.dist.annotate_sharding(h, device_mesh="mesh[0]", placement="S[1]")
        return R.matmul(placed, down)
""")


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("make", [scripted_mlp, tuple_mlp])
def test_after_the_pass_of_tvm(make: Callable[[int], tvm.IRModule], workers: int) -> None:
    """The pass of TVM returns a program with distributed tensors, which is lowered too."""
    placed = relax.distributed.transform.PropagateSharding()(make(workers))
    assert "R.DTensor" in placed.script()
    made = parallelize(placed, {}, workers)
    assert made.collectives == {"allreduce": 1}
    ours = parallelize(make(workers), {}, workers)
    assert placements(made) == placements(ours)
    lowered = LowerPlacements()(placed)
    tvm.ir.assert_structural_equal(lowered["main"].params[1].ty, made.module["main"].params[1].ty)
    tvm.ir.assert_structural_equal(lowered["main"].ret_ty, made.module["main"].ret_ty)
    x, up, down = random((8, 8) if make is tuple_mlp else (6, 8), (8, 12), (12, 8))
    if make is tuple_mlp:
        check(run_with_tuple(made, x, [up, down]), gelu(x @ up)[:4] @ down)
    else:
        check(run(made, "main", [x, up, down]), (gelu(x @ up) + 2) @ down)


def test_after_all_passes_of_tvm() -> None:
    """The result of TVM's lowering is a program for one rank, whose operands worker 0 has."""
    dist = relax.distributed.transform
    passes = [
        relax.transform.LegalizeOps(),
        dist.PropagateSharding(),
        dist.LowerGlobalViewToLocalView(),
        dist.LegalizeRedistribute(),
        dist.LowerDistIR(),
    ]
    lowered = tvm.transform.Sequential(passes)(scripted_mlp(2))
    pipeline = tvm_ipc.get_pipeline("llvm", 2)
    program = tvm.compile(lowered, FAST_TO_COMPILE, relax_pipeline=pipeline)
    x, up, down = arrays = random(*MLP.values())
    with session_of(Mesh({"tp": 2})) as session:
        references = [put(session, dict.fromkeys(range(2), array)) for array in arrays]
        result = session.load_vm_module(program)["main"](*references)
        found = [result.debug_get_from_remote(rank) for rank in range(2)]
    check(found, (gelu(x @ up) + 2) @ down)


@pytest.mark.parametrize("workers", [2, 3])
def test_after_legalization(workers: int) -> None:
    """The matmuls are PrimFuncs, and the second one sums over its sharded axis."""
    legal = relax.transform.LegalizeOps()(scripted_mlp(workers))
    assert "R.matmul" not in legal["main"].script()
    made = parallelize(legal, {}, workers)
    assert placements(made) == {"up": "S[1]", "down": "S[0]"}
    assert made.collectives == {"allreduce": 1}
    x, up, down = random(*MLP.values())
    check(run(made, "main", [x, up, down]), (gelu(x @ up) + 2) @ down)


def test_primfuncs_for_constant_extents_that_ranks_do_not_divide() -> None:
    """They get whole operands, so the numbers are right."""
    legal = relax.transform.LegalizeOps()(
        mlp(2, shapes={"x": (5, 7), "up": (7, 9), "down": (9, 7)})
    )
    made = parallelize(legal, {}, 2)
    x, up, down = random((5, 7), (7, 9), (9, 7))
    check(run(made, "main", [x, up, down]), gelu(x @ up) @ down)


# ---- several operators, annotations and axes of the mesh ----

GATED = {"x": (6, 8), "gate": (8, 12), "up": (8, 12), "down": (12, 8)}


def gated(emit: Any, x: Any, gate: Any, up: Any, down: Any) -> Any:
    h = emit(op.nn.silu(emit(op.matmul(x, gate))))
    h = emit(annotate(h, "S[1]"))
    return op.matmul(emit(op.multiply(h, emit(op.matmul(x, up)))), down)


def gated_numpy(x: Any, gate: Any, up: Any, down: Any) -> Any:
    h = x @ gate
    return h / (1 + np.exp(-h)) * (x @ up) @ down


@pytest.mark.parametrize(
    ("plan", "sharded", "collectives"),
    [
        ({}, {"gate": "S[1]", "up": "S[1]", "down": "S[0]"}, {"allreduce": 1}),
        ("auto", {"gate": "S[1]", "up": "S[1]", "down": "S[0]"}, {"allreduce": 1}),
        # The plan holds, and the annotation too.
        ({"up": "replicated"}, {"gate": "S[1]", "down": "S[0]"}, {"allreduce": 1}),
        (
            {"up": Shard(0)},
            {"gate": "S[1]", "up": "S[0]", "down": "S[0]"},
            {"reduce_scatter": 1, "allreduce": 1},
        ),
        ({"gate": Shard(0)}, {"gate": "S[0]", "up": "S[1]", "down": "S[0]"}, None),
    ],
)
def test_the_other_branch_and_a_plan(plan: Any, sharded: Any, collectives: Any) -> None:
    made = parallelize(one_function(gated, GATED, num_input=1), plan, 2)
    assert placements(made) == sharded
    assert collectives is None or made.collectives == collectives
    arrays = random(*GATED.values())
    check(run(made, "main", arrays), gated_numpy(*arrays))


def attention(emit: Any, x: Any, wq: Any, wk: Any, wv: Any, wo: Any) -> Any:
    heads = int(wq.ty.shape[0]) // 4
    projected = (emit(op.matmul(x, emit(op.permute_dims(w)))) for w in (wq, wk, wv))
    q, k, v = (emit(op.reshape(each, (1, 5, heads, 4))) for each in projected)
    o = emit(annotate(emit(op.nn.attention(q, k, v)), "S[2]"))
    return op.matmul(emit(op.reshape(o, (1, 5, heads * 4))), emit(op.permute_dims(wo)))


def attention_numpy(x: Any, wq: Any, wk: Any, wv: Any, wo: Any) -> Any:
    q, k, v = ((x @ w.T).reshape(1, 5, -1, 4).transpose(0, 2, 1, 3) for w in (wq, wk, wv))
    scores = np.exp(q @ k.transpose(0, 1, 3, 2) / 2)
    o = scores / scores.sum(-1, keepdims=True) @ v
    return o.transpose(0, 2, 1, 3).reshape(1, 5, -1) @ wo.T


@pytest.mark.parametrize(("heads", "axis"), [(4, ""), (3, ": 3/2x4")])
def test_heads(heads: int, axis: str) -> None:
    """Heads are traced through reshapes, also if the ranks do not divide them."""
    shapes = {"x": (1, 5, 8), **dict.fromkeys(("wq", "wk", "wv"), (4 * heads, 8))}
    shapes["wo"] = (8, 4 * heads)
    made = parallelize(one_function(attention, shapes, num_input=1), {}, 2)
    expected = dict.fromkeys(("wq", "wk", "wv"), f"S[0{axis}]") | {"wo": f"S[1{axis}]"}
    assert placements(made) == expected
    assert made.collectives == {"allreduce": 1}
    arrays = random(*shapes.values())
    check(run(made, "main", arrays), attention_numpy(*arrays))


def test_a_result_is_scattered_where_it_is_summed() -> None:
    """The rows of the last annotation reach back to the partial sum, so no all-reduce remains."""

    def result(emit: Any, x: Any, up: Any, bias: Any, down: Any, shift: Any) -> Any:
        h = emit(op.nn.gelu(emit(op.add(emit(op.matmul(x, up)), bias))))
        h = emit(annotate(h, "S[1]"))
        y = emit(op.nn.gelu(emit(op.add(emit(op.matmul(h, down)), shift))))
        y = emit(annotate(y, "S[0]"))
        return emit(place(y, Mesh({"axis0": 2}), {}))

    shapes = {"x": (6, 8), "up": (8, 12), "bias": (12,), "down": (12, 8), "shift": (8,)}
    made = parallelize(one_function(result, shapes, num_input=1), {}, 2)
    assert placements(made) == {"up": "S[1]", "bias": "S[0]", "down": "S[0]"}
    assert made.collectives == {"reduce_scatter": 1, "allgather": 1}
    x, up, bias, down, shift = arrays = random(*shapes.values())
    check(run(made, "main", arrays), gelu(gelu(x @ up + bias) @ down + shift))


def narrow_then_wide(emit: Any, x: Any, up: Any, down: Any) -> Any:
    """Return an MLP with rows in front, columns behind, and a float16 tensor between them."""
    h = emit(op.nn.gelu(emit(op.matmul(emit(annotate(x, "S[0]")), up))))
    h = emit(op.astype(emit(op.astype(h, "float16")), "float32"))
    return op.matmul(emit(annotate(emit(op.nn.relu(h)), "S[1]")), down)


def test_where_two_placements_meet() -> None:
    """The smallest tensor between two annotations moves."""
    made = parallelize(one_function(narrow_then_wide, MLP, num_input=1), {}, 2)
    assert placements(made) == {"x": "S[0]", "down": "S[0]"}
    assert made.collectives == {"all_to_all": 1, "allreduce": 1}
    (moved,) = (line for line in made.module.script().splitlines() if "all_to_all" in line)
    assert 'dtype="float16"' in moved
    x, up, down = random(*MLP.values())
    h = np.maximum(gelu(x @ up).astype("float16").astype("float32"), 0)
    for result in run(made, "main", [x, up, down]):
        np.testing.assert_allclose(result.numpy(), h @ down, rtol=1e-2, atol=1e-2)


def test_the_last_of_equal_tensors_moves() -> None:
    def result(emit: Any, x: Any, up: Any) -> Any:
        h = emit(op.matmul(emit(annotate(x, "S[0]")), up))
        return emit(annotate(emit(op.nn.relu(emit(op.nn.gelu(h)))), "S[1]"))

    made = parallelize(one_function(result, {"x": (6, 8), "up": (8, 12)}, num_input=1), {}, 2)
    text = made.module.script()
    assert text.index("R.nn.relu") < text.index("all_to_all")
    assert made.collectives == {"all_to_all": 1}


def test_an_earlier_use_keeps_its_placement() -> None:
    """A tensor with a further use is not moved for an annotation behind it."""

    def result(emit: Any, x: Any, up: Any) -> Any:
        h = emit(op.astype(emit(op.matmul(emit(annotate(x, "S[0]")), up)), "float16"))
        wide = emit(op.astype(h, "float32"))
        y = emit(annotate(wide, "S[1]"))
        return emit(relax.Tuple([emit(op.nn.relu(h)), y]))

    made = parallelize(one_function(result, {"x": (6, 8), "up": (8, 12)}, num_input=1), {}, 2)
    (moved,) = (line for line in made.module.script().splitlines() if "all_to_all" in line)
    assert 'dtype="float32"' in moved


@pytest.mark.parametrize("inputs", [0, 1])
def test_a_grid(inputs: int) -> None:
    """Rows along one axis of the mesh, columns along the other; inputs stay whole."""
    grid = (2, 2)

    def result(emit: Any, x: Any, up: Any, down: Any) -> Any:
        h = emit(op.nn.gelu(emit(op.matmul(x, up))))
        return op.matmul(emit(annotate(h, "S[0], S[1]", grid)), down)

    made = parallelize(one_function(result, MLP, num_input=inputs), {}, 4)
    weights = {"up": "R, S[1]", "down": "R, S[0]"}
    assert placements(made) == (weights if inputs else {"x": "S[0], R", **weights})
    assert made.collectives == {"allreduce": 1, "allgather": 1}
    x, up, down = random(*MLP.values())
    check(run(made, "main", [x, up, down]), gelu(x @ up) @ down)


def test_two_functions_with_the_same_weights() -> None:
    """An annotation in one function shards the weights of the other one."""

    def prefill(emit: Any, x: Any, up: Any, down: Any) -> Any:
        h = emit(annotate(emit(op.nn.gelu(emit(op.matmul(x, up)))), "S[1]"))
        return op.matmul(h, down)

    def decode(emit: Any, x: Any, up: Any, down: Any) -> Any:
        return op.matmul(emit(op.nn.gelu(emit(op.matmul(x, up)))), down)

    one_row = {**MLP, "x": (1, 8)}
    made = parallelize(
        functions(
            {"decode": (decode, one_row), "prefill": (prefill, MLP)},
            inputs={"decode": 1, "prefill": 1},
        ),
        {},
        2,
    )
    assert placements(made) == {"up": "S[1]", "down": "S[0]"}
    assert made.collectives == {"allreduce": 2}


def test_vectors_and_short_axes_of_parameters() -> None:
    """An axis with fewer elements than ranks stays whole, and is sliced by nobody."""

    def result(emit: Any, x: Any, up: Any) -> Any:
        return emit(annotate(emit(op.matmul(x, up)), "S[1]", (4,)))

    mod = one_function(result, {"x": (6, 8), "up": (8, 3)}, num_input=1)
    made = parallelize(mod, {}, 4)
    assert placements(made) == {}
    assert made.collectives == {}


def test_a_result_that_is_also_placed_stays_whole() -> None:
    """To shard what it is computed from would add an all-gather; to slice it is free."""

    def result(emit: Any, x: Any, up: Any, down: Any) -> Any:
        h = emit(op.matmul(x, up))
        placed = emit(annotate(h, "S[1]"))
        return emit(relax.Tuple([h, emit(op.matmul(placed, down))]))

    made = parallelize(one_function(result, MLP, num_input=1), {}, 2)
    assert placements(made) == {"down": "S[0]"}
    assert made.collectives == {"allreduce": 1}


def test_automatic_plans_know_what_annotations_shard() -> None:
    """The rows of the annotation are sharded from the input on, so columns save no time."""
    slow = dataclasses.replace(nominal(2), machine="a far one", latency=5e-3)
    shapes = {"x": (4096, 512), "up": (512, 512), "down": (512, 512)}
    mod = mlp(2, "S[0]", shapes, num_input=1)
    made = parallelize(mod, "auto", 2, calibration=slow)
    assert placements(made) == {}
    assert made.collectives == {"allgather": 1}


def test_the_report_names_the_reason() -> None:
    made = parallelize(mlp(2), {}, 2)
    reasons = {each.subject: each for each in made.decisions}
    assert reasons["up"].verdict == "sharded S[1] along 'axis0'"
    assert "it follows from R.comm.place" in reasons["up"].reason


def test_without_annotations_nothing_propagates() -> None:
    """A plan shards what it names, and the others stay whole."""

    def result(emit: Any, x: Any, up: Any, down: Any) -> Any:
        return op.matmul(emit(op.nn.gelu(emit(op.matmul(x, up)))), down)

    made = parallelize(one_function(result, MLP, num_input=1), {"up": Shard(1)}, 2)
    assert placements(made) == {"up": "S[1]"}


# ---- what is refused ----


def test_functions_of_one_rank_are_refused() -> None:
    @I.ir_module(s_tir=True)
    class Module:
        I.module_global_infos({"mesh": [R.device_mesh((2,), I.Range(0, 2))]})

        @T.prim_func(private=True, s_tir=True)
        def twice(x: T.Buffer((4, 4), "float32"), y: T.Buffer((4, 4), "float32")):
            for i, j in T.grid(4, 4):
                with T.sblock("y"):
                    row, column = T.axis.remap("SS", [i, j])
                    y[row, column] = x[row, column] * T.float32(2)

        @R.function
        def main(x: R.DTensor((8, 4), "float32", "mesh[0]", "S[0]")):
            cls = Module
            return R.dist.call_tir_local_view(
                cls.twice, (x,), out_ty=R.DTensor((8, 4), "float32", "mesh[0]", "S[0]")
            )

    with pytest.raises(TransformError, match=r"R.dist.call_tir_local_view, which calls a function"):
        LowerPlacements()(Module)
    with pytest.raises(TransformError, match=r"declare its rule with tvm_ipc.spmd.declare_rule"):
        parallelize(Module, {}, 2)


def test_a_slice_of_one_rank_is_refused() -> None:
    @I.ir_module(s_tir=True)
    class Module:
        I.module_global_infos({"mesh": [R.device_mesh((2,), I.Range(0, 2))]})

        @R.function
        def main(x: R.DTensor((8, 4), "float32", "mesh[0]", "R")):
            return R.dist.redistribute(x, "mesh[0]", "S[1]")

    lowered = LowerPlacements()(Module)
    assert [int(extent) for extent in lowered["main"].ret_ty.shape] == [8, 2]
    legal = relax.distributed.transform.LegalizeRedistribute()(Module)
    with pytest.raises(
        TransformError, match=r"redistribute_replica_to_shard, which takes the shard of one rank"
    ):
        LowerPlacements()(legal)


def test_a_device_mesh_without_axes_is_refused() -> None:
    @I.ir_module
    class Module:
        @R.function
        def main(x: R.DTensor((8, 4), "float32")):
            return R.exp(x)

    with pytest.raises(TransformError, match=r"device mesh without axes; expected a mesh of I"):
        LowerPlacements()(Module)


def test_two_device_meshes_are_refused() -> None:
    def result(emit: Any, x: Any) -> Any:
        first = annotate(x, "S[0]")
        other = DeviceMesh((2,), [2, 3])
        placement = DistPlacement.from_text("R")
        return emit(op.distributed.annotate_sharding(emit(first), other, placement))

    mod = one_function(result, {"x": (4, 4)})
    with pytest.raises(TransformError, match="uses one mesh, so give one mesh all axes"):
        parallelize(mod, {}, 2)


def test_an_extent_that_no_rank_knows_is_refused_in_plans() -> None:
    """A plan that shards a symbolic extent needs a parameter with that extent."""
    n = tvm.tirx.Var("n", "int64")

    def result(emit: Any, x: Any) -> Any:
        return op.nn.relu(x)

    with pytest.raises(TransformError, match=r"no rank knows n.*R.Shape\(\['n'\]\)"):
        parallelize(one_function(result, {"x": (n, 4)}), {"x": Shard(0)}, 2)
