# SPDX-License-Identifier: Apache-2.0
"""What ranks that are threads of one process do with their GPUs: calls that wait for all that the
process has there, between collectives, messages and shows, in another place on each rank.
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
from cuda_runtime import Graph, new_stream

WORLD, SUM, AUTO = int(Team.WORLD), int(ReduceKind.SUM), int(AllReduceStrategy.AUTO)


class Worker:
    """One rank: it works on values that tell who has what."""

    def __init__(self) -> None:
        self.rank = int(get_global_func("runtime.disco.worker_rank")())
        self.size = int(get_global_func("runtime.disco.world_size")())
        self.shown: list[Any] = []

    def values(self, rank: int, count: int) -> Any:
        return np.arange(count, dtype="int32") % 97 + 1000 * (rank + 1)

    def tensor(self, count: int) -> Any:
        return places.tensor(self.values(self.rank, count))

    def expect(self, found: Any, wanted: Any) -> None:
        places.settle()
        np.testing.assert_array_equal(found.numpy(), wanted)

    def reduce(self, count: int) -> None:
        total = places.empty((count,), "int32")
        function = get_global_func("tvm_ipc.allreduce")
        function(self.tensor(count), SUM, WORLD, AUTO, 0, total)
        self.expect(total, sum(self.values(r, count) for r in range(self.size)))

    def gather(self, count: int) -> None:
        whole = places.empty((self.size * count,), "int32")
        get_global_func("tvm_ipc.allgather")(self.tensor(count), WORLD, 0, whole)
        self.expect(whole, np.concatenate([self.values(r, count) for r in range(self.size)]))

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
        self.expect(recv, self.values(before, count))

    def expose(self, count: int) -> None:
        """Each rank reads what others show as often as it likes, some not at all."""
        shown = get_global_func("tvm_ipc.expose")(self.tensor(count), WORLD)
        self.wait_for_device()
        for shift in range(self.rank):
            theirs = get_global_func("tvm_ipc.peer_view")(shown, shift, Shape([count]))
            self.expect(theirs, self.values((self.rank + shift) % self.size, count))
        get_global_func("tvm_ipc.release")(WORLD, shown)

    def wait_for_device(self) -> None:
        """Allocate memory of the driver's, and give it back, which waits for the device."""
        places.empty((300,), "float32")


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
