# SPDX-License-Identifier: Apache-2.0
"""When memory may be written: whether a copy is still what it was copied from."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

import tvm
from tvm import relax, tirx

from tvm_ipc.transform.byoc.extern import declared_writes
from tvm_ipc.transform.ir.aliases import ModuleFacts
from tvm_ipc.transform.ir.program import Region, Step
from tvm_ipc.transform.ir.roots import Made, Parameter, Value, leaves
from tvm_ipc.transform.ir.roots import Root as Memory
from tvm_ipc.transform.ir.writes import FunctionWrites, find_writes
from tvm_ipc.transform.scopes.demands import ScopeRegistry
from tvm_ipc.transform.scopes.facts import FunctionFacts, Program, RelaxCall, Root, Use
from tvm_ipc.transform.scopes.lower_calls import ALLOCATING
from tvm_ipc.transform.scopes.primfunc import PrimFuncs


class Effects:
    """Writes of a program, also through calls of its Relax functions.

    Of what a local function does with memory nothing is known here: it may be written at any time.
    """

    def __init__(self, program: Program, primfuncs: PrimFuncs, registry: ScopeRegistry) -> None:
        self._primfuncs = primfuncs
        self._registry = registry
        self._facts = ModuleFacts(program.module)
        self._writes: dict[str, FunctionWrites] = {}
        self._callers: dict[int, list[tuple[FunctionFacts, RelaxCall]]] = defaultdict(list)
        for facts in program.functions:
            for call in facts.calls:
                self._callers[id(call.callee)].append((facts, call))
        self._foreign: dict[tuple[str, Memory | None], list[int]] = {}

    def version(self, function: FunctionFacts, root: Root, event: int) -> int:
        """Return a number that is the same where nothing was written in between; -1: never."""
        memory = self._memory(function, root)
        if memory is None:
            return -1
        return sum(bisect_left(events, event) for events in self._events(function, memory))

    def may_cut(self, use: Use) -> bool:
        """Whether a copy may stand between a value and what it goes on as."""
        if use.moves:
            return True
        memory = self._memory(use.function, use.tensor.root)
        end = use.step is None
        if not end or use.region.parent is not None:
            low = use.event + 1 if end else use.event
            if self._written_from(use.function, use.region, memory, low):
                return False
        return self._may_return_copy(use.function, memory, set())

    def _written_from(
        self, function: FunctionFacts, region: Region, memory: frozenset[Memory] | None, low: int
    ) -> bool:
        """Whether memory may be written at an event of a region or later."""
        if memory is None:
            return True
        written = list(self._events(function, memory))
        while True:
            for events in written:
                if bisect_left(events, low) < bisect_right(events, region.end):
                    return True
            if region.parent is None:
                return False
            low, region = region.parent.index + 1, region.parent.region

    def _may_return_copy(
        self, function: FunctionFacts, memory: frozenset[Memory] | None, seen: set[int]
    ) -> bool:
        """Whether callers cannot tell what is returned from its copy."""
        callers = self._callers[id(function.value)]
        if not callers or id(function) in seen:
            return True
        seen.add(id(function))
        facts = None if function.value.local else self._of(function).facts
        fields: list[tuple[tuple[int, ...], frozenset[Memory]]] = []
        if facts is not None and memory is not None:
            fields = list(_fields(facts.result))
            count = Counter(one for _, field in fields for one in field)
            # Callers know it by another name too.
            if not any(one.foreign or count[one] > 1 for one in memory):
                return True
        for caller, call in callers:
            for path, field in fields or _fields(frozenset()):
                if memory is not None and memory.isdisjoint(field):
                    continue
                result = self._memory(caller, Root(call.step.var, path))
                region, low = call.step.region, call.step.index + 1
                if self._written_from(caller, region, result, low):
                    return False
                if not self._may_return_copy(caller, result, seen):
                    return False
        return True

    # Who writes what.

    def _memory(self, function: FunctionFacts, root: Root) -> frozenset[Memory] | None:
        """Return what a tensor may be; None where local functions have a hand in it."""
        if function.value.local:
            return None
        if not isinstance(root.base, relax.Var):
            return frozenset()  # nothing writes a constant
        writes = self._of(function)
        memory = writes.facts.roots(root.base, root.path)
        return memory if writes.captured.isdisjoint(memory) else None

    def _of(self, function: FunctionFacts) -> FunctionWrites:
        if not self._writes:  # most modules never ask
            self._writes = find_writes(self._facts, self._operands)
        return self._writes[function.name]

    def _events(self, function: FunctionFacts, memory: frozenset[Memory]) -> Iterator[list[int]]:
        """Yield when memory is written, by any name."""
        writes = self._of(function).events
        foreign: dict[int, list[int]] = {}
        for one in memory:
            if one.foreign:
                events = self._foreign_events(function, one)
                foreign[id(events)] = events
            elif one in writes:
                yield writes[one]
        yield from foreign.values()

    def _foreign_events(self, function: FunctionFacts, memory: Memory) -> list[int]:
        """Return when memory is written that others may hold, by their names too."""
        one_for_all = function.value.escapes and isinstance(memory, Parameter)
        key = (function.name, None if one_for_all else memory)
        known = self._foreign.get(key)
        if known is None:
            writes = self._of(function).events
            known = self._foreign[key] = sorted(
                event
                for other, events in writes.items()
                if other.foreign and self._may_be_same(function, memory, other, set())
                for event in events
            )
        return known

    def _may_be_same(
        self, function: FunctionFacts, one: Memory, other: Memory, seen: set[object]
    ) -> bool:
        """Whether two roots may be one tensor: a caller may pass it twice."""
        if one is other:
            return True
        if isinstance(one, Made) and isinstance(other, Made | Parameter):
            return False  # what was there before is not what is made now
        if isinstance(other, Made) and isinstance(one, Parameter):
            return False
        passed = isinstance(one, Parameter) and isinstance(other, Parameter)
        if function.value.escapes or not passed:
            return one.foreign and other.foreign
        if (function.name, one, other) in seen:
            return False
        seen.add((function.name, one, other))
        parameters = self._of(function).facts.parameters
        places: dict[Memory, int] = {param: k for k, param in enumerate(parameters)}
        for caller, call in self._callers[id(function.value)]:
            left = self._memory(caller, Root(call.step.value.args[places[one]]))
            right = self._memory(caller, Root(call.step.value.args[places[other]]))
            if left is None or right is None:
                return True
            if any(self._may_be_same(caller, a, b, seen) for a in left for b in right):
                return True
        return False

    def _operands(self, step: Step) -> Iterable[relax.Expr]:
        """Yield what a step may write that calls no Relax function of the module."""
        call = step.value
        op, args = call.op, call.args[:]
        if type(op) is tvm.ir.GlobalVar:
            yield from self._of_primfunc(op, args)
        elif type(op) is relax.ExternFunc:
            yield from self._of_packed(op, args)
        elif type(op) is not tvm.ir.Op:
            yield from args  # of a closure
        elif op.name in ALLOCATING:
            yield step.var
            yield from self._of_primfunc(args[0], _parts(args[1]))
        elif op.name in ("relax.call_pure_packed", "relax.call_inplace_packed"):
            yield from self._of_packed(args[0], args[1:])
        elif op.name.startswith(("relax.call_builtin_with_ctx", "relax.invoke")):
            yield from args

    def _of_primfunc(self, callee: relax.Expr, args: list[relax.Expr]) -> Iterator[relax.Expr]:
        function = self._facts.function(callee)
        for k, argument in enumerate(args):
            if not isinstance(function, tirx.PrimFunc) or (
                k < len(function.params) and self._primfuncs.writes(str(callee.name_hint), k)
            ):
                yield argument

    def _of_packed(self, callee: relax.Expr, args: list[relax.Expr]) -> list[relax.Expr]:
        if not isinstance(callee, relax.ExternFunc):
            return args
        known = self._registry.writes(str(callee.global_symbol), len(args))
        written = declared_writes(callee) if known is None else known
        return args if written is None else [args[k] for k in written]


def _parts(packed: relax.Expr) -> list[relax.Expr]:
    """Return the fields of a tuple of arguments."""
    if isinstance(packed, relax.Tuple):
        return list(packed.fields)
    if isinstance(packed.ty, relax.TupleType):
        return [relax.TupleGetItem(packed, k) for k in range(len(packed.ty.fields))]
    return [packed]


def _fields(
    value: Value, path: tuple[int, ...] = ()
) -> Iterator[tuple[tuple[int, ...], frozenset[Memory]]]:
    """Yield what the tensors of a value may be, and where they are in it."""
    if isinstance(value, tuple):
        for index, part in enumerate(value):
            yield from _fields(part, (*path, index))
    else:
        yield path, frozenset(leaves(value))
