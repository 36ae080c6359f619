# SPDX-License-Identifier: Apache-2.0
"""Requests: collectives that a program posts, and that go on beside it until it waits."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tvm_ffi import Shape

import tvm_ipc
from tests.runtime.collective_cases import again_and_again
from tests.runtime.disco_kinds import on_workers
from tests.runtime.places import ON_GPUS
from tests.runtime.tensors_of_ranks import assert_each
from tvm_ipc.comm import KINDS
from tvm_ipc.errors import DeadlineError, WorkerDiedError, WorkerError
from tvm_ipc.packed_functions import REDUCED_TYPES
from tvm_ipc.packed_functions.program_function_declarations import TEAM_INDEX

ALLREDUCE, ALLGATHER = "tvm_ipc.allreduce", "tvm_ipc.allgather"
OpenSession = Callable[..., tvm_ipc.Session]


class Requests:
    """A session of threads, and what posts in it."""

    def __init__(self, session: tvm_ipc.Session) -> None:
        self.session = session
        self.post = session.get_global_func("tvm_ipc.start")
        self.wait = session.get_global_func("tvm_ipc.wait")

    def sum(self, x: Any, y: Any) -> Any:
        return self.post(ALLREDUCE, x, 0, 0, 3, 0, y)

    def put(self, count: int) -> Any:
        return self.session.put(np.arange(count, dtype="float32"))

    def empty(self, count: int) -> Any:
        return self.session.empty((count,), "float32")


@pytest.fixture(scope="module")
def opened(opened: OpenSession) -> OpenSession:
    # On GPUs threads of other teams may come between launches: docs/gpus.md.
    return lambda ranks, groups=1: opened(ranks, groups, threads=not ON_GPUS)


@pytest.fixture
def trio(opened: OpenSession) -> Requests:
    return Requests(opened(3))


@pytest.mark.parametrize(
    "plan",
    [
        ("allreduces_by_way",),
        ("allreduces_by_type", "bfloat16"),
        ("reduce_scatters", "float32"),
        ("reduces", "float16"),
        ("all_to_alls", "float32"),
        ("all_to_alls_of_parts", "float64"),
        ("rooted_moves", "float32"),
        ("permutes", "bfloat16"),
    ],
    ids=lambda plan: plan[0],
)
@pytest.mark.parametrize("ranks", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_each_collective_gives_what_it_gives_when_called(
    ranks: int, plan: tuple[str, ...], opened: OpenSession
) -> None:
    session = opened(ranks)
    posted, called = (
        on_workers(session.get_global_func(f"tests.{how}_collectives")(1, True, *plan), ranks)
        for how in ("post", "run")
    )
    assert posted == called


EVERY_TYPE = (*REDUCED_TYPES, "float8_e4m3fn", "float8_e5m2")


def test_again_and_again_is_every_kind() -> None:
    """That a program can call or post with its arguments; send_recv is a permute, too."""
    does = {
        f"tvm_ipc.{case.operation.removesuffix('_parts')}" for case in again_and_again(2, "int8")
    }
    assert does == {kind.function.name for kind in KINDS.values()} - {TEAM_INDEX.name}


@pytest.mark.slow
@pytest.mark.parametrize("posts", [False, True], ids=["called", "posted"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_every_kind_and_type_again_and_again(ranks: int, posts: bool, opened: OpenSession) -> None:
    session = opened(ranks)
    function = session.get_global_func(f"tests.{'post' if posts else 'run'}_collectives")
    for dtype in EVERY_TYPE:
        function(1, True, "again_and_again", dtype)
    session.sync()


@pytest.mark.slow
@pytest.mark.parametrize("posts", [False, True], ids=["called", "posted"])
def test_in_two_teams_of_a_mesh_at_once(posts: bool, opened: OpenSession) -> None:
    session = opened(4)
    function = session.get_global_func("tests.collectives_in_two_teams")
    done = [function(posts, "again_and_again", dtype) for dtype in EVERY_TYPE]
    assert all(one.debug_get_from_remote(3) >= 2 * 8 * 11 for one in done)


def test_in_groups(opened: OpenSession) -> None:
    session = opened(4, 2)
    for seed in range(3):
        for in_group in (True, False):
            for how in ("post", "run"):
                function = session.get_global_func(f"tests.{how}_collectives")
                function(2, in_group, "storm", seed, 30)
    session.sync()


def test_the_program_goes_on_with_the_same_team(trio: Requests) -> None:
    """Requests have teams of their own, so calls between start and wait do not block them."""
    session = trio.session
    inputs = [trio.put(1000 + k) for k in range(4)]
    outputs = [trio.empty(1000 + k) for k in range(4)]
    works = [trio.sum(x, y) for x, y in zip(inputs, outputs, strict=True)]
    other = trio.empty(7)
    session.allreduce(trio.put(7), other)
    session.get_global_func(ALLREDUCE)(trio.put(7), 0, 0, 3, 0, trio.empty(7))
    for k in (2, 0, 3, 1):
        trio.wait(works[k])
        for rank in range(3):
            wanted = 3 * np.arange(1000 + k, dtype="float32")
            np.testing.assert_array_equal(session.get(outputs[k], rank=rank), wanted)
    np.testing.assert_array_equal(session.get(other), 3 * np.arange(7))


def test_teams_of_some(opened: OpenSession) -> None:
    session = opened(4)
    works = Requests(session)
    team = session.team([3, 1])
    x, y = works.put(5), works.empty(5)
    function = session.get_global_func("tvm_ipc.worker.call_in_team")
    post = session.get_global_func("tvm_ipc.start")
    function(post, team.id, ALLREDUCE, x, 0, team.id, 3, 0, y)
    for rank in (1, 3):
        np.testing.assert_array_equal(session.get(y, rank=rank), 2 * np.arange(5))


def test_waiting_twice_or_never(trio: Requests) -> None:
    x, y = trio.put(9), trio.empty(9)
    work = trio.sum(x, y)
    trio.wait(work)
    trio.wait(work)
    for _ in range(50):
        trio.sum(x, y)
    # To get a value waits for all that was posted before.
    np.testing.assert_array_equal(trio.session.get(y), 3 * np.arange(9))


def test_what_is_posted_is_kept_until_it_is_done(trio: Requests) -> None:
    y = trio.empty(100_000)
    for _ in range(20):
        trio.sum(trio.put(100_000), y)  # nobody else has the input
    np.testing.assert_array_equal(trio.session.get(y, rank=2), 3 * np.arange(100_000))


# ---- errors ---------------------------------------------------------------------------------


def test_an_error_comes_home_at_the_next_sync(trio: Requests) -> None:
    trio.sum(trio.put(4), trio.empty(5))
    message = "allreduce: send has 4 x float32, recv has 5 x float32; they must be equal"
    with pytest.raises(WorkerError, match=message):
        trio.session.sync()
    assert trio.session.usable


def test_an_error_comes_home_at_its_wait(trio: Requests) -> None:
    work = trio.sum(trio.put(4), trio.empty(5))
    trio.wait(work)
    with pytest.raises(WorkerError, match="allreduce: send has 4 x float32") as error:
        trio.session.sync()
    assert all(one.kind == "ValueError" for one in error.value.errors), "the cause, once"


def test_works_after_an_error_are_not_started(trio: Requests) -> None:
    x, y = trio.put(4), trio.empty(4)
    trio.session.sync()
    trio.sum(x, trio.empty(5))
    later = [trio.sum(x, y) for _ in range(3)]
    with pytest.raises(WorkerError):
        trio.session.sync()
    for work in later:  # these are of before the error
        trio.wait(work)
    with pytest.raises(WorkerError, match=r"is what start returned|started asynchronously, failed"):
        trio.session.sync()
    trio.wait(trio.sum(x, y))
    np.testing.assert_array_equal(trio.session.get(y), 3 * np.arange(4))


def test_ranks_that_post_different_works(trio: Requests) -> None:
    session = trio.session
    x, y = trio.put(4), trio.empty(4)
    post = session.get_global_func("tests.call_elsewhere")
    one, rest = ((ALLREDUCE, x, kind, 0, 3, 0, y) for kind in (0, 1))
    post(1, "tvm_ipc.start", "tvm_ipc.start", len(one), *one, *rest)
    with pytest.raises(WorkerError, match=r"the ranks disagree in team .*allreduce\(prod") as error:
        session.sync()
    assert {one.kind for one in error.value.errors} == {"MismatchError"}


def test_a_rank_that_does_not_come() -> None:
    with tvm_ipc.Session(2, threads=True, timeout=1) as session:
        session.import_python_module("tests.runtime.worker_functions")
        works = Requests(session)
        x = works.put(3)
        session.get_global_func("tests.call_elsewhere")(
            0,
            "tvm_ipc.start",
            "runtime.disco.worker_rank",
            7,
            ALLREDUCE,
            x,
            0,
            0,
            3,
            0,
            works.empty(3),
        )
        with pytest.raises((WorkerError, DeadlineError), match=r"waited 1 s for rank 1"):
            session.sync()


def test_ranks_that_post_in_different_orders() -> None:
    """Each waits for the other in another team: after the deadline all hear of it."""
    with tvm_ipc.Session(2, threads=True, timeout=1) as session:
        session.import_python_module("tests.runtime.worker_functions")
        works = Requests(session)
        teams = [session.team([0, 1]).id, session.team([1, 0]).id]
        x = works.put(3)
        for first in (0, 1):
            mine, other = (
                (ALLREDUCE, x, 0, team, 3, 0, works.empty(3))
                for team in (teams[first], teams[1 - first])
            )
            session.get_global_func("tests.call_elsewhere")(
                0, "tvm_ipc.start", "tvm_ipc.start", len(mine), *mine, *other
            )
        with pytest.raises((WorkerError, DeadlineError), match=r"waited 1 s for rank \d"):
            session.sync()


@pytest.mark.parametrize("in_a_cycle", [False, True])
def test_teams_that_overlap(in_a_cycle: bool) -> None:
    """Each rank posts in two of three teams; in a cycle each waits for another, and hears of it."""
    teams = [[0, 1], [1, 2], [2, 0]]
    orders = [[0, 2], [1, 0], [2, 1]] if in_a_cycle else [[0, 2], [0, 1], [1, 2]]
    with tvm_ipc.Session(3, threads=True, timeout=1 if in_a_cycle else 60) as session:
        session.import_python_module("tests.runtime.worker_functions")
        works = Requests(session)
        ids = [session.team(team).id for team in teams]
        x, outputs = works.put(3), [works.empty(3) for _ in teams]
        call_on = session.get_global_func("tests.call_on")
        for turn in range(2):
            for rank, order in enumerate(orders):
                team = order[turn]
                given = (ALLREDUCE, x, 0, ids[team], 3, 0, outputs[team])
                call_on(rank, "tvm_ipc.start", *given)
        if in_a_cycle:
            with pytest.raises((WorkerError, DeadlineError), match=r"waited 1 s for rank \d"):
                session.sync()
            return
        session.sync()
        for team, output in zip(teams, outputs, strict=True):
            for rank in team:
                np.testing.assert_array_equal(session.get(output, rank=rank), 2 * np.arange(3))


def test_a_sync_while_works_of_two_teams_are_on_their_way(opened: OpenSession) -> None:
    """It waits for those of both, in whatever order their ranks get there."""
    session = opened(4)
    works = Requests(session)
    if not ON_GPUS:  # links are emulated between CPUs alone
        session.emulate_link(latency=0.02)
    x, outputs = works.put(5), [works.empty(5) for _ in range(6)]
    for k, y in enumerate(outputs):
        division = Shape([2, 0, 1, 2, 3] if k % 2 else [2, 0, 2, 1, 3])
        works.post(ALLREDUCE, x, 0, division, 3, 0, y)
        if k % 3 == 2:
            session.sync()
            for done in outputs[: k + 1]:
                assert_each(done, [2 * np.arange(5)] * 4)
    if not ON_GPUS:
        session.emulate_link()


@pytest.mark.parametrize("ranks", [4, 5, 8])
def test_many_ranks(ranks: int, opened: OpenSession) -> None:
    session = opened(ranks)
    for plan in (("small_ones",), ("storm", 1, 40)):
        session.get_global_func("tests.post_collectives")(1, True, *plan)
    session.sync()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "the first argument is the name of a function"),
        ((3,), "the first argument is the name of a function"),
        (
            ("tvm_ipc.copy",),
            "tvm_ipc.copy cannot be started asynchronously; expected one of tvm_ipc.all_to_all, ",
        ),
        (("tests.run_collectives",), "tests.run_collectives cannot be started asynchronously"),
        ((ALLGATHER, 1), "Expected 4 but got 1 arguments"),
    ],
)
def test_what_cannot_be_posted(arguments: Any, message: str, trio: Requests) -> None:
    trio.post(*arguments)
    with pytest.raises(WorkerError, match=re.escape(message)):
        trio.session.sync()


@pytest.mark.parametrize("work", [None, 3, "work"])
def test_what_cannot_be_waited_for(work: Any, trio: Requests) -> None:
    trio.wait(work)
    with pytest.raises(WorkerError, match=r"wait: request is what start returned"):
        trio.session.sync()


def test_outside_of_a_session() -> None:
    import tvm_ffi

    with pytest.raises(RuntimeError, match="only in a worker of an initialised session"):
        tvm_ffi.get_global_func("tvm_ipc.start")(ALLREDUCE)


# ---- ends -----------------------------------------------------------------------------------


def test_a_session_that_closes_waits_for_its_works() -> None:
    for ranks in (1, 2, 3):
        with tvm_ipc.Session(ranks, threads=True, timeout=60) as session:
            works = Requests(session)
            for _ in range(30):
                works.sum(works.put(1000), works.empty(1000))


def test_a_worker_that_dies_with_works_on_their_way() -> None:
    with tvm_ipc.Session(3, timeout=30) as session:
        works = Requests(session)
        x, y = works.put(1000), works.empty(1000)
        works.wait(works.sum(x, y))
        session.sync()
        os.kill(session.pids[2], signal.SIGSTOP)
        posted = [works.sum(x, y) for _ in range(5)]
        time.sleep(0.2)
        os.kill(session.pids[2], signal.SIGKILL)
        with pytest.raises(WorkerDiedError):
            works.wait(posted[-1])
            session.sync()


@pytest.mark.skipif(ON_GPUS, reason="GPUs have streams")
@pytest.mark.parametrize("name", ["set_stream", "wait_stream"])
def test_cpus_have_no_streams(trio: Requests, name: str) -> None:
    trio.session.get_global_func(f"tvm_ipc.{name}")(1)
    with pytest.raises(WorkerError, match=f"{name}: the workers of this session are on CPUs"):
        trio.session.sync()
