# SPDX-License-Identifier: Apache-2.0
"""Find where the variables of a function with operators are bound and used."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm import relax

from tvm_ipc.analysis.elementwise_view_writer_ops import WRITERS
from tvm_ipc.analysis.ffi_arrays import as_list


@dataclass(eq=False)
class Position:
    """A binding and its index in the function."""

    binding: Any  #: None for the result of a sequence
    at: int
    block: Any


@dataclass(eq=False)
class Uses:
    """The positions of the bindings of a function, and the uses of their variables."""

    positions: dict[Any, Position] = field(default_factory=dict)
    users: dict[Any, list[Position]] = field(default_factory=lambda: defaultdict(list))
    #: Indices of calls that may write memory of their arguments, in order.
    writers: list[int] = field(default_factory=list)
    count: int = 0

    def read(self, body: Any) -> None:
        """Add the bindings and uses of a body, including those of its branches."""
        if not isinstance(body, relax.SeqExpr):
            self._use(body, Position(None, self.count, None))
            return
        for block in as_list(body.blocks):
            for binding in as_list(block.bindings):
                position = Position(binding, self.count, block)
                self.count += 1
                self.positions[binding.var] = position
                value = binding.value
                kind = type(value)
                if kind is relax.If:
                    self._use(value.cond, position)
                    self.read(value.true_branch)
                    self.read(value.false_branch)
                    continue
                if kind is relax.Call and _may_write(value):
                    self.writers.append(position.at)
                self._use(value, position)
        self._use(body.body, Position(None, self.count, None))

    def _use(self, value: Any, position: Position) -> None:
        kind = type(value)
        if kind is relax.Var or kind is relax.DataflowVar:
            self.users[value].append(position)
        elif kind is relax.Call:
            for argument in (value.op, *as_list(value.args)):
                self._use(argument, position)
        elif kind is relax.Tuple:
            for item in as_list(value.fields):
                self._use(item, position)
        elif kind is relax.TupleGetItem:
            self._use(value.tuple_value, position)
        elif kind is relax.Function:
            for variable in relax.analysis.free_vars(value):
                self.users[variable].append(position)

    def written(self, after: int, until: int) -> bool:
        """Return whether a call in a range of indices may write memory of its arguments."""
        first = bisect_left(self.writers, after)
        return first < len(self.writers) and self.writers[first] < until


def operator_of(value: Any) -> str:
    """Return the name of the operator that an expression calls, "" if it calls none."""
    if type(value) is not relax.Call or type(value.op) is not tvm.ir.Op:
        return ""
    return str(value.op.name)


def binds(position: Position, *operators: str) -> bool:
    """Return whether a binding is a call of one of some operators, and no cast of it."""
    binding = position.binding
    return isinstance(binding, relax.VarBinding) and operator_of(binding.value) in operators


def _may_write(call: relax.Call) -> bool:
    return type(call.op) is not tvm.ir.Op or str(call.op.name) in WRITERS
