# SPDX-License-Identifier: Apache-2.0
"""Build the program of one worker of a tensor-parallel decoder, with TVM's Relax frontend.

In every layer, worker w of n has 1/n of the heads and 1/n of the MLP's width. The weights before
them are split by columns, the weights after them by rows, so each attention and each MLP needs one
all-reduce. Norms and the residual stream are replicated.

    tokens ── embedding ──┬── norm ── qkv[:, w] ── attention ── out[w, :] ── all-reduce ──+──┐
                          └──────────────────────────────────────────────────────────────┘  │
       ┌────────────────────────────────────────────────────────────────────────────────────┘
       ├── norm ── gate_up[:, w] ── silu(gate) * up ── down[w, :] ── all-reduce ──+── next layer
       └──────────────────────────────────────────────────────────────────────────┘
    last token ── norm ── head[:, w] ── all-gather ── logits ── argmax ── next token

With sequence parallelism each worker has 1/n of the rows of the prompt's residual stream, and
computes the norms of these rows only. An all-gather before each attention and MLP and a
reduce-scatter after it together move as much data as an all-reduce (residual_stream_sharding.py).
Decoding one token keeps the all-reduces, because one row cannot be split.

Weights have the layout [inputs, outputs], so that a kernel's inner loop reads contiguous memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import tvm
from tvm import relax
from tvm.relax.frontend import nn

from tvm_ipc.tvm_private_names import expr_of

from . import attention_kernels
from .decoder_config import Config
from .residual_stream_sharding import Replicated, Residual, SequenceParallel

PREFILL: Final = "prefill"
DECODE: Final = "decode"
EPSILON: Final = 1e-5


@dataclass(frozen=True)
class Shard:
    """The sharding of a weight: `axis` consists of segments, and each is split over the workers."""

    axis: int
    segments: tuple[int, ...]  #: sizes in the whole model


def build(
    config: Config, world_size: int = 1, *, sequence_parallel: bool = False, device: str = "cpu"
) -> tvm.IRModule:
    """Return the program of one worker.

    It has two functions, `prefill` for any number of tokens n and `decode` for one:

        prefill(tokens: (n,) int32, total: Shape([m]), caches: Tuple, weights: Tuple) -> Output
        decode(previous: Output, total: Shape([m]), caches: Tuple, weights: Tuple) -> Output

    The tokens are the last n of a sequence of m tokens. The keys and values of all layers are in
    the caches, which are updated in place (see `cache_shapes`). The output is a tuple of the next
    token, (1,) int32, and its logits, (vocabulary,) float32. `decode` takes the output of the
    previous step, so the controller sends one command per token.

    `sequence_parallel` splits the rows of `prefill` over the workers. `device` is the device that
    a worker computes on, "cpu" or "cuda".
    """
    return export(config, world_size, sequence_parallel, device)[0]


def export(
    config: Config, world_size: int, sequence_parallel: bool = False, device: str = "cpu"
) -> tuple[tvm.IRModule, list[tuple[str, Any]]]:
    """Return the program, and the names and `nn.Parameter`s of `weights` in their order."""
    config.check_workers(world_size)
    model = Decoder(config, world_size, sequence_parallel, device)
    caches = [nn.spec.Tensor(shape, config.dtype) for shape in cache_shapes(config, world_size)]
    output = [nn.spec.Tensor([1], "int32"), nn.spec.Tensor([config.vocabulary], "float32")]
    functions = {
        name: {
            **first,
            "total": int,
            "caches": caches,
            "$": {"param_mode": "packed", "effect_mode": "none"},
        }
        for name, first in (
            (PREFILL, {"tokens": nn.spec.Tensor(["n"], "int32")}),
            (DECODE, {"previous": output}),
        )
    }
    module, parameters = model.export_tvm(functions)
    # Upper bounds let one memory plan serve prompts of every length.
    for name in functions:
        bounds = {"n": config.context, "total": config.context}
        module[name] = module[name].with_attr("tir_var_upper_bound", bounds)
    return module, parameters


def cache_shapes(config: Config, world_size: int) -> list[tuple[int, ...]]:
    """Return the shapes of a worker's keys and values, layer by layer."""
    heads = config.kv_heads // world_size
    context = padded_context(config)
    keys = (heads, 2, config.head_dim // 2, context)
    values = (heads, context, config.head_dim)
    return [keys, values] * config.layers


def padded_context(config: Config) -> int:
    """Return the number of positions in the caches: the context rounded up to whole vectors."""
    return -(-config.context // attention_kernels.LANES) * attention_kernels.LANES


class Linear(nn.Module):  # type: ignore[misc]
    """Multiply by a shard of a weight; accumulate in float32 and round once."""

    def __init__(self, shape: tuple[int, int], dtype: str, result: str, shard: Shard) -> None:
        super().__init__()
        self.weight = nn.Parameter(shape, dtype)
        self.weight.attrs["shard"] = shard
        self.result = result

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        """Return x @ weight."""
        y = nn.op.matmul(x, self.weight, out_dtype="float32")
        return y if self.result == "float32" else nn.op.astype(y, self.result)


def _columns(config: Config, world_size: int, *segments: int) -> Linear:
    """Return a layer from the residual stream to this worker's shard of each segment."""
    shape = (config.hidden, sum(segments) // world_size)
    return Linear(shape, config.dtype, config.dtype, Shard(1, segments))


def _rows(config: Config, world_size: int, width: int) -> Linear:
    """Return a layer from this worker's shard to a partial sum of the residual stream."""
    shape = (width // world_size, config.hidden)
    return Linear(shape, config.dtype, config.dtype, Shard(0, (width,)))


@dataclass(frozen=True, eq=False)
class Step:
    """The inputs that all layers share in one call."""

    residual: Residual
    count: Any  #: number of tokens in this call
    total: Any  #: length of the sequence up to the last of them
    angles: nn.Tensor


class Attention(nn.Module):  # type: ignore[misc]
    """Attention with rotary embeddings over this worker's heads."""

    def __init__(self, config: Config, world_size: int, device: str) -> None:
        super().__init__()
        self.attend = attention_kernels.ATTEND[device]
        self.heads, self.kv_heads = config.heads // world_size, config.kv_heads // world_size
        queries, keys = config.hidden, config.kv_heads * config.head_dim
        self.qkv = _columns(config, world_size, queries, keys, keys)
        self.out = _rows(config, world_size, queries)
        self.dtype = config.dtype
        self.dim = config.head_dim
        self.sizes = (self.heads, self.kv_heads, self.dim, padded_context(config), config.dtype)

    def forward(self, x: nn.Tensor, keys: nn.Tensor, values: nn.Tensor, step: Step) -> nn.Tensor:
        """Return the partial sum of this worker's heads."""
        tokens = (step.count, step.total)
        qkv = self.qkv(x)
        keys, values = nn.op.tensor_ir_inplace_op(
            attention_kernels.append(*self.sizes),
            "append",
            [qkv, step.angles, keys, values, *tokens],
            inplace_indices=[2, 3],
            out=[keys, values],
        )
        queries = nn.op.tensor_expr_op(
            attention_kernels.rotated_queries,
            "rotated_queries",
            [qkv, step.angles, self.heads, step.total - step.count],
        )
        mixed = nn.op.tensor_ir_op(
            self.attend(*self.sizes),
            "attend",
            [queries, keys, values, *tokens],
            out=nn.Tensor.placeholder((x.shape[0], self.heads * self.dim), self.dtype),
        )
        return self.out(mixed)


class MLP(nn.Module):  # type: ignore[misc]
    """A SwiGLU MLP over this worker's shard of the width."""

    def __init__(self, config: Config, world_size: int) -> None:
        super().__init__()
        self.gate_up = _columns(config, world_size, config.inner, config.inner)
        self.down = _rows(config, world_size, config.inner)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        """Return the partial sum of this worker's shard."""
        h = nn.op.tensor_expr_op(attention_kernels.silu_times, "silu_times", [self.gate_up(x)])
        return self.down(h)


class Layer(nn.Module):  # type: ignore[misc]
    """One decoder layer: attention and MLP, each with a norm and a residual addition."""

    def __init__(self, config: Config, world_size: int, device: str) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden, -1, EPSILON, False, config.dtype)
        self.attention = Attention(config, world_size, device)
        self.mlp_norm = nn.RMSNorm(config.hidden, -1, EPSILON, False, config.dtype)
        self.mlp = MLP(config, world_size)

    def forward(self, x: nn.Tensor, keys: nn.Tensor, values: nn.Tensor, step: Step) -> nn.Tensor:
        """Return the residual stream after this layer."""
        gather, reduce = step.residual.gather, step.residual.reduce
        x = x + reduce(self.attention(gather(self.attention_norm(x)), keys, values, step))
        return x + reduce(self.mlp(gather(self.mlp_norm(x))))


class Decoder(nn.Module):  # type: ignore[misc]
    """The model of one worker: its shards, and the replicated weights."""

    def __init__(
        self, config: Config, world_size: int, sequence_parallel: bool, device: str
    ) -> None:
        super().__init__()
        self.config, self.world_size = config, world_size
        self.sequence_parallel = sequence_parallel and world_size > 1
        self.embedding = nn.Parameter((config.vocabulary, config.hidden), config.dtype)
        self.angles = nn.Parameter((padded_context(config), config.head_dim), "float32")
        self.layers = nn.ModuleList(
            [Layer(config, world_size, device) for _ in range(config.layers)]
        )
        self.norm = nn.RMSNorm(config.hidden, -1, EPSILON, False, config.dtype)
        shape = (config.hidden, config.vocabulary // world_size)
        self.head = Linear(shape, config.dtype, "float32", Shard(1, (config.vocabulary,)))

    def prefill(
        self, tokens: nn.Tensor, total: Any, caches: list[nn.Tensor]
    ) -> tuple[nn.Tensor, nn.Tensor]:
        """Return the token after n tokens, and its logits."""
        sharded = SequenceParallel(self.world_size) if self.sequence_parallel else None
        return self._next(tokens, total, caches, sharded or Replicated(self.world_size))

    def decode(
        self, previous: list[nn.Tensor], total: Any, caches: list[nn.Tensor]
    ) -> tuple[nn.Tensor, nn.Tensor]:
        """Return the token after the previous one, and its logits."""
        return self._next(previous[0], total, caches, Replicated(self.world_size))

    def _next(
        self, tokens: nn.Tensor, total: Any, caches: list[nn.Tensor], residual: Residual
    ) -> tuple[nn.Tensor, nn.Tensor]:
        (count,) = expr_of(tokens).ty.shape.values
        step = Step(residual, count, total, self.angles)
        # nn.op.take would read out of bounds for a token outside the vocabulary.
        own = residual.own(tokens)
        x = nn.op.wrap_nested(
            relax.op.take(expr_of(self.embedding), expr_of(own), axis=0, mode="clip"), "embedding"
        )
        for layer, keys, values in zip(self.layers, caches[::2], caches[1::2], strict=True):
            x = layer(x, keys, values, step)
        logits = self.head(self.norm(residual.last(x, count)))
        if self.world_size > 1:
            # The frontend's own function would gather within a group.
            gathered = relax.op.ccl.allgather(expr_of(logits), self.world_size, in_group=False)
            logits = nn.op.wrap_nested(gathered, "logits")
        logits = nn.op.reshape(logits, (self.config.vocabulary,))
        token = relax.op.astype(relax.op.argmax(expr_of(logits), axis=-1, keepdims=True), "int32")
        return nn.op.wrap_nested(token, "token"), logits
