# SPDX-License-Identifier: Apache-2.0
"""Delays that compiled programs call on workers, registered as `tests.race_*`."""

from __future__ import annotations

import random
import time

from tvm_ffi import get_global_func, register_global_func


class Delays:
    """How late this worker is, at which point of a program."""

    def __init__(self) -> None:
        self.source: random.Random | None = None

    def reset(self, seed: int) -> None:
        """Start the delays of a run; a negative seed means none."""
        rank = int(get_global_func("runtime.disco.worker_rank")())
        self.source = random.Random(seed * 64 + rank) if seed >= 0 else None

    def wait(self) -> None:
        """Be late, or not. Whoever waits for this rank falls asleep, and wakes up late itself."""
        if self.source is not None and self.source.random() < 0.3:
            time.sleep(self.source.choice((0, 5e-5, 2e-4, 1e-3)))


def register() -> None:
    """Make the functions of this thread's worker known."""
    # Worker 0 is a thread of the tests' process, and so may be others: one object each.
    workers: dict[int, Delays] = {}

    def mine() -> Delays:
        return workers.setdefault(int(get_global_func("runtime.disco.worker_rank")()), Delays())

    register_global_func("tests.race_reset", lambda seed: mine().reset(seed), override=True)
    # A function of which compilers know nothing.
    register_global_func("tests.race_copy", lambda x, y: x.copyto(y) and None, override=True)
    register_global_func("tests.race_wait", lambda: mine().wait(), override=True)


register()
