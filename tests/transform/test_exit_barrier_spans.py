# SPDX-License-Identifier: Apache-2.0
"""The spans that a longer lifetime adds."""

from __future__ import annotations

import random

import pytest

from tvm_ipc.transform.memory_plan.exit_barrier_budget import _subtract


@pytest.mark.parametrize("seed", range(20))
def test_spans_without_those_that_they_contain(seed: int) -> None:
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
