# SPDX-License-Identifier: Apache-2.0
"""What our workers run: imported into each of them by `Session.import_python_module`.

Python stands only around the timed loop: one call of it makes up to 256 all-reduces in the VM.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import ml_dtypes
import numpy as np
import tvm_ffi
from peer_python import expected, term

from tvm_ipc.packed_functions import AllReduceStrategy, ReduceKind, Team

_get = tvm_ffi.get_global_func
_cases: dict[int, dict[str, Any]] = {}  # by rank: worker threads share this module


def _tensor(dtype: str, count: int, ipc: bool) -> Any:
    shape = tvm_ffi.Shape([count])
    if not ipc:
        return _get("runtime.disco.empty")(shape, tvm_ffi.dtype(dtype), None, False, True)
    storage = _get("runtime.disco.cuda_ipc.alloc_storage")(shape, tvm_ffi.dtype(dtype))
    return _get("vm.builtin.alloc_tensor")(storage, 0, shape, tvm_ffi.dtype(dtype))


def _answer(value: float) -> Any:
    import tvm

    return tvm.runtime.tensor(np.array([value], np.float64))


def _call(collective: str, rank: int, strategy: int) -> Callable[[Any, Any], None]:
    """What sums up over all ranks; a reduce is to rank 0."""
    world, flags, kind = int(Team.WORLD), 0, int(ReduceKind.SUM)
    if collective == "reduce_scatter":
        scatter = _get("tvm_ipc.reduce_scatter")
        return lambda send, recv: scatter(send, kind, world, flags, recv)
    if collective == "reduce":
        reduce = _get("tvm_ipc.reduce")
        own = rank == 0
        return lambda send, recv: reduce(send, kind, 0, world, flags, recv if own else None)
    allreduce = _get("runtime.disco.cuda_ipc.custom_allreduce")
    return lambda send, recv: allreduce(send, strategy, recv)


@tvm_ffi.register_global_func("tvm_ipc.bench.prepare")  # type: ignore[untyped-decorator]
def prepare(
    dtype: str,
    count: int,
    send_ipc: bool,
    recv_ipc: bool,
    strategy: int,
    collective: str = "allreduce",
) -> Any:
    """Makes the buffers and checks one collective; 1 where it was right."""
    rank, ranks = (_get(f"runtime.disco.{name}")() for name in ("worker_rank", "world_size"))
    _cases.pop(rank, None)  # what it held can be reused
    part = slice(0, count)
    if collective == "reduce_scatter":
        part = slice(rank * (count // ranks), (rank + 1) * (count // ranks))
    send, recv = _tensor(dtype, count, send_ipc), _tensor(dtype, part.stop - part.start, recv_ipc)
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    send.copyfrom(term(count, rank).astype(kind))
    recv.copyfrom(np.full(recv.shape, -1, kind))
    call = _call(collective, rank, strategy)
    call(send, recv)
    found = recv.numpy().astype(np.float32)
    right = np.array_equal(found, expected(count, ranks)[part])
    if collective == "reduce" and rank != 0:
        right = True
    barrier = (_tensor("float32", 1, True), _tensor("float32", 1, False))
    shape = tvm_ffi.Shape([count * kind.itemsize // 4])
    raw = _get("runtime.TVMTensorCreateView")(send, shape, tvm_ffi.dtype("float32"), 0)
    _cases[rank] = {"arguments": (send, recv, raw), "barrier": barrier, "call": call}
    return _answer(float(right))


@tvm_ffi.register_global_func("tvm_ipc.bench.run")  # type: ignore[untyped-decorator]
def run(program: Any, name: str, times: int) -> Any:
    """Seconds that `times` calls of one function of the program take."""
    arguments = _cases[_get("runtime.disco.worker_rank")()]["arguments"]
    return _timed(times, program[name], *arguments)


@tvm_ffi.register_global_func("tvm_ipc.bench.run_packed")  # type: ignore[untyped-decorator]
def run_packed(times: int) -> Any:
    """Seconds that `times` calls of the packed function take, from Python."""
    case = _cases[_get("runtime.disco.worker_rank")()]
    send, recv, _ = case["arguments"]
    return _timed(times, case["call"], send, recv)


def _timed(times: int, function: Any, *arguments: Any) -> Any:
    """Seconds of so many calls, which all ranks begin together, after one that is not counted."""
    send, recv = _cases[_get("runtime.disco.worker_rank")()]["barrier"]
    function(*arguments)
    allreduce = _get("runtime.disco.cuda_ipc.custom_allreduce")
    allreduce(send, int(AllReduceStrategy.ONESHOT), recv)  # a barrier
    start = perf_counter()
    for _ in range(times):
        function(*arguments)
    return _answer(perf_counter() - start)
