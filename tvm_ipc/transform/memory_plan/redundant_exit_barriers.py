# SPDX-License-Identifier: Apache-2.0
"""Finds exit barriers that can be omitted, and the later collectives that replace them.

    allreduce(s -> o0)          without its exit barrier it returns while slower peers read s
    ...                         so s must not be overwritten here
    allreduce(t -> o1)          no rank returns from this one before all ranks have entered it, and
                                so have returned from the first one: s may be overwritten now

The second call is the *substitute* of the first one's exit barrier. Every path must pass it, and it
must synchronize all ranks of the first: a collective of all ranks is a substitute for any team, one
of another team is not. A call of a function of the module is a substitute if each path through the
function has one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import TypeAlias

from tvm import relax

from tvm_ipc.analysis.alias_facts import (
    AliasFacts,
    Allocation,
    MemoryObject,
)
from tvm_ipc.analysis.collective_calls import Collective
from tvm_ipc.analysis.find_aliases import ModuleAliasFacts
from tvm_ipc.analysis.program_order import Region, Step
from tvm_ipc.analysis.views_and_writes_of_calls import written_arguments
from tvm_ipc.packed_functions import IPC_MEMORY, AnyTeam, Team

#: The teams that have synchronized; a team that a larger one contains may be missing.
_Synced: TypeAlias = "frozenset[AnyTeam]"
_NOBODY: _Synced = frozenset()


def _covers(synced: _Synced, team: AnyTeam) -> bool:
    """Return whether all ranks of a team have synchronized."""
    return any(Team.contains(larger, team) for larger in synced)


@dataclass(frozen=True)
class BarrierCandidate:
    """A collective that does not need its exit barrier if its input stays live for longer."""

    step: Step
    collective: Collective
    inputs: tuple[Allocation, ...]  #: the allocations that its input may be stored in
    substitute: Step  #: the later step that synchronizes its ranks

    @property
    def read_end(self) -> tuple[int, Region]:
        """The event until which peers may read the inputs, and its region."""
        return self.substitute.index, self.substitute.region


class ExitBarriers:
    """The synchronization of a module: the teams that synchronize on every path of a binding."""

    def __init__(self, module: ModuleAliasFacts) -> None:
        self._module = module
        self._by_function: dict[str, _Synced] = {}
        self._by_step: dict[Step, _Synced] = {}
        self._synchronizing: dict[tuple[Region, AnyTeam], list[Step]] = {}

    def after(self, step: Step, team: AnyTeam) -> Step | None:
        """Return the next binding after `step` that synchronizes a team on all paths."""
        region = step.region
        while True:
            steps = self._synchronizing_steps(region, team)
            position = bisect_right(steps, step.index, key=attrgetter("index"))
            if position < len(steps):
                return steps[position]
            if region.parent is None:
                return None
            step, region = region.parent, region.parent.region

    def _synchronizing_steps(self, region: Region, team: AnyTeam) -> list[Step]:
        """Return the bindings of a region, not of its branches, that synchronize a team."""
        key = region, team
        if key not in self._synchronizing:
            self._synchronizing[key] = [s for s in region.crossings if _covers(self.of(s), team)]
        return self._synchronizing[key]

    def of(self, step: Step) -> _Synced:
        """Return the teams that a binding synchronizes on every path through it."""
        if step not in self._by_step:
            self._by_step[step] = self._synced_by_step(step)
        return self._by_step[step]

    def _synced_by_step(self, step: Step) -> _Synced:
        if step.branches:
            then, otherwise = (self._synced_by_region(region) for region in step.branches)
            return frozenset(
                team
                for team in then | otherwise
                if _covers(then, team) and _covers(otherwise, team)
            )
        collective = step.collective
        if collective is None:
            return self._synced_by_function(str(step.value.op.name_hint))
        return frozenset((collective.team,)) if collective.is_barrier else _NOBODY

    def _synced_by_function(self, name: str) -> _Synced:
        if name not in self._by_function:
            self._by_function[name] = _NOBODY  # a recursive call is not proved to terminate
            facts = self._module.of(name)
            if facts is not None:
                self._by_function[name] = self._synced_by_region(facts.program.body)
        return self._by_function[name]

    def _synced_by_region(self, region: Region) -> _Synced:
        synced = _NOBODY
        for step in region.crossings:
            synced |= self.of(step)
            if Team.WORLD in synced:
                break
        return synced

    def writes(self, facts: AliasFacts, step: Step, objects: frozenset[MemoryObject]) -> bool:
        """Return whether a binding may write to one of the memory objects."""
        if not isinstance(step.value, relax.Call):
            return False
        written = written_arguments(step.value, self._module.primfuncs)
        return any(facts.objects(argument) & objects for argument in written)


def candidates(
    facts: AliasFacts, exit_barriers: ExitBarriers
) -> tuple[list[BarrierCandidate], dict[Step, str]]:
    """Return the barriers that can be omitted, and the reasons why the others cannot."""
    possible: list[BarrierCandidate] = []
    kept: dict[Step, str] = {}
    for step in facts.collectives:
        collective = step.collective
        if collective is None or collective.flags is None or not collective.peers_read:
            continue
        candidate = _candidate(facts, exit_barriers, step, collective)
        if isinstance(candidate, str):
            kept[step] = candidate
        else:
            possible.append(candidate)
    return possible, kept


def _candidate(
    facts: AliasFacts, exit_barriers: ExitBarriers, step: Step, collective: Collective
) -> BarrierCandidate | str:
    """Return a collective whose barrier can be omitted, or the reason why it cannot."""
    objects = _objects(facts, collective.peers_read)
    inputs = tuple(item for item in objects if isinstance(item, Allocation))
    if not objects or len(inputs) < len(objects):
        return "its input is memory of the caller or a constant"
    for allocation in inputs:
        if allocation.kept is not None:
            return f"its input escapes: {allocation.kept}"
        if allocation.returned:
            return "its input is returned"
        if allocation.scope != IPC_MEMORY:
            return f"its input is not in {IPC_MEMORY}"
    if objects & _objects(facts, collective.operands(collective.function.writes)):
        return "it runs in place"
    substitute = exit_barriers.after(step, collective.team)
    if substitute is None:
        team = _TEAM_NAMES.get(collective.team, "its team")
        return f"not every path to the end of the function synchronizes {team} again"
    for allocation in inputs:
        uses = allocation.uses  # in the order of the program
        for position in range(bisect_right(uses, step.index, key=attrgetter("point")), len(uses)):
            use = uses[position]
            if use.point > substitute.index:
                break
            if exit_barriers.writes(facts, use.step, objects):
                name = use.step.var.name
                return f"binding {name} may write to its input before its team synchronizes again"
    return BarrierCandidate(step, collective, inputs, substitute)


_TEAM_NAMES: dict[AnyTeam, str] = {Team.WORLD: "all ranks", Team.GROUP: "its group"}


def _objects(facts: AliasFacts, values: Iterable[relax.Expr]) -> frozenset[MemoryObject]:
    """Return the memory objects that any of the values may be."""
    return frozenset(item for value in values for item in facts.objects(value))
