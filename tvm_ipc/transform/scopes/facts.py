# SPDX-License-Identifier: Apache-2.0
"""What is known of the tensor values of a module: the data that the solver works on.

A *leaf* is a tensor value up to aliasing: variables that certainly are the same memory (bindings,
reshapes, tuple fields, match_cast) have the same leaf. Memory that only may be the same (the
result of an if, what a function returns) has leaves of its own, tied together by uses. A *use* is a
place that reads or writes a leaf, and where a copy in another scope could take its place. Which
leaves may be the same memory `ir.aliases` says.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import tvm
from tvm import relax

from tvm_ipc.transform.ir import program as ir_program
from tvm_ipc.transform.ir.program import Region, Step


class TensorRoot(NamedTuple):
    """An expression that a tensor can be read from: a variable or constant, and projections."""

    base: relax.Expr
    path: tuple[int, ...] = ()

    @property
    def key(self) -> tuple[int, tuple[int, ...]]:
        """What equal roots share."""
        return (hash(self.base), self.path)

    @property
    def name(self) -> str:
        """What to call it in names of variables and in messages."""
        name = str(self.base.name) if isinstance(self.base, relax.Var) else "const"
        return "_".join([name, *map(str, self.path)])

    @property
    def ty(self) -> Any:
        """The type of the tensor."""
        ty = self.base.ty
        for index in self.path:
            ty = ty.fields[index]
        return ty


@dataclass(frozen=True, slots=True)
class TensorValue:
    """A tensor value: its leaf, and where to read it."""

    leaf: int
    root: TensorRoot


@dataclass
class FunctionValue:
    """A Relax function, seen from its callers."""

    name: str
    params: tuple[Value, ...]
    result: Value
    local: bool
    escapes: bool = False  #: callers are not all known


@dataclass(frozen=True, slots=True)
class PlannedInto:
    """What tensors were planned into."""

    scope: str


#: What a variable stands for. None: nothing with a scope.
Value: TypeAlias = "TensorValue | tuple[Value, ...] | FunctionValue | PlannedInto | None"


@dataclass(eq=False)
class FunctionFacts:
    """A Relax function, global or local."""

    name: str
    function: relax.Function
    value: FunctionValue
    program: ir_program.Program
    outer: FunctionFacts | None = None  #: the function that it is local to
    frequency: float = 0.0
    pure: bool = False  #: impure calls may not be added to it
    bounds: dict[str, int] = field(default_factory=dict)  #: of symbolic sizes
    calls: list[RelaxCall] = field(default_factory=list)


class RelaxCall(NamedTuple):
    """A call of a Relax function whose body is known."""

    step: Step
    callee: FunctionValue


@dataclass(eq=False)
class ScopedUse:
    """A place where a leaf must be in some scope: in a step, or at the end of a region.

    `path` leads to the tensor in the binding of the step: an argument's index, then projections;
    OUT and projections for the result of the binding; VALUE and projections for the bound value
    itself; projections alone at the end of the region.
    """

    tensor: TensorValue
    function: FunctionFacts
    region: Region
    step: Step | None  #: None: the end of the region
    path: tuple[int, ...]
    what: str  #: for messages; empty for a parameter of a PrimFunc
    exact: str | None = None  #: the scope that it needs
    same: int | None = None  #: the leaf whose scope it needs
    moves: bool = False  #: a copy is what was asked for, if the memory is not the same anyway
    param: tuple[str, int] | None = None  #: the parameter of a PrimFunc that it is
    written: bool = False  #: it may be written: what was copied is copied back
    fresh: bool = False  #: nothing was in it before: it need not be copied there

    def __str__(self) -> str:
        if self.param is None:
            return self.what
        return f"parameter {self.param[1]} of {self.param[0]!r}"

    @property
    def event(self) -> int:
        """The event of its function at which it is reached."""
        if self.step is None:
            return self.region.end + 1
        return self.step.index + 1 if self.path[0] == OUT else self.step.entry


OUT = -1
VALUE = -2


@dataclass(eq=False)
class ScopeFacts:
    """All facts of one module."""

    module: tvm.IRModule
    types: list[Any] = field(default_factory=list)  #: by leaf
    fixed: dict[int, tuple[str, str]] = field(default_factory=dict)  #: scope and why
    #: The steps that make memory of a leaf, and their functions.
    allocs: dict[int, list[tuple[FunctionFacts, Step]]] = field(default_factory=dict)
    #: Calls that allocate their outputs where allocations of their own could stand.
    allocating: list[tuple[FunctionFacts, Step]] = field(default_factory=list)
    uses: list[ScopedUse] = field(default_factory=list)
    functions: list[FunctionFacts] = field(default_factory=list)
    #: Leaves, and where they are allocated on the number of a scope instead of its device's.
    misplaced: list[tuple[int, FunctionFacts, Step]] = field(default_factory=list)
    opaque: bool = False  #: whether any scope is one that code must be compiled for
    hints: list[tuple[FunctionFacts, Step]] = field(default_factory=list)  #: to take out
    calls: Counter[str] = field(default_factory=Counter)  #: of PrimFuncs
    referenced: set[str] = field(default_factory=set)  #: functions that are not only called


def frequency(region: Region) -> float:
    """Return how often a region runs in a call of its function: each branch every second time."""
    return 0.5 ** len(region.path)


def tensors(value: Value) -> list[TensorValue]:
    """Return the tensors of a value, from left to right."""
    if isinstance(value, TensorValue):
        return [value]
    if isinstance(value, tuple):
        return [tensor for part in value for tensor in tensors(part)]
    return []


def pairs(
    one: Value, other: Value, path: tuple[int, ...] = ()
) -> list[tuple[tuple[int, ...], TensorValue, TensorValue]]:
    """Return the tensors at the same places of two values, and these places."""
    if isinstance(one, TensorValue):
        return [(path, one, other)] if isinstance(other, TensorValue) else []
    if isinstance(one, tuple) and isinstance(other, tuple):
        return [
            found
            for index, (left, right) in enumerate(zip(one, other, strict=False))
            for found in pairs(left, right, (*path, index))
        ]
    return []
