# SPDX-License-Identifier: Apache-2.0
"""What our workers run: imported into each of them by `Session.import_python_module`.

Python stands only around the timed loop: one call of it makes up to 256 all-reduces in the VM.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

import ml_dtypes
import numpy as np
import tvm_ffi
from peer_python import expected, term

from tvm_ipc.contract import AllReduceStrategy

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


@tvm_ffi.register_global_func("tvm_ipc.bench.prepare")
def prepare(dtype: str, count: int, send_ipc: bool, recv_ipc: bool, strategy: int) -> Any:
    """Makes the buffers and checks one all-reduce; 1 where it was right."""
    rank, ranks = (_get(f"runtime.disco.{name}")() for name in ("worker_rank", "world_size"))
    _cases.pop(rank, None)  # what it held can be reused
    send, recv = _tensor(dtype, count, send_ipc), _tensor(dtype, count, recv_ipc)
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    send.copyfrom(term(count, rank).astype(kind))
    recv.copyfrom(np.full(count, -1, kind))
    allreduce = _get("runtime.disco.cuda_ipc.custom_allreduce")
    allreduce(send, strategy, recv)
    right = np.array_equal(recv.numpy().astype(np.float32), expected(count, ranks))
    barrier = (_tensor("float32", 1, True), _tensor("float32", 1, False))
    shape = tvm_ffi.Shape([count * kind.itemsize // 4])
    raw = _get("runtime.TVMTensorCreateView")(send, shape, tvm_ffi.dtype("float32"), 0)
    _cases[rank] = {"arguments": (send, recv, raw), "barrier": barrier}
    return _answer(float(right))


@tvm_ffi.register_global_func("tvm_ipc.bench.run")
def run(program: Any, name: str, times: int) -> Any:
    """Seconds that `times` calls of one function of the program take."""
    arguments = _cases[_get("runtime.disco.worker_rank")()]["arguments"]
    return _timed(times, program[name], *arguments)


@tvm_ffi.register_global_func("tvm_ipc.bench.run_packed")
def run_packed(times: int) -> Any:
    """Seconds that `times` calls of the packed function take, from Python."""
    send, recv, _ = _cases[_get("runtime.disco.worker_rank")()]["arguments"]
    allreduce = _get("runtime.disco.cuda_ipc.custom_allreduce")
    return _timed(times, allreduce, send, int(AllReduceStrategy.AUTO), recv)


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
