# SPDX-License-Identifier: Apache-2.0
"""The protocols between ranks, in every order in which the ranks can run.

The models (*_model.py) say which functions they mirror. Each holds as it is built, and fails with
each mutation: that is what shows that the check looks where it should.
"""

from __future__ import annotations

import itertools

import pytest

from tests.model import (
    arena_model,
    exposed_model,
    nodes_model,
    packets_model,
    recovery_model,
    sleep_model,
    steps_model,
    traces,
)
from tests.model.model_checker import Model, Step, check, expect, fails, holds

pytestmark = pytest.mark.slow  # explores all interleavings


# ---- the checker itself ---------------------------------------------------------------------


def test_the_checker_finds_the_one_bad_order_of_a_lost_update():
    def increment(name: str) -> list[Step]:
        return [
            Step("load", lambda m: m.__setitem__(name, m["x"])),
            Step("store", lambda m: m.__setitem__("x", m[name] + 1)),
            Step("finish", lambda m: m.__setitem__("finished", m["finished"] + 1)),
        ]

    observer = [
        Step("wait for both", lambda m: m["finished"] == 2),
        Step("look", lambda m: expect(m["x"], 2, "x")),
    ]
    programs = {"a": increment("a"), "b": increment("b"), "observer": observer}
    verdict = check(Model({"x": 0, "a": 0, "b": 0, "finished": 0}, programs))
    assert verdict.wrong == "wrong: observer: look: x is 1, not 2"
    assert len(verdict.trace) == 7


def test_the_checker_finds_a_deadlock_and_who_is_in_it():
    def take(m, name):
        if not m[name]:
            return False
        m[name] = False
        return True

    def eat(first: str, second: str) -> list[Step]:
        return [
            Step(f"take {first}", lambda m: take(m, first)),
            Step(f"take {second}", lambda m: take(m, second)),
            Step(f"put {first} back", lambda m: m.__setitem__(first, True)),
            Step(f"put {second} back", lambda m: m.__setitem__(second, True)),
        ]

    cutlery = {"fork": True, "knife": True}
    assert not check(Model(cutlery, {"one": eat("fork", "knife")})).wrong
    verdict = check(Model(cutlery, {"one": eat("fork", "knife"), "two": eat("knife", "fork")}))
    assert verdict.wrong == "deadlock: one before: take knife; two before: take fork"


# ---- steps and collectives ------------------------------------------------------------------

WAYS = ("eager", "direct", "sliced", "relayed")
SEQUENCES = [
    (2, ("eager",) * 5),
    (2, ("direct",) * 4),
    (2, ("sliced",) * 3),
    (2, ("in_place",) * 3),
    (2, ("relayed",) * 3),
    (2, ("direct", "eager", "sliced", "eager", "direct")),
    (2, ("relayed", "sliced", "direct", "in_place")),
    (3, ("eager",) * 4),
    (3, ("direct",) * 3),
    (3, ("sliced", "direct")),
    (3, ("in_place", "eager")),
    (3, ("relayed", "direct")),
    (3, ("direct", "eager", "sliced", "eager", "direct")),
    (4, ("eager", "eager")),
]


@pytest.mark.parametrize("first_step", [0, 6], ids=["", "steps wrap"])
@pytest.mark.parametrize(("size", "ways"), SEQUENCES)
def test_collectives_give_the_right_data_and_end(size, ways, first_step):
    protocol = steps_model.Protocol(first_step=first_step)
    holds(steps_model.collectives(ways, size, protocol))


@pytest.mark.parametrize("ways", list(itertools.product(WAYS, repeat=3)), ids="-".join)
def test_any_three_collectives_in_a_row(ways):
    holds(steps_model.collectives(ways, 2))


