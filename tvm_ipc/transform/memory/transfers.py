# SPDX-License-Identifier: Apache-2.0
"""When data are on their way, by the events of a program, and which events compute meanwhile.

    s = tvm_ipc.show(x)       starts    an exchange: what is hidden together
    matmul(x, w, a)           computes
    p = tvm_ipc.peer(s, 1)    may wait
    matmul(p, w, b)           computes
    tvm_ipc.hide(s)           ends it

Of a work the post starts it, and the wait ends it. Any other collective is one event.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import tvm
from tvm import relax

from tvm_ipc.comm.extents import constant
from tvm_ipc.contract import Function, Meeting, find
from tvm_ipc.contract.programs import COPY, PART, PEER, POST, SHOW, VIEW, WAIT
from tvm_ipc.transform.ir.collectives import name_of
from tvm_ipc.transform.ir.program import Program, Step
from tvm_ipc.transform.ir.roots import VARIABLES
from tvm_ipc.transform.ir.views import VIEWS
from tvm_ipc.transform.report import Transfer

_CALL_DYNAMIC = "relax.vm.call_tir_dyn"


@dataclass(eq=False)
class _Started:
    """A work, or what was shown, that has not ended yet."""

    step: Step
    what: str
    waits: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)


#: What a value is that was started, or for each field of a tuple.
_Value: TypeAlias = "frozenset[_Started] | tuple[_Value, ...]"
_NOTHING: frozenset[_Started] = frozenset()


def computes(step: Step) -> str | None:
    """Return what a binding calls that takes its time, and needs no other rank."""
    call = step.value
    if type(call) is not relax.Call:
        return None
    if isinstance(call.op, tvm.ir.GlobalVar):
        return str(call.op.name_hint)
    if isinstance(call.op, tvm.ir.Op):
        dynamic = str(call.op.name) == _CALL_DYNAMIC
        return str(call.args[0].name_hint) if dynamic else None
    if not isinstance(call.op, relax.ExternFunc):
        return None
    name = str(call.op.global_symbol)
    if name in VIEWS or step.collective is not None:
        return None
    function = find(name)
    if function is None:
        return name
    works = function.meets is Meeting.NONE and function.writes and function not in (POST, WAIT)
    return name.removeprefix("tvm_ipc.") if works else None


def transfers(program: Program) -> tuple[Transfer, ...]:
    """Return what goes on between ranks, in the order in which it starts."""
    return _Events(program).run()


class _Events:
    """Goes through the events of a function once."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._values: dict[int, _Value] = {}  #: by the address of a variable
        self._names: dict[int, str] = {}  #: of parts and copies, those of what they are of
        self._called: list[Transfer] = []
        self._works: list[_Started] = []
        self._shown: list[_Started] = []

    def run(self) -> tuple[Transfer, ...]:
        for step in self._program.events:
            self._step(step)
        found = [*self._called, *map(self._work, self._works), *self._exchanges()]
        return tuple(sorted(found, key=lambda one: (one.first, one.last)))

    def _step(self, step: Step) -> None:
        value = step.value
        if type(value) is relax.Call:
            if isinstance(value.op, relax.ExternFunc):
                self._packed(step, value, find(str(value.op.global_symbol)))
            return
        if type(value) in VARIABLES and value.__chandle__() in self._names:
            self._names[step.var.__chandle__()] = self._name(value)
        known = self._value(value)
        if known:
            self._values[step.var.__chandle__()] = known

    def _packed(self, step: Step, call: relax.Call, function: Function | None) -> None:
        if function is None:
            return
        arguments = call.args[:]
        if function in (VIEW, PART):
            self._names[step.var.__chandle__()] = self._name(arguments[0])
        elif function is COPY:
            self._names[arguments[1].__chandle__()] = self._name(arguments[0])
        elif function is POST:
            self._start(step, self._works, _posted(arguments))
        elif function is SHOW:
            self._start(step, self._shown, self._name(arguments[0]))
        elif function is WAIT:
            for one in _leaves(self._value(arguments[0])):
                one.waits.append(step.index)
                one.ends.append(step.index)
        elif function is PEER:
            if constant(arguments[1]) != 0:  # which is its own, and there
                for one in _leaves(self._value(arguments[0])):
                    one.waits.append(step.index)
        elif function.hides:
            for place in function.places((function.hides,), len(arguments)):
                for one in _leaves(self._value(arguments[place])):
                    one.ends.append(step.index)
        elif step.collective is not None:
            here = (step.index,)
            what = str(step.collective)
            self._called.append(Transfer(what, "called", step.index, step.index, here, here))

    def _start(self, step: Step, those: list[_Started], what: str) -> None:
        started = _Started(step, what)
        those.append(started)
        self._values[step.var.__chandle__()] = frozenset((started,))

    def _work(self, work: _Started) -> Transfer:
        first, waits = work.step.index, tuple(sorted(set(work.waits)))
        return Transfer(work.what, "posted", first, self._end(work), (first,), waits)

    def _exchanges(self) -> list[Transfer]:
        """Join what is hidden together."""
        together: dict[int, list[_Started]] = {}
        for one in self._shown:
            together.setdefault(self._end(one), []).append(one)
        found = []
        for end, those in together.items():
            starts = tuple(one.step.index for one in those)
            waits = {event for one in those for event in one.waits}
            names = ", ".join(dict.fromkeys(one.what for one in those))
            what = f"{len(those)} chunk{'s' * (len(those) > 1)} of {names}"
            found.append(Transfer(what, "shown", min(starts), end, starts, tuple(sorted(waits))))
        return found

    def _end(self, one: _Started) -> int:
        """Return the last event that may end it: that of the function where none is seen."""
        return max(one.ends, default=len(self._program.events) - 1)

    def _name(self, tensor: relax.Expr) -> str:
        known = self._names.get(tensor.__chandle__()) if isinstance(tensor, relax.Var) else None
        return known or name_of(tensor)

    def _value(self, expr: Any) -> _Value:
        kind = type(expr)
        if kind in VARIABLES:
            return self._values.get(expr.__chandle__(), _NOTHING)
        if kind is relax.Tuple:
            return tuple(self._value(part) for part in expr.fields[:])
        if kind is relax.TupleGetItem:
            whole = self._value(expr.tuple_value)
            return whole[int(expr.index)] if isinstance(whole, tuple) else whole
        return _NOTHING


def _leaves(value: _Value) -> list[_Started]:
    if isinstance(value, tuple):
        return [one for part in value for one in _leaves(part)]
    return list(value)


def _posted(arguments: list[relax.Expr]) -> str:
    """Return what a work is, as a call of the collective would be described."""
    name, *given = arguments
    function = find(str(name.value)) if isinstance(name, tvm.ir.StringImm) else None
    if function is None:
        return "a work"
    sends = [given[place] for place in function.places(function.reads, len(given))]
    return f"{function.name.rpartition('.')[2]} of {', '.join(map(name_of, sends))}"
