# SPDX-License-Identifier: Apache-2.0
"""Keys and values that are inputs and results: a rank keeps those of the heads that it has.

    decode(ids, past (1, 2, n, w), weights...) -> logits, (1, 2, n + 1, w)

Where the weights of keys are divided by heads, axis 1 of `past` and of the second result is the
same axis, and is divided alike. Otherwise they would be gathered after each call, and cut again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from tvm import relax

from tvm_ipc import arguments
from tvm_ipc.comm import Mesh, Placement, Replica, Shard, place
from tvm_ipc.comm.extents import constant
from tvm_ipc.comm.operator import extents
from tvm_ipc.comm.placements import Placements
from tvm_ipc.parallel.axes import Axes, Node
from tvm_ipc.parallel.divisions import Divided
from tvm_ipc.parallel.plan import matches
from tvm_ipc.transform.ir.rewrite import rewrite, typed, with_value
from tvm_ipc.transform.rules.rule import shard


def names_of_caches(caches: object, inputs: Sequence[str]) -> list[str]:
    """Return the names of inputs that some patterns mean."""
    wanted = "names of inputs, or patterns of them"
    if isinstance(caches, str) or not isinstance(caches, Iterable):
        raise arguments.wrong_type("parallelize: caches", wanted, caches)
    patterns = list(caches)
    if not all(isinstance(one, str) for one in patterns):
        raise arguments.wrong_type("parallelize: caches", wanted, patterns)
    found: dict[str, None] = {}
    for pattern in patterns:
        names = [name for name in inputs if matches(pattern, name)]
        if not names:
            near = ", ".join(map(repr, get_close_matches(pattern, inputs) or inputs[:5]))
            raise ValueError(
                f"parallelize: caches: {pattern!r} is the name of no input; there are {near}; "
                f"caches is {arguments.show(patterns)}"
            )
        found.update(dict.fromkeys(names))
    return list(found)


class Caches:
    """Where caches lie, and results that are made of them.

    Parameters
    ----------
    axes : of the program.
    mesh : of the placements.
    divided : for each axis of the mesh, how it divides axes of the program.
    variables : of the caches, by their names.
    """

    def __init__(
        self,
        axes: Axes,
        mesh: Mesh,
        divided: Sequence[Divided],
        variables: Mapping[str, Sequence[relax.Var]],
    ) -> None:
        self.axes, self.mesh, self.divided = axes, mesh, divided
        #: Places and axes of caches, by which results that are made of them are known.
        self.known = {
            (int(var.ty.ndim), axis, node)
            for of in variables.values()
            for var in of
            for axis, node in enumerate(self._nodes(var))
        }
        #: Where caches lie, by name.
        self.placements = {name: self._where(of[0]) for name, of in variables.items()}

    def _nodes(self, var: relax.Var) -> list[Node]:
        return [self.axes.of((var, (), axis)) for axis in range(int(var.ty.ndim))]

    def _is_made_of_caches(self, var: relax.Var) -> bool:
        nodes = enumerate(self._nodes(var))
        return any((int(var.ty.ndim), axis, node) in self.known for axis, node in nodes)

    def _where(self, var: relax.Var) -> Placements:
        dims = extents(var.ty) or []
        found: list[Placement] = []
        taken: set[int] = set()
        for along, workers in zip(self.divided, self.mesh.axes.values(), strict=True):
            one: Placement = Replica()
            for axis, node in enumerate(self._nodes(var)):
                if node not in along or axis in taken:
                    continue
                division = along[node]
                if division is None or division.extent == constant(dims[axis]):
                    one = shard(axis, division, workers)
                    taken.add(axis)
                    break
            found.append(one)
        return tuple(found)

    def with_results(self, function: relax.Function) -> relax.Function:
        """Return the function with results that are made of caches where these are."""
        wanted = {}
        for var in _results(function):
            if not isinstance(var.ty, relax.TensorType) or var in set(function.params):
                continue
            if self._is_made_of_caches(var):
                where = self._where(var)
                if any(isinstance(one, Shard) for one in where):
                    wanted[var] = where

        def change(binding: relax.Binding, value: relax.Expr) -> list[relax.Binding] | None:
            where = wanted.get(binding.var)
            if where is None or not isinstance(binding, relax.VarBinding):
                return None
            made = type(binding.var)(f"{binding.var.name}_made", binding.var.ty)
            placed = place(made, self.mesh, dict(zip(self.mesh.axes, where, strict=True)))
            call = typed(placed, binding.var.ty)
            return [relax.VarBinding(made, value), with_value(binding, call)]

        return rewrite(function, change)


def _results(function: relax.Function) -> list[relax.Var]:
    """Return the variables that a function returns, also those in tuples."""
    values: dict[relax.Var, Any] = {}
    for block in function.body.blocks:
        values.update((one.var, one.value) for one in block.bindings)
    found: list[relax.Var] = []

    def visit(x: relax.Expr) -> None:
        if isinstance(x, relax.Tuple):
            for field in x.fields:
                visit(field)
        elif isinstance(x, relax.Var):
            value = values.get(x)
            if isinstance(value, (relax.Tuple, relax.Var)):
                visit(value)
            else:
                found.append(x)

    visit(function.body.body)
    return found
