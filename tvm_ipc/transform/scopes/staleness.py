# SPDX-License-Identifier: Apache-2.0
"""Whether a copy is still what it was copied from, and whether one may stand between two values."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from functools import cache
from typing import TypeAlias

from tvm import relax

from tvm_ipc.transform.byoc.extern import declared_writes
from tvm_ipc.transform.ir import roots
from tvm_ipc.transform.ir.aliases import ModuleFacts
from tvm_ipc.transform.ir.program import Region
from tvm_ipc.transform.ir.writes import Writes
from tvm_ipc.transform.scopes.demands import ScopeRegistry
from tvm_ipc.transform.scopes.facts import (
    FunctionFacts,
    RelaxCall,
    ScopedUse,
    ScopeFacts,
    TensorRoot,
)
from tvm_ipc.transform.scopes.primfunc import PrimFuncs

#: What a tensor may be; None where local functions have a hand in it.
_Memory: TypeAlias = "frozenset[roots.Root] | None"


class Staleness:
    """Writes of a program, also through calls of its Relax functions.

    Of what a local function does with memory nothing is known here: it may be written at any time.
    """

    def __init__(self, program: ScopeFacts, primfuncs: PrimFuncs, registry: ScopeRegistry) -> None:
        written = cache(registry.writes)

        def packed(callee: relax.ExternFunc, count: int) -> Collection[int] | None:
            known = written(str(callee.global_symbol), count)
            return declared_writes(callee) if known is None else known

        self._callers: dict[int, list[tuple[FunctionFacts, RelaxCall]]] = defaultdict(list)
        for facts in program.functions:
            for call in facts.calls:
                self._callers[id(call.callee)].append((facts, call))
        private = [
            facts.name
            for facts in program.functions
            if not facts.value.escapes
            and not any(caller.value.local for caller, _ in self._callers[id(facts.value)])
        ]
        self._writes = Writes(ModuleFacts(program.module), primfuncs.writes, packed, private)

    def version(self, function: FunctionFacts, root: TensorRoot, event: int) -> int:
        """Return a number that is the same where nothing was written in between; -1: never."""
        memory = self._memory(function, root)
        if memory is None:
            return -1
        written = self._writes.events(function.name, memory)
        return sum(bisect_left(events, event) for events in written)

    def may_cut(self, use: ScopedUse) -> bool:
        """Whether a copy may stand between a value and what it goes on as."""
        last = use.step is None and use.region.parent is None
        if use.moves or (last and not self._callers[id(use.function.value)]):
            return True
        memory = self._memory(use.function, use.tensor.root)
        if not last and self._written_since(use.function, use.region, memory, use.event):
            return False
        return self._may_return_copy(use.function, memory, set())

    def _written_since(
        self, function: FunctionFacts, region: Region, memory: _Memory, event: int
    ) -> bool:
        """Whether memory may be written at an event of a region or later."""
        if memory is None:
            return True
        written = self._writes.events(function.name, memory)
        while True:
            for events in written:
                if bisect_left(events, event) < bisect_right(events, region.end):
                    return True
            if region.parent is None:
                return False
            event, region = region.parent.index + 1, region.parent.region

    def _may_return_copy(self, function: FunctionFacts, memory: _Memory, seen: set[int]) -> bool:
        """Whether callers cannot tell what is returned from its copy."""
        callers = self._callers[id(function.value)]
        if not callers or id(function) in seen:
            return True
        seen.add(id(function))
        returned: list[tuple[tuple[int, ...], _Memory]] = [((), None)]
        if memory is not None:
            returned = list(_fields(self._writes.of(function.name).facts.result))
            count = Counter(one for _, field in returned for one in field or ())
            # Callers know it by another name too.
            if not any(one.foreign or count[one] > 1 for one in memory):
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

    def _memory(self, function: FunctionFacts, root: TensorRoot) -> _Memory:
        if function.value.local:
            return None
        if not isinstance(root.base, relax.Var):
            return frozenset()  # nothing writes a constant
        writes = self._writes.of(function.name)
        memory = writes.facts.roots(root.base, root.path)
        return memory if writes.captured.isdisjoint(memory) else None


def _fields(
    value: roots.Value, path: tuple[int, ...] = ()
) -> Iterator[tuple[tuple[int, ...], _Memory]]:
    """Yield what the tensors of a value may be, and where they are in it."""
    if isinstance(value, tuple):
        for index, part in enumerate(value):
            yield from _fields(part, (*path, index))
    else:
        yield path, frozenset(roots.leaves(value))
