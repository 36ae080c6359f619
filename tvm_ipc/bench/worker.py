# SPDX-License-Identifier: Apache-2.0
"""What workers do for `tvm-ipc bench`; imported into each of them.

Python stands around the timed loop only, but for a trace, of which the events are taken one by one.
Answers are tensors, since these are what a session brings home.
"""

from __future__ import annotations

import json
from time import perf_counter, perf_counter_ns
from typing import Any, Final

import numpy as np
import tvm
import tvm_ffi

from tvm_ipc.contract import CollectiveFlag, ReduceKind, Team
from tvm_ipc.contract.collectives import ALLREDUCE
from tvm_ipc.contract.programs import ALLOC_STORAGE, WORKER_RANK

_get = tvm_ffi.get_global_func
#: The functions below, by their names in a worker.
TENSOR: Final = "tvm_ipc.bench.tensor"
SECONDS: Final = "tvm_ipc.bench.seconds"
EVENTS: Final = "tvm_ipc.bench.events"


@tvm_ffi.register_global_func(TENSOR)  # type: ignore[untyped-decorator]
def tensor(shape: Any, dtype: str, shared: bool, seed: int) -> Any:
    """Return a tensor of small numbers, other ones on each rank; `shared` where peers may read."""
    kind = tvm_ffi.dtype(dtype)
    if shared:
        storage = _get(ALLOC_STORAGE.name)(shape, kind)
        made = _get("vm.builtin.alloc_tensor")(storage, 0, shape, kind)
    else:
        made = _get("runtime.disco.empty")(shape, kind, None, False, True)
    random = np.random.default_rng([seed, _get(WORKER_RANK.name)()])
    made.copyfrom(random.uniform(-1, 1, tuple(shape)).astype(made.numpy().dtype))
    return made


@tvm_ffi.register_global_func(SECONDS)  # type: ignore[untyped-decorator]
def seconds(function: Any, settle: Any, repeats: int, calls: int, *given: Any) -> Any:
    """Return the seconds of a call, `repeats` times the mean of `calls`; ranks begin together.

    `settle` waits for what calls have left behind, as those do that give a GPU work.
    """
    meet = _meeting()
    found = []
    for _ in range(repeats):
        meet()
        settle()
        start = perf_counter()
        for _ in range(calls):
            function(*given)
        settle()
        found.append((perf_counter() - start) / calls)
    return tvm.runtime.tensor(np.array(found, np.float64))


@tvm_ffi.register_global_func(EVENTS)  # type: ignore[untyped-decorator]
def events(program: Any, name: str, *given: Any) -> Any:
    """Return what the VM does in one call, as JSON: name, and nanoseconds of begin and end."""
    found: list[tuple[str, int, int]] = []
    begun: list[int] = []

    def instrument(_function: Any, name: str, before: bool, _result: Any, *_: Any) -> int:
        if before:
            begun.append(perf_counter_ns())
        else:
            found.append((name, begun.pop(), perf_counter_ns()))
        return 0  # VMInstrumentReturnKind.NO_OP

    function = program[name]
    function(*given)
    meet = _meeting()
    program["set_instrument"](instrument)
    try:
        meet()
        function(*given)
    finally:
        program["set_instrument"](None)
    return tvm.runtime.tensor(np.frombuffer(json.dumps(found).encode(), np.uint8).copy())


def _meeting() -> Any:
    """Return a function in which all ranks meet."""
    one = tensor(tvm_ffi.Shape([1]), "float32", True, 0)
    all_ranks = tensor(tvm_ffi.Shape([1]), "float32", False, 0)
    allreduce = _get(ALLREDUCE.name)
    given = (one, int(ReduceKind.SUM), int(Team.WORLD), 3, int(CollectiveFlag.NONE), all_ranks)

    def meet() -> None:
        allreduce(*given)

    meet()
    return meet
