# SPDX-License-Identifier: Apache-2.0
"""`ShardSpec`, the shards of a parameter, and notes on weights that are not sharded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import tvm

from tvm_ipc import arguments
from tvm_ipc.comm import Mesh, Shard
from tvm_ipc.comm.extent_arithmetic import constant, divides, item_bytes, local_extent
from tvm_ipc.comm.placements import Placements, format_placements
from tvm_ipc.index_spans_per_axis import Spans, even_shard, extract, whole_axis

#: A replicated weight is noted if it takes at least this fraction of a rank's bytes.
_LARGE: Final = 0.05


@dataclass(frozen=True, eq=False)
class ShardSpec:
    """The sharding of a parameter over the ranks of a mesh.

    Attributes
    ----------
    name : the name of the parameter in plans.
    parameter : its name in the functions; "weights.0" for the first field of a tuple.
    shape : the shape of the whole parameter; extents may be symbolic.
    dtype : the type of its elements.
    mesh : the mesh of its ranks.
    placements : the placement along each axis of the mesh.
    is_input : whether it is passed with each call; other parameters are weights.
    ranks : the ranks whose pipeline stage uses the parameter; None if all ranks have it.

    Examples
    --------
    >>> import numpy as np
    >>> from tvm_ipc import comm
    >>> from tvm_ipc.spmd import ShardSpec
    >>> mesh = comm.Mesh({"tp": 2})
    >>> spec = ShardSpec("up", "up", (2, 6), "float32", mesh, (comm.Shard(1),))
    >>> spec.shard_shape, spec.bytes_per_rank
    ((2, 3), 24)
    >>> spec.shard(np.arange(12).reshape(2, 6), rank=1).tolist()
    [[3, 4, 5], [9, 10, 11]]
    """

    name: str
    parameter: str
    shape: tuple[Any, ...]
    dtype: str
    mesh: Mesh
    placements: Placements
    is_input: bool = False
    ranks: tuple[int, ...] | None = None

    @property
    def shard_shape(self) -> tuple[Any, ...]:
        """Return the shape of a shard, which is that of the largest one on all ranks."""
        shape = list(self.shape)
        for placement, workers in zip(self.placements, self.mesh.axes.values(), strict=True):
            if isinstance(placement, Shard):
                axis = placement.axis
                shape[axis] = local_extent(placement, workers, shape[axis])
        return tuple(extent if constant(extent) is None else constant(extent) for extent in shape)

    @property
    def bytes(self) -> int | None:
        """Return the bytes of the whole parameter, or None if an extent is symbolic."""
        return self._bytes(self.shape)

    @property
    def bytes_per_rank(self) -> int | None:
        """Return the bytes of a shard, or None if an extent is symbolic."""
        return self._bytes(self.shard_shape)

    def _bytes(self, extents: Sequence[Any]) -> int | None:
        if any(constant(extent) is None for extent in extents):
            return None
        return int(np.prod(extents, dtype=np.int64)) * item_bytes(tvm.DataType(self.dtype))

    def spans(self, rank: int, shape: Sequence[int] | None = None) -> Spans:
        """Return the indices of the whole parameter that a rank has.

        `tvm_ipc.index_spans_per_axis` explains their form.

        A rank whose pipeline stage does not use the parameter has no indices, and `shard` returns
        an empty array for it.

        Parameters
        ----------
        rank : a rank of the mesh.
        shape : the shape of the whole, if extents of the parameter are symbolic.

        Returns
        -------
        tuple
            For each axis, its ranges of indices as pairs (first index, count). The first index of
            padding is None.

        Raises
        ------
        ValueError
            The mesh has no such rank, or the parameter has another shape.
        """
        whole = self._check_shape("spans: shape", self.shape if shape is None else shape)
        ranks = self.mesh.ranks
        if arguments.integer("spans: rank", rank, "a rank of the mesh") not in ranks:
            raise arguments.wrong_value("spans: rank", f"a rank of {self.mesh}", rank)
        if self.ranks is not None and rank not in self.ranks:
            return ((),) * len(whole)
        extents = tuple(self.mesh.axes.values())
        coordinates = np.unravel_index(ranks.index(rank), extents)
        spans = [whole_axis(extent) for extent in whole]
        for placement, index, workers in zip(self.placements, coordinates, extents, strict=True):
            if not isinstance(placement, Shard):
                continue
            axis, division = placement.axis, placement.division
            if division is not None:
                spans[axis] = division.runs(int(index), workers)
            else:
                spans[axis] = even_shard(whole[axis], int(index), workers)
        return tuple(spans)

    def shard(self, whole: Any, rank: int) -> np.ndarray[Any, Any]:
        """Return the shard of a rank, with zeros in the padding.

        Parameters
        ----------
        whole : an array with the shape of the parameter. Of a memory-mapped file only the shard is
            read.
        rank : a rank of the mesh.

        Returns
        -------
        numpy.ndarray
            The shard, of shape `shard_shape`.

        Raises
        ------
        ValueError
            The mesh has no such rank, or the parameter has another shape.
        """
        array = np.asarray(whole)
        return extract(array, self.spans(rank, self._check_shape("shard: whole", array.shape)))

    def _check_shape(self, name: str, shape: Any) -> tuple[int, ...]:
        """Return a shape as a tuple of integers; raise an error unless it fits the parameter."""
        extents = arguments.integers(name, shape, "extents, 0 or more")
        expected = [constant(extent) for extent in self.shape]
        if len(expected) != len(extents) or any(
            number is not None and number != extent
            for number, extent in zip(expected, extents, strict=True)
        ):
            declared = ", ".join(map(_format, self.shape))
            raise ValueError(f"{name}: {self.name!r} is ({declared}), not {extents}")
        for placement, workers in zip(self.placements, self.mesh.axes.values(), strict=True):
            if not isinstance(placement, Shard) or expected[placement.axis] is not None:
                continue
            axis = placement.axis
            if extents[axis] % workers and divides(workers, self.shape[axis]):
                raise ValueError(
                    f"{name}: axis {axis} of {self.name!r} is {_format(self.shape[axis])}, a "
                    f"multiple of the {workers} ranks, not {extents[axis]}; pad it, or give the "
                    "program a parameter with the extent, such as R.Shape"
                )
        return extents

    def __str__(self) -> str:
        """Return name, shape, type and placements on one line."""
        extents = ", ".join(map(_format, self.shape))
        on_ranks = "" if self.ranks is None else f" on {format_ranks(self.ranks)}"
        placements = format_placements(self.mesh, self.placements)
        return f"{self.name} ({extents}) {self.dtype}: {placements}{on_ranks}"


def _format(extent: Any) -> str:
    """Return an extent as programs print it."""
    if constant(extent) is not None:
        return str(constant(extent))
    from tvm import relax  # the compiler, which programs that only run do not have

    return str(relax.ShapeExpr([extent])).removeprefix("R.shape([").removesuffix("])")


def format_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text, such as "ranks 0, 1"."""
    if not ranks:
        return "no rank"
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"


def notes_of(specs: Iterable[ShardSpec]) -> list[str]:
    """Return notes on large weights that are replicated, the largest first."""
    weights = [spec for spec in specs if not spec.is_input and spec.bytes]
    ranks_of = {
        spec.name: spec.mesh.ranks if spec.ranks is None else spec.ranks for spec in weights
    }
    replicated = [
        spec
        for spec in weights
        if len(spec.shape) > 1
        and len(ranks_of[spec.name]) > 1
        and not any(isinstance(placement, Shard) for placement in spec.placements)
    ]
    replicated.sort(key=lambda spec: -(spec.bytes or 0))
    totals: dict[int, int] = defaultdict(int)
    for spec in weights:
        for rank in ranks_of[spec.name]:
            totals[rank] += spec.bytes_per_rank or 0
    notes = []
    for spec in replicated:
        total = totals[ranks_of[spec.name][0]]
        if (spec.bytes or 0) >= _LARGE * total:
            notes.append(
                f"{spec.name} is replicated: {spec.bytes} bytes on each rank, "
                f"{(spec.bytes or 0) / total:.0%} of the rank's weights"
            )
    return notes
