# SPDX-License-Identifier: Apache-2.0
"""Functions that the tests call on workers, registered as `tests.*`.

A session makes them known with `import_python_module("tests.runtime.worker_functions")`.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import os
import sys
import time
import weakref
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tvm_ffi
from tvm.runtime import DataType, Tensor, empty, tensor
from tvm_ffi import Shape, get_global_func, register_global_func

from tests.runtime import places


def worker_rank() -> int:
    return int(get_global_func("runtime.disco.worker_rank")())


def register(function: Callable[..., Any]) -> Callable[..., Any]:
    return register_global_func(f"tests.{function.__name__}", function, override=True)


# ---- values of every kind that Disco carries ------------------------------------------------


@register
def next_int(x: int) -> int:
    return x + 1


@register
def half_more(x: float) -> float:
    return x + 0.5


@register
def plus_one(x: Tensor) -> Tensor:
    return places.tensor(x.numpy() + 1)


@register
def with_rank(text: str) -> str:
    return f"{text} on rank {worker_rank()}"


@register
def with_two_more(shape: Shape) -> Shape:
    return Shape([*shape, 4, 5])


@register
def reversed_bytes(data: bytes) -> bytes:
    return bytes(data)[::-1]


@register
def echo(x: Any) -> Any:
    return x


@register
def is_none(x: Any) -> bool:
    return x is None


@register
def mixture(x: Tensor) -> list[Any]:
    return [x, "text", 7, 1.5, None, Shape([1, 2]), [True, b"raw"]]


@register
def process_id() -> int:
    return os.getpid()


@register
def environment(name: str) -> str:
    return os.environ.get(name, "")


@register
def parameters_by_name() -> Callable[[str, int], Tensor]:
    """Stands for a loader that fetches a parameter when a program asks for it."""

    def fetch(name: str, index: int) -> Tensor:
        shapes = {("A", 0): ((4, 4), "int32"), ("B", 1): ((2, 2), "float32")}
        shape, dtype = shapes[name, index]
        return tensor(np.arange(np.prod(shape), dtype=dtype).reshape(shape))

    return fetch


@register
def print_text(text: str) -> None:
    sys.stdout.write(f"{text} from rank {worker_rank()}\n")  # at once, the line's end included


@register
def write_to_standard_streams(text: str) -> str:
    """Print, as Python and as native code do; return what the descriptors lead to."""
    line = f"rank {worker_rank()} {text}"
    print(line, flush=True)
    for number in (1, 2):
        with contextlib.suppress(OSError):
            os.write(number, f"{line}\n".encode())
    return json.dumps([str(Path(f"/proc/self/fd/{number}").readlink()) for number in range(3)])


_tracked: defaultdict[int, weakref.WeakSet[Any]] = defaultdict(weakref.WeakSet)


@register
def tracked() -> Callable[[], int]:
    """A value whose end `tracked_alive` notices."""

    def value() -> int:
        return 0

    _tracked[worker_rank()].add(value)
    return value


@register
def tracked_alive() -> int:
    """How many of them this worker still has."""
    return len(_tracked[worker_rank()])


# ---- things that go wrong -------------------------------------------------------------------


@register
def fail_on(rank: int, kind: str, message: str) -> int:
    """Raise an exception of that kind on one rank, or on all for -1."""
    if rank in (-1, worker_rank()):
        raise getattr(__import__("builtins"), kind)(message)
    return worker_rank()


#: What the controller wants to have done in worker 0, a thread of the same process.
in_worker_0: list[Callable[[], object]] = []


@register
def run_in_worker_0() -> None:
    if worker_rank() == 0:
        in_worker_0[-1]()


@register
def times_unless_on(x: Tensor, rank: int, message: str) -> Tensor:
    """Multiply by a number, or fail where it is the rank."""
    fail_on(rank, "ValueError", message)
    return places.tensor(x.numpy() * np.float32(rank))


@register
def sleep_on(rank: int, seconds: float) -> None:
    if rank in (-1, worker_rank()):
        time.sleep(seconds)


@register
def call_late(rank: int, seconds: float, name: str, *args: Any) -> None:
    """Call a function everywhere, on one rank later than on the others."""
    sleep_on(rank, seconds)
    get_global_func(name)(*args)


@register
def add_one_to(place: Tensor) -> None:
    place.copyfrom(place.numpy() + 1)


@register
def call_unless(rank: int, name: str, *args: Any) -> None:
    """Call a global function on every rank but one."""
    if rank != worker_rank():
        get_global_func(name)(*args)


@register
def read_a_sum(workers: int) -> None:
    """An all-reduce whose result is read at once."""
    ones, total = places.tensor(np.ones(4, "float32")), places.empty((4,), "float32")
    get_global_func("tvm_ipc.allreduce")(ones, 0, 0, 3, 0, total)
    np.testing.assert_array_equal(total.numpy(), np.full(4, workers))


@register
def call_on(rank: int, name: str, *args: Any) -> Any:
    """Call a global function on one rank only."""
    return get_global_func(name)(*args) if rank == worker_rank() else None


@register
def call_elsewhere(rank: int, name: str, other: str, count: int, *args: Any) -> Any:
    """Call `name` with the first `count` arguments on one rank, `other` with the rest elsewhere."""
    if rank == worker_rank():
        return get_global_func(name)(*args[:count])
    return get_global_func(other)(*args[count:])


KEPT: dict[int, Any] = {}


@register
def keep(value: Any) -> None:
    """Keep a value of each rank beyond the session."""
    KEPT[worker_rank()] = value


@register
def give_kept(rank: int) -> Any:
    return KEPT.pop(rank)


# ---- tensors that are parts of others --------------------------------------------------------


@register
def view(whole: Tensor, start: int, count: int) -> Tensor:
    width = whole.numpy().itemsize
    return whole._create_view((count,), whole.dtype, start * width)


@register
def ipc_tensor(size: int, shape: Shape, dtype: DataType) -> Tensor:
    """A tensor in memory that peers map."""
    allocate = get_global_func("runtime.disco.cuda_ipc.alloc_storage")
    storage = allocate(Shape([size]), DataType("uint8"))
    return get_global_func("tvm_ipc.alloc_tensor")(storage, 0, shape, dtype)


@register
def ipc_tensor_on_even_ranks(size: int, shape: Shape, dtype: DataType) -> Tensor:
    if worker_rank() % 2 == 0:
        return ipc_tensor(size, shape, dtype)
    return empty(tuple(shape), str(dtype))


@register
def every_second_column(rows: int, columns: int) -> Tensor:
    """A tensor with gaps between its elements."""
    return tvm_ffi.from_dlpack(np.zeros((rows, 2 * columns), "float32")[:, ::2])


# ---- memory that peers map ------------------------------------------------------------------


@register
def allocate_and_free(seed: int, steps: int, most: int, largest: int) -> str:
    """Storages of random sizes, at most so many at a time, some of them all the time in use.

    Returns, as JSON, a sum over the sequence of offsets and the largest number of bytes in use.
    """
    allocate = get_global_func("runtime.disco.cuda_ipc.alloc_storage")
    generator = np.random.default_rng(seed)
    held: list[Any] = []
    in_use = peak = offsets = 0
    for step in range(steps):
        if held and (len(held) >= most or generator.random() < 0.4):
            size, storage = held.pop(int(generator.integers(len(held))))
            del storage
            in_use -= size
        else:
            size = int(largest ** generator.uniform(0, 1))
            storage = allocate(Shape([size]), DataType("uint8"))
            held.append((size, storage))
            in_use += size
            offsets += (step + 1) * storage_offset(storage)
        peak = max(peak, in_use)
    return json.dumps({"offsets": offsets, "peak": peak})


@register
def storage_offset(storage: Any) -> int:
    """Where a storage starts in the arena of its worker."""
    empty = get_global_func("vm.builtin.alloc_tensor")(storage, 0, Shape([0]), DataType("uint8"))
    return int(get_global_func("tvm_ipc.arena_offset")(empty))


# ---- shards of parameters -------------------------------------------------------------------


@register
def shard_rows(source: Tensor, shards: int, target: Tensor) -> None:
    rows, columns = source.shape
    target.copyfrom(source.numpy().reshape(shards, rows // shards, columns))


@register
def shard_columns(source: Tensor, shards: int, target: Tensor) -> None:
    target.copyfrom(np.stack(np.split(source.numpy(), shards, axis=1)))


@register
def shard_heads(source: Tensor, shards: int, q_heads: int, kv_heads: int, target: Tensor) -> None:
    """Give each shard its own heads of the stacked query, key and value projections."""
    rows, hidden = source.shape
    heads = source.numpy().reshape(q_heads + 2 * kv_heads, rows // (q_heads + 2 * kv_heads), hidden)
    parts = np.split(heads, [q_heads, q_heads + kv_heads])
    by_shard = [np.concatenate(p) for p in zip(*(np.split(x, shards) for x in parts), strict=True)]
    target.copyfrom(np.stack(by_shard))


@register
def join_heads(source: Tensor, target: Tensor) -> None:
    target.copyfrom(source.numpy().reshape(target.shape))


# ---- exceptions that are hard to pass on ----------------------------------------------------


class OwnError(Exception):
    """An exception that only this module knows."""


class TextlessError(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError


@register
def exit_on(rank: int, code: int) -> None:
    if worker_rank() == rank:
        sys.exit(code)


@register
def fail_with_own_exception(rank: int) -> None:
    if worker_rank() == rank:
        error = OwnError("mine")
        error.__notes__ = ["a note"]
        raise error


@register
def fail_without_text(rank: int, kind: str) -> None:
    if worker_rank() == rank:
        raise ValueError("\udc80") if kind == "surrogate" else TextlessError()


@register
def fail_with_group(rank: int) -> None:
    if worker_rank() == rank:
        group = getattr(builtins, "ExceptionGroup")  # noqa: B009  new in Python 3.11
        inner = group("inner", [KeyError("second")])
        raise group("two tasks", [ValueError("first\nof two lines"), inner])


@register
def fail_with_long_text(rank: int, character: str, length: int) -> None:
    if worker_rank() == rank:
        raise ValueError(character * length)


@register
def dispatch_function_by_group(vm: Any, group_size: int, calls: Any) -> Any:
    """Call the function of the worker's group: each call is a function and its arguments."""
    return get_global_func("vm.builtin.invoke_closure")(vm, *calls[worker_rank() // group_size])
