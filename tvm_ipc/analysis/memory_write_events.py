# SPDX-License-Identifier: Apache-2.0
"""Find the events at which memory may be written, through any alias and in called functions.

    cls.f(p, x)          event 3: writes x if the body of the PrimFunc f does
    y = cls.g(x)         event 4: writes x if the Relax function g writes its parameter
    h = R.function(...)  the memory that h captures may be written at any time

Constants are never written. Two parameters alias only if a caller passes one tensor for both. For
private functions, all callers are known and examined.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from tvm import relax

from tvm_ipc.analysis.alias_facts import (
    AliasFacts,
    FreshObject,
    MemoryObject,
    Parameter,
)
from tvm_ipc.analysis.find_aliases import ModuleAliasFacts
from tvm_ipc.analysis.program_order import Step
from tvm_ipc.analysis.views_and_writes_of_calls import (
    ALLOCATING,
    PackedWrites,
    operator_of,
    registered_writes,
    written_arguments,
)
from tvm_ipc.tvm_moved_names import GenericConst


@dataclass(eq=False)
class FunctionModRef:
    """The writes of one function, by memory object."""

    facts: AliasFacts
    points: dict[MemoryObject, list[int]] = field(default_factory=dict)  #: in order, each once
    captured: set[MemoryObject] = field(default_factory=set)  #: by local functions
    callers: list[tuple[FunctionModRef, Step]] = field(default_factory=list)
    #: The events that write an object under any alias; None: any parameter of a public function.
    aliased: dict[MemoryObject | None, list[int]] = field(default_factory=dict)

    def add(self, memory: MemoryObject, event: int) -> bool:
        """Record a write; return whether it is new."""
        events = self.points.setdefault(memory, [])
        index = bisect_left(events, event)
        if events[index : index + 1] == [event]:
            return False
        events.insert(index, event)
        return True


class ModRef:
    """The writes of all functions of a module; those in `private` have no callers outside of it."""

    def __init__(
        self,
        module: ModuleAliasFacts,
        packed: PackedWrites = registered_writes,
        private: Collection[str] = (),
    ) -> None:
        self._module = module
        self._packed = packed
        self._private = frozenset(private)
        self._functions: dict[str, FunctionModRef] = {}

    def of(self, name: str) -> FunctionModRef:
        """Return the writes of a function; the first call computes those of all functions."""
        if not self._functions:
            self._compute()
        return self._functions[name]

    def points(self, name: str, memory: Iterable[MemoryObject]) -> list[list[int]]:
        """Return the events of a function at which memory is written, under any alias."""
        writes = self.of(name)
        points: dict[int, list[int]] = {}
        for item in memory:
            events = writes.points.get(item, [])
            if item.foreign:
                events = self._aliased_points(name, writes, item)
            points[id(events)] = events
        return list(points.values())

    def _aliased_points(self, name: str, writes: FunctionModRef, item: MemoryObject) -> list[int]:
        """Return the events that write a memory object under any alias."""
        same_for_all = isinstance(item, Parameter) and name not in self._private
        key = None if same_for_all else item
        if key not in writes.aliased:
            writes.aliased[key] = sorted(
                event
                for written, events in writes.points.items()
                if self._may_alias(name, item, written, set())
                for event in events
            )
        return writes.aliased[key]

    def _may_alias(self, name: str, a: MemoryObject, b: MemoryObject, seen: set[object]) -> bool:
        """Return whether two memory objects of a function may be one tensor."""
        if a is b:
            return True
        if not (a.foreign and b.foreign):
            return False
        if isinstance(a, FreshObject | Parameter) and isinstance(b, FreshObject | Parameter):
            if isinstance(a, FreshObject) or isinstance(b, FreshObject):
                return False  # a new tensor is no other known object
            return name not in self._private or self._may_pass_twice(name, a, b, seen)
        return True

    def _may_pass_twice(self, name: str, a: Parameter, b: Parameter, seen: set[object]) -> bool:
        """Return whether some caller may pass one tensor for two parameters."""
        if (name, a, b) in seen:
            return False
        seen.add((name, a, b))
        writes = self.of(name)
        positions = [writes.facts.parameters.index(parameter) for parameter in (a, b)]
        for caller, step in writes.callers:
            for_a, for_b = (caller.facts.objects(step.value.args[k]) for k in positions)
            caller_name = caller.facts.program.name
            if any(self._may_alias(caller_name, x, y, seen) for x in for_a for y in for_b):
                return True
        return False

    # ---- analysis ---------------------------------------------------------------------------

    def _compute(self) -> None:
        """Compute the writes of all functions."""
        for name, function in self._module.functions.items():
            if isinstance(function, relax.Function):
                facts = self._module.of(name)
                assert facts is not None, "the facts of no function are being computed"
                self._functions[name] = FunctionModRef(facts)
        for writes in self._functions.values():
            self._add_own_writes(writes)
        ready = list(self._functions.values())
        while ready:  # propagate the writes of a function to its callers
            callee = ready.pop()
            written = [
                position
                for position, parameter in enumerate(callee.facts.parameters)
                if parameter in callee.points or parameter in callee.captured
            ]
            for caller, step in callee.callers:
                arguments = step.value.args
                objects = [m for k in written for m in caller.facts.objects(arguments[k])]
                if sum(caller.add(memory, step.entry) for memory in objects):
                    ready.append(caller)

    def _add_own_writes(self, writes: FunctionModRef) -> None:
        """Record the writes of a function itself, and its calls of other functions."""
        for step in writes.facts.program.points:
            if type(step.value) is relax.Function:
                for var in relax.analysis.free_vars(step.value):
                    writes.captured |= writes.facts.objects(var)
            elif type(step.value) is relax.Call:
                callee = self._module.function(step.value.op)
                if type(callee) is relax.Function:
                    self._functions[str(step.value.op.name_hint)].callers.append((writes, step))
                    continue
                written = written_arguments(step.value, self._module.primfuncs, self._packed)
                if operator_of(step.value) in ALLOCATING:
                    written.append(step.var)
                for operand in written:
                    if type(operand) is not GenericConst:
                        for memory in writes.facts.objects(operand):
                            writes.add(memory, step.entry)
