# SPDX-License-Identifier: Apache-2.0
"""A rank fails at any point of a collective, and the session starts afresh.

Mirrors disco/worker_session_functions.cc `Guard` and disco/report_worker_errors.cc `ReportError`,
rank_runtime_state.cc `FailSession`, `Abort` and `CheckSession`, wait.cc `WaitFor` (reached comes
before aborted), session_server.cc `WaitDone` and `Recover`. One rank may fail before any of its
steps; the others are stopped in their next wait. When all have passed the ticket the controller
clears the seats and the abort and counts a generation; a rank that sees a new generation starts at
step 0. The collective after that must be right.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

from tests.model.model_checker import Memory, Model, Step, expect


@dataclass(frozen=True)
class Protocol:
    """The protocol as it is built; every other value is a mutation."""

    waits_until_all_came_to_rest: bool = True
    restarts_at_step_0: bool = True
    clears_the_seats: bool = True
    waits_until_idle: bool = True
    looks_after_the_mark: bool = True
    refuses_stale_threads: bool = True


def recovery(size: int = 2, before: int = 1, protocol: Protocol | None = None) -> Model:
    """Some collectives, in one of which rank 0 may fail, a recovery, and one collective more."""
    protocol = protocol or Protocol()
    cells: dict[Hashable, Any] = {"fails": False, "abort": False, "generation": 0, "go": False}
    programs = {}
    for me in range(size):
        cells["step", me] = 0
        cells["done", me] = False
        for slot in (0, 1):
            cells["seq", me, slot] = 0
            cells["staging", me, slot] = None
        ticket = f"ticket {me}"
        first = [step for c in range(before) for step in _collective(me, size, c, ticket)]
        programs[f"rank {me}"] = [
            *(first if me != 0 else [_may_fail(step, ticket) for step in first]),
            Step("pass the ticket", lambda m, r=me: m.__setitem__(("done", r), True), ticket),
            Step("take the next command", lambda m: m["go"]),
            Step("see the generation", lambda m, r=me: _restart(m, r, protocol)),
            *_collective(me, size, before, "never"),
        ]
    programs["controller"] = [
        Step("wait for the ticket", lambda m: _at_rest(m, size, protocol)),
        Step("clear the seats", lambda m: _clear(m, size, protocol)),
        Step("count a generation", lambda m: m.__setitem__("generation", 1)),
        Step("clear the abort", lambda m: m.__setitem__("abort", False)),
        Step("send the next command", lambda m: m.__setitem__("go", True)),
    ]
    programs["fault"] = [Step("happens", lambda m: m.__setitem__("fails", True))]
    return Model(cells, programs, restless=frozenset({"fault"}))


def _may_fail(step: Step, ticket: str) -> Step:
    def act(m: Memory) -> bool | str | None:
        if not m["fails"]:
            return step.act(m)
        m["abort"] = True
        return ticket

    return replace(step, act=act)


def _at_rest(m: Memory, size: int, protocol: Protocol) -> bool:
    done = [m["done", rank] for rank in range(size)]
    # The mutation: an error of one rank is answered at once.
    return all(done) if protocol.waits_until_all_came_to_rest else any(done)


def _clear(m: Memory, size: int, protocol: Protocol) -> None:
    if protocol.clears_the_seats:
        for rank in range(size):
            m["seq", rank, 0] = m["seq", rank, 1] = 0


def _restart(m: Memory, me: int, protocol: Protocol) -> None:
    if protocol.restarts_at_step_0 and m["generation"] == 1:
        m["step", me] = 0


def _collective(me: int, size: int, c: int, ticket: str) -> list[Step]:
    """An eager all-reduce; an abort sends the rank to its ticket."""
    peers = [i for i in range(size) if i != me]

    def fill(m: Memory) -> None:
        m["staging", me, (m["step", me] + 1) % 2] = (me, c)

    def publish(m: Memory) -> None:
        m["step", me] += 1
        m["seq", me, m["step", me] % 2] = m["step", me]

    def wait(m: Memory, peer: int) -> bool | str:
        step = m["step", me]
        if m["seq", peer, step % 2] >= step:
            return True
        return ticket if m["abort"] else False

    def read(m: Memory, peer: int) -> None:
        expect(m["staging", peer, m["step", me] % 2], (peer, c), f"rank {peer}'s data")

    return [
        Step("start", lambda m: ticket if m["abort"] else None),
        Step("fill", fill),
        Step("publish", publish),
        *(Step(f"wait for rank {p}", lambda m, p=p: wait(m, p)) for p in peers),
        *(Step(f"read rank {p}", lambda m, p=p: read(m, p)) for p in peers),
    ]


def helper(protocol: Protocol | None = None) -> Model:
    """A thread that acts for rank 1 is in a collective of its own team while rank 0 fails.

    Mirrors core/rank_runtime_state.cc `Begin` (the mark, then the look at abort, and at the
    recoveries since the thread began to act) and `Idle`, core/worker_status_and_error_table.cc
    `Recover`. The worker's own thread of rank 1 has passed its ticket: only the mark says that the
    helper has still to come out. After the recovery rank 0 does the first step of that team.
    """
    protocol = protocol or Protocol()
    cells: dict[Hashable, Any] = {
        **{"abort": False, "generation": 0, "busy": False, "seq": 0, "go": False},
        "peer": 0,
    }

    def begin(m: Memory) -> str | None:
        m["busy"] = True
        stale = protocol.refuses_stale_threads and m["generation"] != 0
        return "out" if stale or (m["abort"] and protocol.looks_after_the_mark) else None

    thread = [
        *(
            []
            if protocol.looks_after_the_mark
            else [Step("look at abort", lambda m: "end" if m["abort"] else None)]
        ),
        Step("set the mark, look at abort", begin),
        Step("publish step 1", lambda m: m.__setitem__("seq", 1)),
        Step("wait for rank 0", lambda m: "out" if m["abort"] else m["peer"] >= 1),
        Step("clear the mark", lambda m: m.__setitem__("busy", False), "out"),
        Step("end", lambda m: None, "end"),
    ]
    controller = [
        Step("rank 0 fails", lambda m: m.__setitem__("abort", True)),
        Step("wait until idle", lambda m: not (protocol.waits_until_idle and m["busy"])),
        Step("clear the seats", lambda m: m.__setitem__("seq", 0)),
        Step("count a generation", lambda m: m.__setitem__("generation", 1)),
        Step("clear the abort", lambda m: m.__setitem__("abort", False)),
        Step("rank 0 sees no step of what was given up", lambda m: expect(m["seq"], 0, "seq")),
        Step("rank 0 enters, after everybody's new start", lambda m: m.__setitem__("peer", 1)),
    ]
    return Model(cells, {"helper": thread, "controller": controller})
