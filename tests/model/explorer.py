# SPDX-License-Identifier: Apache-2.0
"""A small explicit-state model checker.

A process is a sequence of atomic actions on shared memory. The explorer visits every state that
any interleaving can reach, and reports the first read of a wrong value and the first state in
which somebody waits and nobody can move. Memory is sequentially consistent here; that the code's
memory orders give what these interleavings assume is ThreadSanitizer's part (tests/native).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

Value = Hashable
Memory = dict[Hashable, Value]


class ProtocolError(Exception):
    """Some interleaving breaks the protocol; the message ends with the actions that lead there."""


@dataclass(frozen=True)
class Action:
    """One atomic action. `run` changes the memory, or returns False if it has to wait."""

    name: str
    run: Callable[[Memory], bool | None]


@dataclass
class Process:
    """Actions in program order."""

    name: str
    actions: list[Action] = field(default_factory=list)

    def write(self, cell: Hashable, value: Value) -> None:
        """Store a value."""
        self.actions.append(Action(f"{cell} = {value}", lambda m: m.__setitem__(cell, value)))

    def wait(self, what: str, ready: Callable[[Memory], bool]) -> None:
        """Go on once the condition holds at the moment of a look."""
        self.actions.append(Action(f"wait for {what}", ready))

    def expect(self, cell: Hashable, value: Value) -> None:
        """Read a cell, which must hold the value."""

        def look(memory: Memory) -> None:
            if memory.get(cell) != value:
                raise ProtocolError(f"{self.name} reads {cell}: {memory.get(cell)}, not {value}")

        self.actions.append(Action(f"read {cell}", look))

    def do(self, name: str, run: Callable[[Memory], bool | None]) -> None:
        """Do anything else, atomically."""
        self.actions.append(Action(name, run))


def explore(processes: list[Process], limit: int = 2_000_000) -> int:
    """Visit every reachable state and return how many there are; raise for one that is bad."""
    start = (tuple(0 for _ in processes), frozenset[tuple[Hashable, Value]]())
    came_from: dict[object, tuple[object, str] | None] = {start: None}
    queue = deque([start])
    while queue:
        state = queue.popleft()
        counters, frozen = state
        moved = False
        for index, process in enumerate(processes):
            if counters[index] == len(process.actions):
                continue
            action = process.actions[counters[index]]
            memory = dict(frozen)
            label = f"{process.name}: {action.name}"
            try:
                waits = action.run(memory) is False
            except ProtocolError as violation:
                raise ProtocolError(f"{violation}\n{_story(came_from, state, label)}") from None
            if waits:
                continue
            moved = True
            following = (
                (*counters[:index], counters[index] + 1, *counters[index + 1 :]),
                frozenset(memory.items()),
            )
            if following not in came_from:
                came_from[following] = (state, label)
                queue.append(following)
                if len(came_from) > limit:
                    raise RuntimeError(f"more than {limit} states; make the model smaller")
        if not moved and any(c < len(p.actions) for c, p in zip(counters, processes, strict=True)):
            raise ProtocolError(f"deadlock\n{_story(came_from, state, 'nobody can move')}")
    return len(came_from)


def _story(came_from: dict[object, tuple[object, str] | None], state: object, last: str) -> str:
    labels = [last]
    while (origin := came_from[state]) is not None:
        state, label = origin
        labels.append(label)
    return "\n".join(reversed(labels))
