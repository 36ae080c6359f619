# SPDX-License-Identifier: Apache-2.0
"""List the tensors of a folder that `tvm.contrib.tvmjs` or mlc-llm wrote.

Such a folder has an index:

    {"records": [{"dataPath": "params_shard_0.bin", "format": "raw-shard", "nbytes": 96,
                  "records": [{"name": "w", "shape": [4, 6], "dtype": "float32",
                               "format": "raw", "nbytes": 96, "byteOffset": 0}]}]}

A float32 tensor with the format "f32-to-bf16" is stored in bfloat16.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np

from tvm_ipc.arguments import quote
from tvm_ipc.errors import WeightsError
from tvm_ipc.models.weights.read_and_check_json import (
    parse_extents,
    read_json_file,
    read_prefix,
    sibling_file,
)
from tvm_ipc.models.weights.tensor_in_file import File, FileTensor, byte_count

#: The names of the index; earlier versions of TVM use the second one.
NAMES: Final = ("tensor-cache.json", "ndarray-cache.json")


def read_tensors(path: Path) -> dict[str, FileTensor]:
    """Return the tensors that an index lists, by their names.

    Raises
    ------
    WeightsError
        The index or a file that it names cannot be read, or is damaged.
    """
    index, content = read_json_file(path)
    shards = content.get("records")
    if not isinstance(shards, list):
        raise WeightsError(f"{path} is damaged: it has no list of records")
    tensors: dict[str, FileTensor] = {}
    for shard in shards:
        if not isinstance(shard, dict) or not isinstance(shard.get("records"), list):
            raise WeightsError(f"{path} is damaged: {quote(shard)} is not a record of a file")
        file = read_prefix(sibling_file(path, shard.get("dataPath")), 0)[0]
        if shard.get("nbytes", file.size) != file.size:
            raise WeightsError(
                f"{file.path} has {file.size} bytes; {index.path} specifies "
                f"{quote(shard['nbytes'])}"
            )
        for record in shard["records"]:
            name, tensor = _parse_tensor(path, file, record)
            if name in tensors:
                raise WeightsError(f"{path} is damaged: it has {quote(name)} twice")
            tensors[name] = tensor
    return tensors


def _parse_tensor(path: Path, file: File, record: Any) -> tuple[str, FileTensor]:
    def damaged(problem: str) -> WeightsError:
        return WeightsError(f"{path} is damaged: {problem}")

    if not isinstance(record, dict) or not isinstance(record.get("name"), str):
        raise damaged(f"{quote(record)} is not a record of a tensor")
    name = record["name"]
    dtype, form = record.get("dtype"), record.get("format")
    try:
        is_supported = isinstance(dtype, str) and np.dtype(dtype).kind in "biufV"
        is_supported = is_supported and np.dtype(dtype).name == dtype
    except TypeError:
        is_supported = False
    if not is_supported or form not in ("raw", "f32-to-bf16"):
        raise WeightsError(
            f"{path}: tensor {quote(name)} has the type {quote(dtype)} and the format "
            f"{quote(form)}; supported are NumPy's names of types, and the formats 'raw' and "
            "'f32-to-bf16'"
        )
    if form == "f32-to-bf16" and dtype == "float32":
        dtype = "bfloat16"
    shape, begin = parse_extents(record.get("shape")), parse_extents([record.get("byteOffset")])
    if shape is None or begin is None:
        raise damaged(
            f"tensor {quote(name)} has the shape {quote(record.get('shape'))} and the byteOffset "
            f"{quote(record.get('byteOffset'))}"
        )
    size = byte_count(str(dtype), shape)
    if record.get("nbytes", size) != size:
        raise damaged(
            f"tensor {quote(name)} has {quote(record['nbytes'])} bytes; a tensor {quote(shape)} of "
            f"{dtype} has {quote(size)}"
        )
    if begin[0] + size > file.size:
        raise damaged(
            f"tensor {quote(name)} ends at byte {quote(begin[0] + size)} of {file.path}, which has "
            f"{file.size} bytes"
        )
    return name, FileTensor(str(dtype), shape, file, begin[0])
