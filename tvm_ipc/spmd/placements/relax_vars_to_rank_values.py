# SPDX-License-Identifier: Apache-2.0
"""The values that the variables of a global program have on one rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, TypeAlias

import tvm
from tvm import relax, tirx

from tvm_ipc.analysis.collective_calls import name_of as name_of_operand
from tvm_ipc.comm import Mesh, Replica
from tvm_ipc.comm.placements import Placements, format_placements
from tvm_ipc.errors import TransformError
from tvm_ipc.spmd.placements.placed_tensor import PlacedTensor
from tvm_ipc.spmd.placements.redistribute import NAME, Redistribution, is_bindable
from tvm_ipc.spmd.rules.primfunc import PrimFuncAxes


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
    meshes : the meshes of its placements.
    mesh : the mesh of the call that is being lowered.
    module : the module with the functions that it calls.
    builder : builds the function that one rank runs.
    moves : emits the collectives that move tensors between ranks.
    replicas : the placements of a replicated tensor.
    """

    def __init__(self, name: str, meshes: Sequence[Mesh], module: tvm.IRModule) -> None:
        self.name, self.meshes, self.module = name, meshes, module
        self.builder = relax.BlockBuilder()
        self._moves = {mesh: Redistribution(self.builder, mesh, name) for mesh in meshes}
        self._values: dict[relax.Var, RankValue] = {}
        #: PrimFuncs that are compiled for the extents of shards, by their names and extents.
        self._primfuncs: dict[tuple[str, str], tvm.ir.GlobalVar] = {}
        self.select(None)

    def select(self, mesh: Mesh | None) -> None:
        """Lower what follows on a mesh; None for values that every rank has."""
        self._on_every_rank = mesh is None
        self.mesh = self.meshes[0] if mesh is None else mesh
        self.moves = self._moves[self.mesh]
        self.replicas: Placements = (Replica(),) * len(self.mesh.axes)

    def select_for(self, operands: Iterable[relax.Expr]) -> None:
        """Lower what follows on the mesh of some operands.

        A sharded operand determines it. Otherwise it is the mesh with the fewest ranks.
        """
        tensors = [tensor for x in operands for tensor in _tensors_in(self.held(x))]
        placed = [tensor for tensor in tensors if tensor.mesh is not None]
        first = min(
            placed, key=lambda x: (x.replicated, len(x.mesh.ranks) if x.mesh else 0), default=None
        )
        self.select(None if first is None else first.mesh)

    def end_block(self) -> None:
        """Forget the cached variables of the block that ends."""
        for moves in self._moves.values():
            moves.end_block()

    def __setitem__(self, variable: relax.Var, value: RankValue) -> None:
        """Set the value of a variable on the rank."""
        self._values[variable] = value

    def held(self, expr: relax.Expr) -> RankValue:
        """Return the value of an argument on one rank, which may be on any mesh."""
        if isinstance(expr, relax.Tuple):
            return tuple(map(self.held, expr.fields))
        if isinstance(expr, relax.TupleGetItem):
            fields, index = self.held(expr.tuple_value), int(expr.index)
            if isinstance(fields, tuple):
                field: RankValue = fields[index]
                return field
            return self.uniform(relax.TupleGetItem(fields.value, index))
        if isinstance(expr, relax.Var) and expr in self._values:
            return self._values[expr]
        return self.uniform(expr)

    def lookup(self, expr: relax.Expr) -> RankValue:
        """Return the value of an argument on one rank of the selected mesh."""
        return self._on_mesh(self.held(expr), expr)

    def _on_mesh(self, value: RankValue, expr: relax.Expr) -> RankValue:
        """Return a value whose tensors are placed on the selected mesh."""
        if isinstance(value, tuple):
            return tuple(self._on_mesh(field, expr) for field in value)
        if not isinstance(value, PlacedTensor) or value.mesh == self.mesh:
            return value
        if value.mesh is None:
            return replace(value, placements=self.replicas)
        if not value.replicated or not set(self.mesh.ranks) <= set(value.mesh.ranks):
            raise self.error(
                f"{name_of(expr)} is {format_placements(value.mesh, value.placements)} on "
                f"{value.mesh}, but another operand is on {self.mesh}; place it on that mesh before"
            )
        return replace(value, placements=self.replicas, mesh=self.mesh)

    def tensor(self, expr: relax.Expr) -> PlacedTensor:
        """Return the value of an argument that is a tensor."""
        value = self.lookup(expr)
        assert isinstance(value, PlacedTensor), f"{expr} has the type of a tensor"
        return value

    def uniform(self, value: relax.Expr) -> RankValue:
        """Return a value that is the same on every rank."""
        value = self.builder.normalize(value)
        if isinstance(value.ty, relax.TensorType):
            mesh = None if self._on_every_rank else self.mesh
            return PlacedTensor(value, value.ty, self.replicas, mesh=mesh)
        return UniformValue(value)

    def primfunc_of_rank(
        self, name: str, function: tirx.PrimFunc, shapes: Sequence[Sequence[Any]]
    ) -> tvm.ir.GlobalVar:
        """Return the variable of a PrimFunc for the extents of shards, which is added once.

        Parameters
        ----------
        name : the name of the PrimFunc for whole tensors.
        function : that PrimFunc.
        shapes : the extents of the shards.
        """
        key = name, str([[str(extent) for extent in shape] for shape in shapes])
        if key not in self._primfuncs:
            local = PrimFuncAxes(function).for_extents(shapes)
            taken = {str(variable.name_hint) for variable in self.module.get_global_vars()}
            taken |= {str(variable.name_hint) for variable in self._primfuncs.values()}
            names = (f"{name}_of_rank{k or ''}" for k in count())
            of_rank = next(each for each in names if each not in taken)
            if "global_symbol" in (local.attrs or {}):
                local = local.with_attr("global_symbol", of_rank)
            self._primfuncs[key] = self.builder.add_func(local, of_rank)
        return self._primfuncs[key]

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
    if isinstance(expr, relax.TupleGetItem):
        return f"{name_of(expr.tuple_value)}[{expr.index}]"
    return name_of_operand(expr)
