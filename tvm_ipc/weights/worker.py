# SPDX-License-Identifier: Apache-2.0
"""What the workers call; imported into each of them."""

from __future__ import annotations

import ctypes
import json
import math
import mmap
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import tvm
import tvm_ffi

from tvm_ipc.contract import DEVICES
from tvm_ipc.contract.programs import VIEW
from tvm_ipc.parts import Runs, extents
from tvm_ipc.weights.reading import Reading, fill_zeros
from tvm_ipc.weights.stored import byte_count

_rank = tvm_ffi.get_global_func("tvm_ipc.worker.rank")
_device = tvm_ffi.get_global_func("tvm_ipc.worker.device")
#: The functions below, by their names in a worker.
READ: Final = "tvm_ipc.weights.read"
MAKE: Final = "tvm_ipc.weights.make"
ROOM: Final = "tvm_ipc.weights.room"
#: Bytes of a large page.
_LARGE: Final = 1 << 21
_view = tvm_ffi.get_global_func(VIEW.name)


@tvm_ffi.register_global_func(ROOM)  # type: ignore[untyped-decorator]
def room(text: str) -> Any:
    """Return memory for parts of one type, in large pages where the system has some.

    A core reads weights twice as fast from large pages, and most weights alone are too small to
    fill them. None where that is not worth it, or there is not so much memory: then parts are
    allocated each alone, and the one that does not fit says so.

    Parameters
    ----------
    text : JSON. `dtype` is that of the parts, `bytes` how many they take together, by ranks.
    """
    said = json.loads(text)
    device, dtype = _device(), np.dtype(said["dtype"])
    size = said["bytes"].get(str(_rank()), 0)
    if size < _LARGE or device.dlpack_device_type() != DEVICES["cpu"]:
        return None
    try:
        found = tvm.runtime.empty(((size + _LARGE) // dtype.itemsize,), said["dtype"], device)
    except Exception:  # std::bad_alloc has no class of its own here
        return None
    begin = -found.data_ptr() % _LARGE
    # It may say no, which changes nothing else.
    length = ctypes.c_size_t(size // _LARGE * _LARGE)
    address = ctypes.c_void_p(found.data_ptr() + begin)
    ctypes.CDLL(None).madvise(address, length, mmap.MADV_HUGEPAGE)
    return _view(found, begin, tvm_ffi.Shape([size // dtype.itemsize]))


@tvm_ffi.register_global_func(READ)  # type: ignore[untyped-decorator]
def read(text: str, memory: Any) -> Any:
    """Return this rank's part of a tensor in a file; None if it has none.

    Parameters
    ----------
    memory : that `room` returned.
    text : JSON. `place` says by ranks at which byte of the memory the part begins; `name` is for
        errors; each of the `pieces` says what lies where: `path`, `state`, `dtype`, `shape` and
        `offset` there, and where it begins in the whole; `dtype` is what it is to be; `runs` has
        parts, and `of_rank` which of them a rank has.
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
    part = _part(said, extents(runs), memory)
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
def make(text: str, memory: Any) -> Any:
    """Return a tensor for this rank's part; None if it has none.

    Parameters
    ----------
    memory : that `room` returned.
    text : JSON. `name` is for errors, `dtype` that of the tensor, `place` as for `read`, and
        `shapes` are by ranks.
    """
    said = json.loads(text)
    shape = said["shapes"].get(str(_rank()))
    return None if shape is None else _part(said, tuple(shape), memory)


def _part(said: Mapping[str, Any], shape: tuple[int, ...], memory: Any) -> Any:
    """Return a tensor, in the room for parts if there is one."""
    name, dtype = said["name"], said["dtype"]
    if memory is not None:
        return _view(memory, said["place"][str(_rank())], tvm_ffi.Shape(shape))
    try:
        return tvm.runtime.empty(shape, dtype, _device())
    except Exception as error:  # std::bad_alloc has no class of its own here
        size = byte_count(dtype, shape)
        raise MemoryError(f"load_weights: {name!r}: {size} bytes: {error}") from error


def array_of(tensor: Any) -> np.ndarray[Any, Any]:
    """Return the memory of a tensor of the CPU as an array, of whatever type."""
    dtype, shape = np.dtype(str(tensor.dtype)), tuple(tensor.shape)
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return np.empty(shape, dtype)
    memory = (ctypes.c_uint8 * size).from_address(tensor.data_ptr())
    return np.frombuffer(memory, dtype).reshape(shape)
