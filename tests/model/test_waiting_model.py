# SPDX-License-Identifier: Apache-2.0
"""Nobody sleeps through what it waits for: `WaitFor` and `Publish` of wait.cc.

The code looks again every 20 ms; here a sleeper sleeps until it is woken.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from explorer import Memory, Process, ProtocolError, explore

STEPS = 3
Reached = Callable[[Memory], bool]


def publisher(mutation: str) -> Process:
    process = Process("publisher")
    for step in range(1, STEPS + 1):

        def look(memory: Memory) -> None:
            memory["anybody"] = memory.get("sleepers", 0) != 0

        def wake(memory: Memory) -> None:
            if memory["anybody"]:
                memory["asleep"] = False

        if mutation == "looks for sleepers before it stores":
            process.do("look for sleepers", look)
            process.write("word", step)
        else:
            process.write("word", step)
            process.do("look for sleepers", look)
        process.do("wake them", wake)
    return process


def waiter(mutation: str) -> Process:
    process = Process("waiter")
    for step in range(1, STEPS + 1):

        def reached(memory: Memory, step: int = step) -> bool:
            return memory.get("word", 0) >= step

        def announce(memory: Memory, reached: Reached = reached) -> None:
            if not reached(memory):
                memory["sleepers"] = memory.get("sleepers", 0) + 1
                memory["announced"] = True

        def look(memory: Memory) -> None:
            memory["seen"] = memory.get("word", 0)

        # FUTEX_WAIT: the kernel compares and puts to sleep in one.
        def compare_and_sleep(memory: Memory, step: int = step) -> None:
            memory["asleep"] = memory["seen"] < step and memory.get("word", 0) == memory["seen"]

        def withdraw(memory: Memory) -> None:
            if memory.get("announced"):
                memory["sleepers"] -= 1
            memory["announced"] = False

        # The loop of `WaitFor`. A wake that was meant for an earlier step may come late, once for
        # each step at most: so many turns are enough.
        for _ in range(STEPS + 1):
            if mutation == "announces itself after the kernel compared":
                process.do("look", look)
                process.do("sleep unless it changed", compare_and_sleep)
                process.do("announce", announce)
            else:
                process.do("announce", announce)
                process.do("look", look)
                process.do("sleep unless it changed", compare_and_sleep)
            process.wait("a wake", lambda m: not m.get("asleep", False))
            process.do("withdraw", withdraw)

        def arrived(memory: Memory, step: int = step, reached: Reached = reached) -> None:
            if not reached(memory):
                raise ProtocolError(f"deadlock: the waiter gave up on step {step}")

        process.do(f"step {step} is there", arrived)
    return process


def test_every_step_is_heard():
    assert explore([publisher(""), waiter("")]) > 50


@pytest.mark.parametrize(
    "mutation",
    ["announces itself after the kernel compared", "looks for sleepers before it stores"],
)
def test_a_lost_wake_is_found(mutation):
    with pytest.raises(ProtocolError, match="deadlock"):
        explore([publisher(mutation), waiter(mutation)])
