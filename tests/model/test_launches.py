# SPDX-License-Identifier: Apache-2.0
"""Kernels of threads that share a process, and calls that wait for them, in every order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest

from tests.model import launch_model
from tests.model.launch_model import Protocol
from tests.model.model_checker import fails, holds

pytestmark = pytest.mark.slow  # explores all interleavings

#: What two ranks do together, one after the other.
TOGETHER = [
    (("all", "all"), ("all", "all")),
    (("all", "send", "recv"), ("all", "send", "recv")),
    (("send", "all"), ("recv", "all")),
    (("send", "send", "send"), ("recv", "recv", "recv")),
    (("send", "send", "recv"), ("send", "recv", "recv")),
    (("show", "peer", "all"), ("show", "all")),
    (("show", "peer"), ("show", "peer")),
    (("show", "peer", "recv"), ("send", "show", "peer")),
]


def with_calls(program: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """The program with a call that waits for devices in each of its places, and in all."""
    for places in (*({i} for i in range(len(program) + 1)), range(len(program) + 1)):
        whole: list[str] = []
        for i in range(len(program) + 1):
            whole += (["free"] if i in places else []) + list(program[i : i + 1])
        yield tuple(whole)


@pytest.mark.parametrize("programs", TOGETHER)
def test_nobody_hangs(programs: tuple[tuple[str, ...], ...]) -> None:
    for calls in itertools.product(*map(with_calls, programs)):
        holds(launch_model.launches(calls))


def test_messages_of_two_do_not_care_for_a_third() -> None:
    pair = launch_model.launches([("send",) * 3, ("recv",) * 3])
    third = launch_model.Rank(2, 3, Protocol())
    third.free()
    cells = {**pair.cells, ("given", 2): 0, ("done", 2): 0}
    programs = {**pair.programs, "thread 2": third.thread}
    holds(launch_model.Model(cells, programs))


def test_three_ranks() -> None:
    holds(launch_model.launches([("all", "free"), ("free", "all"), ("all", "free")]), 1000)


@pytest.mark.parametrize(
    ("mutation", "programs"),
    [
        ({"meets_before": False}, (("all",), ("free", "all"))),
        ({"meets_after": False}, (("all", "free"), ("all",))),
        ({"receives_what_was_sent": False}, (("free", "send"), ("recv",))),
        ({"sends_where_there_is_room": False}, (("send",) * 3, ("free", *("recv",) * 3))),
        ({"may_be_ahead": 3}, (("send",) * 3, ("free", *("recv",) * 3))),
        ({"launches_before_it_shows": False}, (("show",), ("show", "peer", "free"))),
    ],
)
def test_mutations_are_found(mutation: dict, programs: tuple[tuple[str, ...], ...]) -> None:
    holds(launch_model.launches(programs))
    fails(launch_model.launches(programs, Protocol(**mutation)), "deadlock")


def test_a_call_of_a_rank_outside_of_the_team_may_still_come_between() -> None:
    """It is why docs/gpus.md asks for processes where teams are parts of the session."""
    team = launch_model.launches([("all",), ("all",)])
    third = launch_model.Rank(2, 3, Protocol())
    third.free()
    cells = {**team.cells, ("given", 2): 0, ("done", 2): 0}
    programs = {**team.programs, "thread 2": third.thread}
    fails(launch_model.Model(cells, programs), "deadlock")
