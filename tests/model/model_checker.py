# SPDX-License-Identifier: Apache-2.0
"""A small explicit-state model checker.

A model is some memory and a program for each process: a list of steps, each of which happens at
once and may read and write memory. `check` follows every order in which the processes can take
their steps, and finds the shortest one that ends in wrong data or in a deadlock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


class WrongError(Exception):
    """What a step raises when it sees what must not be."""


class Memory:
    """The cells of one state, by name; changes are those of the step that is being taken."""

    def __init__(self, index: Mapping[Hashable, int], values: Sequence[Any]) -> None:
        self._index = index
        self.values = list(values)

    def __getitem__(self, cell: Hashable) -> Any:
        return self.values[self._index[cell]]

    def __setitem__(self, cell: Hashable, value: Any) -> None:
        self.values[self._index[cell]] = value


#: A step's effect: nothing or True for "go on", False for "not yet", a label for "go there".
Action = Callable[[Memory], "bool | str | None"]


@dataclass(frozen=True)
class Step:
    """One step of a process.

    Attributes
    ----------
    says : what a trace shows.
    act : what it does.
    label : where other steps can send the process.
    """

    says: str
    act: Action
    label: str = ""


@dataclass(frozen=True)
class Model:
    """Memory, and the programs that run on it.

    Attributes
    ----------
    cells : the initial memory.
    programs : the steps of each process.
    restless : processes that need not come to an end, such as a store buffer.
    """

    cells: Mapping[Hashable, Any]
    programs: Mapping[str, Sequence[Step]]
    restless: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Verdict:
    """What `check` found; `wrong` is empty if all is well."""

    states: int
    wrong: str = ""
    trace: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join((f"{self.wrong or 'holds'}, {self.states} states", *self.trace))


State = tuple[tuple[int, ...], tuple[Any, ...]]


def check(model: Model, limit: int = 2_000_000) -> Verdict:
    """Visit every state that can be reached, nearest first, until one is wrong."""
    index = {cell: i for i, cell in enumerate(model.cells)}
    names = list(model.programs)
    programs = [list(model.programs[name]) for name in names]
    labels = [{step.label: at for at, step in enumerate(p) if step.label} for p in programs]
    must_end = [i for i, name in enumerate(names) if name not in model.restless]

    def successors(state: State) -> Iterator[tuple[str, State]]:
        places, values = state
        for i, program in enumerate(programs):
            if places[i] == len(program):
                continue
            step = program[places[i]]
            memory = Memory(index, values)
            try:
                went = step.act(memory)
            except WrongError as error:
                raise WrongError(f"{names[i]}: {step.says}: {error}") from None
            if went is False:
                continue
            place = labels[i][went] if isinstance(went, str) else places[i] + 1
            after = (*places[:i], place, *places[i + 1 :])
            yield f"{names[i]}: {step.says}", (after, tuple(memory.values))

    start: State = ((0,) * len(names), tuple(model.cells.values()))
    came_from: dict[State, tuple[State, str] | None] = {start: None}
    queue = deque([start])

    def trace(state: State) -> tuple[str, ...]:
        steps = []
        while (link := came_from[state]) is not None:
            state, says = link
            steps.append(says)
        return tuple(reversed(steps))

    while queue:
        state = queue.popleft()
        try:
            following = list(successors(state))
        except WrongError as error:
            return Verdict(len(came_from), f"wrong: {error}", trace(state))
        ended = all(state[0][i] == len(programs[i]) for i in must_end)
        if not ended and all(after == state for _, after in following):
            stuck = [
                f"{names[i]} before: {programs[i][state[0][i]].says}"
                for i in must_end
                if state[0][i] < len(programs[i])
            ]
            return Verdict(len(came_from), f"deadlock: {'; '.join(stuck)}", trace(state))
        for says, after in following:
            if after not in came_from:
                came_from[after] = (state, says)
                queue.append(after)
        if len(came_from) > limit:
            raise RuntimeError(f"more than {limit} states")
    return Verdict(len(came_from))


def expect(found: Any, wanted: Any, what: str) -> None:
    """Raise unless the data is what it should be."""
    if found != wanted:
        raise WrongError(f"{what} is {found}, not {wanted}")


def holds(model: Model, least: int = 10) -> None:
    """Raise unless nothing is wrong, and more than some states were visited."""
    verdict = check(model)
    assert not verdict.wrong, str(verdict)
    assert verdict.states > least, str(verdict)


def fails(model: Model, how: str) -> None:
    """Raise unless something is wrong in some way."""
    verdict = check(model)
    assert verdict.wrong.startswith(how), str(verdict)
