# SPDX-License-Identifier: Apache-2.0
"""The double refuses what a driver refuses."""

from __future__ import annotations

import pytest

from tests import cuda_double

HEADER = """
import sys
from tests.cuda_double.driver_in_python import *
"""


def run(code: str, **settings: object) -> cuda_double.Report:
    return cuda_double.run(HEADER + code, **settings)[1]


def test_before_a_context() -> None:
    run(
        """
count, pointer = c_int(), c_uint64()
refused(Code.NOT_INITIALISED, "cuDeviceGetCount", byref(count))
cuda.cuInit(0)
cuda.cuDeviceGetCount(byref(count))
assert count.value == 3
refused(Code.CONTEXT, "cuMemAlloc_v2", byref(pointer), 16)
refused(101, "cuDevicePrimaryCtxRetain", byref(pointer), 3)
""",
        devices=3,
    )


def test_a_child_of_a_fork_has_no_driver() -> None:
    run(
        """
import os
context()
child = os.fork()
if child == 0:
    refused(Code.NOT_INITIALISED, "cuInit", 0)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
    )


def test_memory() -> None:
    report = run(
        """
context()
pointer = c_uint64()
refused(Code.VALUE, "cuMemAlloc_v2", byref(pointer), 0)
refused(Code.MEMORY, "cuMemAlloc_v2", byref(pointer), 1 << 30)
a = device_memory(1000)
assert a % 256 == 0 and get(a, 4) == b"\\xff" * 4, "fresh memory is NaN"
put(a, bytes(1000))
refused(Code.VALUE, "cuMemcpyHtoD_v2", a, bytes(1001), 1001)
refused(Code.VALUE, "cuMemcpyDtoH_v2", (c_int * 9)(), a + 990, 11)
refused(Code.VALUE, "cuMemsetD32_v2", a + 2, 0, 1)
refused(Code.VALUE, "cuMemFree_v2", a + 4)
base, size = c_uint64(), c_size_t()
cuda.cuMemGetAddressRange_v2(byref(base), byref(size), a + 77)
assert (base.value, size.value) == (a, 1000)
cuda.cuMemFree_v2(a)
refused(Code.VALUE, "cuMemFree_v2", a)
refused(Code.VALUE, "cuMemcpyHtoD_v2", a, bytes(4), 4)
refused(Code.VALUE, "cuMemsetD8_v2", a, 0, 1)
assert device_memory(1000) != a, "addresses are not used again"
free, total = c_size_t(), c_size_t()
cuda.cuMemGetInfo_v2(byref(free), byref(total))
assert total.value == 1 << 20 and free.value == total.value - 4096
""",
        memory=1 << 20,
    )
    assert report.leaks == {"allocation": 1}


def test_memory_of_the_host() -> None:
    report = run(
        """
import mmap
context()
pointer = c_uint64()
pages = mmap.mmap(-1, 8192)
here = __import__("ctypes").addressof(c_int.from_buffer(pages))
refused(Code.VALUE, "cuMemHostGetDevicePointer_v2", byref(pointer), here, 0)
cuda.cuMemHostRegister_v2(here, 8192, 0)
refused(Code.REGISTERED, "cuMemHostRegister_v2", here + 4096, 4096, 0)
cuda.cuMemHostGetDevicePointer_v2(byref(pointer), here + 8, 0)
assert pointer.value == here + 8
cuda.cuMemHostUnregister(here)
refused(Code.NOT_REGISTERED, "cuMemHostUnregister", here)
refused(Code.VALUE, "cuMemHostRegister_v2", 1 << 30, 4096, 0)
cuda.cuMemHostAlloc(byref(pointer), 100, 0)
refused(Code.VALUE, "cuMemFreeHost", pointer.value + 8)
cuda.cuMemFreeHost(pointer.value)
"""
    )
    assert report.leaks == {}


def test_virtual_memory() -> None:
    report = run(
        """
context()
size, handle, pointer = 4 << 20, c_uint64(), c_uint64()
granularity = c_size_t()
cuda.cuMemGetAllocationGranularity(byref(granularity), byref(Properties()), 0)
assert granularity.value == 2 << 20
refused(Code.VALUE, "cuMemCreate", byref(handle), 4096, byref(Properties()), 0)
refused(Code.VALUE, "cuMemAddressReserve", byref(pointer), 4096, 0, 0, 0)
cuda.cuMemCreate(byref(handle), size, byref(Properties()), 0)
cuda.cuMemAddressReserve(byref(pointer), size, 0, 0, 0)
at = pointer.value
refused(Code.VALUE, "cuMemSetAccess", at, size, byref(Access()), 1)
refused(Code.VALUE, "cuMemMap", at + (2 << 20), size, 0, handle.value, 0)
refused(Code.VALUE, "cuMemMap", at, size, 2 << 20, handle.value, 0)
cuda.cuMemMap(at, size, 0, handle.value, 0)
refused(Code.MAPPED, "cuMemMap", at, size, 0, handle.value, 0)
refused(Code.VALUE, "cuMemsetD8_v2", at, 0, size)  # no access yet
cuda.cuMemSetAccess(at, size, byref(Access()), 1)
cuda.cuMemsetD8_v2(at, 7, size)
assert get(at + size - 2, 2) == b"\\7\\7"
refused(Code.VALUE, "cuMemUnmap", at, 2 << 20)
refused(Code.VALUE, "cuMemAddressFree", at, size)
cuda.cuMemRelease(handle.value)
refused(Code.VALUE, "cuMemRelease", handle.value)
assert get(at, 1) == b"\\7", "what is mapped lives on"
cuda.cuMemUnmap(at, size)
cuda.cuMemAddressFree(at, size)
refused(Code.VALUE, "cuMemAddressFree", at, size)
free, total = c_size_t(), c_size_t()
cuda.cuMemGetInfo_v2(byref(free), byref(total))
assert free.value == total.value
plain = c_uint64()
cuda.cuMemCreate(byref(plain), size, byref(Properties(handle_types=0)), 0)
refused(Code.VALUE, "cuMemExportToShareableHandle", byref(c_int()), plain.value, 1, 0)
refused(Code.VALUE, "cuMemImportFromShareableHandle", byref(handle), c_void_p(0), 1)
cuda.cuMemRelease(plain.value)
"""
    )
    assert report.leaks == {}


def test_devices_without_virtual_memory_or_peers() -> None:
    run(
        """
context()
handle, can = c_uint64(), c_int()
refused(Code.SUPPORTED, "cuMemCreate", byref(handle), 2 << 20, byref(Properties()), 0)
found = []
for one in range(3):
    for other in range(3):
        cuda.cuDeviceCanAccessPeer(byref(can), one, other)
        found.append(can.value)
assert found == [0, 1, 0, 1, 0, 0, 0, 0, 0], found
second, third = context(1), context(2)
context(0)
cuda.cuCtxEnablePeerAccess(second, 0)
refused(704, "cuCtxEnablePeerAccess", second, 0)
refused(Code.NO_PEER, "cuCtxEnablePeerAccess", third, 0)
""",
        devices=3,
        peers="0-1",
        attributes="102=0",
    )


def test_streams_events_and_functions() -> None:
    report = run(
        """
context(1)
there = stream()
there_event = event()
context(0)
source = 'extern "C" __global__ void __launch_bounds__(64) nothing(int* p) {}'
[nothing] = kernels(source, "nothing")
launch(nothing, 1, 64, 0)
refused_launch = lambda code, *a, **k: refused(code, "cuLaunchKernel", *a, **k)
arguments = (c_void_p * 1)(__import__("ctypes").addressof(c_uint64(0)))
refused_launch(Code.HANDLE, nothing, 1, 1, 1, 32, 1, 1, 0, there, arguments, 0)
refused_launch(Code.RESOURCES, nothing, 1, 1, 1, 65, 1, 1, 0, 0, arguments, 0)
refused_launch(Code.VALUE, nothing, 1, 1, 1, 1025, 1, 1, 0, 0, arguments, 0)
refused_launch(Code.VALUE, nothing, 0, 1, 1, 32, 1, 1, 0, 0, arguments, 0)
refused_launch(Code.VALUE, nothing, 1, 65536, 1, 32, 1, 1, 0, 0, arguments, 0)
refused_launch(Code.VALUE, nothing, 1, 1, 1, 32, 1, 1, 50000, 0, arguments, 0)
refused_launch(Code.VALUE, nothing, 1, 1, 1, 32, 1, 1, 0, 0, 0, 0)
cuda.cuFuncSetAttribute(nothing, 8, 60000)
launch(nothing, 1, 32, 0, shared=50000)
refused(Code.VALUE, "cuFuncSetAttribute", nothing, 8, 240000)
mine = stream()
cuda.cuStreamDestroy_v2(mine)
refused(Code.HANDLE, "cuStreamDestroy_v2", mine)
refused(Code.HANDLE, "cuEventRecord", there_event, 0)
refused(Code.HANDLE, "cuEventQuery", 12345)
refused(Code.IMAGE, "cuModuleLoadData", byref(c_uint64()), b"something else")
refused(Code.NO_BINARY, "cuModuleLoadData", byref(c_uint64()), b".version 8.0\\n.target sm_80")
""",
        kernels="",
    )
    assert report.leaks == {"stream": 1, "event": 1, "module": 1}


def test_failures_that_tests_ask_for() -> None:
    report = run(
        """
context()
a, pointer = device_memory(16), c_uint64()
refused(Code.MEMORY, "cuMemAlloc_v2", byref(pointer), 16)
device_memory(16)
refused(999, "cuStreamCreate", byref(pointer), 0)
refused(999, "cuStreamCreate", byref(pointer), 0)
cuda.tvm_ipc_double_fail(b"cuMemFree:1=700")
stream()
refused(Code.ADDRESS, "cuMemFree_v2", a)
cuda.cuMemFree_v2(a)
""",
        fail="cuMemAlloc:2=2,cuStreamCreate:0",
    )
    assert report.calls["cuMemFree"] == 2


def test_writing_behind_an_allocation_is_noticed() -> None:
    report = run(
        """
context()
[write] = kernels('extern "C" __global__ void write(char* p) { *p = 1; }', "write")
a = device_memory(1000)
launch(write, 1, 1, a + 1001)
cuda.cuMemFree_v2(a)
"""
    )
    assert len(report.violations) == 1
    assert "behind an allocation of 1000 bytes" in report.violations[0]


@pytest.mark.parametrize("where", ["a + 1024", "a + 4096", "0", "freed", "unmapped"])
def test_a_kernel_that_touches_what_is_not_there(where: str) -> None:
    run(
        f"""
context()
[write] = kernels('extern "C" __global__ void write(char* p) {{ *p = 1; }}', "write")
a, freed, mine = device_memory(1000), device_memory(8), stream()
cuda.cuMemFree_v2(freed)
handle = c_uint64()
cuda.cuMemCreate(byref(handle), 2 << 20, byref(Properties()), 0)
unmapped = virtual_memory(handle.value, 2 << 20)
launch(write, 1, 1, unmapped, on=mine)
cuda.cuStreamSynchronize(mine)
cuda.cuMemUnmap(unmapped, 2 << 20)
launch(write, 1, 1, {where}, on=mine)
refused(Code.ADDRESS, "cuStreamSynchronize", mine)
refused(Code.ADDRESS, "cuMemAlloc_v2", byref(c_uint64()), 8)
context(1)
device_memory(8)
"""
    )


def test_our_kernels_serve_images_for_gpus() -> None:
    """A kernel has to be in the image, and in the library for the CPU."""
    run(
        """
context()
module, function = c_uint64(), c_uint64()
image = b".version 8.0\\n.target sm_80\\n.entry tvm_ipc_move .entry tvm_ipc_strange"
cuda.cuModuleLoadData(byref(module), image)
cuda.cuModuleGetFunction(byref(function), module, b"tvm_ipc_move")
threads = c_int()
cuda.cuFuncGetAttribute(byref(threads), 0, function)
assert threads.value >= 32
for name in (b"tvm_ipc_strange", b"tvm_ipc_barrier"):
    refused(Code.NOT_FOUND, "cuModuleGetFunction", byref(function), module.value, name)
"""
    )


def test_a_host_that_touches_memory_of_a_device() -> None:
    program = """
import ctypes
context()
a, mine = device_memory(64), stream(1)
put(a, bytes(64))
print("so far", get(a, 2), flush=True)
cuda.cuMemFree_v2(device_memory(8))
ctypes.string_at(a, 4)
print("and on")
"""
    with pytest.raises(
        AssertionError, match=r"(?s)exit status -11.*so far.*the host touches memory"
    ):
        run(program, guard=1)
    run(program)
