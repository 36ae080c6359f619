# SPDX-License-Identifier: Apache-2.0
"""Works that workers post on their GPUs, beside what their programs' stream has: each function is
called on all ranks, and fails where what is read is not what it must be.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from tvm_ffi import Shape, get_global_func, register_global_func

from tests.runtime import places
from tvm_ipc.packed_functions import AllReduceStrategy, ReduceKind, Team

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
from cuda_runtime import Graph, cuda, new_stream

WORLD, SUM, AUTO = int(Team.WORLD), int(ReduceKind.SUM), int(AllReduceStrategy.AUTO)


class Worker:
    """One rank. Nothing here waits for its device but `read`."""

    def __init__(self) -> None:
        self.rank = int(get_global_func("runtime.disco.worker_rank")())
        self.size = int(get_global_func("runtime.disco.world_size")())
        self.copy = get_global_func("tvm_ipc.copy")
        self.wait = get_global_func("tvm_ipc.wait")

    def values(self, count: int, salt: int, rank: int | None = None) -> Any:
        rank = self.rank if rank is None else rank
        return np.arange(count, dtype="int32") % 89 + 1000 * (rank + 1) + 17 * salt

    def total(self, count: int, salt: int) -> Any:
        return sum(self.values(count, salt, rank) for rank in range(self.size))

    def shared(self, count: int) -> Any:
        """Memory that peers map: what is let go of is given out again at once."""
        storage = get_global_func("runtime.disco.cuda_ipc.alloc_storage")(Shape([count]), "int32")
        return get_global_func("tvm_ipc.alloc_tensor")(storage, 0, Shape([count]), "int32")

    def post(self, send: Any, recv: Any, function: str = "tvm_ipc.allreduce") -> Any:
        numbers = (SUM, WORLD, AUTO, 0) if function.endswith("allreduce") else (WORLD, 0)
        return get_global_func("tvm_ipc.start")(function, send, *numbers, recv)

    def expect(self, found: Any, wanted: Any) -> None:
        places.settle()
        np.testing.assert_array_equal(found.numpy(), wanted)


@register_global_func("tests.works.beside", override=True)
def beside(folder: str) -> None:
    """Rank 0's work waits for ranks that post when the stream of its program has ended."""
    worker, done = Worker(), Path(folder, f"done {time.strftime('%j')}")
    count = 50_000
    send, recv = places.tensor(worker.values(count, 1)), places.empty((count,), "int32")
    other = places.empty((count,), "int32")
    while worker.rank != 0 and not done.exists():
        time.sleep(0.001)
    work = worker.post(send, recv)
    worker.copy(send, other)
    cuda("StreamSynchronize", None)
    if worker.rank == 0:
        done.touch()
    worker.wait(work)
    worker.expect(recv, worker.total(count, 1))
    worker.expect(other, worker.values(count, 1))


@register_global_func("tests.works.in_order", override=True)
def in_order(seed: int, rounds: int) -> None:
    """A work reads what was written before it was posted, and what follows a wait reads its result.

    Meanwhile the program does collectives of the same ranks.
    """
    worker, drawn = Worker(), random.Random(seed)
    for salt in range(rounds):
        counts = [drawn.choice([1, 7, 3000, 70_000]) for _ in range(drawn.randrange(1, 4))]
        given = [places.tensor(worker.values(count, salt + k)) for k, count in enumerate(counts)]
        sends = [worker.shared(count) for count in counts]
        recvs, outs = ([places.empty((count,), "int32") for count in counts] for _ in range(2))
        mine = drawn.choice([5, 20_000])
        own, total = places.tensor(worker.values(mine, 50)), places.empty((mine,), "int32")
        works = []
        for value, send, recv in zip(given, sends, recvs, strict=True):
            worker.copy(value, send)
            works.append(worker.post(send, recv))
            if drawn.random() < 0.5:
                get_global_func("tvm_ipc.allreduce")(own, SUM, WORLD, AUTO, 0, total)
        get_global_func("tvm_ipc.allreduce")(own, SUM, WORLD, AUTO, 0, total)
        for k in drawn.sample(range(len(works)), len(works)):
            worker.wait(works[k])
            worker.copy(recvs[k], outs[k])
        for k, count in enumerate(counts):
            worker.expect(outs[k], worker.total(count, salt + k))
        worker.expect(total, worker.total(mine, 50))


@register_global_func("tests.works.kept", override=True)
def kept(rounds: int) -> None:
    """Nobody but the work has its input, whose memory is not used again before it is done."""
    worker, count = Worker(), 40_000
    other = places.tensor(np.full(count, -1, "int32"))
    for salt in range(rounds):
        recv = places.empty((count,), "int32")
        given = places.tensor(worker.values(count, salt))
        send = worker.shared(count)
        lay = send.data_ptr()
        worker.copy(given, send)
        work = worker.post(send, recv)
        del send
        again = worker.shared(count)
        assert again.data_ptr() != lay, "memory that a work reads was given out"
        worker.copy(other, again)
        if salt % 2:
            worker.wait(work)
        worker.expect(recv, worker.total(count, salt))
        # When the next one is posted, what is done lets go.
        worker.wait(worker.post(given, recv))
        places.settle()
        assert worker.shared(count).data_ptr() == lay, "memory of a work that is done is kept"


@register_global_func("tests.works.captured", override=True)
def captured(waits: bool) -> None:
    """Post, or wait for what was posted before, while a CUDA graph is being captured."""
    worker = Worker()
    send, recv = places.tensor(worker.values(3, 0)), places.empty((3,), "int32")
    work = worker.post(send, recv)
    with new_stream(places.here()) as stream, stream.current(), Graph(stream):
        if waits:
            worker.wait(work)
        else:
            worker.post(send, recv)
