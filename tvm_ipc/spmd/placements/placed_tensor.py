# SPDX-License-Identifier: Apache-2.0
"""Tensors of a global program with their placements, and the extents of their shards."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import relax, tirx

from tvm_ipc.comm import Mesh, Placement, Replica, Shard
from tvm_ipc.comm.collective_relax_op import dtype_of, extents
from tvm_ipc.comm.extent_arithmetic import divides, local_extent
from tvm_ipc.comm.placements import Placements


@dataclass(frozen=True, eq=False)
class PlacedTensor:
    """A tensor of the global program.

    Attributes
    ----------
    value : the shard of the rank; an argument of calls, or a call that is not bound yet.
    whole : the type of the whole tensor.
    placements : the placement along each axis of the mesh.
    zeros : the unevenly sharded axes whose padding is known to be zero.
    is_explicit : whether the program itself specifies the placements.
    mesh : the mesh whose ranks have the tensor, None if every rank has all of it.
    """

    value: relax.Expr
    whole: relax.TensorType
    placements: Placements
    zeros: frozenset[int] = frozenset()
    is_explicit: bool = False
    mesh: Mesh | None = None

    @property
    def dims(self) -> list[tirx.Expr]:
        """Return the extents of the whole tensor, which are known if it is sharded."""
        dims = extents(self.whole)
        assert dims is not None, "only tensors of known shape are sharded"
        return dims

    @property
    def replicated(self) -> bool:
        """Return whether every rank has the whole tensor."""
        return is_replicated(self.placements)


def is_whole(placement: Placement) -> bool:
    """Return whether the ranks along an axis all have the whole tensor."""
    return isinstance(placement, Replica) or (
        isinstance(placement, Shard) and placement.division is not None and placement.division.whole
    )


def is_replicated(placements: Placements) -> bool:
    """Return whether a tensor is replicated along every axis of the mesh."""
    return all(str(placement) == "R" for placement in placements)


def sharded_axes(mesh: Mesh, placements: Placements) -> dict[int, tuple[Shard, int]]:
    """Return the sharded axes of a tensor, each with its placement and the number of ranks."""
    pairs = zip(placements, mesh.axes.values(), strict=True)
    return {
        placement.axis: (placement, workers)
        for placement, workers in pairs
        if isinstance(placement, Shard)
    }


def uneven(mesh: Mesh, placements: Placements, whole: relax.TensorType) -> frozenset[int]:
    """Return the sharded axes of a tensor whose shards may have padding."""
    dims = extents(whole)

    def is_uneven(placement: Shard, workers: int) -> bool:
        if placement.division is not None:
            return placement.division.padded
        return dims is None or not divides(workers, dims[placement.axis])

    by_axis = sharded_axes(mesh, placements)
    return frozenset(axis for axis, sharding in by_axis.items() if is_uneven(*sharding))


def local_extents(
    mesh: Mesh, dims: list[tirx.Expr], placements: tuple[Placement, ...]
) -> list[tirx.Expr]:
    """Return the extents of a rank's shard of a tensor."""
    by_axis = sharded_axes(mesh, placements)
    return [
        local_extent(*by_axis[axis], extent) if axis in by_axis else extent
        for axis, extent in enumerate(dims)
    ]


def local_type(mesh: Mesh, whole: relax.TensorType, placements: Placements) -> relax.TensorType:
    """Return the type of a rank's shard of a tensor."""
    dims = extents(whole)
    if dims is None or not sharded_axes(mesh, placements):
        return whole
    return relax.TensorType(local_extents(mesh, dims, placements), dtype_of(whole), whole.vdevice)
