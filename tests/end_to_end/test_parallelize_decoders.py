# SPDX-License-Identifier: Apache-2.0
"""Decoders of `transformers` on a prompt and 16 tokens after it, keys and values in place."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from tests.end_to_end.transformers_decoders import (
    DECODERS,
    check,
    check_with_static_caches,
    decoder_of,
    text,
    with_static_caches,
)
from tvm_ipc import parallelize
from tvm_ipc.models.hf.shard_imported_model import shard
from tvm_ipc.spmd.op_costs import Costs, nominal, predicted

#: What runs without `--every-model`: experts, of bfloat16, divided by a plan that is found.
FEW = {("Mixtral", "bfloat16", 3, "auto")}
EVERY = [
    (name, dtype, workers, plan)
    for name in DECODERS
    for dtype in ("float32", "bfloat16")
    for workers, plan in ((1, "own"), (2, "own"), (3, "own"), (4, "own"), (3, "auto"))
]
#: With eight heads of queries, which two of keys and values serve.
GROUPED = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64}


@pytest.mark.parametrize(("name", "dtype", "workers", "plan"), EVERY)
def test_logits(
    name: str, dtype: str, workers: int, plan: str, pytestconfig: pytest.Config
) -> None:
    if not pytestconfig.getoption("--every-model") and (name, dtype, workers, plan) not in FEW:
        pytest.skip("--every-model runs it")
    decoder = decoder_of(name, dtype)
    made = shard(decoder, workers, None if plan == "own" else plan)
    assert workers == 1 or "allreduce" in made.collectives
    if plan == "auto":
        costs, own = Costs(nominal(workers)), shard(decoder, workers)
        assert predicted(made.module, costs).total <= 1.1 * predicted(own.module, costs).total
    check(text(name, dtype), decoder, made)


@pytest.mark.parametrize(
    ("name", "dtype", "workers"),
    [
        (name, dtype, workers)
        for name in ("Mixtral", "Qwen3Moe", "Qwen2Moe")
        for dtype in ("float32", "bfloat16")
        for workers in (2, 3, 4)
    ],
)
def test_experts_of_other_ranks(
    name: str, dtype: str, workers: int, pytestconfig: pytest.Config
) -> None:
    """Each rank has some experts whole, and tokens are dispatched to them."""
    few = {("Mixtral", "float32", 2), ("Qwen3Moe", "float32", 4)}
    if not pytestconfig.getoption("--every-model") and (name, dtype, workers) not in few:
        pytest.skip("--every-model runs it")
    decoder = decoder_of(name, dtype, shard_experts=True)
    made = shard(decoder, workers, "experts")
    experts = made.shards["model.layers.0.mlp.experts.gate_up_proj"]
    assert experts.shard_shape[0] == -(-experts.shape[0] // workers)
    assert made.module["prefill"].script().count("R.comm.moe(") == 2  # of each layer
    check(text(name, dtype), decoder, made)


@pytest.mark.parametrize(
    ("name", "dtype", "plan"),
    [
        *(
            (name, dtype, "own")
            for name in ("Llama", "Qwen2", "Qwen3")
            for dtype in ("float32", "bfloat16")
        ),
        ("Qwen3", "bfloat16", "auto"),
        ("Mixtral", "float32", "own"),
    ],
)
def test_more_workers_than_heads_of_keys(
    name: str, dtype: str, plan: str, pytestconfig: pytest.Config
) -> None:
    """Eight workers, of which four have the same head of keys and values, and keep one each."""
    few = (name, dtype, plan) == ("Qwen2", "float32", "own")
    if not pytestconfig.getoption("--every-model") and not few:
        pytest.skip("--every-model runs it")
    decoder = decoder_of(name, dtype, 8, **GROUPED)
    made = shard(decoder, 8, None if plan == "own" else plan)
    if plan == "own":
        assert made.shards["past_0"].shard_shape[1] == 1
        # Of a prompt and of a token: the vocabulary, two sums a layer, and the logits.
        assert made.collectives == {"allreduce": 10, "allgather": 2}
    check(text(name, dtype, **GROUPED), decoder, made)


@pytest.mark.parametrize(
    ("name", "dtype", "workers"),
    [
        *(("Llama", "float32", workers) for workers in (1, 2, 3, 4)),
        *((name, "bfloat16", 3) for name in DECODERS),
    ],
)
def test_caches_of_a_fixed_length(
    name: str, dtype: str, workers: int, pytestconfig: pytest.Config
) -> None:
    """Those of transformers, StaticCache, into which keys and values are put at a position."""
    if not pytestconfig.getoption("--every-model"):
        pytest.skip("--every-model runs it")
    one, decoder = text(name, dtype), decoder_of(name, dtype)
    module, names = with_static_caches(one, decoder)
    made = parallelize(module, decoder.plan, workers, names=names, caches=["past_*"])
    if workers > 1:
        # GPT-2 has one table, at both ends, which its plan does not divide.
        ends = {} if name == "GPT2" else {"allgather": 2}
        assert made.collectives == {"allreduce": 8 + len(ends) * 2, **ends}
        assert made.shards["past_0"].shard_shape[1] == decoder.caches[0].heads // workers
    check_with_static_caches(one, made)
