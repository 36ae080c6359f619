# SPDX-License-Identifier: Apache-2.0
"""Decides where to insert copies: as few as possible, where they run least often."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TypeAlias

from tvm_ipc.analysis.program_order import Region, Step, common_region
from tvm_ipc.transform.memory_scopes.constraint_types import (
    OUT,
    ScopedFunction,
    ScopedUse,
    TensorValue,
    frequency,
)
from tvm_ipc.transform.memory_scopes.solve import Solution


@dataclass(eq=False)
class Copy:
    """A copy of a tensor to another scope, before a step or the end of a region, with its uses."""

    tensor: TensorValue
    scope: str
    source_scope: str
    function: ScopedFunction
    region: Region
    step: Step | None
    uses: list[ScopedUse] = field(default_factory=list)


@dataclass(eq=False)
class CopyPlan:
    """All copies of a module."""

    copies: list[Copy] = field(default_factory=list)  #: before uses that read; uses may share one
    results: list[Copy] = field(default_factory=list)  #: of results of calls
    around: list[Copy] = field(default_factory=list)  #: of operands that are written, copied back


def plan_copies(solution: Solution) -> CopyPlan:
    """Return the copies that a solution needs."""
    plan = CopyPlan()
    groups: dict[tuple[object, ...], list[ScopedUse]] = {}
    reads: list[tuple[tuple[object, ...], ScopedUse]] = []
    for use in solution.program.uses:
        scope = solution.needed(use)
        if scope is None:
            continue
        if solution.written(use):
            use.fresh |= _is_uninitialized(solution, use)
            plan.around.append(_copy(solution, use, scope, [use]))
            continue
        if use.path and use.path[0] == OUT:
            plan.results.append(_copy(solution, use, scope, [use]))
            continue
        reads.append(((id(use.function), use.tensor.root.key, scope), use))
    counts = Counter(key for key, _ in reads)
    for key, use in reads:
        if counts[key] > 1:  # a single use has its copy to itself, so its version does not matter
            version = solution.effects.version(use)
            key = (*key, version) if version >= 0 else (id(use),)
        groups.setdefault(key, []).append(use)
    for uses in groups.values():
        scope = solution.needed(uses[0])
        assert scope is not None
        for region, step, served in _CopySites(solution, uses).best():
            copy = _copy(solution, served[0], scope, served)
            copy.region, copy.step = region, step
            plan.copies.append(copy)
    return plan


def _copy(solution: Solution, use: ScopedUse, scope: str, uses: list[ScopedUse]) -> Copy:
    """Return a copy to `scope` at the position of `use`, for all of `uses`."""
    source = solution.scopes[use.tensor.leaf] or "global"
    return Copy(use.tensor, scope, source, use.function, use.region, use.step, uses)


def _is_uninitialized(solution: Solution, use: ScopedUse) -> bool:
    """Return whether memory is allocated in this function and not written before a use."""
    sites = solution.program.allocs.get(use.tensor.leaf, [])
    if not any(function is use.function for function, _ in sites):
        return False
    return solution.effects.version(use) == 0


#: A position for a copy, before a step of a region or before its end, and the uses it serves.
_CopySite: TypeAlias = "tuple[Region, Step | None, list[ScopedUse]]"


class _CopySites:
    """The uses of one value in one scope, as a tree of their regions."""

    def __init__(self, solution: Solution, uses: list[ScopedUse]) -> None:
        self.solution = solution
        self.direct: dict[Region, list[ScopedUse]] = {}
        self.branches: dict[Region, dict[Step, list[Region]]] = {}
        regions = [use.region for use in uses]
        for use in uses:
            self.direct.setdefault(use.region, []).append(use)
        self.top = common_region(regions)
        for region in set(regions):
            while region is not self.top:
                assert region.parent is not None
                above = region.parent.region
                below = self.branches.setdefault(above, {}).setdefault(region.parent, [])
                if region in below:
                    break
                below.append(region)
                region = above

    def best(self) -> list[_CopySite]:
        """Return the positions of the copies, and the uses that each copy serves."""
        return self._best_in(self.top)[1]

    def _best_in(self, region: Region) -> tuple[float, list[_CopySite]]:
        """Return how often the copies for a region run, and their positions."""
        direct = self.direct.get(region, [])
        branches = self.branches.get(region, {})
        shared_cost = frequency(region)
        if not branches:
            return shared_cost, [(region, _first_step(direct), direct)]
        inner = [self._best_in(child) for children in branches.values() for child in children]
        separate_cost = sum(cost for cost, _ in inner)
        inner_sites = [site for _, sites in inner for site in sites]
        served = [*direct, *(use for _, _, uses in inner_sites for use in uses)]
        if direct or shared_cost < separate_cost:
            # All uses read the same version. A shared copy before them reads it too, unless a
            # branch writes before its use.
            effects, use = self.solution.effects, served[0]
            steps = [*branches, *(use.step for use in direct if use.step is not None)]
            first = min(steps, key=attrgetter("entry"))
            if effects.version(use, first.entry) == effects.version(use):
                return shared_cost, [(region, first, served)]
        # Positions further out would read the other version too, whatever the cost.
        if direct:
            inner_sites.append((region, _first_step(direct), direct))
        return separate_cost, inner_sites


def _first_step(uses: list[ScopedUse]) -> Step | None:
    """Return the first step among the uses of a region, None if all are at its end."""
    return min(
        (use.step for use in uses if use.step is not None), key=attrgetter("entry"), default=None
    )
