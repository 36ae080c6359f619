# SPDX-License-Identifier: Apache-2.0
"""Schedule of a marked region with a chunk for each index along the marked axis.

Before, with 2 workers and y marked along axis 0:
    h = R.matmul(x, w)                       # x: (3, m, k)
    y = R.comm.allreduce(h, "sum", ...)

After, with 2 streams:
    y = R.builtin.alloc_tensor(R.shape([3, m, n]), ...)
    h0 = R.matmul(<chunk 0 of x>, w)
    request = R.comm.start(R.comm.allreduce(h0, "sum", ...), <chunk 0 of y>)
    h1 = R.matmul(<chunk 1 of x>, w)
    request1 = R.comm.start(R.comm.allreduce(h1, "sum", ...), <chunk 1 of y>)
    _ = R.comm.wait(request)
    h2 = R.matmul(<chunk 2 of x>, w)
    request2 = R.comm.start(R.comm.allreduce(h2, "sum", ...), <chunk 2 of y>)
    _ = R.comm.wait(request1)
    _ = R.comm.wait(request2)

A collective ends a stage. With n streams, stage k of chunk i begins when stage k + 1 of chunk i - n
has ended, so that both can use the same buffer. On a GPU, chunk i may be computed on stream i % n:
see `tvm_ipc.transform.overlap.compute_streams`.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax

from tvm_ipc import comm
from tvm_ipc.analysis.shape_algebra import product_of
from tvm_ipc.analysis.uses import Uses
from tvm_ipc.comm.collective_relax_op import dtype_of, extents
from tvm_ipc.comm.extent_arithmetic import item_bytes
from tvm_ipc.comm.legalize import team_argument
from tvm_ipc.packed_functions.program_function_declarations import ASSEMBLE
from tvm_ipc.spmd.streams.emit_chunk import (
    ChunkEmitter,
    allocation,
    as_extents,
    in_place,
    is_leading,
)
from tvm_ipc.spmd.streams.find_marked_region import MarkedRegion, Member
from tvm_ipc.transform.overlap.compute_streams import ComputeStreams


def pipelined_chunks(
    region: MarkedRegion, streams: int, uses: Uses, computed_on: int = 1
) -> list[relax.Binding]:
    """Return the bindings that compute a region chunk by chunk, `streams` chunks at a time.

    Parameters
    ----------
    region : the region.
    streams : the number of chunks at a time.
    uses : the uses of the function.
    computed_on : the number of streams of a GPU on which the chunks are computed.
    """
    return _ChunkSchedule(region, streams, uses, computed_on).build()


class _ChunkSchedule:
    """Builds the bindings of a region."""

    def __init__(self, region: MarkedRegion, streams: int, uses: Uses, computed_on: int) -> None:
        self._region, self._streams = region, min(streams, region.chunks)
        self._out = ChunkEmitter(region, uses)
        self._computed_on = ComputeStreams(lambda call: self._out.emit(call, "_"), computed_on)
        self._target = region.members[region.target.var]
        stages = [member.stage + (member.attrs is not None) for member in region.collectives]
        self._last = max(stages)
        #: The number of chunks for which each stage has been emitted.
        self._done = [0] * (self._last + 1)
        #: By chunk and tensor, or by chunk, tensor and axis of a slice.
        self._values: dict[Any, relax.Expr] = {}
        #: The requests of each chunk in each stage.
        self._requests: dict[tuple[int, int], list[tuple[Member, Any, Any]]] = {}
        self._slots: dict[Any, list[relax.Var]] = {}
        dims = self._out.chunk_dims(region.target.var, region.axis)
        attrs = self._target.attrs
        #: Whether the chunks of the result are received where they belong.
        self._received_in_place = (
            attrs is not None and in_place(attrs, dims) and is_leading(dims, region.axis)
        )

    def build(self) -> list[relax.Binding]:
        """Return the bindings."""
        target = self._region.target.var
        if self._received_in_place:
            shape = list(extents(target.ty) or [])
            self._out.bind(target, allocation(shape, dtype_of(target.ty)))
        self._computed_on.fork()
        self._reach(self._last, self._region.chunks - 1)
        self._computed_on.join()
        if not self._received_in_place:
            self._join()
        return self._out.bindings

    def _reach(self, stage: int, chunk: int) -> None:
        """Emit a stage of all chunks up to one, and what must be before it."""
        chunks = self._region.chunks
        while self._done[stage] <= chunk:
            current = self._done[stage]
            if stage > 0:  # later chunks are on their way meanwhile
                self._reach(stage - 1, min(current + self._streams - 1, chunks - 1))
            if stage < self._last and current >= self._streams:
                self._reach(stage + 1, current - self._streams)
            if self._done[stage] == current:
                self._emit(stage, current)
                self._done[stage] += 1

    def _emit(self, stage: int, index: int) -> None:
        """Emit one stage of one chunk: waits for requests, operators, and new requests."""
        self._computed_on.use(index)
        for member, request, received in self._requests.pop((stage, index), []):
            self._out.emit(comm.wait(request), "_")
            assert member.attrs is not None, "only collectives are started"
            dims = self._out.chunk_dims(member.step.var, member.axis)
            value = self._out.concatenated(member.attrs, received, dims)
            self._values[index, member.step.var] = value
        for member in self._region.members.values():
            if member.stage != stage:
                continue
            operands = [self._operand(member, k, index) for k in range(len(member.operands))]
            if member.attrs is None:
                value = self._out.operator(member, operands, index)
                self._values[index, member.step.var] = value
                continue
            sent = self._out.chunk_dims(member.operands[0][0], member.axis)
            received = self._receive_buffer(member, index, sent)
            request = self._out.start(member.attrs, operands[0], received)
            self._requests.setdefault((stage + 1, index), []).append((member, request, received))

    def _operand(self, member: Member, position: int, index: int) -> relax.Expr:
        """Return an operand of a member for a chunk."""
        tensor, axis = member.operands[position]
        if axis is None:
            return self._out.whole(tensor)
        if isinstance(tensor, relax.Var) and tensor in self._region.members:
            return self._values[index, tensor]
        key = index, tensor, axis, member.attrs is None
        if key not in self._values:
            for_kernel = member.attrs is None or member.attrs.split_axis is not None
            self._values[key] = self._out.slice(tensor, axis, index, for_kernel=for_kernel)
        return self._values[key]

    def _receive_buffer(self, member: Member, index: int, sent: list[Any]) -> relax.Var:
        """Return the buffer that receives a chunk: a part of the result, or one of the slots."""
        attrs, variable = member.attrs, member.step.var
        assert attrs is not None, "it is a collective"
        dims = self._out.chunk_dims(variable, member.axis)
        if member is self._target and self._received_in_place:
            return self._out.emit(comm.view(variable, product_of([*dims, index]), dims), "part")
        shape = dims if in_place(attrs, dims) else self._out.received_dims(attrs, sent)
        slots = self._slots.setdefault(variable, [])
        number = index % self._slot_count(member)
        if number == len(slots):
            slots.append(self._out.empty(shape, dtype_of(variable.ty)))
        # Each chunk gets a new view of its slot, so that no pass merges operators of chunks that
        # use the same slot.
        return self._out.emit(comm.view(slots[number], 0, shape), "part")

    def _slot_count(self, member: Member) -> int:
        """Return the number of buffers: one for each chunk if later stages read the result too."""
        readers = [
            other.stage
            for other in self._region.members.values()
            if any(operand.same_as(member.step.var) for operand, _ in other.operands)
        ]
        late = any(stage > member.stage + 1 for stage in readers)
        unread = member is self._target  # the chunks are joined at the end
        return self._region.chunks if late or unread else self._streams

    def _join(self) -> None:
        """Bind the chunks of the result, side by side, to the marked tensor."""
        target, axis = self._region.target.var, self._region.axis
        chunks = [self._values[index, target] for index in range(self._region.chunks)]
        dims = self._out.chunk_dims(target, axis)
        if not is_leading(dims, axis):
            self._out.bind(target, relax.op.concat(chunks, axis))
            return
        size = product_of(dims, item_bytes(tvm.DataType(dtype_of(target.ty))))
        starts = as_extents([n for k in range(len(chunks)) for n in (0, 0, size * k)])
        attrs = self._region.collectives[0].attrs
        assert attrs is not None, "it is a collective"
        arguments = relax.Tuple([team_argument(attrs.team), relax.ShapeExpr(starts), *chunks])
        call = relax.op.call_dps_packed(ASSEMBLE.name, arguments, out_ty=target.ty)
        self._out.bind(target, call)
