# SPDX-License-Identifier: Apache-2.0
"""The work of cutting a model grows with the model, and no faster."""

from __future__ import annotations

import tvm
from tvm import relax
from tvm.relax import op

from tests.transform.loads import power
from tvm_ipc import parallelize


def layers(count: int) -> tvm.IRModule:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4, 8), "float32"))
    weights = [
        relax.Var(f"layers.{k}.{name}", relax.TensorType(shape, "float32"))
        for k in range(count)
        for name, shape in (("up", (8, 7)), ("down", (7, 8)))
    ]
    with builder.function("main", [x, *weights]):
        with builder.dataflow():
            y = x
            for up, down in zip(weights[::2], weights[1::2], strict=True):
                h = builder.emit(op.nn.softmax(builder.emit(op.matmul(y, up))))
                h = builder.emit(op.flip(h, 1))  # of which every rank needs all
                y = builder.emit(op.add(y, builder.emit(op.matmul(h, down))))
            out = builder.emit_output(y)
        builder.emit_func_output(out)
    return builder.get()


def test_work_grows_linearly() -> None:
    plan = {"layers.*.up": "S[1]", "layers.*.down": "S[0]"}
    modules = {size: layers(size) for size in (4, 8, 16)}
    assert power(lambda size: parallelize(modules[size], plan, 2), 4) < 1.1


def normed(count: int) -> tvm.IRModule:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4, 8), "float32"))
    weights = [
        relax.Var(f"layers.{k}.{name}", relax.TensorType(shape, "float32"))
        for k in range(count)
        for name, shape in (("norm", (8,)), ("up", (8, 7)), ("down", (7, 8)))
    ]
    with builder.function("main", [x, *weights], attrs={"num_input": 1}):
        with builder.dataflow():
            y = builder.emit(op.nn.relu(x))
            for k in range(count):
                norm, up, down = weights[3 * k : 3 * k + 3]
                h = builder.emit(op.nn.rms_norm(y, norm, axes=-1))
                h = builder.emit(op.nn.relu(builder.emit(op.matmul(h, up))))
                y = builder.emit(op.add(y, builder.emit(op.matmul(h, down))))
            out = builder.emit_output(y)
        builder.emit_func_output(out)
    return builder.get()


def test_work_of_divided_activations_grows_linearly() -> None:
    """Although each norm is followed back to where its sequence begins."""
    plan = {"layers.*.up": "S[1]", "layers.*.down": "S[0]", "layers.*.norm": "sequence_parallel"}
    modules = {size: normed(size) for size in (4, 8, 16)}
    assert power(lambda size: parallelize(modules[size], plan, 2), 4) < 1.1


def test_work_of_plans_that_are_found_grows_linearly() -> None:
    modules = {size: normed(size) for size in (8, 16, 32)}
    assert power(lambda size: parallelize(modules[size], "auto", 2), 8) < 1.1
