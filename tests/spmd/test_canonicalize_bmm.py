# SPDX-License-Identifier: Apache-2.0
"""Products of batches that were joined with heads."""

from __future__ import annotations

import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from tvm_ipc import comm, parallelize
from tvm_ipc.spmd.canonicalize_bmm import canonicalize_bmm


def same(before: tvm.IRModule, expected: tvm.IRModule) -> None:
    tvm.ir.assert_structural_equal(canonicalize_bmm(before["main"]), expected["main"])


def test_heads_that_were_joined_with_the_batch() -> None:
    @I.ir_module
    class Before:
        @R.function
        def main(
            q: R.Tensor(("b", 6, "n", 4), "float32"), k: R.Tensor(("b", 6, 4, "n"), "float32")
        ) -> R.Tensor(("b", 6, "n", "n"), "float32"):
            b, n = T.int64(), T.int64()
            with R.dataflow():
                queries = R.reshape(q, R.shape([b * 6, n, 4]))
                keys = R.reshape(k, R.shape([b * 6, 4, n]))
                joined = R.matmul(queries, keys)
                scores = R.reshape(joined, R.shape([b, 6, n, n]))
                R.output(scores)
            return scores

    @I.ir_module
    class Expected:
        @R.function
        def main(
            q: R.Tensor(("b", 6, "n", 4), "float32"), k: R.Tensor(("b", 6, 4, "n"), "float32")
        ) -> R.Tensor(("b", 6, "n", "n"), "float32"):
            with R.dataflow():
                apart = R.matmul(q, k)
                scores = apart
                R.output(scores)
            return scores

    same(Before, Expected)


def test_a_product_that_is_used_as_it_is() -> None:
    @I.ir_module
    class Before:
        @R.function
        def main(q: R.Tensor((2, 6, 5, 4), "float32"), k: R.Tensor((2, 6, 4, 5), "float32")):
            with R.dataflow():
                queries = R.reshape(q, R.shape([12, 5, 4]))
                keys = R.reshape(k, R.shape([12, 4, 5]))
                joined = R.matmul(queries, keys)
                other = R.exp(joined)
                R.output(other)
            return other

    @I.ir_module
    class Expected:
        @R.function
        def main(q: R.Tensor((2, 6, 5, 4), "float32"), k: R.Tensor((2, 6, 4, 5), "float32")):
            with R.dataflow():
                apart = R.matmul(q, k)
                joined = R.reshape(apart, R.shape([12, 5, 5]))
                other = R.exp(joined)
                R.output(other)
            return other

    same(Before, Expected)


def test_batches_that_are_joined_in_another_way() -> None:
    """Twelve are two times six here, and three times four there."""

    @I.ir_module
    class Before:
        @R.function
        def main(q: R.Tensor((2, 6, 5, 4), "float32"), k: R.Tensor((3, 4, 4, 5), "float32")):
            with R.dataflow():
                queries = R.reshape(q, R.shape([12, 5, 4]))
                keys = R.reshape(k, R.shape([12, 4, 5]))
                joined = R.matmul(queries, keys)
                scores = R.reshape(joined, R.shape([2, 6, 5, 5]))
                R.output(scores)
            return scores

    same(Before, Before)


def test_a_weight_that_is_repeated() -> None:
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((3, 5, 8), "float32"), w: R.Tensor((8, 6), "float32")):
            with R.dataflow():
                weights = R.broadcast_to(w, R.shape([3, 8, 6]))
                y = R.matmul(x, weights)
                R.output(y)
            return y

    @I.ir_module
    class Expected:
        @R.function
        def main(x: R.Tensor((3, 5, 8), "float32"), w: R.Tensor((8, 6), "float32")):
            with R.dataflow():
                y = R.matmul(x, w)
                R.output(y)
            return y

    same(Before, Expected)


def test_a_matrix_that_makes_the_batches() -> None:
    """The other operand has none, so that the product would lack them."""

    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((5, 8), "float32"), w: R.Tensor((8, 6), "float32")):
            with R.dataflow():
                weights = R.broadcast_to(w, R.shape([3, 8, 6]))
                y = R.matmul(x, weights)
                R.output(y)
            return y

    same(Before, Before)


def test_heads_of_a_batch_stay_divided() -> None:
    """None of them is gathered, however many rows the batch has."""
    builder = relax.BlockBuilder()
    q = relax.Var("q", relax.TensorType((2, 6, 5, 4), "float32"))
    with builder.function("main", [q]):
        with builder.dataflow():
            rows = builder.emit(R.reshape(q, (12, 5, 4)))
            columns = builder.emit(R.reshape(R.permute_dims(q, [0, 1, 3, 2]), (12, 4, 5)))
            scores = builder.emit(R.reshape(R.matmul(rows, columns), (2, 6, 5, 5)))
            out = builder.emit_output(R.sum(scores, axis=[1]))
        builder.emit_func_output(out)
    made = parallelize(builder.get(), {"q": comm.Shard(1)}, 3)
    assert made.collectives == {"allreduce": 1}
