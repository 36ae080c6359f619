# SPDX-License-Identifier: Apache-2.0
"""An emulated link: results are the same, and late; works travel while the program goes on."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

import tvm_ipc

LATE = 0.2


@pytest.fixture
def pair() -> Iterator[tvm_ipc.Session]:
    with tvm_ipc.Session(2, threads=True, timeout=60) as session:
        yield session


def seconds(session: tvm_ipc.Session, count: int = 1) -> float:
    """How long an all-reduce of so many float32 takes, at least; and that it is right."""
    x = session.put(np.arange(count, dtype="float32"))
    y = session.empty((count,), "float32")
    session.sync()
    start = time.monotonic()
    session.allreduce(x, y)
    session.sync()
    passed = time.monotonic() - start
    np.testing.assert_array_equal(session.get(y, rank=1), 2 * np.arange(count))
    return passed


def test_data_come_late_until_the_link_is_taken_away(pair: tvm_ipc.Session) -> None:
    pair.emulate_link(latency=LATE)
    assert seconds(pair) >= LATE
    pair.emulate_link(latency=3600)
    pair.emulate_link()
    seconds(pair)  # returns


@pytest.mark.slow
def test_large_data_come_later(pair: tvm_ipc.Session) -> None:
    count = 1000
    pair.emulate_link(bandwidth=4 * count / LATE)
    assert seconds(pair, count) >= LATE
    assert seconds(pair, 10 * count) >= 10 * LATE


def test_jitter_comes_on_top(pair: tvm_ipc.Session) -> None:
    pair.emulate_link(jitter=LATE)
    times = [seconds(pair) for _ in range(8)]
    assert max(times) - min(times) > LATE / 4


def test_every_collective_is_late(pair: tvm_ipc.Session) -> None:
    pair.emulate_link(latency=LATE / 3)
    x, y = pair.put(np.ones(4, "float32")), pair.empty((8,), "float32")
    half, other = pair.empty((2,), "float32"), pair.empty((4,), "float32")
    another = pair.empty((4,), "float32")
    norm = pair.get_global_func("tvm_ipc.allreduce_rms_norm")
    ragged = pair.get_global_func("tvm_ipc.ragged_all_to_all")
    counts, received = pair.put(np.array([1, 3])), pair.empty((2,), "int64")
    for call in (
        lambda: norm(x, x, x, 1e-5, 0, 3, 0, other, another),
        lambda: pair.allgather(x, y),
        lambda: pair.reduce_scatter(x, half),
        lambda: pair.reduce(x, other),
        lambda: pair.all_to_all(x, other),
        lambda: ragged(x, counts, 0, 0, y, received),
        lambda: pair.broadcast_from_worker0(x, other),
        lambda: pair.scatter_from_worker0(x, half),
        lambda: pair.gather_to_worker0(x, y),
    ):
        start = time.monotonic()
        call()
        pair.sync()
        assert time.monotonic() - start >= LATE / 3


@pytest.mark.slow
def test_the_program_goes_on_while_works_travel(pair: tvm_ipc.Session) -> None:
    latency = 2  # longer than to post a work takes on a busy machine
    pair.emulate_link(latency=latency)
    post, wait = pair.get_global_func("tvm_ipc.start"), pair.get_global_func("tvm_ipc.wait")
    x, y = pair.put(np.arange(4, dtype="float32")), pair.empty((4,), "float32")
    pair.sync()
    start = time.monotonic()
    work = post("tvm_ipc.allreduce", x, 0, 0, 3, 0, y)
    x.debug_copy_from(0, np.zeros(4, "float32"))  # worker 0 has posted when this returns
    assert time.monotonic() - start < latency
    wait(work)
    pair.sync()
    assert time.monotonic() - start >= latency


def test_one_worker_receives_nothing() -> None:
    with tvm_ipc.Session(1, threads=True) as session:
        session.emulate_link(latency=60)
        x = session.put(np.ones(4, "float32"))
        session.allreduce(x, x)
        session.sync()
