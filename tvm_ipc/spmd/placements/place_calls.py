# SPDX-License-Identifier: Apache-2.0
"""Read and create the calls of `R.comm.place` in a global program."""

from __future__ import annotations

from collections.abc import Iterator

from tvm import relax

from tvm_ipc.analysis.walk_and_rewrite_bindings import calls, typed
from tvm_ipc.comm import Mesh, place
from tvm_ipc.comm.place_op import PlaceAttrs, is_place, mesh_of
from tvm_ipc.comm.placements import Placements, placements_of
from tvm_ipc.errors import TransformError
from tvm_ipc.spmd.placements.redistribute import NAME


def place_calls(function: relax.Function) -> Iterator[relax.Call]:
    """Return an iterator over the calls of `R.comm.place` in a function."""
    return filter(is_place, calls(function))


def meshes_of_function(function: relax.Function) -> list[Mesh]:
    """Return the meshes of the placements in a function, in the order of their first use."""
    return list(dict.fromkeys(map(mesh_of, place_calls(function))))


def mesh_of_function(name: str, function: relax.Function) -> Mesh | None:
    """Return the only mesh of the placements in a function, or None if it has no placements."""
    meshes = meshes_of_function(function)
    if len(meshes) > 1:
        raise TransformError(
            f"{NAME}: function {name!r} places tensors on {' and on '.join(map(str, meshes))}; a "
            "function that is planned uses one mesh, so give one mesh all axes"
        )
    return next(iter(meshes), None)


def placed_params(function: relax.Function) -> dict[relax.Var, tuple[Mesh, Placements]]:
    """Return the meshes and placements of parameters that a function specifies.

    A parameter has the placement of the first `R.comm.place` on it.
    """
    placements: dict[relax.Var, tuple[Mesh, Placements]] = {}
    params = set(function.params)
    for call in place_calls(function):
        if not PlaceAttrs.of(call).inserted and call.args[0] in params:
            mesh = mesh_of(call)
            of_mesh = mesh, placements_of(mesh, call.attrs.placements)
            placements.setdefault(call.args[0], of_mesh)
    return placements


def placements_of_params(mesh: Mesh, function: relax.Function) -> dict[relax.Var, Placements]:
    """Return the placements of parameters on a mesh, which is the only one of the function."""
    return {
        param: placements
        for param, (of_mesh, placements) in placed_params(function).items()
        if of_mesh == mesh
    }


def place_typed(
    x: relax.Expr, mesh: Mesh, placements: Placements, inserted: bool = False
) -> relax.Call:
    """Return a call of `R.comm.place` that has its type, which is that of the tensor."""
    call: relax.Call = typed(place(x, mesh, list(placements), inserted=inserted), x.ty)
    return call
