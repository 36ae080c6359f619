# SPDX-License-Identifier: Apache-2.0
"""Calls in the form that sharding rules read: the name, the operand types and the result types."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import tvm
from tvm import relax

from tvm_ipc.analysis.ffi_arrays import as_list
from tvm_ipc.analysis.resolve_variables import Values
from tvm_ipc.analysis.views_and_writes_of_calls import operator_of
from tvm_ipc.comm.collective_relax_op import dtype_of, extents, same_extents
from tvm_ipc.comm.extent_arithmetic import constant
from tvm_ipc.spmd.rules.axis_label_rule import Labels

#: The prefix of the names of Relax operators.
OPERATORS: Final = "relax."
#: Operators that call the function in their first argument.
_CALLING: Final = ("call_tir", "call_dps_packed", "call_pure_packed")


@dataclass(frozen=True, eq=False)
class Operation:
    """A call with the types of its tensors.

    Attributes
    ----------
    name : the name of the operator as TVMScript has it after `R.`, or of the called function.
    call : the call itself.
    callee : the function that is called, or None if it is an operator.
    operands : the types of the tensors among the arguments, including those in tuples.
    results : the types of the tensors that it returns.
    """

    name: str
    call: relax.Call
    callee: relax.Expr | None
    operands: tuple[relax.TensorType, ...]
    results: tuple[relax.TensorType, ...]

    @property
    def declared_as(self) -> str:
        """Return the name under which users declare a rule."""
        return str(self.call.op.name) if self.callee is None else self.name

    @property
    def operator(self) -> str:
        """Return the name of the operator, or "" for a call of a function of any name."""
        return self.name if self.callee is None else ""

    @property
    def attrs(self) -> Any:
        """Return the attributes of the call."""
        return self.call.attrs

    def dims(self, operand: int = 0) -> list[Any]:
        """Return the extents of an operand."""
        return extents(self.operands[operand]) or []

    def ndim(self, operand: int = 0) -> int:
        """Return how many axes an operand has."""
        return int(self.operands[operand].ndim)

    @property
    def labels(self) -> tuple[int, ...]:
        """Return a label for each axis of the first operand."""
        return tuple(range(self.ndim()))

    @property
    def axis(self) -> int:
        """Return the attribute `axis` as a number that counts from 0."""
        return axis_of(self.attrs.axis, self.ndim())

    def result_dims(self, result: int = 0) -> list[Any]:
        """Return the extents of a result."""
        return extents(self.results[result]) or []

    def dtype(self, result: int = 0) -> str:
        """Return the element type of a result."""
        return dtype_of(self.results[result])


def short_name(call: relax.Expr) -> str:
    """Return the name of an operator as TVMScript has it after `R.`, "" for other values."""
    return operator_of(call).removeprefix(OPERATORS)


def callee_of(call: relax.Call) -> relax.Expr | None:
    """Return the function that is called, or None if it is an operator."""
    if short_name(call) in _CALLING:
        return call.args[0]
    return None if isinstance(call.op, tvm.ir.Op) else call.op


def name_of_callee(callee: relax.Expr) -> str:
    """Return the name of a called function, or "" if it has none."""
    if isinstance(callee, relax.ExternFunc):
        return str(callee.global_symbol)
    return str(callee.name_hint) if isinstance(callee, tvm.ir.GlobalVar) else ""


def format_callee(call: relax.Call) -> str:
    """Return the name of the operator or function that is called, for messages."""
    callee = callee_of(call)
    name = short_name(call)
    if callee is None:
        return f"R.{name}"
    callee_text = repr(name_of_callee(callee)) if name_of_callee(callee) else str(callee)
    return f"R.{name} of {callee_text}" if name else callee_text


def operation_of(call: relax.Call, result: relax.Type) -> Operation | None:
    """Return a call in the form that rules read, or None if an extent is unknown."""
    callee = callee_of(call)
    name = short_name(call) if callee is None else name_of_callee(callee)
    operands = tuple(ty for x in as_list(call.args) for ty in tensor_types(x.ty))
    results = tuple(tensor_types(result))
    if not results or any(_has_unknown_extents(ty) for ty in (*operands, *results)):
        return None
    return Operation(name, call, callee, operands, results)


def _has_unknown_extents(ty: relax.TensorType) -> bool:
    return ty.shape is None or ty.shape.ty is None or ty.shape.ty.values is None


def tensor_types(ty: relax.Type) -> Iterator[relax.TensorType]:
    """Yield the tensor types within a type."""
    if isinstance(ty, relax.TensorType):
        yield ty
    elif isinstance(ty, relax.TupleType):
        for field in as_list(ty.fields):
            yield from tensor_types(field)


def tensors_among(arguments: Sequence[relax.Expr]) -> Iterator[relax.Expr]:
    """Yield the tensors among arguments, including those in tuples."""
    for argument in arguments:
        if isinstance(argument.ty, relax.TupleType):
            yield from tensors_among(_fields(argument))
        elif isinstance(argument.ty, relax.TensorType):
            yield argument


def replace_tensors(
    argument: relax.Expr,
    tensors: Iterator[relax.Expr],
    other: Callable[[relax.Expr], relax.Expr] = lambda x: x,
) -> relax.Expr:
    """Return an argument with each of its tensors replaced by the next one of an iterator.

    Parameters
    ----------
    argument : the argument.
    tensors : the tensors, in the order of `tensors_among`.
    other : returns what replaces anything else.
    """
    if isinstance(argument.ty, relax.TupleType):
        return relax.Tuple([replace_tensors(x, tensors, other) for x in _fields(argument)])
    return next(tensors) if isinstance(argument.ty, relax.TensorType) else other(argument)


def _fields(argument: relax.Expr) -> list[relax.Expr]:
    if isinstance(argument, relax.Tuple):
        return list(argument.fields)
    return [relax.TupleGetItem(argument, k) for k in range(len(argument.ty.fields))]


def dims_of(x: relax.Expr) -> list[Any]:
    """Return the extents of a tensor, or an empty list if they are unknown."""
    return extents(x.ty) or []


def operand_of(values: Values, x: relax.Expr | None, *operators: str) -> Any:
    """Return the operand of a value that is a call of one of some operators, or None."""
    while isinstance(x, relax.Var) and x in values:
        x = values[x]
    return x.args[0] if isinstance(x, relax.Call) and short_name(x) in operators else None


def axis_of(axis: Any, ndim: int) -> int:
    """Return an axis as a number that counts from 0."""
    return int(axis) % ndim if ndim else 0


def axes_of(axes: Any, ndim: int) -> tuple[int, ...]:
    """Return axes as numbers that count from 0; None stands for all axes."""
    if axes is None:
        return tuple(range(ndim))
    return tuple(axis_of(axis, ndim) for axis in axes)


def aligned(dims: Sequence[Any], result: Sequence[Any], first: int = 0) -> Labels:
    """Return the labels of an operand that is broadcast to the result from the last axis.

    The labels of the result are consecutive numbers that begin with `first`.
    """
    offset = len(result) - len(dims)
    return tuple(
        None if constant(extent) == 1 != constant(result[offset + axis]) else first + offset + axis
        for axis, extent in enumerate(dims)
    )


def same(extent: Any, other: Any) -> bool:
    """Return whether two extents are provably equal."""
    return same_extents([extent], [other])
