# SPDX-License-Identifier: Apache-2.0
"""Inference of the divisions of weights with which later operators need no collectives.

    wq (24, h) -> q (n, 24) -> (n, 6, 4)        6 heads of 4 on 4 ranks: 6/4x4, at most 2 on a rank
    wk (8, h) -> k (n, 8) -> (n, 2, 4), each head repeated 3 times: 2 heads on 4 ranks are 2/2x4,
        each on two ranks, and the 6 heads of queries are 2/2x3/2x4: those of one head of keys
    qkv (40, h) -> (n, 40) -> slices of 24, 8, 8: 2/2x3/2x4+2/2x4+2/2x4

Among several possibilities the one with the fewest bytes on a rank is chosen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Any, Final, TypeAlias

from tvm_ipc.comm import Division, Mesh, Shard
from tvm_ipc.comm.axis_block_sharding import concatenated
from tvm_ipc.comm.extent_arithmetic import constant
from tvm_ipc.comm.placements import Placements
from tvm_ipc.spmd.axis_relation_graph import Axes, DerivedFrom, Node
from tvm_ipc.spmd.rules.axis_label_rule import shard
from tvm_ipc.transform.report import Decision

#: Slices of an axis are ignored if it has more than this.
_MAX_SLICES: Final = 64

#: The sharded axes of a program and their divisions; None for consecutive shards.
ShardedAxes: TypeAlias = dict[Node, Division | None]


def shard_axes_by_use(
    axes: Axes, mesh: Mesh, placed: Mapping[str, Placements], shapes: Mapping[str, Sequence[Any]]
) -> tuple[dict[str, Placements], list[ShardedAxes]]:
    """Return the placements of weights with the divisions that the program needs.

    The second result has the sharded axes of the program, for each axis of the mesh.

    Parameters
    ----------
    axes : the axes of the program.
    mesh : the mesh of the placements.
    placed : the placements that the plan specifies for weights.
    shapes : the shapes of the weights.
    """
    refined = {name: list(placements) for name, placements in placed.items()}
    sharded: list[ShardedAxes] = []
    for index, workers in enumerate(mesh.axes.values()):
        weight_axes = [
            (name, placement.axis)
            for name, placements in placed.items()
            if isinstance(placement := placements[index], Shard) and placement.division is None
            if all(constant(extent) for extent in shapes[name])
        ]
        inference = _DivisionInference(axes, workers, weight_axes, shapes)
        for name, axis in weight_axes:
            refined[name][index] = inference.shard(name, axis)
        sharded.append({**inference.divisions})
    return {name: tuple(placements) for name, placements in refined.items()}, sharded


def shard_axes_jointly(
    axes: Axes,
    workers: int,
    weight_axes: Sequence[tuple[str, int]],
    shapes: Mapping[str, Sequence[Any]],
) -> dict[tuple[str, int], Shard]:
    """Return the placement that shards each axis, if the axes used with it are sharded too.

    Parameters
    ----------
    axes : the axes of the program.
    workers : the number of ranks.
    weight_axes : names of weights, each with an axis.
    shapes : the shapes of the weights.
    """
    inference = _DivisionInference(axes, workers, weight_axes, shapes)
    return {(name, axis): inference.shard(name, axis) for name, axis in weight_axes}


def decisions_of(mesh: Mesh, placed: Mapping[str, Placements]) -> Iterator[Decision]:
    """Yield the reasons why shards of weights are not consecutive blocks."""
    for name, placements in placed.items():
        for placement, workers in zip(placements, mesh.axes.values(), strict=True):
            if not isinstance(placement, Shard) or placement.division is None:
                continue
            division, why = placement.division, []
            if len(division.segments) > 1:
                why.append("the program uses slices of it, and each slice is sharded on its own")
            if division.copies(workers) > 1:
                why.append(f"{division.copies(workers)} ranks have the same shard, as all need it")
            if division.padded:
                why.append("the ranks do not divide it, so some shards end with zeros")
            reason = "; ".join(why) or "tensors that are computed from it are sharded in this way"
            yield Decision("parallelize", "", name, f"sharded {division}", reason)


class _DivisionInference:
    """The divisions of the axes of a program that are sharded along one axis of the mesh.

    Parameters
    ----------
    axes : the axes of the program.
    workers : the number of ranks along the axis of the mesh.
    weight_axes : the axes that are sharded: names of weights, each with an axis.
    shapes : the shapes of the weights.
    """

    def __init__(
        self,
        axes: Axes,
        workers: int,
        weight_axes: Sequence[tuple[str, int]],
        shapes: Mapping[str, Sequence[Any]],
    ) -> None:
        self.axes, self.workers = axes, workers
        #: The extents of the axes, and the numbers of elements of the weights that they shard.
        self.sizes: dict[Node, int] = {}
        self.weights: Counter[Node] = Counter()
        for name, axis in weight_axes:
            node = axes.of((name, (), axis))
            self.sizes[node] = int(shapes[name][axis])
            self.weights[node] += prod(map(int, shapes[name]))
        #: The divisions of sharded axes, and of those that they are derived from.
        self.divisions: dict[Node, Division] = {}
        self.repeated = {
            derivation.base
            for derivations in axes.derived.values()
            for derivation in derivations
            if derivation.times > 1
        }
        #: By extent of a repeated axis, the number of ranks that share it.
        self.shares: dict[int, int] = {}
        extents = {
            extent: node for node, size in self.sizes.items() for extent in self._bases(node, size)
        }
        for extent in extents:
            costs = {
                n: (self._elements({**self.shares, extent: n}), extent % n, -n)
                for n in range(1, workers + 1)
                if workers % n == 0
            }
            self.shares[extent] = min(costs, key=lambda n: costs[n])

    def shard(self, name: str, axis: int) -> Shard:
        """Return the shard of a weight; record the divisions of the axes it is derived from."""
        node = self.axes.of((name, (), axis))
        division = self._division(node, self.sizes[node], self.shares, record=True)
        return shard(axis, division, self.workers)

    def _elements(self, shares: Mapping[int, int]) -> float:
        """Return the number of elements of the sharded weights on a rank."""
        return sum(
            count * self._division(node, self.sizes[node], shares).shard_extent / self.sizes[node]
            for node, count in self.weights.items()
        )

    def _bases(self, node: Node, extent: int) -> set[int]:
        """Return the extents of the repeated axes that an axis is derived from."""
        derivation, pieces = self._derivation(node, extent), self._pieces(node, extent)
        if derivation is not None:
            return self._bases(derivation.base, _base_extent(derivation, extent))
        if pieces:
            of_pieces = [self._bases(piece, size) for piece, size in pieces if piece is not None]
            return set().union(*of_pieces)
        return {extent} if node in self.repeated else set()

    def _division(
        self, node: Node, extent: int, shares: Mapping[int, int], record: bool = False
    ) -> Division:
        derivation, pieces = self._derivation(node, extent), self._pieces(node, extent)
        if derivation is not None:
            base_extent = _base_extent(derivation, extent)
            base = self._division(derivation.base, base_extent, shares, record)
            if derivation.times > 1:
                division = base.repeated(derivation.times, self.workers)
            else:
                division = base.times(derivation.inner).within(derivation.outer)
        elif pieces:
            plain = [Division.plain(size, self.workers) for _, size in pieces]
            division = concatenated(
                default if piece is None else self._division(piece, size, shares, record)
                for default, (piece, size) in zip(plain, pieces, strict=True)
            )
        else:
            is_repeated = node in self.repeated
            workers = shares.get(extent, self.workers) if is_repeated else self.workers
            division = Division.plain(extent, workers)
        if record:
            self.divisions[node] = division
        return division

    def _derivation(self, node: Node, extent: int) -> DerivedFrom | None:
        """Return the derivation of an axis with the smallest base, or None if it has none."""
        if node in self.axes.contiguous or self._pieces(node, extent):
            return None
        derivations = [
            derivation
            for derivation in self.axes.derived.get(node, ())
            if _base_extent(derivation, extent) < extent
        ]
        return min(derivations, key=lambda each: self._smallest_base(each, extent), default=None)

    def _smallest_base(self, derivation: DerivedFrom, extent: int) -> int:
        base = _base_extent(derivation, extent)
        further = self._derivation(derivation.base, base)
        return base if further is None else self._smallest_base(further, base)

    def _pieces(self, node: Node, extent: int) -> list[tuple[Node | None, int]]:
        """Return the consecutive slices of an axis with their extents; None for an unused slice."""
        slices = self.axes.slices.get(node, {})
        if not 0 < len(slices) <= _MAX_SLICES or node in self.axes.contiguous:
            return []
        bounds = sorted({0, extent, *(bound for span in slices for bound in span)})
        return [(slices.get(span), span[1] - span[0]) for span in pairwise(bounds)]


def _base_extent(derivation: DerivedFrom, extent: int) -> int:
    return extent // (derivation.outer * derivation.inner * derivation.times)
