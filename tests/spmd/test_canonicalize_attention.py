# SPDX-License-Identifier: Apache-2.0
"""Products of batches that were joined with heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import tvm
from tvm import relax, tirx
from tvm.relax import op

from tests.one_function_modules import one_function
from tvm_ipc import comm, parallelize
from tvm_ipc.spmd.canonicalize_attention import canonicalize_attention

Make = Callable[..., Any]
B, N = tirx.Var("b", "int64"), tirx.Var("n", "int64")
FOUR_AXES = {"q": (2, 6, 5, 4), "k": (2, 6, 4, 5)}


def joined(emit: Any, q: Any, k: Any, batch: Any, n: Any) -> relax.Var:
    """Return the product of heads of a width of 4, which are joined with the batch for it."""
    rows, columns = emit(op.reshape(q, (batch, n, 4))), emit(op.reshape(k, (batch, 4, n)))
    return emit(op.matmul(rows, columns))


def repeated(emit: Any, x: Any, w: Any) -> relax.Expr:
    return op.matmul(x, emit(op.broadcast_to(w, (3, 8, 6))))


#: Shapes of the parameters, what is made of them, and what becomes of it; None if nothing changes.
PAIRS: dict[str, tuple[Mapping[str, Any], Make, Make | None]] = {
    "heads that were joined with the batch": (
        {"q": (B, 6, N, 4), "k": (B, 6, 4, N)},
        lambda emit, q, k: op.reshape(joined(emit, q, k, B * 6, N), (B, 6, N, N)),
        lambda emit, q, k: emit(op.matmul(q, k)),
    ),
    "a product that is used as it is": (
        FOUR_AXES,
        lambda emit, q, k: op.exp(joined(emit, q, k, 12, 5)),
        lambda emit, q, k: op.exp(emit(op.reshape(emit(op.matmul(q, k)), (12, 5, 5)))),
    ),
    # Twelve are two times six here, and three times four there.
    "batches that are joined in another way": (
        {"q": (2, 6, 5, 4), "k": (3, 4, 4, 5)},
        lambda emit, q, k: op.reshape(joined(emit, q, k, 12, 5), (2, 6, 5, 5)),
        None,
    ),
    "a weight that is repeated": (
        {"x": (3, 5, 8), "w": (8, 6)},
        repeated,
        lambda _, x, w: op.matmul(x, w),
    ),
    # The other operand has none, so that the product would lack them.
    "a matrix that makes the batches": ({"x": (5, 8), "w": (8, 6)}, repeated, None),
}


@pytest.mark.parametrize("case", PAIRS)
def test_pairs(case: str) -> None:
    shapes, before, after = PAIRS[case]
    found = canonicalize_attention(one_function(before, shapes)["main"])
    expected = one_function(before if after is None else after, shapes)["main"]
    tvm.ir.assert_structural_equal(found, expected)


def test_heads_of_a_batch_stay_divided() -> None:
    """None of them is gathered, however many rows the batch has."""

    def result(emit: Any, q: relax.Var) -> relax.Expr:
        scores = joined(emit, q, op.permute_dims(q, [0, 1, 3, 2]), 12, 5)
        return op.sum(emit(op.reshape(scores, (2, 6, 5, 5))), axis=[1])

    made = parallelize(one_function(result, {"q": (2, 6, 5, 4)}), {"q": comm.Shard(1)}, 3)
    assert made.collectives == {"allreduce": 1}
