# SPDX-License-Identifier: Apache-2.0
"""The model, in TVM's own Relax frontend: what one worker of a tensor-parallel decoder computes.

In every layer, worker w of n has 1/n of the heads and 1/n of the MLP's width. The weights that
make them are split by columns, those that take them by rows, so that one sum over the workers
completes an attention, and one an MLP; norms and the residual stream are on every worker.

    tokens ── embedding ──┬── norm ── qkv[:, w] ── attention ── out[w, :] ── all-reduce ──+──┐
                          └──────────────────────────────────────────────────────────────┘  │
       ┌────────────────────────────────────────────────────────────────────────────────────┘
       ├── norm ── gate_up[:, w] ── silu(gate) * up ── down[w, :] ── all-reduce ──+── next layer
       └──────────────────────────────────────────────────────────────────────────┘
    last token ── norm ── head[:, w] ── all-gather ── logits ── argmax ── next token

With sequence parallelism each worker has 1/n of the rows of a prompt's residual stream, and does
norms of these alone: an all-gather before each attention and MLP and a reduce-scatter after it move
together as much as an all-reduce does (`residual` has both). A step of one token has no rows to
divide, and keeps its all-reduces.

Weights are [inputs, outputs], so that a kernel's inner loop goes along memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

import tvm
from tvm import relax
from tvm.relax.frontend import nn

from tvm_ipc.demo import kernels, kernels_gpu
from tvm_ipc.demo.config import Config
from tvm_ipc.demo.residual import InParts, OnEveryWorker, Residual

PREFILL: Final = "prefill"
DECODE: Final = "decode"
EPSILON: Final = 1e-5

_LOOPS: Final = {"cpu": kernels, "cuda": kernels_gpu}


@dataclass(frozen=True)
class Shard:
    """How a weight is divided among workers: `axis` is cut into segments, and each of these."""

    axis: int
    segments: tuple[int, ...]  #: sizes of the whole model


def build(
    config: Config, world_size: int = 1, *, sequence_parallel: bool = False, device: str = "cpu"
) -> tvm.IRModule:
    """Return the program of one worker.

    It has two functions, `prefill` for any number of tokens n and `decode` for one:

        prefill(tokens: (n,) int32, total: Shape([m]), caches: Tuple, weights: Tuple) -> Said
        decode(said: Said, total: Shape([m]), caches: Tuple, weights: Tuple) -> Said

    The tokens are the last n of a sequence of m; those before them are in the caches, which are
    written in place, keys and values of every layer (see `cache_shapes`). What both say is a tuple
    of the next token, (1,) int32, and its logits, (vocabulary,) float32; `decode` takes it as it
    is, so that a token costs the controller a single command.

    With `sequence_parallel` the workers divide the rows of `prefill` among them. `device` is what
    a worker computes on, "cpu" or "cuda".
    """
    return export(config, world_size, sequence_parallel, device)[0]


def export(
    config: Config, world_size: int, sequence_parallel: bool = False, device: str = "cpu"
) -> tuple[tvm.IRModule, list[tuple[str, Any]]]:
    """Return the program, and the names and `nn.Parameter`s of `weights` in their order."""
    config.check_workers(world_size)
    model = Decoder(config, world_size, sequence_parallel, _LOOPS[device])
    caches = [nn.spec.Tensor(shape, config.dtype) for shape in cache_shapes(config, world_size)]
    said = [nn.spec.Tensor([1], "int32"), nn.spec.Tensor([config.vocabulary], "float32")]
    functions = {
        name: {
            **first,
            "total": int,
            "caches": caches,
            "$": {"param_mode": "packed", "effect_mode": "none"},
        }
        for name, first in (
            (PREFILL, {"tokens": nn.spec.Tensor(["n"], "int32")}),
            (DECODE, {"said": said}),
        )
    }
    module, parameters = model.export_tvm(functions)
    # So that memory is planned once, whatever the length of a prompt.
    for name in functions:
        bounds = {"n": config.context, "total": config.context}
        module[name] = module[name].with_attr("tir_var_upper_bound", bounds)
    return module, parameters


def cache_shapes(config: Config, world_size: int) -> list[tuple[int, ...]]:
    """Return the shapes of a worker's keys and values, layer by layer."""
    heads = config.kv_heads // world_size
    context = padded_context(config)
    keys, values = (heads, config.head_dim, context), (heads, context, config.head_dim)
    return [keys, values] * config.layers


