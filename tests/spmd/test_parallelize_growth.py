# SPDX-License-Identifier: Apache-2.0
"""The work of cutting a model grows with the model, and no faster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm
from tvm import relax
from tvm.relax import op

from tests.one_function_modules import one_function
from tests.transform.loads import power
from tvm_ipc import parallelize


def repeated(
    count: int, layer: Callable[..., relax.Expr], num_input: int | None, **shapes: Any
) -> tvm.IRModule:
    """Return a module of equal layers, whose weights have these shapes."""

    def result(emit: Any, y: relax.Expr, *weights: relax.Var) -> relax.Expr:
        for k in range(count):
            y = emit(op.add(y, layer(emit, y, *weights[k * len(shapes) : (k + 1) * len(shapes)])))
        return y

    params = {f"layers.{k}.{name}": s for k in range(count) for name, s in shapes.items()}
    return one_function(result, {"x": (4, 8), **params}, num_input=num_input)


def layers(count: int) -> tvm.IRModule:
    def layer(emit: Any, y: relax.Var, up: relax.Var, down: relax.Var) -> relax.Expr:
        h = emit(op.nn.softmax(emit(op.matmul(y, up))))
        return emit(op.matmul(emit(op.flip(h, 1)), down))  # of which every rank needs all

    return repeated(count, layer, None, up=(8, 7), down=(7, 8))


def test_work_grows_linearly() -> None:
    plan = {"layers.*.up": "S[1]", "layers.*.down": "S[0]"}
    modules = {size: layers(size) for size in (4, 8, 16)}
    assert power(lambda size: parallelize(modules[size], plan, 2), 4) < 1.1


def normed(count: int) -> tvm.IRModule:
    def layer(emit: Any, y: Any, norm: relax.Var, up: relax.Var, down: relax.Var) -> relax.Expr:
        h = emit(op.nn.rms_norm(y, norm, axes=-1))
        h = emit(op.nn.relu(emit(op.matmul(h, up))))
        return emit(op.matmul(h, down))

    return repeated(count, layer, 1, norm=(8,), up=(8, 7), down=(7, 8))


def test_work_of_divided_activations_grows_linearly() -> None:
    """Although each norm is followed back to where its sequence begins."""
    plan = {"layers.*.up": "S[1]", "layers.*.down": "S[0]", "layers.*.norm": "sequence_parallel"}
    modules = {size: normed(size) for size in (4, 8, 16)}
    assert power(lambda size: parallelize(modules[size], plan, 2), 4) < 1.1


def test_work_of_plans_that_are_found_grows_linearly() -> None:
    modules = {size: normed(size) for size in (8, 16, 32)}
    assert power(lambda size: parallelize(modules[size], "auto", 2), 8) < 1.1
