# SPDX-License-Identifier: Apache-2.0
"""Every interleaving of the collectives' steps gives the right data and ends."""

from __future__ import annotations

import itertools

import pytest
from collectives_model import Rank, ranks
from explorer import ProtocolError, explore

WAYS = ("eager", "direct", "sliced", "relayed")


@pytest.mark.parametrize("ways", list(itertools.product(WAYS, repeat=3)), ids="-".join)
def test_any_three_collectives_in_a_row_on_two_ranks(ways):
    assert explore(ranks(2, list(ways))) > 100


@pytest.mark.parametrize("way", WAYS)
def test_three_ranks(way):
    assert explore(ranks(3, [way] if way == "sliced" else [way, way])) > 1000


@pytest.mark.parametrize("first_step", [5, 6, 7])
def test_steps_wrap(first_step):
    # Steps of three bits: 7 is followed by 0.
    ways = ["eager", "direct", "relayed", "eager"]
    assert explore(ranks(2, ways, first_step=first_step, step_bits=3)) > 100


def test_no_exit_barrier_is_right_where_another_collective_comes_before_the_next_write():
    processes = []
    for me in range(2):
        rank = Rank(me, 2)
        for operation in (0, 2, 4):
            rank.direct(operation, exit_barrier=False)
            rank.eager(operation + 1)
        processes.append(rank.process)
    assert explore(processes) > 100


@pytest.mark.parametrize(
    ("mutation", "ways", "found"),
    [
        ("no exit barrier", ["direct", "direct"], "reads .*input"),
        ("one slot compared by equality", ["eager"] * 3, "deadlock|descriptor"),
        ("flag zeroed after the exchange", ["eager"] * 2, "deadlock"),
        ("one slot", ["eager"] * 3, "descriptor"),
        ("one staging buffer", ["eager"] * 3, "reads .*buffer"),
        ("publish before write", ["eager"], "reads"),
    ],
)
def test_what_the_protocol_needs(mutation, ways, found):
    explore(ranks(2, ways))
    with pytest.raises(ProtocolError, match=found):
        explore(ranks(2, ways, mutation))
