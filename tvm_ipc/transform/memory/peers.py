# SPDX-License-Identifier: Apache-2.0
"""How long peers may read the input of a collective, and what proves it.

    allreduce(s -> o0)          without its exit barrier it returns while slower peers read s
    ...                         so s must stay as it is
    allreduce(t -> o1)          nobody returns from here before all have entered, and so left the
                                first one: s is free again

The second call is the *meeting* of the first. It must be passed on every path, and by all ranks of
the first: a meeting of everybody will do for any team, that of another team for none. A call of a
function of the module is one if each of its paths has one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TypeAlias

import tvm
from tvm import relax, tirx

from tvm_ipc.contract import IPC_MEMORY, AnyTeam, Team, find
from tvm_ipc.transform.ir.aliases import ModuleFacts
from tvm_ipc.transform.ir.collectives import Collective
from tvm_ipc.transform.ir.prim_funcs import find_parameters
from tvm_ipc.transform.ir.program import Region, Step
from tvm_ipc.transform.ir.roots import Allocation, Facts, Root, Use

#: Teams of which every rank has entered a collective, those aside that a larger one contains.
_Met: TypeAlias = "frozenset[AnyTeam]"
_NOBODY: _Met = frozenset()


def _covers(met: _Met, team: AnyTeam) -> bool:
    return any(Team.contains(one, team) for one in met)


@dataclass(frozen=True)
class Candidate:
    """A collective that can do without its exit barrier, if its input stays live."""

    step: Step
    collective: Collective
    inputs: tuple[Allocation, ...]  #: what its input may lie in
    meeting: Step

    @property
    def until(self) -> tuple[int, Region]:
        """The event until which the inputs have to stay, and its region."""
        return self.meeting.index, self.meeting.region


class Meetings:
    """What the functions of a module pass on all of their paths."""

    def __init__(self, module: ModuleFacts) -> None:
        self._module = module
        self._passed: dict[str, _Met] = {}
        self._steps: dict[Step, _Met] = {}
        self._suffice: dict[tuple[Region, AnyTeam], list[Step]] = {}
        self._read_only: dict[str, frozenset[int]] = {}

    def after(self, step: Step, team: AnyTeam) -> Step | None:
        """Return the next binding after `step` that all paths pass and in which a team meets."""
        region = step.region
        while True:
            found = self._sufficing(region, team)
            place = bisect_right(found, step.index, key=_index)
            if place < len(found):
                return found[place]
            if region.parent is None:
                return None
            step, region = region.parent, region.parent.region

    def _sufficing(self, region: Region, team: AnyTeam) -> list[Step]:
        """Return the bindings of a region in which a team meets, those in its branches left out."""
        key = region, team
        if key not in self._suffice:
            self._suffice[key] = [s for s in region.crossings if _covers(self.of(s), team)]
        return self._suffice[key]

    def of(self, step: Step) -> _Met:
        """Return which teams have met when a binding is passed."""
        if step not in self._steps:
            self._steps[step] = self._of(step)
        return self._steps[step]

    def _of(self, step: Step) -> _Met:
        if step.branches:
            then, other = (self._region(region) for region in step.branches)
            return frozenset(
                team for team in then | other if _covers(then, team) and _covers(other, team)
            )
        collective = step.collective
        if collective is None:
            return self._function(str(step.value.op.name_hint))
        return frozenset((collective.team,)) if collective.is_meeting else _NOBODY

    def _function(self, name: str) -> _Met:
        if name not in self._passed:
            self._passed[name] = _NOBODY  # what calls itself may never come to its meeting
            facts = self._module.of(name)
            if facts is not None:
                self._passed[name] = self._region(facts.program.body)
        return self._passed[name]

    def _region(self, region: Region) -> _Met:
        passed = _NOBODY
        for step in region.crossings:
            passed |= self.of(step)
            if Team.WORLD in passed:
                break
        return passed

    def writes(self, facts: Facts, step: Step, roots: frozenset[Root]) -> bool:
        """Whether a binding may write into the roots."""
        call = step.value
        if not isinstance(call, relax.Call):
            return False
        arguments = call.args
        callee = call.op
        if isinstance(callee, tvm.ir.Op):
            if callee.name != "relax.vm.call_tir_dyn":
                return False  # operators return what they make
            callee, arguments = call.args[0], call.args[1].fields
        safe = self._only_read(callee, len(arguments))
        return any(
            place not in safe and facts.roots(argument) & roots
            for place, argument in enumerate(arguments)
        )

    def _only_read(self, callee: relax.Expr, count: int) -> Collection[int]:
        """Return the places of the arguments that a function certainly does not write."""
        if isinstance(callee, relax.ExternFunc):
            known = find(str(callee.global_symbol))
            return set(range(count)) - known.written(count) if known is not None else ()
        function = self._module.function(callee)
        if not isinstance(function, tirx.PrimFunc):
            return frozenset()
        name = str(callee.name_hint)
        if name not in self._read_only:
            self._read_only[name] = frozenset(
                place
                for place, parameter in enumerate(find_parameters(function))
                if not parameter.may_be_written
            )
        return self._read_only[name]


def _index(step: Step) -> int:
    return step.index


def _event(use: Use) -> int:
    return use.event


def candidates(facts: Facts, meetings: Meetings) -> tuple[list[Candidate], dict[Step, str]]:
    """Return the barriers that can be left out, and for the other ones why they cannot."""
    found: list[Candidate] = []
    kept: dict[Step, str] = {}
    for step in facts.collectives:
        collective = step.collective
        if collective is None or collective.flags is None or not collective.peers_read:
            continue
        candidate = _candidate(facts, meetings, step, collective)
        if isinstance(candidate, str):
            kept[step] = candidate
        else:
            found.append(candidate)
    return found, kept


def _candidate(
    facts: Facts, meetings: Meetings, step: Step, collective: Collective
) -> Candidate | str:
    roots = _roots(facts, collective.peers_read)
    inputs = tuple(root for root in roots if isinstance(root, Allocation))
    if not roots or len(inputs) < len(roots):
        return "its input is memory of the caller or a constant"
    for allocation in inputs:
        if allocation.kept is not None:
            return f"its input escapes: {allocation.kept}"
        if allocation.returned:
            return "its input is returned"
        if not _in_ipc_memory(allocation):
            return f"its input is not in {IPC_MEMORY}"
    if roots & _roots(facts, collective.operands(collective.function.writes)):
        return "it works in place"
    meeting = meetings.after(step, collective.team)
    if meeting is None:
        whom = _WHOM.get(collective.team, "its team")
        return f"no later meeting of {whom} is passed on every path to the end of the function"
    for allocation in inputs:
        uses = allocation.uses  # in the order of the program
        for place in range(bisect_right(uses, step.index, key=_event), len(uses)):
            use = uses[place]
            if use.event > meeting.index:
                break
            if meetings.writes(facts, use.step, roots):
                name = use.step.var.name
                return f"binding {name} may write into its input before the next meeting"
    return Candidate(step, collective, inputs, meeting)


_WHOM: dict[AnyTeam, str] = {Team.WORLD: "all ranks", Team.GROUP: "its group"}


def _roots(facts: Facts, values: Iterable[relax.Expr]) -> frozenset[Root]:
    return frozenset(root for value in values for root in facts.roots(value))


def _in_ipc_memory(allocation: Allocation) -> bool:
    args = allocation.call.args[:]
    return len(args) > 3 and str(args[3].value) == IPC_MEMORY
