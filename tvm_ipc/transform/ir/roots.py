# SPDX-License-Identifier: Apache-2.0
"""Memory as a set of roots: tensors that a function makes, and what was there before.

Tensors that the function makes are each apart from all others. Of what was there before each may be
any other: a caller may pass one tensor twice. A value is the roots that it may lie in, or a tuple
of values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import tvm
from tvm import relax

from tvm_ipc.transform.ir.program import Program, Region, Step, exclusive


@dataclass(eq=False, slots=True)
class Use:
    """A value in the memory of a root is read or written."""

    step: Step
    event: int
    region: Region


@dataclass(eq=False)
class Root:
    """What values may be: a tensor that the function makes, or what was there before."""

    uses: list[Use] = field(default_factory=list)
    kept: str | None = None  #: why it may be held for ever
    escaped: bool = False  #: whether somebody outside may hand it back
    returned: bool = False
    #: TVM's plan gives it a storage that others may reuse; it gives up at branches and calls
    plain: bool = True

    def keep(self, reason: str, *, escapes: bool = True) -> None:
        """Note that it may be held for ever; the first reason stands."""
        self.kept = self.kept or reason
        self.escaped |= escapes

    @property
    def foreign(self) -> bool:
        """Whether others may hold it, so that what comes from outside may be it."""
        return True


@dataclass(eq=False)
class Parameter(Root):
    """What the caller passes for one parameter, with all its fields."""


@dataclass(eq=False)
class Made(Root):
    """A tensor that the function makes."""

    step: Step = None  # type: ignore[assignment]
    #: Whether it is one whatever passes follow; what an operator makes may become a constant, or
    #: one with what an equal operator makes.
    certain: bool = True

    @property
    def foreign(self) -> bool:
        """Whether it escapes."""
        return self.escaped


@dataclass(eq=False)
class Allocation(Made):
    """One `builtin.alloc_tensor`."""

    @property
    def call(self) -> Any:
        """The call that allocates."""
        return self.step.value

    @property
    def scope(self) -> str:
        """The memory scope that it is allocated in."""
        return str(self.call.args[3].value)

    @property
    def name(self) -> str:
        """The name of its variable."""
        return str(self.step.var.name)


#: The roots of a value, or of each field of a tuple.
Value: TypeAlias = "frozenset[Root] | tuple[Value, ...]"
NOTHING: frozenset[Root] = frozenset()
#: By the address of a variable, which the function keeps where it is: hashing it is slow.
Values: TypeAlias = "dict[int, Value]"
CONSTANTS = 0  #: no variable is there; all constants have one value
VARIABLES = frozenset((tvm.ir.Var, relax.DataflowVar))


@dataclass
class Facts:
    """What is known of one function."""

    program: Program
    parameters: list[Parameter]
    allocations: list[Allocation]
    values: Values
    result: Value
    outside: Root  #: what was there before and is no parameter: constants, what callees return
    collectives: list[Step]  #: in the order of the program

    def roots(self, expr: relax.Expr, path: tuple[int, ...] = ()) -> frozenset[Root]:
        """Return what the value of an argument may lie in, or the field that a path leads to."""
        value = value_of(self.values, expr)
        for index in path:
            value = value[index] if isinstance(value, tuple) else value
        return frozenset(leaves(value))

    def may_be_same(self, one: relax.Expr, other: relax.Expr) -> bool:
        """Whether two values, or fields of them, may be the same memory."""
        roots, others = self.roots(one), self.roots(other)
        if not roots.isdisjoint(others):
            return True
        return any(root.foreign for root in roots) and any(root.foreign for root in others)

    def may_overwrite(self, expr: relax.Expr, step: Step) -> bool:
        """Whether a value is memory of this function that nobody looks at after a step."""
        roots = self.roots(expr)
        return bool(roots) and all(
            isinstance(root, Made) and root.certain and _ends_by(root, step) for root in roots
        )

    def scope(self, expr: relax.Expr) -> str | None:
        """Return the memory scope that a value is known to be in."""
        roots = self.roots(expr)
        scopes = {root.scope if isinstance(root, Allocation) else None for root in roots}
        return scopes.pop() if len(scopes) == 1 else None


def _ends_by(root: Made, step: Step) -> bool:
    if root.kept is not None or root.returned:
        return False
    return all(use.event <= step.index or exclusive(use.region, step.region) for use in root.uses)


def leaves(value: Value) -> Iterator[Root]:
    """Yield the roots of a value and of all its fields."""
    if isinstance(value, tuple):
        for part in value:
            yield from leaves(part)
    else:
        yield from value


def value_of(values: Values, expr: relax.Expr) -> Value:
    """Return what an expression that makes nothing may be."""
    kind = type(expr)
    if kind in VARIABLES:
        return values.get(expr.__chandle__(), NOTHING)
    if kind is relax.Tuple:
        return tuple(value_of(values, part) for part in expr.fields[:])
    if kind is relax.TupleGetItem:
        value = value_of(values, expr.tuple_value)
        return value[int(expr.index)] if isinstance(value, tuple) else value
    if kind is relax.Call:  # not in normal form
        parts = [value_of(values, part) for part in expr.args[:]]
        return frozenset(leaves((*parts, values[CONSTANTS])))
    if kind is tvm.ir.GenericConst and type(expr.ty) is relax.TensorType:
        return values[CONSTANTS]
    return NOTHING


def join(one: Value, other: Value) -> Value:
    """Return the value that is one or the other."""
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        return tuple(join(a, b) for a, b in zip(one, other, strict=True))
    return frozenset(leaves(one)) | frozenset(leaves(other))


def made(step: Step, ty: Any, *, certain: bool = True) -> Value:
    """Return new tensors for a type."""
    if isinstance(ty, relax.TupleType):
        return tuple(made(step, part, certain=certain) for part in ty.fields)
    return frozenset((Made(step=step, certain=certain),)) if holds_tensor(ty) else NOTHING


def holds_tensor(ty: Any) -> bool:
    """Whether a value of the type may be a tensor or contain one."""
    if isinstance(ty, relax.TupleType):
        return any(holds_tensor(part) for part in ty.fields)
    return not isinstance(ty, (relax.ShapeType, tvm.ir.PrimType))
