# SPDX-License-Identifier: Apache-2.0
"""Sleeping until a step is published, and being woken.

Mirrors wait.cc `WaitFor` (its loop around FUTEX_WAIT) and `Publish`, and rank_runtime_state.cc
`Abort`; a seat has two slots, whose sleepers share a counter (shared_memory_layout.h `Seat`). The
20 ms after which a sleeper looks again are left out, so a wake-up that is lost is a deadlock. The
kernel compares the word and lets the caller sleep in one step: that comparison is a sleeper's last
look.

A store that is not sequentially consistent stays in the processor's store buffer for a while,
which is a process of its own. A sleeper's membarrier empties it; without that call the code makes
its stores sequentially consistent.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from tests.model.model_checker import Memory, Model, Step


@dataclass(frozen=True)
class Protocol:
    """The protocol as it is built; every other value is a mutation."""

    announces_before_the_last_look: bool = True
    publisher_stores_before_it_looks: bool = True
    store_is_sequentially_consistent: bool = False
    sleeper_orders_everybody: bool = True
    wakes_all: bool = True
    sleeps_for_a_slice: bool = False


def sleepers(count: int = 2, steps: int = 2, protocol: Protocol | None = None) -> Model:
    """Some ranks wait for each step that another one publishes."""
    protocol = protocol or Protocol()
    programs = {f"sleeper {who}": _waits(who, steps, protocol) for who in range(count)}
    programs["publisher"] = [s for e in range(1, steps + 1) for s in _publish(e, count, protocol)]
    programs["store buffer"] = [Step("a store becomes visible", _drain, label="again")]
    return Model(_cells(count), programs, restless=frozenset({"store buffer"}))


def abort(protocol: Protocol | None = None) -> Model:
    """A rank waits for a step that never comes; another one aborts the session."""
    protocol = protocol or Protocol()
    aborter = [
        Step("abort", lambda m: m.__setitem__("abort", True)),
        Step("look for sleepers", lambda m: m.__setitem__("saw", m["sleepers"])),
        *(Step("wake", lambda m, s=slot: _wake(m, s, 1, protocol)) for slot in (0, 1)),
    ]
    return Model(_cells(1), {"sleeper": _waits(0, 1, protocol), "aborter": aborter})


def _cells(count: int) -> dict[Hashable, Any]:
    return {
        ("word", 0): 0,
        ("word", 1): 0,
        "sleepers": 0,
        "saw": 0,
        "buffered": None,
        "abort": False,
        **{("asleep", who): None for who in range(count)},
    }


def _publish(step: int, count: int, protocol: Protocol) -> list[Step]:
    slot = step % 2

    def store(m: Memory) -> bool:
        if protocol.store_is_sequentially_consistent:
            m["word", slot] = step
            return True
        if m["buffered"] is not None:
            return False
        m["buffered"] = (slot, step)
        return True

    stores = Step(f"store step {step}", store)
    looks = Step("look for sleepers", lambda m: m.__setitem__("saw", m["sleepers"]))
    order = [stores, looks] if protocol.publisher_stores_before_it_looks else [looks, stores]
    return [*order, Step("wake", lambda m: _wake(m, slot, count, protocol))]


def _wake(m: Memory, slot: int, count: int, protocol: Protocol) -> None:
    if not m["saw"]:
        return
    _drain(m)  # FUTEX_WAKE has a full barrier before it looks for sleepers
    for who in range(count):
        if m["asleep", who] == slot:
            m["asleep", who] = None
            if not protocol.wakes_all:
                return


def _drain(m: Memory) -> str | bool:
    if m["buffered"] is None:
        return False
    slot, step = m["buffered"]
    m["word", slot] = step
    m["buffered"] = None
    return "again"


def _waits(who: int, steps: int, protocol: Protocol) -> list[Step]:
    return [s for target in range(1, steps + 1) for s in _wait_for(who, target, protocol)]


def _wait_for(who: int, target: int, protocol: Protocol) -> list[Step]:
    slot = target % 2
    start, leave, check = (f"{name} {target}" for name in ("start", "leave", "check"))

    def over(m: Memory) -> bool:
        return m["word", slot] >= target or m["abort"]

    def sleep(m: Memory, compares: bool = True) -> str | None:
        if compares and m["word", slot] >= target:
            return leave
        m["asleep", who] = slot
        return None

    def wake_up(m: Memory) -> bool:
        if protocol.sleeps_for_a_slice:
            m["asleep", who] = None
        return m["asleep", who] is None

    def count(m: Memory, change: int) -> None:
        m["sleepers"] += change

    def order_everybody(m: Memory) -> None:
        if protocol.sleeper_orders_everybody:
            _drain(m)

    announce = Step("announce", lambda m: count(m, 1))
    if protocol.announces_before_the_last_look:
        falls_asleep = [
            Step("announce", lambda m: count(m, 1), label=start),
            Step("membarrier", order_everybody),
            Step("look", lambda m: leave if over(m) else None),
            Step("the kernel compares and lets it sleep", sleep),
        ]
    else:
        falls_asleep = [
            Step("look", lambda m: check if over(m) else None, label=start),
            announce,
            Step("sleep", lambda m: sleep(m, compares=False)),
        ]
    return [
        *falls_asleep,
        Step("wake up", wake_up),
        Step("no longer asleep", lambda m: count(m, -1), label=leave),
        Step("look again", lambda m: None if over(m) else start, label=check),
    ]
