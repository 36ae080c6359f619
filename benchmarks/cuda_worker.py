# SPDX-License-Identifier: Apache-2.0
"""What `allreduce_cuda.py` calls in workers: each fills its memory, checks the values, and times.

A time is that of one call, by the device's clock, in a CUDA graph of many of them, of which one has
just been replayed: all ranks are there when the clock starts.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import tvm
from cuda_runtime import Clock, Graph, Stream, meet, new_stream, share_process
from tvm_ffi import Shape, get_global_func, register_global_func

SUM, WORLD, NO_FLAGS, AUTO = 0, 0, 0, 3
EPSILON = 1e-5


def register(function: Callable[..., Any]) -> Callable[..., Any]:
    name = f"benchmarks.{function.__name__}"
    registered: Callable[..., Any] = register_global_func(name, function, override=True)
    return registered


def here() -> Any:
    return get_global_func("tvm_ipc.worker.device")()


def rank() -> int:
    return int(get_global_func("runtime.disco.worker_rank")())


def size() -> int:
    return int(get_global_func("runtime.disco.world_size")())


def in_arena(shape: tuple[int, ...], dtype: str) -> Any:
    """A tensor in memory that peers map, which is read where it lies."""
    bits = np.dtype(getattr(ml_dtypes, dtype, None) or dtype).itemsize
    count = int(np.prod(shape))
    allocate = get_global_func("runtime.disco.cuda_ipc.alloc_storage")
    storage = allocate(Shape([max(1, count * bits)]), tvm.DataType("uint8"))
    make = get_global_func("vm.builtin.alloc_tensor")
    return make(storage, 0, Shape(shape), tvm.DataType(dtype))


def values(of_rank: int, count: int, dtype: str) -> Any:
    """Small whole numbers, whose sums are exact in every type."""
    generator = np.random.default_rng(of_rank)
    numbers = generator.integers(-4, 5, min(count, 1 << 20)).astype("float32")
    return np.resize(numbers, count).astype(getattr(ml_dtypes, dtype, None) or dtype)


def timed(stream: Stream, call: Callable[[], None], inner: int, rounds: int) -> list[float]:
    """Seconds of a call, of so many in a graph, by round."""
    with stream.current():
        call()
        stream.wait()
        with Graph(stream) as graph:
            for _ in range(inner):
                call()
    clock, times = Clock(stream), []
    meet()
    for _ in range(rounds):
        graph.launch()
        clock.start()
        graph.launch()
        clock.stop()
        times.append(clock.seconds() / inner)
    stream.wait()
    meet()
    clock.end()
    graph.end()
    return times


@register
def allreduce(count: int, dtype: str, strategy: int, inner: int, rounds: int) -> str:
    """An all-reduce by a strategy, of an input in memory that peers map."""
    send, recv = in_arena((count,), dtype), in_arena((count,), dtype)
    send.copyfrom(values(rank(), count, dtype))
    recv.copyfrom(np.full(count, 99, send.numpy().dtype))  # poison
    function = get_global_func("tvm_ipc.allreduce")

    def call() -> None:
        function(send, SUM, WORLD, strategy, NO_FLAGS, recv)

    with new_stream(here()) as stream:
        times = timed(stream, call, inner, rounds)
    wanted = sum(values(r, count, dtype).astype("float32") for r in range(size()))
    if not (recv.numpy().astype("float32") == wanted).all():
        raise AssertionError(f"all-reduce of {count} {dtype}, strategy {strategy}: wrong values")
    return json.dumps(times)


@register
def meeting(inner: int, rounds: int) -> str:
    """All ranks hear from all, and nothing else: an all-gather of nothing."""
    nothing = in_arena((0,), "uint8")
    function = get_global_func("tvm_ipc.allgather")

    def call() -> None:
        function(nothing, WORLD, NO_FLAGS, nothing)

    with new_stream(here()) as stream:
        return json.dumps(timed(stream, call, inner, rounds))


@register
def copies(count: int, inner: int, rounds: int) -> str:
    """Copies of bytes within the device's memory, while the other ranks do the same."""
    source, target = (tvm.runtime.empty((count,), "uint8", here()) for _ in range(2))
    from_, to = source.data_ptr(), target.data_ptr()
    with new_stream(here()) as stream:
        return json.dumps(timed(stream, lambda: stream.copy(to, from_, count), inner, rounds))


@register
def epilogue(library: str, rows: int, width: int, inner: int, rounds: int) -> str:
    """All-reduce, residual and RMSNorm in one; or apart, with TVM's kernels of a library."""
    parts = [values(r, rows * width, "float16").reshape(rows, width) for r in range(size())]
    residual = values(97, rows * width, "float16").reshape(rows, width)
    weight = values(98, width, "float16")
    send, total, normed = (in_arena((rows, width), "float16") for _ in range(3))
    send.copyfrom(parts[rank()])
    given = tvm.runtime.tensor(residual, here())
    scale = tvm.runtime.tensor(weight, here())
    allreduce = get_global_func("tvm_ipc.allreduce")
    fused = get_global_func("tvm_ipc.allreduce_rms_norm")
    apart = get_global_func("runtime.disco.load_vm_module")(library, here()) if library else None
    results = [total, normed]

    def call() -> None:
        if apart is None:
            fused(send, given, scale, EPSILON, WORLD, AUTO, NO_FLAGS, total, normed)
            return
        allreduce(send, SUM, WORLD, AUTO, NO_FLAGS, total)
        stream = apart["add"](total, given)
        results[:] = [stream, apart["norm"](stream, scale)]

    with new_stream(here()) as stream:
        with stream.current():
            for _ in range(3):  # then what is let go of serves, and none is allocated in a graph
                call()
        times = timed(stream, call, inner, rounds)
    wanted = residual.astype("float64") + sum(one.astype("float64") for one in parts)
    np.testing.assert_array_equal(results[0].numpy().astype("float64"), wanted)
    wanted = wanted / np.sqrt((wanted**2).mean(-1, keepdims=True) + EPSILON) * weight
    np.testing.assert_allclose(results[1].numpy().astype("float64"), wanted, 2e-2, 2e-2)
    return json.dumps(times)


register(share_process)
