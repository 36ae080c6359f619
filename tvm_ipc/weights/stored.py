# SPDX-License-Identifier: Apache-2.0
"""Tensors as they lie in a file, and the file as it was when it was looked at."""

from __future__ import annotations

import json
import math
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import ml_dtypes  # noqa: F401  makes bfloat16 and others known to NumPy
import numpy as np

from tvm_ipc.arguments import show
from tvm_ipc.errors import WeightsError

#: Bytes of the text that says what a file or a folder holds, at most; safetensors' own limit.
MOST_TEXT: Final = 100_000_000
_MOST_AXES: Final = 32


@dataclass(frozen=True)
class File:
    """A file, and what tells it from another one at the same path, and from a later state of it.

    Attributes
    ----------
    path : absolute.
    state : its inode, bytes, and when it was changed, which all nodes that share it see alike.
    """

    path: str
    state: tuple[int, int, int]

    @property
    def size(self) -> int:
        """How many bytes it has."""
        return self.state[1]


@dataclass(frozen=True)
class Stored:
    """A tensor in a file, contiguous.

    Attributes
    ----------
    dtype : of its elements, as NumPy names it.
    shape : its extents.
    file : where it is.
    offset : the byte of the file at which it begins.
    """

    dtype: str
    shape: tuple[int, ...]
    file: File
    offset: int


def byte_count(dtype: str, shape: tuple[int, ...]) -> int:
    """Return how many bytes a tensor has."""
    return math.prod(shape) * np.dtype(dtype).itemsize


def state_of(descriptor: int) -> tuple[int, int, int]:
    """Return what tells an open file from others, and from a later state of it."""
    found = os.fstat(descriptor)
    return found.st_ino, found.st_size, found.st_mtime_ns


def begin_of(path: Path, count: int, offset: int = 0) -> tuple[File, bytes]:
    """Return a file and as many of its bytes as it has of those asked for.

    Raises
    ------
    WeightsError
        It cannot be read, or is no file.
    """
    try:
        # A pipe without a writer would be waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise WeightsError(f"{path} is no file")
            file = File(str(path.absolute()), state_of(descriptor))
            return file, os.pread(descriptor, count, offset)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:  # a ValueError where the name is none
        why = getattr(error, "strerror", None) or error
        raise WeightsError(f"{path} cannot be read: {why}") from error


def object_of(path: Path) -> tuple[File, dict[str, Any]]:
    """Return a file with a text, and the JSON object that the text is."""
    file, text = begin_of(path, MOST_TEXT + 1)
    if len(text) > MOST_TEXT:
        raise WeightsError(f"{path} has more than {MOST_TEXT} bytes, which are the most")
    return file, parsed(str(path), text)


def parsed(where: str, text: bytes) -> dict[str, Any]:
    """Return the JSON object that a text is; raise WeightsError if it is none."""
    try:
        found = json.loads(text.decode(), object_pairs_hook=_without_repetition)
    except RecursionError:
        raise WeightsError(f"{where} is damaged: it is nested too deeply") from None
    except ValueError as error:
        raise WeightsError(f"{where} is damaged: {error}") from None
    if not isinstance(found, dict):
        raise WeightsError(f"{where} is damaged: it is no JSON object")
    return found


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"it has {show(name)} twice")
        found[name] = value
    return found


def beside(index: Path, name: Any) -> Path:
    """Return a file in the folder of the text that names it; one elsewhere is refused."""
    if not isinstance(name, str) or not name or "\0" in name:
        raise WeightsError(f"{index} is damaged: {show(name)} is no name of a file")
    if Path(name).name != name or name == "..":
        raise WeightsError(f"{index} names {show(name)}, and only files in its own folder are read")
    return index.parent / name


def numbers(value: Any) -> tuple[int, ...] | None:
    """Return a list of integers from 0 on, of 63 bits; None if it is something else."""
    if not isinstance(value, list) or len(value) > _MOST_AXES:
        return None
    return tuple(value) if all(type(one) is int and 0 <= one < 1 << 63 for one in value) else None
