# SPDX-License-Identifier: Apache-2.0
"""Memory of a device that two processes use."""

from __future__ import annotations

from tests import cuda_double

HEADER = """
import os, socket, sys
from tests.cuda_double.driver_in_python import *
SIZE = 2 << 20
here, there = socket.socketpair()
# The child is forked before anybody uses CUDA.
first = os.fork() != 0
mine = here if first else there
(there if first else here).close()  # so that whoever fails is heard by the other
def send(data=b"-", descriptors=()):
    socket.send_fds(mine, [data], list(descriptors))
def hear():
    data, descriptors, _, _ = socket.recv_fds(mine, 4096, 1)
    assert data, "the other process has failed"
    return data, descriptors
def leave():
    # Both get here, or the test fails. The child leaves as a process does that was not forked.
    if first:
        assert os.wait()[1] == 0
"""


IPC = """
import ctypes
class Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * 64),)
def ipc(data):
    return Handle.from_buffer_copy(data)
def export(pointer):
    handle = Handle()
    cuda.cuIpcGetMemHandle(byref(handle), pointer)
    return bytes(handle)
def opened(data):
    pointer = c_uint64()
    cuda.cuIpcOpenMemHandle_v2(byref(pointer), ipc(data), 1)
    return pointer.value
"""


def run(code: str, **settings: object) -> cuda_double.Report:
    return cuda_double.run(HEADER + code + "\nleave()\n", **settings)[1]


def test_virtual_memory_by_a_descriptor() -> None:
    report = run(
        """
context(0 if first else 1)
memory = c_uint64()
if first:
    descriptor = c_int()
    cuda.cuMemCreate(byref(memory), SIZE, byref(Properties()), 0)
    cuda.cuMemExportToShareableHandle(byref(descriptor), memory.value, 1, 0)
    at = virtual_memory(memory.value, SIZE)
    put(at, b"from the first")
    send(b"take", [descriptor.value])
    os.close(descriptor.value)
    hear()
    assert get(at, 15) == b"from the second"
    cuda.cuMemUnmap(at, SIZE)
    cuda.cuMemAddressFree(at, SIZE)
    cuda.cuMemRelease(memory.value)
    send()
else:
    _, [descriptor] = hear()
    cuda.cuMemImportFromShareableHandle(byref(memory), c_void_p(descriptor), 1)
    os.close(descriptor)
    properties = Properties(0, 0)
    cuda.cuMemGetAllocationPropertiesFromHandle(byref(properties), memory.value)
    assert properties.device == 0 and properties.handle_types == 1
    at = virtual_memory(memory.value, SIZE, device=1)
    assert get(at, 14) == b"from the first"
    put(at, b"from the second")
    send()
    hear()
    assert get(at, 15) == b"from the second", "whoever maps it keeps it"
    cuda.cuMemUnmap(at, SIZE)
    cuda.cuMemAddressFree(at, SIZE)
    cuda.cuMemRelease(memory.value)
"""
    )
    assert report.processes == 2
    assert report.leaks == {} and report.violations == []


def test_devices_that_are_no_peers() -> None:
    run(
        IPC
        + """
context(0 if first else 1)
memory, pointer = c_uint64(), c_uint64()
if first:
    descriptor = c_int()
    cuda.cuMemCreate(byref(memory), SIZE, byref(Properties()), 0)
    cuda.cuMemExportToShareableHandle(byref(descriptor), memory.value, 1, 0)
    send(b"take", [descriptor.value])
    a = device_memory(8)
    send(export(a))
    hear()
else:
    _, [descriptor] = hear()
    cuda.cuMemImportFromShareableHandle(byref(memory), c_void_p(descriptor), 1)
    cuda.cuMemAddressReserve(byref(pointer), SIZE, 0, 0, 0)
    cuda.cuMemMap(pointer.value, SIZE, 0, memory.value, 0)
    refused(101, "cuMemSetAccess", pointer.value, SIZE, byref(Access(1)), 1)
    handle, _ = hear()
    refused(Code.NO_PEER, "cuIpcOpenMemHandle_v2", byref(pointer), ipc(handle), 1)
    send()
""",
        peers="none",
    )


def test_legacy_handles() -> None:
    report = run(
        IPC
        + """
context(0 if first else 1)
if first:
    a = device_memory(1000)
    put(a, b"from the first")
    data = export(a + 100)
    refused(Code.CONTEXT, "cuIpcOpenMemHandle_v2", byref(c_uint64()), ipc(data), 1)
    send(data)
    hear()
    assert get(a + 990, 10) == b"the second"
    send()
    hear()
    cuda.cuMemFree_v2(a)
    other = device_memory(1000)  # its file has the number that the freed one had
    send()
    hear()
    cuda.cuMemFree_v2(other)
else:
    data, _ = hear()
    refused(Code.VALUE, "cuIpcOpenMemHandle_v2", byref(c_uint64()), ipc(data), 0)
    refused(Code.VALUE, "cuIpcOpenMemHandle_v2", byref(c_uint64()), ipc(bytes(64)), 1)
    at = opened(data)
    assert get(at, 14) == b"from the first", "the base, wherever in the memory the handle was taken"
    assert opened(data) == at
    cuda.cuIpcCloseMemHandle(at)
    put(at + 990, b"the second")
    refused(Code.VALUE, "cuMemcpyHtoD_v2", at + 990, bytes(11), 11)
    send()
    hear()
    cuda.cuIpcCloseMemHandle(at)
    refused(Code.VALUE, "cuIpcCloseMemHandle", at)
    send()
    hear()
    refused(Code.VALUE, "cuIpcOpenMemHandle_v2", byref(c_uint64()), ipc(data), 1)
    send()
"""
    )
    assert report.leaks == {} and report.violations == []


def test_memory_that_is_freed_while_a_peer_maps_it() -> None:
    report = run(
        IPC
        + """
context()
if first:
    a = device_memory(1000)
    send(export(a))
    hear()
    cuda.cuMemFree_v2(a)
    send()
else:
    data, _ = hear()
    at = opened(data)
    send()
    hear()
    cuda.cuIpcCloseMemHandle(at)
"""
    )
    assert len(report.violations) == 1
    assert "still maps" in report.violations[0]


def test_an_address_of_another_process_is_none_here() -> None:
    run(
        """
context()
if first:
    a = device_memory(1000)
    send(str(a).encode())
    hear()
else:
    data, _ = hear()
    refused(Code.VALUE, "cuMemsetD8_v2", int(data), 0, 1)
    send()
"""
    )
