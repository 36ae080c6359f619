# SPDX-License-Identifier: Apache-2.0
"""Chooses the scope of every leaf, so that the copies that remain move the fewest bytes.

Leaves that no copy may stand between share their scope. Demands spread against the flow of data
("what becomes this must be there"), scopes that kernels cannot ignore spread with it too. Where
two meet, each class of leaves takes the scope with the cheapest copies, until nothing improves.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import cast

from tvm_ipc.errors import TransformError
from tvm_ipc.transform.scopes.demands import GLOBAL, ScopeRegistry
from tvm_ipc.transform.scopes.facts import ScopedUse, ScopeFacts, frequency
from tvm_ipc.transform.scopes.primfunc import PrimFuncs
from tvm_ipc.transform.scopes.sizes import size_of
from tvm_ipc.transform.scopes.staleness import Staleness

#: The scope of what nothing is demanded of: "global", or any that works just as well.
PLAIN = ""

_ROUNDS = 16


@dataclass(eq=False)
class _Class:
    """Leaves that share a scope."""

    fixed: str | None = None
    why: str = ""
    scope: str = PLAIN
    demands: dict[str, None] = field(default_factory=dict)  #: in the order of the program
    uses: list[ScopedUse] = field(default_factory=list)
    weighed: bool = False
    exact: dict[tuple[object, ...], tuple[str, float]] = field(default_factory=dict)
    others: dict[tuple[object, ...], tuple[bool, float]] = field(default_factory=dict)
    sources: list[tuple[int, float]] = field(default_factory=list)
    targets: list[tuple[int, float]] = field(default_factory=list)


@dataclass(eq=False)
class Solution:
    """The scope of each leaf."""

    program: ScopeFacts
    registry: ScopeRegistry
    primfuncs: PrimFuncs
    effects: Staleness
    scopes: list[str]  #: by leaf

    def needed(self, use: ScopedUse) -> str | None:
        """Return the scope that a use needs a copy in, or None if it takes the leaf as it is."""
        scope = self.scopes[use.tensor.leaf]
        if use.exact is not None:
            return None if scope == use.exact else use.exact
        if use.same is not None:
            target = self.scopes[use.same]
            if accepts(self.registry, target, scope):
                return None
            return target or GLOBAL
        if self.registry.scopes[scope or GLOBAL] or self.flexible(use):
            return None
        return GLOBAL

    def flexible(self, use: ScopedUse) -> bool:
        """Whether a use is a parameter of a PrimFunc that can be specialised."""
        return use.param is not None and self.primfuncs.refusal(*use.param) is None

    def written(self, use: ScopedUse) -> bool:
        """Whether a use may write the tensor."""
        return use.written and (use.param is None or self.primfuncs.writes(*use.param))


def accepts(registry: ScopeRegistry, wanted: str, scope: str) -> bool:
    """Whether a place for `wanted` can take memory in `scope`."""
    return wanted == scope or (wanted == PLAIN and registry.scopes[scope or GLOBAL])


def solve(
    program: ScopeFacts, registry: ScopeRegistry, primfuncs: PrimFuncs, effects: Staleness
) -> Solution:
    """Choose scopes, or raise a TransformError where demands contradict each other."""
    return _Solver(program, registry, primfuncs, effects).run()


class _Solver:
    def __init__(
        self, program: ScopeFacts, registry: ScopeRegistry, primfuncs: PrimFuncs, effects: Staleness
    ) -> None:
        self.program = program
        self.registry = registry
        self.primfuncs = primfuncs
        self.effects = effects
        self.parents = list(range(len(program.types)))
        self.classes: dict[int, _Class] = {}

    def run(self) -> Solution:
        self.unite_what_no_copy_may_cut()
        self.fill()
        self.spread()
        self.improve()
        scopes = [self.classes[self.find(leaf)].scope for leaf in range(len(self.parents))]
        return Solution(self.program, self.registry, self.primfuncs, self.effects, scopes)

    def unite_what_no_copy_may_cut(self) -> None:
        """Give leaves one class where a copy between them would be seen."""
        program = self.program
        flows = [(use, use.same) for use in program.uses if use.same is not None]
        tied = list(self.parents)
        for use, same in flows:
            _unite(tied, use.tensor.leaf, same)
        scopes = [(leaf, scope) for leaf, (scope, _) in program.fixed.items()]
        scopes += [(use.tensor.leaf, use.exact) for use in program.uses if use.exact is not None]
        # No copy is wanted among leaves that all are in "global" memory anyway.
        placed = {_find(tied, leaf) for leaf, scope in scopes if scope != GLOBAL}
        for use, same in flows:
            if _find(tied, same) in placed and not self.effects.may_cut(use):
                _unite(self.parents, use.tensor.leaf, same)

    def find(self, leaf: int) -> int:
        return _find(self.parents, leaf)

    def fill(self) -> None:
        for leaf in range(len(self.parents)):
            self.classes.setdefault(self.find(leaf), _Class())
        for leaf, (scope, why) in self.program.fixed.items():
            known = self.classes[self.find(leaf)]
            if known.fixed is not None and known.fixed != scope:
                raise TransformError(
                    f"PlanMemoryScopes: one tensor should be in {known.fixed!r}, as it "
                    f"{known.why}, and in {scope!r}, as it {why}. No copy can stand "
                    "between the two, because the tensor is written after they meet; copy it "
                    "before, or change one of them"
                )
            known.fixed = known.scope = scope
            known.why = why
        for use in self.program.uses:
            known = self.classes[self.find(use.tensor.leaf)]
            if use.same is not None:
                source, target = self.find(use.tensor.leaf), self.find(use.same)
                if source != target:
                    weight = self.weight(use)
                    known.targets.append((target, weight))
                    self.classes[target].sources.append((source, weight))
            elif use.exact is not None:
                known.demands.setdefault(use.exact)
                known.uses.append(use)
            elif self.program.opaque:  # else it takes what it gets
                known.uses.append(use)

    def weight(self, use: ScopedUse) -> float:
        """Return what a copy for a use costs."""
        often = frequency(use.region) * use.function.frequency
        # Of two ways that move the same bytes, the one with fewer copies is better.
        return size_of(use) * often + 1

    def weigh(self, known: _Class) -> None:
        """Find what copies for the uses of a class would cost; equal uses share one."""
        known.weighed = True
        for use in known.uses:
            weight, key = self.weight(use), cast(tuple[object, ...], (id(use),))
            if use.written and (use.param is None or self.primfuncs.writes(*use.param)):
                weight *= 1 if use.fresh else 2
            else:
                version = self.effects.version(use.function, use.tensor.root, use.event)
                if version >= 0:
                    key = (id(use.function), use.tensor.root.key, use.exact, version)
            if use.exact is not None:
                most = known.exact.get(key, ("", 0.0))[1]
                known.exact[key] = (use.exact, max(most, weight))
            else:
                free = use.param is not None and self.primfuncs.refusal(*use.param) is None
                most = known.others.get(key, (True, 0.0))[1]
                known.others[key] = (free, max(most, weight))

    def spread(self) -> None:
        """Give every class that nothing was decided for the scope that its neighbours want."""
        ready: deque[int] = deque()
        for index, known in self.classes.items():
            if known.fixed is None and known.demands:
                demands = list(known.demands)
                known.scope = demands[0] if len(demands) == 1 else self.cheapest(known, demands)
            if known.scope != PLAIN:
                ready.append(index)
        while ready:
            known = self.classes[ready.popleft()]
            neighbours = [index for index, _ in known.sources]
            if not self.registry.scopes[known.scope]:
                neighbours += [index for index, _ in known.targets]
            for index in neighbours:
                if self.classes[index].scope == PLAIN:
                    self.classes[index].scope = known.scope
                    ready.append(index)

    def improve(self) -> None:
        """Let classes that a copy is needed for take the scope that is cheapest."""
        for _ in range(_ROUNDS):
            changed = False
            for known in self.classes.values():
                if known.fixed is not None or not (known.demands or known.sources or known.targets):
                    continue
                options = set(known.demands)
                options.update(self.classes[index].scope for index, _ in known.sources)
                options.update(self.classes[index].scope for index, _ in known.targets)
                options.discard(known.scope)
                if options and self.cost(known, known.scope):
                    best = self.cheapest(known, [known.scope, *sorted(options)])
                    changed |= best != known.scope
                    known.scope = best
            if not changed:
                return

    def cheapest(self, known: _Class, options: list[str]) -> str:
        return min(options, key=lambda scope: self.cost(known, scope))

    def cost(self, known: _Class, scope: str) -> float:
        if not known.weighed:
            self.weigh(known)
        transparent = self.registry.scopes[scope or GLOBAL]
        cost = sum(weight for wanted, weight in known.exact.values() if wanted != scope)
        if not transparent:
            cost += sum(weight for free, weight in known.others.values() if not free)
        for index, weight in known.targets:
            if not accepts(self.registry, self.classes[index].scope, scope):
                cost += weight
        for index, weight in known.sources:
            if not accepts(self.registry, scope, self.classes[index].scope):
                cost += weight
        return cost


def _find(parents: list[int], leaf: int) -> int:
    while parents[leaf] != leaf:
        parents[leaf] = parents[parents[leaf]]
        leaf = parents[leaf]
    return leaf


def _unite(parents: list[int], one: int, other: int) -> None:
    one, other = _find(parents, one), _find(parents, other)
    parents[max(one, other)] = min(one, other)
