# SPDX-License-Identifier: Apache-2.0
"""When memory may be written, by any of its names and by what a function calls.

    cls.f(p, x)          event 3: writes x, as the body of f says
    y = cls.g(x)         event 4: writes x if g, a Relax function, writes its parameter
    h = R.function(...)  whatever h captures may be written at any time

Nothing writes a constant. A parameter may be another one only if a caller passes a tensor for both;
where all callers are known, these say so.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import tvm
from tvm import relax, tirx

from tvm_ipc.transform.ir.aliases import ModuleFacts
from tvm_ipc.transform.ir.program import Step
from tvm_ipc.transform.ir.roots import Facts, Made, Parameter, Root

#: Whether a kernel, by its name, may write an argument.
Kernels: TypeAlias = Callable[[str, int], bool]
#: Which of so many arguments a packed function may write; None: all.
Packed: TypeAlias = "Callable[[relax.ExternFunc, int], Collection[int] | None]"


@dataclass(eq=False)
class FunctionWrites:
    """The writes of one function."""

    facts: Facts
    events: dict[Root, list[int]] = field(default_factory=dict)  #: in order, each once
    captured: set[Root] = field(default_factory=set)  #: by local functions
    callers: list[tuple[FunctionWrites, Step]] = field(default_factory=list)
    others: dict[Root | None, list[int]] = field(default_factory=dict)  #: see `Writes.events`

    def add(self, root: Root, event: int) -> bool:
        """Note a write; whether it was new."""
        events = self.events.setdefault(root, [])
        place = bisect_left(events, event)
        if events[place : place + 1] == [event]:
            return False
        events.insert(place, event)
        return True


class Writes:
    """The writes of a module; of its functions in `private` all callers are in the module."""

    def __init__(
        self, module: ModuleFacts, kernels: Kernels, packed: Packed, private: Collection[str] = ()
    ) -> None:
        self._module = module
        self._kernels = kernels
        self._packed = packed
        self._private = frozenset(private)
        self._known: dict[str, FunctionWrites] = {}

    def of(self, name: str) -> FunctionWrites:
        """Return the writes of a function. Those of all are found when one is asked for."""
        if not self._known:
            self._find()
        return self._known[name]

    def events(self, name: str, memory: Iterable[Root]) -> list[list[int]]:
        """Return the events of a function at which memory is written, by any name."""
        writes = self.of(name)
        found: dict[int, list[int]] = {}
        for root in memory:
            events = writes.events.get(root, [])
            if root.foreign:
                events = self._by_any_name(name, writes, root)
            found[id(events)] = events
        return list(found.values())

    def _by_any_name(self, name: str, writes: FunctionWrites, root: Root) -> list[int]:
        """Return when memory is written that others may hold."""
        same_for_all = isinstance(root, Parameter) and name not in self._private
        key = None if same_for_all else root
        if key not in writes.others:
            writes.others[key] = sorted(
                event
                for other, events in writes.events.items()
                if self._may_be_one(name, root, other, set())
                for event in events
            )
        return writes.others[key]

    def _may_be_one(self, name: str, one: Root, other: Root, seen: set[object]) -> bool:
        """Whether two roots of a function may be one tensor."""
        if one is other:
            return True
        if not (one.foreign and other.foreign):
            return False
        if isinstance(one, Made | Parameter) and isinstance(other, Made | Parameter):
            if isinstance(one, Made) or isinstance(other, Made):
                return False  # what is made now is nothing else that is known
            return name not in self._private or self._may_pass_one(name, one, other, seen)
        return True

    def _may_pass_one(self, name: str, one: Parameter, other: Parameter, seen: set[object]) -> bool:
        """Whether some caller may pass one tensor for two parameters."""
        if (name, one, other) in seen:
            return False
        seen.add((name, one, other))
        writes = self.of(name)
        places = [writes.facts.parameters.index(parameter) for parameter in (one, other)]
        for caller, step in writes.callers:
            left, right = (caller.facts.roots(step.value.args[place]) for place in places)
            here = caller.facts.program.name
            if any(self._may_be_one(here, a, b, seen) for a in left for b in right):
                return True
        return False

    # How they are found.

    def _find(self) -> None:
        for name, function in self._module.functions.items():
            if isinstance(function, relax.Function):
                facts = self._module.of(name)
                assert facts is not None, "no function is being looked at"
                self._known[name] = FunctionWrites(facts)
        for writes in self._known.values():
            self._find_own(writes)
        ready = list(self._known.values())
        while ready:  # what a function writes, its callers write
            callee = ready.pop()
            written = [
                place
                for place, parameter in enumerate(callee.facts.parameters)
                if parameter in callee.events or parameter in callee.captured
            ]
            for caller, step in callee.callers:
                arguments = step.value.args
                roots = [root for k in written for root in caller.facts.roots(arguments[k])]
                if sum(caller.add(root, step.entry) for root in roots):
                    ready.append(caller)

    def _find_own(self, writes: FunctionWrites) -> None:
        """Note what a function writes itself, and where it calls others."""
        for step in writes.facts.program.events:
            if type(step.value) is relax.Function:
                for var in relax.analysis.free_vars(step.value):
                    writes.captured |= writes.facts.roots(var)
            elif type(step.value) is relax.Call:
                callee = self._module.function(step.value.op)
                if isinstance(callee, relax.Function):
                    self._known[str(step.value.op.name_hint)].callers.append((writes, step))
                    continue
                for operand in self._written(step):
                    if type(operand) is not tvm.ir.GenericConst:
                        for root in writes.facts.roots(operand):
                            writes.add(root, step.entry)

    def _written(self, step: Step) -> Iterator[relax.Expr]:
        """Yield what a step may write that calls no Relax function of the module."""
        op, args = step.value.op, step.value.args[:]
        if type(op) is tvm.ir.GlobalVar:
            yield from self._by_kernel(op, args)
        elif type(op) is relax.ExternFunc:
            yield from self._by_packed(op, args)
        elif type(op) is not tvm.ir.Op:
            yield from args  # of a closure
        elif op.name in ("relax.call_tir", "relax.call_tir_inplace"):
            yield step.var
            yield from self._by_kernel(args[0], _fields(args[1]))
        elif op.name == "relax.call_dps_packed":
            yield step.var
        elif op.name in ("relax.call_pure_packed", "relax.call_inplace_packed"):
            yield from self._by_packed(args[0], args[1:])
        elif op.name.startswith(("relax.call_builtin_with_ctx", "relax.invoke")):
            yield from args

    def _by_kernel(self, callee: relax.Expr, args: list[relax.Expr]) -> Iterator[relax.Expr]:
        function = self._module.function(callee)
        if not isinstance(function, tirx.PrimFunc):
            yield from args
            return
        for k, argument in enumerate(args[: len(function.params)]):
            if self._kernels(str(callee.name_hint), k):
                yield argument

    def _by_packed(self, callee: relax.Expr, args: list[relax.Expr]) -> list[relax.Expr]:
        known = self._packed(callee, len(args)) if isinstance(callee, relax.ExternFunc) else None
        return args if known is None else [args[k] for k in known]


def _fields(packed: relax.Expr) -> list[relax.Expr]:
    """Return the arguments in a tuple."""
    if isinstance(packed, relax.Tuple) or not isinstance(packed.ty, relax.TupleType):
        return list(packed.fields) if isinstance(packed, relax.Tuple) else [packed]
    return [relax.TupleGetItem(packed, k) for k in range(len(packed.ty.fields))]
