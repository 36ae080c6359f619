# SPDX-License-Identifier: Apache-2.0
"""Collectives of two threads of each worker, in teams of their own, against NumPy.

A session loads it with `import_python_module("tests.runtime.team_functions")`, which registers
`tests.two_threads`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from tvm_ffi import Shape, get_global_func, register_global_func

import tvm_ipc
from tests.runtime import places


def values(seed: int, rank: int, count: int) -> np.ndarray:
    """What a rank gives to an operation; small integers, so that sums are exact."""
    return (np.arange(count) * 7 + rank * 13 + seed) % 50


def sequence(seed: int, count: int, teams: Sequence[tuple[int, tuple[int, ...]]], me: int) -> int:
    """A random sequence of collectives over some teams, drawn alike by all; how many this did."""
    draw = np.random.default_rng(seed)
    done = 0
    for number in range(count):
        team, ranks = teams[draw.integers(len(teams))]
        kind = ("allreduce", "allgather", "broadcast_from_worker0", "gather_to_worker0")[
            draw.integers(4)
        ]
        size = int(draw.choice([1, 3, 257, 1024, 5000]))
        strategy = int(draw.integers(4))
        if me not in ranks:
            continue
        done += 1
        given = [values(seed + number, rank, size) for rank in ranks]
        send = places.tensor(given[ranks.index(me)].astype("float32"))
        gathers = kind in ("allgather", "gather_to_worker0")
        recv = places.empty((size * len(ranks) if gathers else size,), "float32")
        wanted = np.concatenate(given) if gathers else given[0]
        if kind == "allreduce":
            get_global_func("tvm_ipc.allreduce")(send, 0, team, strategy, 0, recv)
            wanted = np.sum(given, axis=0)
        else:
            places.function(kind)(send, team, recv)
        if kind != "gather_to_worker0" or me == ranks[0]:
            np.testing.assert_array_equal(recv.numpy(), wanted)
    return done


def register(function: Callable[..., object]) -> Callable[..., object]:
    return register_global_func(f"tests.{function.__name__}", function, override=True)


@register
def two_threads(seed: int, count: int) -> int:
    """Own thread: world and groups of two; the other one: teams that nobody else uses."""
    rank = tvm_ipc.CurrentRank()
    me, team = rank.rank, get_global_func("tvm_ipc.team")
    group = (0, 1) if me < 2 else (2, 3)
    others = [(2, 0, 3, 1), (3, 1, 0), (1, 2)]
    with_ids = [(team(Shape(ranks), 0), ranks) for ranks in others]

    def other() -> int:
        with rank:
            return sequence(seed + 1, count, with_ids, me)

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(other)
        own = [(0, (0, 1, 2, 3)), (1, group)]
        # Both groups draw the same, so that all ranks keep to one sequence of world and groups.
        done = sequence(seed, count, own, me)
        return done + future.result()


@register
def threads_in_divisions(count: int) -> int:
    """Two threads, each in the rank's team of a division of its own, gather and check."""
    rank = tvm_ipc.CurrentRank()

    def gather(division: Sequence[int]) -> int:
        size, *ranks = division
        place = ranks.index(rank.rank) // size * size
        peers = ranks[place : place + size]
        with rank:
            recv = places.empty((size * 700,), "float32")
            for number in range(count):
                given = [values(number, one, 700) for one in peers]
                send = places.tensor(given[peers.index(rank.rank)].astype("float32"))
                get_global_func("tvm_ipc.allgather")(send, Shape(division), 0, recv)
                np.testing.assert_array_equal(recv.numpy(), np.concatenate(given))
        return count

    with ThreadPoolExecutor(2) as pool:
        return sum(pool.map(gather, ([2, 0, 1, 2, 3], [2, 3, 1, 2, 0])))


_refused = threading.Event()


@register
def wait_in_two_threads() -> str:
    """One thread of rank 0 waits for what rank 1 shows; another one is refused meanwhile."""
    rank = tvm_ipc.CurrentRank()
    expose, peer_view, release = (
        get_global_func(f"tvm_ipc.{name}") for name in ("expose", "peer_view", "release")
    )
    one = places.tensor(np.ones(3, "float32"))
    if rank.rank == 0:
        _refused.clear()
    get_global_func("tvm_ipc.allreduce")(one, 0, 0, 0, 0, one)
    if rank.rank == 1:
        _refused.wait(30)
    shown = expose(one, 0)

    def look_at_own() -> str:
        with rank:
            while not _refused.is_set():
                try:
                    peer_view(shown, 0, Shape([3]))
                except RuntimeError as error:
                    _refused.set()
                    return str(error)
        return ""

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(look_at_own)
        peer_view(shown, 1, Shape([3]))
        refusal = other.result()
    release(0, shown)
    return refusal


@register
def allreduce_in(team: int) -> None:
    """One all-reduce of a team, member or not."""
    one = places.tensor(np.ones(3, "float32"))
    get_global_func("tvm_ipc.allreduce")(one, 0, team, 0, 0, one)


@register
def device_of_another_thread() -> str:
    """What a thread that acts for the worker finds its device to be, and the worker too."""
    rank = tvm_ipc.CurrentRank()

    def find() -> str:
        with rank:
            return str(places.here())

    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(find).result()
    assert found == str(rank.device)
    return found


@register
def without_rank() -> str:
    """What a thread hears that does not act for the worker."""
    with ThreadPoolExecutor(1) as pool:
        try:
            pool.submit(allreduce_in, 0).result()
        except RuntimeError as error:
            return str(error)
    return ""
