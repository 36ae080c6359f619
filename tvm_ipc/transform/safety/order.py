# SPDX-License-Identifier: Apache-2.0
"""Whether all ranks of a program meet in the same order, whatever comes out of its conditions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tvm_ipc import contract
from tvm_ipc.contract import Meeting
from tvm_ipc.contract.programs import PLACE_IN_TEAM, TEAM, WORKER_ID, WORKER_RANK
from tvm_ipc.transform.safety.hazards import Hazard, HazardKind
from tvm_ipc.transform.safety.known import Alike, Lanes, World
from tvm_ipc.transform.safety.rendezvous import Rendezvous, Stuck
from tvm_ipc.transform.safety.sequences import (
    SHARED,
    Acts,
    Branch,
    acts_of,
    branches_of,
    chosen,
    texts,
)
from tvm_ipc.transform.safety.statements import CALL_PACKED, IF, Sequence, Statement
from tvm_ipc.transform.safety.trace import MOST_STEPS, TooLongError, Trace, TracedModule

#: How many ranks a program is tried with that does not say for how many it is.
SIZES = (2, 3, 4)
#: What is not the same in two branches.
TOGETHER = "what ranks do together"


class Order:
    """What is found of the functions of a module."""

    def __init__(self, module: TracedModule, names: list[str], world: World | None) -> None:
        self._module = module
        self._steps = {name: module.steps(name) for name in names}
        self._found: dict[tuple[Any, ...], Hazard] = {}
        self._world = world

    def hazards(self) -> list[Hazard]:
        """Return what is wrong with functions that others can call."""
        called = {name for steps in self._steps.values() for name in steps.references}
        if not any(map(_matters, self._all_steps())):
            return []
        for name in self._steps:
            public = "global_symbol" in (self._module.function(name).attrs or {})
            if public or name not in called:
                self._check(name)
        return list(self._found.values())

    def _all_steps(self) -> Iterator[Statement]:
        for steps in self._steps.values():
            yield from _within(steps.body)

    def _check(self, name: str) -> None:
        """Look at one function, for as many ranks as there are."""
        worlds = [self._world or World(size) for size in SIZES[: 1 if self._world else None]]
        tried: list[dict[tuple[Any, ...], Hazard]] = []
        while worlds:
            world = worlds.pop(0)
            trace = Trace(self._module, world)
            try:
                acts = trace.of(name)
            except TooLongError:
                step = f"more than {MOST_STEPS} steps"
                key = (name, HazardKind.BRANCHES)
                self._found[key] = Hazard(name, key[1], TOGETHER, step, "", unknown=True)
                return
            if self._world is None and trace.told:
                worlds = [World(max(trace.told))] if world.size != max(trace.told) else []
                tried.clear()
                if worlds:
                    continue
            tried.append(_Function(acts, world).hazards())
        for key in dict.fromkeys(key for found in tried for key in found):
            (first, *_), everywhere = (
                [one[key] for one in tried if key in one],
                all(key in one and not one[key].unknown for one in tried),
            )
            self._found[key] = first if everywhere else replace(first, unknown=True)


class _Function:
    """What a function does with so many ranks."""

    def __init__(self, acts: Acts, world: World) -> None:
        self._acts, self._world = acts, world
        self._found: dict[tuple[Any, ...], Hazard] = {}

    def hazards(self) -> dict[tuple[Any, ...], Hazard]:
        """Return what is wrong, by what is the same with other numbers of ranks."""
        branches = list(branches_of(self._acts))
        for branch in branches:
            if not self._is_decided_alike(branch) and not branch.is_same:
                self._report_branch(branch)
        if not self._may_differ(branches):
            return self._found
        open_ = [one for one in branches if not isinstance(one.condition, Lanes)]
        keys = list(dict.fromkeys(one.key for one in open_ if not one.is_same))
        choices: list[frozenset[object]] = [frozenset(), frozenset(keys)]
        for key in keys if len(keys) > 1 else ():
            choices += [frozenset({key}), frozenset(keys) - {key}]
        for choice in choices:
            self._run(choice, certain=len(keys) < 2)
        return self._found

    def _is_decided_alike(self, branch: Branch) -> bool:
        """Whether all ranks that have to do with each other in it take the same branch."""
        condition = branch.condition
        if isinstance(condition, Lanes):
            return True  # each of them takes the one that it takes: they are run
        if not isinstance(condition, Alike):
            return False
        for act in acts_of([*branch.then, *branch.otherwise]):
            for rank, team in enumerate(condition.teams):
                together: set[int | None] = {*range(self._world.size)}
                if act.teams is not None:
                    together = {*act.teams[rank]}
                elif act.peers:
                    together = {act.peers[rank]}
                if act.does in SHARED and act.posted is None and not together <= {*team}:
                    return False
        return True

    def _may_differ(self, branches: list[Branch]) -> bool:
        """Whether some rank may do something else than another one in the same branches."""
        if any(isinstance(one.condition, Lanes) for one in branches):
            return True
        acts = list(acts_of(self._acts))
        return any(
            act.peers or (act.teams and any(k not in team for k, team in enumerate(act.teams)))
            for act in acts
        )

    def _run(self, choice: frozenset[object], certain: bool) -> None:
        """Run all ranks where some conditions hold."""
        ranks = range(self._world.size)
        programs = [chosen(self._acts, rank, lambda one: one.key in choice) for rank in ranks]
        for patient in (True, False):
            meetings = Rendezvous(programs, patient)
            stuck = meetings.run()
            if stuck is not None:
                self._report(stuck, certain and patient and meetings.comes(stuck))
                return

    def _report(self, stuck: Stuck, certain: bool) -> None:
        kind = HazardKind.DISAGREES if stuck.disagree else HazardKind.STUCK
        key = (stuck.act.function, kind, stuck.act.step.variable)
        where = " and ".join(
            f"rank {rank} " + ("has ended" if act is None else f"is in `{act.step}`")
            for rank, act in stuck.others
        )
        example = f"{self._world.size} workers run it"
        known = self._found.get(key)
        if known is None or (known.unknown and certain):
            self._found[key] = Hazard(
                stuck.act.function,
                kind,
                f"rank {stuck.rank}",
                str(stuck.act.step),
                where or "nobody is there",
                example,
                not certain,
            )

    def _report_branch(self, branch: Branch) -> None:
        key = (branch.function, HazardKind.BRANCHES, branch.step.variable)
        then, otherwise = texts(branch.then, branch.otherwise)
        other = f"one branch has {then}, the other one {otherwise}"
        self._found[key] = Hazard(
            branch.function, key[1], TOGETHER, str(branch.step), other, unknown=True
        )


def _within(sequence: Sequence) -> Iterator[Statement]:
    for step in sequence.steps:
        yield step
        if step.kind == IF:
            yield from _within(step.then)
            yield from _within(step.otherwise)


def _matters(step: Statement) -> bool:
    """Whether ranks may do something else than others from a step on."""
    if step.kind != CALL_PACKED:
        return step.kind == IF
    function = contract.find(step.name)
    return function is not None and (
        function in (PLACE_IN_TEAM, TEAM, WORKER_RANK, WORKER_ID) or function.meets is Meeting.PAIR
    )
