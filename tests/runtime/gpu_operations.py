# SPDX-License-Identifier: Apache-2.0
"""Operations of workers on their GPUs, which compare each result with the right one.

Each function is called on all ranks. Requests run concurrently with the operations on the stream of
the program. Calls that wait for all work of a process on its devices come between collectives,
messages and exposed tensors, at another place on each rank.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
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
    """One rank: it works on values that tell who has what, in which round."""

    def __init__(self) -> None:
        self.rank = int(get_global_func("runtime.disco.worker_rank")())
        self.size = int(get_global_func("runtime.disco.world_size")())
        self.copy = get_global_func("tvm_ipc.copy")
        self.wait = get_global_func("tvm_ipc.wait")
        self.on = get_global_func("tvm_ipc.set_stream")
        self.after = get_global_func("tvm_ipc.wait_stream")

    def values(self, count: int, salt: int = 0, rank: int | None = None) -> Any:
        rank = self.rank if rank is None else rank
        return np.arange(count, dtype="int32") % 89 + 1000 * (rank + 1) + 17 * salt

    def total(self, count: int, salt: int = 0) -> Any:
        return sum(self.values(count, salt, rank) for rank in range(self.size))

    def tensor(self, count: int) -> Any:
        return places.tensor(self.values(count))

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

    def reduce(self, count: int) -> None:
        total = places.empty((count,), "int32")
        function = get_global_func("tvm_ipc.allreduce")
        function(self.tensor(count), SUM, WORLD, AUTO, 0, total)
        self.expect(total, self.total(count))

    def gather(self, count: int) -> None:
        whole = places.empty((self.size * count,), "int32")
        get_global_func("tvm_ipc.allgather")(self.tensor(count), WORLD, 0, whole)
        self.expect(whole, np.concatenate([self.values(count, rank=r) for r in range(self.size)]))

    def exchange(self, count: int) -> None:
        """A message to the next rank, which many send before they receive, while packets last."""
        send, recv = self.tensor(count), places.empty((count,), "int32")
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        steps: list[Callable[[], None]] = [
            lambda: places.function("send_to_worker")(send, after),
            lambda: places.function("recv_from_worker")(recv, before),
        ]
        if count > 16_000 and self.rank == 0:  # more than a packet: somebody receives first
            steps.reverse()
        for step in steps:
            step()
            self.wait_for_device()
        self.expect(recv, self.values(count, rank=before))

    def expose(self, count: int) -> None:
        """Each rank reads what others show as often as it likes, some not at all."""
        shown = get_global_func("tvm_ipc.expose")(self.tensor(count), WORLD)
        self.wait_for_device()
        for shift in range(self.rank):
            theirs = get_global_func("tvm_ipc.peer_view")(shown, shift, Shape([count]))
            self.expect(theirs, self.values(count, rank=(self.rank + shift) % self.size))
        get_global_func("tvm_ipc.release")(WORLD, shown)

    def wait_for_device(self) -> None:
        """Allocate memory of the driver's, and give it back, which waits for the device."""
        places.empty((300,), "float32")


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
        assert again.data_ptr() != lay, "memory that an operation reads was allocated again"
        worker.copy(other, again)
        if salt % 2:
            worker.wait(work)
        worker.expect(recv, worker.total(count, salt))
        # When the next one is posted, what is done lets go.
        worker.wait(worker.post(given, recv))
        places.settle()
        assert worker.shared(count).data_ptr() == lay, "memory of an ended operation is kept"


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


@register_global_func("tests.streams.beside", override=True)
def streams_beside(folder: str) -> None:
    """Stream 1 of rank 0 waits for ranks that go on when its stream 0 has ended."""
    worker, done = Worker(), Path(folder, f"done {time.strftime('%j')}")
    count = 50_000
    send, recv = places.tensor(worker.values(count, 1)), places.empty((count,), "int32")
    other = places.empty((count,), "int32")
    while worker.rank != 0 and not done.exists():
        time.sleep(0.001)
    worker.on(1)
    worker.after(0)
    get_global_func("tvm_ipc.allreduce")(send, SUM, WORLD, AUTO, 0, recv)
    worker.on(0)
    worker.copy(send, other)
    cuda("StreamSynchronize", None)
    if worker.rank == 0:
        done.touch()
    worker.after(1)
    worker.expect(recv, worker.total(count, 1))
    worker.expect(other, worker.values(count, 1))


@register_global_func("tests.streams.in_order", override=True)
def streams_in_order(seed: int, rounds: int) -> None:
    """Chunks on three streams, each with a request; a stream reads what another one has made."""
    worker, drawn = Worker(), random.Random(seed)
    for salt in range(rounds):
        counts = [drawn.choice([1, 7, 3000, 70_000]) for _ in range(6)]
        given = [places.tensor(worker.values(count, salt + k)) for k, count in enumerate(counts)]
        sends, recvs, outs, again = (
            [places.empty((count,), "int32") for count in counts] for _ in range(4)
        )
        for stream in (1, 2):
            worker.on(stream)
            worker.after(0)
        for k in range(6):
            worker.on(k % 3)
            worker.copy(given[k], sends[k])
            work = worker.post(sends[k], recvs[k])
            worker.wait(work)
            worker.copy(recvs[k], outs[k])
            if k % 3:
                worker.after(k % 3 - 1)
                worker.copy(outs[k - 1], again[k - 1])
        worker.on(0)
        for stream in (1, 2):
            worker.after(stream)
        for k, count in enumerate(counts):
            for found in (outs, again) if k % 3 < 2 else (outs,):
                copied = places.empty((count,), "int32")
                worker.copy(found[k], copied)
                worker.expect(copied, worker.total(count, salt + k))


@register_global_func("tests.streams.left", override=True)
def streams_left(raises: bool) -> None:
    """Return, or raise an error, on another stream."""
    Worker().on(2)
    if raises:
        raise ValueError("it broke on stream 2")


@register_global_func("tests.streams.captured", override=True)
def streams_captured(name: str) -> None:
    """Set the stream, or wait for another one, while a CUDA graph is being captured."""
    with new_stream(places.here()) as stream, stream.current(), Graph(stream):
        get_global_func(f"tvm_ipc.{name}")(1)


@register_global_func("tests.capture", override=True)
def capture() -> None:
    """An all-reduce in a CUDA graph."""
    send, recv = Worker().tensor(3), places.empty((3,), "int32")
    with new_stream(places.here()) as stream, stream.current(), Graph(stream):
        get_global_func("tvm_ipc.allreduce")(send, SUM, WORLD, AUTO, 0, recv)


@register_global_func("tests.wait_between", override=True)
def wait_between(seed: int, rounds: int) -> None:
    """Operations in the same order on all ranks, and what waits for devices in any."""
    worker = Worker()
    alike, alone = random.Random(seed), random.Random(seed * 100 + worker.rank)
    for _ in range(rounds):
        operation = alike.choice([worker.reduce, worker.gather, worker.exchange, worker.expose])
        count = alike.choice([1, 7, 3000, 70_000, 300_000])
        for _ in range(alone.randrange(3)):
            worker.wait_for_device()
        if alone.random() < 0.3:
            time.sleep(0.002 * alone.random())
        operation(count)
