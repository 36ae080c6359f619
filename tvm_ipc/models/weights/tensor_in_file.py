# SPDX-License-Identifier: Apache-2.0
"""A tensor in a file, and the state of the file."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import ml_dtypes  # noqa: F401  registers bfloat16 and others with NumPy
import numpy as np


@dataclass(frozen=True)
class File:
    """A file with its state, which detects later changes and other files at the same path.

    Attributes
    ----------
    path : the absolute path.
    state : the inode, the size and the modification time. All nodes that share a file system see
        the same values.
    """

    path: str
    state: tuple[int, int, int]

    @property
    def size(self) -> int:
        """The size of the file in bytes."""
        return self.state[1]


@dataclass(frozen=True)
class FileTensor:
    """A contiguous tensor in a file.

    Attributes
    ----------
    dtype : the element type, by its NumPy name.
    shape : the shape.
    file : the file that has the tensor.
    offset : the byte of the file at which the tensor begins.
    """

    dtype: str
    shape: tuple[int, ...]
    file: File
    offset: int


def byte_count(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the number of bytes of a tensor."""
    return math.prod(shape) * np.dtype(dtype).itemsize


def file_state(descriptor: int) -> tuple[int, int, int]:
    """Return the inode, the size and the modification time of an open file."""
    status = os.fstat(descriptor)
    return status.st_ino, status.st_size, status.st_mtime_ns
