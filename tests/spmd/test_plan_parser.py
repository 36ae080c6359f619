# SPDX-License-Identifier: Apache-2.0
"""Plans: which names a pattern means, what a style is, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.relax import op

from tests.one_function_modules import one_function
from tvm_ipc import parallelize
from tvm_ipc.comm import Mesh, Partial, Replica, Shard
from tvm_ipc.spmd import ShardSpec
from tvm_ipc.spmd.plan_parser import read_plan

PAIR = Mesh({"tp": 2})
GRID = Mesh({"dp": 2, "tp": 2}, [2, 0, 3, 1])
SHAPES: dict[str, tuple[int, ...]] = {
    "model.layers.0.attn.q_proj.weight": (8, 6),
    "model.layers.0.attn.q_proj.bias": (8,),
    "model.layers.11.attn.q_proj.weight": (8, 6),
    "model.layers.11.attn.o_proj.weight": (6, 8),
    "model.norm.weight": (6,),
    "lm_head.weight": (10, 6),
}


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("model.layers.*.attn.q_proj", ["0.attn.q_proj.weight", "0.attn.q_proj.bias", "11.attn.q"]),
        ("q_proj.weight", ["0.attn.q_proj.weight", "11.attn.q_proj.weight"]),
        ("layers.11.attn.*_proj", ["11.attn.q_proj.weight", "11.attn.o_proj.weight"]),
        ("layers.1.attn.*", None),
        ("proj", None),
        ("lm_head", ["lm_head.weight"]),
        ("*", list(SHAPES)),
    ],
)
def test_patterns(pattern: str, names: list[str] | None) -> None:
    if names is None:
        with pytest.raises(ValueError, match="matches no parameter"):
            read_plan({pattern: "replicated"}, PAIR, SHAPES)
        return
    found = read_plan({pattern: "replicated"}, PAIR, SHAPES).placements
    assert len(found) == len(names)
    assert all(any(one in name for one in names) for name in found)


@pytest.mark.parametrize(
    ("style", "matrix", "vector"),
    [
        ("colwise", Shard(0), Shard(0)),
        ("rowwise", Shard(1), Replica()),
        ("replicated", Replica(), Replica()),
        ("S[0]", Shard(0), Shard(0)),
        (Shard(0), Shard(0), Shard(0)),
    ],
)
def test_styles(style: Any, matrix: Any, vector: Any) -> None:
    found = read_plan({"layers.0.attn.q_proj": style}, PAIR, SHAPES).placements
    assert found["model.layers.0.attn.q_proj.weight"] == (matrix,)
    assert found["model.layers.0.attn.q_proj.bias"] == (vector,)
    on_two = read_plan({"q_proj.weight": {"tp": style}}, GRID, SHAPES).placements
    assert on_two["model.layers.0.attn.q_proj.weight"] == (Replica(), matrix)


@pytest.mark.parametrize(
    ("plan", "mesh", "words"),
    [
        (
            {"layers.*.attn.k_proj": "colwise"},
            PAIR,
            "'layers.*.attn.k_proj' matches no parameter; similar names are 'layers.*.attn.q_proj'",
        ),
        (
            {"norm.weight": "rowwise", "norm": "colwise"},
            PAIR,
            "'norm.weight' and 'norm' both match",
        ),
        (
            {"norm": Shard(1)},
            PAIR,
            "S[1]: 'model.norm.weight' has no axis 1, since its shape is (6)",
        ),
        ({"norm": "sideways"}, PAIR, "or one of the styles 'colwise', 'colwise_gather_output'"),
        ({"norm": Partial()}, PAIR, "a parameter cannot be a partial result, P[sum]"),
        ({"norm": {"pp": "colwise"}}, GRID, "'pp' is no axis of the mesh; the axes are 'dp', 'tp'"),
        ({"norm": "colwise"}, GRID, "'colwise' is ambiguous, since Mesh({'dp': 2, 'tp': 2}"),
        ({"norm": {"dp": "S[0]", "tp": "S[0]"}}, GRID, "axis 0 of 'model.norm.weight' is sharded"),
    ],
)
def test_what_is_refused(plan: Any, mesh: Mesh, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        read_plan(plan, mesh, SHAPES)


def module(**shapes: tuple[Any, ...]) -> tvm.IRModule:
    return one_function(lambda _, x, w: op.matmul(x, w), shapes)


def test_names_of_parameters() -> None:
    mod = module(x=(4, 6), p_lm_head_weight=(6, 10))
    names = {"p_lm_head_weight": "lm_head.weight"}
    made = parallelize(mod, {"lm_head": Shard(1)}, 2, names=names)
    assert str(made.shards["lm_head.weight"]) == "lm_head.weight (6, 10) float32: S[1] along 'tp'"
    assert made.shards["lm_head.weight"].parameter == "p_lm_head_weight"
    assert made.bytes_per_rank == (4 * 6 + 6 * 5) * 4
    assert "allgather of gv along 'tp'" in str(made)
    assert "R.Tensor((6, 5)" in made.module["main"].script()
    assert "R.Tensor((6, 10)" in made.placed["main"].script(), "for all ranks"
    with pytest.raises(
        ValueError, match=r"there is no parameter 'p_lm_head'; a similar name is 'p_lm_h"
    ):
        parallelize(mod, {}, 2, names={"p_lm_head": "lm_head.weight"})


def test_weights_within_the_module_are_refused() -> None:
    mod = module(x=(4, 6), w=(6, 10))
    mod["main"] = mod["main"].with_attr("params", [tvm.runtime.tensor(np.zeros((6, 10)))])
    with pytest.raises(ValueError, match=r"'main' has weights as an attribute.*detach_params"):
        parallelize(mod, {"w": Shard(0)}, 2)


def test_functions_share_weights() -> None:
    n = tirx.Var("n", "int64")
    first, second = module(x=(n, 6), w=(6, 10)), module(x=(1, 6), w=(6, 10))
    third = module(x=(1, 7), w=(7, 10))
    both = tvm.IRModule({"prefill": first["main"], "decode": second["main"]})
    made = parallelize(both, {"w": Shard(1)}, 2)
    for name in ("prefill", "decode"):
        assert "w: R.Tensor((6, 5)" in made.module[name].script()
    other = tvm.IRModule({"prefill": first["main"], "decode": third["main"]})
    with pytest.raises(ValueError, match=r"'w' is .* in one function, and .* in another"):
        parallelize(other, {"w": Shard(1)}, 2)


@pytest.mark.parametrize("shape", [(8, 6), (7, 5), (1, 3)])
@pytest.mark.parametrize(
    "placements", [(Shard(0), Replica()), (Replica(), Shard(1)), (Shard(1), Shard(0))]
)
def test_parts(shape: tuple[int, int], placements: Any) -> None:
    """All parts together are the tensor, and each has the extent of the largest."""
    cut = ShardSpec("w", "w", shape, "float32", GRID, placements)
    whole = np.arange(1, np.prod(shape) + 1, dtype="float32").reshape(shape)
    seen = []
    for rank in GRID.ranks:
        part = cut.shard(whole, rank)
        assert part.shape == cut.shard_shape
        assert part.nbytes == cut.bytes_per_rank
        seen.append(part[part > 0])
    every, counts = np.unique(np.concatenate(seen), return_counts=True)
    assert np.array_equal(every, whole.ravel())
    assert set(counts) == {2 if Replica() in placements else 1}
    with pytest.raises(ValueError, match=r"shard: whole: 'w' is .*, not \(9, 9\)"):
        cut.shard(np.zeros((9, 9)), 0)


def tied(*used: str) -> tvm.IRModule:
    """Return a function with a table and a product, of which exporters leave one parameter."""

    def result(emit: Any, ids: Any, embed: Any, lm_head: Any) -> Any:
        params = {"embed": embed, "lm_head": lm_head}
        x = emit(op.take(params[used[0]], ids, 0))
        return op.matmul(x, op.permute_dims(params[used[-1]]))

    params = {"ids": relax.TensorType((5,), "int64"), "embed": (10, 6), "lm_head": (10, 6)}
    return one_function(result, params, num_input=1)


def test_weights_that_share_their_memory() -> None:
    """Whichever the program has, a plan for both is right, and one for the other is refused."""
    plan = {"embed": "embedding_rowwise", "lm_head": "colwise"}
    for name, other in (("embed", "lm_head"), ("lm_head", "embed")):
        made = parallelize(tied(name), plan, 2)
        assert made.collectives == {"allreduce": 1, "allgather": 1}
        assert made.notes == (f"{other} is used by no function: its placement has no effect",)
        words = f"'{other}' is used by no function, .*; if it is tied to '{name}', add"
        with pytest.raises(ValueError, match=words):
            parallelize(tied(name), {other: plan[other]}, 2)
    assert parallelize(tied("embed", "lm_head"), plan, 2).notes == ()
    found = parallelize(tied("lm_head"), "auto", 2)
    assert "embed is used by no function: its placement has no effect" in found.notes
