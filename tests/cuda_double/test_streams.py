# SPDX-License-Identifier: Apache-2.0
"""Streams are asynchronous: what nobody waited for has not happened."""

from __future__ import annotations

import pytest

from tests import cuda_double

HEADER = """
import sys, time
from tests.cuda_double.driver_in_python import *
context()
# `hold` runs until the host, or a copy, sets `gate`.
hold, add, copy = kernels('''
extern "C" __global__ void hold(volatile int* gate) { while (*gate == 0) __nanosleep(100); }
extern "C" __global__ void add(int* at, int value) { *at += value; }
extern "C" __global__ void copy(int* to, int* from) { *to = *from; }
''', "hold", "add", "copy")
pinned = c_uint64()
cuda.cuMemHostAlloc(byref(pinned), 64, 0)
host = (c_int * 16).from_address(pinned.value)
host[:] = [0] * 16
gate = pinned.value
def number(pointer):
    return int.from_bytes(get(pointer, 4), "little")
a, b = device_memory(4), device_memory(4)
put(a, bytes(4))
put(b, bytes(4))
def busy(stream):
    try:
        cuda.cuStreamQuery(stream)
    except Exception as error:
        assert error.code == Code.NOT_READY, error
        return True
    return False
"""


def run(code: str, **settings: object) -> cuda_double.Report:
    report = cuda_double.run(HEADER + code, **settings)[1]
    assert not report.violations
    return report


def test_a_launch_does_not_wait_and_a_missing_wait_shows() -> None:
    run(
        """
mine = stream(1)
launch(hold, 1, 1, gate, on=mine)
launch(add, 1, 1, a, c_int(5), on=mine)
cuda.cuMemcpyDtoHAsync_v2(c_void_p(pinned.value + 8), a, 4, mine)
assert busy(mine) and host[2] == 0, "nobody waited"
host[0] = 1
cuda.cuStreamSynchronize(mine)
assert not busy(mine) and host[2] == 5
"""
    )


def test_arguments_and_pageable_memory_are_taken_at_the_call() -> None:
    run(
        """
import ctypes
mine, value = stream(1), c_int(3)
launch(hold, 1, 1, gate, on=mine)
launch(add, 1, 1, a, value, on=mine)
value.value = 100
source = ctypes.create_string_buffer((7).to_bytes(4, "little"), 4)
cuda.cuMemcpyHtoDAsync_v2(b, source, 4, mine)
source.raw = bytes(4)
host[4] = 1
cuda.cuMemcpyHtoDAsync_v2(b, c_void_p(pinned.value + 16), 4, mine)
host[4] = 9  # pinned memory is read when the stream comes to it
host[0] = 1
cuda.cuStreamSynchronize(mine)
assert number(a) == 3 and number(b) == 9
"""
    )


def test_a_stream_waits_for_an_event_alone() -> None:
    run(
        """
first, second, done = stream(1), stream(1), event(2)
launch(hold, 1, 1, gate, on=first)
launch(add, 1, 1, a, c_int(5), on=first)
cuda.cuEventRecord(done, first)
launch(copy, 1, 1, b, a, on=second)
cuda.cuStreamSynchronize(second)
host[2] = 1
cuda.cuMemcpyHtoDAsync_v2(b, c_void_p(pinned.value + 8), 4, second)
cuda.cuStreamWaitEvent(second, done, 0)
launch(copy, 1, 1, b, a, on=second)
assert busy(second)
refused(Code.NOT_READY, "cuEventQuery", done)
host[0] = 1
cuda.cuStreamSynchronize(second)
cuda.cuEventQuery(done)
assert number(b) == 5
"""
    )


@pytest.mark.parametrize("flags", [0, 1])
def test_the_legacy_stream(flags: int) -> None:
    run(
        f"""
mine = stream({flags})
launch(hold, 1, 1, gate, on=mine)
launch(add, 1, 1, a, c_int(5))
time.sleep(0.02)
assert busy(0) == ({flags} == 0), "it waits for blocking streams alone"
host[0] = 1
cuda.cuCtxSynchronize()
host[0] = 0
launch(hold, 1, 1, gate)
launch(add, 1, 1, b, c_int(5), on=mine)
time.sleep(0.02)
assert busy(mine) == ({flags} == 0), "and they for it"
host[0] = 1
cuda.cuCtxSynchronize()
assert number(a) == 5 and number(b) == 5
"""
    )


def test_freeing_memory_and_loading_modules_wait_for_the_device() -> None:
    run(
        """
import threading
for call in (lambda: cuda.cuMemFree_v2(b), lambda: kernels("")):
    host[0] = 0
    mine = stream(1)
    launch(hold, 1, 1, gate, on=mine)
    def wait():
        context()
        call()
    thread = threading.Thread(target=wait)
    thread.start()
    thread.join(0.5)
    assert thread.is_alive()
    host[0] = 1
    thread.join()
"""
    )


def test_delays_shake_what_is_not_ordered() -> None:
    run(
        """
seen = set()
for _ in range(60):
    first, second = stream(1), stream(1)
    put(a, bytes(4))
    launch(add, 1, 1, a, c_int(1), on=first)
    launch(copy, 1, 1, b, a, on=second)
    cuda.cuCtxSynchronize()
    seen.add(number(b))
    cuda.cuStreamDestroy_v2(first)
    cuda.cuStreamDestroy_v2(second)
assert seen == {0, 1}, seen
""",
        delay="3:1000",
    )


