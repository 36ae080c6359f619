# SPDX-License-Identifier: Apache-2.0
"""How much is live at each event, and which spans a longer lifetime adds."""

from __future__ import annotations

import random

import pytest

from tvm_ipc.transform.memory_plan.exit_barrier_budget import RangeMaxTree, _subtract


@pytest.mark.parametrize("seed", range(20))
def test_spans_are_raised_and_the_highest_is_told(seed: int) -> None:
    rng = random.Random(seed)
    events = rng.randint(1, 33)
    levels, expected = RangeMaxTree(events), [0] * events
    for _ in range(40):
        first = rng.randrange(events)
        last = rng.randrange(first, events)
        by = rng.randint(-9, 9)
        for event in range(first, last + 1):
            expected[event] += by
        assert levels.add(first, last, by) == max(expected[first : last + 1])
        assert levels.add(0, events - 1, 0) == max(expected)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_left_of_spans_lies_in_none_of_the_others(seed: int) -> None:
    rng = random.Random(seed)

    def spans(events: set[int]) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        for event in sorted(events):
            if found and found[-1][1] == event - 1:
                found[-1] = (found[-1][0], event)
            else:
                found.append((event, event))
        return found

    whole = {event for event in range(30) if rng.random() < 0.7}
    part = {event for event in whole if rng.random() < 0.5}
    assert list(_subtract(spans(whole), spans(part))) == spans(whole - part)
