# SPDX-License-Identifier: Apache-2.0
"""How many bytes a copy moves, and how often functions run."""

from __future__ import annotations

from typing import Any

from tvm import relax, tirx

from tvm_ipc.transform.scopes.facts import FunctionFacts, ScopedUse, ScopeFacts, frequency

#: What a symbolic size without a bound is taken to be, to compare costs.
_TYPICAL = 64

#: How often a recursive function is taken to call itself.
_RECURSION = 8.0

#: Frequencies above it compare as equal; a chain of calls could otherwise exceed every number.
_MOST = 1e12


def size_of(use: ScopedUse) -> float:
    """Return an estimate of the bytes of a used tensor."""
    return estimate(use.tensor.root.ty, use.function.bounds)


def estimate(ty: Any, bounds: dict[str, int]) -> float:
    """Return an estimate of the bytes of a tensor of a type."""
    if not isinstance(ty, relax.TensorType) or ty.dtype is None:
        return float(_TYPICAL**2)
    size = float(ty.dtype.dtype.itemsize)
    if ty.shape is None or not isinstance(ty.shape, relax.ShapeExpr):
        return size * float(_TYPICAL ** max(int(ty.ndim), 1))
    for extent in ty.shape.values:
        if isinstance(extent, tirx.IntImm):
            size *= int(extent.value)
        elif isinstance(extent, tirx.Var):
            size *= bounds.get(str(extent.name), _TYPICAL)
        else:
            size *= _TYPICAL
    return size


def describe(ty: Any) -> str:
    """Return the bytes of a tensor of a type as text, symbolic where they must be."""
    if not isinstance(ty, relax.TensorType) or ty.dtype is None or ty.shape is None:
        return "an unknown number of bytes"
    if not isinstance(ty.shape, relax.ShapeExpr):
        return "an unknown number of bytes"
    size, symbols = int(ty.dtype.dtype.itemsize), []
    for extent in ty.shape.values:
        if isinstance(extent, tirx.IntImm):
            size *= int(extent.value)
        else:
            symbols.append(str(extent) if isinstance(extent, tirx.Var) else f"({extent})")
    return " * ".join([*symbols, str(size)]) + " bytes"


def find_frequencies(program: ScopeFacts) -> None:
    """Set how often each function runs, where each one that is called from outside runs once."""
    facts_of = {id(facts.value): facts for facts in program.functions}
    order = _callers_first(program.functions, facts_of)
    places = {id(facts): place for place, facts in enumerate(order)}
    for facts in program.functions:
        facts.frequency = 1.0 if facts.value.escapes else 0.0
    recursive = set()
    for facts in order:
        if id(facts) in recursive:
            facts.frequency = min(facts.frequency * _RECURSION, _MOST)
        for record in facts.calls:
            callee = facts_of[id(record.callee)]
            if places[id(callee)] > places[id(facts)]:
                more = facts.frequency * frequency(record.step.region)
                callee.frequency = min(callee.frequency + more, _MOST)
                if _calls_back(callee, facts_of, places):
                    recursive.add(id(callee))
            else:
                recursive.add(id(callee))
    for facts in order:
        facts.frequency = facts.frequency or 1.0


def _calls_back(
    facts: FunctionFacts, facts_of: dict[int, FunctionFacts], places: dict[int, int]
) -> bool:
    here = places[id(facts)]
    return any(places[id(facts_of[id(record.callee)])] <= here for record in facts.calls)


def _callers_first(
    entries: list[FunctionFacts], facts_of: dict[int, FunctionFacts]
) -> list[FunctionFacts]:
    """Return functions so that callers come before what they call, recursion aside."""
    done: list[FunctionFacts] = []
    seen: set[int] = set()
    for entry in entries:
        stack = [(entry, iter(entry.calls))]
        if id(entry) in seen:
            continue
        seen.add(id(entry))
        while stack:
            facts, calls = stack[-1]
            for record in calls:
                callee = facts_of[id(record.callee)]
                if id(callee) not in seen:
                    seen.add(id(callee))
                    stack.append((callee, iter(callee.calls)))
                    break
            else:
                done.append(facts)
                stack.pop()
    return done[::-1]