@pytest.mark.parametrize(
    "call", ["cuStreamSynchronize(mine)", "cuStreamQuery(mine)", "cuEventRecord(event(2), mine)"]
)
def test_use_of_a_destroyed_stream_crashes_as_in_a_driver(call: str) -> None:
    with pytest.raises(AssertionError, match=r"exit status -6\n\n.*stream 0x\w+ .* destroyed"):
        run(f"mine = stream(1); cuda.cuStreamDestroy_v2(mine); cuda.{call}")


def test_host_functions() -> None:
    run(
        """
import ctypes
codes = []
@ctypes.CFUNCTYPE(None, c_void_p)
def call(data):
    codes.append(cuda._library.cuCtxSynchronize())
cuda.cuLaunchHostFunc(0, call, 0)
cuda.cuCtxSynchronize()
assert codes == [Code.PERMITTED]
"""
    )


def test_captures() -> None:
    report = run(
        """
mine, other, fork, join = stream(1), stream(1), event(2), event(2)
graph, runs = c_uint64(), c_uint64()
cuda.cuStreamBeginCapture_v2(mine, 0)
launch(add, 1, 1, a, c_int(5), on=mine)
cuda.cuEventRecord(fork, mine)
cuda.cuStreamWaitEvent(other, fork, 0)
launch(copy, 1, 1, b, a, on=other)
cuda.cuEventRecord(join, other)
cuda.cuStreamWaitEvent(mine, join, 0)
cuda.cuStreamEndCapture(mine, byref(graph))
assert number(a) == 0, "what is captured does not run"
cuda.cuGraphInstantiateWithFlags(byref(runs), graph, 0)
cuda.cuGraphDestroy(graph.value)
for times in (1, 2, 3):
    cuda.cuGraphLaunch(runs, mine)
    cuda.cuStreamSynchronize(mine)
    assert number(b) == 5 * times
cuda.cuGraphExecDestroy(runs.value)
refused(Code.VALUE, "cuGraphLaunch", runs.value, mine)
"""
    )
    assert "graph" not in report.leaks and "graph to launch" not in report.leaks


@pytest.mark.parametrize(
    ("code", "call"),
    [
        (900, '"cuMemAlloc_v2", byref(c_uint64()), 8'),
        (900, '"cuMemFree_v2", b'),
        (900, '"cuStreamSynchronize", mine'),
        (900, '"cuCtxSynchronize"'),
        (900, '"cuMemHostRegister_v2", c_void_p(gate), 8, 0'),
        (900, '"cuEventQuery", recorded'),
        (900, '"cuMemcpyDtoH_v2", (c_int * 1)(), a, 4'),
        (905, '"cuStreamWaitEvent", mine, recorded, 0'),
    ],
)
def test_what_a_capture_forbids_ends_it(code: int, call: str) -> None:
    run(
        f"""
mine, recorded = stream(1), event(2)
launch(hold, 1, 1, gate)
cuda.cuEventRecord(recorded, 0)
cuda.cuStreamBeginCapture_v2(mine, 0)
refused({code}, {call})
refused(Code.INVALIDATED, "cuStreamEndCapture", mine, byref(c_uint64()))
host[0] = 1
cuda.cuCtxSynchronize()
"""
    )


def test_captures_that_end_badly() -> None:
    run(
        """
mine, other, fork = stream(1), stream(1), event(2)
refused(Code.CAPTURING, "cuStreamBeginCapture_v2", 0, 0)
cuda.cuStreamBeginCapture_v2(mine, 0)
cuda.cuEventRecord(fork, mine)
cuda.cuStreamWaitEvent(other, fork, 0)
launch(add, 1, 1, a, c_int(5), on=other)
refused(903, "cuStreamEndCapture", other, byref(c_uint64()))
refused(Code.UNJOINED, "cuStreamEndCapture", mine, byref(c_uint64()))
blocking = stream(0)
cuda.cuStreamBeginCapture_v2(blocking, 2)
refused(Code.IMPLICIT, "cuLaunchKernel", add, 1, 1, 1, 1, 1, 1, 0, 0,
        (c_void_p * 2)(pinned.value, pinned.value), 0)
refused(Code.INVALIDATED, "cuStreamEndCapture", blocking, byref(c_uint64()))
cuda.cuStreamBeginCapture_v2(blocking, 2)
refused(Code.IMPLICIT, "cuStreamSynchronize", 0)
refused(Code.INVALIDATED, "cuStreamEndCapture", blocking, byref(c_uint64()))
# In relaxed mode memory may be allocated; nobody waits for the device in any.
cuda.cuStreamBeginCapture_v2(mine, 2)
device_memory(8)
cuda.cuStreamSynchronize(0)
refused(Code.CAPTURING, "cuCtxSynchronize")
refused(Code.INVALIDATED, "cuStreamEndCapture", mine, byref(c_uint64()))
"""
    )


def test_a_thread_that_does_not_care_for_captures() -> None:
    run(
        """
mine, mode, graph = stream(1), c_int(2), c_uint64()
cuda.cuStreamBeginCapture_v2(mine, 0)
cuda.cuThreadExchangeStreamCaptureMode(byref(mode))
assert mode.value == 0
device_memory(8)
cuda.cuThreadExchangeStreamCaptureMode(byref(mode))
assert mode.value == 2
cuda.cuStreamEndCapture(mine, byref(graph))
"""
    )
