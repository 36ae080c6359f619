# SPDX-License-Identifier: Apache-2.0
"""What is too long to be sent at once.

Calls with more than fits into a worker's pipe are gathered on the workers first. A large tensor
goes as collectives do, through memory that does not grow with it.
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


def call_in_pieces(
    function_of: Callable[[str], DPackedFunc], room: int, func: Any, args: tuple[Any, ...]
) -> DRef:
    """Call a function on every worker with arguments that are longer than a command may be.

    Parameters
    ----------
    function_of : returns a worker's function by its name.
    room : bytes that a worker may leave unread.
    """
    most = room // 4
    args = tuple(
        _send_in_pieces(function_of, a, most) if _most_bytes(a) > most else a for a in args
    )
    append = function_of("tvm_ipc.worker.append")
    values, piece = append(None), []
    for number, argument in enumerate(args, 1):
        piece.append(argument)
        if number == len(args) or sum(map(_most_bytes, piece)) > most:
            values, piece = append(values, *piece), []
    return function_of("tvm_ipc.worker.call_with_list")(func, values)


def _send_in_pieces(function_of: Callable[[str], DPackedFunc], value: Any, most: int) -> DRef:
    """Send one long argument."""
    if isinstance(value, str):
        kind, data = "str", value.encode()
    elif isinstance(value, tvm_ffi.Shape):
        kind, data = "Shape", b"".join(n.to_bytes(8, "little", signed=True) for n in value)
    else:
        kind, data = "bytes", bytes(value)
    append = function_of("tvm_ipc.worker.append")
    pieces = append(None)
    for start in range(0, len(data), most):
        pieces = append(pieces, data[start : start + most])
    return function_of("tvm_ipc.worker.join_pieces")(kind, pieces)


def _most_bytes(argument: Any) -> int:
    """As many bytes as an argument may take on its way, or more."""
    if isinstance(argument, str):
        return 32 + 4 * len(argument)
    if isinstance(argument, tvm_ffi.Shape):
        return 32 + 8 * len(argument)
    if isinstance(argument, (bytes, bytearray)):
        return 32 + len(argument)
    return 32


#: Bytes of a tensor of another process from which on it does not come with what workers tell the
#: controller, but by the way of collectives, into memory that is there.
FETCHED_ALONE: Final = 1 << 16
#: Bytes of an array of the controller from which on it is not copied before workers read it.
READ_IN_PLACE: Final = 1 << 26


@dataclass(frozen=True)
class LargeTensor:
    """A tensor that is fetched by itself."""

    shape: tuple[int, ...]
    dtype: Any


def large_tensor(found: Any) -> LargeTensor | None:
    """Return what a worker said of a tensor that it did not send; None if that is a value."""
    if not isinstance(found, tvm_ffi.Array) or len(found) != 3:
        return None
    said, shape, dtype = found
    if said != "tvm_ipc: a large tensor":
        return None
    return LargeTensor(tuple(shape), dtype)


def tensor_over(array: np.ndarray[Any, Any]) -> Tensor:
    """Return a tensor that is the memory of a contiguous array, and keeps it."""
    memory = (ctypes.c_uint8 * array.nbytes).from_address(array.ctypes.data)
    memory.of = array  # type: ignore[attr-defined]
    # NumPy gives no tensor over what may not be written, and of few types.
    bytes_: np.ndarray[Any, Any] = np.frombuffer(memoryview(memory), np.uint8)
    tensor: Tensor = tvm_ffi.from_dlpack(bytes_)._create_view(array.shape, array.dtype.name, 0)
    return tensor
