# SPDX-License-Identifier: Apache-2.0
"""A call as rules see it: its name, the tensors that it is given, and those that it gives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import tvm
from tvm import relax

from tvm_ipc.comm.extents import constant
from tvm_ipc.comm.operator import dtype_of, extents, same_extents
from tvm_ipc.transform.rules.rule import Labels

#: How the names of operators begin.
OPERATORS: Final = "relax."
#: Operators that call something else, which their first argument names.
_CALLING: Final = ("call_tir", "call_dps_packed", "call_pure_packed")


@dataclass(frozen=True)
class Operation:
    """A call.

    Attributes
    ----------
    name : of the operator, as programs have it after `R.`, or of the function that is called.
    call : itself.
    operands : the types of the tensors that it is given, also of those in tuples.
    results : the types of those that it gives.
    """

    name: str
    call: relax.Call
    operands: tuple[relax.TensorType, ...]
    results: tuple[relax.TensorType, ...]

    @property
    def declared_as(self) -> str:
        """The name under which users declare a rule."""
        if callee_of(self.call) is None:
            return str(self.call.op.name)
        return self.name

    @property
    def attrs(self) -> Any:
        """The attributes of the call."""
        return self.call.attrs

    def dims(self, operand: int = 0) -> list[Any]:
        """Return the extents of an operand."""
        return extents(self.operands[operand]) or []

    def ndim(self, operand: int = 0) -> int:
        """Return how many axes an operand has."""
        return int(self.operands[operand].ndim)

    def made(self, result: int = 0) -> list[Any]:
        """Return the extents of a result."""
        return extents(self.results[result]) or []

    def dtype(self, result: int = 0) -> str:
        """Return the type of the elements of a result."""
        return dtype_of(self.results[result])


def short_name(call: relax.Call) -> str:
    """Return the name of an operator as programs have it after `R.`, "" for other callees."""
    return str(call.op.name).removeprefix(OPERATORS) if isinstance(call.op, tvm.ir.Op) else ""


def callee_of(call: relax.Call) -> relax.Expr | None:
    """Return the function that a call calls, None if that is an operator."""
    if short_name(call) in _CALLING:
        return call.args[0]
    return None if isinstance(call.op, tvm.ir.Op) else call.op


def name_of_callee(callee: relax.Expr) -> str:
    """Return the name of a function that is called, "" where it has none."""
    if isinstance(callee, relax.ExternFunc):
        return str(callee.global_symbol)
    return str(callee.name_hint) if isinstance(callee, tvm.ir.GlobalVar) else ""


def shown(call: relax.Call) -> str:
    """Return a call as messages show it."""
    callee = callee_of(call)
    name = short_name(call)
    if callee is None:
        return f"R.{name}"
    called = repr(name_of_callee(callee)) if name_of_callee(callee) else str(callee)
    return f"R.{name} of {called}" if name else called


def operation_of(call: relax.Call, result: relax.Type) -> Operation | None:
    """Return a call as rules see it, None where an extent is not known."""
    callee = callee_of(call)
    name = short_name(call) if callee is None else name_of_callee(callee)
    operands = tuple(ty for x in call.args for ty in tensor_types(x.ty))
    results = tuple(tensor_types(result))
    if not results or any(extents(ty) is None for ty in (*operands, *results)):
        return None
    return Operation(name, call, operands, results)


def tensor_types(ty: relax.Type) -> Iterator[relax.TensorType]:
    """Return the types of tensors in a type."""
    if isinstance(ty, relax.TensorType):
        yield ty
    elif isinstance(ty, relax.TupleType):
        for field in ty.fields:
            yield from tensor_types(field)


def axis_of(axis: Any, ndim: int) -> int:
    """Return an axis from 0 on."""
    return int(axis) % ndim if ndim else 0


def axes_of(axes: Any, ndim: int) -> tuple[int, ...]:
    """Return axes from 0 on; all of them for None."""
    if axes is None:
        return tuple(range(ndim))
    return tuple(axis_of(axis, ndim) for axis in axes)


def aligned(dims: Sequence[Any], result: Sequence[Any], first: int = 0) -> Labels:
    """Return the labels of an operand whose last axes are those of the result.

    The axes of the result have their numbers as labels, from `first` on.
    """
    offset = len(result) - len(dims)
    return tuple(
        None if constant(extent) == 1 != constant(result[offset + axis]) else first + offset + axis
        for axis, extent in enumerate(dims)
    )


def same(one: Any, other: Any) -> bool:
    """Whether it is sure that extents are equal."""
    return same_extents([one], [other])
