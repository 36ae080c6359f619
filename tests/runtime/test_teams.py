# SPDX-License-Identifier: Apache-2.0
"""Teams of a session: what they are, who may use them, and two threads of each rank in two."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import tvm_ipc
from tests.collective_results import results_of
from tests.runtime import places
from tests.runtime.places import ON_GPUS
from tvm_ipc.errors import WorkerError
from tvm_ipc.packed_functions import KINDS

#: Of each thread in the long test; a long run has 10000.
OPERATIONS = int(os.environ.get("TEAM_OPERATIONS", "20" if ON_GPUS else "300"))


@pytest.fixture(scope="module")
def session() -> Iterator[tvm_ipc.Session]:
    with tvm_ipc.Session(4, num_groups=2, timeout=60) as session:
        session.import_python_module("tests.runtime.team_functions")
        yield session


def test_a_team_is_a_value(session: tvm_ipc.Session) -> None:
    team = session.team([0, 2, 3])
    assert team == session.team((0, 2, 3))
    assert {team: 1}[session.team([0, 2, 3])] == 1
    assert team.ranks == (0, 2, 3)
    ids = {session.team(r, c).id for r, c in (([0, 2, 3], 0), ([3, 2, 0], 0), ([0, 2, 3], 1))}
    assert len(ids) == 3
    assert all(team_id > 1 for team_id in ids)


def of_two_threads(session: tvm_ipc.Session, name: str, *arguments: int) -> list[int]:
    """What each rank returns; on GPUs the second thread is refused, and the session goes on."""
    result = session.get_global_func(name)(*arguments)
    if places.ON_GPUS:
        with pytest.raises(
            WorkerError, match="on it only the worker's own thread can call collectives"
        ) as error:
            session.sync()
        # Of all ranks, but those that another one's error stopped before.
        assert {one.kind for one in error.value.errors} == {"RuntimeError"}
        pytest.skip("on GPUs only the worker's own thread does collectives: docs/gpus.md")
    return [result.debug_get_from_remote(rank) for rank in range(4)]


@pytest.mark.skipif(places.ON_GPUS, reason="on GPUs a rank has seats for 14 teams")
def test_a_session_has_more_teams_than_anybody_needs(session: tvm_ipc.Session) -> None:
    teams = [session.team([1, 3], copy) for copy in range(64)]
    assert len({team.id for team in teams}) == 64
    x, y = session.put(np.ones(4, "float32")), session.put(np.zeros(4, "float32"))
    for team in teams:
        session.allreduce(x, y, team=team)
    assert session.get(y, 1).tolist() == session.get(y, 3).tolist() == [2] * 4
    assert session.get(y, 0).tolist() == [0] * 4  # which is no member


def test_collectives_over_a_team(session: tvm_ipc.Session) -> None:
    team = session.team([3, 0, 2])
    rows = np.arange(12, dtype="float32").reshape(3, 4)
    part = session.scatter(rows, team=team)
    for rank, row in zip(team.ranks, rows, strict=True):
        assert session.get(part, rank).tolist() == row.tolist()
    whole = session.empty((12,), "float32")
    session.allgather(part, whole, team=team)
    assert session.get(whole, 2).tolist() == list(range(12))
    total = session.empty((4,), "float32")
    session.allreduce(part, total, "max", team=team)
    assert session.get(total, 0).tolist() == rows.max(axis=0).tolist()
    gathered = session.empty((12,), "float32")
    session.gather_to_worker0(part, gathered, team=team)
    assert session.get(gathered, 3).tolist() == list(range(12))
    shown = session.broadcast(rows[1], team=team)
    assert all(session.get(shown, rank).tolist() == rows[1].tolist() for rank in team.ranks)


@pytest.mark.parametrize("members", [None, [3, 0, 2]], ids=["world", "team"])
@pytest.mark.parametrize("name", [kind.name for kind in KINDS.values() if kind.method_doc])
def test_each_collective(session: tvm_ipc.Session, name: str, members: list[int] | None) -> None:
    """In the world, and in a team in another order."""
    kind = KINDS[name]
    scope: dict[str, Any] = (
        {"in_group": False} if members is None else {"team": session.team(members)}
    )
    ranks = members or list(range(4))
    count = len(ranks)
    rows = np.arange(100, 100 + count * count, dtype="float32").reshape(count, count)
    own = session.scatter(rows, **scope)
    root = 0 if kind.disco else 1
    (size,) = kind.result_shape((count,), count)
    target = session.put(np.zeros(size, "float32"))
    options = {"root": root} if kind.rooted and not kind.disco else {}
    getattr(session, kind.method)(own, target, **options, **scope)
    for rank, wanted in zip(ranks, results_of(name, list(rows), root=root), strict=True):
        expected = np.zeros(size) if wanted is None else wanted
        np.testing.assert_array_equal(session.get(target, rank), expected)


@pytest.mark.parametrize("ranks", [[], [0, 4], [-1], [1, 1], "01", 3, [0.5]])
def test_ranks_that_are_no_team_are_refused(session: tvm_ipc.Session, ranks: object) -> None:
    with pytest.raises((ValueError, TypeError), match=r"team: ranks is ranks of workers"):
        session.team(ranks)  # type: ignore[arg-type]


def test_a_team_of_another_session_is_refused(session: tvm_ipc.Session) -> None:
    with tvm_ipc.Session(2, threads=True) as other:
        team = other.team([0, 1])
    x = session.put(np.ones(2, "float32"))
    with pytest.raises(ValueError, match="allreduce: team is a team of another session"):
        session.allreduce(x, x, team=team)


def test_in_group_takes_no_team(session: tvm_ipc.Session) -> None:
    x, team = session.put(np.ones(2, "float32")), session.team([0, 1])
    message = r"allreduce: in_group is True or False, not a team; pass team=Team\("
    with pytest.raises(TypeError, match=message):
        session.allreduce(x, x, in_group=team)  # type: ignore[arg-type]


def test_a_team_and_all_workers_are_refused(session: tvm_ipc.Session) -> None:
    x, team = session.put(np.ones(2, "float32")), session.team([0, 1])
    message = (
        r"reduce: in_group=False selects all workers, and team selects the workers \[0, 1\]; pass "
        "only one of them"
    )
    with pytest.raises(ValueError, match=message):
        session.reduce(x, x, in_group=False, team=team)


def test_ranks_are_no_team(session: tvm_ipc.Session) -> None:
    x = session.put(np.ones(2, "float32"))
    message = r"scatter_from_worker0: team is a team that session.team returned, .*, not \[0, 1\]$"
    with pytest.raises(TypeError, match=message):
        session.scatter_from_worker0(x, x, team=[0, 1])  # type: ignore[arg-type]


def test_a_rank_that_is_no_member_may_not_call(session: tvm_ipc.Session) -> None:
    team = session.team([0, 2])
    call = session.get_global_func("tests.allreduce_in")
    with pytest.raises(WorkerError, match=r"rank 1 called a collective in team \d+ \(ranks 0, 2\)"):
        call(team.id)
        session.sync()
    with pytest.raises(WorkerError, match="there is no team 4000"):
        call(4000)
        session.sync()
    session.allreduce(*[session.put(np.ones(1, "float32"))] * 2, team=team)
    session.sync()


def test_two_threads_of_each_rank_in_two_teams(session: tvm_ipc.Session) -> None:
    done = of_two_threads(session, "tests.two_threads", 11, OPERATIONS)
    assert all(OPERATIONS < one <= 2 * OPERATIONS for one in done)


def test_two_threads_of_each_rank_in_two_divisions(session: tvm_ipc.Session) -> None:
    done = of_two_threads(session, "tests.threads_in_divisions", OPERATIONS)
    assert done == [2 * OPERATIONS] * 4


def test_a_rank_says_what_it_computes_on(session: tvm_ipc.Session) -> None:
    device = session.get_global_func("tests.device_of_another_thread")()
    kind = "cuda" if ON_GPUS else "cpu"
    said = [device.debug_get_from_remote(rank) for rank in range(4)]
    assert [one.partition(":")[0] for one in said] == [kind] * 4


def test_a_thread_that_does_not_act_for_a_worker_is_told_so(session: tvm_ipc.Session) -> None:
    said = session.get_global_func("tests.without_rank")().debug_get_from_remote(1)
    assert "only in a worker of an initialised session" in said
    with pytest.raises(RuntimeError, match="only in a worker"):
        tvm_ipc.CurrentRank()
