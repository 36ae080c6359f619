# SPDX-License-Identifier: Apache-2.0
"""What the variables of a program for all ranks are for one rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import tvm
from tvm import relax

from tvm_ipc.comm import Mesh, Replica
from tvm_ipc.comm.placements import Placements, show
from tvm_ipc.errors import TransformError
from tvm_ipc.transform.ir.collectives import name_of as name_of_operand
from tvm_ipc.transform.placements.placed import Placed
from tvm_ipc.transform.placements.redistribute import NAME, Redistribution, is_bindable


@dataclass(frozen=True)
class Same:
    """What every rank has alike and is no tensor, such as a shape."""

    value: relax.Expr


#: What a variable of the program is for a rank.
Found: TypeAlias = "Placed | Same | tuple[Any, ...]"


class RankValues:
    """The variables of one function.

    Attributes
    ----------
    name : of the function.
    mesh : of its placements.
    module : that has the functions that it calls.
    builder : of the function that one rank runs.
    moves : what moves tensors between ranks.
    replicas : the placement of what every rank has.
    """

    def __init__(self, name: str, mesh: Mesh, module: tvm.IRModule) -> None:
        self.name, self.mesh, self.module = name, mesh, module
        self.builder = relax.BlockBuilder()
        self.moves = Redistribution(self.builder, mesh, name)
        self.replicas: Placements = (Replica(),) * len(mesh.axes)
        self._found: dict[relax.Var, Found] = {}

    def __setitem__(self, variable: relax.Var, found: Found) -> None:
        self._found[variable] = found

    def lookup(self, expr: relax.Expr) -> Found:
        """Return what an argument of the program is for a rank."""
        if isinstance(expr, relax.Tuple):
            return tuple(map(self.lookup, expr.fields))
        if isinstance(expr, relax.Var) and expr in self._found:
            return self._found[expr]
        return self.classified(expr)

    def tensor(self, expr: relax.Expr) -> Placed:
        """Return what an argument that is a tensor is for a rank."""
        found = self.lookup(expr)
        assert isinstance(found, Placed), f"{expr} has the type of a tensor"
        return found

    def fields(self, expr: relax.Expr) -> Sequence[Found]:
        """Return what the fields of an argument that is a tuple are for a rank."""
        found = self.lookup(expr)
        if isinstance(found, tuple):
            return found
        return [
            self.classified(relax.TupleGetItem(found.value, k)) for k in range(len(expr.ty.fields))
        ]

    def classified(self, value: relax.Expr) -> Found:
        """Return what every rank has alike."""
        value = self.builder.normalize(value)
        if isinstance(value.ty, relax.TensorType):
            return Placed(value, value.ty, self.replicas)
        return Same(value)

    def as_argument(self, found: Found) -> relax.Expr:
        """Return what is found as an argument of a call."""
        if isinstance(found, tuple):
            return relax.Tuple([self.as_argument(one) for one in found])
        return self.moves.bound(found.value)

    def whole(self, expr: relax.Expr, where: str) -> relax.Expr:
        """Return an argument of which every rank has all."""
        found = self.lookup(expr)
        for one in _placed_in(found):
            if not one.replicated:
                raise self.error(
                    f"{where} works on whole tensors, and of {name_of(expr)} one is "
                    f"{show(self.mesh, one.placements)}; place it as comm.Replica() before"
                )
        return self.as_argument(found)

    def error(self, text: str) -> TransformError:
        """Return an error of the function."""
        return TransformError(f"{NAME}: function {self.name!r}: {text}")

    def bound(self, found: Found, name: str) -> Found:
        """Return what is found, with a variable of its own where it needs one."""
        if isinstance(found, tuple) or not is_bindable(found.value):
            return found
        return replace(found, value=self.builder.emit(found.value, name))


def _placed_in(found: Found) -> Iterator[Placed]:
    if isinstance(found, tuple):
        for one in found:
            yield from _placed_in(one)
    elif isinstance(found, Placed):
        yield found


def name_of(expr: relax.Expr) -> str:
    """Return what messages call an argument."""
    if isinstance(expr, relax.Tuple):
        return f"({', '.join(map(name_of, expr.fields))})"
    return name_of_operand(expr)
