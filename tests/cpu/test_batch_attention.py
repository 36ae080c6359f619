# SPDX-License-Identifier: Apache-2.0
"""`tvm_ipc.blas.batch_attention`: requests of different lengths attend to caches of their own."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tvm
import tvm_ffi

from tests.cpu.test_fuse_attention import TOLERANCE, attention
from tvm_ipc.runtime import shared_libraries

FUNCTION = "tvm_ipc.blas.batch_attention"
#: The content of caches after the tokens of a request.
UNUSED = np.nan


@pytest.fixture(autouse=True)
def _library() -> None:
    shared_libraries.load()


def tensor(array: Any) -> Any:
    return tvm.runtime.tensor(array)


def array_of(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("heads", "groups", "depth", "value_depth"),
    [(6, 2, 8, 8), (4, 4, 64, 64), (1, 1, 3, 5), (40, 1, 20, 12), (16, 8, 64, 64)],
)
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("window", [None, 7])
def test_each_request_attends_to_its_own_tokens(
    dtype: str,
    heads: int,
    groups: int,
    depth: int,
    value_depth: int,
    softcap: float,
    window: int | None,
) -> None:
    random = np.random.default_rng(heads)
    past = [0, 600, 63, 5]
    batch, kind = len(past), array_of(dtype)

    def drawn(*shape: int) -> np.ndarray[Any, Any]:
        return random.standard_normal(shape).astype(kind)

    # The axis of the one token is the second or the third: both are the same memory.
    queries, out = drawn(batch, heads, 1, depth), drawn(batch, 1, heads, value_depth)
    keys, values = drawn(batch, groups, 1, depth), drawn(batch, 1, groups, value_depth)
    caches, contents = [], []
    for count in past:
        room = count + 3
        own = [drawn(room, groups, size) for size in (depth, value_depth)]
        for cache in own:
            cache[count:] = UNUSED
        contents.append(own)
        # Others are the caches of another layer.
        caches.append([None, tensor(own[0]), None, tensor(own[1])])
    positions = np.array(past, "int64")[:, None]
    every = np.arange(max(past) + 1)[None]
    distance = positions - every
    allowed = (distance >= 0) & (True if window is None else distance < window)
    mask = np.where(allowed, 0.0, np.finfo("float32").min).astype("float32")[:, None, None]
    tensors = list(map(tensor, (queries, keys, values, mask)))
    result = tensor(out)
    call = tvm_ffi.get_global_func(FUNCTION)
    call(1, 3, 0.3, softcap, tensor(positions), caches, *tensors, result)
    for row, count in enumerate(past):
        new_keys, new_values = contents[row]
        new_keys[count], new_values[count] = keys[row, :, 0], values[row, 0]
        for cache, content in zip((caches[row][1], caches[row][3]), contents[row], strict=True):
            np.testing.assert_array_equal(
                cache.numpy().astype("float32"), content.astype("float32"), "of the caches"
            )
        seen = [content[None, : count + 1].swapaxes(1, 2) for content in contents[row]]
        bias = mask[row, :, :, : count + 1]
        expected = attention(queries[row : row + 1], *seen, 0.3, softcap, bias)
        found = result.numpy()[row, 0].astype("float64")
        np.testing.assert_allclose(found, expected[0, :, 0], rtol=0, atol=2 * TOLERANCE[dtype])


def test_a_request_has_the_same_bits_alone_and_without_a_mask() -> None:
    random = np.random.default_rng(1)
    past, depth = [300, 20, 1000], 16
    queries, keys, values = (
        random.standard_normal((3, heads, 1, depth), "float32") for heads in (4, 2, 2)
    )
    caches = [
        [tensor(random.standard_normal((count + 1, 2, depth), "float32")) for _ in range(2)]
        for count in past
    ]
    call = tvm_ffi.get_global_func(FUNCTION)

    def run(rows: slice) -> np.ndarray[Any, Any]:
        out = tensor(np.zeros_like(queries[rows]))
        positions = tensor(np.array(past[rows], "int64")[:, None])
        tensors = (tensor(np.ascontiguousarray(x[rows])) for x in (queries, keys, values))
        call(0, 1, 0.25, 0.0, positions, caches[rows], *tensors, out)
        return out.numpy()

    together = run(slice(0, 3))
    for row in range(3):
        np.testing.assert_array_equal(run(slice(row, row + 1))[0], together[row])


def call_with(**changes: Any) -> None:
    caches = [[tensor(np.zeros((4, 2, 8), "float32")) for _ in range(2)] for _ in range(3)]
    arguments: dict[str, Any] = {
        "positions": np.zeros((3, 1), "int64"),
        "queries": np.zeros((3, 4, 1, 8), "float32"),
        "keys": np.zeros((3, 2, 1, 8), "float32"),
        "values": np.zeros((3, 2, 1, 8), "float32"),
        "mask": np.zeros((3, 1, 1, 5), "float32"),
        "out": np.zeros((3, 1, 4, 8), "float32"),
        "caches": caches,
        "value_cache": 1,
        **changes,
    }
    names = ("queries", "keys", "values", "mask", "out")
    tvm_ffi.get_global_func(FUNCTION)(
        *(0, arguments["value_cache"], 1.0, 0.0, tensor(arguments["positions"])),
        arguments["caches"],
        *(tensor(arguments[name]) for name in names),
    )


def test_arguments_that_fit() -> None:
    call_with()
    call_with(mask=np.zeros((1, 1, 1, 1), "float32"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"queries": np.zeros((3, 4, 1, 8), "float16")}, "have different types"),
        ({"queries": np.zeros((3, 4, 1, 8), "float64")}, "queries is float64"),
        ({"queries": np.zeros((3, 4, 2, 8), "float32")}, "and one token of each request"),
        ({"queries": np.zeros((3, 5, 1, 8), "float32")}, "do not fit together"),
        ({"keys": np.zeros((2, 2, 1, 8), "float32")}, "do not fit together"),
        ({"out": np.zeros((3, 1, 4, 7), "float32")}, "do not fit together"),
        ({"positions": np.zeros((3, 1), "int32")}, r"a tensor of shape \(3, 1\) of int64"),
        ({"positions": np.zeros((2, 1), "int64")}, r"a tensor of shape \(3, 1\) of int64"),
        ({"positions": np.full((3, 1), 4)}, "request 0 is 4, but its caches have room for 4"),
        ({"positions": np.full((3, 1), -1)}, "request 0 is -1"),
        ({"positions": np.full((3, 1), 3), "mask": np.zeros((3, 1, 1, 3), "float32")}, "the mask"),
        ({"mask": np.zeros((3, 4, 1, 5), "float32")}, "the mask"),
        ({"caches": []}, "the caches of each of 3 requests"),
        ({"caches": 3}, "the caches of each of 3 requests"),
        ({"value_cache": 2}, "request 0 has 2 caches; there is no number 2"),
        (
            {"values": np.zeros((3, 2, 1, 4), "float32"), "out": np.zeros((3, 1, 4, 4), "float32")},
            "does not have the type, heads and depth of the new values",
        ),
    ],
)
def test_arguments_that_do_not(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"{FUNCTION}: .*{message}"):
        call_with(**changes)
