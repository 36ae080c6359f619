# SPDX-License-Identifier: Apache-2.0
"""Measure collectives by size, a copy of as many bytes, and calls of a session.

The size is that of the whole tensor: the input of an all-reduce or a reduce-scatter, and the output
of an all-gather. Cases alternate round by round, so that interference affects all of them equally.
Several sessions are measured, because each gets other memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from time import perf_counter
from typing import Any, Final

import numpy as np

import tvm_ipc
from tvm_ipc.packed_functions import AllReduceStrategy, CollectiveFlag, ReduceKind, Team
from tvm_ipc.packed_functions.collective_declarations import ALLGATHER, ALLREDUCE, REDUCE_SCATTER
from tvm_ipc.packed_functions.program_function_declarations import COPY, WORKER_RANK
from tvm_ipc.runtime import shared_libraries
from tvm_ipc.tools.bench.result_file import Run, describe_environment
from tvm_ipc.tools.bench.timing_session import TimingSession
from tvm_ipc.tools.format import message_size_text

#: The case that the plot compares the others with.
COPIED: Final = "copy"
SIZES: Final = tuple(1 << shift for shift in range(10, 25, 2))
#: Number of sessions, and of rounds in each.
_SESSIONS: Final = 3
_ROUNDS: Final = 3
_CALLS: Final = 100
#: Approximate length of one measurement, in seconds.
_MEASUREMENT_SECONDS: Final = 2e-3
_MEGABYTE: Final = 1 << 20

Progress = Callable[[float, str], None]


def measure(workers: int, device: str, progress: Progress = lambda _, __: None) -> Run:
    """Measure this machine.

    `progress` is called with the completed fraction and a description of the current step.
    """
    times: dict[tuple[str, int], list[float]] = {}
    starts = []
    for number in range(_SESSIONS):
        session_progress = partial(_report_session_progress, progress, number)
        session_progress(0.0, "starting workers")
        start = perf_counter()
        with TimingSession(workers, device) as timing:
            starts.append(perf_counter() - start)
            backend = timing.session.backend
            for key, seconds in _measure_session(timing, session_progress).items():
                times.setdefault(key, []).extend(seconds)
    times["start a session", 0] = starts
    versions = {"tvm_ipc": tvm_ipc.__version__}
    versions |= {
        package.package: package.installed or "missing" for package in shared_libraries.versions()
    }
    about = describe_environment(backend, versions, gpus=device != "cpu")
    return Run(workers, device, about, {key: tuple(seconds) for key, seconds in times.items()})


def _report_session_progress(progress: Progress, number: int, share: float, step: str) -> None:
    progress((number + share) / _SESSIONS, f"session {number + 1} of {_SESSIONS}: {step}")


def _measure_session(
    timing: TimingSession, progress: Progress
) -> dict[tuple[str, int], list[float]]:
    """Return the times of all cases in one session, by round."""
    calls_by_case = {}
    for number, size in enumerate(SIZES):
        progress(0.1 + 0.4 * number / len(SIZES), f"preparing {message_size_text(size)}")
        for case, function, arguments in _cases(timing, size):
            first = min(timing.seconds(function, arguments, 3))  # allocates pages, fills caches
            calls_by_case[case, size] = (
                function,
                arguments,
                max(1, int(_MEASUREMENT_SECONDS / first)),
            )
    session_cases = _session_cases(timing)
    for action, _ in session_cases.values():
        action()
    times: dict[tuple[str, int], list[float]] = {}
    for number in range(_ROUNDS):
        progress(0.5 + 0.5 * number / _ROUNDS, f"round {number + 1} of {_ROUNDS}")
        for key, (function, arguments, calls) in calls_by_case.items():
            times.setdefault(key, []).extend(timing.seconds(function, arguments, 1, calls))
        for case, (action, calls) in session_cases.items():
            start = perf_counter()
            action()
            times.setdefault((case, 0), []).append((perf_counter() - start) / calls)
    return times


def _cases(timing: TimingSession, size: int) -> Iterator[tuple[str, Any, list[Any]]]:
    """Yield the cases of a size: name, function and arguments."""
    slice_length = max(1, size // 4 // timing.workers)
    length = slice_length * timing.workers
    private, shared = timing.tensor((length,)), timing.tensor((length,), shared=True)
    target, shared_slice = timing.tensor((length,)), timing.tensor((slice_length,), shared=True)
    reduction, world, none = int(ReduceKind.SUM), int(Team.WORLD), int(CollectiveFlag.NONE)
    reduce = timing.function(ALLREDUCE.name)
    rest = [reduction, world, int(AllReduceStrategy.AUTO), none, target]
    yield COPIED, timing.function(COPY.name), [private, target]
    yield "all-reduce", reduce, [private, *rest]
    yield "all-reduce, IPC", reduce, [shared, *rest]
    scattered = [shared, reduction, world, none, timing.tensor((slice_length,))]
    yield "reduce-scatter, IPC", timing.function(REDUCE_SCATTER.name), scattered
    gathered = [shared_slice, world, none, target]
    yield "all-gather, IPC", timing.function(ALLGATHER.name), gathered


def _session_cases(timing: TimingSession) -> dict[str, tuple[Callable[[], Any], int]]:
    """Return actions of the controller, each with the number of calls that it makes."""
    session = timing.session
    array = np.zeros(_MEGABYTE // 4, np.float32)
    on_workers = session.put(array)
    no_op = timing.function(WORKER_RANK.name)

    def call() -> None:
        for _ in range(_CALLS):
            no_op()
        session.sync()

    def wait() -> None:
        no_op()
        session.sync()

    def put() -> None:
        session.put(array)
        session.sync()

    return {
        f"one call of a batch of {_CALLS}": (call, _CALLS),
        "one call, then sync": (wait, 1),
        "put 1 MB on all workers": (put, 1),
        "get 1 MB from a worker": (lambda: session.get(on_workers, timing.workers - 1), 1),
    }
