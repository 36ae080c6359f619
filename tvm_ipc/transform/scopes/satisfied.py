# SPDX-License-Identifier: Apache-2.0
"""Whether a module meets every demand as it is, so that nothing is to be planned."""

from __future__ import annotations

from tvm_ipc.transform.scopes.demands import GLOBAL, ScopeRegistry
from tvm_ipc.transform.scopes.facts import ScopedUse, ScopeFacts


def is_satisfied(
    program: ScopeFacts, registry: ScopeRegistry, specialise_transparent: bool
) -> bool:
    """Whether every use of a tensor finds it in a scope that it takes, without any change."""
    if program.hints or program.misplaced:
        return False
    found: list[set[str]] = [set() for _ in program.types]
    for leaf in program.allocs:
        found[leaf].add(GLOBAL)
    for leaf, (scope, _) in program.fixed.items():
        found[leaf] = {scope}
    targets: dict[int, list[int]] = {}
    for use in program.uses:
        if use.same is not None and use.same not in program.fixed:
            targets.setdefault(use.tensor.leaf, []).append(use.same)
    ready = [leaf for leaf, scopes in enumerate(found) if scopes]
    while ready:
        leaf = ready.pop()
        for target in targets.get(leaf, ()):
            if not found[leaf] <= found[target]:
                found[target] |= found[leaf]
                ready.append(target)
    return all(
        _takes(program, registry, use, found[use.tensor.leaf], specialise_transparent)
        for use in program.uses
    )


def _takes(
    program: ScopeFacts, registry: ScopeRegistry, use: ScopedUse, scopes: set[str], specialise: bool
) -> bool:
    if use.exact is not None:
        return scopes <= {use.exact}
    if use.same is not None:
        return use.same not in program.fixed or scopes <= {program.fixed[use.same][0]}
    if use.param is not None and specialise:
        return scopes <= {GLOBAL}
    return all(registry.scopes[scope] for scope in scopes)
