# SPDX-License-Identifier: Apache-2.0
"""Functions that each worker registers to read its shards of weights."""

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

from tvm_ipc.index_spans_per_axis import Spans, rows, shape_of
from tvm_ipc.models.weights.slice_reader import SliceReader, fill_zeros
from tvm_ipc.models.weights.tensor_in_file import byte_count, file_state
from tvm_ipc.packed_functions import DEVICES
from tvm_ipc.packed_functions.program_function_declarations import VIEW

_rank = tvm_ffi.get_global_func("tvm_ipc.worker.rank")
_device = tvm_ffi.get_global_func("tvm_ipc.worker.device")
#: The global names of the functions below.
READ: Final = "tvm_ipc.weights.read"
MAKE: Final = "tvm_ipc.weights.make"
RESERVE_POOL: Final = "tvm_ipc.weights.reserve_pool"
HAS_FILES: Final = "tvm_ipc.weights.has_files"
PEAK_RSS: Final = "tvm_ipc.weights.peak_rss"
#: The bytes of a shard that worker 0 reads and sends at once, unless one row has more.
_BROADCAST_BYTES: Final = 1 << 25
#: The bytes of a huge page.
_HUGE_PAGE: Final = 1 << 21
_view = tvm_ffi.get_global_func(VIEW.name)


