# SPDX-License-Identifier: Apache-2.0
"""Placements of key-value caches: each rank keeps the keys and values of its own heads.

    decode(ids, past (1, 2, n, w), weights...) -> logits, (1, 2, n + 1, w)

If the weights of keys are sharded by heads, axis 1 of `past` and of the second result is the axis
of heads, and is sharded in the same way. Otherwise each call would gather and split the caches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches

from tvm import relax

from tvm_ipc import arguments
from tvm_ipc.analysis.resolve_variables import expanded, leaves_of, values_of
from tvm_ipc.analysis.walk_and_rewrite_bindings import rewrite, with_value
from tvm_ipc.comm import Mesh, Placement, Replica, Shard
from tvm_ipc.comm.collective_relax_op import extents
from tvm_ipc.comm.extent_arithmetic import constant
from tvm_ipc.comm.place_op import is_place
from tvm_ipc.comm.placements import Placements
from tvm_ipc.spmd.axis_relation_graph import Axes, Node
from tvm_ipc.spmd.placements.place_calls import place_typed
from tvm_ipc.spmd.plan_parser import matches
from tvm_ipc.spmd.rules.axis_label_rule import shard
from tvm_ipc.spmd.weight_divisions_from_heads_and_slices import ShardedAxes


def names_of_caches(caches: object, inputs: Sequence[str]) -> list[str]:
    """Return the names of the inputs that some patterns match."""
    patterns = arguments.texts(
        "parallelize: caches", caches, "names of inputs, or patterns of them"
    )
    matched: dict[str, None] = {}
    for pattern in patterns:
        names = [name for name in inputs if matches(pattern, name)]
        if not names:
            near = get_close_matches(pattern, inputs)
            hint = arguments.similar(near) if near else arguments.listed("input", inputs)
            raise ValueError(
                f"parallelize: caches: {pattern!r} matches no input; {hint}; caches is "
                f"{arguments.quote(list(patterns))}"
            )
        matched.update(dict.fromkeys(names))
    return list(matched)


class Caches:
    """The placements of caches, and of the results that are computed from them.

    Parameters
    ----------
    axes : the axes of the program.
    mesh : the mesh of the placements.
    sharded : for each axis of the mesh, the axes of the program that it shards.
    variables : the variables of the caches, by name.
    """

    def __init__(
        self,
        axes: Axes,
        mesh: Mesh,
        sharded: Sequence[ShardedAxes],
        variables: Mapping[str, Sequence[relax.Var]],
    ) -> None:
        self.axes, self.mesh, self.sharded = axes, mesh, sharded
        #: The axes of caches, by which results that are computed from them are recognized.
        self.cache_axes = {
            (int(var.ty.ndim), axis, node)
            for of_cache in variables.values()
            for var in of_cache
            for axis, node in enumerate(self._nodes(var))
        }
        #: The placements of caches, by name.
        self.placements = {
            name: self._placements_of(of_cache[0]) for name, of_cache in variables.items()
        }

    def _nodes(self, var: relax.Var) -> list[Node]:
        return [self.axes.of((var, (), axis)) for axis in range(int(var.ty.ndim))]

    def _has_axis_of_caches(self, var: relax.Var) -> bool:
        nodes = enumerate(self._nodes(var))
        return any((int(var.ty.ndim), axis, node) in self.cache_axes for axis, node in nodes)

    def _placements_of(self, var: relax.Var) -> Placements:
        dims = extents(var.ty) or []
        placements: list[Placement] = []
        taken: set[int] = set()
        for divisions, workers in zip(self.sharded, self.mesh.axes.values(), strict=True):
            placement: Placement = Replica()
            for axis, node in enumerate(self._nodes(var)):
                if node not in divisions or axis in taken:
                    continue
                division = divisions[node]
                if division is None or division.extent == constant(dims[axis]):
                    placement = shard(axis, division, workers)
                    taken.add(axis)
                    break
            placements.append(placement)
        return tuple(placements)

    def with_placed_results(self, function: relax.Function) -> relax.Function:
        """Return the function with results of caches placed in the same way as the caches."""
        result_placements = {}
        for var in leaves_of(expanded(function.body.body, values_of(function))):
            if not isinstance(var, relax.Var) or not isinstance(var.ty, relax.TensorType):
                continue
            if self._has_axis_of_caches(var):
                placements = self._placements_of(var)
                if any(isinstance(placement, Shard) for placement in placements):
                    result_placements[var] = placements

        def change(binding: relax.Binding, value: relax.Expr) -> list[relax.Binding] | None:
            # The program's own placement of a result takes precedence.
            placements = None if is_place(value) else result_placements.get(binding.var)
            if placements is None or not isinstance(binding, relax.VarBinding):
                return None
            computed = type(binding.var)(f"{binding.var.name}_made", binding.var.ty)
            placed = place_typed(computed, self.mesh, placements)
            return [relax.VarBinding(computed, value), with_value(binding, placed)]

        return rewrite(function, change)
