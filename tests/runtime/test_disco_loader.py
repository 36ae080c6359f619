# SPDX-License-Identifier: Apache-2.0
"""TVM's loader of sharded parameters, over the CPU backend.

The cases of TVM's own tests/python/disco/test_loader.py, for sessions of the user's and of ours.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm.contrib import tvmjs
from tvm_ffi import Shape

from tests.runtime.disco_kinds import KINDS, on_workers
from tests.runtime.disco_programs import LoadsItsParameters, build

Array = np.ndarray[Any, Any]
SHARDS = 2
#: How the loader divides these among two workers: the function, its output, its arguments.
BY_COLUMNS = [["tests.shard_columns", [(SHARDS, 64, 64), "float16"], SHARDS]]
BY_ROWS = [["tests.shard_rows", [(SHARDS, 16, 128), "float32"], SHARDS]]


@pytest.fixture(params=KINDS)
def session(request: pytest.FixtureRequest, shared_session: Callable[..., Any]) -> Any:
    return shared_session(request.param, SHARDS)


def parameters(*names: str) -> dict[str, Array]:
    generator = np.random.default_rng(7)
    first = generator.uniform(size=(64, 128)).astype("float16")
    return dict(
        zip(names, (first, generator.uniform(size=(32, 128)).astype("float32")), strict=True)
    )


def make_loader(session: Any, directory: Path, arrays: dict[str, Any], shard_info: Any) -> Any:
    tvmjs.dump_tensor_cache(arrays, str(directory), encode_format="raw", show_progress=False)
    cache = directory / "tensor-cache.json"
    create = session.get_global_func("runtime.disco.ShardLoader")
    return create(str(cache), cache.read_text(), json.dumps(shard_info), None)


def presharded(arrays: dict[str, Array], axes: dict[str, int]) -> dict[str, Any]:
    """Each worker's parts under names of their own, all of worker 1's first."""
    return {
        f"{name}_shard-{shard + 1}-of-{SHARDS}": tvm.runtime.tensor(
            np.ascontiguousarray(np.split(array, SHARDS, axis=axes[name])[shard])
        )
        for shard in range(SHARDS)
        for name, array in arrays.items()
    }


def check(values: list[Array], expected: list[Array]) -> None:
    for value, part in zip(values, expected, strict=True):
        np.testing.assert_array_equal(value, part, strict=True)


def load(session: Any, function: str, loader: Any, index: int) -> list[Array]:
    return on_workers(session.get_global_func(function)(loader, Shape([index])), SHARDS)


def load_all(session: Any, function: str, loader: Any) -> list[list[Array]]:
    loaded = session.get_global_func(function)(loader)
    return [[t.numpy() for t in loaded.debug_get_from_remote(rank)] for rank in range(SHARDS)]


def test_load(session: Any, tmp_path: Path) -> None:
    arrays = parameters("x_0", "x_1")
    loader = make_loader(session, tmp_path, arrays, {"x_0": BY_COLUMNS, "x_1": BY_ROWS})
    name = "runtime.disco.ShardLoaderLoad"
    check(load(session, name, loader, 0), np.split(arrays["x_0"], 2, axis=1))
    check(load(session, name, loader, 1), np.split(arrays["x_1"], 2, axis=0))


def test_load_presharded(session: Any, tmp_path: Path) -> None:
    arrays = parameters("x_0", "x_1")
    loader = make_loader(session, tmp_path, presharded(arrays, {"x_0": 1, "x_1": 0}), {})
    name = "runtime.disco.ShardLoaderLoadPresharded"
    check(load(session, name, loader, 0), np.split(arrays["x_0"], 2, axis=1))
    check(load(session, name, loader, 1), np.split(arrays["x_1"], 2, axis=0))


def test_load_in_a_vm_program(session: Any, tmp_path: Path) -> None:
    path = tmp_path / "program.so"
    build(LoadsItsParameters).export_library(str(path))
    arrays = parameters("x_0", "x_1")
    loader = make_loader(session, tmp_path, arrays, {"x_0": BY_COLUMNS, "x_1": BY_ROWS})
    result = session.load_vm_module(str(path))["main"](loader)
    for rank in range(SHARDS):
        first, second = (t.numpy() for t in result.debug_get_from_remote(rank))
        np.testing.assert_array_equal(first, np.split(arrays["x_0"], 2, axis=1)[rank])
        np.testing.assert_array_equal(second, np.split(arrays["x_1"], 2, axis=0)[rank])


def test_load_all(session: Any, tmp_path: Path) -> None:
    arrays = parameters("param_0", "param_1")
    loader = make_loader(session, tmp_path, arrays, {"param_0": BY_COLUMNS, "param_1": BY_ROWS})
    columns = np.split(arrays["param_0"], 2, axis=1)
    rows = np.split(arrays["param_1"], 2, axis=0)
    for rank, values in enumerate(load_all(session, "runtime.disco.ShardLoaderLoadAll", loader)):
        check(values, [columns[rank], rows[rank]])


def test_load_all_presharded(session: Any, tmp_path: Path) -> None:
    arrays = parameters("param_0", "param_1")
    files = presharded(arrays, {"param_0": 0, "param_1": 1})
    loader = make_loader(session, tmp_path, files, {})
    name = "runtime.disco.ShardLoaderLoadAllPresharded"
    rows = np.split(arrays["param_0"], 2, axis=0)
    columns = np.split(arrays["param_1"], 2, axis=1)
    for rank, values in enumerate(load_all(session, name, loader)):
        check(values, [rows[rank], columns[rank]])


def test_what_is_not_sharded_is_broadcast(session: Any, tmp_path: Path) -> None:
    arrays = parameters("param_0", "param_1")
    loader = make_loader(session, tmp_path, arrays, {})
    for values in load_all(session, "runtime.disco.ShardLoaderLoadAll", loader):
        check(values, list(arrays.values()))


def test_load_on_the_first_worker_only(session: Any, tmp_path: Path) -> None:
    arrays = parameters("param_0", "param_1")
    loader = make_loader(session, tmp_path, arrays, {})
    load_first = session.get_global_func("runtime.disco.ShardLoaderLoadParamOnWorker0")
    for index, array in enumerate(arrays.values()):
        first, other = on_workers(load_first(loader, index), SHARDS)
        np.testing.assert_array_equal(first, array, strict=True)
        assert (other.shape, other.dtype) == (array.shape, array.dtype)


def test_projections_of_attention_are_divided_by_heads(session: Any, tmp_path: Path) -> None:
    q_heads, kv_heads, width, hidden = 8, 10, 10, 20
    generator = np.random.default_rng(3)
    q, k, v = (
        generator.uniform(size=(heads, width, hidden)).astype("float16")
        for heads in (q_heads, kv_heads, kv_heads)
    )
    stacked = np.concatenate([q, k, v]).reshape(-1, hidden)
    own_heads = (q_heads + 2 * kv_heads) // SHARDS
    shard_info = {
        "w_qkv": [
            [
                "tests.shard_heads",
                [(SHARDS, own_heads, width, hidden), "float16"],
                *(SHARDS, q_heads, kv_heads),
            ],
            ["tests.join_heads", [(SHARDS, own_heads * width, hidden), "float16"]],
        ]
    }
    loader = make_loader(session, tmp_path, {"w_qkv": stacked}, shard_info)
    parts = zip(*(np.split(heads, SHARDS) for heads in (q, k, v)), strict=True)
    expected = [np.concatenate(part).reshape(-1, hidden) for part in parts]
    check(load(session, "runtime.disco.ShardLoaderLoad", loader, 0), expected)
