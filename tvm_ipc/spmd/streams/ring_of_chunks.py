# SPDX-License-Identifier: Apache-2.0
"""Schedules in which chunks are the shards of ranks: rings of sends and receives.

An all-gather along the marked axis, with 2 workers:
    whole = R.comm.allgather(x, axis=0, ...)     # x: (m, k)
    y = R.matmul(whole, w)

After: each rank multiplies a shard while it sends it to the next rank and receives another one.
    request = R.comm.start(R.comm.permute(x, [[0, 1], [1, 0]], ...), received)
    y0 = R.matmul(x, w)
    _ = R.comm.wait(request)
    y1 = R.matmul(received, w)
    y = R.call_dps_packed("tvm_ipc.assemble", (team, R.shape([...]), y0, y1), ...)

A reduce-scatter along the marked axis:
    h = R.matmul(x, w)                           # x: (2 * m, k)
    y = R.comm.reduce_scatter(h, "sum", axis=0, ...)

After: a rank computes what another rank needs, and sends it while it computes the next.
    h0 = R.matmul(<the rows of the next rank in x>, w)
    request = R.comm.start(R.comm.permute(h0, [[0, 1], [1, 0]], ...), received)
    h1 = R.matmul(<the rows of this rank in x>, w)
    _ = R.comm.wait(request)
    y = R.call_dps_packed("tvm_ipc.reduce_slices", (kind, team, h1, received), ...)

The terms of a sum are added in the order of ranks, as the collective adds them. A ring that passes
partial sums on would add them in another order on each rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm
from tvm import relax

from tvm_ipc import comm
from tvm_ipc.analysis.shape_algebra import product_of
from tvm_ipc.analysis.uses import Uses
from tvm_ipc.comm import CollectiveAttrs
from tvm_ipc.comm.collective_attrs import reduction_of
from tvm_ipc.comm.collective_relax_op import dtype_of, extents
from tvm_ipc.comm.extent_arithmetic import item_bytes
from tvm_ipc.comm.legalize import team_argument
from tvm_ipc.packed_functions.program_function_declarations import ASSEMBLE, REDUCE_SLICES
from tvm_ipc.spmd.streams.emit_chunk import (
    ChunkEmitter,
    allocation,
    as_extents,
    is_aligned,
    is_leading,
)
from tvm_ipc.spmd.streams.find_marked_region import MarkedRegion
from tvm_ipc.transform.overlap.candidate_types import NotOverlappableError


def ring_of_chunks(region: MarkedRegion, streams: int, uses: Uses) -> list[relax.Binding]:
    """Return the bindings that compute a region whose chunks are the shards of ranks.

    Parameters
    ----------
    region : the region, which has a ring.
    streams : the number of chunks that are sent or computed at a time; with 1 nothing overlaps.
    uses : the uses of the function.
    """
    ring = _RingSchedule(region, streams, uses)
    assert region.ring is not None and region.ring.attrs is not None, "the region has a ring"
    return ring.gather() if region.ring.attrs.kind == "allgather" else ring.scatter()


class _RingSchedule:
    """Builds the bindings of a ring."""

    def __init__(self, region: MarkedRegion, streams: int, uses: Uses) -> None:
        assert region.ring is not None and region.ring.attrs is not None, "the region has a ring"
        self._region, self._ring = region, region.ring
        self._attrs: CollectiveAttrs = region.ring.attrs
        self._overlaps = streams > 1
        self._streams = streams
        self._ranks = region.chunks
        self._out = ChunkEmitter(region, uses)
        self._shards: dict[Any, relax.Var] = {}

    # ---- all-gather ---------------------------------------------------------------------------

    def gather(self) -> list[relax.Binding]:
        """Return the bindings of an all-gather and the operators after it."""
        operand, _ = self._ring.operands[0]
        if not self._region.members:
            self._gather_only(operand)
            return self._out.bindings
        shape, dtype = list(extents(operand.ty) or []), dtype_of(operand.ty)
        slots = [self._out.empty(shape, dtype) for _ in range(min(2, self._ranks - 1))]
        block, results = operand, []
        for step in range(self._ranks):
            request = None
            if step < self._ranks - 1:
                received = self._out.emit(comm.view(slots[step % 2], 0, shape), "received")
                request = self._send(block, 1, received)
                if not self._overlaps:
                    self._wait(request)
            results.append(self._operators(-step, {self._ring.step.var: block}))
            if request is not None:
                if self._overlaps:
                    self._wait(request)
                block = received
        self._assemble(results)
        return self._out.bindings

    def _gather_only(self, operand: relax.Expr) -> None:
        """Receive the shards of all ranks in the result."""
        target, axis = self._region.target.var, self._region.axis
        shape = list(extents(operand.ty) or [])
        direct = is_leading(shape, axis)
        stacked = allocation([self._ranks, *shape], dtype_of(operand.ty))
        if direct:
            whole = target
            dims = list(extents(target.ty) or [])
            self._out.bind(target, allocation(dims, dtype_of(target.ty)))
        else:
            whole = self._out.emit(stacked, "received")
        size = product_of(shape)
        block = operand
        for step in range(1, self._ranks):
            place = comm.own_slice(whole, -step, shape, stride=size, team=self._attrs.team)
            received = self._out.emit(place, "received")
            self._wait(self._send(block, 1, received))
            block = received
        own = comm.assemble([operand], [(0, size, 0)], whole, team=self._attrs.team)
        self._out.emit(own, "_")
        if not direct:
            self._unstack(whole)

    # ---- reduce-scatter -----------------------------------------------------------------------

    def scatter(self) -> list[relax.Binding]:
        """Return the bindings of a reduce-scatter and the operators before it."""
        target = self._region.target.var
        shape, dtype = list(extents(target.ty) or []), dtype_of(target.ty)
        received: list[relax.Var] = []
        requests: list[relax.Var] = []
        waited = 0
        for shift in range(1, self._ranks):
            while len(requests) - waited >= self._streams:
                self._wait(requests[waited])
                waited += 1
            chunk = self._scattered_chunk(shift)
            received.append(self._out.empty(shape, dtype))
            requests.append(self._send(chunk, shift, received[-1]))
            if not self._overlaps:
                self._wait(requests[waited])
                waited += 1
        own = self._scattered_chunk(0)
        for request in requests[waited:]:
            self._wait(request)
        kind = relax.prim_value(int(reduction_of(self._attrs)))
        arguments = relax.Tuple([kind, team_argument(self._attrs.team), own, *received])
        call = relax.op.call_dps_packed(REDUCE_SLICES.name, arguments, out_ty=target.ty)
        self._out.bind(target, call)
        return self._out.bindings

    def _scattered_chunk(self, shift: int) -> relax.Expr:
        """Return the chunk that belongs to the rank `shift` positions after this one."""
        operand, axis = self._ring.operands[0]
        if self._region.members:
            return self._operators(shift, {})
        return self._shard(operand, axis, shift)

    # ---- chunks -------------------------------------------------------------------------------

    def _operators(self, shift: int, blocks: dict[Any, relax.Expr]) -> relax.Expr:
        """Return the result of the members for the chunk of the rank at a shift.

        Parameters
        ----------
        shift : the position of that rank relative to this one.
        blocks : values of tensors for this chunk.
        """
        values = dict(blocks)
        value: relax.Expr | None = None
        for member in self._region.members.values():
            operands = []
            for tensor, axis in member.operands:
                if axis is None:
                    operands.append(self._out.whole(tensor))
                elif isinstance(tensor, relax.Var) and tensor in values:
                    operands.append(values[tensor])
                else:
                    values[tensor] = self._shard(tensor, axis, shift)
                    operands.append(values[tensor])
            value = values[member.step.var] = self._out.operator(member, operands, None)
        assert value is not None, "a region has members"
        return value

    def _shard(self, tensor: relax.Expr, axis: int | None, shift: int) -> relax.Var:
        """Return the chunk of a tensor that belongs to the rank at a shift, as a view."""
        assert axis is not None, "the tensor is split"
        dims = self._out.chunk_dims(tensor, axis)
        if not is_aligned(dims, dtype_of(tensor.ty)):
            raise NotOverlappableError(
                "the shards of a rank are not a multiple of 64 bytes, which kernels need"
            )
        if not is_leading(dims, axis):
            key = tensor, axis
            if key not in self._shards:
                self._shards[key] = self._out.shards_first(tensor, axis, self._ranks)
            tensor = self._shards[key]
        call = comm.own_slice(tensor, shift, dims, team=self._attrs.team)
        return self._out.emit(call, "rows")

    def _send(self, chunk: relax.Expr, shift: int, received: relax.Expr) -> relax.Var:
        """Send a chunk to the rank at a shift, and receive one from the rank at minus the shift."""
        attrs, ranks = self._attrs, self._ranks
        call = comm.permute(
            chunk,
            [[rank, (rank + shift) % ranks] for rank in range(ranks)],
            team=attrs.team,
            workers=int(attrs.workers) if isinstance(attrs.team, str) else None,
            backend=str(attrs.backend),
        )
        return self._out.emit(comm.start(call, received), "request")

    def _wait(self, request: relax.Expr) -> None:
        self._out.emit(comm.wait(request), "_")

    # ---- results ------------------------------------------------------------------------------

    def _assemble(self, results: Sequence[relax.Expr]) -> None:
        """Bind the results for the chunks of this rank, the previous rank and so on."""
        target, axis = self._region.target.var, self._region.axis
        shape = self._out.chunk_dims(target, axis)
        dtype = dtype_of(target.ty)
        size = product_of(shape, item_bytes(tvm.DataType(dtype)))
        numbers = [n for step in range(len(results)) for n in (-step % self._ranks, size, 0)]
        positions = relax.ShapeExpr(as_extents(numbers))
        arguments = relax.Tuple([team_argument(self._attrs.team), positions, *results])
        if is_leading(shape, axis):
            call = relax.op.call_dps_packed(ASSEMBLE.name, arguments, out_ty=target.ty)
            self._out.bind(target, call)
            return
        ty = relax.TensorType(as_extents([self._ranks, *shape]), dtype)
        stacked = relax.op.call_dps_packed(ASSEMBLE.name, arguments, out_ty=ty)
        self._unstack(self._out.emit(stacked, "stacked"))

    def _unstack(self, stacked: relax.Expr) -> None:
        """Bind chunks in a new axis 0 to the result, side by side along the marked axis."""
        target, axis = self._region.target.var, self._region.axis
        dims = list(extents(target.ty) or [])
        order = [*range(1, axis + 1), 0, *range(axis + 1, len(dims) + 1)]
        moved = self._out.emit(relax.op.permute_dims(stacked, order), "moved")
        self._out.bind(target, relax.op.reshape(moved, relax.ShapeExpr(dims)))
