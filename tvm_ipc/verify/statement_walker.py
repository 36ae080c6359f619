# SPDX-License-Identifier: Apache-2.0
"""Interpret the statements of functions over the values of a domain.

The verifier has two domains: memory and the order of communication. Both share this walk, which
evaluates arguments, tuples and nested calls, finds out what each call calls, and enters functions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from tvm import relax

from tvm_ipc.packed_functions.program_function_declarations import WAIT
from tvm_ipc.verify import known_calls
from tvm_ipc.verify.known_calls import KnownCall, known_call, text_of
from tvm_ipc.verify.module_functions_and_summary_cache import Module
from tvm_ipc.verify.relax_as_plain_statements import (
    CALL_GLOBAL,
    CALL_OPERATOR,
    CALL_PACKED,
    IF,
    ITEM,
    KILL,
    LITERAL,
    SAME,
    Argument,
    Sequence,
    Statement,
)

#: The knowledge of a domain about a variable. A tuple of the program is a tuple of values.
Value = Any


class StatementWalker(ABC):
    """Interprets statements one after the other; a subclass is a domain, and gives them a meaning.

    The methods that a domain defines take the evaluated arguments of a call, and return the value
    of its result.
    """

    def __init__(self, module: Module) -> None:
        self._module = module
        self._values: dict[int, Value] = {}  #: of variables, by their hash
        self._variables: dict[int, Any] = {}  #: used variables of all entered functions, by hash

    def _enter(self, name: str, values: Iterable[Value], around: Statement) -> Value:
        """Interpret the body of a function of the module; return its result."""
        statements = self._module.statements(name)
        self._variables.update(statements.variables)
        self._values.update(zip(map(hash, self._module.function(name).params), values, strict=True))
        return self._sequence(statements.body, around)

    def _sequence(self, sequence: Sequence, around: Statement) -> Value:
        """Interpret a sequence within a statement; return its result."""
        values, evaluate, bind = self._values, self._evaluate, self._bind
        for step in sequence.steps:
            if step.kind == KILL:
                self._kill(step)
            else:
                values[step.variable] = value = evaluate(step)
                bind(step, value)
        return self._leave(sequence, self._value(sequence.result), around)

    # ---- expressions ------------------------------------------------------------------------

    def _value(self, argument: Argument) -> Value:
        """Return the value of an argument."""
        kind = type(argument)
        if kind is int:
            value = self._values.get(argument)
            return self._free(argument) if value is None else value
        if kind is tuple:
            return tuple([self._value(field) for field in argument])
        return self._evaluate(argument) if kind is Statement else self._constant(argument)

    def _evaluate(self, step: Statement) -> Value:
        kind, args = step.kind, step.args
        if kind == CALL_OPERATOR and step.name in known_calls.ALLOCATIONS:
            return self._allocate(step)
        if kind == IF:
            return self._branch(step)
        if kind == LITERAL:
            return self._local_function(step)
        values = [self._value(argument) for argument in args]
        if kind == CALL_GLOBAL:
            return self._call_global(step, values)
        if kind == CALL_PACKED:
            return self._call_packed(step, values)
        if kind == SAME:
            return values[0]
        if kind == ITEM:
            whole = values[0]
            return whole[step.index] if type(whole) is tuple else self._field(step, whole)
        if kind == CALL_OPERATOR and step.name not in known_calls.UNKNOWN_OPERATORS:
            if step.name == "relax.call_tir_inplace":
                return self._call_in_place(step, values[1])
            if step.name in known_calls.VIEW_OPERATORS:
                return self._view(step, values)
            return self._access(step, values, [])
        return self._unknown(step, values)

    def _call_global(self, step: Statement, values: list[Value]) -> Value:
        """Interpret a call of a function of the module."""
        written = self._module.written(step.name)
        if written is not None and max(written, default=-1) < len(values):
            return self._run_kernel(step, values, written)
        function = self._module.function(step.name)
        if isinstance(function, relax.Function) and len(function.params) == len(values):
            return self._call_function(step, values)
        return self._unknown(step, values)

    def _call_in_place(self, step: Statement, operands: Value) -> Value:
        """Interpret a call of a PrimFunc that returns new tensors and some of its operands."""
        indices = [int(index) for index in step.value.attrs.inplace_indices]
        new = self._access(step, operands, [operands[index] for index in indices if index >= 0])
        results = [operands[index] if index >= 0 else new for index in indices]
        return results[0] if len(results) == 1 else tuple(results)

    def _call_packed(self, step: Statement, values: list[Value]) -> Value:
        call = known_call(step.name, step.args, values)
        if call is None:
            if step.name in known_calls.READERS:
                return self._access(step, values, [])
            if step.name in known_calls.VIEWS:
                return self._view(step, values)
            return self._unknown(step, values)
        if call.function.starts:
            name = text_of(step.args[0]) or ""
            return self._start(step, known_call(name, step.args[1:], values[1:]), values[1:])
        if call.function is WAIT:
            return self._wait(step, values[0])
        return self._call(step, call)

    # ---- what a domain defines --------------------------------------------------------------

    @abstractmethod
    def _free(self, variable: int) -> Value:
        """Return the value of a variable that the walk has not bound."""

    @abstractmethod
    def _constant(self, expr: Any) -> Value:
        """Return the value of an expression that is no variable, tuple or call."""

    def _field(self, step: Statement, whole: Value) -> Value:
        """Return the value of a field of a tuple whose fields are unknown."""
        return self._unknown(step, [whole])

    @abstractmethod
    def _bind(self, step: Statement, value: Value) -> None:
        """Note that a statement bound its variable to a value."""

    def _kill(self, step: Statement) -> None:  # noqa: B027 - not all domains track it
        """Note that the program drops the values of some variables."""

    def _leave(self, sequence: Sequence, result: Value, around: Statement) -> Value:
        """Note the end of a sequence; return its result."""
        return result

    @abstractmethod
    def _branch(self, step: Statement) -> Value:
        """Interpret both branches of an `if`, and join them."""

    @abstractmethod
    def _run_kernel(self, step: Statement, values: list[Value], written: frozenset[int]) -> Value:
        """Interpret a call of a PrimFunc, which may write the arguments at some positions."""

    @abstractmethod
    def _call_function(self, step: Statement, values: list[Value]) -> Value:
        """Interpret a call of a Relax function of the module."""

    def _local_function(self, step: Statement) -> Value:
        """Interpret the definition of a local function, whose arguments are what it captures."""
        return self._unknown(step, [self._value(argument) for argument in step.args])

    @abstractmethod
    def _unknown(self, step: Statement, values: list[Value]) -> Value:
        """Interpret a call that may do anything to its arguments."""

    @abstractmethod
    def _allocate(self, step: Statement) -> Value:
        """Interpret an operator that allocates a storage or a tensor."""

    @abstractmethod
    def _view(self, step: Statement, values: list[Value]) -> Value:
        """Interpret a call whose result is, or may be, its first argument."""

    @abstractmethod
    def _access(self, step: Statement, reads: Iterable[Value], writes: Iterable[Value]) -> Value:
        """Read values, write others, and return new tensors if the statement has any."""

    @abstractmethod
    def _start(self, step: Statement, call: KnownCall | None, values: list[Value]) -> Value:
        """Interpret the start of a request, which makes a call; None: an unknown one."""

    @abstractmethod
    def _wait(self, step: Statement, request: Value) -> Value:
        """Interpret the wait for a request."""

    @abstractmethod
    def _call(self, step: Statement, call: KnownCall) -> Value:
        """Interpret any other call of a function of `packed_functions`."""
