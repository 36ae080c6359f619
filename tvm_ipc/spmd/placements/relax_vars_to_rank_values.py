# SPDX-License-Identifier: Apache-2.0
"""The values that the variables of a global program have on one rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import tvm
from tvm import relax

from tvm_ipc.analysis.collective_calls import name_of as name_of_operand
from tvm_ipc.comm import Mesh, Replica
from tvm_ipc.comm.placements import Placements, format_placements
from tvm_ipc.errors import TransformError
from tvm_ipc.spmd.placements.placed_tensor import PlacedTensor
from tvm_ipc.spmd.placements.redistribute import NAME, Redistribution, is_bindable


@dataclass(frozen=True, eq=False)
class UniformValue:
    """A value other than a tensor, such as a shape, which is the same on every rank."""

    value: relax.Expr


#: The value of a variable on one rank; a tuple has one for each field.
RankValue: TypeAlias = "PlacedTensor | UniformValue | tuple[Any, ...]"


class RankValues:
    """The values of the variables of one function.

    Attributes
    ----------
    name : the name of the function.
    mesh : the mesh of its placements.
    module : the module with the functions that it calls.
    builder : builds the function that one rank runs.
    moves : emits the collectives that move tensors between ranks.
    replicas : the placements of a replicated tensor.
    """

    def __init__(self, name: str, mesh: Mesh, module: tvm.IRModule) -> None:
        self.name, self.mesh, self.module = name, mesh, module
        self.builder = relax.BlockBuilder()
        self.moves = Redistribution(self.builder, mesh, name)
        self.replicas: Placements = (Replica(),) * len(mesh.axes)
        self._values: dict[relax.Var, RankValue] = {}

    def __setitem__(self, variable: relax.Var, value: RankValue) -> None:
        """Set the value of a variable on the rank."""
        self._values[variable] = value

    def lookup(self, expr: relax.Expr) -> RankValue:
        """Return the value of an argument on one rank."""
        if isinstance(expr, relax.Tuple):
            return tuple(map(self.lookup, expr.fields))
        if isinstance(expr, relax.Var) and expr in self._values:
            return self._values[expr]
        return self.uniform(expr)

    def tensor(self, expr: relax.Expr) -> PlacedTensor:
        """Return the value of an argument that is a tensor."""
        value = self.lookup(expr)
        assert isinstance(value, PlacedTensor), f"{expr} has the type of a tensor"
        return value

    def fields(self, expr: relax.Expr) -> Sequence[RankValue]:
        """Return the values of the fields of an argument that is a tuple."""
        value = self.lookup(expr)
        if isinstance(value, tuple):
            return value
        return [
            self.uniform(relax.TupleGetItem(value.value, k)) for k in range(len(expr.ty.fields))
        ]

    def uniform(self, value: relax.Expr) -> RankValue:
        """Return a value that is the same on every rank."""
        value = self.builder.normalize(value)
        if isinstance(value.ty, relax.TensorType):
            return PlacedTensor(value, value.ty, self.replicas)
        return UniformValue(value)

    def as_argument(self, value: RankValue) -> relax.Expr:
        """Return a value in a form that can be an argument of a call."""
        if isinstance(value, tuple):
            return relax.Tuple([self.as_argument(field) for field in value])
        return self.moves.bound(value.value)

    def whole(self, expr: relax.Expr, where: str) -> relax.Expr:
        """Return an argument whose tensors must all be replicated."""
        value = self.lookup(expr)
        for tensor in _tensors_in(value):
            if not tensor.replicated:
                raise self.error(
                    f"{where} needs whole tensors, but {name_of(expr)} has one that is "
                    f"{format_placements(self.mesh, tensor.placements)}; place it as "
                    "comm.Replica() before"
                )
        return self.as_argument(value)

    def error(self, text: str) -> TransformError:
        """Return an error that names the pass and the function."""
        return TransformError(f"{NAME}: function {self.name!r}: {text}")

    def bound(self, value: RankValue, name: str) -> RankValue:
        """Return the value, bound to a variable if it is a call."""
        if isinstance(value, tuple) or not is_bindable(value.value):
            return value
        return replace(value, value=self.builder.emit(value.value, name))


def _tensors_in(value: RankValue) -> Iterator[PlacedTensor]:
    if isinstance(value, tuple):
        for field in value:
            yield from _tensors_in(field)
    elif isinstance(value, PlacedTensor):
        yield value


def name_of(expr: relax.Expr) -> str:
    """Return the name of an argument for messages."""
    if isinstance(expr, relax.Tuple):
        return f"({', '.join(map(name_of, expr.fields))})"
    return name_of_operand(expr)
