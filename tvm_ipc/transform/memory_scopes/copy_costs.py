# SPDX-License-Identifier: Apache-2.0
"""Estimates the bytes that a copy moves and how often each function runs."""

from __future__ import annotations

from typing import Any

from tvm import relax, tirx

from tvm_ipc.analysis.shape_algebra import extents_of
from tvm_ipc.transform.memory_scopes.constraint_types import (
    ScopedFunction,
    ScopedUse,
    ScopeFacts,
    frequency,
)

#: The assumed value of a symbolic extent without a bound.
_TYPICAL = 64

#: The assumed number of times that a recursive function calls itself.
_RECURSION = 8.0

#: The upper bound of frequencies, so that a long chain of calls does not overflow.
_MAX_FREQUENCY = 1e12


def size_of(use: ScopedUse) -> float:
    """Return an estimate of the bytes of a used tensor."""
    return estimate(use.tensor.root.ty, use.function.bounds)


def estimate(ty: Any, bounds: dict[str, int]) -> float:
    """Return an estimate of the bytes of a tensor of a type."""
    if not isinstance(ty, relax.TensorType) or ty.dtype is None:
        return float(_TYPICAL**2)
    size, extents = float(ty.dtype.dtype.itemsize), extents_of(ty)
    if extents is None:
        return size * float(_TYPICAL ** max(int(ty.ndim), 1))
    for extent in extents:
        if isinstance(extent, tirx.IntImm):
            size *= int(extent.value)
        elif isinstance(extent, tirx.Var):
            size *= bounds.get(str(extent.name), _TYPICAL)
        else:
            size *= _TYPICAL
    return size


def describe(ty: Any) -> str:
    """Return the bytes of a tensor of a type as text, with symbolic extents by name."""
    extents = extents_of(ty) if isinstance(ty, relax.TensorType) else None
    if extents is None or ty.dtype is None:
        return "an unknown number of bytes"
    size, symbols = int(ty.dtype.dtype.itemsize), []
    for extent in extents:
        if isinstance(extent, tirx.IntImm):
            size *= int(extent.value)
        else:
            symbols.append(str(extent) if isinstance(extent, tirx.Var) else f"({extent})")
    return " * ".join([*symbols, str(size)]) + " bytes"


def find_frequencies(program: ScopeFacts) -> None:
    """Set how often each function runs if each function with unknown callers runs once."""
    facts_of = {id(facts.value): facts for facts in program.functions}
    order = _callers_first(program.functions, facts_of)
    positions = {id(facts): position for position, facts in enumerate(order)}
    for facts in program.functions:
        facts.frequency = 1.0 if facts.value.escapes else 0.0
    recursive = set()
    for facts in order:
        if id(facts) in recursive:
            facts.frequency = min(facts.frequency * _RECURSION, _MAX_FREQUENCY)
        for record in facts.calls:
            callee = facts_of[id(record.callee)]
            if positions[id(callee)] > positions[id(facts)]:
                more = facts.frequency * frequency(record.step.region)
                callee.frequency = min(callee.frequency + more, _MAX_FREQUENCY)
                if _calls_back(callee, facts_of, positions):
                    recursive.add(id(callee))
            else:
                recursive.add(id(callee))
    for facts in order:
        facts.frequency = facts.frequency or 1.0


def _calls_back(
    facts: ScopedFunction, facts_of: dict[int, ScopedFunction], positions: dict[int, int]
) -> bool:
    """Return whether a function calls itself or a function that comes before it."""
    here = positions[id(facts)]
    return any(positions[id(facts_of[id(record.callee)])] <= here for record in facts.calls)


def _callers_first(
    entries: list[ScopedFunction], facts_of: dict[int, ScopedFunction]
) -> list[ScopedFunction]:
    """Return the functions with callers before their callees, except in recursion."""
    done: list[ScopedFunction] = []
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
