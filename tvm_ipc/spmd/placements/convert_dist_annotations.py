# SPDX-License-Identifier: Apache-2.0
"""Conversion of TVM's `R.dist.annotate_sharding` to `R.comm.place`.

    y = R.dist.annotate_sharding(x, device_mesh="mesh[0]", placement="S[0], R")

becomes a placement on `Mesh({"axis0": 2, "axis1": 2})` if the device mesh is 2 x 2.
"""

from __future__ import annotations

import tvm
from tvm import relax
from tvm.relax.distributed import DTensorType
from tvm.relax.distributed.type import PlacementSpecKind

from tvm_ipc.analysis.walk_and_rewrite_bindings import rewrite, typed, with_value
from tvm_ipc.comm import Mesh, Placement, Replica, Shard, place
from tvm_ipc.errors import TransformError
from tvm_ipc.spmd.placements.redistribute import NAME

_ANNOTATE = tvm.ir.Op.get("relax.dist.annotate_sharding")


def convert_dist_annotations(
    name: str, function: relax.Function, named_mesh: Mesh | None = None
) -> relax.Function:
    """Return the function with `R.comm.place` in place of TVM's annotations.

    A function without annotations is returned as it is.

    Parameters
    ----------
    name : the name of the function, for errors.
    function : the function to convert.
    named_mesh : the mesh that replaces device meshes with the same extents and ranks.
    """

    def change(binding: relax.Binding, value: relax.Expr) -> list[relax.Binding] | None:
        if not is_annotation(value):
            return None
        x, attrs = value.args[0], value.attrs
        if isinstance(x.ty, DTensorType):
            raise TransformError(
                f"{NAME}: function {name!r}: {binding.var.name} annotates a tensor that is already "
                f"distributed, {x.ty}; run this pass before the passes of relax.distributed"
            )
        mesh = Mesh(
            {f"axis{k}": int(extent) for k, extent in enumerate(attrs.device_mesh.shape)},
            [int(rank) for rank in attrs.device_mesh.device_ids],
        )
        if named_mesh is not None and list(named_mesh.axes.values()) == list(mesh.axes.values()):
            mesh = named_mesh if named_mesh.ranks == mesh.ranks else mesh
        placements = [_placement(spec) for spec in attrs.placement.dim_specs]
        return [with_value(binding, typed(place(x, mesh, placements), value.ty))]

    return rewrite(function, change)


def is_annotation(value: relax.Expr) -> bool:
    """Return whether an expression is one of TVM's annotations."""
    return type(value) is relax.Call and bool(value.op.same_as(_ANNOTATE))


def _placement(spec: relax.distributed.PlacementSpec) -> Placement:
    if int(spec.kind) == int(PlacementSpecKind.kSharding):
        return Shard(int(spec.axis))
    return Replica()
