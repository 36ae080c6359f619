# SPDX-License-Identifier: Apache-2.0
"""Find where the variables of a function with operators are bound and used."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import tvm
from tvm import relax

from tvm_ipc.analysis.alias_facts import VARIABLES
from tvm_ipc.analysis.ffi_arrays import as_list
from tvm_ipc.analysis.program_order import Linear, Region, Step
from tvm_ipc.analysis.views_and_writes_of_calls import WRITERS, operator_of


class Uses:
    """The bindings of the variables of a function, and where they are used."""

    def __init__(self, program: Linear) -> None:
        self.program = program
        self.bound: dict[Any, Step] = {}  #: by variable, in the order of the program
        #: By variable; a step without a binding stands for the result of a region.
        self.users: dict[Any, list[Step]] = defaultdict(list)
        #: The events of calls that may write memory of their arguments, in order.
        self.writers: list[int] = []
        for step in program.points:
            if step.var in self.bound:  # the branches of an if join here
                for branch in step.branches:
                    self._use_result(branch)
                continue
            self.bound[step.var] = step
            value = step.value
            kind = type(value)
            if kind is relax.Call and _may_write(value):
                self.writers.append(step.entry)
            self._use(value.cond if kind is relax.If else value, step)
        self._use_result(program.body)

    def _use_result(self, region: Region) -> None:
        end = region.end + 1
        self._use(region.result, Step(None, None, region.result, region, -1, end, end))

    def _use(self, value: Any, step: Step) -> None:
        for variable in variables_in(value):
            self.users[variable].append(step)

    def binding_of(self, value: Any) -> Step | None:
        """Return the binding of a variable, None for parameters and other expressions."""
        return self.bound.get(value) if isinstance(value, relax.Var) else None

    def written(self, after: int, until: int) -> bool:
        """Return whether a call in a range of events may write memory of its arguments."""
        first = bisect_left(self.writers, after)
        return first < len(self.writers) and self.writers[first] < until


def variables_in(value: Any) -> Iterator[Any]:
    """Yield the variables that an expression uses, those of branches and functions each once."""
    kind = type(value)
    if kind in VARIABLES:
        yield value
    elif kind is relax.Call:
        for argument in (value.op, *as_list(value.args)):
            yield from variables_in(argument)
    elif kind is relax.Tuple:
        for item in as_list(value.fields):
            yield from variables_in(item)
    elif kind is relax.TupleGetItem:
        yield from variables_in(value.tuple_value)
    elif kind is relax.Function or kind is relax.If:
        yield from relax.analysis.free_vars(value)


def binds(step: Step, *operators: str) -> bool:
    """Return whether a binding is a call of one of some operators, and no cast of it."""
    return isinstance(step.binding, relax.VarBinding) and operator_of(step.value) in operators


def _may_write(call: relax.Call) -> bool:
    return type(call.op) is not tvm.ir.Op or call.op.name in WRITERS
