# SPDX-License-Identifier: Apache-2.0
"""A small decoder-only language model, as exporters of PyTorch write it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tvm
from tvm import relax, tirx
from tvm.relax import op

Array = np.ndarray[Any, Any]
#: As `transformers` has it for Llama.
PLAN = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
    "lm_head": "colwise_gather_output",
}
#: Of one with fused weights, as `transformers` has Phi-3.
FUSED_PLAN = {
    "layers.*.self_attn.qkv_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.mlp.gate_up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
    "lm_head": "colwise_gather_output",
}


class Decoder:
    """Builds the model; weights have their outputs first, and head counts are baked in."""

    def __init__(
        self,
        layers: int = 2,
        heads: int = 6,
        kv_heads: int = 2,
        width: int = 4,
        inner: int = 22,
        vocabulary: int = 37,
        length: int | None = None,
        fused: bool = False,
    ) -> None:
        self.fused = fused
        self.heads, self.kv_heads, self.width = heads, kv_heads, width
        self.hidden, self.inner, self.vocabulary = heads * width, inner, vocabulary
        self.weights: dict[str, tuple[int, ...]] = {}
        self.params: dict[str, relax.Var] = {}
        self.builder = relax.BlockBuilder()
        self.length: Any = tirx.Var("n", "int64") if length is None else length
        ids = relax.Var("ids", relax.TensorType((1, self.length), "int64"))
        self._declare(layers)
        inputs = [ids, *self.params.values()]
        with self.builder.function("main", inputs, attrs={"num_input": 1}):
            with self.builder.dataflow():
                x = self.emit(op.take(self.params["model.embed_tokens.weight"], self.flat(ids), 0))
                x = self.emit(op.reshape(x, (1, self.length, self.hidden)))
                for k in range(layers):
                    x = self._layer(x, f"model.layers.{k}.")
                x = self._norm(x, "model.norm.weight")
                out = self.builder.emit_output(self._linear(x, "lm_head"))
            self.builder.emit_func_output(out)
        self.module: tvm.IRModule = self.builder.get()

    def values(self, seed: int = 0) -> dict[str, Array]:
        """Return random weights, by name."""
        random = np.random.default_rng(seed)
        return {
            name: (random.uniform(-1, 1.2, shape) / shape[-1] ** 0.5).astype("float32")
            for name, shape in self.weights.items()
        }

    def emit(self, value: relax.Expr) -> relax.Var:
        """Bind a value."""
        return self.builder.emit(value)

    def flat(self, x: relax.Var) -> relax.Var:
        """Return the rows of a batch of one."""
        return self.emit(op.reshape(x, (self.length, *x.ty.shape.values[2:])))

    def _declare(self, layers: int) -> None:
        hidden, kv = self.hidden, self.kv_heads * self.width
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocabulary, hidden)
        }
        for k in range(layers):
            layer = f"model.layers.{k}."
            for norm in ("input_layernorm", "post_attention_layernorm"):
                shapes[f"{layer}{norm}.weight"] = (hidden,)
            projections = [("q", hidden), ("k", kv), ("v", kv), ("o", hidden)]
            if self.fused:
                projections = [("qkv", hidden + 2 * kv), ("o", hidden)]
            for name, rows in projections:
                shapes[f"{layer}self_attn.{name}_proj.weight"] = (rows, hidden)
            first, rows = projections[0]
            shapes[f"{layer}self_attn.{first}_proj.bias"] = (rows,)
            shapes[f"{layer}self_attn.o_proj.bias"] = (hidden,)
            if self.fused:
                shapes[f"{layer}mlp.gate_up_proj.weight"] = (2 * self.inner, hidden)
            else:
                shapes[f"{layer}mlp.gate_proj.weight"] = (self.inner, hidden)
                shapes[f"{layer}mlp.up_proj.weight"] = (self.inner, hidden)
            shapes[f"{layer}mlp.down_proj.weight"] = (hidden, self.inner)
        shapes["model.norm.weight"] = (hidden,)
        shapes["lm_head.weight"] = (self.vocabulary, hidden)
        self.weights = shapes
        self.params = {
            name: relax.Var(name, relax.TensorType(shape, "float32"))
            for name, shape in shapes.items()
        }

    def _linear(self, x: relax.Var, name: str) -> relax.Var:
        weight = self.emit(op.permute_dims(self.params[f"{name}.weight"], [1, 0]))
        y = self.emit(op.matmul(self.flat(x), weight))
        y = self.emit(op.reshape(y, (1, self.length, weight.ty.shape.values[1])))
        bias = self.params.get(f"{name}.bias")
        return y if bias is None else self.emit(op.add(bias, y))

    def _norm(self, x: relax.Var, name: str) -> relax.Var:
        squares = self.emit(op.power(x, relax.const(2.0, "float32")))
        mean = self.emit(op.mean(squares, [-1], keepdims=True))
        scale = self.emit(op.rsqrt(self.emit(op.add(mean, relax.const(1e-6, "float32")))))
        return self.emit(op.multiply(self.params[name], self.emit(op.multiply(x, scale))))

    def _heads(self, x: relax.Var, count: int) -> relax.Var:
        y = self.emit(op.reshape(x, (1, self.length, count, self.width)))
        return self.emit(op.permute_dims(y, [0, 2, 1, 3]))

    def _rotated(self, x: relax.Var) -> relax.Var:
        half = self.width // 2
        low = self.emit(op.strided_slice(x, [3], [0], [half], [1]))
        high = self.emit(op.strided_slice(x, [3], [half], [2**63 - 1], [1]))
        turned = self.emit(op.concat((self.emit(op.negative(high)), low), axis=-1))
        places = self.emit(op.astype(self.emit(op.arange(0, self.length, 1, "int64")), "float32"))
        places = self.emit(op.reshape(places, (1, 1, self.length, 1)))
        x = self.emit(op.multiply(x, self.emit(op.cos(places))))
        return self.emit(op.add(x, self.emit(op.multiply(turned, self.emit(op.sin(places))))))

    def _repeated(self, x: relax.Var) -> relax.Var:
        groups = self.heads // self.kv_heads
        y = self.emit(op.expand_dims(x, [2]))
        shape = (1, self.kv_heads, groups, self.length, self.width)
        y = self.emit(op.broadcast_to(y, shape))
        return self.emit(op.reshape(y, (1, self.heads, self.length, self.width)))

    def _projected(self, x: relax.Var, name: str) -> Iterator[relax.Var]:
        """Yield queries, keys and values."""
        if not self.fused:
            for one in "qkv":
                yield self._linear(x, f"{name}{one}_proj")
            return
        both = self._linear(x, f"{name}qkv_proj")
        begin = 0
        for heads in (self.heads, self.kv_heads, self.kv_heads):
            end = begin + heads * self.width
            yield self.emit(op.strided_slice(both, [2], [begin], [end], [1]))
            begin = end

    def _layer(self, x: relax.Var, name: str) -> relax.Var:
        y = self._norm(x, f"{name}input_layernorm.weight")
        q, k, v = self._projected(y, f"{name}self_attn.")
        q = self._rotated(self._heads(q, self.heads))
        k = self._rotated(self._heads(k, self.kv_heads))
        v = self._heads(v, self.kv_heads)
        k, v = self._repeated(k), self._repeated(v)
        scores = self.emit(op.matmul(q, self.emit(op.permute_dims(k, [0, 1, 3, 2]))))
        later = self.emit(op.full((self.length, self.length), relax.const(-1e9, "float32")))
        scores = self.emit(op.add(scores, self.emit(op.triu(later, 1))))
        y = self.emit(op.matmul(self.emit(op.nn.softmax(scores, -1)), v))
        y = self.emit(op.permute_dims(y, [0, 2, 1, 3]))
        y = self.emit(op.reshape(y, (1, self.length, self.hidden)))
        x = self.emit(op.add(x, self._linear(y, f"{name}self_attn.o_proj")))
        y = self._norm(x, f"{name}post_attention_layernorm.weight")
        if self.fused:
            both = self.emit(op.split(self._linear(y, f"{name}mlp.gate_up_proj"), 2, -1))
            gate, up = (self.emit(relax.TupleGetItem(both, k)) for k in range(2))
        else:
            gate = self._linear(y, f"{name}mlp.gate_proj")
            up = self._linear(y, f"{name}mlp.up_proj")
        y = self.emit(op.multiply(self.emit(op.nn.silu(gate)), up))
        return self.emit(op.add(x, self._linear(y, f"{name}mlp.down_proj")))


def whole_model(decoder: Decoder) -> Callable[..., Array]:
    """Return the model on one device, as TVM compiles it without us."""
    built = tvm.compile(decoder.module, tvm.target.Target({"kind": "llvm", "opt-level": 0}))
    run = relax.VirtualMachine(built, tvm.cpu())["main"]
    return lambda *arrays: run(*map(tvm.runtime.tensor, arrays)).numpy()
