# SPDX-License-Identifier: Apache-2.0
"""What the workers call; imported into each of them."""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import tvm
import tvm_ffi

from tvm_ipc.contract import DEVICES
from tvm_ipc.contract.programs import VIEW
from tvm_ipc.parts import Runs, extents, rows
from tvm_ipc.weights.reading import Reading, fill_zeros
from tvm_ipc.weights.stored import byte_count, state_of

_rank = tvm_ffi.get_global_func("tvm_ipc.worker.rank")
_device = tvm_ffi.get_global_func("tvm_ipc.worker.device")
#: The functions below, by their names in a worker.
READ: Final = "tvm_ipc.weights.read"
MAKE: Final = "tvm_ipc.weights.make"
ROOM: Final = "tvm_ipc.weights.room"
HAS: Final = "tvm_ipc.weights.has"
PEAK: Final = "tvm_ipc.weights.peak"
#: Bytes of a part that are read and sent at once, if a row of it has no more.
_SENT: Final = 1 << 25
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
        parts, and `of_rank` which of them a rank has; `sends` is of parts that ranks cannot read,
        and worker 0 sends to the `ranks` of a `team` with the function `broadcast`; `settle` waits
        until what was sent has gone.
    """
    said = json.loads(text)
    rank = _rank()
    which = said["of_rank"].get(str(rank))
    sent = [one for one in said["sends"] if rank == 0 or rank in one["ranks"]]
    part = None if which is None else _part(said, extents(_runs(said, which)), memory)
    if part is not None and (rank == 0 or not sent):
        on_cpu = _device().dlpack_device_type() == DEVICES["cpu"]
        array = array_of(part) if on_cpu else np.empty(part.shape, np.dtype(said["dtype"]))
        _fill(said, _runs(said, which), array)
        if not on_cpu:
            part.copyfrom(array)
    for one in sent:
        _exchange(said, one["team"], _runs(said, one["part"]), None if rank == 0 else part)
    return part


def _runs(said: Mapping[str, Any], number: int) -> Runs:
    found = said["runs"][number]
    return tuple(tuple((start, count) for start, count in axis) for axis in found)


def _fill(said: Mapping[str, Any], runs: Runs, array: np.ndarray[Any, Any]) -> None:
    """Read a part into an array."""
    try:
        fill_zeros(runs, array)
        for piece in said["pieces"]:
            state, shape = tuple(piece["state"]), tuple(piece["shape"])
            place = piece["dtype"], shape, piece["offset"]
            with Reading(piece["path"], state, *place) as reading:
                reading.read(runs, tuple(piece["begin"]), array)
    except (OSError, ValueError) as error:
        raise type(error)(f"load_weights: {said['name']!r}: {error}") from error


def _exchange(said: Mapping[str, Any], team: int, runs: Runs, part: Any) -> None:
    """Read a part and send it to a team, or receive it, some rows at a time.

    Parameters
    ----------
    part : None in worker 0, which reads and sends.
    """
    broadcast = tvm_ffi.get_global_func(said["broadcast"])
    shape = extents(runs)
    if not math.prod(shape):
        return
    count, row = (shape[0], shape[1:]) if shape else (1, ())
    size = byte_count(said["dtype"], row)
    at_once = min(count, max(1, _SENT // size))
    whole = _empty(said, (at_once, *row), said["dtype"]) if part is None else part
    on_cpu = _device().dlpack_device_type() == DEVICES["cpu"]
    for begin in range(0, count, at_once):
        here = min(at_once, count - begin)
        piece = _view(whole, 0 if part is None else begin * size, tvm_ffi.Shape([here, *row]))
        if part is None:
            wanted = rows(runs, begin, here) if shape else runs
            array = array_of(piece) if on_cpu else np.empty(piece.shape, np.dtype(said["dtype"]))
            _fill(said, wanted, array.reshape(extents(wanted)))
            if not on_cpu:
                piece.copyfrom(array)
        broadcast(piece, team, piece)
        if part is None and not on_cpu:  # a copy to a device does not wait for what reads there
            tvm_ffi.get_global_func(said["settle"])()


@tvm_ffi.register_global_func(HAS)  # type: ignore[untyped-decorator]
def has(text: str) -> str:
    """Return which files this rank's node has, as JSON: whether each is the same file there.

    Parameters
    ----------
    text : JSON. A list of paths and states, as worker 0 and the controller see them.
    """
    return json.dumps([_is_there(path, tuple(state)) for path, state in json.loads(text)])


@tvm_ffi.register_global_func(PEAK)  # type: ignore[untyped-decorator]
def peak() -> int:
    """Return the most memory that this rank's process had, in bytes."""
    (found,) = re.findall(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.M)
    return int(found) << 10


def _is_there(path: str, state: tuple[int, ...]) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return state_of(descriptor) == state
    finally:
        os.close(descriptor)


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
    if memory is not None:
        return _view(memory, said["place"][str(_rank())], tvm_ffi.Shape(shape))
    return _empty(said, shape, said["dtype"])


def _empty(said: Mapping[str, Any], shape: tuple[int, ...], dtype: str) -> Any:
    try:
        return tvm.runtime.empty(shape, dtype, _device())
    except Exception as error:  # std::bad_alloc has no class of its own here
        size = byte_count(dtype, shape)
        raise MemoryError(f"load_weights: {said['name']!r}: {size} bytes: {error}") from error


def array_of(tensor: Any) -> np.ndarray[Any, Any]:
    """Return the memory of a tensor of the CPU as an array, of whatever type."""
    dtype, shape = np.dtype(str(tensor.dtype)), tuple(tensor.shape)
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return np.empty(shape, dtype)
    memory = (ctypes.c_uint8 * size).from_address(tensor.data_ptr())
    return np.frombuffer(memory, dtype).reshape(shape)
