# SPDX-License-Identifier: Apache-2.0
"""Functions that run in the workers of `test_mpi_progress_engine.py`.

All workers draw the same plan of messages from the same seed, and each sends and receives its part.
"""

from __future__ import annotations

import random

import numpy as np
import tvm
import tvm_ffi

MESSAGES = 200
#: Some that MPI sends at once, and some for which it asks first.
SIZES = (0, 1, 64, 5000, 65536, 300000)


def content(seed: int, number: int, count: int) -> np.ndarray:
    return np.random.default_rng((seed, number)).integers(0, 256, count, np.uint8)


@tvm_ffi.register_global_func("tests.nodes.play")
def _play(size: int, seed: int, fails: bool) -> None:
    """One rank stops in the middle if it fails: much is sent then that nobody receives."""
    send = tvm_ffi.get_global_func("runtime.disco.send_to_worker")
    receive = tvm_ffi.get_global_func("runtime.disco.recv_from_worker")
    me = tvm_ffi.get_global_func("tvm_ipc.worker.rank")()
    plan = random.Random(seed)
    stops = (plan.randrange(size), plan.randrange(MESSAGES // 2, MESSAGES))
    for number in range(MESSAGES):
        sender, receiver = plan.sample(range(size), 2)
        count = plan.choice(SIZES)
        if fails and (me, number) == stops:
            raise ValueError("enough")
        if me == sender:
            send(tvm.runtime.tensor(content(seed, number, count)), receiver)
        elif me == receiver:
            got = tvm.runtime.empty((count,), "uint8")
            receive(got, sender)
            assert (got.numpy() == content(seed, number, count)).all(), f"message {number}"
