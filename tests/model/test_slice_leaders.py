# SPDX-License-Identifier: Apache-2.0
"""Leaders of nodes, with shared memory on one side and the network on the other, in every order.

Each model (wire, flush, lanes) holds as it is built, and fails with each mutation.
"""

from __future__ import annotations

import dataclasses

import pytest

from tests.model import flush_model, internode_ring_model, slice_leaders_model
from tests.model.model_checker import fails, holds

pytestmark = pytest.mark.slow  # explores all interleavings


def names(protocol: type) -> set[str]:
    return {field.name for field in dataclasses.fields(protocol)}


# ---- the wire -------------------------------------------------------------------------------

WIRE = {
    "one_thread_posts_at_a_time": "deadlock: ",
    "fills_before_it_posts": "wrong: ",
    "posts_before_it_rings": "deadlock: ",
    "rings_before_it_looks_who_sleeps": "deadlock: ",
    "hears_the_bell_before_it_looks": "deadlock: ",
    "announces_its_sleep_before_it_compares": "deadlock: ",
    "says_what_came_before_it_is_done": "wrong: ",
    "reuses_a_request_when_it_is_done": "wrong: ",
}


def test_what_two_threads_post_is_moved_and_the_engine_wakes_for_it() -> None:
    holds(internode_ring_model.wire(), 1000)


@pytest.mark.parametrize(("mutation", "how"), WIRE.items())
def test_each_part_of_the_wire_is_needed(mutation: str, how: str) -> None:
    fails(internode_ring_model.wire(internode_ring_model.Protocol(**{mutation: False})), how)


# ---- the recovery ---------------------------------------------------------------------------

#: Either of these is enough.
TWICE = {"takes_this_generation_only", "skips_what_was_posted"}


@pytest.mark.parametrize(
    ("tags", "rounds"),
    [({"a": (1,), "b": ()}, 3), ({"a": (1,), "b": (2,)}, 2)],
    ids=["one way", "both ways"],
)
def test_nothing_of_before_arrives_after_a_recovery(tags: flush_model.Tags, rounds: int) -> None:
    holds(flush_model.recovery(tags=tags, rounds=rounds), 1000)


@pytest.mark.parametrize("mutation", sorted(names(flush_model.Protocol) - TWICE))
def test_each_part_of_a_flush_is_needed(mutation: str) -> None:
    fails(flush_model.recovery(flush_model.Protocol(**{mutation: False})), "wrong: ")


def test_old_posts_are_left_out_twice_and_once_is_enough() -> None:
    for mutation in TWICE:
        holds(flush_model.recovery(flush_model.Protocol(**{mutation: False})), 1000)
    fails(flush_model.recovery(flush_model.Protocol(**dict.fromkeys(TWICE, False))), "wrong: ")


# ---- reductions -----------------------------------------------------------------------------

TWO_HOPS = {"members": (1, 1), "middle": 1}
PHASES = {"members": (1, 1), "pieces": 2, "middle": 2}
FOR_ONE = {"one": (0, 0)}
DISAGREE = {"members": (1, 1), "one": (0, 1)}
LANES = {
    "waits_in_a_meeting": ("wrong: ", {}),
    "staging_buffers": ("wrong: ", {}),
    "results_have_a_half_of_their_own": ("wrong: ", {}),
    "each_piece_under_way_has_buffers": ("wrong: ", {}),
    "waits_for_its_sends": ("wrong: ", {}),
    "says_before_it_waits": ("deadlock: ", {}),
    "shows_what_has_come_to_its_end": ("wrong: ", {}),
    "messages_of_a_tag_come_in_order": ("wrong: ", {}),
    "ends_in_another_buffer_than_it_said": ("wrong: ", TWO_HOPS),
    "phases_have_tags_of_their_own": ("wrong: ", PHASES),
    "says_of_the_first_piece_that_it_has_nothing": ("deadlock: ", DISAGREE),
}


WAYS = [
    {},
    {"members": (2, 2)},
    TWO_HOPS,
    {"middle": 1, "pieces": 2},
    PHASES,
    FOR_ONE,
    {**TWO_HOPS, **FOR_ONE},
]


@pytest.mark.parametrize("how", WAYS, ids=str)
def test_members_of_two_nodes_get_all_of_each_piece(how: dict) -> None:
    holds(slice_leaders_model.reduction(**how), 1000)


def test_nodes_that_disagree_for_whom_a_reduction_is_find_that_out() -> None:
    fails(slice_leaders_model.reduction(**DISAGREE), "wrong: ")


@pytest.mark.parametrize(("mutation", "found"), LANES.items())
def test_each_part_of_a_reduction_across_nodes_is_needed(mutation: str, found: tuple) -> None:
    wrong, how = found
    changed = {mutation: 1 if mutation == "staging_buffers" else False}
    fails(slice_leaders_model.reduction(slice_leaders_model.Protocol(**changed), **how), wrong)


def test_every_mutation_is_tried() -> None:
    assert names(internode_ring_model.Protocol) == set(WIRE)
    assert names(slice_leaders_model.Protocol) == set(LANES)
