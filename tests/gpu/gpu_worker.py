# SPDX-License-Identifier: Apache-2.0
"""Functions that tests of GPUs call in workers: collectives on streams, and in CUDA graphs.

They drive the CUDA runtime that TVM has loaded, and check their results themselves.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import collective_cases as cases
import numpy as np
import places
import tvm_ffi
from collective_cases import Array, Case
from collective_worker import Memory
from tvm_ffi import get_global_func, register_global_func

from tvm_ipc.contract import AllReduceStrategy, CollectiveFlag, ReduceKind, Team

_NON_BLOCKING = 1
#: Other threads of this process may allocate meanwhile.
_THREAD_LOCAL = 1


def register(function: Callable[..., Any]) -> Callable[..., Any]:
    return register_global_func(f"tests.gpu.{function.__name__}", function, override=True)


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL("libcudart.so.13")


def cuda(name: str, *arguments: Any) -> None:
    """Call a function of the CUDA runtime."""
    code = getattr(_library(), f"cuda{name}")(*arguments)
    if code:
        describe = _library().cudaGetErrorString
        describe.restype = ctypes.c_char_p
        raise RuntimeError(f"cuda{name}: {describe(code).decode()} ({code})")


@dataclass(frozen=True)
class Stream:
    """A stream of the calling worker's device, which does not wait for the default one."""

    handle: ctypes.c_void_p

    def wait(self) -> None:
        cuda("StreamSynchronize", self.handle)

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """What is called meanwhile works on it."""
        with tvm_ffi.use_raw_stream(places.here(), self.handle.value or 0):
            yield


@contextlib.contextmanager
def new_stream() -> Iterator[Stream]:
    handle = ctypes.c_void_p()
    cuda("SetDevice", places.here().index)
    cuda("StreamCreateWithFlags", ctypes.byref(handle), _NON_BLOCKING)
    stream = Stream(handle)
    try:
        yield stream
        stream.wait()
    finally:
        cuda("StreamDestroy", handle)


class Graph:
    """What is called in the `with` block, to be launched again and again."""

    def __init__(self, stream: Stream) -> None:
        self._stream, self._graph, self._made = stream, ctypes.c_void_p(), ctypes.c_void_p()

    def __enter__(self) -> Graph:
        cuda("StreamBeginCapture", self._stream.handle, _THREAD_LOCAL)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        code = _library().cudaStreamEndCapture(self._stream.handle, ctypes.byref(self._graph))
        if kind is not None:
            _library().cudaGetLastError()  # a capture that failed is no error of what comes next
            return
        assert code == 0, f"cudaStreamEndCapture: {code}"
        cuda("GraphInstantiate", ctypes.byref(self._made), self._graph, ctypes.c_ulonglong(0))

    def launch(self) -> None:
        cuda("GraphLaunch", self._made, self._stream.handle)

    def end(self) -> None:
        cuda("GraphExecDestroy", self._made)
        cuda("GraphDestroy", self._graph)


class AllReduce:
    """An all-reduce of a worker, whose inputs are new in every round."""

    def __init__(self, case: Case, in_place: bool = False) -> None:
        self.case = case
        self.rank = int(get_global_func("runtime.disco.worker_rank")())
        self.size = int(get_global_func("runtime.disco.world_size")())
        self.send = Memory(case.memory == "arena", case.dtype, case.count, case.offset)
        self.recv = self.send
        if not in_place:
            self.recv = Memory(case.memory != "arena", case.dtype, case.count, case.offset)

    def fill(self, round_: int) -> None:
        self.case = replace(self.case, round=round_)
        self.send.write(cases.inputs(self.case, self.size, 0)[self.rank])
        if self.recv is not self.send:
            self.recv.write(np.zeros(self.case.count, cases.numpy_type(self.case.dtype)))

    def call(self) -> None:
        case = self.case
        get_global_func("tvm_ipc.allreduce")(
            *(self.send.part(0, case.count), case.kind, int(Team.WORLD), case.strategy),
            *(case.flags, self.recv.part(0, case.count)),
        )

    def check(self) -> Array:
        """What is there when the stream has been waited for."""
        wanted = cases.expected(self.case, self.size, 0, self.rank)
        result = self.recv.read()
        assert wanted is not None
        assert cases.same(result, wanted), f"{self.case}, rank {self.rank}: wrong values"
        return result


def case_of(count: int, dtype: str, strategy: int, memory: str) -> Case:
    kind = int(ReduceKind.SUM)
    return Case("allreduce", count, dtype, kind, strategy, int(CollectiveFlag.NONE), memory)


@register
def replays(counts: Any, dtype: str, strategy: int, memory: str, rounds: int) -> None:
    """Capture all-reduces of these sizes in one graph; replay it, with and without others between.

    What memory they need is there after they were called once.
    """
    with new_stream() as stream, stream.current():
        calls = [AllReduce(case_of(int(n), dtype, strategy, memory)) for n in counts]
        for call in calls:
            call.fill(0)
            call.call()
        stream.wait()
        with Graph(stream) as graph:
            for call in calls:
                call.call()
        for round_ in range(rounds):
            for call in calls:
                call.fill(round_)
            graph.launch()
            stream.wait()
            for call in calls:
                call.check()
            if round_ % 3 == 1:  # the next one finds another number of operations behind it
                calls[0].fill(round_)
                calls[0].call()
                stream.wait()
                calls[0].check()
        for _ in range(rounds):
            graph.launch()
        stream.wait()
        for call in calls:
            call.check()
        graph.end()


@register
def takes_turns_on_streams(count: int, dtype: str, rounds: int) -> None:
    """Use a team on two streams, of which nobody waits for the other: the sum of sums."""
    with new_stream() as first, new_stream() as second:
        case = case_of(count, dtype, int(AllReduceStrategy.AUTO), "private")
        calls = [AllReduce(case), AllReduce(replace(case, operation="allreduce"))]
        for round_ in range(rounds):
            for call in calls:
                call.fill(2 * round_ + calls.index(call))
            with first.current():
                calls[0].call()
            with second.current():
                calls[1].call()
            first.wait()
            second.wait()
            for call in calls:
                call.check()


@register
def captures_after_another_stream(count: int) -> str:
    """Use a team on one stream and capture it on another one; return the error."""
    with new_stream() as first, new_stream() as second:
        call = AllReduce(case_of(count, "float32", int(AllReduceStrategy.AUTO), "private"))
        call.fill(0)
        with first.current():
            call.call()
        message = ""
        with second.current():
            try:
                with Graph(second):
                    call.call()
            except Exception as error:
                message = str(error)
        first.wait()
        call.check()
        return message


@register
def digest_of_cases(counts: Any, dtype: str, kind: int, strategy: int) -> bytes:
    """All bits of the results of all-reduces, on whatever device the worker has."""
    found = b""
    for count in counts:
        case = replace(case_of(int(count), dtype, strategy, "private"), kind=kind)
        call = AllReduce(case)
        call.fill(1)
        call.call()
        places.settle()
        found += call.check().tobytes()
    return found
