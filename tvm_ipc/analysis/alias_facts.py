# SPDX-License-Identifier: Apache-2.0
"""Represent the memory of a function as memory objects, and values as sets of them.

A memory object is a tensor that the function creates, or one that existed before. New tensors are
distinct from all other objects. Objects that existed before may alias each other: a caller may pass
one tensor twice. A value is the set of objects that it may refer to, or a tuple of values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import tvm
from tvm import relax

from tvm_ipc.analysis.ffi_arrays import as_list
from tvm_ipc.analysis.program_order import Linear, Region, Step, exclusive
from tvm_ipc.tvm_moved_names import GenericConst


@dataclass(eq=False, slots=True)
class Use:
    """A read or write of a memory object."""

    step: Step
    point: int
    region: Region


@dataclass(eq=False)
class MemoryObject:
    """A tensor that the function creates, or memory that existed before."""

    uses: list[Use] = field(default_factory=list)
    kept: str | None = None  #: why it may be held indefinitely, None if it is not
    escaped: bool = False  #: whether a later call may return it
    returned: bool = False
    #: Whether TVM's plan lets others reuse its storage: not if branches or calls use it.
    plain: bool = True

    def keep(self, reason: str, *, escapes: bool = True) -> None:
        """Record that it may be held indefinitely; the first reason is kept."""
        self.kept = self.kept or reason
        self.escaped |= escapes

    @property
    def foreign(self) -> bool:
        """Return whether other code may hold it, so that values from outside may be it."""
        return True


@dataclass(eq=False)
class Parameter(MemoryObject):
    """The argument of one parameter, with all its fields."""


@dataclass(eq=False)
class FreshObject(MemoryObject):
    """A tensor that the function creates."""

    step: Step = None  # type: ignore[assignment]
    #: Whether it stays a tensor of its own in later passes. The result of an operator may become a
    #: constant, or be shared with that of an equal operator.
    certain: bool = True

    @property
    def foreign(self) -> bool:
        """Return whether it escapes."""
        return self.escaped


@dataclass(eq=False)
class Allocation(FreshObject):
    """One `builtin.alloc_tensor`."""

    @property
    def call(self) -> Any:
        """Return the call that allocates."""
        return self.step.value

    @property
    def scope(self) -> str:
        """Return the memory scope that it is allocated in."""
        return str(self.call.args[3].value)

    @property
    def name(self) -> str:
        """Return the name of its variable."""
        return str(self.step.var.name)


T = TypeVar("T")
#: The alternatives of a value, or the values of the fields of a tuple.
Nested: TypeAlias = "frozenset[T] | tuple[Nested[T], ...]"
#: The memory objects that a value may be.
Value: TypeAlias = "Nested[MemoryObject]"
NOTHING: frozenset[Any] = frozenset()
#: Values by the addresses of variables, which the function keeps alive: hashing them is slow.
Values: TypeAlias = "dict[int, Value]"
CONSTANTS = 0  #: the key of the value that all constants share: no variable has this address
VARIABLES = frozenset((tvm.ir.Var, relax.DataflowVar))


@dataclass
class AliasFacts:
    """The facts about one function: its memory objects and the values of its variables."""

    program: Linear
    parameters: list[Parameter]
    allocations: list[Allocation]
    values: Values
    result: Value
    #: The memory that existed before and is no parameter: constants, results of callees.
    outside: MemoryObject
    collectives: list[Step]  #: in the order of the program

    def objects(self, expr: relax.Expr, path: tuple[int, ...] = ()) -> frozenset[MemoryObject]:
        """Return the objects that an argument, or the field at a path of it, may refer to."""
        value = value_of(self.values, expr)
        for index in path:
            value = value[index] if isinstance(value, tuple) else value
        return frozenset(leaves(value))

    def may_be_same(self, a: relax.Expr, b: relax.Expr) -> bool:
        """Return whether two values, or fields of them, may alias."""
        of_a, of_b = self.objects(a), self.objects(b)
        if not of_a.isdisjoint(of_b):
            return True
        return any(memory.foreign for memory in of_a) and any(memory.foreign for memory in of_b)

    def may_overwrite(self, expr: relax.Expr, step: Step) -> bool:
        """Return whether a value is memory of this function that nothing uses after a step."""
        objects = self.objects(expr)
        return bool(objects) and all(
            isinstance(memory, FreshObject) and memory.certain and _ends_by(memory, step)
            for memory in objects
        )

    def scope(self, expr: relax.Expr) -> str | None:
        """Return the memory scope of a value, None if it is unknown."""
        scopes = {
            memory.scope if isinstance(memory, Allocation) else None
            for memory in self.objects(expr)
        }
        return scopes.pop() if len(scopes) == 1 else None


def _ends_by(memory: FreshObject, step: Step) -> bool:
    """Return whether the last use of an object is not after a step."""
    if memory.kept is not None or memory.returned:
        return False
    return all(use.point <= step.index or exclusive(use.region, step.region) for use in memory.uses)


def leaves(value: Nested[T]) -> Iterator[T]:
    """Yield the alternatives of a value and of all its fields."""
    if isinstance(value, tuple):
        for field_value in value:
            yield from leaves(field_value)
    else:
        yield from value


def value_of(values: Mapping[int, Nested[T]], expr: relax.Expr) -> Nested[T]:
    """Return the value of an expression that creates nothing, from the values of variables."""
    kind = type(expr)
    if kind in VARIABLES:
        return values.get(expr.__chandle__(), NOTHING)
    if kind is relax.Tuple:
        return tuple(value_of(values, item) for item in as_list(expr.fields))
    if kind is relax.TupleGetItem:
        value = value_of(values, expr.tuple_value)
        return value[int(expr.index)] if isinstance(value, tuple) else value
    if kind is relax.Call:  # not in normal form
        arguments = [value_of(values, argument) for argument in as_list(expr.args)]
        return frozenset(leaves((*arguments, values.get(CONSTANTS, NOTHING))))
    if kind is GenericConst and type(expr.ty) is relax.TensorType:
        return values.get(CONSTANTS, NOTHING)
    return NOTHING


def join(a: Value, b: Value) -> Value:
    """Return the value that may be either of two."""
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        return tuple(join(x, y) for x, y in zip(a, b, strict=True))
    return frozenset(leaves(a)) | frozenset(leaves(b))


def fresh_value(step: Step, ty: Any, *, certain: bool = True) -> Value:
    """Return a value of new tensors for a type."""
    if isinstance(ty, relax.TupleType):
        return tuple(fresh_value(step, item, certain=certain) for item in ty.fields)
    return frozenset((FreshObject(step=step, certain=certain),)) if holds_tensor(ty) else NOTHING


def holds_tensor(ty: Any) -> bool:
    """Return whether a value of a type may be a tensor or contain one."""
    if isinstance(ty, relax.TupleType):
        return any(holds_tensor(item) for item in ty.fields)
    return not isinstance(ty, (relax.ShapeType, tvm.ir.PrimType))
