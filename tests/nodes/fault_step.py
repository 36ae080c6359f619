# SPDX-License-Identifier: Apache-2.0
"""What the workers of `fault_victim.py` do."""

from __future__ import annotations

import random

import numpy as np
import tvm_ffi

SIZES = (1, 33, 1000, 20000, 300001, 3000000)


@tvm_ffi.register_global_func("tests.nodes.fault_step")
def step(seed: int) -> None:
    """A few all-reduces and gathers of random sizes, looked at."""
    import tvm

    get = tvm_ffi.get_global_func
    rank, ranks = get("runtime.disco.worker_rank")(), get("runtime.disco.world_size")()
    plan = random.Random(seed)
    device = tvm.cpu()
    for _ in range(4):
        count = plan.choice(SIZES)
        own = np.arange(count, dtype="int32") % 1000 + rank
        send = tvm.runtime.tensor(own, device=device)
        recv = tvm.runtime.empty((count,), "int32", device)
        get("runtime.disco.allreduce")(send, tvm_ffi.Shape([0]), False, recv)
        wrong = recv.numpy() != ranks * (np.arange(count) % 1000) + ranks * (ranks - 1) // 2
        if wrong.any():
            raise ValueError(f"WRONG NUMBERS: {wrong.sum()} of {count}")
