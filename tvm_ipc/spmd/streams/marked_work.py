# SPDX-License-Identifier: Apache-2.0
"""The work that computes a marked tensor, in the form that the cost model reads."""

from __future__ import annotations

from math import prod
from typing import Any

import tvm
from tvm import relax, tirx

from tvm_ipc.analysis.shape_algebra import product_of
from tvm_ipc.comm.collective_relax_op import dtype_of, extents
from tvm_ipc.comm.extent_arithmetic import constant, item_bytes
from tvm_ipc.spmd.streams.find_marked_region import MarkedRegion, Member
from tvm_ipc.transform.overlap.candidate_types import Candidate
from tvm_ipc.transform.overlap.cost_model import Workload
from tvm_ipc.transform.overlap.stream_cost_model import (
    ChunkCollective,
    ChunkMatmul,
    MarkedWork,
)


def marked_work(region: MarkedRegion, streams: int, *, blas: bool) -> MarkedWork | None:
    """Return the work of a region; None if an extent is unknown at compile time."""
    members = list(region.members.values())
    collectives = [member for member in members if member.attrs is not None]
    if region.ring is not None:
        collectives.append(region.ring)
    shapes = [_numbers(m.step.var) for m in (*members, *collectives)]
    shapes += [_numbers(tensor) for m in (*members, *collectives) for tensor, _ in m.operands]
    if any(shape is None for shape in shapes):
        return None
    attrs = collectives[0].attrs
    assert attrs is not None, "it is a collective"
    matmuls = tuple(_matmul(m, region.chunks) for m in members if m.is_matmul)
    chunks = 1 if region.ring is not None else region.chunks
    return MarkedWork(
        ranks=_ranks(collectives[0]),
        chunks=region.chunks,
        streams=streams,
        matmuls=matmuls,
        collectives=tuple(_collective(m, chunks) for m in collectives),
        ring=region.ring is not None,
        blas=blas,
        overlap=_workload(collectives, matmuls, is_ring=region.ring is not None, blas=blas),
    )


def work_of_gather(site: Candidate, streams: int, *, blas: bool) -> MarkedWork | None:
    """Return the work of a gather and all matmuls that share it; None if an extent is unknown."""
    blocks, inner = constant(site.input_layout.shape[0]), constant(site.input_layout.shape[-1])
    columns = [constant(layout.shape[-1]) for layout in site.output_layouts]
    inner_rows = site.input_layout.shape[site.input_layout.axis + 1 : -1]
    rows = constant(product_of([site.rows, *inner_rows]))
    if blocks is None or inner is None or rows is None or not blocks:
        return None
    known = [number for number in columns if number is not None]
    if len(known) < len(columns):
        return None
    item = site.input_layout.item_bytes
    whole_rows = blocks * site.ranks * rows
    return MarkedWork(
        ranks=site.ranks,
        chunks=blocks,
        streams=streams,
        matmuls=tuple(
            ChunkMatmul(site.ranks * rows, inner, number, whole_rows, number, stage=1)
            for number in known
        ),
        collectives=(ChunkCollective("allgather", rows * inner * item),),
        blas=blas,
        overlap=Workload("allgather", site.ranks, blocks * rows, inner, sum(known), item, blas),
    )


def _numbers(tensor: Any) -> list[int] | None:
    """Return the extents of a tensor; None if one is unknown."""
    if not isinstance(tensor.ty, relax.TensorType):
        return None
    numbers = [constant(extent) for extent in extents(tensor.ty) or [tirx.Var("unknown", "int64")]]
    return None if None in numbers else [number for number in numbers if number is not None]


def _shape(tensor: Any) -> list[int]:
    numbers = _numbers(tensor)
    assert numbers is not None, "extents are known"
    return numbers


def _matmul(member: Member, chunks: int) -> ChunkMatmul:
    whole = _shape(member.step.var)
    inner = _shape(member.operands[0][0])[-1]
    rows, columns = prod(whole[:-1]), whole[-1]
    if member.axis == len(whole) - 1:
        return ChunkMatmul(rows, inner, columns // chunks, rows, columns, member.stage)
    return ChunkMatmul(rows // chunks, inner, columns, rows, columns, member.stage)


def _ranks(collective: Member) -> int:
    """Return the number of ranks in the team of a collective."""
    attrs = collective.attrs
    assert attrs is not None, "it is a collective"
    return int(attrs.workers)


def _collective(member: Member, chunks: int) -> ChunkCollective:
    """Return a collective with the size of one rank's slice of a chunk."""
    attrs = member.attrs
    assert attrs is not None, "it is a collective"
    tensor = member.operands[0][0]
    size = prod(_shape(tensor)) * item_bytes(tvm.DataType(dtype_of(tensor.ty)))
    if attrs.kind != "allgather":  # its operand has the slices of all ranks
        size //= int(attrs.workers)
    return ChunkCollective(str(attrs.kind), size / chunks, member.stage)


def _workload(
    collectives: list[Member], matmuls: tuple[ChunkMatmul, ...], *, is_ring: bool, blas: bool
) -> Workload | None:
    """Return the same work for `OverlapCommunication`, which overlaps one collective."""
    if len(collectives) != 1 or not matmuls:
        return None
    attrs, tensor = collectives[0].attrs, collectives[0].operands[0][0]
    assert attrs is not None, "it is a collective"
    gathers = attrs.kind == "allgather"
    before = matmuls[0].stage == 0 and len(matmuls) == 1 and not gathers
    after = gathers and (is_ring or all(matmul.stage > 0 for matmul in matmuls))
    if not (before or after) or attrs.kind == "all_to_all":
        return None
    ranks = int(attrs.workers)
    return Workload(
        kind=str(attrs.kind),
        ranks=ranks,
        rows=matmuls[0].whole_rows // ranks,
        inner=matmuls[0].inner,
        columns=sum(matmul.whole_columns for matmul in matmuls),
        item_bytes=item_bytes(tvm.DataType(dtype_of(tensor.ty))),
        blas=blas,
    )
