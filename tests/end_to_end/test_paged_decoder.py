# SPDX-License-Identifier: Apache-2.0
"""Models of TVM's `frontend.nn`, as mlc-llm has them: shards of their own, and a paged cache.

A decoder that is written for `tensor_parallel_shards` ranks is compiled by `get_pipeline`, or by
mlc-llm's order of passes with ours among them, and runs in workers that have no compiler.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op
from tvm.relax.frontend.nn.llm.kv_cache import PagedKVCache, RopeMode, TIRPagedKVCache

import tvm_ipc
from tests.passes_of_tvm import ALLOCATE, FUSE, LOWER
from tvm_ipc import transform

HIDDEN, INNER, HEADS, KV_HEADS, DIM, LAYERS, VOCABULARY = 24, 28, 4, 2, 8, 2, 37
THETA = 10000
PROMPTS = [[3, 14, 15, 9, 26, 5, 35], [8, 9, 7]]


class Layer(nn.Module):
    """Attention and SwiGLU, of which each shard has some heads and some of the inner rows."""

    def __init__(self, shards: int) -> None:
        self.heads, self.kv_heads = HEADS // shards, KV_HEADS // shards
        self.qkv = nn.Linear(HIDDEN, (self.heads + 2 * self.kv_heads) * DIM, bias=False)
        self.out = nn.Linear(self.heads * DIM, HIDDEN, bias=False)
        self.gate_up = nn.Linear(HIDDEN, 2 * INNER // shards, bias=False)
        self.down = nn.Linear(INNER // shards, HIDDEN, bias=False)
        self.before = nn.RMSNorm(HIDDEN, -1, 1e-5, bias=False)
        self.between = nn.RMSNorm(HIDDEN, -1, 1e-5, bias=False)

    def forward(self, x: nn.Tensor, cache: PagedKVCache, number: int) -> nn.Tensor:
        rows, count, _ = x.shape
        qkv = self.qkv(self.before(x)).reshape(rows, count, self.heads + 2 * self.kv_heads, DIM)
        mixed = cache.attention_with_fused_qkv(number, qkv, self.heads, DIM**-0.5)
        part = self.out(mixed.reshape(rows, count, self.heads * DIM))
        x = x + op.ccl_allreduce(part, "sum")
        gate, up = op.split(self.gate_up(self.between(x)), 2, axis=-1)
        return x + op.ccl_allreduce(self.down(op.silu(gate) * up), "sum")


class Decoder(nn.Module):
    """As mlc-llm writes them."""

    def __init__(self, tensor_parallel_shards: int) -> None:
        self.shards = tensor_parallel_shards
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList([Layer(tensor_parallel_shards) for _ in range(LAYERS)])
        self.norm = nn.RMSNorm(HIDDEN, -1, 1e-5, bias=False)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, ids: nn.Tensor, cache: PagedKVCache) -> tuple[nn.Tensor, PagedKVCache]:
        x = op.ccl_broadcast_from_worker0(self.embed(ids))
        for number, layer in enumerate(self.layers):
            x = layer(x, cache, number)
        return self.head(self.norm(x)), cache

    def create(
        self,
        max_batch_size: tirx.Var,
        max_total_seq_len: tirx.Var,
        prefill_chunk_size: tirx.Var,
        page_size: tirx.Var,
    ) -> PagedKVCache:
        return TIRPagedKVCache(
            attn_kind="mha",
            max_batch_size=max_batch_size,
            max_total_seq_len=max_total_seq_len,
            prefill_chunk_size=prefill_chunk_size,
            page_size=page_size,
            support_sliding_window=0,
            layer_partition=relax.ShapeExpr([0, LAYERS]),
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS // self.shards,
            num_key_value_heads=KV_HEADS // self.shards,
            qk_head_dim=DIM,
            v_head_dim=DIM,
            mla_original_qk_head_dim=0,
            mla_original_v_head_dim=0,
            rope_mode=RopeMode.NORMAL,
            rope_scale=1,
            rope_theta=THETA,
            rope_scaling={},
            rope_ext_factors=relax.prim_value(0),
            rotary_dim=DIM,
            enable_disaggregation=False,
            dtype="float32",
            target=tvm.target.Target("llvm"),
        )


def module_of(shards: int) -> tuple[tvm.IRModule, list[str]]:
    """What `export_tvm` makes of the decoder, and the names of its weights."""
    packed = {"param_mode": "packed", "effect_mode": "none"}
    alone = {"param_mode": "none", "effect_mode": "none"}
    cache = nn.spec.Object(object_type=PagedKVCache)
    sizes = ("max_batch_size", "max_total_seq_len", "prefill_chunk_size", "page_size")
    model = Decoder(shards)
    model.prefill = model.decode = model.forward
    mod, params, *_ = model.export_tvm(
        {
            "prefill": {"ids": nn.spec.Tensor([1, "n"], "int32"), "cache": cache, "$": packed},
            "decode": {"ids": nn.spec.Tensor(["b", 1], "int32"), "cache": cache, "$": packed},
            "create": {**dict.fromkeys(sizes, int), "$": alone},
        },
        allow_extern=True,
    )
    return mod, [name for name, _ in params]


def weights_of(names: list[str]) -> dict[str, np.ndarray[Any, Any]]:
    """The weights of the whole model; q, k, v and gate, up are rows of one matrix each."""
    random = np.random.default_rng(0)
    shapes = {
        "embed.weight": (VOCABULARY, HIDDEN),
        "qkv.weight": ((HEADS + 2 * KV_HEADS) * DIM, HIDDEN),
        "out.weight": (HIDDEN, HEADS * DIM),
        "gate_up.weight": (2 * INNER, HIDDEN),
        "down.weight": (HIDDEN, INNER),
        "head.weight": (VOCABULARY, HIDDEN),
    }
    found = {}
    for name in names:
        shape = next((one for end, one in shapes.items() if name.endswith(end)), (HIDDEN,))
        scale = shape[-1] ** -0.5 if len(shape) == 2 else 0.3
        weight = random.normal(size=shape) * scale + (len(shape) == 1)
        found[name] = weight.astype("float32")
    return found


def part_of(name: str, weight: np.ndarray[Any, Any], rank: int, shards: int) -> Any:
    """What a shard has of a weight, as mlc-llm cuts it: each of the parts of a fused one."""
    if name.endswith(("out.weight", "down.weight")):
        return np.split(weight, shards, axis=1)[rank]
    rows = {"qkv.weight": (HEADS, KV_HEADS, KV_HEADS), "gate_up.weight": (1, 1)}
    sizes = next((one for end, one in rows.items() if name.endswith(end)), None)
    if sizes is None:
        return weight
    places = np.cumsum(sizes)[:-1] * (len(weight) // sum(sizes))
    pieces = np.split(weight, places)
    return np.concatenate([np.split(piece, shards)[rank] for piece in pieces])


def expected(weights: dict[str, np.ndarray[Any, Any]], ids: list[int]) -> np.ndarray[Any, Any]:
    """The logits of all tokens of a text, in NumPy."""
    w = {name: one.astype("float64") for name, one in weights.items()}
    x, places = w["embed.weight"][ids], np.arange(len(ids))
    angles = places[:, None] * THETA ** (-np.arange(0, DIM, 2) / DIM)
    cos, sin = (np.concatenate([f(angles)] * 2, -1)[:, None] for f in (np.cos, np.sin))

    def norm(x: Any, name: str) -> Any:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * w[name]

    def turned(x: Any) -> Any:
        half = DIM // 2
        return x * cos + np.concatenate([-x[..., half:], x[..., :half]], -1) * sin

    for k in range(LAYERS):
        layer = f"layers.{k}."
        qkv = norm(x, layer + "before.weight") @ w[layer + "qkv.weight"].T
        q, keys, values = np.split(
            qkv.reshape(len(ids), -1, DIM), [HEADS, HEADS + KV_HEADS], axis=1
        )
        q, keys = turned(q), np.repeat(turned(keys), HEADS // KV_HEADS, 1)
        values = np.repeat(values, HEADS // KV_HEADS, 1)
        scores = np.einsum("ihd,jhd->hij", q, keys) * DIM**-0.5
        scores = np.where(places[:, None] >= places, scores, -np.inf)
        likely = np.exp(scores - scores.max(-1, keepdims=True))
        likely /= likely.sum(-1, keepdims=True)
        mixed = np.einsum("hij,jhd->ihd", likely, values).reshape(len(ids), -1)
        x = x + mixed @ w[layer + "out.weight"].T
        inner = norm(x, layer + "between.weight") @ w[layer + "gate_up.weight"].T
        gate, up = np.split(inner, 2, axis=1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[layer + "down.weight"].T
    return norm(x, "norm.weight") @ w["head.weight"].T


def mlc_pipeline(strategy: int) -> tvm.transform.Pass:
    """TVM's passes in the order of mlc-llm's pipeline, with ours in the place of three."""
    of_tvm = relax.transform
    return tvm.transform.Sequential(
        [
            relax.backend.DispatchSampling(),
            relax.backend.DispatchSortScan(),
            *FUSE,
            of_tvm.DeadCodeElimination(),
            of_tvm.RewriteDataflowReshape(),
            *ALLOCATE,
            transform.IPCAllReduceRewrite(strategy),
            transform.StaticPlanBlockMemory(),
            of_tvm.RewriteCUDAGraph(),
            transform.LowerGPUIPCAllocStorage(),
            *LOWER,
            of_tvm.AttachExternModules([]),
        ]
    )


def logits_of(shards: int, pipeline: Any, texts: list[list[int]]) -> list[np.ndarray[Any, Any]]:
    """The logits of the last token of each prompt, and of each token after it, in a batch."""
    mod, names = module_of(shards)
    with transform.collect_report() as report:
        program = tvm.compile(mod, "llvm", relax_pipeline=pipeline)
    ours = {"IPCAllReduceRewrite", "FuseAllReduceEpilogue"}
    assert ours & {one.pass_name for one in report.decisions}
    whole = weights_of(names)
    with tvm_ipc.Session(shards, timeout=60) as session:
        weights = session.get_global_func("vm.builtin.make_tuple")(
            *(
                session.scatter(np.stack([part_of(name, one, r, shards) for r in range(shards)]))
                for name, one in whole.items()
            )
        )
        functions = session.load_vm_module(program)
        add, begin, end = (
            session.get_global_func(f"vm.builtin.kv_state_{name}")
            for name in ("add_sequence", "begin_forward", "end_forward")
        )
        shape = tvm.runtime.ShapeTuple
        cache = functions["create"](shape([2]), shape([64]), shape([16]), shape([16]))

        def step(name: str, rows: list[int], ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            begin(cache, shape(rows), shape([ids.size // len(rows)] * len(rows)))
            said = functions[name](session.broadcast(ids.astype("int32")), cache, weights)
            end(cache)
            logits = session.get_global_func("vm.builtin.tuple_getitem")(said, 0)
            return np.asarray(session.get(logits, rank=shards - 1))

        found: list[list[Any]] = [[], []]
        for row, prompt in enumerate(PROMPTS):
            add(cache, row)
            found[row].append(step("prefill", [row], np.array([prompt]))[0, -1])
        for place in range(len(texts[0]) - len(PROMPTS[0])):
            ids = np.array(
                [[text[len(prompt) + place]] for text, prompt in zip(texts, PROMPTS, strict=True)]
            )
            for row, logits in enumerate(step("decode", [0, 1], ids)[:, 0]):
                found[row].append(logits)
    return [np.stack(one) for one in found]


@pytest.mark.slow
@pytest.mark.parametrize("of", ["get_pipeline", "mlc-llm"])
def test_two_shards_say_what_numpy_says(of: str) -> None:
    shards = 2
    texts = [[*prompt, 30, 2, 11, 4, 19] for prompt in PROMPTS]
    weights = weights_of(module_of(1)[1])
    pipeline = mlc_pipeline(2) if of == "mlc-llm" else tvm_ipc.get_pipeline("llvm", shards)
    for found, text, prompt in zip(logits_of(shards, pipeline, texts), texts, PROMPTS, strict=True):
        wanted = expected(weights, text)[len(prompt) - 1 :]
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
