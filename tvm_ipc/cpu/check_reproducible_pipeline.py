# SPDX-License-Identifier: Apache-2.0
"""Checks of what `get_pipeline(..., reproducible=True)` is given: its options, and placements."""

from __future__ import annotations

from typing import Final

import tvm
from tvm import relax
from tvm.target import codegen

from tvm_ipc import arguments
from tvm_ipc.analysis.collective_calls import name_of
from tvm_ipc.analysis.walk_and_rewrite_bindings import calls, relax_functions
from tvm_ipc.comm.collective_relax_op import extents
from tvm_ipc.comm.extent_arithmetic import constant
from tvm_ipc.comm.place_op import NAME as PLACE
from tvm_ipc.comm.place_op import PlaceAttrs, mesh_of
from tvm_ipc.comm.placements import Shard, has_equal_blocks, placements_of
from tvm_ipc.errors import TransformError

_PLACE: Final = tvm.ir.Op.get(PLACE)


def check_options(
    target: tvm.target.Target,
    fuse_epilogue: object,
    schedule: object,
    overlap: object,
    blas: object,
) -> None:
    """Raise ValueError if the target or an option contradicts reproducible results."""
    name = "get_pipeline: reproducible"
    if target.kind.name != "llvm" or codegen.llvm_cpu_has_features("fma", target):
        raise ValueError(
            f"{name} is True, but the target {str(target)!r} may add products without rounding "
            "them; pass the target tvm_ipc.cpu_target(reproducible=True)"
        )
    for option, value, contradicts in (
        ("fuse_epilogue", fuse_epilogue, bool(fuse_epilogue)),
        ("schedule", schedule, schedule is not None),
        ("overlap", overlap, overlap is not None),
        ("blas", blas, blas is False),
    ):
        if contradicts:
            raise ValueError(
                f"{name} is True, but {option} is {arguments.quote(value)}, which changes the "
                f"order of sums; leave out {option}, or reproducible"
            )


def check_placements(mod: tvm.IRModule) -> None:
    """Raise an error if a tensor is computed in chunks, or has shards that are no equal blocks."""
    for global_var, function in relax_functions(mod):
        for call in calls(function):
            if not call.op.same_as(_PLACE):
                continue
            what = ""
            if PlaceAttrs.of(call).stream is not None:
                what = "is marked for streams"
            elif not _has_equal_blocks(call):
                what = f"is placed as {', '.join(PlaceAttrs.of(call).placements)}, of which shards"
                what += " are no equal blocks"
            if what:
                raise TransformError(
                    f"get_pipeline: function {global_var.name_hint!r}: {name_of(call.args[0])} "
                    f"{what}, so that sums may have another order; change that, or compile without "
                    "reproducible=True"
                )


def _has_equal_blocks(place: relax.Call) -> bool:
    """Return whether all ranks have equal blocks of a placed tensor, for axes of known extents."""
    mesh, shape = mesh_of(place), extents(place.args[0].ty) or []
    placements = placements_of(mesh, PlaceAttrs.of(place).placements)
    for placement, workers in zip(placements, mesh.axes.values(), strict=True):
        if isinstance(placement, Shard) and placement.axis < len(shape):
            extent = constant(shape[placement.axis])
            if extent is not None and not has_equal_blocks(placement, extent, workers):
                return False
    return True
