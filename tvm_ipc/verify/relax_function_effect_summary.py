# SPDX-License-Identifier: Apache-2.0
"""Summarize what a Relax function does to its caller, and translate that to one of its calls."""

from __future__ import annotations

from dataclasses import dataclass, field

from tvm_ipc.analysis.polynomials import Number
from tvm_ipc.packed_functions import AnyTeam
from tvm_ipc.verify.memory_state import Pending
from tvm_ipc.verify.relax_as_plain_statements import Statement
from tvm_ipc.verify.storage_and_buffer_types import (
    NOTHING,
    Buffer,
    Leaf,
    Memory,
    Storage,
    Value,
    objects,
)


@dataclass(frozen=True)
class Access:
    """A write to memory of the caller."""

    memory: Memory
    passed: frozenset[AnyTeam]  #: the teams that passed a barrier before it, on every path
    step: Statement


@dataclass
class Summary:
    """The effects of a function on its caller."""

    parameters: list[Value] = field(default_factory=list)
    result: Value = NOTHING
    reads: dict[Storage, Statement] = field(default_factory=dict)
    writes: list[Access] = field(default_factory=list)
    pending: tuple[Pending, ...] = ()
    passed: frozenset[AnyTeam] = frozenset()
    uses_streams: bool = False  #: whether it uses several streams, also in functions that it calls
    allocates: bool = False  #: whether it or its callees allocate memory; only with streams


class CallMapping:
    """Maps the memory of a callee's summary to memory of its caller, for one call."""

    def __init__(self, summary: Summary, values: list[Value], step: Statement) -> None:
        self._step = step
        self._arguments: dict[Storage, Leaf] = {}
        self._fresh: dict[Memory, Memory] = {}
        for parameter, value in zip(summary.parameters, values, strict=True):
            self._bind(parameter, value)

    def _bind(self, parameter: Value, value: Value) -> None:
        if isinstance(parameter, tuple):
            fields = value if isinstance(value, tuple) else (value,) * len(parameter)
            for inner, argument in zip(parameter, fields, strict=False):
                self._bind(inner, argument)
            return
        for memory in parameter:
            self._arguments[memory.storage] = frozenset(objects(value))

    def argument(self, storage: Storage) -> Leaf | None:
        """Return the argument that a storage of a parameter stands for, None for other storages."""
        return self._arguments.get(storage)

    def memory(self, memory: Memory) -> Leaf:
        """Return the caller's memory for memory of the callee."""
        storage = memory.storage
        argument = self._arguments.get(storage)
        if argument is not None:
            return frozenset(
                _in_storage(memory, target) if isinstance(target, Storage) else target
                for target in argument
            )
        if storage not in self._fresh:
            self._fresh[storage] = Storage(
                f"{storage.name} of {self._step}",
                storage.scope,
                _static(storage.size),
                storage.external,
            )
        if isinstance(memory, Buffer) and memory not in self._fresh:
            target = self._fresh[storage]
            assert isinstance(target, Storage)
            self._fresh[memory] = _in_storage(memory, target)
        return frozenset({self._fresh[memory]})

    def value(self, value: Value) -> Value:
        """Return the caller's value for a value of the callee."""
        if isinstance(value, tuple):
            return tuple(self.value(field) for field in value)
        return frozenset(here for memory in value for here in self.memory(memory))


def _in_storage(memory: Memory, storage: Storage) -> Memory:
    """Return the same bytes of another storage."""
    if isinstance(memory, Storage):
        return storage
    begin, end = _static(memory.begin), _static(memory.end)
    return Buffer(memory.name, storage, begin, end, memory.weak)


def _static(number: Number | None) -> Number | None:
    """Return a static number, None for a symbolic one: its variables belong to the callee."""
    return number if isinstance(number, int) else None
