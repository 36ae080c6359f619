# SPDX-License-Identifier: Apache-2.0
"""Decides where copies stand: as few as possible, where they run least often."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from tvm_ipc.transform.ir.program import Region, Step
from tvm_ipc.transform.scopes.facts import OUT, FunctionFacts, ScopedUse, TensorValue, frequency
from tvm_ipc.transform.scopes.solve import Solution


@dataclass(eq=False)
class Copy:
    """A copy of a tensor in another scope, before a step or the end of a region, and its users."""

    tensor: TensorValue
    scope: str
    source_scope: str
    function: FunctionFacts
    region: Region
    step: Step | None
    uses: list[ScopedUse] = field(default_factory=list)


@dataclass(eq=False)
class CopyPlan:
    """All copies of a module: shared ones, results of calls, and operands that are written."""

    copies: list[Copy] = field(default_factory=list)
    results: list[Copy] = field(default_factory=list)
    around: list[Copy] = field(default_factory=list)


def place_copies(solution: Solution) -> CopyPlan:
    """Return the copies that a solution needs."""
    plan = CopyPlan()
    groups: dict[tuple[object, ...], list[ScopedUse]] = {}
    for use in solution.program.uses:
        scope = solution.needed(use)
        if scope is None:
            continue
        if solution.written(use):
            use.fresh |= _holds_nothing(solution, use)
            plan.around.append(_copy(solution, use, scope, [use]))
            continue
        if use.path and use.path[0] == OUT:
            plan.results.append(_copy(solution, use, scope, [use]))
            continue
        version = solution.effects.version(use.function, use.tensor.root, use.event)
        key: tuple[object, ...] = (id(use.function), use.tensor.root.key, scope, version)
        if version < 0:
            key = (id(use),)
        groups.setdefault(key, []).append(use)
    for uses in groups.values():
        scope = solution.needed(uses[0])
        assert scope is not None
        for region, step, served in _Places(solution, uses).best():
            copy = _copy(solution, served[0], scope, served)
            copy.region, copy.step = region, step
            plan.copies.append(copy)
    return plan


def _copy(solution: Solution, use: ScopedUse, scope: str, uses: list[ScopedUse]) -> Copy:
    source = solution.scopes[use.tensor.leaf] or "global"
    return Copy(use.tensor, scope, source, use.function, use.region, use.step, uses)


def _holds_nothing(solution: Solution, use: ScopedUse) -> bool:
    """Whether memory was allocated in this function and not written before a use."""
    sites = solution.program.allocs.get(use.tensor.leaf, [])
    if not any(function is use.function for function, _ in sites):
        return False
    return solution.effects.version(use.function, use.tensor.root, use.event) == 0


#: Before which step of a region a copy stands, or before its end, and whom it serves.
_Place: TypeAlias = "tuple[Region, Step | None, list[ScopedUse]]"


class _Places:
    """The uses of one value in one scope, as a tree of the regions that they are in."""

    def __init__(self, solution: Solution, uses: list[ScopedUse]) -> None:
        self.solution = solution
        self.direct: dict[Region, list[ScopedUse]] = {}
        self.branches: dict[Region, dict[Step, list[Region]]] = {}
        regions = [use.region for use in uses]
        for use in uses:
            self.direct.setdefault(use.region, []).append(use)
        self.top = _common(regions)
        for region in set(regions):
            while region is not self.top:
                assert region.parent is not None
                above = region.parent.region
                below = self.branches.setdefault(above, {}).setdefault(region.parent, [])
                if region in below:
                    break
                below.append(region)
                region = above

    def best(self) -> list[_Place]:
        """Return where to copy, and the uses that each copy serves."""
        return self._best(self.top)[1]

    def _best(self, region: Region) -> tuple[float, list[_Place]]:
        direct = self.direct.get(region, [])
        branches = self.branches.get(region, {})
        often = frequency(region)
        if not branches:
            return often, [(region, _first(direct), direct)]
        apart = [self._best(child) for children in branches.values() for child in children]
        cost = sum(cost for cost, _ in apart)
        below = [place for _, places in apart for place in places]
        served = [*direct, *(use for _, _, uses in below for use in uses)]
        if direct or often < cost:
            # All uses are of one version; so is the place before them, if nothing in a branch
            # writes first.
            effects, use = self.solution.effects, served[0]
            steps = [*branches, *(one.step for one in direct if one.step is not None)]
            first = min(steps, key=_entry)
            at = effects.version(use.function, use.tensor.root, first.entry)
            if at == effects.version(use.function, use.tensor.root, use.event):
                return often, [(region, first, served)]
        # Places further out are of that other version too, whatever the cost.
        return cost, [*below, (region, _first(direct), direct)] if direct else below


def _first(uses: list[ScopedUse]) -> Step | None:
    """Return the first step of some uses in a region, None if there is but its end."""
    return min((use.step for use in uses if use.step is not None), key=_entry, default=None)


def _entry(step: Step) -> int:
    return step.entry


def _common(regions: list[Region]) -> Region:
    top = regions[0]
    for region in regions[1:]:
        while top is not region:
            if len(top.path) >= len(region.path):
                assert top.parent is not None
                top = top.parent.region
            else:
                assert region.parent is not None
                region = region.parent.region
    return top
