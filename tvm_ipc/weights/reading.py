# SPDX-License-Identifier: Apache-2.0
"""A rank's part of a file, into its memory.

Files are read, not mapped: one that becomes shorter meanwhile is an error then, not the end of the
process. What lies together in the file and in memory goes there directly. Where a part has little
of every row, whole rows are read into memory that the cache holds, and the part is copied out.
"""

from __future__ import annotations

import math
import os
from typing import Any, Final, TypeAlias

import ml_dtypes  # noqa: F401  makes bfloat16 and others known to NumPy
import numpy as np

from tvm_ipc.parts import Runs, moves, moves_of_box
from tvm_ipc.weights.stored import state_of

Array: TypeAlias = np.ndarray[Any, Any]
#: Bytes that are read at once where they are copied again.
_ROOM: Final = 1 << 20
#: Bytes of a row from which on its piece is read alone: a read costs as much as so many bytes.
_LONG_ROW: Final = 1 << 15
#: Bytes of one read, so that nothing waits long for the thread that does it.
_MOST: Final = 1 << 26
#: The bits of infinity in types to which numbers of others may be too large.
_INFINITE: Final = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F80_0000}
#: All bits but the sign, by bytes.
_MAGNITUDE: Final = {2: 0x7FFF, 4: 0x7FFF_FFFF}


class Reading:
    """An open file from which one tensor is read.

    Parameters
    ----------
    path : of the file.
    state : what the file was when its names were read; it must be that still.
    dtype : of the tensor there.
    shape : of the whole tensor there.
    offset : the byte at which it begins.
    """

    def __init__(
        self,
        path: str,
        state: tuple[int, ...],
        dtype: str,
        shape: tuple[int, ...],
        offset: int,
    ) -> None:
        self.path, self.state = path, state
        self.dtype, self.shape, self.offset = np.dtype(dtype), shape, offset
        self._room: Array = np.empty(0, np.uint8)

    def __enter__(self) -> Reading:
        self._file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def read(self, runs: Runs, begin: tuple[int, ...], part: Array) -> None:
        """Fill what a part has of the tensor, which is a box of the whole, converted to its type.

        Parameters
        ----------
        runs : of the part.
        begin : where the box begins in the whole.
        part : the memory.
        """
        self._check_state()
        for target, source in moves_of_box(runs, begin, self.shape):
            # Without axes it would be a number.
            self._read_box(source, part[target] if target else part[...])
        self._check_state()

    def _check_state(self) -> None:
        if state_of(self._file) != tuple(self.state):
            raise ValueError(f"{self.path} has changed since its names were read")

    def _read_box(self, box: tuple[slice, ...], part: Array) -> None:
        """Read what a slice along each axis leaves of the whole."""
        counts = [place.stop - place.start for place in box]
        steps = [math.prod(self.shape[axis + 1 :]) for axis in range(len(box))]
        cut = [k for k, count in enumerate(counts) if count != self.shape[k]]
        last = cut[-1] if cut else 0
        begin = sum(place.start * step for place, step in zip(box, steps, strict=True))
        if all(count == 1 for count in counts[:last]):
            self._read_all(begin, part)
        elif self._bytes(self.shape[last] * steps[last]) >= _LONG_ROW:
            for index in np.ndindex(*counts[:last]):
                shift = sum(i * step for i, step in zip(index, steps, strict=False))
                self._read_all(begin + shift, part[index])
        else:
            self._read_rows(box, counts, steps, last, part)

    def _read_rows(
        self, box: tuple[slice, ...], counts: list[int], steps: list[int], last: int, part: Array
    ) -> None:
        """Read whole rows, of which the part has something."""
        # Rows are along the first axis whose rows are short.
        rows = next(k for k in range(last) if self._bytes(steps[k]) < _LONG_ROW)
        at_once = max(1, _ROOM // self._bytes(steps[rows]))
        wanted = (slice(None), *box[rows + 1 :])
        begin = sum(place.start * step for place, step in zip(box[: rows + 1], steps, strict=False))
        for index in np.ndindex(*counts[:rows]):
            shift = begin + sum(i * step for i, step in zip(index, steps, strict=False))
            for row in range(0, counts[rows], at_once):
                count = min(at_once, counts[rows] - row)
                found = self._elements(shift + row * steps[rows], count * steps[rows])
                found = found.reshape(count, *self.shape[rows + 1 :])
                place = (*index, slice(row, row + count))
                convert(found[wanted], part[place])

    def _read_all(self, begin: int, part: Array) -> None:
        """Read what lies together in the file."""
        if part.dtype == self.dtype and part.flags.c_contiguous:
            self._fill(begin, part.reshape(-1).view(np.uint8))
        elif self._bytes(part.size) <= _ROOM:
            convert(self._elements(begin, part.size).reshape(part.shape), part)
        elif len(part) == 1:
            self._read_all(begin, part[0])
        else:
            step = part.size // len(part)
            at_once = max(1, _ROOM // self._bytes(step))
            for row in range(0, len(part), at_once):
                self._read_all(begin + row * step, part[row : row + at_once])

    def _elements(self, begin: int, count: int) -> Array:
        """Return elements of the file, in memory that the next call uses again."""
        size = self._bytes(count)
        if len(self._room) < size:
            self._room = np.empty(size, np.uint8)
        self._fill(begin, self._room[:size])
        return self._room[:size].view(self.dtype)

    def _fill(self, begin: int, target: Array) -> None:
        place, view = self.offset + self._bytes(begin), memoryview(target.data)
        while len(view):
            count = os.preadv(self._file, [view[:_MOST]], place)
            if not count:
                raise ValueError(f"{self.path} is cut off at byte {place}")
            place, view = place + count, view[count:]

    def _bytes(self, elements: int) -> int:
        return elements * self.dtype.itemsize


def fill_zeros(runs: Runs, part: Array) -> None:
    """Fill what a part has beyond the whole."""
    for target, source in moves(runs):
        if source is None:
            part[target] = 0


def convert(found: Array, part: Array) -> None:
    """Copy numbers into an array of another type; raise where one would become infinite."""
    with np.errstate(over="ignore", invalid="ignore"):
        part[...] = found
    infinite = _INFINITE.get(part.dtype.name)
    if part.dtype == found.dtype or infinite is None:
        return
    bits = part.view(f"u{part.dtype.itemsize}")
    lost = (bits & _MAGNITUDE[part.dtype.itemsize]) == infinite
    if lost.any():
        lost &= np.isfinite(found.astype(np.float64))
        if lost.any():
            raise ValueError(f"{found[lost].ravel()[0]} does not fit into {part.dtype}")
