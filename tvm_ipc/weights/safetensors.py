# SPDX-License-Identifier: Apache-2.0
"""What a safetensors file holds.

The format: 8 bytes, the length of a text; the text, JSON, which has for each tensor its type, shape
and place; the tensors, one after the other, without anything between or after them. The package
`safetensors` is not needed, which reads bfloat16 with PyTorch alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from tvm_ipc.arguments import show
from tvm_ipc.errors import WeightsError
from tvm_ipc.weights.stored import MOST_TEXT, File, Stored, begin_of, byte_count, numbers, parsed

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


def tensors_of(path: Path) -> dict[str, Stored]:
    """Return the tensors of a safetensors file by their names.

    Raises
    ------
    WeightsError
        It cannot be read, or is damaged.
    """
    file, head = begin_of(path, 8)
    if len(head) < 8:
        raise WeightsError(f"{path} is no safetensors file: it has {file.size} bytes")
    length = int.from_bytes(head, "little")
    if length > MOST_TEXT:
        raise WeightsError(
            f"{path} is no safetensors file: its header would have {length} bytes, and "
            f"{MOST_TEXT} are the most"
        )
    begin = 8 + length
    if begin > file.size:
        raise WeightsError(
            f"{path} is cut off: its header has {length} bytes, and the file {file.size}"
        )
    again, text = begin_of(path, length, 8)
    if again != file or len(text) != length:
        raise WeightsError(f"{path} changes while it is read")
    found = parsed(f"the header of {path}", text)
    found.pop("__metadata__", None)
    tensors = {name: _tensor(file, begin, name, entry) for name, entry in found.items()}
    _check_places(file, begin, tensors)
    return tensors


def _tensor(file: File, begin: int, name: str, entry: Any) -> Stored:
    def damaged(what: str) -> WeightsError:
        return WeightsError(f"{file.path} is damaged: tensor {show(name)} {what}")

    if not isinstance(entry, dict) or entry.keys() != _FIELDS:
        raise damaged(f"is {show(entry)}, without dtype, shape and data_offsets alone")
    if not isinstance(entry["dtype"], str) or entry["dtype"] not in _DTYPES:
        raise WeightsError(
            f"{file.path}: tensor {show(name)} is of type {show(entry['dtype'])}, and those that "
            f"are known are {', '.join(_DTYPES)}"
        )
    dtype = _DTYPES[entry["dtype"]]
    shape, place = numbers(entry["shape"]), numbers(entry["data_offsets"])
    if shape is None:
        raise damaged(f"has the shape {show(entry['shape'])}")
    if place is None or len(place) != 2 or place[0] > place[1]:
        raise damaged(f"has the data_offsets {show(entry['data_offsets'])}")
    wanted = byte_count(dtype, shape)
    if place[1] - place[0] != wanted:
        found = place[1] - place[0]
        raise damaged(
            f"has {found} bytes, and {show(shape)} of {entry['dtype']} are {show(wanted)}"
        )
    return Stored(dtype, shape, file, begin + place[0])


def _check_places(file: File, begin: int, tensors: dict[str, Stored]) -> None:
    """Raise if tensors are not one after the other, up to the end of the file."""
    before, end = "the header", begin
    for name, one in sorted(tensors.items(), key=lambda item: item[1].offset):
        if one.offset < end:
            raise WeightsError(f"{file.path} is damaged: {before} and {show(name)} overlap")
        if one.offset > end:
            raise WeightsError(
                f"{file.path} is damaged: between {before} and {show(name)} there are "
                f"{one.offset - end} bytes of no tensor"
            )
        before, end = show(name), one.offset + byte_count(one.dtype, one.shape)
    if end > file.size:
        raise WeightsError(
            f"{file.path} is cut off: its tensors end at byte {end}, and the file has {file.size}"
        )
    if end < file.size:
        raise WeightsError(
            f"{file.path} is damaged: after its tensors there are {file.size - end} bytes more"
        )
