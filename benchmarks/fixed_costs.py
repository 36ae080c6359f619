# SPDX-License-Identifier: Apache-2.0
"""What is paid whatever the size: a call from the VM, an allocation, the start of a session."""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median

import program
from ours import Workers

import tvm_ipc

CALLS = 20_000


def _calls(workers: Workers, names: dict[str, str], rounds: int) -> dict[str, float]:
    """Seconds per call of some functions of the program, round by round."""
    workers.call("prepare", "float32", 1, True, False, 1)
    found: dict[str, list[float]] = {label: [] for label in names}
    for _ in range(rounds):
        for label, function in names.items():
            found[label].append(workers.time(function, CALLS) / CALLS)
    return {label: median(times) for label, times in found.items()}


def _starts(rounds: int) -> Iterator[tuple[str, float]]:
    for threads in (False, True):
        for compiler in (False,) if threads else (False, True):
            for workers in (2, 4, 8) if not compiler else (2,):
                opened, closed = [], []
                for _ in range(rounds):
                    start = time.perf_counter()
                    session = tvm_ipc.Session(workers, threads=threads, compiler=compiler)
                    session.sync()
                    opened.append(time.perf_counter() - start)
                    start = time.perf_counter()
                    session.close()
                    closed.append(time.perf_counter() - start)
                kind = "threads" if threads else "processes"
                kind += " with compiler" if compiler else ""
                yield f"start of a session, {workers} {kind}", median(opened)
                yield f"end of a session, {workers} {kind}", median(closed)


def measure(quick: bool, limit: float) -> dict[str, float]:
    """Label to seconds."""
    rounds = 3 if quick else 7
    last = program.UNROLLS[-1]
    found = {}
    allreduce = f"allreduce_oneshot_{last}"
    alone, pair = Workers(1, 10 * limit), Workers(2, 10 * limit)
    try:
        names = {
            "VM calls a function that does nothing": f"null_{last}",
            "VM calls an all-reduce, 1 worker, 4 bytes": allreduce,
        }
        found.update(_calls(alone, names, rounds))
        names = {"VM calls an all-reduce, 2 workers, 4 bytes": allreduce}
        for size in program.STORAGE_BYTES:
            names[f"alloc_storage and release, {size} bytes"] = f"ipc_storage_{size}_{last}"
        for size in program.STORAGE_BYTES:
            names[f"the same of TVM's pool, {size} bytes"] = f"pool_storage_{size}_{last}"
        found.update(_calls(pair, names, rounds))
    finally:
        alone.close()
        pair.close()
    found.update(_starts(1 if quick else 3))
    return found
