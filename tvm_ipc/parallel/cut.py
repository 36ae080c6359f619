# SPDX-License-Identifier: Apache-2.0
"""What a rank has of a parameter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm

from tvm_ipc import arguments
from tvm_ipc.comm import Mesh, Shard
from tvm_ipc.comm.operator import constant, item_bytes, largest_part
from tvm_ipc.comm.placements import Placements, show


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
    """

    name: str
    parameter: str
    shape: tuple[Any, ...]
    dtype: str
    mesh: Mesh
    placements: Placements

    @property
    def part_shape(self) -> tuple[Any, ...]:
        """The extents of what a rank has, which are those of the largest part."""
        found = list(self.shape)
        for one, workers in zip(self.placements, self.mesh.axes.values(), strict=True):
            if isinstance(one, Shard):
                found[one.axis] = largest_part(found[one.axis], workers)
        return tuple(extent if constant(extent) is None else constant(extent) for extent in found)

    @property
    def bytes_per_rank(self) -> int | None:
        """How many bytes a rank has, None where an extent is symbolic."""
        extents = self.part_shape
        if any(constant(extent) is None for extent in extents):
            return None
        return int(np.prod(extents, dtype=np.int64)) * item_bytes(tvm.DataType(self.dtype))

    def part(self, whole: Any, rank: int) -> np.ndarray[Any, Any]:
        """Return what a rank has of an array, with zeros beyond the end of the array.

        Parameters
        ----------
        whole : an array of the shape of the parameter.
        rank : one of the mesh.
        """
        array = np.asarray(whole)
        wanted = [constant(extent) for extent in self.shape]
        alike = len(wanted) == array.ndim and all(
            number is None or number == extent
            for number, extent in zip(wanted, array.shape, strict=False)
        )
        if not alike:
            shown = ", ".join(map(str, self.shape))
            raise ValueError(f"part: {self.name!r} is ({shown}), and the array {array.shape}")
        ranks = self.mesh.ranks
        if arguments.integer("part: rank", rank, "a rank of the mesh") not in ranks:
            raise arguments.wrong_value("part: rank", f"a rank of {self.mesh}", rank)
        place = np.unravel_index(ranks.index(rank), tuple(self.mesh.axes.values()))
        for one, index, workers in zip(
            self.placements, place, self.mesh.axes.values(), strict=True
        ):
            if isinstance(one, Shard):
                array = _part(array, one.axis, int(index), workers)
        return np.ascontiguousarray(array).reshape(array.shape)

    def __str__(self) -> str:
        extents = ", ".join(map(str, self.shape))
        return f"{self.name} ({extents}) {self.dtype}: {show(self.mesh, self.placements)}"


def _part(array: np.ndarray[Any, Any], axis: int, index: int, workers: int) -> Any:
    extent = -(-array.shape[axis] // workers)
    found = array.take(
        range(min(index * extent, array.shape[axis]), min((index + 1) * extent, array.shape[axis])),
        axis,
    )
    missing = extent - found.shape[axis]
    if not missing:
        return found
    return np.pad(found, [(0, missing if k == axis else 0) for k in range(array.ndim)])
