# SPDX-License-Identifier: Apache-2.0
"""KV caches that a decoder concatenates become caches that it writes into."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax
from tvm.script import relax as R

from tvm_ipc.cpu import FuseAttention
from tvm_ipc.errors import ModelError
from tvm_ipc.models.hf.inplace_kv_cache_update import update_in_place
from tvm_ipc.transform.report import collect_report

ROOM, HEADS, DIM = 5, 2, 4


def decoder(named: bool, bound: bool, *, axis: int = 2, times: int = 1) -> tvm.IRModule:
    """Return a program that adds a token to the keys, and returns the sum over all tokens.

    If `named`, results are further names of variables of the dataflow block, as in programs of one
    rank. If `bound`, a variable stands for the tuple of results.
    """
    builder = relax.BlockBuilder()
    count = tvm.tirx.Var("p", "int64")
    ids = relax.Var("ids", R.Tensor((1, 1), "int64"))
    positions = relax.Var("positions", R.Tensor((1, 1), "int64"))
    past = relax.Var("past", R.Tensor((1, HEADS, count, DIM), "float32"))
    weight = relax.Var("weight", R.Tensor((1, HEADS, 1, DIM), "float32"))
    with builder.function("decode", [ids, positions, past, weight]):
        with builder.dataflow():
            token = R.astype(R.reshape(ids, (1, 1, 1, 1)), "float32")
            new = builder.emit(R.multiply(weight, token))
            keys = past
            for _ in range(times):
                keys = builder.emit(R.concat((past, new), axis=axis))
            total: Any = R.sum(keys, axis=[2])
            results = [builder.emit(total) if named else total, keys]
            results = [builder.emit_output(result) for result in results]
        made: Any = relax.Tuple(results)
        builder.emit_func_output(builder.emit(made) if bound else made)
    return builder.get()


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("bound", [False, True])
def test_each_step_sees_all_tokens_before_it(named: bool, bound: bool) -> None:
    built = relax.build(update_in_place(decoder(named, bound), caches=1), "llvm")
    vm = relax.VirtualMachine(built, tvm.cpu())
    cache = tvm.runtime.tensor(np.full((ROOM, HEADS, DIM), np.nan, "float32"))
    weight = np.random.default_rng(0).standard_normal((1, HEADS, 1, DIM), "float32")
    tokens = np.array([3, 0, -2, 5, 1])
    for step, token in enumerate(tokens):
        ids = tvm.runtime.tensor(np.array([[token]], "int64"))
        found = vm["decode"](
            ids, ids, tvm_ffi.Shape([step]), (cache,), (tvm.runtime.tensor(weight),)
        )
        expected = weight[:, :, 0] * tokens[: step + 1].sum()
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (decoder(True, True, axis=3), "past_0 is concatenated in a way that is not supported"),
        (decoder(True, True, times=2), "past_0 is concatenated in a way that is not supported"),
        (decoder(True, True, times=0), "past_0 is not concatenated with the keys or values"),
    ],
    ids=["another axis", "twice", "never"],
)
def test_other_caches_are_refused(program: tvm.IRModule, message: str) -> None:
    with pytest.raises(ModelError, match=re.escape(message)):
        update_in_place(program, caches=1)


def test_attention_after_the_update_is_fused() -> None:
    """No cache is written between the views and the attention that reads them."""
    builder = relax.BlockBuilder()
    count = tvm.tirx.Var("p", "int64")
    ids, positions = (relax.Var(name, R.Tensor((1, 1), "int64")) for name in ("ids", "positions"))
    past = [
        relax.Var(name, R.Tensor((1, HEADS, count, DIM), "float32"))
        for name in ("past_keys", "past_values")
    ]
    weight = relax.Var("weight", R.Tensor((1, HEADS, 1, DIM), "float32"))
    with builder.function("decode", [ids, positions, *past, weight]):
        with builder.dataflow():
            queries = builder.emit(R.exp(weight))
            keys = builder.emit(R.concat((past[0], R.sin(weight)), axis=2))
            values = builder.emit(R.concat((past[1], R.cos(weight)), axis=2))
            scores = builder.emit(R.matmul(queries, R.permute_dims(keys, (0, 1, 3, 2))))
            attention = builder.emit_output(R.matmul(R.nn.softmax(scores), values))
            results = [attention, builder.emit_output(keys), builder.emit_output(values)]
        builder.emit_func_output(relax.Tuple(results))
    with collect_report() as report:
        FuseAttention()(update_in_place(builder.get(), caches=2))
    assert [decision.verdict for decision in report.decisions] == ["fused"]
