# SPDX-License-Identifier: Apache-2.0
"""What each MPI rank of `test_engine.py` runs: an engine, and somebody who posts messages for it.

All ranks draw the same plan of messages from the same seed, and each posts its part, in any order
between tags. After some of the rounds a part of the messages is never sent, or never received, and
the session recovers.
"""

from __future__ import annotations

import queue
import random
import sys
import time
from typing import Any

import numpy as np
from mpi4py import MPI

from tvm_ipc.nodes.engine import Engine
from tvm_ipc.nodes.mpi_transport import MpiTransport

SECONDS = 60.0
ROOM = 70000
SIZES = (0, 1, 64, 5000, 65536, ROOM)


class PostedWire:
    """A wire whose messages are posted by this process."""

    def __init__(self) -> None:
        self.posted: queue.SimpleQueue[tuple[int, ...]] = queue.SimpleQueue()
        self.ended: dict[int, int] = {}
        self.generation = 0
        self.flushed = 0

    def take(self) -> list[tuple[int, ...]]:
        works = []
        while not self.posted.empty() and len(works) < 7:
            work = self.posted.get()
            if work[5] == self.flushed:  # of an older generation: forgotten
                works.append(work)
        return works

    def done(self, ended: list[tuple[Any, int]]) -> None:
        self.ended.update({request: came for (_, request), came in ended})

    def sleep(self, seconds: float) -> None:
        time.sleep(min(seconds, 0.001))

    def ring(self) -> None:
        pass


def content(seed: int, number: int, count: int) -> Any:
    return np.random.default_rng((seed, number)).integers(0, 256, count, np.uint8)


def play(wire: PostedWire, seed: int, whole: bool) -> None:
    """One round of a few hundred messages; not all of them are posted unless it is whole."""
    me, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    plan = random.Random(seed)
    messages = []
    for number in range(300):
        sender, receiver = plan.sample(range(size), 2)
        tag = plan.choice((0, 1, 5, 1 << 20, (1 << 26) + 3))
        messages.append((number, sender, receiver, tag, plan.choice(SIZES)))
    mine: dict[tuple[int, int, int], list[Any]] = {}
    for message in messages:
        _, sender, receiver, tag, _ = message
        if me in (sender, receiver):
            mine.setdefault((sender, receiver, tag), []).append(message)
    own = random.Random(seed * 1000 + me)
    wanted = {}
    kept = []
    wire.ended.clear()
    while mine:
        way = own.choice(list(mine))
        number, sender, receiver, tag, count = mine[way].pop(0)
        if not mine[way]:
            del mine[way]
        if not whole and own.random() < 0.3:
            mine.pop(way, None)  # nor anything after it
            continue
        sends = sender == me
        memory = np.full(count if sends else ROOM, 0xEE, np.uint8)
        if sends:
            memory[:] = content(seed, number, count)
        kept.append(memory)
        wanted[number] = (sends, memory, count)
        peer = receiver if sends else sender
        address, room = memory.ctypes.data, len(memory)
        wire.posted.put((0, number, int(sends), peer, tag, wire.generation, address, room))
        if own.random() < 0.05:
            time.sleep(0.001)
    if not whole:
        time.sleep(own.random() * 0.01)
        GRAVEYARD.extend(kept)
        wire.generation += 1
        return
    end = time.monotonic() + SECONDS
    while len(wire.ended) < len(wanted):
        assert time.monotonic() < end, f"rank {me}: {len(wire.ended)} of {len(wanted)} ended"
        time.sleep(0.001)
    for number, (sends, memory, count) in wanted.items():
        assert wire.ended[number] == count, (number, wire.ended[number], count)
        if not sends:
            assert (memory[:count] == content(seed, number, count)).all(), f"message {number}"
            assert (memory[count:] == 0xEE).all(), f"message {number} wrote beyond its end"


#: Memory of messages that may still be on their way.
GRAVEYARD: list[Any] = []


def main(largest_tag: int, rounds: int) -> None:
    wire = PostedWire()
    engine = Engine(wire, lambda: MpiTransport(MPI.COMM_WORLD, largest_tag))
    for seed in range(rounds):
        play(wire, 2 * seed, whole=False)
        if seed % 3 == 0:
            wire.generation += 1  # twice in a row
        end = time.monotonic() + SECONDS
        while wire.flushed != wire.generation:
            assert engine.error is None, engine.error
            assert time.monotonic() < end, "no flush"
            time.sleep(0.001)
        play(wire, 2 * seed + 1, whole=True)
    engine.close()
    assert engine.error is None, engine.error
    MPI.COMM_WORLD.Barrier()
    print("ok", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
