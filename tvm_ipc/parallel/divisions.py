# SPDX-License-Identifier: Apache-2.0
"""How axes of weights are divided so that what is made of them needs no collective.

    wq (24, h) -> q (n, 24) -> (n, 6, 4)        6 heads of 4 on 4 ranks: 6/4x4, which is 2 at most
    wk (8, h) -> k (n, 8) -> (n, 2, 4), each of which is repeated 3 times: 2 heads on 4 ranks are
        2/2x4, on two ranks each, and 6 heads of queries 2/2x3/2x4: those of one head of keys
    qkv (40, h) -> (n, 40) -> slices of 24, 8, 8: 2/2x3/2x4+2/2x4+2/2x4

Where there is a choice, the one with the fewest bytes on a rank is taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import Any, Final, TypeAlias

from tvm_ipc.comm import Division, Mesh, Shard
from tvm_ipc.comm.division import joined
from tvm_ipc.comm.extents import constant
from tvm_ipc.comm.placements import Placements
from tvm_ipc.parallel.axes import Axes, MadeOf, Node
from tvm_ipc.transform.report import Decision

#: Slices of one axis, beyond which it is not looked at.
_MOST_SLICES: Final = 64


#: How axes of the program are divided along an axis of the mesh, None for consecutive parts.
Divided: TypeAlias = dict[Node, Division | None]


def divided_by_use(
    axes: Axes, mesh: Mesh, placed: Mapping[str, Placements], shapes: Mapping[str, Sequence[Any]]
) -> tuple[dict[str, Placements], list[Divided]]:
    """Return where weights lie, with axes divided as the program uses them.

    Beside them what they are made of, for each axis of the mesh.

    Parameters
    ----------
    axes : of the program.
    mesh : of the placements.
    placed : where a plan says that weights lie.
    shapes : of the weights.
    """
    found = {name: list(placements) for name, placements in placed.items()}
    divided: list[Divided] = []
    for index, workers in enumerate(mesh.axes.values()):
        sizes: dict[Node, int] = {}
        weights: Counter[Node] = Counter()
        for name, placements in placed.items():
            one, dims = placements[index], [constant(extent) for extent in shapes[name]]
            if isinstance(one, Shard) and one.division is None and all(dims):
                node = axes.of((name, (), one.axis))
                sizes[node] = dims[one.axis] or 0
                weights[node] += prod(extent or 0 for extent in dims)
        dividing = _Dividing(axes, workers, sizes, weights)
        for name, placements in placed.items():
            one = placements[index]
            if isinstance(one, Shard) and (node := axes.of((name, (), one.axis))) in sizes:
                division = dividing.of(node)
                if one.division is None and not division.is_plain(workers):
                    found[name][index] = replace(one, division=division)
        divided.append({**dividing.found})
    return {name: tuple(placements) for name, placements in found.items()}, divided


def divided_somehow(
    axes: Axes, workers: int, wanted: Sequence[tuple[str, int]], shapes: Mapping[str, Sequence[Any]]
) -> dict[tuple[str, int], Shard]:
    """Return for axes of weights how each is divided if others are that are used with it.

    Parameters
    ----------
    axes : of the program.
    workers : that divide them.
    wanted : names of weights, and which axis of each.
    shapes : of the weights.
    """
    nodes = {one: axes.of((one[0], (), one[1])) for one in wanted}
    weights: Counter[Node] = Counter()
    for (name, _), node in nodes.items():
        weights[node] += prod(shapes[name])
    sizes = {node: shapes[name][axis] for (name, axis), node in nodes.items()}
    dividing = _Dividing(axes, workers, sizes, weights)
    found = {}
    for (name, axis), node in nodes.items():
        division = dividing.of(node)
        found[name, axis] = Shard(axis, None if division.is_plain(workers) else division)
    return found


def decisions_of(mesh: Mesh, lying: Mapping[str, Placements]) -> Iterator[Decision]:
    """Yield why weights are not divided into consecutive parts."""
    for name, placements in lying.items():
        for placement, workers in zip(placements, mesh.axes.values(), strict=True):
            if not isinstance(placement, Shard) or placement.division is None:
                continue
            division, why = placement.division, []
            if len(division.segments) > 1:
                why.append("the program uses pieces of it, and each of them is divided by itself")
            if division.copies(workers) > 1:
                why.append(f"{division.copies(workers)} ranks have the same, which they all need")
            if division.padded:
                why.append("the ranks do not divide it, and some have zeros at the end")
            reason = "; ".join(why) or "what is made of it is divided alike"
            yield Decision("parallelize", "", name, f"divided {division}", reason)


class _Dividing:
    """Finds divisions of axes that are divided along one axis of the mesh.

    Parameters
    ----------
    axes : of the program.
    workers : along the axis of the mesh.
    sizes : the extents of the axes that are divided.
    weights : how many elements the tensors have that are divided along them.
    """

    def __init__(
        self, axes: Axes, workers: int, sizes: Mapping[Node, int], weights: Mapping[Node, int]
    ) -> None:
        self.axes, self.workers, self.sizes = axes, workers, sizes
        #: Axes that are divided, and those that they are made of.
        self.found: dict[Node, Division] = {}
        #: Axes that are repeated, and among how many ranks axes of an extent are divided then.
        self.repeated = {one.base for made in axes.made.values() for one in made if one.times > 1}
        self.ways: dict[int, int] = {}
        extents = {extent: node for node in sizes for extent in self._bases(node, sizes[node])}
        for extent in extents:
            costs = {
                n: (self._elements({**self.ways, extent: n}, weights), extent % n, -n)
                for n in range(1, workers + 1)
                if workers % n == 0
            }
            self.ways[extent] = min(costs, key=lambda n: costs[n])

    def of(self, node: Node) -> Division:
        """Return how an axis is divided, and note how those are that it is made of."""
        return self._division(node, self.sizes[node], self.ways, note=True)

    def _elements(self, ways: Mapping[int, int], weights: Mapping[Node, int]) -> float:
        """Return how many elements a rank has of the tensors that are divided."""
        return sum(
            count * self._division(node, self.sizes[node], ways).part / self.sizes[node]
            for node, count in weights.items()
        )

    def _bases(self, node: Node, extent: int) -> set[int]:
        """Return the extents of axes which an axis is made of, and which are repeated."""
        made, pieces = self._made_of(node, extent), self._pieces(node, extent)
        if made is not None:
            return self._bases(made.base, _base_extent(made, extent))
        if pieces:
            found = [self._bases(piece, size) for piece, size in pieces if piece is not None]
            return set().union(*found)
        return {extent} if node in self.repeated else set()

    def _division(
        self, node: Node, extent: int, ways: Mapping[int, int], note: bool = False
    ) -> Division:
        made, pieces = self._made_of(node, extent), self._pieces(node, extent)
        if made is not None:
            base = self._division(made.base, _base_extent(made, extent), ways, note)
            if made.times > 1:
                found = base.repeated(made.times, self.workers)
            else:
                found = base.times(made.inner).within(made.outer)
        elif pieces:
            plain = [Division.plain(size, self.workers) for _, size in pieces]
            found = joined(
                one if piece is None else self._division(piece, size, ways, note)
                for one, (piece, size) in zip(plain, pieces, strict=True)
            )
        else:
            among = ways.get(extent, self.workers) if node in self.repeated else self.workers
            found = Division.plain(extent, among)
        if note:
            self.found[node] = found
        return found

    def _made_of(self, node: Node, extent: int) -> MadeOf | None:
        """Return how an axis is made of the smallest axis that it is made of, None if of none."""
        if node in self.axes.consecutive or self._pieces(node, extent):
            return None
        ways = [one for one in self.axes.made.get(node, ()) if _base_extent(one, extent) < extent]
        return min(ways, key=lambda one: self._smallest(one, extent), default=None)

    def _smallest(self, made: MadeOf, extent: int) -> int:
        base = _base_extent(made, extent)
        further = self._made_of(made.base, base)
        return base if further is None else self._smallest(further, base)

    def _pieces(self, node: Node, extent: int) -> list[tuple[Node | None, int]]:
        """Return the pieces in which an axis is used: which axis each is, and its extent."""
        slices = self.axes.slices.get(node, {})
        if not 0 < len(slices) <= _MOST_SLICES or node in self.axes.consecutive:
            return []
        bounds = sorted({0, extent, *(bound for both in slices for bound in both)})
        return [(slices.get(both), both[1] - both[0]) for both in pairwise(bounds)]


def _base_extent(made: MadeOf, extent: int) -> int:
    return extent // (made.outer * made.inner * made.times)
