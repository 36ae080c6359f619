# SPDX-License-Identifier: Apache-2.0
"""What is too long to be sent at once.

Calls with more than fits into a worker's pipe are gathered on the workers first, and a large tensor
of another node is fetched in pieces.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import tvm_ffi
from tvm.runtime import Tensor, empty

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


#: Bytes of a tensor that one message between nodes has, at most; a message may have 512 MB.
PIECE: Final = 32 << 20


@dataclass(frozen=True)
class LargeTensor:
    """A tensor that comes in pieces."""

    shape: tuple[int, ...]
    dtype: Any

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * int(self.dtype.itemsize)

    def joined(self, pieces: Sequence[bytes]) -> Tensor:
        """Return the tensor of which these are the bytes."""
        tensor = empty(self.shape, self.dtype)
        start = 0
        for piece in pieces:
            part = tensor._create_view((len(piece),), "uint8", start)
            part.copyfrom(np.frombuffer(piece, "uint8"))
            start += len(piece)
        return tensor


def large_tensor(found: Any) -> LargeTensor | None:
    """Return what a worker said of a tensor that it did not send; None if that is a value."""
    if not isinstance(found, tvm_ffi.Array) or len(found) != 3:
        return None
    said, shape, dtype = found
    if said != "tvm_ipc: a large tensor":
        return None
    return LargeTensor(tuple(shape), dtype)
