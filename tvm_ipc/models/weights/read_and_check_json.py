# SPDX-License-Identifier: Apache-2.0
"""Read and check the JSON texts that list the tensors of files."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, Final

from tvm_ipc.arguments import quote
from tvm_ipc.errors import WeightsError
from tvm_ipc.models.weights.tensor_in_file import File, file_state

#: The most bytes of a header or an index, which is the limit of safetensors too.
MAX_HEADER_BYTES: Final = 100_000_000
_MAX_AXES: Final = 32


def read_prefix(path: Path, count: int, offset: int = 0) -> tuple[File, bytes]:
    """Return a file and `count` of its bytes from `offset` on, or fewer if the file ends before.

    Raises
    ------
    WeightsError
        The file cannot be read, or is not a regular file.
    """
    try:
        # Without O_NONBLOCK, opening a pipe waits for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise WeightsError(f"{path} is not a regular file")
            file = File(str(path.absolute()), file_state(descriptor))
            return file, os.pread(descriptor, count, offset)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:  # ValueError: the path is not a valid file name
        reason = getattr(error, "strerror", None) or error
        raise WeightsError(f"{path} cannot be read: {reason}") from error


def read_json_file(path: Path) -> tuple[File, dict[str, Any]]:
    """Return a file and the JSON object that it contains."""
    file, text = read_prefix(path, MAX_HEADER_BYTES + 1)
    if len(text) > MAX_HEADER_BYTES:
        raise WeightsError(f"{path} is too large: it may have at most {MAX_HEADER_BYTES} bytes")
    return file, parse_json_object(str(path), text)


def parse_json_object(where: str, text: bytes) -> dict[str, Any]:
    """Parse a JSON object; raise WeightsError if the text is something else.

    Parameters
    ----------
    where : what the text is, for the beginning of error messages.
    text : the text in UTF-8.
    """
    try:
        value = json.loads(text.decode(), object_pairs_hook=_reject_duplicates)
    except RecursionError:
        raise WeightsError(f"{where} is damaged: it is nested too deeply") from None
    except ValueError as error:
        raise WeightsError(f"{where} is damaged: {error}") from None
    if not isinstance(value, dict):
        raise WeightsError(f"{where} is damaged: it is not a JSON object")
    return value


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members: dict[str, Any] = {}
    for name, value in pairs:
        if name in members:
            raise ValueError(f"it has {quote(name)} twice")
        members[name] = value
    return members


def sibling_file(index: Path, name: Any) -> Path:
    """Return the path of a file that an index names; raise if it is not in the index's folder."""
    if not isinstance(name, str) or not name or "\0" in name:
        raise WeightsError(f"{index} is damaged: {quote(name)} is not a file name")
    if Path(name).name != name or name == "..":
        raise WeightsError(f"{index} names {quote(name)}; it may name only files in its own folder")
    return index.parent / name


def parse_extents(value: Any) -> tuple[int, ...] | None:
    """Return a list of nonnegative 63-bit integers as a tuple; None for other values."""
    if not isinstance(value, list) or len(value) > _MAX_AXES:
        return None
    return tuple(value) if all(type(n) is int and 0 <= n < 1 << 63 for n in value) else None
