# SPDX-License-Identifier: Apache-2.0
"""Chooses the scope of every leaf so that the remaining copies move the fewest bytes.

1. Leaves are united into classes where a copy between them would change the program.
2. Demands spread against the flow of data, from a use back to the allocation. Opaque scopes also
   spread with the flow of data, because other kernels cannot read them.
3. Where two scopes clash, each class takes the scope with the cheapest copies, until no choice
   improves the total.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import cast

from tvm_ipc.errors import TransformError
from tvm_ipc.transform.memory_scopes.constraint_types import ScopedUse, ScopeFacts, frequency
from tvm_ipc.transform.memory_scopes.copy_costs import size_of
from tvm_ipc.transform.memory_scopes.copy_validity import CopyValidity
from tvm_ipc.transform.memory_scopes.operator_scope_demands import GLOBAL, ScopeRegistry
from tvm_ipc.transform.memory_scopes.scopes_of_prim_func_params import PrimFuncParams

#: The scope of a leaf without demands: "global", or any transparent scope.
PLAIN = ""

#: The most rounds of local improvement.
_ROUNDS = 16


@dataclass(eq=False)
class _Class:
    """Leaves that share a scope."""

    fixed: str | None = None  #: the scope that it must have
    reason: str = ""  #: why the scope is fixed, for messages
    scope: str = PLAIN  #: the scope that is chosen so far
    demands: dict[str, None] = field(default_factory=dict)  #: in the order of the program
    uses: list[ScopedUse] = field(default_factory=list)
    weighed: bool = False  #: whether `exact` and `unconstrained` are filled
    #: Uses that demand a scope: the scope and the cost of a copy. Uses with equal keys share one.
    exact: dict[tuple[object, ...], tuple[str, float]] = field(default_factory=dict)
    #: Other uses: whether the kernel can be specialised, and the cost of a copy.
    unconstrained: dict[tuple[object, ...], tuple[bool, float]] = field(default_factory=dict)
    sources: list[tuple[int, float]] = field(default_factory=list)  #: classes that flow in, costs
    targets: list[tuple[int, float]] = field(default_factory=list)  #: classes it flows to, costs


@dataclass(eq=False)
class Solution:
    """The scope of each leaf."""

    program: ScopeFacts
    registry: ScopeRegistry
    primfuncs: PrimFuncParams
    effects: CopyValidity
    scopes: list[str] = field(default_factory=list)  #: by leaf

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
        """Return whether a use is a parameter of a PrimFunc that can be specialised."""
        return use.param is not None and self.primfuncs.refusal(*use.param) is None

    def written(self, use: ScopedUse) -> bool:
        """Return whether a use may write the tensor."""
        return use.written and (use.param is None or self.primfuncs.writes(*use.param))


def accepts(registry: ScopeRegistry, wanted: str, scope: str) -> bool:
    """Return whether memory in `scope` satisfies a use that needs `wanted`."""
    return wanted == scope or (wanted == PLAIN and registry.scopes[scope or GLOBAL])


def is_satisfied(
    program: ScopeFacts, registry: ScopeRegistry, specialise_transparent: bool
) -> bool:
    """Return whether every use accepts its tensor as it is, so that nothing has to be planned."""
    if program.hints or program.misplaced:
        return False
    reaching: list[set[str]] = [set() for _ in program.types]  # by leaf, the scopes it may be in
    for leaf in program.allocs:
        reaching[leaf].add(GLOBAL)
    for leaf, (scope, _) in program.fixed.items():
        reaching[leaf] = {scope}
    targets: dict[int, list[int]] = {}
    for use in program.uses:
        if use.same is not None and use.same not in program.fixed:
            targets.setdefault(use.tensor.leaf, []).append(use.same)
    ready = [leaf for leaf, scopes in enumerate(reaching) if scopes]
    while ready:
        leaf = ready.pop()
        for target in targets.get(leaf, ()):
            if not reaching[leaf] <= reaching[target]:
                reaching[target] |= reaching[leaf]
                ready.append(target)
    return all(
        _accepts_all(program, registry, use, reaching[use.tensor.leaf], specialise_transparent)
        for use in program.uses
    )


def _accepts_all(
    program: ScopeFacts, registry: ScopeRegistry, use: ScopedUse, scopes: set[str], specialise: bool
) -> bool:
    """Return whether a use accepts its tensor in each of the scopes, without any change."""
    if use.exact is not None:
        return scopes <= {use.exact}
    if use.same is not None:
        return use.same not in program.fixed or scopes <= {program.fixed[use.same][0]}
    if use.param is not None and specialise:
        return scopes <= {GLOBAL}
    return all(registry.scopes[scope] for scope in scopes)


def solve(
    program: ScopeFacts, registry: ScopeRegistry, primfuncs: PrimFuncParams, effects: CopyValidity
) -> Solution:
    """Choose scopes, or raise a TransformError where demands contradict each other."""
    solution = Solution(program, registry, primfuncs, effects)
    solution.scopes = _Solver(solution).choose_scopes()
    return solution


class _Solver:
    def __init__(self, solution: Solution) -> None:
        self.solution = solution
        self.program, self.registry = solution.program, solution.registry
        self.parents = list(range(len(self.program.types)))
        self.classes: dict[int, _Class] = {}

    def choose_scopes(self) -> list[str]:
        self.unite_inseparable_leaves()
        self.fill_classes()
        self.spread_demands()
        self.improve_choices()
        return [self.classes[self.find(leaf)].scope for leaf in range(len(self.parents))]

    def unite_inseparable_leaves(self) -> None:
        """Put leaves into one class where a copy between them would change the program."""
        program = self.program
        flows = [(use, use.same) for use in program.uses if use.same is not None]
        tied = list(self.parents)
        for use, same in flows:
            _unite(tied, use.tensor.leaf, same)
        scopes = [(leaf, scope) for leaf, (scope, _) in program.fixed.items()]
        scopes += [(use.tensor.leaf, use.exact) for use in program.uses if use.exact is not None]
        wanted: dict[int, set[str]] = defaultdict(set)
        for leaf, scope in scopes:
            wanted[_find(tied, leaf)].add(scope)
        # Leaves that are all in "global" memory need no copies.
        undecided = {root for root, scopes_of in wanted.items() if scopes_of != {GLOBAL}}
        constrained = {*program.fixed}
        constrained.update(
            use.tensor.leaf for use in program.uses if use.exact is not None and use.same is None
        )
        undecided -= self.find_uniform_roots(flows, tied, wanted, constrained)
        for use, same in flows:
            if _find(tied, same) in undecided and not self.solution.effects.may_copy(use):
                _unite(self.parents, use.tensor.leaf, same)

    def find_uniform_roots(
        self,
        flows: list[tuple[ScopedUse, int]],
        tied: list[int],
        wanted: dict[int, set[str]],
        constrained: set[int],
    ) -> set[int]:
        """Return the roots of tied leaves that all get the same scope, united or not.

        Only one scope is demanded of them, it is transparent, and each leaf flows into a leaf that
        is constrained to it. `spread_demands` then gives that scope to all of them.
        """
        sources: dict[int, list[int]] = defaultdict(list)
        for use, same in flows:
            sources[same].append(use.tensor.leaf)
        reached = set(constrained)
        ready = list(constrained)
        while ready:
            for leaf in sources.get(ready.pop(), ()):
                if leaf not in reached:
                    reached.add(leaf)
                    ready.append(leaf)
        incomplete = {_find(tied, leaf) for leaf in range(len(tied)) if leaf not in reached}
        return {
            root
            for root, scopes in wanted.items()
            if len(scopes) == 1
            and root not in incomplete
            and all(map(self.registry.scopes.get, scopes))
        }

    def find(self, leaf: int) -> int:
        """Return the root of the class of a leaf."""
        return _find(self.parents, leaf)

    def fill_classes(self) -> None:
        """Create the classes, with their fixed scopes, uses and neighbours."""
        for leaf in range(len(self.parents)):
            self.classes.setdefault(self.find(leaf), _Class())
        for leaf, (scope, reason) in self.program.fixed.items():
            leaves = self.classes[self.find(leaf)]
            if leaves.fixed is not None and leaves.fixed != scope:
                raise TransformError(
                    f"PlanMemoryScopes: a tensor must be in {leaves.fixed!r}, because it "
                    f"{leaves.reason}, and in {scope!r}, because it {reason}; no copy can be "
                    "inserted in between, because the tensor is written after both; copy it "
                    "earlier, or change one of the scopes"
                )
            leaves.fixed = leaves.scope = scope
            leaves.reason = reason
        for use in self.program.uses:
            leaves = self.classes[self.find(use.tensor.leaf)]
            if use.same is not None:
                source, target = self.find(use.tensor.leaf), self.find(use.same)
                if source != target:
                    weight = self.copy_cost(use)
                    leaves.targets.append((target, weight))
                    self.classes[target].sources.append((source, weight))
            elif use.exact is not None:
                leaves.demands.setdefault(use.exact)
                leaves.uses.append(use)
            elif self.program.opaque:  # otherwise it accepts every scope of the program
                leaves.uses.append(use)

    def copy_cost(self, use: ScopedUse) -> float:
        """Return the cost of a copy for a use."""
        runs = frequency(use.region) * use.function.frequency
        # Between two plans that move the same bytes, the one with fewer copies is better.
        return size_of(use) * runs + 1

    def weigh(self, leaves: _Class) -> None:
        """Compute the costs of copies for the uses of a class; equal uses share a copy."""
        leaves.weighed = True
        for use in leaves.uses:
            weight, key = self.copy_cost(use), cast(tuple[object, ...], (id(use),))
            if self.solution.written(use):
                weight *= 1 if use.fresh else 2
            else:
                version = self.solution.effects.version(use)
                if version >= 0:
                    key = (id(use.function), use.tensor.root.key, use.exact, version)
            if use.exact is not None:
                most = leaves.exact.get(key, ("", 0.0))[1]
                leaves.exact[key] = (use.exact, max(most, weight))
            else:
                most = leaves.unconstrained.get(key, (True, 0.0))[1]
                leaves.unconstrained[key] = (self.solution.flexible(use), max(most, weight))

    def spread_demands(self) -> None:
        """Give every undecided class the scope that its neighbours want."""
        ready: deque[int] = deque()
        for index, leaves in self.classes.items():
            if leaves.fixed is None and leaves.demands:
                demands = list(leaves.demands)
                leaves.scope = demands[0] if len(demands) == 1 else self.cheapest(leaves, demands)
            if leaves.scope != PLAIN:
                ready.append(index)
        while ready:
            leaves = self.classes[ready.popleft()]
            neighbours = [index for index, _ in leaves.sources]
            if not self.registry.scopes[leaves.scope]:
                neighbours += [index for index, _ in leaves.targets]
            for index in neighbours:
                if self.classes[index].scope == PLAIN:
                    self.classes[index].scope = leaves.scope
                    ready.append(index)

    def improve_choices(self) -> None:
        """Give classes that need copies the cheapest scope, until no choice changes."""
        for _ in range(_ROUNDS):
            changed = False
            for leaves in self.classes.values():
                if leaves.fixed is not None or not (
                    leaves.demands or leaves.sources or leaves.targets
                ):
                    continue
                options = set(leaves.demands)
                options.update(self.classes[index].scope for index, _ in leaves.sources)
                options.update(self.classes[index].scope for index, _ in leaves.targets)
                options.discard(leaves.scope)
                if options and self.cost(leaves, leaves.scope):
                    best = self.cheapest(leaves, [leaves.scope, *sorted(options)])
                    changed |= best != leaves.scope
                    leaves.scope = best
            if not changed:
                return

    def cheapest(self, leaves: _Class, options: list[str]) -> str:
        """Return the scope in which a class needs the cheapest copies."""
        return min(options, key=lambda scope: self.cost(leaves, scope))

    def cost(self, leaves: _Class, scope: str) -> float:
        """Return the cost of the copies that a class needs in a scope."""
        if not leaves.weighed:
            self.weigh(leaves)
        transparent = self.registry.scopes[scope or GLOBAL]
        cost = sum(weight for wanted, weight in leaves.exact.values() if wanted != scope)
        if not transparent:
            cost += sum(
                weight for flexible, weight in leaves.unconstrained.values() if not flexible
            )
        for index, weight in leaves.targets:
            if not accepts(self.registry, self.classes[index].scope, scope):
                cost += weight
        for index, weight in leaves.sources:
            if not accepts(self.registry, scope, self.classes[index].scope):
                cost += weight
        return cost


def _find(parents: list[int], leaf: int) -> int:
    while parents[leaf] != leaf:
        parents[leaf] = parents[parents[leaf]]
        leaf = parents[leaf]
    return leaf


def _unite(parents: list[int], first: int, second: int) -> None:
    first, second = _find(parents, first), _find(parents, second)
    parents[max(first, second)] = min(first, second)
