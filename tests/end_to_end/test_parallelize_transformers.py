# SPDX-License-Identifier: Apache-2.0
"""Models of `transformers` with random weights, cut by plans, in real workers, against PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import tvm

import tvm_ipc
from tests.end_to_end.placed_programs import put, session_of
from tests.end_to_end.test_placed_operators import FAST_TO_COMPILE
from tvm_ipc import parallelize
from tvm_ipc.spmd import Parallelized

pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from tests.end_to_end.transformers_models import MODELS, Imported, imported

#: What runs without `--every-model`: each kind of model, number of workers, type and length.
FEW = {
    ("Llama", "float32", True, 2),
    ("Llama", "bfloat16", False, 4),
    ("Phi3", "float32", True, 2),
    ("GPT2", "float32", True, 3),
    ("Bert", "float32", True, 2),
    ("ViT", "bfloat16", True, 2),
}
EVERY = [
    (name, dtype, dynamic, workers)
    for name in MODELS
    for dtype in ("float32", "bfloat16")
    for dynamic in (True, False)
    for workers in (1, 2, 3, 4)
]


def check(one: Imported, made: Parallelized, **options: Any) -> None:
    """Run a model, compiled with some options; compare logits of each rank with PyTorch's."""
    ranks = made.mesh.ranks
    pipeline = tvm_ipc.get_pipeline("llvm", len(ranks), **options)
    executable = tvm.compile(made.module, FAST_TO_COMPILE, relax_pipeline=pipeline)
    with session_of(made.mesh) as session:
        function = session.load_vm_module(executable)["main"]
        weights = [
            put(session, {rank: cut.shard(weight.numpy(), rank) for rank in ranks})
            for cut, weight in zip(made.shards.values(), one.weights, strict=True)
        ]
        for call in one.calls:
            inputs = [put(session, dict.fromkeys(ranks, array)) for array in call.inputs]
            result = function(*inputs, *weights)
            for rank in ranks:
                call.check(result.debug_get_from_remote(rank)[0].numpy())


@pytest.mark.parametrize(("name", "dtype", "dynamic", "workers"), EVERY)
def test_logits(
    name: str, dtype: str, dynamic: bool, workers: int, pytestconfig: pytest.Config
) -> None:
    if not pytestconfig.getoption("--every-model") and (name, dtype, dynamic, workers) not in FEW:
        pytest.skip("--every-model runs it")
    one = imported(name, dtype, dynamic)
    made = parallelize(one.module, one.plan, workers, names=one.names)
    if workers > 1:
        assert made.collectives == MODELS[name].collectives
    check(one, made)


@pytest.mark.parametrize("workers", [3, 4])
def test_heads_that_ranks_do_not_divide(workers: int) -> None:
    """Six heads, two of them of keys and values: nothing more is exchanged, and right."""
    one = imported("Llama", hidden_size=48, num_attention_heads=6, num_key_value_heads=2)
    made = parallelize(one.module, one.plan, workers, names=one.names)
    assert made.collectives == MODELS["Llama"].collectives
    check(one, made)


def test_more_ranks_than_heads_of_keys(pytestconfig: pytest.Config) -> None:
    if not pytestconfig.getoption("--every-model"):
        pytest.skip("--every-model runs it")
    one = imported("Llama", hidden_size=48, num_attention_heads=8, num_key_value_heads=2)
    made = parallelize(one.module, one.plan, 8, names=one.names)
    assert made.collectives == MODELS["Llama"].collectives
    check(one, made)


def test_a_sequence_that_is_divided() -> None:
    """A reduce-scatter and an all-gather stand in the place of each sum; the length is odd."""
    one = imported("Llama", "float32", True)
    norms = ("layers.*.input_layernorm", "layers.*.post_attention_layernorm", "model.norm")
    plan = {**one.plan._tp_plan, **dict.fromkeys(norms, "sequence_parallel")}
    made = parallelize(one.module, plan, 2, names=one.names)
    assert made.collectives == {"reduce_scatter": 5, "allgather": 6}
    check(one, made)