def test_without_an_exit_step_the_next_collective_must_use_other_memory():
    """The promise behind the flag that leaves the exit step out (kNoExitBarrier)."""
    ways = ("direct",) * 4
    for size in (2, 3):
        apart = steps_model.Protocol(exit_barrier=False, inputs=2)
        holds(steps_model.collectives(ways, size, apart))
        reuse = steps_model.Protocol(exit_barrier=False)
        fails(steps_model.collectives(ways, size, reuse), "wrong: ")


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("mutation", "ways", "how"),
    [
        ({"exit_barrier": False}, ("direct", "direct"), "wrong: "),
        ({"flags": 1, "compares_by_equality": True}, ("eager",) * 3, "deadlock: "),
        ({"flags": 1, "descriptors": 1}, ("eager",) * 3, "wrong: "),
        ({"zeroes_after_the_exchange": True}, ("eager",) * 2, "deadlock: "),
        ({"staging_buffers": 1}, ("eager",) * 3, "wrong: "),
        ({"staging_buffers": 1}, ("relayed",), "wrong: "),
        ({"publishes_before_it_writes": True}, ("eager",), "wrong: "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, (dict, tuple)) else "",
)
def test_each_part_of_a_step_is_needed(size, mutation, ways, how):
    fails(steps_model.collectives(ways, size, steps_model.Protocol(**mutation)), how)


def test_a_flag_that_only_grows_needs_no_second_one_but_its_descriptor_does():
    """Two slots because a flag shares its cache line with the descriptor (shared_memory_layout.h
    Slot)."""
    holds(steps_model.collectives(("eager",) * 4, 3, steps_model.Protocol(flags=1)))
    equality = steps_model.Protocol(compares_by_equality=True)
    holds(steps_model.collectives(("eager",) * 4, 3, equality))


def test_the_native_code_does_what_the_model_does():
    """tests/native/test_protocol_trace.cc compares the native code with this file."""
    assert traces.FILE.read_text() == traces.traces(), "python -m tests.model.traces writes it"


# ---- teams ----------------------------------------------------------------------------------

TWO_TEAMS = [
    (("eager", "eager"), ("eager", "eager")),
    (("direct",), ("eager", "eager")),
    (("direct",), ("direct",)),
]


@pytest.mark.parametrize("ways", TWO_TEAMS, ids=str)
def test_two_threads_of_each_rank_may_be_in_two_teams(ways):
    holds(steps_model.teams(ways))


@pytest.mark.parametrize("what", ["seq", "descriptor", "staging"])
def test_each_team_has_seats_and_staging_buffers_of_its_own(what):
    protocol = steps_model.Protocol(shared_by_teams=frozenset({what}))
    ways = (("eager", "eager"), ("eager", "eager"))
    assert check(steps_model.teams(ways, 2, protocol)).wrong


@pytest.mark.parametrize(
    ("between", "how"),
    [((0, 1), "wrong: "), ((2, 0), "wrong: "), ((2, 1, 0), ""), ((0, 1, 2), "")],
    ids=str,
)
def test_a_meeting_proves_something_of_the_teams_that_it_contains_alone(between, how):
    """Of the memory that another team reads, where an exit step was left out."""
    protocol = steps_model.Protocol(exit_barrier=False, shared_by_teams=frozenset({"input"}))
    everybody = (0, 1, 2)
    sequence = ((everybody, "direct"), (between, "eager"), (everybody, "direct"))
    verdict = check(steps_model.in_turn(sequence, 3, protocol))
    assert verdict.wrong.startswith(how) and bool(verdict.wrong) == bool(how), str(verdict)
    pair = (((0, 1), "direct"), (between, "eager"), ((0, 1), "direct"))
    contains = {0, 1} <= set(between)
    assert bool(check(steps_model.in_turn(pair, 3, protocol)).wrong) != contains


# ---- messages -------------------------------------------------------------------------------

MESSAGES = [(3,), (1, 1, 1, 1), ("whole", "whole", "whole"), (2, "whole", 3, "whole", 1)]


@pytest.mark.parametrize("first_packet", [0, 6], ids=["", "packets wrap"])
@pytest.mark.parametrize("sequence", MESSAGES)
def test_messages_arrive_as_they_were_sent(sequence, first_packet):
    protocol = packets_model.Protocol(first_packet=first_packet)
    holds(packets_model.messages(sequence, protocol))


