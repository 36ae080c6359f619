# SPDX-License-Identifier: Apache-2.0
"""Styles on weights in both storage orders, in real workers, against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op

from tests.end_to_end.test_parallelize import run
from tests.one_function_modules import one_function
from tvm_ipc import parallelize
from tvm_ipc.comm import Shard

HIDDEN, INNER = 8, 7
PLAN = {"up": "colwise", "down": "rowwise"}


def mlp(is_transposed: bool, bias: tuple[int, ...] | None, num_input: int | None) -> tvm.IRModule:
    """Return an MLP whose weights are stored as (in, out), or as (out, in) if transposed."""
    shapes: dict[str, tuple[int, ...]] = {
        "x": (5, HIDDEN),
        "up.weight": (INNER, HIDDEN) if is_transposed else (HIDDEN, INNER),
        "down.weight": (HIDDEN, INNER) if is_transposed else (INNER, HIDDEN),
    }
    if bias is not None:
        shapes |= {"up.bias": (*bias, INNER), "down.bias": (*bias, HIDDEN)}

    def result(emit: Any, x: relax.Var, *weights: relax.Var) -> relax.Var:
        params = dict(zip(list(shapes)[1:], weights, strict=True))

        def linear(x: relax.Expr, name: str) -> relax.Var:
            weight = params[f"{name}.weight"]
            if is_transposed:
                weight = emit(op.permute_dims(weight))
            y = emit(op.matmul(x, weight))
            return y if bias is None else emit(op.add(y, params[f"{name}.bias"]))

        return linear(emit(op.nn.relu(linear(x, "up"))), "down")

    return one_function(result, shapes, num_input=num_input)


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize(("bias", "num_input"), [(None, None), ((), 1), ((1,), 1), ((1,), None)])
def test_an_mlp(
    workers: int, is_transposed: bool, bias: tuple[int, ...] | None, num_input: int | None
) -> None:
    """One all-reduce, and no gather, in either storage order."""
    mod = mlp(is_transposed, bias, num_input)
    made = parallelize(mod, PLAN, workers)
    assert made.collectives == {"allreduce": 1}
    output, input_ = (0, 1) if is_transposed else (1, 0)
    (up,), (down,) = (made.shards[f"{name}.weight"].placements for name in ("up", "down"))
    assert isinstance(up, Shard)
    assert isinstance(down, Shard)
    assert (up.axis, down.axis) == (output, input_)
    if bias is not None:
        assert made.shards["up.bias"].shard_shape == (*bias, -(-INNER // workers))
        assert made.shards["down.bias"].shard_shape == (*bias, HIDDEN)
    random = np.random.default_rng(0)
    arrays = {
        str(param.name): random.uniform(
            -1, 1, [int(extent) for extent in param.ty.shape.values]
        ).astype("float32")
        for param in mod["main"].params
    }

    def linear(x: Any, name: str) -> Any:
        weight = arrays[f"{name}.weight"]
        return x @ (weight.T if is_transposed else weight) + arrays.get(f"{name}.bias", 0)

    expected = linear(np.maximum(linear(arrays["x"], "up"), 0), "down")
    for found in run(made, "main", list(arrays.values())):
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_experts(workers: int, is_transposed: bool) -> None:
    """Stacks of experts are sharded by the features of each expert."""
    order = (4, INNER, HIDDEN) if is_transposed else (4, HIDDEN, INNER)
    shapes = {"x": (4, 3, HIDDEN), "up": order, "down": (4, *order[:0:-1])}

    def result(emit: Any, x: relax.Expr, *weights: relax.Var) -> relax.Expr:
        for weight in weights:
            w = emit(op.permute_dims(weight, [0, 2, 1])) if is_transposed else weight
            x = emit(op.matmul(x, w))
        return x

    made = parallelize(one_function(result, shapes), PLAN, workers)
    assert made.collectives == {"allreduce": 1}
    random = np.random.default_rng(0)
    arrays = [random.uniform(-1, 1, shape).astype("float32") for shape in shapes.values()]
    ups, downs = (array.transpose(0, 2, 1) if is_transposed else array for array in arrays[1:])
    for found in run(made, "main", arrays):
        np.testing.assert_allclose(found.numpy(), arrays[0] @ ups @ downs, rtol=1e-4, atol=1e-5)
