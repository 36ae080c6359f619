# SPDX-License-Identifier: Apache-2.0
"""The driver for programs of tests: `cuda.cuMemAlloc_v2(...)` raises unless it succeeds.

`cuda_double.run("from tests.cuda_double.driver_in_python import *; ...")` runs one.
"""

from __future__ import annotations

import ctypes
import sys
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "autoload"))

import tvm_ipc_cuda_double

__all__ = [
    "Access",
    "Code",
    "Properties",
    "byref",
    "c_int",
    "c_size_t",
    "c_uint64",
    "c_void_p",
    "context",
    "cuda",
    "device_memory",
    "event",
    "get",
    "kernels",
    "launch",
    "put",
    "refused",
    "stream",
    "virtual_memory",
]


class RefusedError(Exception):
    """A call that failed; `code` is what it returned."""

    def __init__(self, name: str, code: int, why: str) -> None:
        super().__init__(f"{name} returned {code}: {why}")
        self.code = code


class Code:
    """Errors that tests ask about."""

    VALUE, MEMORY, NOT_INITIALISED, IMAGE, CONTEXT, MAPPED, NO_BINARY, NO_PEER = (
        *(1, 2, 3, 200, 201, 208, 209, 217),
    )
    HANDLE, NOT_FOUND, NOT_READY, ADDRESS, RESOURCES, REGISTERED, NOT_REGISTERED, FAILED = (
        *(400, 500, 600, 700, 701, 712, 713, 719),
    )
    PERMITTED, SUPPORTED, CAPTURING, INVALIDATED, UNJOINED, ISOLATION, IMPLICIT, CAPTURED = (
        *(800, 801, 900, 901, 904, 905, 906, 907),
    )


class _Cuda:
    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
        self._library.tvm_ipc_double_why.restype = ctypes.c_char_p
        self._library.tvm_ipc_double_report.restype = ctypes.c_char_p

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._library, name)
        if name.startswith("tvm_ipc_double"):
            return function

        def call(*arguments: Any) -> None:
            # Handles, addresses and sizes are 64 bits wide; so is a register, for what is narrower.
            wide = [c_uint64(each) if isinstance(each, int) else each for each in arguments]
            code = function(*wide)
            if code != 0:
                raise RefusedError(name, code, self._library.tvm_ipc_double_why().decode())

        return call


cuda = _Cuda()


def refused(code: int, name: str, *arguments: Any) -> None:
    """The call has to fail with this code."""
    try:
        getattr(cuda, name)(*arguments)
    except RefusedError as error:
        assert error.code == code, error
        return
    raise AssertionError(f"{name} was not refused")


def context(device: int = 0) -> int:
    """The primary context of a device, made current."""
    cuda.cuInit(0)
    handle = c_uint64()
    cuda.cuDevicePrimaryCtxRetain(byref(handle), device)
    cuda.cuCtxSetCurrent(handle)
    return handle.value


def stream(flags: int = 0) -> int:
    """A new one; 1: it does not wait for the legacy stream."""
    handle = c_uint64()
    cuda.cuStreamCreate(byref(handle), flags)
    return handle.value


def event(flags: int = 0) -> int:
    handle = c_uint64()
    cuda.cuEventCreate(byref(handle), flags)
    return handle.value


def device_memory(size: int) -> int:
    pointer = c_uint64()
    cuda.cuMemAlloc_v2(byref(pointer), size)
    return pointer.value


def put(pointer: int, data: bytes) -> None:
    cuda.cuMemcpyHtoD_v2(pointer, ctypes.c_char_p(data), len(data))


def get(pointer: int, size: int) -> bytes:
    data = ctypes.create_string_buffer(size)
    cuda.cuMemcpyDtoH_v2(data, pointer, size)
    return data.raw


def kernels(source: str, *names: str) -> list[int]:
    """Functions of a module that is made of CUDA C."""
    image = tvm_ipc_cuda_double.compile_cuda(source)
    module = c_uint64()
    cuda.cuModuleLoadData(byref(module), ctypes.c_char_p(image))
    functions = []
    for name in names:
        function = c_uint64()
        cuda.cuModuleGetFunction(byref(function), module, ctypes.c_char_p(name.encode()))
        functions.append(function.value)
    return functions


def launch(
    function: int, grid: int, block: int, *arguments: Any, shared: int = 0, on: int = 0
) -> None:
    """Integers are pointers or 64-bit numbers."""
    values = [c_uint64(each) if isinstance(each, int) else each for each in arguments]
    pointers = (c_void_p * max(1, len(values)))(*(ctypes.addressof(value) for value in values))
    cuda.cuLaunchKernel(function, grid, 1, 1, block, 1, 1, shared, on, pointers, 0)


class Properties(ctypes.Structure):
    """Of virtual memory on a device, with handles that are descriptors."""

    _fields_ = (
        *(("type", c_int), ("handle_types", c_int), ("place", c_int), ("device", c_int)),
        *(("windows", c_void_p), ("rest", c_uint64)),
    )

    def __init__(self, device: int = 0, handle_types: int = 1) -> None:
        super().__init__(1, handle_types, 1, device)


class Access(ctypes.Structure):
    """What a device may do with it: 3 reads and writes."""

    _fields_ = (("place", c_int), ("device", c_int), ("flags", c_int))

    def __init__(self, device: int = 0, flags: int = 3) -> None:
        super().__init__(1, device, flags)


def virtual_memory(memory: int, size: int, device: int = 0) -> int:
    """The address at which memory of that handle is mapped."""
    pointer = c_uint64()
    cuda.cuMemAddressReserve(byref(pointer), size, 0, 0, 0)
    cuda.cuMemMap(pointer.value, size, 0, memory, 0)
    cuda.cuMemSetAccess(pointer.value, size, byref(Access(device)), 1)
    return pointer.value