@pytest.mark.parametrize(
    ("mutation", "sequence"),
    [
        ({"packets": 1}, (3,)),
        ({"may_be_ahead": 3}, (4,)),
        ({"whole_waits": False}, ("whole", "whole")),
        ({"publishes_before_it_writes": True}, (1,)),
        ({"takes_before_it_reads": True}, (3,)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_each_part_of_a_message_is_needed(mutation, sequence):
    fails(packets_model.messages(sequence, packets_model.Protocol(**mutation)), "wrong: ")


def test_two_ranks_may_both_send_first_what_fits_into_the_packets():
    holds(packets_model.both_send_first(2))
    fails(packets_model.both_send_first(3), "deadlock: ")
    fails(packets_model.both_send_first("whole"), "deadlock: ")


# ---- shows ----------------------------------------------------------------------------------

SHOWS = [
    exposed_model.in_turn(1),
    exposed_model.in_turn(3),
    exposed_model.overlapping(4),
    [("expose", 0), ("release", 0), ("expose", 1), ("read", 1), ("release", 1)],
]


@pytest.mark.parametrize("first_number", [0, 6], ids=["", "numbers wrap"])
@pytest.mark.parametrize("program", SHOWS, ids=range(len(SHOWS)))
def test_what_is_shown_is_read_as_it_was_shown(program, first_number):
    protocol = exposed_model.Protocol(first_number=first_number)
    holds(exposed_model.of_programs([program, program], protocol))


def test_three_ranks_read_what_each_shows():
    for program in (exposed_model.in_turn(1), exposed_model.overlapping(2)):
        holds(exposed_model.of_programs([program] * 3))


def test_ranks_may_read_in_other_orders_than_they_show():
    one = [("expose", 0), ("expose", 1), ("read", 1), ("read", 0), ("read", 1), ("release", 0, 1)]
    other = [("expose", 0), ("read", 0), ("expose", 1), ("release", 0, 1)]
    again = [("expose", 2), ("read", 2), ("release", 2)]
    holds(exposed_model.of_programs([one + again, other + again]))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("mutation", "program"),
    [
        ({"release_is_a_barrier": False}, exposed_model.overlapping(2)),
        ({"publishes_before_it_writes": True}, exposed_model.in_turn(1)),
        ({"waits_for_the_number": False}, exposed_model.in_turn(1)),
        ({"waits_for_any_number": True}, exposed_model.in_turn(1)),
        (
            {"refuses_a_place_that_is_open": False},
            [("expose", 0), ("expose", 1), ("expose", 2), ("read", 0), ("release", 0, 1, 2)],
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_each_part_of_a_show_is_needed(size, mutation, program):
    protocol = exposed_model.Protocol(**mutation)
    fails(exposed_model.of_programs([program] * size, protocol), "wrong: ")


def test_a_place_that_is_open_is_refused():
    program = [("expose", 0), ("expose", 1), ("expose", 2)]
    fails(exposed_model.of_programs([program, program]), "wrong: rank 0: is refused")


def test_ranks_that_hide_different_tensors_are_told():
    """Else one would write what the other still reads."""
    begin = [("expose", 0), ("expose", 1)]
    one = [*begin, ("release", 0), ("expose", 2), ("release", 1)]
    other = [*begin, ("release", 1), ("read", 0), ("release", 0)]
    fails(exposed_model.of_programs([one, other]), "wrong: rank 0: compare: disagreement")
    untold = exposed_model.Protocol(compares_what_is_hidden=False)
    fails(exposed_model.of_programs([one, other], untold), "wrong: rank 1: read what rank 0 shows")


# ---- sleeping -------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "steps"), [(1, 4), (2, 2), (3, 1)])
def test_no_sleeper_is_missed(count, steps):
    holds(sleep_model.sleepers(count, steps))
    without_membarrier = sleep_model.Protocol(
        store_is_sequentially_consistent=True, sleeper_orders_everybody=False
    )
    holds(sleep_model.sleepers(count, steps, without_membarrier))


@pytest.mark.parametrize(
    "mutation",
    [
        {"announces_before_the_last_look": False},
        {"publisher_stores_before_it_looks": False},
        {"sleeper_orders_everybody": False},
        {"wakes_all": False},
    ],
    ids=lambda mutation: " ".join(mutation),
)
def test_each_part_of_a_wake_up_is_needed(mutation):
    fails(sleep_model.sleepers(protocol=sleep_model.Protocol(**mutation)), "deadlock: ")


def test_an_abort_can_miss_a_sleeper_which_looks_again_after_its_slice():
    """An abort does not change the word, so the kernel cannot see that it came in between."""
    fails(sleep_model.abort(), "deadlock: ")
    holds(sleep_model.abort(sleep_model.Protocol(sleeps_for_a_slice=True)))


# ---- the arena ------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "rounds"), [(2, 4), (3, 2)])
def test_peers_read_only_what_has_memory_behind_it(size, rounds):
    holds(arena_model.growth(size, rounds))


@pytest.mark.parametrize(
    "mutation",
    [
        {"commits_before_it_hands_out": False},
        {"commits_before_it_publishes": False},
        {"frees_after_the_exit_step": False},
    ],
    ids=lambda mutation: " ".join(mutation),
)
def test_each_part_of_growing_and_shrinking_is_needed(mutation):
    fails(arena_model.growth(protocol=arena_model.Protocol(**mutation)), "wrong: ")


# ---- recovery -------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "before"), [(2, 1), (2, 2), (2, 3), (3, 1), (3, 2)])
def test_the_session_goes_on_after_a_failure(size, before):
    holds(recovery_model.recovery(size, before))


@pytest.mark.parametrize(
    "mutation",
    [
        {"waits_until_all_came_to_rest": False},
        {"restarts_at_step_0": False},
        {"clears_the_seats": False},
    ],
    ids=lambda mutation: " ".join(mutation),
)
def test_each_part_of_a_recovery_is_needed(mutation):
    verdict = check(recovery_model.recovery(2, 1, recovery_model.Protocol(**mutation)))
    assert verdict.wrong, str(verdict)


def test_a_thread_that_acts_for_a_rank_has_no_part_in_what_comes_after_a_recovery():
    holds(recovery_model.helper())


@pytest.mark.parametrize(
    "mutation",
    [
        {"waits_until_idle": False},
        {"looks_after_the_mark": False},
        {"refuses_stale_threads": False},
    ],
    ids=lambda mutation: " ".join(mutation),
)
def test_each_part_of_that_is_needed(mutation):
    fails(recovery_model.helper(recovery_model.Protocol(**mutation)), "wrong: ")


# ---- the hubs of several nodes --------------------------------------------------------------


@pytest.mark.parametrize("model", [nodes_model.failure, nodes_model.death])
def test_nodes_go_on_after_a_failure_and_hear_of_a_death(model):
    holds(model())


@pytest.mark.parametrize(
    ("mutation", "model", "how"),
    [
        ({"tells_the_controller": False}, nodes_model.death, "deadlock: "),
        ({"tells_the_other_nodes": False}, nodes_model.death, "deadlock: "),
        ({"tells_of_each_generation": False}, nodes_model.death, "deadlock: "),
        ({"keeps_what_comes_early": False}, nodes_model.death, "deadlock: "),
        ({"ignores_what_is_over": False}, nodes_model.failure, "wrong: "),
        ({"all_nodes_begin_before_the_next_round": False}, nodes_model.failure, "wrong: "),
        ({"error_comes_before_the_ticket": False}, nodes_model.failure, "wrong: "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_each_part_of_what_nodes_tell_each_other_is_needed(mutation, model, how):
    fails(model(nodes_model.Protocol(**mutation)), how)
