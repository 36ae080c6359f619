# SPDX-License-Identifier: Apache-2.0
"""When the memory of each root may be written, also by what a function calls.

cls.f(p, x)          event 3: writes x, as the body of f says
y = cls.g(x)         event 4: writes x if g, a Relax function, writes its parameter
h = R.function(...)  whatever h captures may be written at any time
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

import tvm
from tvm import relax

from tvm_ipc.transform.ir.aliases import ModuleFacts
from tvm_ipc.transform.ir.program import Step
from tvm_ipc.transform.ir.roots import Facts, Root

#: The expressions whose memory a step may write, if it calls no Relax function of the module.
Operands: TypeAlias = Callable[[Step], Iterable[relax.Expr]]


@dataclass(eq=False)
class FunctionWrites:
    """The writes of one function."""

    facts: Facts
    events: dict[Root, list[int]] = field(default_factory=dict)  #: in order, each once
    captured: set[Root] = field(default_factory=set)  #: by local functions
    callers: list[tuple[FunctionWrites, Step]] = field(default_factory=list)

    def add(self, root: Root, event: int) -> bool:
        """Note a write; whether it was new."""
        events = self.events.setdefault(root, [])
        place = bisect_left(events, event)
        if events[place : place + 1] == [event]:
            return False
        events.insert(place, event)
        return True


def find_writes(module: ModuleFacts, operands: Operands) -> dict[str, FunctionWrites]:
    """Return the writes of every Relax function of a module, by its name."""
    found = {}
    for name, function in module.functions.items():
        if isinstance(function, relax.Function):
            facts = module.of(name)
            assert facts is not None, "no function is being looked at"
            found[name] = FunctionWrites(facts)
    for writes in found.values():
        _find_own(module, writes, found, operands)
    ready = list(found.values())
    while ready:  # what a function writes, its callers write
        callee = ready.pop()
        written = [
            k
            for k, parameter in enumerate(callee.facts.parameters)
            if parameter in callee.events or parameter in callee.captured
        ]
        for caller, step in callee.callers:
            arguments = step.value.args
            roots = [root for k in written for root in caller.facts.roots(arguments[k])]
            if sum(caller.add(root, step.entry) for root in roots):
                ready.append(caller)
    return found


def _find_own(
    module: ModuleFacts,
    writes: FunctionWrites,
    found: dict[str, FunctionWrites],
    operands: Operands,
) -> None:
    """Note what a function writes itself, and where it calls others."""
    for step in writes.facts.program.events:
        if type(step.value) is relax.Function:
            for var in relax.analysis.free_vars(step.value):
                writes.captured |= writes.facts.roots(var)
        elif type(step.value) is relax.Call:
            callee = module.function(step.value.op)
            if isinstance(callee, relax.Function):
                found[str(step.value.op.name_hint)].callers.append((writes, step))
                continue
            for operand in operands(step):
                if type(operand) is tvm.ir.GenericConst:
                    continue  # nothing writes a constant
                for root in writes.facts.roots(operand):
                    writes.add(root, step.entry)
