# SPDX-License-Identifier: Apache-2.0
"""Programs for two ranks that the kit carries compiled: what goes in, and what must come out.

What compiles them (`source`) wants TVM's compiler; all else wants NumPy alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
RANKS = 2
#: What the kit carries programs for.
TARGETS = ("cpu", "sm_80", "sm_90", "sm_100")


def _whole_numbers(seed: int, *shape: int) -> Array:
    """Sums of their products are exact in float32, in whatever order."""
    return np.random.default_rng(seed).integers(-8, 9, shape).astype("float32")


def _product(seed: int) -> list[list[Array]]:
    return [[_whole_numbers(seed + r, 5, 64), _whole_numbers(seed + 9 + r, 64, 48)] for r in (0, 1)]


def _sum_of_products(inputs: list[list[Array]]) -> Array:
    return np.asarray(sum(x @ w for x, w in inputs))


def _layer(seed: int) -> list[list[Array]]:
    generator = np.random.default_rng(seed)
    residual, weight = generator.standard_normal((5, 64)), generator.standard_normal(64)
    shared = [residual.astype("float32"), weight.astype("float32")]
    return [
        [_whole_numbers(seed + r, 5, 32), _whole_numbers(seed + 9 + r, 32, 64) / 8, *shared]
        for r in (0, 1)
    ]


def _normed(inputs: list[list[Array]]) -> Array:
    _, _, residual, weight = inputs[0]
    total = residual.astype("float64") + sum((x @ w).astype("float64") for x, w, *_ in inputs)
    return np.asarray(total / np.sqrt((total**2).mean(-1, keepdims=True) + 1e-5) * weight)


def _chunks(seed: int) -> list[list[Array]]:
    weight = _whole_numbers(seed + 9, 64, 48)
    return [[_whole_numbers(seed + r, 5, 1, 16, 64), weight] for r in (0, 1)]


def _product_of_chunks(inputs: list[list[Array]]) -> Array:
    return np.asarray(np.concatenate([x for x, _ in inputs], 1) @ inputs[0][1])


@dataclass(frozen=True)
class Program:
    """A function `main` of one tensor or more, which gives the same tensor on both ranks.

    Attributes
    ----------
    inputs : by a seed, the arguments of each rank.
    expected : what comes of them.
    tolerance : 0 if every bit must be right.
    graph : whether it is compiled for CUDA graphs.
    """

    name: str
    inputs: Callable[[int], list[list[Array]]]
    expected: Callable[[list[list[Array]]], Array]
    tolerance: float = 0.0
    graph: bool = False


PROGRAMS = {
    one.name: one
    for one in (
        Program("product", _product, _sum_of_products),
        Program("product_in_graph", _product, _sum_of_products, graph=True),
        Program("chunks", _chunks, _product_of_chunks),
        Program("chunks_in_graph", _chunks, _product_of_chunks, graph=True),
        Program("layer", _layer, _normed, 1e-4),
        Program("layer_in_graph", _layer, _normed, 1e-4, graph=True),
    )
}


#: The steps after an all-reduce, each alone: for the benchmark of the one that does all of it.
STEPS = "steps"
WIDTH = 4096


def steps() -> Any:
    """The Relax module of `add` and `norm`, of any number of rows."""
    from tvm.script import ir as I
    from tvm.script import relax as R

    @I.ir_module
    class Steps:
        @R.function
        def add(
            x: R.Tensor(("n", 4096), "float16"), y: R.Tensor(("n", 4096), "float16")
        ) -> R.Tensor(("n", 4096), "float16"):
            with R.dataflow():
                z = R.add(x, y)
                R.output(z)
            return z

        @R.function
        def norm(
            x: R.Tensor(("n", 4096), "float16"), weight: R.Tensor((4096,), "float16")
        ) -> R.Tensor(("n", 4096), "float16"):
            with R.dataflow():
                z = R.nn.rms_norm(x, weight, axes=[-1], epsilon=1e-5)
                R.output(z)
            return z

    return Steps


def source(name: str) -> Any:
    """The Relax module of a program."""
    from tvm.script import ir as I
    from tvm.script import relax as R

    @I.ir_module
    class Product:
        @R.function
        def main(x: R.Tensor((5, 64), "float32"), w: R.Tensor((64, 48), "float32")) -> R.Tensor(
            (5, 48), "float32"
        ):
            with R.dataflow():
                part = R.matmul(x, w)
                total = R.ccl.allreduce(part, "sum")
                R.output(total)
            return total

    @I.ir_module
    class Layer:
        @R.function
        def main(
            x: R.Tensor((5, 32), "float32"),
            w: R.Tensor((32, 64), "float32"),
            residual: R.Tensor((5, 64), "float32"),
            weight: R.Tensor((64,), "float32"),
        ) -> R.Tensor((5, 64), "float32"):
            with R.dataflow():
                part = R.matmul(x, w)
                total = R.ccl.allreduce(part, "sum")
                stream = R.add(total, residual)
                normed = R.nn.rms_norm(stream, weight, axes=[-1], epsilon=1e-5)
                R.output(normed)
            return normed

    if name.startswith("chunks"):
        return _marked_chunks()
    return Product if name.startswith("product") else Layer


def _marked_chunks() -> Any:
    """Five chunks of rows, gathered and multiplied; on GPUs, by two streams in turns."""
    from tvm import relax
    from tvm.relax import op

    from tvm_ipc import comm

    mesh, everywhere = comm.Mesh({"d": RANKS}), {"d": comm.Replica()}
    x = relax.Var("x", relax.TensorType((5, RANKS, 16, 64), "float32"))
    w = relax.Var("w", relax.TensorType((64, 48), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x, w]):
        with builder.dataflow():
            mine = builder.emit(comm.place(x, mesh, {"d": comm.Shard(1)}))
            y = builder.emit(op.matmul(builder.emit(comm.place(mine, mesh, everywhere)), w))
            out = builder.emit_output(comm.place(y, mesh, everywhere, stream=0))
        builder.emit_func_output(out)
    return builder.get()
