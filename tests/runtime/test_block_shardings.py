# SPDX-License-Identifier: Apache-2.0
"""Teams that are given as the division of ranks, and numbers that no parameter takes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tvm_ffi import Shape

import tvm_ipc
from tests.runtime.places import PREFIX
from tests.runtime.tensors_of_ranks import write_each
from tvm_ipc.errors import WorkerError

RANKS = 4


@pytest.fixture(scope="module")
def session() -> Iterator[tvm_ipc.Session]:
    with tvm_ipc.Session(RANKS, threads=True, timeout=20) as session:
        yield session


def gathered(session: tvm_ipc.Session, team: Any, size: int = 2) -> list[list[float]]:
    """What each rank gets of the ranks of its team, each of which gives its number."""
    part, whole = session.empty((1,), "float32"), session.empty((size,), "float32")
    write_each(part, [np.full(1, rank, "float32") for rank in range(RANKS)])
    session.get_global_func("tvm_ipc.allgather")(part, team, 0, whole)
    session.sync()
    return [session.get(whole, rank).tolist() for rank in range(RANKS)]


@pytest.mark.parametrize(
    ("division", "teams"),
    [
        ([2, 0, 1, 2, 3], [[0, 1], [0, 1], [2, 3], [2, 3]]),
        ([2, 3, 0, 1, 2], [[3, 0], [1, 2], [1, 2], [3, 0]]),
        ([1, 3, 0, 1, 2], [[0], [1], [2], [3]]),
        ([4, 3, 1, 0, 2], [[3, 1, 0, 2]] * 4),
    ],
)
def test_a_rank_is_in_the_team_that_names_it(
    session: tvm_ipc.Session, division: list[int], teams: list[list[int]]
) -> None:
    assert gathered(session, Shape(division), division[0]) == teams


@pytest.mark.parametrize(
    ("division", "message"),
    [
        ([], "teams in a call are the size of the teams, then the ranks of each team in"),
        ([2], "turn; got [2]"),
        ([0, 0, 1, 2, 3], "turn; got [0, 0, 1, 2, 3]"),
        ([-2, 0, 1, 2, 3], "turn; got [-2, 0, 1, 2, 3]"),
        ([3, 0, 1, 2, 3], "turn; got [3, 0, 1, 2, 3]"),
        ([8, 0, 1, 2, 3], "turn; got [8, 0, 1, 2, 3]"),
        ([1 << 62, 0, 1, 2, 3], f"turn; got [{1 << 62}, 0, 1, 2, 3]"),
        ([2, 0, 0, 2, 3], "teams of the ranks [0, 0, 2, 3]: rank 0 is there twice"),
        ([2, 0, 1, 1, 2, 2, 3], "rank 1 is there twice"),
        ([2, 0, -1, 2, 3], "there is no rank -1 among 4 workers"),
        ([2, 0, 1, 2, 4], "there is no rank 4 among 4 workers"),
        ([2, 0, 1, 2, 64], "there is no rank 64 among 4 workers"),
        ([2, 0, 1, 2, 3, 4, 5], "there is no rank 4 among 4 workers"),
        ([2, 1 << 32, 1, 2, 3], f"there is no rank {1 << 32} among 4 workers"),
    ],
)
def test_what_divides_no_ranks_is_refused(
    session: tvm_ipc.Session, division: list[int], message: str
) -> None:
    # No rank waits for one that was told, but for its end.
    with pytest.raises(WorkerError, match=re.escape(message)):
        gathered(session, Shape(division))
    assert gathered(session, Shape([2, 0, 1, 2, 3]))[3] == [2, 3]


def test_a_rank_that_is_in_no_team(session: tvm_ipc.Session) -> None:
    part, whole = session.empty((1,), "float32"), session.empty((2,), "float32")
    write_each(part, [np.full(1, rank, "float32") for rank in range(RANKS)])
    write_each(whole, [np.full(2, 9, "float32")] * RANKS)
    allgather = session.get_global_func("tvm_ipc.allgather")
    allgather(part, Shape([2, 3, 1]), 0, whole)
    found = [session.get(whole, rank).tolist() for rank in range(RANKS)]
    assert found == [[0, 0], [3, 1], [0, 0], [3, 1]]
    message = re.escape("own_slice: teams of the ranks [3, 1]: rank 0 is in none; only members")
    session.get_global_func("tvm_ipc.own_slice")(whole, Shape([2, 3, 1]), 0, 1, 0, Shape([1]))
    with pytest.raises(WorkerError, match=message):
        session.sync()


@pytest.mark.parametrize("number", [1 << 32, -(1 << 32), 1 << 31, (1 << 40) + 1])
def test_a_number_is_not_cut_off(session: tvm_ipc.Session, number: int) -> None:
    x, y = session.empty((4,), "float32"), session.empty((4,), "float32")
    calls: dict[str, tuple[Any, ...]] = {
        f"broadcast: the number {number} is beyond those": ("broadcast", x, number, 0, 0, y),
        f"there is no team {number}": ("broadcast", x, 0, number, 0, y),
        f"broadcast: unknown flags {number}": ("broadcast", x, 0, 0, number, y),
        f"allreduce: there is no reduction {number}": ("allreduce", x, number, 0, 0, 0, y),
        f"allreduce: there is no strategy {number}": ("allreduce", x, 0, 0, number, 0, y),
        f"permute: there is no source {number}": ("permute", x, Shape([number] * 4), 0, 0, y),
    }
    for message, (name, *given) in calls.items():
        session.get_global_func(f"tvm_ipc.{name}")(*given)
        with pytest.raises(WorkerError, match=re.escape(message)):
            session.sync()
    for message, name in (
        (f"send_to_worker: the number {number} is", "send_to_worker"),
        (f"recv_from_worker: the number {number} is", "recv_from_worker"),
    ):
        session.get_global_func(PREFIX + name)(x, number)
        with pytest.raises(WorkerError, match=re.escape(message)):
            session.sync()
