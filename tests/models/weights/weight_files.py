# SPDX-License-Identifier: Apache-2.0
"""Files of weights, written here byte by byte, and cuts of what is in them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  makes bfloat16 known to NumPy
import numpy as np

from tvm_ipc.comm import Mesh, Replica, Shard
from tvm_ipc.spmd import ShardSpec

NAMES = {
    "bool": "BOOL",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
}
#: A few weights of several types.
SMALL = {
    "w": np.arange(35, dtype="float32").reshape(5, 7),
    "v": np.arange(12).reshape(2, 6).astype("bfloat16"),
    "n": np.array(3, "int32"),
}


def safetensors(arrays: Mapping[str, np.ndarray[Any, Any]], **changes: Any) -> bytes:
    """A safetensors file; changes are made to entries of the header, None removes one."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, array in arrays.items():
        header[name] = {
            "dtype": NAMES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [end, end + array.nbytes],
        }
        end += array.nbytes
    for name, change in changes.items():
        header[name] = {**header[name], **change} if isinstance(change, dict) else change
    return with_header(json.dumps(header).encode(), b"".join(a.tobytes() for a in arrays.values()))


def with_header(header: bytes, data: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def write(path: Path, arrays: Mapping[str, np.ndarray[Any, Any]], **changes: Any) -> Path:
    path.write_bytes(safetensors(arrays, **changes))
    return path


def write_sharded(folder: Path, arrays: Mapping[str, np.ndarray[Any, Any]], shards: int) -> Path:
    """A folder as transformers writes it, with an index."""
    names = list(arrays)
    index: dict[str, str] = {}
    for k in range(shards):
        file = f"model-{k + 1:05}-of-{shards:05}.safetensors"
        write(folder / file, {name: arrays[name] for name in names[k::shards]})
        index.update(dict.fromkeys(names[k::shards], file))
    text = {"metadata": {"total_size": 1}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(text))
    return folder


def random_array(draw: np.random.Generator, shape: Any, dtype: str) -> np.ndarray[Any, Any]:
    """Numbers of mixed signs; in bool and unsigned types as these have them."""
    numbers = draw.integers(-100, 100, shape)
    if dtype == "bool":
        return np.asarray(numbers > 0)
    if dtype.startswith("uint"):
        numbers = np.abs(numbers)
    scaled = numbers / 8 if "float" in dtype else numbers
    return np.asarray(scaled).astype(dtype)


def compare(
    session: Any, weights: Mapping[str, Any], cuts: Mapping[str, ShardSpec], of: Mapping[str, Any]
) -> None:
    """Compare the part of each weight that each rank has with that of an array."""
    assert list(weights) == list(cuts)
    for name, cut in cuts.items():
        for rank in range(session.num_workers):
            wanted = cut.shard(of[name], rank).astype(cut.dtype)
            found = session.get(weights[name], rank)
            np.testing.assert_array_equal(found, wanted, strict=True)


def cuts_of(arrays: Mapping[str, Any], ranks: int, **dtypes: str) -> dict[str, ShardSpec]:
    """Each array divided along another axis, or along none."""
    mesh = Mesh({"tp": ranks})
    found = {}
    for k, (name, array) in enumerate(arrays.items()):
        axis = k % (array.ndim + 1)
        placements = (Shard(axis) if axis < array.ndim else Replica(),)
        dtype = dtypes.get(name, array.dtype.name)
        found[name] = ShardSpec(name, name, array.shape, dtype, mesh, placements)
    return found
