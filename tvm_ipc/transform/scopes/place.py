# SPDX-License-Identifier: Apache-2.0
"""Decides where copies stand: as few as possible, where they run least often."""

from __future__ import annotations

from dataclasses import dataclass, field

from tvm_ipc.transform.scopes.facts import OUT, Region, Tensor, Use
from tvm_ipc.transform.scopes.solve import Solution


@dataclass(eq=False)
class Copy:
    """A copy of a tensor in another scope, before a binding of a region, and who uses it."""

    tensor: Tensor
    scope: str
    source_scope: str
    region: Region
    index: int
    uses: list[Use] = field(default_factory=list)


@dataclass(eq=False)
class Plan:
    """All copies of a module: shared ones, results of calls, and operands that are written."""

    copies: list[Copy] = field(default_factory=list)
    results: list[Copy] = field(default_factory=list)
    around: list[Copy] = field(default_factory=list)


def place_copies(solution: Solution) -> Plan:
    """Return the copies that a solution needs."""
    plan = Plan()
    groups: dict[tuple[object, ...], list[Use]] = {}
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
        function = use.region.function
        number = solution.program.number(use)
        version = solution.effects.version(function, use.tensor.leaf, number)
        key: tuple[object, ...] = (id(function), use.tensor.root.key, scope, version)
        if version < 0:
            key = (id(use),)
        groups.setdefault(key, []).append(use)
    for uses in groups.values():
        scope = solution.needed(uses[0])
        assert scope is not None
        for region, index, served in _Places(solution, uses).best():
            copy = _copy(solution, served[0], scope, served)
            copy.region, copy.index = region, index
            plan.copies.append(copy)
    return plan


def _copy(solution: Solution, use: Use, scope: str, uses: list[Use]) -> Copy:
    source = solution.scopes[use.tensor.leaf] or "global"
    return Copy(use.tensor, scope, source, use.region, use.index, uses)


def _holds_nothing(solution: Solution, use: Use) -> bool:
    """Whether memory was allocated in this function and not written before a use."""
    program, leaf = solution.program, use.tensor.leaf
    sites = program.allocs.get(leaf, [])
    if not any(site.region.function is use.region.function for site in sites):
        return False
    return solution.effects.version(use.region.function, leaf, program.number(use)) == 0


class _Places:
    """The uses of one value in one scope, as a tree of the regions that they are in."""

    def __init__(self, solution: Solution, uses: list[Use]) -> None:
        self.solution = solution
        self.direct: dict[Region, list[Use]] = {}
        self.branches: dict[Region, dict[int, list[Region]]] = {}
        regions = [use.region for use in uses]
        for use in uses:
            self.direct.setdefault(use.region, []).append(use)
        self.top = _common(regions)
        for region in set(regions):
            while region is not self.top:
                assert region.parent is not None
                below = self.branches.setdefault(region.parent, {}).setdefault(region.at, [])
                if region in below:
                    break
                below.append(region)
                region = region.parent

    def best(self) -> list[tuple[Region, int, list[Use]]]:
        """Return where to copy, and the uses that each copy serves."""
        return self._best(self.top)[1]

    def _best(self, region: Region) -> tuple[float, list[tuple[Region, int, list[Use]]]]:
        direct = self.direct.get(region, [])
        branches = self.branches.get(region, {})
        first = min([use.index for use in direct] + list(branches))
        apart = [self._best(child) for children in branches.values() for child in children]
        cost = sum(cost for cost, _ in apart)
        below = [place for _, places in apart for place in places]
        served = [*direct, *(use for _, _, uses in below for use in uses)]
        if direct or region.frequency < cost:
            # All uses are of one version; so is the place before them, if nothing in a branch
            # writes first.
            effects, leaf = self.solution.effects, served[0].tensor.leaf
            at = effects.version(region.function, leaf, region.numbers[first])
            number = self.solution.program.number(served[0])
            if at == effects.version(region.function, leaf, number):
                return region.frequency, [(region, first, served)]
        if direct:
            first = min(use.index for use in direct)
            return cost + region.frequency, [*below, (region, first, direct)]
        return cost, below


def _common(regions: list[Region]) -> Region:
    top = regions[0]
    for region in regions[1:]:
        while top is not region:
            if top.depth >= region.depth:
                assert top.parent is not None
                top = top.parent
            else:
                assert region.parent is not None
                region = region.parent
    return top
