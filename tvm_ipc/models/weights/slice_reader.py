# SPDX-License-Identifier: Apache-2.0
"""Read a rank's shard of a tensor from a file into the rank's memory.

Files are read, not mapped, so a file that becomes shorter meanwhile causes an error, and not the
death of the process. Bytes that are contiguous in the file and in memory are read in place. If a
shard needs a small piece of every row, whole rows are read into a buffer that fits the CPU's cache,
and the pieces are copied out of it.
"""

from __future__ import annotations

import math
import os
from typing import Any, Final, TypeAlias

import ml_dtypes  # noqa: F401  registers bfloat16 and others with NumPy
import numpy as np

from tvm_ipc.index_spans_per_axis import Spans, slice_pairs, slice_pairs_in_box
from tvm_ipc.models.weights.tensor_in_file import file_state

Array: TypeAlias = np.ndarray[Any, Any]
#: The bytes of the buffer for rows.
_BUFFER_BYTES: Final = 1 << 20
#: Pieces of rows of at least this many bytes are read one by one. A read costs about as much as
#: reading this many bytes.
_LONG_ROW: Final = 1 << 15
#: The most bytes of one read, so that a thread can be interrupted soon.
_MAX_READ: Final = 1 << 26
#: The bits of infinity in the types whose range is smaller than that of another float.
_INFINITY: Final = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F80_0000}
#: A mask for all bits except the sign, by the bytes of the type.
_MAGNITUDE: Final = {2: 0x7FFF, 4: 0x7FFF_FFFF}


class SliceReader:
    """A context manager that opens a file and reads slices of one tensor from it.

    Parameters
    ----------
    path : the path of the file.
    state : the state of the file when its header was read. The file must not have changed since.
    dtype : the type of the tensor in the file.
    shape : the shape of the tensor in the file.
    offset : the byte at which the tensor begins.
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
        self._buffer: Array = np.empty(0, np.uint8)

    def __enter__(self) -> SliceReader:
        """Open the file for `read`."""
        self._file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        os.close(self._file)

    def read(self, spans: Spans, begin: tuple[int, ...], out: Array) -> None:
        """Fill the elements of a shard that this tensor has, converted to the shard's type.

        Parameters
        ----------
        spans : the spans of the parameter that form the shard.
        begin : the first index of this tensor's box in the parameter.
        out : the memory of the shard.
        """
        self._check_state()
        for target, source in slice_pairs_in_box(spans, begin, self.shape):
            # Indexing with () would return a scalar instead of a view.
            self._read_box(source, out[target] if target else out[...])
        self._check_state()

    def _check_state(self) -> None:
        if file_state(self._file) != tuple(self.state):
            raise ValueError(f"{self.path} has changed since its header was read")

    def _read_box(self, box: tuple[slice, ...], out: Array) -> None:
        """Read the elements of the tensor that one slice along each axis selects."""
        counts = [selected.stop - selected.start for selected in box]
        steps = [math.prod(self.shape[axis + 1 :]) for axis in range(len(box))]
        partial_axes = [k for k, count in enumerate(counts) if count != self.shape[k]]
        last = partial_axes[-1] if partial_axes else 0
        begin = sum(selected.start * step for selected, step in zip(box, steps, strict=True))
        if all(count == 1 for count in counts[:last]):
            self._read_contiguous(begin, out)
        elif self._bytes(self.shape[last] * steps[last]) >= _LONG_ROW:
            for index in np.ndindex(*counts[:last]):
                shift = sum(i * step for i, step in zip(index, steps, strict=False))
                self._read_contiguous(begin + shift, out[index])
        else:
            self._read_rows(box, counts, steps, last, out)

    def _read_rows(
        self, box: tuple[slice, ...], counts: list[int], steps: list[int], last: int, out: Array
    ) -> None:
        """Read whole rows into the buffer, and copy the selected elements out of it."""
        # Rows are along the first axis whose rows are short.
        rows = next(k for k in range(last) if self._bytes(steps[k]) < _LONG_ROW)
        at_once = max(1, _BUFFER_BYTES // self._bytes(steps[rows]))
        selected = (slice(None), *box[rows + 1 :])
        begin = sum(axis.start * step for axis, step in zip(box[: rows + 1], steps, strict=False))
        for index in np.ndindex(*counts[:rows]):
            shift = begin + sum(i * step for i, step in zip(index, steps, strict=False))
            for row in range(0, counts[rows], at_once):
                count = min(at_once, counts[rows] - row)
                elements = self._read_buffer(shift + row * steps[rows], count * steps[rows])
                elements = elements.reshape(count, *self.shape[rows + 1 :])
                target = (*index, slice(row, row + count))
                convert(elements[selected], out[target])

    def _read_contiguous(self, begin: int, out: Array) -> None:
        """Read elements that are contiguous in the file."""
        if out.dtype == self.dtype and out.flags.c_contiguous:
            self._fill(begin, out.reshape(-1).view(np.uint8))
        elif self._bytes(out.size) <= _BUFFER_BYTES:
            convert(self._read_buffer(begin, out.size).reshape(out.shape), out)
        elif len(out) == 1:
            self._read_contiguous(begin, out[0])
        else:
            step = out.size // len(out)
            at_once = max(1, _BUFFER_BYTES // self._bytes(step))
            for row in range(0, len(out), at_once):
                self._read_contiguous(begin + row * step, out[row : row + at_once])

    def _read_buffer(self, begin: int, count: int) -> Array:
        """Read elements into the buffer, which the next call overwrites, and return them."""
        size = self._bytes(count)
        if len(self._buffer) < size:
            self._buffer = np.empty(size, np.uint8)
        self._fill(begin, self._buffer[:size])
        return self._buffer[:size].view(self.dtype)

    def _fill(self, begin: int, target: Array) -> None:
        position, view = self.offset + self._bytes(begin), memoryview(target.data)
        while len(view):
            count = os.preadv(self._file, [view[:_MAX_READ]], position)
            if not count:
                raise ValueError(f"{self.path} is truncated at byte {position}")
            position, view = position + count, view[count:]

    def _bytes(self, elements: int) -> int:
        return elements * self.dtype.itemsize


def fill_zeros(spans: Spans, out: Array) -> None:
    """Fill the padding of a shard, beyond the end of the parameter, with zeros."""
    for target, source in slice_pairs(spans):
        if source is None:
            out[target] = 0


def convert(source: Array, out: Array) -> None:
    """Copy into an array of another type; raise ValueError if a finite number becomes infinite."""
    with np.errstate(over="ignore", invalid="ignore"):
        out[...] = source
    infinity = _INFINITY.get(out.dtype.name)
    if out.dtype == source.dtype or infinity is None:
        return
    bits = out.view(f"u{out.dtype.itemsize}")
    overflowed = (bits & _MAGNITUDE[out.dtype.itemsize]) == infinity
    if overflowed.any():
        overflowed &= np.isfinite(source.astype(np.float64))
        if overflowed.any():
            raise ValueError(f"{source[overflowed].ravel()[0]} does not fit into {out.dtype}")
