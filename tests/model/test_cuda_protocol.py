# SPDX-License-Identifier: Apache-2.0
"""What CUDA kernels of several ranks do together, in every order in which they can run."""

from __future__ import annotations

import pytest

from tests.model import cuda_model
from tests.model.cuda_model import Protocol
from tests.model.model_checker import fails, holds

pytestmark = pytest.mark.slow  # explores all interleavings

WAYS = ("push", "root", "pull", "move")


@pytest.mark.parametrize("first", WAYS)
@pytest.mark.parametrize("second", WAYS)
def test_operations_of_two_follow_each_other(first: str, second: str) -> None:
    holds(cuda_model.operations(2, (first, second, first, first, second)), 30)


@pytest.mark.parametrize("first", WAYS)
@pytest.mark.parametrize("second", WAYS)
def test_operations_of_three_follow_each_other(first: str, second: str) -> None:
    holds(cuda_model.operations(3, (first, second, first)), 100)


@pytest.mark.parametrize("meeting", ["push", "root"])
@pytest.mark.parametrize("after", WAYS)
def test_a_member_leaves_early_until_a_meeting(meeting: str, after: str) -> None:
    for size, more in ((2, ("early", meeting, "move")), (3, ())):
        holds(cuda_model.operations(size, ("early", meeting, after, *more)))


def test_what_stays_has_to_stay_until_a_meeting() -> None:
    fails(cuda_model.operations(2, ("early", "move")), "wrong")


def test_a_team_goes_on_after_an_error() -> None:
    sequence = ("push", "broken", "recover", "push", "push", "push")
    holds(cuda_model.operations(2, sequence))


@pytest.mark.parametrize(
    ("mutation", "sequence", "how"),
    [
        ({"slots": 1}, ("push",) * 3, "deadlock"),
        ({"header_slots": 1}, ("root",) * 3, "deadlock"),
        ({"whole_words": False}, ("push",), "wrong"),
        ({"all_hear_all": False}, ("root",) * 4, "deadlock"),
        ({"meets_in_the_middle": False}, ("pull",), "wrong"),
        ({"meets_at_the_end": False}, ("move", "move"), "wrong"),
        ({"who_leaves_early_tells": False}, ("early",), "deadlock"),
        ({"only_what_stays_leaves_early": False}, ("early", "push"), "wrong"),
        ({"zeroes_when_all_have_left": False}, ("broken", "recover", "push"), "wrong"),
        ({"starts_when_all_have_zeroed": False}, ("broken", "recover", "push"), "deadlock"),
    ],
)
def test_mutations_are_found(mutation: dict, sequence: tuple[str, ...], how: str) -> None:
    fails(cuda_model.operations(2, sequence, Protocol(**mutation)), how)
