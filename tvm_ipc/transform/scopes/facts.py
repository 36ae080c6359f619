# SPDX-License-Identifier: Apache-2.0
"""What is known of the tensor values of a module: the data that the solver works on.

A *leaf* is a tensor value up to aliasing: variables that certainly are the same memory (bindings,
reshapes, tuple fields, match_cast) have the same leaf. Memory that only may be the same (the
result of an if, what a function returns) has leaves of its own, tied together by uses, and is
one class of `Program.memory`. A *use* is a place that reads or writes a leaf, and where a copy in
another scope could take its place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import tvm
from tvm import relax


class Root(NamedTuple):
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
class Tensor:
    """A tensor value: its leaf, and where to read it."""

    leaf: int
    root: Root


@dataclass
class FunctionValue:
    """A Relax function, seen from its callers."""

    name: str
    params: tuple[Value, ...]
    result: Value
    local: bool
    escapes: bool = False  #: callers are not all known


@dataclass(frozen=True, slots=True)
class Storage:
    """What tensors were planned into."""

    scope: str


#: What a variable stands for. None: nothing with a scope.
Value: TypeAlias = "Tensor | tuple[Value, ...] | FunctionValue | Storage | None"


@dataclass(eq=False)
class Region:
    """A sequence of bindings that run one after the other: a function's body, or a branch."""

    function: FunctionFacts
    parent: Region | None
    at: int  #: index of the binding of `parent` that it belongs to
    frequency: float  #: how often it runs in a call of the function
    sequence: relax.SeqExpr
    bindings: list[relax.Binding] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)  #: when each binding runs; one more: the end
    dataflow: list[bool] = field(default_factory=list)
    children: dict[int, list[Region]] = field(default_factory=dict)
    depth: int = 0
    outer: Region | None = None  #: where the function is defined whose body it is, if that is local


@dataclass(eq=False)
class FunctionFacts:
    """A Relax function, global or local."""

    name: str
    function: relax.Function
    value: FunctionValue
    region: Region | None = None
    frequency: float = 0.0
    pure: bool = False  #: impure calls may not be added to it
    bounds: dict[str, int] = field(default_factory=dict)  #: of symbolic sizes
    writes: list[Write] = field(default_factory=list)
    calls: list[CallRecord] = field(default_factory=list)
    deferred: list[DeferredCall] = field(default_factory=list)


class Write(NamedTuple):
    """A call that may write the memory of a leaf; `param` of a PrimFunc tells."""

    number: int
    leaf: int
    param: tuple[str, int] | None


@dataclass(frozen=True, slots=True)
class DeferredCall:
    """A call that demands nothing; its operands are read only if it matters."""

    number: int
    region: Region
    index: int
    name: str
    call: relax.Call


class CallRecord(NamedTuple):
    """A call of a Relax function whose body is known."""

    number: int
    region: Region
    callee: FunctionValue
    arguments: tuple[Value, ...]
    result: Value


@dataclass(eq=False)
class Use:
    """A place where a leaf must be in some scope.

    `path` leads to the tensor in the binding at `index` of the region: an argument's index, then
    projections; OUT and projections for the result of the binding, at the index after it; VALUE
    and projections for the bound value itself; projections alone at the end of the region.
    """

    tensor: Tensor
    region: Region
    index: int
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


OUT = -1
VALUE = -2


@dataclass(frozen=True, slots=True)
class AllocSite:
    """Where memory of a leaf is made; `output` is the place among the outputs of a call_tir."""

    region: Region
    index: int
    output: int | None


@dataclass(eq=False)
class Program:
    """All facts of one module."""

    module: tvm.IRModule
    owners: list[FunctionFacts | None] = field(default_factory=list)  #: by leaf
    types: list[Any] = field(default_factory=list)
    fixed: dict[int, tuple[str, str]] = field(default_factory=dict)  #: scope and why
    memory: list[int] = field(default_factory=list)  #: parents of a union-find
    allocs: dict[int, list[AllocSite]] = field(default_factory=dict)
    uses: list[Use] = field(default_factory=list)
    functions: list[FunctionFacts] = field(default_factory=list)
    #: Leaves, and where they are allocated on the number of a scope instead of its device's.
    misplaced: list[tuple[int, Region, int]] = field(default_factory=list)
    opaque: bool = False  #: whether any scope is one that code must be compiled for
    hints: list[tuple[Region, int]] = field(default_factory=list)  #: annotations to take out
    calls: dict[str, list[tuple[Region, int]]] = field(default_factory=dict)  #: of PrimFuncs
    read_deferred: Callable[[], None] = lambda: None  #: reads the calls that were deferred
    referenced: set[str] = field(default_factory=set)  #: functions that are not only called

    def number(self, use: Use) -> int:
        """Return when a use is reached."""
        return use.region.numbers[use.index]

    def find(self, leaf: int) -> int:
        """Return the class of memory that a leaf may lie in."""
        parents = self.memory
        while parents[leaf] != leaf:
            parents[leaf] = parents[parents[leaf]]
            leaf = parents[leaf]
        return leaf

    def unite(self, one: int, other: int) -> bool:
        """Note that two leaves may be the same memory; return whether that was new."""
        one, other = self.find(one), self.find(other)
        self.memory[max(one, other)] = min(one, other)
        return one != other


def tensors(value: Value) -> list[Tensor]:
    """Return the tensors of a value, from left to right."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple):
        return [tensor for part in value for tensor in tensors(part)]
    return []


def pairs(
    one: Value, other: Value, path: tuple[int, ...] = ()
) -> list[tuple[tuple[int, ...], Tensor, Tensor]]:
    """Return the tensors at the same places of two values, and these places."""
    if isinstance(one, Tensor):
        return [(path, one, other)] if isinstance(other, Tensor) else []
    if isinstance(one, tuple) and isinstance(other, tuple):
        return [
            found
            for index, (left, right) in enumerate(zip(one, other, strict=False))
            for found in pairs(left, right, (*path, index))
        ]
    return []
