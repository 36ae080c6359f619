# SPDX-License-Identifier: Apache-2.0
"""The models that the benchmarks of the compiler compile: what one of the workers runs.

Each is a Relax module as a user would write it, before any lowering, with `R.ccl` operators where
tensor parallelism puts them. Nothing here is run: sizes are those of real models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm import relax
from tvm.relax import op

from tvm_ipc.examples.tensor_parallel_decoder import decoder_model
from tvm_ipc.examples.tensor_parallel_decoder.decoder_config import Config

WORLD = 2


@dataclass(frozen=True)
class Model:
    """A module, and the values of symbolic sizes that have no upper bound in it."""

    name: str
    dtype: str
    build: Callable[[], tvm.IRModule]
    sizes: Mapping[str, int] = field(default_factory=dict)


class Graph:
    """A Relax function being built: parameters come into being where they are used."""

    def __init__(self, name: str, dtype: str, **bounds: int) -> None:
        self.name, self.dtype, self.bounds = name, dtype, bounds
        self.builder = relax.BlockBuilder()
        self.parameters: list[relax.Var] = []

    def parameter(self, name: str, shape: Sequence[Any], dtype: str | None = None) -> relax.Var:
        self.parameters.append(relax.Var(name, relax.TensorType(shape, dtype or self.dtype)))
        return self.parameters[-1]

    def weight(self, *shape: int, dtype: str | None = None) -> relax.Var:
        return self.parameter(f"w{len(self.parameters)}", shape, dtype)

    def emit(self, expr: relax.Expr) -> relax.Var:
        return self.builder.emit(expr)

    def linear(self, x: relax.Expr, inner: int, outer: int) -> relax.Var:
        dtype = x.ty.dtype if isinstance(x.ty.dtype, str) else str(x.ty.dtype)
        return self.emit(op.matmul(x, self.weight(inner, outer, dtype=dtype)))

    def sum_of_ranks(self, x: relax.Expr, kind: str = "sum") -> relax.Var:
        return self.emit(op.ccl.allreduce(x, kind, in_group=False))

    def branch(self, body: Callable[[], relax.Expr]) -> relax.SeqExpr:
        """What one side of an `if` computes."""
        self.builder._begin_binding_block()
        result = body()
        return relax.SeqExpr([self.builder._end_block()], result)

    @contextmanager
    def whole(self, inputs: int) -> Any:
        """The body; `finish` ends it. The first parameters are inputs, the rest weights."""
        with self.builder.function(self.name, attrs={"num_input": inputs, **self._attributes()}):
            yield self

    def _attributes(self) -> dict[str, Any]:
        return {"tir_var_upper_bound": self.bounds} if self.bounds else {}

    def finish(self, result: relax.Expr) -> None:
        self.builder.emit_func_output(result, self.parameters)

    def module(self) -> tvm.IRModule:
        """Return the module, in dataflow blocks between its branches, where TVM fuses."""
        mod = relax.transform.ConvertToDataflow()(self.builder.get())
        relax.analysis.well_formed(mod)
        return mod


def _size(name: str) -> Any:
    return tvm.tirx.Var(name, "int64")


def mlp(dtype: str, layers: int = 8, rows: Any = 256, hidden: int = 1024) -> tvm.IRModule:
    """Column-parallel, GELU, row-parallel, sum; a residual around every layer."""
    bounds = {} if isinstance(rows, int) else {rows.name: 2048}
    graph = Graph("main", dtype, **bounds)
    inner = 4 * hidden // WORLD
    with graph.whole(1):
        x: Any = graph.parameter("x", (rows, hidden))
        for _ in range(layers):
            wide = graph.emit(op.nn.gelu(graph.linear(x, hidden, inner)))
            x = graph.emit(op.add(x, graph.sum_of_ranks(graph.linear(wide, inner, hidden))))
        graph.finish(x)
    return graph.module()


def resnet(dtype: str, size: int = 224) -> tvm.IRModule:
    """ResNet-50's shape; each bottleneck splits its inner channels over the workers."""
    graph = Graph("main", dtype)

    def conv(x: Any, outer: int, kernel: int, stride: int = 1) -> relax.Var:
        inner = int(x.ty.shape[1])
        weight = graph.weight(outer, inner, kernel, kernel)
        return graph.emit(op.nn.conv2d(x, weight, strides=stride, padding=kernel // 2))

    def scaled(x: Any) -> relax.Var:
        """What inference leaves of a batch norm."""
        channels = int(x.ty.shape[1])
        scale, shift = graph.weight(1, channels, 1, 1), graph.weight(1, channels, 1, 1)
        return graph.emit(op.add(graph.emit(op.multiply(x, scale)), shift))

    def relu(x: Any) -> relax.Var:
        return graph.emit(op.nn.relu(x))

    def bottleneck(x: Any, width: int, stride: int) -> relax.Var:
        part = relu(scaled(conv(x, width // WORLD, 1)))
        part = relu(scaled(conv(part, width // WORLD, 3, stride)))
        full = scaled(graph.sum_of_ranks(conv(part, 4 * width, 1)))
        if stride > 1 or int(x.ty.shape[1]) != 4 * width:
            x = scaled(conv(x, 4 * width, 1, stride))
        return relu(graph.emit(op.add(full, x)))

    with graph.whole(1):
        image = graph.parameter("image", (1, 3, size, size))
        x = relu(scaled(conv(image, 64, 7, 2)))
        x = graph.emit(op.nn.max_pool2d(x, (3, 3), (2, 2), (1, 1)))
        for stage, blocks in enumerate((3, 4, 6, 3)):
            for block in range(blocks):
                x = bottleneck(x, 64 << stage, 2 if stage and not block else 1)
        x = graph.emit(op.nn.adaptive_avg_pool2d(x, (1, 1)))
        x = graph.emit(op.reshape(x, (1, int(x.ty.shape[1]))))
        graph.finish(graph.linear(x, int(x.ty.shape[1]), 1000))
    return graph.module()


def encoder(dtype: str, layers: int = 6, tokens: int = 384, hidden: int = 768) -> tvm.IRModule:
    """A transformer encoder whose layers choose: a wide network or a narrow one, full or none."""
    graph = Graph("main", dtype)
    heads, inner = 12 // WORLD, 4 * hidden // WORLD
    part = hidden // WORLD

    def norm(x: Any) -> relax.Var:
        gamma, beta = graph.weight(hidden), graph.weight(hidden)
        return graph.emit(op.nn.layer_norm(x, gamma, beta, axes=-1))

    def attention(x: Any) -> relax.Var:
        def split(y: Any) -> relax.Var:
            return graph.emit(
                op.permute_dims(
                    graph.emit(op.reshape(y, (1, tokens, heads, part // heads))), [0, 2, 1, 3]
                )
            )

        q, k, v = (split(graph.linear(x, hidden, part)) for _ in range(3))
        scores = graph.emit(op.matmul(q, graph.emit(op.permute_dims(k, [0, 1, 3, 2]))))
        mixed = graph.emit(op.matmul(graph.emit(op.nn.softmax(scores)), v))
        joined = graph.emit(
            op.reshape(graph.emit(op.permute_dims(mixed, [0, 2, 1, 3])), (1, tokens, part))
        )
        return graph.sum_of_ranks(graph.linear(joined, part, hidden))

    def network(x: Any, width: int) -> relax.Var:
        y = graph.emit(op.nn.gelu(graph.linear(x, hidden, width)))
        return graph.sum_of_ranks(graph.linear(y, width, hidden))

    with graph.whole(2):
        x: Any = graph.parameter("x", (1, tokens, hidden))
        wide = graph.parameter("wide", (), "bool")
        for _ in range(layers):
            x = graph.emit(op.add(x, attention(norm(x))))
            y = norm(x)
            # Not `lambda: network(y, ...)`: y changes with the layer.
            left = graph.branch(lambda y=y: network(y, inner))  # type: ignore[misc]
            right = graph.branch(lambda y=y: network(y, inner // 4))  # type: ignore[misc]
            x = graph.emit(op.add(x, graph.emit(relax.If(wide, left, right))))
        graph.finish(x)
    return graph.module()


def experts(dtype: str, layers: int = 4, experts: int = 8, hidden: int = 1024) -> tvm.IRModule:
    """Mixture of experts; each worker owns some, and weighs them for all tokens."""
    rows = _size("tokens")
    graph = Graph("main", dtype, tokens=512)
    own, inner = experts // WORLD, hidden * 2
    with graph.whole(2):
        x: Any = graph.parameter("x", (rows, hidden))
        first = graph.parameter("first", (own,), "int32")  # the columns of this worker's experts
        for _ in range(layers):
            normed = graph.emit(op.nn.rms_norm(x, graph.weight(hidden), axes=-1))
            weights = graph.emit(op.nn.softmax(graph.linear(normed, hidden, experts)))
            mine = graph.emit(op.take(weights, first, axis=1, mode="clip"))
            columns = graph.emit(op.split(mine, own, axis=1))
            total: Any = None
            for i in range(own):
                gate = graph.emit(op.nn.silu(graph.linear(normed, hidden, inner)))
                up = graph.emit(op.multiply(gate, graph.linear(normed, hidden, inner)))
                down = graph.linear(up, inner, hidden)
                column = graph.emit(relax.TupleGetItem(columns, i))
                weighted = graph.emit(op.multiply(down, column))
                total = weighted if total is None else graph.emit(op.add(total, weighted))
            x = graph.emit(op.add(x, graph.sum_of_ranks(total)))
        graph.finish(x)
    return graph.module()


def mixed(layers: int = 6, rows: int = 128, hidden: int = 1024) -> tvm.IRModule:
    """Matrix products in float16, the residual and its sums in turn in float32 and float16."""
    graph = Graph("main", "float16")
    inner = 4 * hidden // WORLD
    with graph.whole(1):
        x: Any = graph.parameter("x", (rows, hidden), "float32")
        for layer in range(layers):
            gamma = graph.weight(hidden, dtype="float32")
            normed = graph.emit(op.nn.rms_norm(x, gamma, axes=-1))
            half = graph.emit(op.astype(normed, "float16"))
            wide = graph.emit(op.nn.silu(graph.linear(half, hidden, inner)))
            down = graph.linear(wide, inner, hidden)
            if layer % 2:
                full = graph.emit(op.astype(graph.sum_of_ranks(down), "float32"))
            else:
                full = graph.sum_of_ranks(graph.emit(op.astype(down, "float32")))
            x = graph.emit(op.add(x, full))
        largest = graph.sum_of_ranks(graph.emit(op.max(x, axis=-1, keepdims=True)), "max")
        graph.finish(graph.emit(op.divide(x, largest)))
    return graph.module()


#: The decoder of `tvm-ipc demo`, small, as wide as a model of 1B, and as a model of 8B.
DECODERS = {
    "small": Config(),
    "1B": Config(16, 2048, 32, 8, 8192, 128256, context=2048, dtype="float16"),
    "8B": Config(32, 4096, 32, 8, 14336, 128256, context=2048, dtype="float16"),
}


def decoder(config: Config) -> tvm.IRModule:
    """Prefill for any number of tokens up to the context, and decode."""
    return decoder_model.build(config, WORLD)


def _decoder(name: str) -> Model:
    config = DECODERS[name]
    return Model(f"decoder {name}", config.dtype, lambda: decoder(config))


def models() -> list[Model]:
    """The whole zoo."""
    return [
        *map(_decoder, DECODERS),
        Model("MLP", "float32", lambda: mlp("float32")),
        Model("MLP", "float16", lambda: mlp("float16")),
        Model("MLP, symbolic rows <= 2048", "float16", lambda: mlp("float16", rows=_size("n"))),
        Model("ResNet-50", "float32", lambda: resnet("float32")),
        Model("ResNet-50", "float16", lambda: resnet("float16")),
        Model("encoder with branches", "float32", lambda: encoder("float32")),
        Model("mixture of experts, tokens <= 512", "float16", lambda: experts("float16")),
        Model("mixed float16 and float32", "mixed", mixed),
    ]
