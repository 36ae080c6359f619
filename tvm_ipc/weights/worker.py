# SPDX-License-Identifier: Apache-2.0
"""What the workers call; imported into each of them."""

from __future__ import annotations

import ctypes
import json
import math
import mmap
from typing import Any, Final

import numpy as np
import tvm
import tvm_ffi

from tvm_ipc.contract import DEVICES
from tvm_ipc.parts import Runs, extents
from tvm_ipc.weights.reading import Reading, fill_zeros
from tvm_ipc.weights.stored import byte_count

_rank = tvm_ffi.get_global_func("tvm_ipc.worker.rank")
_device = tvm_ffi.get_global_func("tvm_ipc.worker.device")
#: The functions below, by their names in a worker.
READ: Final = "tvm_ipc.weights.read"
MAKE: Final = "tvm_ipc.weights.make"
#: Bytes of a large page.
_LARGE: Final = 1 << 21


@tvm_ffi.register_global_func(READ)  # type: ignore[untyped-decorator]
def read(text: str) -> Any:
    """Return this rank's part of a tensor in a file; None if it has none.

    Parameters
    ----------
    text : JSON. `name` is for errors; each of the `pieces` says what lies where: `path`, `state`,
        `dtype`, `shape` and `offset` there, and where it begins in the whole; `dtype` is what it is
        to be; `runs` has parts, and `of_rank` which of them a rank has.
    """
    said = json.loads(text)
    which = said["of_rank"].get(str(_rank()))
    if which is None:
        return None
    runs: Runs = tuple(
        tuple((start, count) for start, count in axis) for axis in said["runs"][which]
    )
    device = _device()
    on_cpu = device.dlpack_device_type() == DEVICES["cpu"]
    part = _empty(said["name"], extents(runs), said["dtype"], device)
    array = array_of(part) if on_cpu else np.empty(extents(runs), np.dtype(said["dtype"]))
    try:
        fill_zeros(runs, array)
        for piece in said["pieces"]:
            state, shape = tuple(piece["state"]), tuple(piece["shape"])
            place = piece["dtype"], shape, piece["offset"]
            with Reading(piece["path"], state, *place) as reading:
                reading.read(runs, tuple(piece["begin"]), array)
    except (OSError, ValueError) as error:
        raise type(error)(f"load_weights: {said['name']!r}: {error}") from error
    if not on_cpu:
        part.copyfrom(array)
    return part


@tvm_ffi.register_global_func(MAKE)  # type: ignore[untyped-decorator]
def make(text: str) -> Any:
    """Return a tensor for this rank's part; None if it has none.

    Parameters
    ----------
    text : JSON. `name` is for errors, `dtype` that of the tensor, and `shapes` are by ranks.
    """
    said = json.loads(text)
    shape = said["shapes"].get(str(_rank()))
    return None if shape is None else _empty(said["name"], tuple(shape), said["dtype"], _device())


def _empty(name: str, shape: tuple[int, ...], dtype: str, device: Any) -> Any:
    try:
        return tvm.runtime.empty(shape, dtype, device)
    except Exception as error:  # std::bad_alloc has no class of its own here
        size = byte_count(dtype, shape)
        raise MemoryError(f"load_weights: {name!r}: {size} bytes: {error}") from error


def array_of(tensor: Any) -> np.ndarray[Any, Any]:
    """Return the memory of a new tensor of the CPU as an array, of whatever type."""
    dtype, shape = np.dtype(str(tensor.dtype)), tuple(tensor.shape)
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return np.empty(shape, dtype)
    address = tensor.data_ptr()
    _advise_large_pages(address, size)
    memory = (ctypes.c_uint8 * size).from_address(address)
    return np.frombuffer(memory, dtype).reshape(shape)


def _advise_large_pages(address: int, size: int) -> None:
    """Ask the system for large pages: memory is filled three times as fast, and read faster.

    It may say no, which changes nothing else.
    """
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + size) // mmap.PAGESIZE * mmap.PAGESIZE
    if size >= _LARGE:
        length = ctypes.c_size_t(end - begin)
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), length, mmap.MADV_HUGEPAGE)
