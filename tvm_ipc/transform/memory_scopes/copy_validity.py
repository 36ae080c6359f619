# SPDX-License-Identifier: Apache-2.0
"""Answers whether a copy still equals its source, and whether a copy may separate two values."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from functools import cache
from typing import TypeAlias

from tvm import relax

from tvm_ipc.analysis import alias_facts
from tvm_ipc.analysis.find_aliases import ModuleAliasFacts
from tvm_ipc.analysis.memory_write_events import ModRef
from tvm_ipc.analysis.program_order import Region
from tvm_ipc.transform.byoc.extern_declaration import declared_writes
from tvm_ipc.transform.memory_scopes.constraint_types import (
    RelaxCall,
    ScopedFunction,
    ScopedUse,
    ScopeFacts,
    TensorRoot,
)
from tvm_ipc.transform.memory_scopes.operator_scope_demands import ScopeRegistry
from tvm_ipc.transform.memory_scopes.scopes_of_prim_func_params import PrimFuncParams

#: The memory objects that a tensor may be; None if a local function may access it.
_Memory: TypeAlias = "frozenset[alias_facts.MemoryObject] | None"


class CopyValidity:
    """The writes of a program, also through calls of its Relax functions.

    Local functions are not analysed: memory that they can access may be written at any time.
    """

    def __init__(
        self, program: ScopeFacts, primfuncs: PrimFuncParams, registry: ScopeRegistry
    ) -> None:
        registered_writes = cache(registry.writes)

        def packed_writes(callee: relax.ExternFunc, count: int) -> Collection[int] | None:
            writes = registered_writes(str(callee.global_symbol), count)
            return declared_writes(callee) if writes is None else writes

        self._callers: dict[int, list[tuple[ScopedFunction, RelaxCall]]] = defaultdict(list)
        for facts in program.functions:
            for call in facts.calls:
                self._callers[id(call.callee)].append((facts, call))
        private = [
            facts.name
            for facts in program.functions
            if not facts.value.escapes
            and not any(caller.value.local for caller, _ in self._callers[id(facts.value)])
        ]
        programs = {
            facts.name: facts.program for facts in program.functions if not facts.value.local
        }
        module = ModuleAliasFacts(program.module, programs=programs, primfuncs=primfuncs)
        self._writes = ModRef(module, packed_writes, private)

    def version(self, use: ScopedUse, point: int | None = None) -> int:
        """Return the version of a used tensor, by default at the use: the number of writes before.

        A tensor has the same contents at two events with the same version. The version is -1 if the
        writes are unknown, so that no two events may be compared.
        """
        memory = self._memory(use.function, use.tensor.root)
        if memory is None:
            return -1
        point = use.point if point is None else point
        written = self._writes.points(use.function.name, memory)
        return sum(bisect_left(events, point) for events in written)

    def may_copy(self, use: ScopedUse) -> bool:
        """Return whether a copy may separate the tensor of a use from the leaf it flows into."""
        last = use.step is None and use.region.parent is None
        if use.moves or (last and not self._callers[id(use.function.value)]):
            return True
        memory = self._memory(use.function, use.tensor.root)
        if not last and self._written_since(use.function, use.region, memory, use.point):
            return False
        return self._may_return_copy(use.function, memory, set())

    def _written_since(
        self, function: ScopedFunction, region: Region, memory: _Memory, point: int
    ) -> bool:
        """Return whether memory may be written at an event of a region or later."""
        if memory is None:
            return True
        written = self._writes.points(function.name, memory)
        while True:
            for events in written:
                if bisect_left(events, point) < bisect_right(events, region.end):
                    return True
            if region.parent is None:
                return False
            point, region = region.parent.index + 1, region.parent.region

    def _may_return_copy(self, function: ScopedFunction, memory: _Memory, seen: set[int]) -> bool:
        """Return whether a function may return a copy of memory without callers noticing."""
        callers = self._callers[id(function.value)]
        if not callers or id(function) in seen:
            return True
        seen.add(id(function))
        returned: list[tuple[tuple[int, ...], _Memory]] = [((), None)]
        if memory is not None:
            returned = list(_fields(self._writes.of(function.name).facts.result))
            count = Counter(memory_object for _, field in returned for memory_object in field or ())
            # Callers have no other name for memory that is not foreign and is returned once.
            if not any(candidate.foreign or count[candidate] > 1 for candidate in memory):
                return True
        for caller, call in callers:
            for path, field in returned:
                if memory is not None and field is not None and memory.isdisjoint(field):
                    continue
                result = self._memory(caller, TensorRoot(call.step.var, path))
                after = call.step.index + 1
                if self._written_since(caller, call.step.region, result, after):
                    return False
                if not self._may_return_copy(caller, result, seen):
                    return False
        return True

    def _memory(self, function: ScopedFunction, root: TensorRoot) -> _Memory:
        """Return the memory objects that a tensor may be, None if they are unknown."""
        if function.value.local:
            return None
        if not isinstance(root.base, relax.Var):
            return frozenset()  # nothing writes a constant
        writes = self._writes.of(function.name)
        memory = writes.facts.objects(root.base, root.path)
        return memory if writes.captured.isdisjoint(memory) else None


def _fields(
    value: alias_facts.Value, path: tuple[int, ...] = ()
) -> Iterator[tuple[tuple[int, ...], _Memory]]:
    """Yield the path of each tensor of a value, and the memory objects that it may be."""
    if isinstance(value, tuple):
        for index, field in enumerate(value):
            yield from _fields(field, (*path, index))
    else:
        yield path, frozenset(alias_facts.leaves(value))
