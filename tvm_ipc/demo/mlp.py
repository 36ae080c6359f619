# SPDX-License-Identifier: Apache-2.0
"""The model: what a worker computes, in Relax, and what it should come to, in NumPy.

One layer, on worker w of n. `up` is split by columns, `down` by rows, so that the activation
needs no data of other workers, and one sum over the workers completes the layer:

    x ──── @ up[:, w] ──── silu ──── @ down[w, :] ──── all-reduce(sum) ──── + x ──── next layer
"""

from __future__ import annotations

from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt
import tvm
from tvm import relax

from tvm_ipc.demo.options import Options

Array = npt.NDArray[Any]

MAIN: Final = "main"
#: A function that does nothing but all-reduces, to time them.
REDUCE_ONLY: Final = "reduce_only"
#: How many all-reduces `REDUCE_ONLY` does, so that calling it does not count.
REDUCE_ONLY_CALLS: Final = 100


def build_module(options: Options, workers: int) -> tvm.IRModule:
    """Return the program of one of `workers` workers; that of a single one has no all-reduce."""
    builder = relax.BlockBuilder()
    row = relax.TensorType((options.batch, options.hidden), options.dtype)
    inner = options.inner // workers
    x = relax.Var("x", row)
    weights = []
    for layer in range(options.layers):
        up = relax.TensorType((options.hidden, inner), options.dtype)
        down = relax.TensorType((inner, options.hidden), options.dtype)
        weights += [relax.Var(f"up_{layer}", up), relax.Var(f"down_{layer}", down)]
    with builder.function(MAIN, [x, *weights]):
        with builder.dataflow():
            y = x
            for up, down in zip(weights[::2], weights[1::2], strict=True):
                h = _linear(builder, y, up, activation=relax.op.nn.silu)
                partial = _linear(builder, h, down)
                if workers > 1:
                    partial = builder.emit(relax.op.ccl.allreduce(partial, "sum"))
                y = builder.emit(relax.op.add(y, partial))
            result = builder.emit_output(y)
        builder.emit_func_output(result)
    if workers > 1:
        _add_reduce_only(builder, row)
    return builder.get()


def _linear(builder: Any, x: Any, weight: Any, activation: Any = None) -> Any:
    """Accumulate in float32 whatever the type, and round once."""
    dtype = x.ty.dtype
    y = builder.emit(relax.op.matmul(x, weight, out_dtype="float32"))
    if activation is not None:
        y = builder.emit(activation(y))
    return y if str(dtype) == "float32" else builder.emit(relax.op.astype(y, dtype))


def _add_reduce_only(builder: Any, row: Any) -> None:
    x = relax.Var("x", row)
    with builder.function(REDUCE_ONLY, [x]):
        with builder.dataflow():
            y = x
            # The first one's input is a parameter, which no pass moves to IPC memory.
            for _ in range(REDUCE_ONLY_CALLS + 1):
                y = builder.emit(relax.op.ccl.allreduce(y, "sum"))
            result = builder.emit_output(y)
        builder.emit_func_output(result)


def make_data(options: Options) -> tuple[Array, list[Array]]:
    """Return an input and the weights of the whole model, the same at every run."""
    random = np.random.default_rng(0)
    dtype = numpy_dtype(options.dtype)
    x = random.standard_normal((options.batch, options.hidden), "float32").astype(dtype)
    up, down = (options.hidden, options.inner), (options.inner, options.hidden)
    # Layers add up to values of about one, however many there are.
    scales = [(up, options.hidden**-0.5), (down, (options.inner * options.layers) ** -0.5)]
    weights = [
        (random.standard_normal(shape, "float32") * np.float32(scale)).astype(dtype)
        for _ in range(options.layers)
        for shape, scale in scales
    ]
    return x, weights


def shard(weights: list[Array], workers: int) -> list[Array]:
    """Return each weight as one array with a part for each worker."""
    parts = []
    for up, down in zip(weights[::2], weights[1::2], strict=True):
        parts += [np.stack(np.split(up, workers, axis=1)), np.stack(np.split(down, workers))]
    return parts


def numpy_result(x: Array, weights: list[Array]) -> Array:
    """Compute the whole model in float64."""
    y = x.astype("float64")
    for up, down in zip(weights[::2], weights[1::2], strict=True):
        h = y @ up.astype("float64")
        y = y + (h / (1 + np.exp(-h))) @ down.astype("float64")
    return y


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the NumPy type of that name."""
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
