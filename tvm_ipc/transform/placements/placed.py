# SPDX-License-Identifier: Apache-2.0
"""A tensor of a program for all ranks, and what a rank has of it."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import relax, tirx

from tvm_ipc.comm import Mesh, Placement, Replica, Shard
from tvm_ipc.comm.extents import divides, local_extent
from tvm_ipc.comm.operator import dtype_of, extents
from tvm_ipc.comm.placements import Placements


@dataclass(frozen=True, eq=False)
class Placed:
    """A tensor of the program.

    Attributes
    ----------
    value : what the rank has of it; a call that is not bound yet, or what can be an argument.
    whole : the type of all of it.
    placements : by axes of the mesh.
    zeros : axes beyond whose end the parts have zeros, of those that the ranks do not divide.
    said : whether the program says where it lies.
    """

    value: relax.Expr
    whole: relax.TensorType
    placements: Placements
    zeros: frozenset[int] = frozenset()
    said: bool = False

    @property
    def replicated(self) -> bool:
        """Whether every rank has all of it."""
        return is_replicated(self.placements)


def is_whole(one: Placement) -> bool:
    """Whether every rank has all of a tensor."""
    return isinstance(one, Replica) or (
        isinstance(one, Shard) and one.division is not None and one.division.whole
    )


def is_replicated(placements: Placements) -> bool:
    """Whether every rank has all of a tensor."""
    return all(str(one) == "R" for one in placements)


def divided(mesh: Mesh, placements: Placements) -> dict[int, tuple[Shard, int]]:
    """Return the axes of a tensor that are divided, how, and among how many ranks."""
    pairs = zip(placements, mesh.axes.values(), strict=True)
    return {one.axis: (one, workers) for one, workers in pairs if isinstance(one, Shard)}


def uneven(mesh: Mesh, placements: Placements, whole: relax.TensorType) -> frozenset[int]:
    """Return the axes of a tensor that ranks may not divide into equal parts."""
    dims = extents(whole)

    def is_uneven(one: Shard, workers: int) -> bool:
        if one.division is not None:
            return one.division.padded
        return dims is None or not divides(workers, dims[one.axis])

    found = divided(mesh, placements)
    return frozenset(axis for axis, how in found.items() if is_uneven(*how))


def local_extents(
    mesh: Mesh, dims: list[tirx.Expr], placements: tuple[Placement, ...]
) -> list[tirx.Expr]:
    """Return the extents of what a rank has of a tensor."""
    by_axis = divided(mesh, placements)
    return [
        local_extent(*by_axis[axis], extent) if axis in by_axis else extent
        for axis, extent in enumerate(dims)
    ]


def local_type(mesh: Mesh, whole: relax.TensorType, placements: Placements) -> relax.TensorType:
    """Return the type of what a rank has of a tensor."""
    dims = extents(whole)
    if dims is None or not divided(mesh, placements):
        return whole
    return relax.TensorType(local_extents(mesh, dims, placements), dtype_of(whole), whole.vdevice)
