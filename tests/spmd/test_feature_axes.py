# SPDX-License-Identifier: Apache-2.0
"""The axes that styles shard, derived from how a program uses a weight, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op

from tests.one_function_modules import one_function
from tests.spmd.test_styles import Model
from tvm_ipc import parallelize
from tvm_ipc.comm import Shard

Emit = Callable[[relax.Expr], relax.Var]


def module(result: Callable[..., relax.Expr], dtype: str = "float32", **shapes: Any) -> Any:
    """Return a module with an input `x` of shape (5, 6) or another one, and weights."""
    shapes = {"x": (5, 6), **shapes}
    shapes["w"] = relax.TensorType(shapes["w"], dtype)
    return one_function(result, shapes, num_input=1)


def axis(mod: tvm.IRModule, style: str) -> int:
    """Return the axis of `w` that a style shards."""
    (placement,) = parallelize(mod, {"w": style}, 2).shards["w"].placements
    assert isinstance(placement, Shard)
    return placement.axis


def linear(emit: Emit, x: relax.Var, w: relax.Expr) -> relax.Expr:
    return op.matmul(x, emit(op.permute_dims(w)))


def tables(emit: Emit, x: relax.Var, w: relax.Var) -> relax.Expr:
    ids = emit(op.astype(emit(op.strided_slice(x, [1], [0], [1])), "int64"))
    return op.take(w, emit(op.reshape(ids, (5,))), 1)


def scaled(emit: Emit, x: relax.Var, w: relax.Var, scale: relax.Var) -> relax.Expr:
    return linear(emit, x, emit(op.multiply(emit(op.astype(w, "float32")), scale)))


def sliced(emit: Emit, x: relax.Var, w: relax.Var) -> relax.Expr:
    halves = emit(op.split(w, 2, axis=1))
    return op.multiply(*(emit(op.matmul(x, emit(relax.TupleGetItem(halves, k)))) for k in (0, 1)))


@pytest.mark.parametrize(
    ("mod", "outputs", "inputs"),
    [
        (module(lambda _, x, w: op.matmul(x, w), w=(6, 8)), 1, 0),
        (module(linear, w=(8, 6)), 0, 1),
        (module(lambda _, x, w: op.matmul(w, x), x=(6, 5), w=(8, 6)), 0, 1),
        (module(lambda _, x, w: op.matmul(x, w), w=(1, 6, 8)), 2, 1),
        (module(lambda _, x, w: op.matmul(x, w), x=(3, 5, 6), w=(3, 6, 8)), 2, 1),
        (module(lambda _, x, w: op.einsum((x, w), "ni,oi->no"), w=(8, 6)), 0, 1),
        (module(lambda _, x, w: op.einsum((x, w), "ni,io->no"), w=(6, 8)), 1, 0),
        (module(scaled, "int8", w=(8, 6), scale=(8, 1)), 0, 1),
        (module(sliced, w=(6, 8)), 1, 0),
        (module(lambda emit, x, w: op.matmul(x, emit(op.reshape(w, (6, 8)))), w=(6, 1, 8)), 2, 0),
        (module(tables, w=(4, 10)), 0, 1),  # a table that is stored as (features, rows)
        (module(lambda _, x, w: op.nn.conv2d(x, w), x=(1, 6, 5, 5), w=(8, 6, 3, 3)), 0, 1),
        (module(lambda _, x, w: op.matmul(x, w), x=(5, 1), w=(1, 8)), 1, 0),
    ],
)
def test_axes(mod: tvm.IRModule, outputs: int, inputs: int) -> None:
    assert axis(mod, "colwise") == outputs
    assert axis(mod, "rowwise") == inputs


def test_rows_of_a_table_in_any_order() -> None:
    assert axis(module(tables, w=(4, 10)), "embedding_rowwise") == 1
    assert axis(module(tables, w=(4, 10)), "embedding_colwise") == 0


def test_scales_and_biases() -> None:
    """A parameter with one element for each output feature is sharded like them, in any shape."""
    mod = module(scaled, "int8", w=(8, 6), scale=(8, 1))
    assert parallelize(mod, {"*": "replicated"}, 2).collectives == {}
    made = parallelize(mod, {"w": "colwise", "scale": "colwise"}, 2)
    assert made.shards["scale"].placements == (Shard(0),)
    assert made.collectives == {"allgather": 1}
    made = parallelize(mod, {"w": "rowwise", "scale": "rowwise"}, 2)
    assert made.shards["scale"].shard_shape == (8, 1)
    assert made.collectives == {"allreduce": 1}


def both_ways(emit: Emit, x: relax.Var, w: relax.Var) -> relax.Expr:
    return op.add(emit(op.matmul(x, w)), emit(linear(emit, x, w)))


def heads(emit: Emit, x: relax.Var, w: relax.Var) -> relax.Expr:
    return op.einsum((x, w), "ni,ihk->nhk")


@pytest.mark.parametrize(
    ("mod", "style", "words"),
    [
        (
            module(both_ways, w=(6, 6)),
            "colwise",
            "parallelize: plan, of 'w': 'w' has the shape (6, 6), and the program uses it in two "
            "orientations: its output features are axis 1 in the matmul of 'lv' and its output "
            "features are axis 0 in the matmul of 'lv2'; write the one to shard: comm.Shard(0) or "
            "comm.Shard(1)",
        ),
        (
            module(both_ways, w=(6, 6)),
            "rowwise",
            "its input features are axis 0 in the matmul of 'lv' and its input features are axis 1",
        ),
        (
            module(lambda _, x, w: op.add(x, w), w=(5, 6)),
            "colwise",
            "parallelize: plan, of 'w': 'w' has the shape (5, 6), and the program uses it in no "
            "matmul, so that it is unknown which axis has its output features; if its output "
            "features come first, as in PyTorch, write comm.Shard(0); if its input features come "
            "first, as in x @ w, write comm.Shard(1)",
        ),
        (
            module(lambda _, x, w: op.add(x, w), w=(5, 6)),
            "rowwise",
            "as in PyTorch, write comm.Shard(1); if its input features come first, as in x @ w, "
            "write comm.Shard(0)",
        ),
        (
            module(heads, w=(6, 4, 2)),
            "colwise",
            "'w' has the shape (6, 4, 2), and its output features are axes 1 and 2; write the one "
            "to shard: comm.Shard(1) or comm.Shard(2)",
        ),
        (
            module(lambda _, x, w: op.einsum((x, w), "ni,in->n"), w=(6, 5)),
            "colwise",
            "in the matmul of 'gv' no axis of it has output features",
        ),
    ],
)
def test_what_is_refused(mod: tvm.IRModule, style: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        parallelize(mod, {"w": style}, 2)


def test_functions_with_different_orientations() -> None:
    """The orientation of a weight is that of all functions which use it."""
    mod = tvm.IRModule(
        {
            "first": module(lambda _, x, w: op.matmul(x, w), w=(6, 6))["main"],
            "second": module(linear, w=(6, 6))["main"],
        }
    )
    with pytest.raises(ValueError, match="uses it in two orientations"):
        parallelize(mod, {"w": "colwise"}, 2)
    for k in (0, 1):
        assert axis(mod, f"S[{k}]") == k


def test_a_weight_that_is_also_a_table() -> None:
    """Its outputs are its rows; what its input features are has two readings."""
    ids = relax.const(np.array([3, 0, 2, 1, 3]), "int64")

    def tied(emit: Emit, _x: relax.Var, w: relax.Var) -> relax.Expr:
        return linear(emit, emit(op.take(w, ids, 0)), w)

    mod = module(tied, w=(4, 6))
    assert axis(mod, "colwise") == 0
    with pytest.raises(ValueError, match=r"write 'embedding_rowwise' .* or comm\.Shard\(1\) to"):
        parallelize(mod, {"w": "rowwise"}, 2)


@pytest.mark.parametrize(
    ("style", "by_features", "by_model"), [("colwise", 2, 1), ("rowwise", 1, 2)]
)
def test_stacks_in_plans_of_models(style: str, by_features: int, by_model: int) -> None:
    """Transformers counts axes from the end there, and its plans are written for that.

    Experts that compute `x @ w`, as in Llama 4, have others.
    """
    mod = module(lambda _, x, w: op.matmul(x, w), x=(3, 5, 6), w=(3, 6, 8))
    assert axis(mod, style) == by_features
    experts = Model({"w": style}, parameters=["w"])
    assert parallelize(mod, experts, 2).shards["w"].placements == (Shard(by_model),)