@tvm_ffi.register_global_func(RESERVE_POOL)  # type: ignore[untyped-decorator]
def reserve_pool(text: str) -> Any:
    """Allocate a memory pool for all shards of one type, in huge pages if the system has them.

    Weights in huge pages are read twice as fast, and most weights are smaller than a huge page.
    Return None if the shards are smaller than a huge page, or if there is not enough memory. Each
    shard is then allocated separately, and the error names the shard that does not fit.

    Parameters
    ----------
    text : a JSON object. `dtype` is the type of the shards, and `bytes` their total size by rank.
    """
    request = json.loads(text)
    device, dtype = _device(), np.dtype(request["dtype"])
    size = request["bytes"].get(str(_rank()), 0)
    if size < _HUGE_PAGE or device.dlpack_device_type() != DEVICES["cpu"]:
        return None
    try:
        elements = (size + _HUGE_PAGE) // dtype.itemsize
        memory = tvm.runtime.empty((elements,), request["dtype"], device)
    except Exception:  # std::bad_alloc arrives as an exception without a class of its own
        return None
    begin = -memory.data_ptr() % _HUGE_PAGE
    # madvise may refuse, which only costs speed.
    length = ctypes.c_size_t(size // _HUGE_PAGE * _HUGE_PAGE)
    address = ctypes.c_void_p(memory.data_ptr() + begin)
    ctypes.CDLL(None).madvise(address, length, mmap.MADV_HUGEPAGE)
    return _view(memory, begin, tvm_ffi.Shape([size // dtype.itemsize]))


@tvm_ffi.register_global_func(READ)  # type: ignore[untyped-decorator]
def read(text: str, memory: Any) -> Any:
    """Read this rank's shard of a parameter from files; return None if the rank has no shard.

    Parameters
    ----------
    text : a JSON object with these members:

        - `name`: the name of the parameter, for error messages.
        - `dtype`: the type of the parameter.
        - `pieces`: the tensors in files that fill it, each with its `path`, `state`, `dtype`,
          `shape` and `offset`, and `begin`, the first index of its box in the parameter.
        - `shards`: the spans of each distinct shard; `shard_of_rank`: the index of a rank's shard.
        - `pool_offset`: the offset of the shard in the memory pool, by rank.
        - `sends`: the shards that worker 0 reads for the `ranks` of a `team`.
        - `broadcast`: the function that sends; `sync`: the one that waits until that has ended.
    memory : the pool that `reserve_pool` returned.
    """
    request = json.loads(text)
    rank = _rank()
    sends = [send for send in request["sends"] if rank == 0 or rank in send["ranks"]]
    shard = _allocate(request, memory)
    if shard is not None and (rank == 0 or not sends):
        _fill(request, _spans(request, request["shard_of_rank"][str(rank)]), shard)
    for send in sends:
        spans = _spans(request, send["shard"])
        _broadcast(request, send["team"], spans, None if rank == 0 else shard)
    return shard


def _spans(request: Mapping[str, Any], index: int) -> Spans:
    axes = request["shards"][index]
    return tuple(tuple((start, count) for start, count in axis) for axis in axes)


def _fill(request: Mapping[str, Any], spans: Spans, tensor: Any) -> None:
    """Read a shard, or some of its rows, from its files into a tensor."""
    shape = shape_of(spans)
    if _device().dlpack_device_type() == DEVICES["cpu"]:
        _read_files(request, spans, array_of(tensor).reshape(shape))
        return
    array = np.empty(tensor.shape, np.dtype(request["dtype"]))
    _read_files(request, spans, array.reshape(shape))
    tensor.copyfrom(array)


def _read_files(request: Mapping[str, Any], spans: Spans, array: np.ndarray[Any, Any]) -> None:
    """Read a shard from its files into an array."""
    try:
        fill_zeros(spans, array)
        for piece in request["pieces"]:
            state, shape = tuple(piece["state"]), tuple(piece["shape"])
            tensor = piece["dtype"], shape, piece["offset"]
            with SliceReader(piece["path"], state, *tensor) as reader:
                reader.read(spans, tuple(piece["begin"]), array)
    except (OSError, ValueError) as error:
        raise type(error)(f"load_weights: {request['name']!r}: {error}") from error


def _broadcast(request: Mapping[str, Any], team: int, spans: Spans, shard: Any) -> None:
    """Send a shard from worker 0 to a team, some rows at a time.

    Parameters
    ----------
    shard : the tensor to receive into; None in worker 0, which reads and sends.
    """
    broadcast = tvm_ffi.get_global_func(request["broadcast"])
    shape = shape_of(spans)
    if not math.prod(shape):
        return
    count, row = (shape[0], shape[1:]) if shape else (1, ())
    size = byte_count(request["dtype"], row)
    at_once = min(count, max(1, _BROADCAST_BYTES // size))
    memory = _empty(request, (at_once, *row)) if shard is None else shard
    for begin in range(0, count, at_once):
        number = min(at_once, count - begin)
        chunk = _view(memory, 0 if shard is None else begin * size, tvm_ffi.Shape([number, *row]))
        if shard is None:
            _fill(request, rows(spans, begin, number) if shape else spans, chunk)
        broadcast(chunk, team, chunk)
        # The next copy to the device does not wait until the broadcast has read this chunk.
        if shard is None and _device().dlpack_device_type() != DEVICES["cpu"]:
            tvm_ffi.get_global_func(request["sync"])()


@tvm_ffi.register_global_func(HAS_FILES)  # type: ignore[untyped-decorator]
def has_files(text: str) -> str:
    """Return whether this rank's node can read each of some files, as a JSON list.

    Parameters
    ----------
    text : a JSON list of paths and states, as worker 0 and the controller see them.
    """
    return json.dumps([_is_same_file(path, tuple(state)) for path, state in json.loads(text)])


@tvm_ffi.register_global_func(PEAK_RSS)  # type: ignore[untyped-decorator]
def peak_rss() -> int:
    """Return the peak resident memory of this rank's process, in bytes."""
    status = Path("/proc/self/status").read_text()
    (kilobytes,) = re.findall(r"^VmHWM:\s+(\d+) kB$", status, re.M)
    return int(kilobytes) << 10


def _is_same_file(path: str, state: tuple[int, ...]) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return file_state(descriptor) == state
    finally:
        os.close(descriptor)


@tvm_ffi.register_global_func(MAKE)  # type: ignore[untyped-decorator]
def make(text: str, memory: Any) -> Any:
    """Allocate a tensor for this rank's shard; return None if the rank has no shard.

    Parameters
    ----------
    text : a JSON object with `name`, `dtype`, `shards`, `shard_of_rank` and `pool_offset` as for
        `read`.
    memory : the pool that `reserve_pool` returned.
    """
    return _allocate(json.loads(text), memory)


def _allocate(request: Mapping[str, Any], memory: Any) -> Any:
    """Return a tensor for this rank's shard, in the memory pool if there is one; None for none."""
    index = request["shard_of_rank"].get(str(_rank()))
    if index is None:
        return None
    shape = shape_of(_spans(request, index))
    if memory is not None:
        return _view(memory, request["pool_offset"][str(_rank())], tvm_ffi.Shape(shape))
    return _empty(request, shape)


def _empty(request: Mapping[str, Any], shape: tuple[int, ...]) -> Any:
    try:
        return tvm.runtime.empty(shape, request["dtype"], _device())
    except Exception as error:  # std::bad_alloc arrives as an exception without a class of its own
        size = byte_count(request["dtype"], shape)
        raise MemoryError(
            f"load_weights: {request['name']!r}: {size} bytes cannot be allocated: {error}"
        ) from error


def array_of(tensor: Any) -> np.ndarray[Any, Any]:
    """Return a view of a CPU tensor of any type as an array."""
    dtype, shape = np.dtype(str(tensor.dtype)), tuple(tensor.shape)
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return np.empty(shape, dtype)
    memory = (ctypes.c_uint8 * size).from_address(tensor.data_ptr())
    return np.frombuffer(memory, dtype).reshape(shape)
