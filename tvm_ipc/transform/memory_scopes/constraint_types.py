# SPDX-License-Identifier: Apache-2.0
"""The constraints of a module, which `collect` makes and `solve` reads.

A *leaf* is a tensor value up to aliasing: variables that certainly name the same memory (bindings,
reshapes, tuple fields, match_cast) have the same leaf. Memory that is only possibly the same (the
result of an if, the result of a function) has a leaf of its own, which uses tie to the others. A
*use* is a point that reads or writes a leaf; a copy in another scope can replace the leaf there.
`analysis.find_aliases` computes which leaves may be the same memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import tvm
from tvm import relax

from tvm_ipc.analysis.program_order import Linear, Region, Step


class TensorRoot(NamedTuple):
    """An expression that a tensor can be read from: a variable or constant, and projections."""

    base: relax.Expr
    path: tuple[int, ...] = ()

    @property
    def key(self) -> tuple[int, tuple[int, ...]]:
        """A key that is equal for equal roots."""
        return (hash(self.base), self.path)

    @property
    def name(self) -> str:
        """The name for new variables and for messages."""
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
    """A Relax function as its callers see it."""

    name: str
    params: tuple[Value, ...]
    result: Value
    local: bool
    escapes: bool = False  #: it may have callers outside the module's direct calls


@dataclass(frozen=True, slots=True)
class PlannedInto:
    """A storage of a memory plan, which tensors are allocated in."""

    scope: str


#: The value of a variable; None if it has no memory scope.
Value: TypeAlias = "TensorValue | tuple[Value, ...] | FunctionValue | PlannedInto | None"


@dataclass(eq=False)
class ScopedFunction:
    """A Relax function, global or local."""

    name: str
    function: relax.Function
    value: FunctionValue
    program: Linear
    outer: ScopedFunction | None = None  #: the function that it is local to
    frequency: float = 0.0
    pure: bool = False  #: whether it is pure, so that impure calls may not be added
    bounds: dict[str, int] = field(default_factory=dict)  #: of symbolic sizes
    calls: list[RelaxCall] = field(default_factory=list)


class RelaxCall(NamedTuple):
    """A call of a Relax function whose body is known."""

    step: Step
    callee: FunctionValue


@dataclass(eq=False)
class ScopedUse:
    """A use of a leaf that needs a scope, in a step or at the end of a region.

    `path` leads to the tensor in the binding of the step. It starts with the index of an argument,
    with OUT for the result of the binding, or with VALUE for the bound value itself; projections
    follow. At the end of a region it has projections only.
    """

    tensor: TensorValue
    function: ScopedFunction
    region: Region
    step: Step | None  #: None: the end of the region
    path: tuple[int, ...]
    description: str  #: for messages; empty for a parameter of a PrimFunc
    exact: str | None = None  #: the scope that it needs
    same: int | None = None  #: the leaf whose scope it needs
    moves: bool = False  #: whether the program asks for a move, so that a copy is always allowed
    param: tuple[str, int] | None = None  #: the name of a PrimFunc and the index of the parameter
    written: bool = False  #: whether it may be written, so that a copy must be copied back
    fresh: bool = False  #: whether it holds no data before, so that only copying back is needed

    def __str__(self) -> str:
        """Return the text that names the use in messages."""
        if self.param is None:
            return self.description
        return f"parameter {self.param[1]} of {self.param[0]!r}"

    @property
    def point(self) -> int:
        """The event of the function at which the use happens."""
        if self.step is None:
            return self.region.end + 1
        return self.step.index + 1 if self.path[0] == OUT else self.step.entry


OUT = -1
VALUE = -2


@dataclass(eq=False)
class ScopeFacts:
    """All constraints of one module."""

    module: tvm.IRModule
    types: list[Any] = field(default_factory=list)  #: by leaf
    #: By leaf: the scope that it must have, and the reason, for messages.
    fixed: dict[int, tuple[str, str]] = field(default_factory=dict)
    #: By leaf: the steps that allocate it, with their functions.
    allocs: dict[int, list[tuple[ScopedFunction, Step]]] = field(default_factory=dict)
    #: Calls that allocate their outputs and can be lowered to explicit allocations.
    allocating: list[tuple[ScopedFunction, Step]] = field(default_factory=list)
    uses: list[ScopedUse] = field(default_factory=list)
    functions: list[ScopedFunction] = field(default_factory=list)
    #: Leaves whose allocation names another device index than the VDevice of their type.
    misplaced: list[tuple[int, ScopedFunction, Step]] = field(default_factory=list)
    opaque: bool = False  #: whether some scope is opaque: code must be compiled for it
    hints: list[tuple[ScopedFunction, Step]] = field(default_factory=list)  #: steps to remove
    calls: Counter[str] = field(default_factory=Counter)  #: the number of calls of each PrimFunc
    referenced: set[str] = field(default_factory=set)  #: functions used other than by a call


def frequency(region: Region) -> float:
    """Return how often a region runs in a call of its function; each branch runs half the time."""
    return 0.5 ** len(region.path)


def tensors(value: Value) -> list[TensorValue]:
    """Return the tensors of a value, from left to right."""
    return [tensor for _, tensor in with_paths(value)]


def with_paths(
    value: Value, path: tuple[int, ...] = ()
) -> Iterator[tuple[tuple[int, ...], TensorValue]]:
    """Yield the tensors of a value, each after its path."""
    if isinstance(value, TensorValue):
        yield path, value
    elif isinstance(value, tuple):
        for index, field_value in enumerate(value):
            yield from with_paths(field_value, (*path, index))


def pairs(
    left: Value, right: Value, path: tuple[int, ...] = ()
) -> list[tuple[tuple[int, ...], TensorValue, TensorValue]]:
    """Return the tensors at the same paths of two values, each pair after its path."""
    if isinstance(left, TensorValue):
        return [(path, left, right)] if isinstance(right, TensorValue) else []
    if isinstance(left, tuple) and isinstance(right, tuple):
        return [
            pair
            for index, fields in enumerate(zip(left, right, strict=False))
            for pair in pairs(*fields, (*path, index))
        ]
    return []
