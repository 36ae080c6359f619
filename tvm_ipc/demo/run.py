# SPDX-License-Identifier: Apache-2.0
"""Runs the compiled model in a session and measures it."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import tvm_ipc
from tvm_ipc.demo.mlp import MAIN, REDUCE_ONLY, REDUCE_ONLY_CALLS, Array, shard

#: Seconds after which no further step is timed.
_LONGEST: Final = 3.0


@dataclass(frozen=True)
class Run:
    """What one session gave.

    Attributes
    ----------
    results : of every worker.
    steps : how many were timed.
    step : seconds of one step, the median.
    allreduce : seconds of one all-reduce, measured back to back; None if there are none.
    arena : worker 0's arena after the steps, as `tvm_ipc.arena_stats` tells it.
    """

    results: list[Array]
    steps: int
    step: float
    allreduce: float | None
    arena: dict[str, int]


def run(
    executable: Any, x: Array, weights: list[Array], *, workers: int, threads: bool, steps: int
) -> Run:
    """Start the workers, give each its part of the weights, run, and take everything back."""
    with tvm_ipc.Session(workers, threads=threads) as session:
        module = session.load_vm_module(executable)
        main = module[MAIN]
        row = session.put(x)
        parts = [session.scatter(part, in_group=False) for part in shard(weights, workers)]

        def step() -> Any:
            result = main(row, *parts)
            session.sync()
            return result

        result = step()
        seconds = _time(step, steps)
        arena = session.get_global_func("tvm_ipc.arena_stats")().debug_get_from_remote(0)
        return Run(
            results=[session.get(result, rank) for rank in range(workers)],
            steps=len(seconds),
            step=statistics.median(seconds),
            allreduce=_allreduce_seconds(session, module, row) if workers > 1 else None,
            arena=json.loads(arena),
        )


def _allreduce_seconds(session: tvm_ipc.Session, module: Any, row: Any) -> float:
    reduce_only = module[REDUCE_ONLY]

    def call() -> None:
        reduce_only(row)
        session.sync()

    call()
    return statistics.median(_time(call, 5)) / REDUCE_ONLY_CALLS


def _time(action: Callable[[], Any], times: int) -> list[float]:
    """Return the seconds of each call, of fewer calls if they take long."""
    seconds: list[float] = []
    while len(seconds) < times and sum(seconds) < _LONGEST:
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return seconds
