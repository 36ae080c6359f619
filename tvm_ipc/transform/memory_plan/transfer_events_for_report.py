# SPDX-License-Identifier: Apache-2.0
"""Finds the transfers of a program by event, and the events that compute meanwhile.

    s = tvm_ipc.expose(x)          starts an exchange
    matmul(x, w, a)                computes
    p = tvm_ipc.peer_view(s, 1)    may wait
    matmul(p, w, b)                computes
    tvm_ipc.release(s)             ends the exchange

Tensors that are released at the same event belong to one exchange. A request lasts from its start
to its wait. Any other collective is one event.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import tvm
from tvm import relax

from tvm_ipc.analysis.alias_facts import VARIABLES, Nested, leaves, value_of
from tvm_ipc.analysis.collective_calls import name_of
from tvm_ipc.analysis.ffi_arrays import as_list
from tvm_ipc.analysis.program_order import Linear, Step
from tvm_ipc.analysis.views_and_writes_of_calls import viewed
from tvm_ipc.comm.extent_arithmetic import constant
from tvm_ipc.packed_functions import Function, Sync, find
from tvm_ipc.packed_functions.program_function_declarations import (
    COPY,
    EXPOSE,
    PEER_VIEW,
    START,
    WAIT,
)
from tvm_ipc.transform.report import Transfer
from tvm_ipc.tvm_moved_names import StringImm

_CALL_DYNAMIC = "relax.vm.call_tir_dyn"


@dataclass(eq=False)
class _Started:
    """A request or an exposed tensor, with the events that wait for it or end it."""

    step: Step
    description: str
    waits: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)


def computes(step: Step) -> str | None:
    """Return the kernel or function that a binding calls if it computes, without other ranks."""
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
    if step.collective is not None or viewed(call) is not None:
        return None
    name = str(call.op.global_symbol)
    function = find(name)
    if function is None:
        return name
    is_local = function.sync is Sync.NONE and function not in (START, WAIT)
    return name.removeprefix("tvm_ipc.") if is_local and function.writes else None


def transfers(program: Linear) -> tuple[Transfer, ...]:
    """Return the transfers of a function, in the order in which they start."""
    return _TransferFinder(program).run()


class _TransferFinder:
    """Visits the events of a function once."""

    def __init__(self, program: Linear) -> None:
        self._program = program
        self._values: dict[int, Nested[_Started]] = {}  #: by the address of a variable
        self._names: dict[int, str] = {}  #: of views and copies, the names of their sources
        self._called: list[Transfer] = []
        self._requests: list[_Started] = []
        self._exposed: list[_Started] = []

    def run(self) -> tuple[Transfer, ...]:
        for step in self._program.points:
            self._visit_step(step)
        result = [
            *self._called,
            *map(self._request_transfer, self._requests),
            *self._exchange_transfers(),
        ]
        return tuple(sorted(result, key=lambda transfer: (transfer.first, transfer.last)))

    def _visit_step(self, step: Step) -> None:
        value = step.value
        source = viewed(value)
        if source is not None:
            self._names[step.var.__chandle__()] = self._name(source)
            return
        if type(value) is relax.Call:
            if isinstance(value.op, relax.ExternFunc):
                self._visit_packed(step, value, find(str(value.op.global_symbol)))
            return
        if type(value) in VARIABLES and value.__chandle__() in self._names:
            self._names[step.var.__chandle__()] = self._name(value)
        started = value_of(self._values, value)
        if started:
            self._values[step.var.__chandle__()] = started

    def _visit_packed(self, step: Step, call: relax.Call, function: Function | None) -> None:
        if function is None:
            return
        arguments = as_list(call.args)
        if function is COPY:
            self._names[arguments[1].__chandle__()] = self._name(arguments[0])
        elif function is START:
            self._start(step, self._requests, _describe_request(arguments))
        elif function is EXPOSE:
            self._start(step, self._exposed, self._name(arguments[0]))
        elif function is WAIT:
            for started in leaves(value_of(self._values, arguments[0])):
                started.waits.append(step.index)
                started.ends.append(step.index)
        elif function is PEER_VIEW:
            if constant(arguments[1]) != 0:  # shift 0 is the rank itself
                for started in leaves(value_of(self._values, arguments[0])):
                    started.waits.append(step.index)
        elif function.releases:
            for position in function.positions((function.releases,), len(arguments)):
                for started in leaves(value_of(self._values, arguments[position])):
                    started.ends.append(step.index)
        elif step.collective is not None:
            event = (step.index,)
            description = str(step.collective)
            self._called.append(
                Transfer(description, "called", step.index, step.index, event, event)
            )

    def _start(self, step: Step, group: list[_Started], description: str) -> None:
        started = _Started(step, description)
        group.append(started)
        self._values[step.var.__chandle__()] = frozenset((started,))

    def _request_transfer(self, request: _Started) -> Transfer:
        first, waits = request.step.index, tuple(sorted(set(request.waits)))
        return Transfer(request.description, "posted", first, self._end(request), (first,), waits)

    def _exchange_transfers(self) -> list[Transfer]:
        """Return one transfer for all tensors that are released at the same event."""
        by_end: dict[int, list[_Started]] = {}
        for tensor in self._exposed:
            by_end.setdefault(self._end(tensor), []).append(tensor)
        result = []
        for end, group in by_end.items():
            starts = tuple(tensor.step.index for tensor in group)
            waits = tuple(sorted({event for tensor in group for event in tensor.waits}))
            names = ", ".join(dict.fromkeys(tensor.description for tensor in group))
            description = f"{len(group)} chunk{'s' * (len(group) > 1)} of {names}"
            result.append(Transfer(description, "shown", min(starts), end, starts, waits))
        return result

    def _end(self, started: _Started) -> int:
        """Return the last event that may end a transfer, or the last event of the function."""
        return max(started.ends, default=len(self._program.points) - 1)

    def _name(self, tensor: relax.Expr) -> str:
        """Return the name of a tensor, or of the tensor that it is a view or a copy of."""
        source = self._names.get(tensor.__chandle__()) if isinstance(tensor, relax.Var) else None
        return source or name_of(tensor)


def _describe_request(arguments: list[relax.Expr]) -> str:
    """Return the description of a request, the same as of a call of its collective."""
    name, *operands = arguments
    function = find(str(name.value)) if isinstance(name, StringImm) else None
    if function is None:
        return "a request"
    sends = [operands[position] for position in function.positions(function.reads, len(operands))]
    return f"{function.name.rpartition('.')[2]} of {', '.join(map(name_of, sends))}"
