# SPDX-License-Identifier: Apache-2.0
"""Attention to caches that a batch concatenates becomes attention to the caches of each request."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax
from tvm.script import relax as R

from tests.cpu.test_fuse_attention import attention
from tvm_ipc.errors import ModelError
from tvm_ipc.models.hf.batch_kv_cache_update import update_batch_in_place
from tvm_ipc.runtime import shared_libraries

NAME, HEADS, GROUPS, DEPTH, SCALE = "decode_batch", 4, 2, 8, 0.25


def decoder(form: str = "grouped", *, mask_heads: int = 1, times: int = 1) -> tvm.IRModule:
    """Return a program whose queries, keys and values are a token times a weight.

    `form` is "grouped", for queries that are rows of one matmul for each head of keys; "repeated",
    for heads of keys that are repeated; or "none" without attention.
    """
    builder = relax.BlockBuilder()
    batch, count = tvm.tirx.Var("b", "int64"), tvm.tirx.Var("p", "int64")
    ids, positions = (
        relax.Var(name, R.Tensor((batch, 1), "int64")) for name in ("ids", "positions")
    )
    past = [
        relax.Var(f"past_{k}", R.Tensor((batch, GROUPS, count, DEPTH), "float32")) for k in range(2)
    ]
    weight = relax.Var("weight", R.Tensor((1, HEADS, 1, DEPTH), "float32"))
    with builder.function(NAME, [ids, positions, *past, weight]):
        with builder.dataflow():
            token = builder.emit(R.astype(R.reshape(ids, (batch, 1, 1, 1)), "float32"))
            queries = builder.emit(R.multiply(weight, token))
            narrow = builder.emit(R.strided_slice(weight, [1], [0], [GROUPS]))
            new = [builder.emit(R.multiply(narrow, token)) for _ in range(2)]
            keys, values = (
                builder.emit(R.concat((old, one), axis=2))
                for old, one in zip(past, new, strict=True)
            )
            every = builder.emit(R.reshape(R.arange(0, count + 1, 1), (1, 1, 1, count + 1)))
            hidden = R.greater(every, R.reshape(positions, (batch, 1, 1, 1)))
            mask: Any = R.where(hidden, R.const(-3.4e38, "float32"), R.const(0.0, "float32"))
            mask = builder.emit(R.broadcast_to(mask, (batch, mask_heads, 1, count + 1)))
            result = queries
            for _ in range(times if form != "none" else 0):
                left, right, mixed = queries, keys, values
                if form == "grouped":
                    left = builder.emit(R.reshape(left, (batch, GROUPS, HEADS // GROUPS, DEPTH)))
                else:
                    right, mixed = (
                        builder.emit(R.repeat(x, HEADS // GROUPS, axis=1)) for x in (keys, values)
                    )
                right = builder.emit(R.permute_dims(right, (0, 1, 3, 2)))
                scores = builder.emit(R.matmul(left, right))
                if form == "grouped":
                    scores = builder.emit(R.reshape(scores, (batch, HEADS, 1, count + 1)))
                scores = builder.emit(R.multiply(scores, R.const(SCALE, "float32")))
                scores = builder.emit(R.add(scores, mask))
                weights = builder.emit(R.nn.softmax(scores, -1))
                if form == "grouped":
                    shape = (batch, GROUPS, HEADS // GROUPS, count + 1)
                    weights = builder.emit(R.reshape(weights, shape))
                product = builder.emit(R.matmul(weights, mixed))
                if form == "grouped":
                    product = builder.emit(R.reshape(product, (batch, HEADS, 1, DEPTH)))
                result = builder.emit(R.add(result, product))
            results = [builder.emit_output(one) for one in (result, keys, values)]
        builder.emit_func_output(relax.Tuple(results))
    return builder.get()


@pytest.mark.parametrize("form", ["grouped", "repeated"])
def test_each_request_sees_its_own_tokens(form: str) -> None:
    shared_libraries.load()
    mod = update_batch_in_place(decoder(form), NAME, caches=2)
    vm = relax.VirtualMachine(relax.build(mod, "llvm"), tvm.cpu())
    random = np.random.default_rng(0)
    weight = random.standard_normal((1, HEADS, 1, DEPTH), "float32")
    past = [2, 0, 5]
    caches = [
        [random.standard_normal((6, GROUPS, DEPTH), "float32") for _ in range(2)] for _ in past
    ]
    ids, positions = np.array([[3], [-1], [2]]), np.array(past)[:, None]
    found = vm[NAME](
        *map(tvm.runtime.tensor, (ids, positions)),
        tvm_ffi.Shape([max(past)]),
        [list(map(tvm.runtime.tensor, own)) for own in caches],
        (tvm.runtime.tensor(weight),),
    ).numpy()
    for row, count in enumerate(past):
        queries = weight * np.float32(ids[row, 0])
        for cache in caches[row]:
            cache[count] = queries[0, :GROUPS, 0]
        keys, values = (cache[None, : count + 1].swapaxes(1, 2) for cache in caches[row])
        expected = queries + attention(queries, keys, values, SCALE)
        np.testing.assert_allclose(found[row], expected[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (decoder("none"), "no attention to past_0 was found"),
        (decoder(times=2), "the keys and values of a layer are attended to more than once"),
        (decoder(mask_heads=HEADS), "is not one for all heads"),
    ],
    ids=["none", "twice", "a mask for each head"],
)
def test_other_attention_is_refused(program: tvm.IRModule, message: str) -> None:
    with pytest.raises(ModelError, match=f"^batches .*{re.escape(message)}; generate for one"):
        update_batch_in_place(program, NAME, caches=2)
