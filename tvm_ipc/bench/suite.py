# SPDX-License-Identifier: Apache-2.0
"""What `tvm-ipc bench` measures: collectives by size beside a copy of so many bytes, and a session.

The size is that of the whole tensor: what each worker gives to an all-reduce or a reduce-scatter,
and has after an all-gather. Cases take turns, round by round, so that what disturbs the machine for
a while disturbs all of them, and several sessions are measured, which do not get the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from time import perf_counter
from typing import Any, Final

import numpy as np

import tvm_ipc
from tvm_ipc.bench.run import Run, here
from tvm_ipc.bench.stage import Stage
from tvm_ipc.bench.words import size_text
from tvm_ipc.contract import AllReduceStrategy, CollectiveFlag, ReduceKind, Team
from tvm_ipc.contract.collectives import ALLGATHER, ALLREDUCE, REDUCE_SCATTER
from tvm_ipc.contract.programs import COPY, WORKER_RANK
from tvm_ipc.runtime import library

#: The case that the others are compared with in a picture.
COPIED: Final = "copy"
SIZES: Final = tuple(1 << shift for shift in range(10, 25, 2))
#: Sessions that are measured, and rounds in each: where memory lies differs between sessions.
_SESSIONS: Final = 3
_ROUNDS: Final = 3
_CALLS: Final = 100
#: Seconds of one measurement, about; those of many workers wait for each other.
_ENOUGH: Final = 2e-3
_MEGABYTE: Final = 1 << 20

Tell = Callable[[float, str], None]


def measure(workers: int, device: str, tell: Tell = lambda _, __: None) -> Run:
    """Measure this machine; `tell` hears which share is done, and what is being done."""
    times: dict[tuple[str, int], list[float]] = {}
    starts = []
    for number in range(_SESSIONS):
        of = f"session {number + 1} of {_SESSIONS}"
        within = partial(_tell_within, tell, number, of)
        within(0.0, "starting workers")
        start = perf_counter()
        with Stage(workers, device) as stage:
            starts.append(perf_counter() - start)
            backend = stage.session.backend
            for key, found in _session(stage, within).items():
                times.setdefault(key, []).extend(found)
    times["start a session", 0] = starts
    versions = {"tvm_ipc": tvm_ipc.__version__}
    versions |= {one.package: one.installed or "missing" for one in library.versions()}
    about = here(backend, versions, gpus=device != "cpu")
    return Run(workers, device, about, {key: tuple(found) for key, found in times.items()})


def _tell_within(tell: Tell, number: int, of: str, share: float, what: str) -> None:
    tell((number + share) / _SESSIONS, f"{of}: {what}")


def _session(stage: Stage, tell: Tell) -> dict[tuple[str, int], list[float]]:
    """Return the times of all cases in one session, by round."""
    ready = {}
    for number, size in enumerate(SIZES):
        tell(0.1 + 0.4 * number / len(SIZES), f"preparing {size_text(size)}")
        for case, function, given in _cases(stage, size):
            once = min(stage.seconds(function, given, 3))  # pages are there, and caches full
            ready[case, size] = (function, given, max(1, int(_ENOUGH / once)))
    control = _control(stage)
    for what, _ in control.values():
        what()
    found: dict[tuple[str, int], list[float]] = {}
    for number in range(_ROUNDS):
        tell(0.5 + 0.5 * number / _ROUNDS, f"round {number + 1} of {_ROUNDS}")
        for key, (function, given, calls) in ready.items():
            found.setdefault(key, []).extend(stage.seconds(function, given, 1, calls))
        for case, (what, calls) in control.items():
            start = perf_counter()
            what()
            found.setdefault((case, 0), []).append((perf_counter() - start) / calls)
    return found


def _cases(stage: Stage, size: int) -> Iterator[tuple[str, Any, list[Any]]]:
    """Give the cases of a size: name, function and arguments."""
    part = max(1, size // 4 // stage.workers)
    whole = part * stage.workers
    own, shared = stage.tensor((whole,)), stage.tensor((whole,), shared=True)
    target, shared_part = stage.tensor((whole,)), stage.tensor((part,), shared=True)
    add, world, none = int(ReduceKind.SUM), int(Team.WORLD), int(CollectiveFlag.NONE)
    reduce = stage.function(ALLREDUCE.name)
    rest = [add, world, int(AllReduceStrategy.AUTO), none, target]
    yield COPIED, stage.function(COPY.name), [own, target]
    yield "all-reduce", reduce, [own, *rest]
    yield "all-reduce, IPC", reduce, [shared, *rest]
    scattered = [shared, add, world, none, stage.tensor((part,))]
    yield "reduce-scatter, IPC", stage.function(REDUCE_SCATTER.name), scattered
    gathered = [shared_part, world, none, target]
    yield "all-gather, IPC", stage.function(ALLGATHER.name), gathered


def _control(stage: Stage) -> dict[str, tuple[Callable[[], Any], int]]:
    """Return what a controller does with its workers, and how many calls each is."""
    session = stage.session
    array = np.zeros(_MEGABYTE // 4, np.float32)
    there = session.put(array)
    nothing = stage.function(WORKER_RANK.name)

    def call() -> None:
        for _ in range(_CALLS):
            nothing()
        session.sync()

    def wait() -> None:
        nothing()
        session.sync()

    def put() -> None:
        session.put(array)
        session.sync()

    return {
        f"a call, of {_CALLS} at a time": (call, _CALLS),
        "a call that is waited for": (wait, 1),
        "put 1 MB on all workers": (put, 1),
        "get 1 MB from a worker": (lambda: session.get(there, stage.workers - 1), 1),
    }
