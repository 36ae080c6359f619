# SPDX-License-Identifier: Apache-2.0

"""Programs that tests run on workers, some on one and, sharded, on two."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from tests.runtime.places import ON_GPUS


def build(module: Any) -> Any:
    """Compile for the tests' sessions, with operators of R.ccl as calls of Disco's functions."""
    on_gpus = tvm.target.Target({"kind": "cuda", "arch": "sm_90"}, host="llvm")
    target = on_gpus if ON_GPUS else tvm.target.Target("llvm")
    with target:
        return tvm.compile(relax.get_pipeline("zero")(module), target=target)


@I.ir_module
class MLP:
    @R.function
    def main(
        x: R.Tensor((32, 64), "float32"),
        w1: R.Tensor((64, 64), "float32"),
        w2: R.Tensor((64, 64), "float32"),
    ) -> R.Tensor((32, 64), "float32"):
        with R.dataflow():
            hidden = R.nn.gelu(R.matmul(x, w1))
            out = R.matmul(hidden, w2)
            R.output(out)
        return out


@I.ir_module
class ShardedMLP:
    """The columns of w1 and the rows of w2 are divided; the first worker alone has x."""

    @R.function
    def main(
        x: R.Tensor((32, 64), "float32"),
        w1: R.Tensor((64, 32), "float32"),
        w2: R.Tensor((32, 64), "float32"),
    ) -> R.Tensor((32, 64), "float32"):
        with R.dataflow():
            everywhere = R.ccl.broadcast_from_worker0(x)
            hidden = R.nn.gelu(R.matmul(everywhere, w1))
            out = R.ccl.allreduce(R.matmul(hidden, w2), "sum")
            R.output(out)
        return out


def attention(heads: int, workers: int) -> Any:
    """Self-attention of 10 tokens with 16 features a head, over this worker's share of the heads.

    The projections to queries, keys and values are divided by columns, that to the output by rows.
    """
    own = heads // workers
    tokens, features, width = 10, 32, 16
    builder = relax.BlockBuilder()
    x = relax.Var("x", R.Tensor((1, tokens, features), "float32"))
    to_head = [
        relax.Var(name, R.Tensor((features, own * width), "float32")) for name in ("wq", "wk", "wv")
    ]
    wo = relax.Var("wo", R.Tensor((own * width, features), "float32"))
    with builder.function("main", [x, *to_head, wo]):
        with builder.dataflow():
            own_x = relax.op.ccl.broadcast_from_worker0(x) if workers > 1 else x
            by_head = (
                relax.op.reshape(relax.op.matmul(own_x, w), (1, tokens, own, width))
                for w in to_head
            )
            q, k, v = (builder.emit(relax.op.permute_dims(h, [0, 2, 1, 3])) for h in by_head)
            scores = relax.op.matmul(q, relax.op.permute_dims(k, [0, 1, 3, 2]))
            scaled = relax.op.multiply(scores, relax.const(width**-0.5, "float32"))
            weights = builder.emit(relax.op.nn.softmax(scaled, axis=-1))
            mixed = relax.op.permute_dims(relax.op.matmul(weights, v), [0, 2, 1, 3])
            flat = relax.op.reshape(mixed, (1, tokens, own * width))
            out = builder.emit(relax.op.matmul(flat, wo))
            if workers > 1:
                out = builder.emit(relax.op.ccl.allreduce(out, "sum"))
            result = builder.emit_output(out)
        builder.emit_func_output(result)
    return builder.get()


@I.ir_module
class Collectives:
    """Every operator of R.ccl, on two workers."""

    @R.function
    def main(
        x: R.Tensor((4, 6), "float32"),
    ) -> R.Tuple(
        R.Tensor((4, 6), "float32"),
        R.Tensor((8, 6), "float32"),
        R.Tensor((4, 6), "float32"),
        R.Tensor((2, 6), "float32"),
    ):
        with R.dataflow():
            largest = R.ccl.allreduce(x, "max")
            all_rows = R.ccl.allgather(x, 2)
            of_first = R.ccl.broadcast_from_worker0(x)
            share = R.ccl.scatter_from_worker0(x, 2)
            result = R.tuple(largest, all_rows, of_first, share)
            R.output(result)
        return result


@I.ir_module
class LoadsItsParameters:
    """Asks the loader for its shards of two parameters."""

    @R.function
    def main(
        loader: R.Any,
    ) -> R.Tuple(R.Tensor((64, 64), "float16"), R.Tensor((16, 128), "float32")):
        with R.dataflow():
            first = R.call_pure_packed(
                "runtime.disco.ShardLoaderLoad",
                loader,
                R.shape([0]),
                ty_args=R.Tensor((64, 64), "float16"),
            )
            second = R.call_pure_packed(
                "runtime.disco.ShardLoaderLoad",
                loader,
                R.shape([1]),
                ty_args=R.Tensor((16, 128), "float32"),
            )
            both = R.tuple(first, second)
            R.output(both)
        return both


@I.ir_module(s_tir=True)
class Transposes:
    @T.prim_func(s_tir=True)
    def wide(a: T.Buffer((8, 16), "float32"), b: T.Buffer((16, 8), "float32")):
        for i, j in T.grid(16, 8):
            with T.sblock("wide"):
                vi, vj = T.axis.remap("SS", [i, j])
                b[vi, vj] = a[vj, vi]

    @T.prim_func(s_tir=True)
    def tall(a: T.Buffer((16, 8), "float32"), b: T.Buffer((8, 16), "float32")):
        for i, j in T.grid(8, 16):
            with T.sblock("tall"):
                vi, vj = T.axis.remap("SS", [i, j])
                b[vi, vj] = a[vj, vi]

    @R.function
    def from_wide(a: R.Tensor((8, 16), "float32")) -> R.Tensor((16, 8), "float32"):
        cls = Transposes
        with R.dataflow():
            b = R.call_tir(cls.wide, (a,), out_ty=R.Tensor((16, 8), "float32"))
            R.output(b)
        return b

    @R.function
    def from_tall(a: R.Tensor((16, 8), "float32")) -> R.Tensor((8, 16), "float32"):
        cls = Transposes
        with R.dataflow():
            b = R.call_tir(cls.tall, (a,), out_ty=R.Tensor((8, 16), "float32"))
            R.output(b)
        return b


@I.ir_module(s_tir=True)
class Slices:
    """Takes a worker's part of parameters that it asks a callback for."""

    @T.prim_func(private=True, s_tir=True)
    def rows(a: T.Buffer((4, 4), "int32"), rank: T.int64, part: T.Buffer((2, 4), "int32")):
        for i, j in T.grid(2, 4):
            with T.sblock("rows"):
                vi, vj = T.axis.remap("SS", [i, j])
                part[vi, vj] = a[rank * 2 + vi, vj]

    @T.prim_func(private=True, s_tir=True)
    def column(b: T.Buffer((2, 2), "float32"), rank: T.int64, part: T.Buffer((2, 1), "float32")):
        for i in range(2):
            with T.sblock("column"):
                vi = T.axis.spatial(2, i)
                part[vi, 0] = b[vi, rank]

    @R.function
    def load(rank: R.Prim("int64"), fetch: R.Callable([R.Any, R.Prim("int64")], R.Any)):
        cls = Slices
        a = fetch(R.str("A"), R.prim_value(0))
        a = R.match_cast(a, R.Tensor([4, 4], "int32"))
        a = R.call_tir(cls.rows, (a, rank), out_ty=R.Tensor([2, 4], "int32"))
        b = fetch(R.str("B"), R.prim_value(1))
        b = R.match_cast(b, R.Tensor([2, 2], "float32"))
        b = R.call_tir(cls.column, (b, rank), out_ty=R.Tensor([2, 1], "float32"))
        return (a, b)


@I.ir_module
class FailsOnRank:
    """Fails on the rank that it is told; elsewhere it multiplies by that number."""

    @R.function(pure=False)
    def fails(x: R.Tensor((4,), "float32"), rank: R.Prim("int64")) -> R.Tensor((4,), "float32"):
        return R.call_packed(
            "tests.times_unless_on",
            x,
            rank,
            R.str("inside the program"),
            ty_args=R.Tensor((4,), "float32"),
        )
