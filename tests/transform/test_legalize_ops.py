# SPDX-License-Identifier: Apache-2.0
"""LegalizeOps gives what TVM's pass gives, to the letter, and makes kernels of a kind once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax, topi
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from tvm_ipc.examples.tensor_parallel_decoder.decoder_config import Config
from tvm_ipc.examples.tensor_parallel_decoder.decoder_model import build
from tvm_ipc.transform import LegalizeOps


@I.ir_module
class SameOps:
    @R.function
    def main(x: R.Tensor(("n", 4), "float32"), y: R.Tensor(("n", 4), "float32")):
        with R.dataflow():
            a = R.add(x, y)
            b = R.add(y, a)
            c = R.add(b, b)  # one tensor twice is another kernel
            d = R.add(a, a)
            e = R.multiply(R.multiply(c, d), d)
            R.output(e)
        return e

    @R.function
    def other(x: R.Tensor(("n", 4), "float32"), y: R.Tensor(("m", 4), "float32")):
        with R.dataflow():
            a = R.add(x, x)
            b = R.add(y, y)
            R.output(a, b)
        return (a, b)


@I.ir_module
class Unlike:
    @R.function
    def main(x: R.Tensor((6, 4), "float32"), y: R.Tensor((6, 4), "float16")):
        with R.dataflow():
            sums = (R.sum(x, axis=0), R.sum(x, axis=1), R.sum(x, axis=1, keepdims=True))
            scalars = (
                R.multiply(x, R.const(2.0, "float32")),
                R.multiply(x, R.const(3.0, "float32")),
                R.multiply(x, R.const(2.0, "float32")),
                R.multiply(x, R.const(0.0, "float32")),
                R.multiply(x, R.const(-0.0, "float32")),
                R.add(y, R.const(2.0, "float16")),
            )
            left, right = R.const(2.0, "float32"), x
            turned = (R.subtract(x, left), R.subtract(left, right))
            shapes = (
                R.reshape(x, R.shape([4, 6])),
                R.reshape(x, R.shape([24])),
                R.reshape(x, R.shape([4, 6])),
                R.broadcast_to(R.sum(x, axis=0), R.shape([6, 4])),
                R.full(R.shape([2, 2]), R.const(1.0, "float32"), "float32"),
                R.zeros(R.shape([2, 2]), "float32"),
                R.zeros(R.shape([2, 2]), "float32"),
            )
            casts = (R.astype(x, "float16"), R.astype(x, "int32"), R.astype(y, "float32"))
            R.output(sums, scalars, turned, shapes, casts)
        return (sums, scalars, turned, shapes, casts)


@I.ir_module
class Tuples:
    @R.function
    def main(
        x: R.Tensor((8, 4), "float32"),
        parts: R.Tuple(R.Tensor((8, 4), "float32"), R.Tensor((8, 2), "float32")),
    ):
        with R.dataflow():
            halves = R.split(x, 2, axis=0)
            again = R.split(x, 2, axis=0)
            whole = R.concat(halves, axis=0)
            other = R.concat(again, axis=0)
            fields = R.concat((halves[0], again[1]), axis=0)
            turned = R.concat((again[1], halves[0]), axis=0)
            same = R.concat((x, x), axis=0)
            given = R.concat(parts, axis=1)
            stacked = R.stack((x, whole), axis=0)
            R.output(whole, other, fields, turned, same, given, stacked)
        return (whole, other, fields, turned, same, given, stacked)


@I.ir_module
class Shapes:
    @R.function
    def main(
        x: R.Tensor((8, "n"), "float32"),
        row: R.Tensor((8,), "float32"),
        begin: R.Tensor((1,), "int64"),
        to: R.Shape(ndim=1),
    ):
        n = T.int64()
        with R.dataflow():
            strides: R.Tensor((1,), "int64") = R.ones(R.shape([1]), "int64")
            sliced = R.dynamic_strided_slice(row, begin, begin, strides)
            again = R.dynamic_strided_slice(row, begin, begin, strides)
            flat = R.reshape(x, R.shape([8 * n]))
            also = R.reshape(x, R.shape([8 * n]))
            there = R.reshape(x, to)
            twice = R.strided_slice(x, [0], [1], [5])
            thrice = R.strided_slice(x, [0], [1], [6])
            R.output(sliced, again, flat, also, there, twice, thrice)
        return (sliced, again, flat, also, there, twice, thrice)


@I.ir_module
class Collectives:
    @R.function
    def main(x: R.Tensor((8, 4), "float32")):
        with R.dataflow():
            a = R.ccl.allreduce(x, "sum", False)
            b = R.ccl.allreduce(a, "max", False)
            c = R.ccl.allreduce(b, "max", True)
            d = R.ccl.allreduce(c, "max", True)
            e = R.ccl.broadcast_from_worker0(d)
            f = R.ccl.broadcast_from_worker0(e)
            g = R.ccl.scatter_from_worker0(f, 2, 1)
            h = R.ccl.allgather(g, 2)
            i = R.ccl.scatter_from_worker0(h, 2, 0)
            j = R.ccl.scatter_from_worker0(f, 2, 1)
            k = R.dist.redistribute_replica_to_shard(x, 2, 1)
            m = R.dist.redistribute_replica_to_shard(f, 2, 1)
            R.output(g, i, j, k, m)
        return (g, i, j, k, m)


@I.ir_module
class Devices:
    I.module_global_infos({"vdevice": [I.vdevice("llvm", 0), I.vdevice("llvm", 1)]})

    @R.function
    def main(
        x: R.Tensor((4,), "float32", "llvm:0"),
        y: R.Tensor((4,), "float32", "llvm:1"),
    ):
        with R.dataflow():
            a = R.add(x, x)
            b = R.add(y, y)
            c = R.add(a, a)
            R.output(b, c)
        return (b, c)


@I.ir_module
class Branches:
    @R.function(pure=False)
    def main(x: R.Tensor((4,), "float32"), c: R.Tensor((), "bool")):
        if c:
            y = R.exp(x)
            z = R.exp(y)
        else:
            y = R.exp(x)
            z = R.exp(y)
        return R.exp(z)


def constants() -> tvm.IRModule:
    """Tensors that are constants, of which a legalization may read what is in them."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4, 4), "float32"))
    with builder.function("main", [x]):
        y = x
        for value in (1, 1, 2):
            y = builder.emit(relax.op.add(y, relax.const(np.full((4, 4), value, "float32"))))
        builder.emit_func_output(y)
    return builder.finalize()