def padded_context(config: Config) -> int:
    """Return how many positions the caches have room for: whole vectors of them."""
    return -(-config.context // kernels.LANES) * kernels.LANES


class Linear(nn.Module):  # type: ignore[misc]
    """Multiplies with a shard; sums in float32 and rounds once."""

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
    """Return a linear layer from the residual stream to this worker's part of each segment."""
    shape = (config.hidden, sum(segments) // world_size)
    return Linear(shape, config.dtype, config.dtype, Shard(1, segments))


def _rows(config: Config, world_size: int, width: int) -> Linear:
    """Return a linear layer from this worker's part to a summand of the residual stream."""
    shape = (width // world_size, config.hidden)
    return Linear(shape, config.dtype, config.dtype, Shard(0, (width,)))


@dataclass(frozen=True)
class Step:
    """What all layers are told of the tokens that are looked at together."""

    residual: Residual
    count: Any  #: of these tokens
    total: Any  #: of the sequence up to the last of them
    angles: nn.Tensor


class Attention(nn.Module):  # type: ignore[misc]
    """Rotary attention of this worker's heads."""

    def __init__(self, config: Config, world_size: int, loops: ModuleType) -> None:
        super().__init__()
        self.loops = loops
        self.heads, self.kv_heads = config.heads // world_size, config.kv_heads // world_size
        queries, keys = config.hidden, config.kv_heads * config.head_dim
        self.qkv = _columns(config, world_size, queries, keys, keys)
        self.out = _rows(config, world_size, queries)
        self.dtype = config.dtype
        self.dim = config.head_dim
        self.sizes = (self.heads, self.kv_heads, self.dim, padded_context(config), config.dtype)

    def forward(self, x: nn.Tensor, keys: nn.Tensor, values: nn.Tensor, step: Step) -> nn.Tensor:
        """Return what this worker's heads add to the sum."""
        rows, tokens = x.shape[0], (step.count, step.total)
        queries, keys, values = nn.op.tensor_ir_inplace_op(
            self.loops.rotate_and_append(*self.sizes),
            "rotate_and_append",
            [self.qkv(x), step.angles, keys, values, *tokens],
            inplace_indices=[-1, 2, 3],
            out=[nn.Tensor.placeholder((rows, self.heads, self.dim), self.dtype), keys, values],
        )
        mixed = nn.op.tensor_ir_op(
            self.loops.attend(*self.sizes),
            "attend",
            [queries, keys, values, *tokens],
            out=nn.Tensor.placeholder((rows, self.heads * self.dim), self.dtype),
        )
        return self.out(mixed)


class MLP(nn.Module):  # type: ignore[misc]
    """SwiGLU of this worker's part of the width."""

    def __init__(self, config: Config, world_size: int) -> None:
        super().__init__()
        self.gate_up = _columns(config, world_size, config.inner, config.inner)
        self.down = _rows(config, world_size, config.inner)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        """Return what this worker's part adds to the sum."""
        h = nn.op.tensor_expr_op(kernels.silu_times, "silu_times", [self.gate_up(x)])
        return self.down(h)


class Layer(nn.Module):  # type: ignore[misc]
    """One layer, whose additions keep the residual stream."""

    def __init__(self, config: Config, world_size: int, loops: ModuleType) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden, -1, EPSILON, False, config.dtype)
        self.attention = Attention(config, world_size, loops)
        self.mlp_norm = nn.RMSNorm(config.hidden, -1, EPSILON, False, config.dtype)
        self.mlp = MLP(config, world_size)

    def forward(self, x: nn.Tensor, keys: nn.Tensor, values: nn.Tensor, step: Step) -> nn.Tensor:
        """Return the residual stream after this layer."""
        gather, reduce = step.residual.gather, step.residual.reduce
        x = x + reduce(self.attention(gather(self.attention_norm(x)), keys, values, step))
        return x + reduce(self.mlp(gather(self.mlp_norm(x))))


class Decoder(nn.Module):  # type: ignore[misc]
    """One worker's part of the model, and what all workers have."""

    def __init__(
        self, config: Config, world_size: int, sequence_parallel: bool, loops: ModuleType
    ) -> None:
        super().__init__()
        self.config, self.world_size, self.loops = config, world_size, loops
        self.sequence_parallel = sequence_parallel and world_size > 1
        self.embedding = nn.Parameter((config.vocabulary, config.hidden), config.dtype)
        self.angles = nn.Parameter((padded_context(config), config.head_dim), "float32")
        self.layers = nn.ModuleList(
            [Layer(config, world_size, loops) for _ in range(config.layers)]
        )
        self.norm = nn.RMSNorm(config.hidden, -1, EPSILON, False, config.dtype)
        shape = (config.hidden, config.vocabulary // world_size)
        self.head = Linear(shape, config.dtype, "float32", Shard(1, (config.vocabulary,)))

    def prefill(
        self, tokens: nn.Tensor, total: Any, caches: list[nn.Tensor]
    ) -> tuple[nn.Tensor, nn.Tensor]:
        """Return the token after the last of n tokens, and all its logits."""
        in_parts = InParts(self.world_size) if self.sequence_parallel else None
        return self._next(tokens, total, caches, in_parts or OnEveryWorker(self.world_size))

    def decode(
        self, said: list[nn.Tensor], total: Any, caches: list[nn.Tensor]
    ) -> tuple[nn.Tensor, nn.Tensor]:
        """Return the token after the one that was said last, and all its logits."""
        return self._next(said[0], total, caches, OnEveryWorker(self.world_size))

    def _next(
        self, tokens: nn.Tensor, total: Any, caches: list[nn.Tensor], residual: Residual
    ) -> tuple[nn.Tensor, nn.Tensor]:
        (count,) = tokens._expr.ty.shape.values
        step = Step(residual, count, total, self.angles)
        # Not nn.op.take: it reads anywhere in memory where a token is out of the vocabulary.
        own = residual.own(tokens)
        x = nn.op.wrap_nested(
            relax.op.take(self.embedding._expr, own._expr, axis=0, mode="clip"), "embedding"
        )
        for layer, keys, values in zip(self.layers, caches[::2], caches[1::2], strict=True):
            x = layer(x, keys, values, step)
        logits = self.head(self.norm(residual.last(x, count)))
        if self.world_size > 1:
            # Of all workers, as the sums are; the frontend's own function gathers within a group.
            gathered = relax.op.ccl.allgather(logits._expr, self.world_size, in_group=False)
            logits = nn.op.wrap_nested(gathered, "logits")
        logits = nn.op.reshape(logits, (self.config.vocabulary,))
        token = nn.op.tensor_ir_op(
            self.loops.argmax(self.config.vocabulary),
            "argmax",
            [logits],
            out=nn.Tensor.placeholder((1,), "int32"),
        )
        return token, logits
