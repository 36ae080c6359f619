# SPDX-License-Identifier: Apache-2.0
"""What a folder holds that `tvm.contrib.tvmjs` or mlc-llm wrote.

    {"records": [{"dataPath": "params_shard_0.bin", "format": "raw-shard", "nbytes": 96,
                  "records": [{"name": "w", "shape": [4, 6], "dtype": "float32",
                               "format": "raw", "nbytes": 96, "byteOffset": 0}]}]}

A tensor of float32 with the format "f32-to-bf16" lies there in bfloat16.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np

from tvm_ipc.arguments import show
from tvm_ipc.errors import WeightsError
from tvm_ipc.weights.stored import (
    File,
    Stored,
    begin_of,
    beside,
    byte_count,
    numbers,
    object_of,
)

#: Names of the text that says what there is; the second is that of earlier versions.
NAMES: Final = ("tensor-cache.json", "ndarray-cache.json")


def tensors_of(path: Path) -> dict[str, Stored]:
    """Return the tensors that the text names, which is in the folder with their files.

    Raises
    ------
    WeightsError
        Something cannot be read, or is damaged.
    """
    text, found = object_of(path)
    shards = found.get("records")
    if not isinstance(shards, list):
        raise WeightsError(f"{path} is damaged: it has no list of records")
    tensors: dict[str, Stored] = {}
    for shard in shards:
        if not isinstance(shard, dict) or not isinstance(shard.get("records"), list):
            raise WeightsError(f"{path} is damaged: {show(shard)} is no record of a file")
        file = begin_of(beside(path, shard.get("dataPath")), 0)[0]
        if shard.get("nbytes", file.size) != file.size:
            raise WeightsError(
                f"{file.path} has {file.size} bytes, and by {text.path} {show(shard['nbytes'])}"
            )
        for record in shard["records"]:
            name, one = _tensor(path, file, record)
            if name in tensors:
                raise WeightsError(f"{path} is damaged: it has {show(name)} twice")
            tensors[name] = one
    return tensors


def _tensor(path: Path, file: File, record: Any) -> tuple[str, Stored]:
    def damaged(what: str) -> WeightsError:
        return WeightsError(f"{path} is damaged: {what}")

    if not isinstance(record, dict) or not isinstance(record.get("name"), str):
        raise damaged(f"{show(record)} is no record of a tensor")
    name = record["name"]
    dtype, form = record.get("dtype"), record.get("format")
    try:
        known = isinstance(dtype, str) and np.dtype(dtype).kind in "biufV"
        known = known and np.dtype(dtype).name == dtype
    except TypeError:
        known = False
    if not known or form not in ("raw", "f32-to-bf16"):
        raise WeightsError(
            f"{path}: tensor {show(name)} is of type {show(dtype)} and format {show(form)}, which "
            "is not known"
        )
    if form == "f32-to-bf16" and dtype == "float32":
        dtype = "bfloat16"
    shape, begin = numbers(record.get("shape")), numbers([record.get("byteOffset")])
    if shape is None or begin is None:
        raise damaged(
            f"tensor {show(name)} has the shape {show(record.get('shape'))} and the byteOffset "
            f"{show(record.get('byteOffset'))}"
        )
    wanted = byte_count(str(dtype), shape)
    if record.get("nbytes", wanted) != wanted:
        raise damaged(
            f"tensor {show(name)} has {show(record['nbytes'])} bytes, and {show(shape)} of "
            f"{dtype} are {show(wanted)}"
        )
    if begin[0] + wanted > file.size:
        raise damaged(
            f"tensor {show(name)} ends at byte {show(begin[0] + wanted)} of {file.path}, which has "
            f"{file.size}"
        )
    return name, Stored(str(dtype), shape, file, begin[0])
