# SPDX-License-Identifier: Apache-2.0
"""Send calls and tensors that are too long for one command.

A call that does not fit into a worker's pipe is sent in chunks, which the workers collect. A large
tensor is sent like the data of a collective, through shared memory of a fixed size.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import tvm_ffi
from tvm.runtime import Tensor

from tvm_ipc.runtime.references import DPackedFunc, DRef
from tvm_ipc.tvm_private_names import tensor_view


def call_in_chunks(
    function_of: Callable[[str], DPackedFunc],
    max_unread_bytes: int,
    func: Any,
    args: tuple[Any, ...],
) -> DRef:
    """Call a function on every worker with arguments that are longer than a command may be.

    Parameters
    ----------
    function_of : returns a worker's function by its name.
    max_unread_bytes : bytes of commands that a worker may leave unread.
    """
    limit = max_unread_bytes // 4
    args = tuple(
        _send_in_chunks(function_of, a, limit) if _upper_bound(a) > limit else a for a in args
    )
    append = function_of("tvm_ipc.worker.append")
    values, chunk = append(None), []
    for number, argument in enumerate(args, 1):
        chunk.append(argument)
        if number == len(args) or sum(map(_upper_bound, chunk)) > limit:
            values, chunk = append(values, *chunk), []
    return function_of("tvm_ipc.worker.call_with_list")(func, values)


def _send_in_chunks(function_of: Callable[[str], DPackedFunc], value: Any, limit: int) -> DRef:
    """Send one long argument."""
    if isinstance(value, str):
        kind, data = "str", value.encode()
    elif isinstance(value, tvm_ffi.Shape):
        kind, data = "Shape", b"".join(n.to_bytes(8, "little", signed=True) for n in value)
    else:
        kind, data = "bytes", bytes(value)
    append = function_of("tvm_ipc.worker.append")
    chunks = append(None)
    for start in range(0, len(data), limit):
        chunks = append(chunks, data[start : start + limit])
    return function_of("tvm_ipc.worker.concat_chunks")(kind, chunks)


def _upper_bound(argument: Any) -> int:
    """Return an upper bound for the bytes of an argument in a command."""
    if isinstance(argument, str):
        return 32 + 4 * len(argument)
    if isinstance(argument, tvm_ffi.Shape):
        return 32 + 8 * len(argument)
    if isinstance(argument, (bytes, bytearray)):
        return 32 + len(argument)
    return 32


#: A tensor of another process with more bytes is fetched by a collective, into memory that the
#: controller has allocated, instead of in a message to the controller.
FETCHED_SEPARATELY: Final = 1 << 16
#: An array of the controller of at most this many bytes is sent as an argument of a command.
SENT_IN_COMMAND: Final = 1 << 10
#: An array of the controller with more bytes is not copied before workers read it.
READ_IN_PLACE: Final = 1 << 26


@dataclass(frozen=True)
class LargeTensor:
    """The description of a tensor that must be fetched by a collective."""

    shape: tuple[int, ...]
    dtype: Any


def large_tensor(message: Any) -> LargeTensor | None:
    """Return the description that a worker sent instead of a tensor; None if it sent a value."""
    if not isinstance(message, tvm_ffi.Array) or len(message) != 3:
        return None
    tag, shape, dtype = message
    if tag != "tvm_ipc: a large tensor":
        return None
    return LargeTensor(tuple(shape), dtype)


def tensor_over(array: np.ndarray[Any, Any]) -> Tensor:
    """Return a tensor that shares the memory of a contiguous array, and keeps the array alive."""
    memory = (ctypes.c_uint8 * array.nbytes).from_address(array.ctypes.data)
    memory.of = array  # type: ignore[attr-defined]
    # NumPy exports no read-only arrays through DLPack, and few types.
    bytes_: np.ndarray[Any, Any] = np.frombuffer(memoryview(memory), np.uint8)
    tensor: Tensor = tensor_view(tvm_ffi.from_dlpack(bytes_), array.shape, array.dtype.name)
    return tensor