def decoder() -> tvm.IRModule:
    return build(Config(3, 64, 4, 2, 128, 256, context=64, dtype="float16"), 2)


MODULES = {
    **{one.__name__: lambda one=one: one for one in (SameOps, Unlike, Tuples, Collectives)},
    **{one.__name__: lambda one=one: one for one in (Shapes, Devices, Branches)},
    "constants": constants,
    "decoder": decoder,
}


class InOrder(set[Any]):
    def __sub__(self, other: Any) -> Any:
        return sorted(super().__sub__(other), key=str)


def legalized(one: Any, mod: tvm.IRModule) -> str:
    # TVM passes sizes that no tensor has in the order of a set, which is another one each time.
    with pytest.MonkeyPatch.context() as patch, tvm.target.Target("llvm"):
        patch.setattr(relax.utils, "set", InOrder, raising=False)
        return str(one(mod).script())


def kernels_made(monkeypatch: pytest.MonkeyPatch, one: Any, mod: tvm.IRModule) -> int:
    """Return how often kernels are made of tensor expressions."""
    made = []
    call_te = relax.BlockBuilder.call_te

    def counted(*args: Any, **named: Any) -> Any:
        made.append(args)
        return call_te(*args, **named)

    with monkeypatch.context() as patch, tvm.target.Target("llvm"):
        patch.setattr(relax.BlockBuilder, "call_te", counted)
        one(mod)
    return len(made)


@pytest.mark.parametrize("name", MODULES)
def test_as_tvm_does(name: str) -> None:
    mod = MODULES[name]()
    assert legalized(LegalizeOps(), mod) == legalized(relax.transform.LegalizeOps(), mod)


def test_calls_that_are_alike_are_legalized_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # add(x, y), add(c, c), multiply; the same of x and y in other: their sizes are other variables
    assert kernels_made(monkeypatch, LegalizeOps(), SameOps) == 5
    assert kernels_made(monkeypatch, relax.transform.LegalizeOps(), SameOps) == 8
    three, six = (
        kernels_made(
            monkeypatch, LegalizeOps(), build(Config(n, 64, 4, 2, 128, 256, context=64), 2)
        )
        for n in (3, 6)
    )
    assert three == six


def test_each_run_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    one = LegalizeOps()
    assert legalized(one, SameOps) == legalized(one, SameOps)
    assert kernels_made(monkeypatch, one, SameOps) == 5


def test_functions_of_the_user_are_called_for_each_call() -> None:
    seen = []

    def subtract(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        seen.append(call)
        return builder.call_te(topi.subtract, *call.args)

    given = {"relax.add": subtract}
    expected = legalized(relax.transform.LegalizeOps(given), SameOps)
    assert legalized(LegalizeOps(given), SameOps) == expected
    assert len(seen) == 2 * 6
    assert "subtract" in expected


def test_operators_that_are_skipped() -> None:
    text = legalized(LegalizeOps(skip_ops=["relax.add"]), SameOps)
    assert text == legalized(relax.transform.LegalizeOps(skip_ops=["relax.add"]), SameOps)
    assert "R.add" in text
    assert "R.multiply" not in text


def test_an_error_of_a_legalization_is_raised() -> None:
    def broken(_builder: relax.BlockBuilder, _call: relax.Call) -> relax.Expr:
        raise ValueError("no kernel of mine")

    with pytest.raises(ValueError, match="no kernel of mine"):
        legalized(LegalizeOps({"relax.add": broken}), SameOps)
