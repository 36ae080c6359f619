# SPDX-License-Identifier: Apache-2.0
"""Where the variables of a function are bound, and who uses them, while it has operators."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm import relax

from tvm_ipc.transform.ir.views import WRITERS


@dataclass(eq=False)
class Place:
    """Where a variable is bound."""

    binding: Any
    at: int
    block: Any


@dataclass
class Uses:
    """The bindings of a function in their order, and who uses what they bind."""

    places: dict[Any, Place] = field(default_factory=dict)
    users: dict[Any, list[Place]] = field(default_factory=lambda: defaultdict(list))
    #: Places of what may write into memory that it is given.
    writers: list[int] = field(default_factory=list)
    count: int = 0

    def read(self, body: Any) -> None:
        """Look at a sequence, and at those inside of it."""
        if not isinstance(body, relax.SeqExpr):
            self._use(body, Place(None, self.count, None))
            return
        for block in body.blocks[:]:
            for binding in block.bindings[:]:
                place = Place(binding, self.count, block)
                self.count += 1
                self.places[binding.var] = place
                value = binding.value
                if isinstance(value, relax.If):
                    self._use(value.cond, place)
                    self.read(value.true_branch)
                    self.read(value.false_branch)
                    continue
                if isinstance(value, relax.Call) and _may_write(value):
                    self.writers.append(place.at)
                self._use(value, place)
        self._use(body.body, Place(None, self.count, None))

    def _use(self, value: Any, place: Place) -> None:
        if isinstance(value, relax.Var):
            self.users[value].append(place)
        elif isinstance(value, relax.Call):
            for argument in (value.op, *value.args[:]):
                self._use(argument, place)
        elif isinstance(value, relax.Tuple):
            for item in value.fields[:]:
                self._use(item, place)
        elif isinstance(value, relax.TupleGetItem):
            self._use(value.tuple_value, place)
        elif isinstance(value, relax.Function):
            for variable in relax.analysis.free_vars(value):
                self.users[variable].append(place)

    def written(self, after: int, until: int) -> bool:
        """Whether anything between two places may write into memory."""
        first = bisect_left(self.writers, after)
        return first < len(self.writers) and self.writers[first] < until


def operator_of(value: Any) -> str:
    """Return the name of the operator that is called, nothing where none is."""
    if not isinstance(value, relax.Call) or not isinstance(value.op, tvm.ir.Op):
        return ""
    return str(value.op.name)


def binds(place: Place, *operators: str) -> bool:
    """Whether a variable is bound there to a call of an operator, and is cast to nothing else."""
    binding = place.binding
    return isinstance(binding, relax.VarBinding) and operator_of(binding.value) in operators


def _may_write(call: relax.Call) -> bool:
    return not isinstance(call.op, tvm.ir.Op) or str(call.op.name) in WRITERS
