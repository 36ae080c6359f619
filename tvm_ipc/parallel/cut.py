# SPDX-License-Identifier: Apache-2.0
"""What a rank has of a parameter."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import tvm

from tvm_ipc import arguments
from tvm_ipc.comm import Mesh, Shard
from tvm_ipc.comm.extents import constant, item_bytes, local_extent
from tvm_ipc.comm.placements import Placements, show
from tvm_ipc.parts import Runs, all_of, even, take

#: What share of a rank's bytes a weight has that is said to be replicated.
_LARGE: Final = 0.05


@dataclass(frozen=True)
class Cut:
    """How a parameter is divided among the ranks of a mesh.

    Attributes
    ----------
    name : of the parameter, as plans know it.
    parameter : its name in the functions.
    shape : all of it; extents may be symbolic.
    dtype : of its elements.
    mesh : whose ranks have it.
    placements : by axes of the mesh.
    is_input : whether it is given with each call; the others are weights.
    ranks : which of the mesh have it, where stages of a pipeline that have no use for it do not;
        None if all do.
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
    def part_shape(self) -> tuple[Any, ...]:
        """The extents of what a rank has that has it, which are those of the largest part."""
        found = list(self.shape)
        for one, workers in zip(self.placements, self.mesh.axes.values(), strict=True):
            if isinstance(one, Shard):
                found[one.axis] = local_extent(one, workers, found[one.axis])
        return tuple(extent if constant(extent) is None else constant(extent) for extent in found)

    @property
    def bytes(self) -> int | None:
        """How many bytes all of it has, None where an extent is symbolic."""
        return self._bytes(self.shape)

    @property
    def bytes_per_rank(self) -> int | None:
        """How many bytes a rank has that has it, None where an extent is symbolic."""
        return self._bytes(self.part_shape)

    def _bytes(self, extents: Sequence[Any]) -> int | None:
        if any(constant(extent) is None for extent in extents):
            return None
        return int(np.prod(extents, dtype=np.int64)) * item_bytes(tvm.DataType(self.dtype))

    def runs(self, rank: int, shape: Sequence[int] | None = None) -> Runs:
        """Return which indices of the whole a rank has, along each axis; see `tvm_ipc.parts`.

        Of ranks that do not have it these are none, and what `part` returns has no elements.

        Parameters
        ----------
        rank : one of the mesh.
        shape : of the whole, where extents of the parameter are symbolic.
        """
        whole = self._shape("runs: shape", self.shape if shape is None else shape)
        ranks = self.mesh.ranks
        if arguments.integer("runs: rank", rank, "a rank of the mesh") not in ranks:
            raise arguments.wrong_value("runs: rank", f"a rank of {self.mesh}", rank)
        if self.ranks is not None and rank not in self.ranks:
            return ((),) * len(whole)
        place = np.unravel_index(ranks.index(rank), tuple(self.mesh.axes.values()))
        found = [all_of(extent) for extent in whole]
        for one, index, workers in zip(
            self.placements, place, self.mesh.axes.values(), strict=True
        ):
            if isinstance(one, Shard) and one.division is not None:
                found[one.axis] = one.division.runs(int(index), workers)
            elif isinstance(one, Shard):
                found[one.axis] = even(whole[one.axis], int(index), workers)
        return tuple(found)

    def part(self, whole: Any, rank: int) -> np.ndarray[Any, Any]:
        """Return what a rank has of an array, with zeros where the array has nothing for it.

        Parameters
        ----------
        whole : an array of the shape of the parameter; of a file that is mapped into memory only
            the part is read.
        rank : one of the mesh.
        """
        array = np.asarray(whole)
        return take(array, self.runs(rank, self._shape("part: whole", array.shape)))

    def _shape(self, name: str, given: Any) -> tuple[int, ...]:
        """Return the extents of a whole, which must be those of the parameter."""
        found = arguments.integers(name, given, "extents, 0 or more")
        wanted = [constant(extent) for extent in self.shape]
        if len(wanted) != len(found) or any(
            number is not None and number != extent
            for number, extent in zip(wanted, found, strict=True)
        ):
            shown = ", ".join(map(str, self.shape))
            raise ValueError(f"{name}: {self.name!r} is ({shown}), not {found}")
        return found

    def __str__(self) -> str:
        extents = ", ".join(map(str, self.shape))
        where = "" if self.ranks is None else f" on {said_ranks(self.ranks)}"
        return f"{self.name} ({extents}) {self.dtype}: {show(self.mesh, self.placements)}{where}"


def said_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as sentences say them."""
    if not ranks:
        return "no rank"
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"


def notes_of(cuts: Iterable[Cut]) -> list[str]:
    """Return sentences on weights that are large and not divided, the largest first."""
    weights = [one for one in cuts if not one.is_input and one.bytes]
    have = {one.name: one.mesh.ranks if one.ranks is None else one.ranks for one in weights}
    whole = [
        one
        for one in weights
        if len(one.shape) > 1
        and len(have[one.name]) > 1
        and not any(isinstance(x, Shard) for x in one.placements)
    ]
    whole.sort(key=lambda one: -(one.bytes or 0))
    totals: dict[int, int] = defaultdict(int)
    for one in weights:
        of_a_rank = one.bytes_per_rank or 0
        for rank in have[one.name]:
            totals[rank] += of_a_rank
    notes = []
    for one in whole:
        total = totals[have[one.name][0]]
        if (one.bytes or 0) >= _LARGE * total:
            notes.append(
                f"{one.name} is replicated: {one.bytes} bytes on each rank, "
                f"{(one.bytes or 0) / total:.0%} of what it has"
            )
    return notes
