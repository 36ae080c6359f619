# SPDX-License-Identifier: Apache-2.0
"""Groups collectives that ranks may run as one call from different branches of an `if`.

    if c:
        allreduce(a -> x)     # rank 0 is here
    else:
        allreduce(b -> x)     # and rank 1 is here: both take part in one call

Ranks may take different branches as long as their calls match. Then either all calls of a group
omit their exit barrier, or none does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from tvm import relax

from tvm_ipc.analysis.collective_calls import Collective
from tvm_ipc.analysis.find_aliases import ModuleAliasFacts
from tvm_ipc.analysis.matching_collectives_across_branches import BranchPath, branch_path
from tvm_ipc.analysis.program_order import Region, Step

#: The arguments in which matching calls agree, without sizes, which may be symbolic.
_Signature: TypeAlias = "tuple[Any, ...]"


@dataclass(frozen=True, eq=False)
class _Element:
    """A collective of a region, or a call or an if that contains several."""

    key: Any  #: equal for elements that match
    step: Step | None = None  #: the collective


class Counterparts:
    """The groups of matching collectives of a module."""

    def __init__(self, module: ModuleAliasFacts) -> None:
        self._module = module
        self._leader: dict[Step, Step] = {}
        self._signatures: dict[str, frozenset[_Signature]] = {}
        #: By function, the signatures whose calls may match calls of another function.
        self._cross_function: dict[str, set[_Signature]] = {}
        for name, function in module.functions.items():
            facts = module.of(name) if isinstance(function, relax.Function) else None
            if facts is not None and any(step.branches for step in facts.program.body.crossings):
                _Grouping(self, name).run(facts.program.body)

    def groups(self, steps: list[Step]) -> list[list[Step]]:
        """Return the groups of two or more among the collectives of a function."""
        groups: dict[Step, list[Step]] = {}
        for step in steps if self._leader else ():
            groups.setdefault(self._find(step), []).append(step)
        return [group for group in groups.values() if len(group) > 1]

    def crosses_functions(self, name: str, step: Step) -> bool:
        """Return whether a collective of a function may match one of another function."""
        signatures = self._cross_function.get(name)
        return signatures is not None and _signature(step.collective) in signatures

    def unite(self, first: Step, second: Step) -> None:
        """Put two collectives into one group."""
        first, second = self._find(first), self._find(second)
        if first is not second:
            self._leader[second] = first

    def signatures(self, name: str) -> frozenset[_Signature]:
        """Return the signatures of all collectives of a function and of those that it calls."""
        if name not in self._signatures:
            self._signatures[name] = frozenset()  # a recursive call adds none
            signatures: set[_Signature] = set()
            for step in self.crossings(name):
                if step.collective is not None:
                    signatures.add(_signature(step.collective))
                elif not step.branches:
                    signatures |= self.signatures(_callee(step))
            self._signatures[name] = frozenset(signatures)
        return self._signatures[name]

    def crossings(self, name: str) -> Iterator[Step]:
        """Yield the collectives, calls and ifs of a function and of its branches."""
        facts = self._module.of(name)
        remaining = [] if facts is None else [facts.program.body]
        while remaining:
            for step in remaining.pop().crossings:
                yield step
                remaining += step.branches

    def mark_cross_function(self, name: str, signature: _Signature) -> None:
        """Record that calls with a signature, also in callees, may match another function's."""
        remaining = [name]
        while remaining:
            name = remaining.pop()
            marked = self._cross_function.setdefault(name, set())
            if signature in marked:
                continue
            marked.add(signature)
            for step in self.crossings(name):
                if step.collective is None and not step.branches:
                    callee = _callee(step)
                    if signature in self.signatures(callee):
                        remaining.append(callee)

    def _find(self, step: Step) -> Step:
        """Return the leader of the group of a collective."""
        leader = step
        while leader in self._leader:
            leader = self._leader[leader]
        while step is not leader:
            self._leader[step], step = leader, self._leader[step]
        return leader


class _Grouping:
    """Groups the collectives of one function."""

    def __init__(self, counterparts: Counterparts, name: str) -> None:
        self._counterparts = counterparts
        self._name = name
        #: By signature, the collectives and calls in branches whose elements do not match.
        self._unmatched: dict[_Signature, list[tuple[BranchPath, Step]]] = {}

    def run(self, body: Region) -> None:
        """Find the groups and add them to the counterparts."""
        self._elements(body)
        for signature, members in self._unmatched.items():
            # Calls of one branch run on the same ranks, so that none of them matches another one.
            if len({path for path, _ in members}) > 1:
                self._unite_unmatched(signature, [step for _, step in members])

    def _elements(self, region: Region) -> list[_Element]:
        """Return the elements of a region in order, and group those of matching branches."""
        elements: list[_Element] = []
        for step in region.crossings:
            if step.collective is not None:
                elements.append(_Element(_signature(step.collective), step))
            elif step.branches:
                elements += self._match_branches(step)
            elif self._counterparts.signatures(_callee(step)):
                elements.append(_Element(_callee(step)))
        return elements

    def _match_branches(self, step: Step) -> list[_Element]:
        """Return the elements of an if: those of one branch if the branches match."""
        then, otherwise = map(self._elements, step.branches)
        if [element.key for element in then] == [element.key for element in otherwise]:
            for left, right in zip(then, otherwise, strict=True):
                if left.step is not None and right.step is not None:
                    self._counterparts.unite(left.step, right.step)
            return then
        for region in step.branches:
            self._add_unmatched(region)
        return [_Element(step)]  # it matches no other element

    def _add_unmatched(self, region: Region) -> None:
        """Record the calls of a region, which may match calls of other branches."""
        path = branch_path(region)
        for step in region.crossings:
            if step.branches:
                for inner in step.branches:
                    self._add_unmatched(inner)
                continue
            signatures = (
                self._counterparts.signatures(_callee(step))
                if step.collective is None
                else (_signature(step.collective),)
            )
            for signature in signatures:
                self._unmatched.setdefault(signature, []).append((path, step))

    def _unite_unmatched(self, signature: _Signature, members: list[Step]) -> None:
        """Unite calls in different branches, and all calls between the first and the last one.

        If some ranks are one call ahead in between, their calls match the next calls of others.
        """
        first = min(step.index for step in members)
        last = max(step.index for step in members)
        for step in self._counterparts.crossings(self._name):
            if not first <= step.index <= last:
                continue
            if step.collective is not None:
                if _signature(step.collective) == signature:
                    self._counterparts.unite(members[0], step)
            elif not step.branches and signature in self._counterparts.signatures(_callee(step)):
                self._counterparts.mark_cross_function(_callee(step), signature)
                self._counterparts.mark_cross_function(self._name, signature)


def _signature(collective: Collective | None) -> _Signature:
    """Return the arguments in which a collective and its matches agree."""
    assert collective is not None
    name = collective.general_form.name.rpartition(".")[2]
    root = collective.numbers.get("root")
    for suffix in ("_from_worker0", "_to_worker0"):
        if name.endswith(suffix):
            name, root = name.removesuffix(suffix), 0
    return name, collective.team, collective.kind, root


def _callee(step: Step) -> str:
    return str(step.value.op.name_hint)
