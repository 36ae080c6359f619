# SPDX-License-Identifier: Apache-2.0
"""Four workers add their arrays: in one call, and by hand in two steps, with the same bits."""

import time

import numpy as np

import tvm_ipc

WORKERS, SIZE = 4, 1 << 20

with tvm_ipc.Session(num_workers=WORKERS) as session:
    # Each worker gets an array of its own: a row of a matrix that worker 0 scatters.
    numbers = np.random.default_rng(0).normal(size=(WORKERS, SIZE)).astype("float32")
    mine = session.scatter(numbers)

    total = session.empty((SIZE,), "float32")
    session.allreduce(mine, total, "sum")
    print(f"one call:  worker 3 has {session.get(total, rank=3)[:3]}, ...")

    # By hand: each worker sums a quarter of all arrays, and gives it to the others.
    quarter = session.empty((SIZE // WORKERS,), "float32")
    joined = session.empty((SIZE,), "float32")
    session.reduce_scatter(mine, quarter, "sum")
    session.allgather(quarter, joined)
    print(f"two steps: worker 3 has {session.get(joined, rank=3)[:3]}, ...")

    parts = [session.get(one, rank) for one in (total, joined) for rank in range(WORKERS)]
    assert all(np.array_equal(parts[0], one) for one in parts)
    print("the same bits on all workers, both ways")

    # The order of the sum is that of the ranks, so NumPy can say what the bits must be.
    assert np.array_equal(parts[0], ((numbers[0] + numbers[1]) + numbers[2]) + numbers[3])
    print("and those of NumPy: ((0 + 1) + 2) + 3")

    # A team of some workers; the others do nothing.
    pair = session.team([0, 2])
    session.allreduce(mine, joined, "max", team=pair)
    assert np.array_equal(session.get(joined, rank=2), np.maximum(numbers[0], numbers[2]))
    print("workers 0 and 2 took the maximum of theirs, in a team")

    rounds = 20
    session.sync()
    started = time.perf_counter()
    for _ in range(rounds):
        session.allreduce(mine, total, "sum")
    session.sync()
    took = (time.perf_counter() - started) / rounds
    print(f"one all-reduce of {numbers[0].nbytes >> 20} MB took {took * 1e3:.2f} ms here")
