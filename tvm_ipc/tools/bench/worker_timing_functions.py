# SPDX-License-Identifier: Apache-2.0
"""Provide the functions that `tvm-ipc bench` runs in its workers.

The timed loops call packed functions directly. Results are tensors, because a session can only
fetch tensors.
"""

from __future__ import annotations

import json
from time import perf_counter, perf_counter_ns
from typing import Any, Final

import numpy as np
import tvm
import tvm_ffi

from tvm_ipc.packed_functions import AllReduceStrategy, CollectiveFlag, ReduceKind, Team
from tvm_ipc.packed_functions.collective_declarations import ALLREDUCE
from tvm_ipc.packed_functions.program_function_declarations import ALLOC_STORAGE, WORKER_RANK

_get = tvm_ffi.get_global_func
#: Names that the functions below are registered under.
TENSOR: Final = "tvm_ipc.bench.tensor"
SECONDS: Final = "tvm_ipc.bench.seconds"
EVENTS: Final = "tvm_ipc.bench.events"


@tvm_ffi.register_global_func(TENSOR)  # type: ignore[untyped-decorator]
def tensor(shape: Any, dtype: str, shared: bool, seed: int) -> Any:
    """Return a tensor of small random numbers that differ by rank; `shared`: in `ipc_memory`."""
    element_type = tvm_ffi.dtype(dtype)
    if shared:
        storage = _get(ALLOC_STORAGE.name)(shape, element_type)
        array = _get("vm.builtin.alloc_tensor")(storage, 0, shape, element_type)
    else:
        array = _get("runtime.disco.empty")(shape, element_type, None, False, True)
    random = np.random.default_rng([seed, _get(WORKER_RANK.name)()])
    array.copyfrom(random.uniform(-1, 1, tuple(shape)).astype(array.numpy().dtype))
    return array


@tvm_ffi.register_global_func(SECONDS)  # type: ignore[untyped-decorator]
def seconds(function: Any, synchronize: Any, repeats: int, calls: int, *arguments: Any) -> Any:
    """Return `repeats` times, each the mean of `calls` calls in seconds; ranks start together.

    `synchronize` waits until the device has finished its work.
    """
    barrier = _make_barrier()
    times = []
    for _ in range(repeats):
        barrier()
        synchronize()
        start = perf_counter()
        for _ in range(calls):
            function(*arguments)
        synchronize()
        times.append((perf_counter() - start) / calls)
    return tvm.runtime.tensor(np.array(times, np.float64))


@tvm_ffi.register_global_func(EVENTS)  # type: ignore[untyped-decorator]
def events(program: Any, name: str, *arguments: Any) -> Any:
    """Return the VM's calls during one call as JSON: name, and nanoseconds of start and end."""
    calls: list[tuple[str, int, int]] = []
    starts: list[int] = []

    def instrument(_function: Any, name: str, before: bool, _result: Any, *_: Any) -> int:
        if before:
            starts.append(perf_counter_ns())
        else:
            calls.append((name, starts.pop(), perf_counter_ns()))
        return 0  # VMInstrumentReturnKind.NO_OP

    function = program[name]
    function(*arguments)
    barrier = _make_barrier()
    program["set_instrument"](instrument)
    try:
        barrier()
        function(*arguments)
    finally:
        program["set_instrument"](None)
    return tvm.runtime.tensor(np.frombuffer(json.dumps(calls).encode(), np.uint8).copy())


def _make_barrier() -> Any:
    """Return a function that synchronizes all ranks with a small all-reduce."""
    summand = tensor(tvm_ffi.Shape([1]), "float32", True, 0)
    total = tensor(tvm_ffi.Shape([1]), "float32", False, 0)
    allreduce = _get(ALLREDUCE.name)
    arguments = (
        summand,
        int(ReduceKind.SUM),
        int(Team.WORLD),
        int(AllReduceStrategy.AUTO),
        int(CollectiveFlag.NONE),
        total,
    )

    def barrier() -> None:
        allreduce(*arguments)

    barrier()
    return barrier
