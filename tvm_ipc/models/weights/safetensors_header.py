# SPDX-License-Identifier: Apache-2.0
"""List the tensors of a safetensors file.

The format has three parts: 8 bytes with the length of the header; the header, a JSON object with
the type, the shape and the offsets of each tensor; and the tensors, without gaps. The package
`safetensors` is not used: it reads bfloat16 only with PyTorch, and does not return the offsets at
which ranks read their shards.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from tvm_ipc.arguments import quote
from tvm_ipc.errors import WeightsError
from tvm_ipc.models.weights.read_and_check_json import (
    MAX_HEADER_BYTES,
    parse_extents,
    parse_json_object,
    read_prefix,
)
from tvm_ipc.models.weights.tensor_in_file import File, FileTensor, byte_count

_DTYPES: Final = {
    "BOOL": "bool",
    **{f"{kind}{bits}": f"{name}{bits}" for kind, name in (("I", "int"), ("U", "uint"))
       for bits in (8, 16, 32, 64)},
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip
_FIELDS: Final = {"dtype", "shape", "data_offsets"}


def read_tensors(path: Path) -> dict[str, FileTensor]:
    """Return the tensors of a safetensors file, by their names.

    Raises
    ------
    WeightsError
        The file cannot be read, or is damaged.
    """
    file, head = read_prefix(path, 8)
    if len(head) < 8:
        raise WeightsError(f"{path} is not a safetensors file: it has {file.size} bytes")
    length = int.from_bytes(head, "little")
    if length > MAX_HEADER_BYTES:
        raise WeightsError(
            f"{path} is not a safetensors file: its header would have {length} bytes; it may have "
            f"at most {MAX_HEADER_BYTES}"
        )
    begin = 8 + length
    if begin > file.size:
        raise WeightsError(
            f"{path} is truncated: its header has {length} bytes, and the file {file.size}"
        )
    file_again, text = read_prefix(path, length, 8)
    if file_again != file or len(text) != length:
        raise WeightsError(f"{path} changes while it is read")
    entries = parse_json_object(f"the header of {path}", text)
    entries.pop("__metadata__", None)
    tensors = {name: _parse_tensor(file, begin, name, entry) for name, entry in entries.items()}
    _check_contiguous(file, begin, tensors)
    return tensors


def _parse_tensor(file: File, begin: int, name: str, entry: Any) -> FileTensor:
    def damaged(problem: str) -> WeightsError:
        return WeightsError(f"{file.path} is damaged: tensor {quote(name)} {problem}")

    if not isinstance(entry, dict) or entry.keys() != _FIELDS:
        raise damaged(
            f"is described by {quote(entry)}; expected an object with exactly dtype, shape and "
            "data_offsets"
        )
    if not isinstance(entry["dtype"], str) or entry["dtype"] not in _DTYPES:
        raise WeightsError(
            f"{file.path}: tensor {quote(name)} has the type {quote(entry['dtype'])}; supported "
            f"types are {', '.join(_DTYPES)}"
        )
    dtype = _DTYPES[entry["dtype"]]
    shape, offsets = parse_extents(entry["shape"]), parse_extents(entry["data_offsets"])
    if shape is None:
        raise damaged(f"has the shape {quote(entry['shape'])}")
    if offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise damaged(f"has the data_offsets {quote(entry['data_offsets'])}")
    expected, size = byte_count(dtype, shape), offsets[1] - offsets[0]
    if size != expected:
        raise damaged(
            f"has {size} bytes; a tensor {quote(shape)} of {entry['dtype']} has {quote(expected)}"
        )
    return FileTensor(dtype, shape, file, begin + offsets[0])


def _check_contiguous(file: File, begin: int, tensors: dict[str, FileTensor]) -> None:
    """Raise if the tensors do not fill the file from `begin` to its end, without gaps."""
    previous, end = "the header", begin
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
        if tensor.offset < end:
            raise WeightsError(f"{file.path} is damaged: {previous} and {quote(name)} overlap")
        if tensor.offset > end:
            raise WeightsError(
                f"{file.path} is damaged: between {previous} and {quote(name)} there are "
                f"{tensor.offset - end} bytes of no tensor"
            )
        previous, end = quote(name), tensor.offset + byte_count(tensor.dtype, tensor.shape)
    if end > file.size:
        raise WeightsError(
            f"{file.path} is truncated: its tensors end at byte {end}, and the file has {file.size}"
        )
    if end < file.size:
        raise WeightsError(
            f"{file.path} is damaged: {file.size - end} bytes follow its last tensor"
        )
