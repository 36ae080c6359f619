# SPDX-License-Identifier: Apache-2.0
"""The CUDA runtime that TVM has loaded, from Python: streams, graphs, events and copies.

For functions that benchmarks and tests call in workers.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import tvm_ffi

_NON_BLOCKING = 1
#: Other threads of this process may allocate while this one captures.
_THREAD_LOCAL = 1
_ON_THE_DEVICE = 3


_sessions: dict[str, threading.Barrier] = {}
_of_thread: dict[int, threading.Barrier] = {}
_lock = threading.Lock()


def share_process(session: str, ranks: int) -> None:
    """Say that the calling rank and all others of a session are threads of this process.

    With 1 it is alone there; a thread that has ended may have had its number before.
    """
    with _lock:
        barrier = _sessions.setdefault(session, threading.Barrier(ranks, timeout=60))
        _of_thread[threading.get_ident()] = barrier


def meet() -> None:
    """Wait for the other ranks, if they are threads of this process.

    Graphs of ranks that share a device wait for each other there, and what another rank does to
    the device meanwhile, such as making its graph, may wait for them: all are made first.
    """
    if barrier := _of_thread.get(threading.get_ident()):
        barrier.wait()


@functools.cache
def library() -> ctypes.CDLL:
    return ctypes.CDLL("libcudart.so.13")


def cuda(name: str, *arguments: Any) -> None:
    """Call a function of the CUDA runtime; raise what it says."""
    code = getattr(library(), f"cuda{name}")(*arguments)
    if code:
        describe = library().cudaGetErrorString
        describe.restype = ctypes.c_char_p
        raise RuntimeError(f"cuda{name}: {describe(code).decode()} ({code})")


@dataclass(frozen=True)
class Stream:
    """A stream that does not wait for the default one."""

    device: Any
    handle: ctypes.c_void_p

    def wait(self) -> None:
        cuda("StreamSynchronize", self.handle)

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """What this thread calls meanwhile works on it."""
        with tvm_ffi.use_raw_stream(self.device, self.handle.value or 0):
            yield

    def copy(self, target: int, source: int, size: int) -> None:
        """Copy bytes between addresses of the device."""
        to, from_ = ctypes.c_void_p(target), ctypes.c_void_p(source)
        cuda("MemcpyAsync", to, from_, ctypes.c_size_t(size), _ON_THE_DEVICE, self.handle)


@contextlib.contextmanager
def new_stream(device: Any) -> Iterator[Stream]:
    """A stream of a device, which is waited for at the end."""
    handle = ctypes.c_void_p()
    cuda("SetDevice", device.index)
    cuda("StreamCreateWithFlags", ctypes.byref(handle), _NON_BLOCKING)
    stream = Stream(device, handle)
    try:
        yield stream
        stream.wait()
    finally:
        cuda("StreamDestroy", handle)


class Graph:
    """What is called on a stream in the `with` block, to be launched again and again."""

    def __init__(self, stream: Stream) -> None:
        self._stream, self._graph, self._made = stream, ctypes.c_void_p(), ctypes.c_void_p()

    def __enter__(self) -> Graph:
        cuda("StreamBeginCapture", self._stream.handle, _THREAD_LOCAL)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        code = library().cudaStreamEndCapture(self._stream.handle, ctypes.byref(self._graph))
        if kind is not None:
            library().cudaGetLastError()  # a capture that failed is no error of what comes next
            return
        if code:
            raise RuntimeError(f"cudaStreamEndCapture: {code}")
        cuda("GraphInstantiate", ctypes.byref(self._made), self._graph, ctypes.c_ulonglong(0))

    def launch(self, stream: Stream | None = None) -> None:
        """On another stream, or on the one where it was captured."""
        cuda("GraphLaunch", self._made, (stream or self._stream).handle)

    def end(self) -> None:
        cuda("GraphExecDestroy", self._made)
        cuda("GraphDestroy", self._graph)


class Clock:
    """Seconds between two places of a stream, by the device's own clock."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._events = ctypes.c_void_p(), ctypes.c_void_p()
        for event in self._events:
            cuda("EventCreate", ctypes.byref(event))

    def start(self) -> None:
        cuda("EventRecord", self._events[0], self._stream.handle)

    def stop(self) -> None:
        cuda("EventRecord", self._events[1], self._stream.handle)

    def seconds(self) -> float:
        """Wait for the end, and tell."""
        milliseconds = ctypes.c_float()
        cuda("EventSynchronize", self._events[1])
        cuda("EventElapsedTime", ctypes.byref(milliseconds), *self._events)
        return milliseconds.value * 1e-3

    def end(self) -> None:
        for event in self._events:
            cuda("EventDestroy", event)
