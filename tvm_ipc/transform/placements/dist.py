# SPDX-License-Identifier: Apache-2.0
"""What TVM's own annotations say, as places.

    y = R.dist.annotate_sharding(x, device_mesh="mesh[0]", placement="S[0], R")

is a place on the mesh `Mesh({"axis0": 2, "axis1": 2})`, if the device mesh is 2 x 2.
"""

from __future__ import annotations

import tvm
from tvm import relax
from tvm.relax.distributed import DTensorType
from tvm.relax.distributed.type import PlacementSpecKind

from tvm_ipc.comm import Mesh, Placement, Replica, Shard, place
from tvm_ipc.errors import TransformError
from tvm_ipc.transform.ir.rewrite import rewrite, typed, with_value
from tvm_ipc.transform.placements.redistribute import NAME

_ANNOTATE = tvm.ir.Op.get("relax.dist.annotate_sharding")


def with_places(name: str, function: relax.Function, known: Mesh | None = None) -> relax.Function:
    """Return the function with places instead of TVM's annotations; itself if it has none.

    Parameters
    ----------
    name : of the function.
    known : a mesh whose axes have names; it is meant by device meshes of its extents and ranks.
    """

    def change(binding: relax.Binding, value: relax.Expr) -> list[relax.Binding] | None:
        if not (isinstance(value, relax.Call) and value.op.same_as(_ANNOTATE)):
            return None
        x, attrs = value.args[0], value.attrs
        if isinstance(x.ty, DTensorType):
            raise TransformError(
                f"{NAME}: function {name!r}: {binding.var.name} annotates a tensor that is "
                f"distributed already, {x.ty}; run this pass before those of relax.distributed"
            )
        mesh = Mesh(
            {f"axis{k}": int(extent) for k, extent in enumerate(attrs.device_mesh.shape)},
            [int(rank) for rank in attrs.device_mesh.device_ids],
        )
        if known is not None and list(known.axes.values()) == list(mesh.axes.values()):
            mesh = known if known.ranks == mesh.ranks else mesh
        placements = [_placement(one) for one in attrs.placement.dim_specs]
        return [with_value(binding, typed(place(x, mesh, placements), value.ty))]

    return rewrite(function, change)


def _placement(spec: relax.distributed.PlacementSpec) -> Placement:
    if int(spec.kind) == int(PlacementSpecKind.kSharding):
        return Shard(int(spec.axis))
    return Replica()
