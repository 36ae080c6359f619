# SPDX-License-Identifier: Apache-2.0
"""Replacement of the regions of marked tensors by bindings of chunks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from tvm import relax

from tvm_ipc.analysis.program_order import linearize
from tvm_ipc.analysis.uses import Uses
from tvm_ipc.analysis.walk_and_rewrite_bindings import Edits
from tvm_ipc.arguments import counted
from tvm_ipc.comm.extent_arithmetic import format_count
from tvm_ipc.spmd.streams.compute_on_streams import streams_of
from tvm_ipc.spmd.streams.find_marked_region import MarkedRegion, find_marked_region
from tvm_ipc.spmd.streams.pipelined_chunks import pipelined_chunks
from tvm_ipc.spmd.streams.ring_of_chunks import ring_of_chunks
from tvm_ipc.transform.overlap.candidate_types import NotOverlappableError


@dataclass(frozen=True, eq=False)
class Chunked:
    """The number of chunks of a marked tensor, and their schedule in words."""

    chunks: Any  #: symbolic only in a loop
    reason: str

    @property
    def verdict(self) -> str:
        """The number of chunks as the report prints it."""
        return f"in {format_count(self.chunks, 'chunk')}"


#: How a marked tensor is computed in chunks, or the reason why it is not.
Outcome: TypeAlias = "Chunked | NotOverlappableError"


def split_marked_regions(
    function: relax.Function,
    marked: Sequence[tuple[Any, int]],
    streams: int,
    boundaries: Iterable[Any] = (),
    *,
    compute_streams: bool = False,
) -> tuple[relax.Function, list[Outcome]]:
    """Split the regions that compute marked tensors into chunks.

    Parameters
    ----------
    function : a function without dataflow blocks.
    marked : the marked tensors, each with its axis of chunks.
    streams : the number of chunks that are communicated or computed at a time.
    boundaries : further tensors that do not belong to the region of another tensor.
    compute_streams : whether chunks are computed on several streams of a GPU.

    Returns
    -------
    The new function, and the outcome for each marked tensor.
    """
    uses = Uses(linearize("", function))
    edits = Edits()
    ends = {*boundaries, *(tensor for tensor, _ in marked)}
    outcomes: list[Outcome] = []
    for tensor, axis in marked:
        try:
            region = find_marked_region(tensor, axis, uses, ends)
            if edits.replaces(region.target.var):
                raise NotOverlappableError("another mark already splits it into chunks")
            computed_on, described = streams_of(region, streams) if compute_streams else (1, "")
            bindings = _bindings_of(region, streams, uses, computed_on)
        except NotOverlappableError as reason:
            outcomes.append(reason)
            continue
        for step in region.steps:
            edits.replace(step.var, [])
        edits.replace(region.target.var, bindings)
        outcomes.append(Chunked(region.chunks, _describe(region, streams) + described))
    new = edits.apply(function)
    if new is function:
        return function, outcomes
    return relax.Function(new.params, new.body, new.ret_ty, False, new.attrs, new.span), outcomes


def _bindings_of(
    region: MarkedRegion, streams: int, uses: Uses, computed_on: int
) -> list[relax.Binding]:
    if region.ring is not None:
        return ring_of_chunks(region, streams, uses)
    return pipelined_chunks(region, streams, uses, computed_on)


def _describe(region: MarkedRegion, streams: int) -> str:
    """Return the schedule of a region as the report prints it."""
    if region.ring is not None:
        assert region.ring.attrs is not None, "a ring is a collective"
        gathers = region.ring.attrs.kind == "allgather"
        sent = "passes shards on to the next rank" if gathers else "sends the others their shards"
        meanwhile = ", and computes another one meanwhile" if region.members else ""
        return f"a ring: each rank {sent}{meanwhile}"
    kinds = dict.fromkeys(str(m.attrs.kind) for m in region.collectives if m.attrs is not None)
    at_a_time = counted(min(streams, region.chunks), "chunk")
    return f"asynchronous {' and '.join(kinds)}, {at_a_time} at a time"
