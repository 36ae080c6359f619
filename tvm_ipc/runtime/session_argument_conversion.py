# SPDX-License-Identifier: Apache-2.0
"""Convert the arguments of session methods: arrays, devices, element types and references."""

from __future__ import annotations

import math
from typing import Any, Final

import ml_dtypes  # noqa: F401  registers bfloat16 and others with NumPy
import numpy as np
import tvm
import tvm_ffi
from tvm.runtime import Tensor, disco
from tvm.runtime import tensor as as_tensor

from tvm_ipc import arguments
from tvm_ipc.runtime.oversized_calls_and_tensors import READ_IN_PLACE, tensor_over
from tvm_ipc.runtime.references import DRef

_DTYPE: Final = "an element type, such as 'float32' or a NumPy dtype"
_DEVICE: Final = "a device, such as tvm.cpu() or 'cpu', or None for the worker's own"
_ARRAY: Final = "an array of numbers"
_REFERENCE: Final = (
    "a reference to a value on the workers, which put, scatter, empty and calls return"
)
#: The sizes of element types, in bits.
_BITS: Final = (1, 2, 4, 6, 8, 16, 32, 64)


def host_tensor(name: str, value: object) -> Tensor:
    """Return an array of the controller as a tensor; only a small array is copied."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, disco.DRef):
        raise arguments.wrong_type(
            name, "an array of the controller, which session.get returns of a reference", value
        )
    if isinstance(value, (list, tuple)) and any(isinstance(one, disco.DRef) for one in value):
        raise arguments.wrong_type(
            name, f"{_ARRAY}; session.tuple makes a tuple of references", value
        )
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        raise ValueError(
            f"{name} has masked elements, which tensors do not have; pass array.filled(number)"
        )
    try:
        array = np.asarray(value, order="C")
        array = array.astype(array.dtype.newbyteorder("="), copy=False)
        tensor = tensor_over(array) if array.nbytes > READ_IN_PLACE else as_tensor(array)
    except Exception as error:
        raise TypeError(f"{name} is {_ARRAY}, not {arguments.quote(value)}: {error}") from error
    if tvm_ffi.dtype(tensor.dtype).bits not in _BITS:
        expected = f"{_ARRAY} of a type that workers know"
        raise arguments.wrong_type(name, expected, value)
    return tensor


def bytes_of(tensor: Tensor) -> int:
    """Return the size of a tensor in bytes."""
    size: int = math.prod(tensor.shape) * tvm_ffi.dtype(tensor.dtype).itemsize
    return size


def as_device(name: str, device: Any) -> Any:
    """Return a device from a device or its name; None stands for the worker's own."""
    if device is None or isinstance(device, tvm_ffi.core.Device):
        return device
    if not isinstance(device, str):
        raise arguments.wrong_type(name, _DEVICE, device)
    try:
        return tvm.runtime.device(device)
    except (RuntimeError, ValueError):
        raise arguments.wrong_value(name, _DEVICE, device) from None


def as_dtype(name: str, dtype: Any) -> Any:
    """Return an element type, from its name, a NumPy dtype or a type such as np.float32."""
    try:
        if isinstance(dtype, type):
            dtype = np.dtype(dtype)
        converted = tvm_ffi.dtype(dtype)
    except (TypeError, ValueError):
        converted = None
    if converted is not None and converted.bits in _BITS:
        return converted
    make_error = arguments.wrong_value if isinstance(dtype, str) else arguments.wrong_type
    raise make_error(name, _DTYPE, dtype)


def check_reference(name: str, value: object) -> object:
    """Return a reference; any other value is an error."""
    arguments.instance(name, value, disco.DRef, _REFERENCE)
    return value


def target_of(name: str, value: DRef | None) -> DRef | None:
    """Return the reference for a result; None stands for a new tensor."""
    if value is not None:
        check_reference(name, value)
    return value
