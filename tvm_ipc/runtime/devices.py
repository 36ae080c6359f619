# SPDX-License-Identifier: Apache-2.0
"""The devices of workers, as callers give them."""

from __future__ import annotations

import tvm_ffi

from tvm_ipc import arguments


def of_workers(where: str, num_workers: int, ids: object) -> tvm_ffi.Shape:
    """Return the device of each worker."""
    if ids is None:
        return tvm_ffi.Shape(range(num_workers))
    name, wanted = f"{where}: device_ids", f"{num_workers} numbers of devices, one for each worker"
    given = numbers(name, ids, wanted)
    if len(given) != num_workers:
        raise arguments.wrong_value(name, wanted, ids)
    return given


def numbers(name: str, value: object, wanted: str) -> tvm_ffi.Shape:
    """Return numbers of devices, however many they are."""
    return tvm_ffi.Shape(arguments.integers(name, value, wanted, 0, (1 << 31) - 1))
