# SPDX-License-Identifier: Apache-2.0
"""Builder of the bindings of a chunk: slices of inputs, operators, and asynchronous collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm
from tvm import relax, tirx

from tvm_ipc import comm
from tvm_ipc.analysis.binding_builders import alloc
from tvm_ipc.analysis.shape_algebra import product_of
from tvm_ipc.analysis.uses import Uses, binds
from tvm_ipc.analysis.views_and_writes_of_calls import operator_of
from tvm_ipc.comm import CollectiveAttrs
from tvm_ipc.comm.collective_relax_op import dtype_of, extents
from tvm_ipc.comm.expert_ops import RAGGED_OPERATORS
from tvm_ipc.comm.extent_arithmetic import constant, item_bytes, simplified
from tvm_ipc.packed_functions.program_function_declarations import KERNEL_ALIGNMENT
from tvm_ipc.spmd.rules.axis_label_rule import LocalCall
from tvm_ipc.spmd.rules.operation import replace_tensors, short_name
from tvm_ipc.spmd.streams.find_marked_region import MarkedRegion, Member
from tvm_ipc.transform.overlap.candidate_types import NotOverlappableError
from tvm_ipc.tvm_moved_names import Analyzer


class ChunkEmitter:
    """Emits bindings outside of dataflow blocks, which replace those of a region.

    Attributes
    ----------
    bindings : the bindings that were emitted.
    """

    def __init__(self, region: MarkedRegion, uses: Uses) -> None:
        self._region, self._uses = region, uses
        self._builder = relax.BlockBuilder()
        self.bindings: list[relax.Binding] = []

    # ---- bindings ---------------------------------------------------------------------------

    def emit(self, value: relax.Expr, name: str = "chunk") -> relax.Var:
        """Bind a value to a new variable."""
        value = self._builder.normalize(value)
        variable = relax.Var(name, value.ty)
        self.bindings.append(relax.VarBinding(variable, value))
        return variable

    def bind(self, variable: relax.Var, value: relax.Expr) -> None:
        """Bind a value to an existing variable."""
        self.bindings.append(relax.VarBinding(variable, self._builder.normalize(value)))

    def empty(self, shape: Sequence[Any], dtype: str, name: str = "received") -> relax.Var:
        """Allocate a tensor."""
        return self.emit(allocation(shape, dtype), name)

    # ---- operators --------------------------------------------------------------------------

    def operator(
        self, member: Member, operands: Sequence[relax.Expr], index: int | None
    ) -> relax.Var:
        """Return the result of an operator for a chunk, from the operands of the chunk.

        Parameters
        ----------
        member : the operator.
        operands : its tensors.
        index : the number of the chunk, None if it depends on the rank.
        """
        call = member.step.value
        tensors = iter(operands)
        arguments = [replace_tensors(argument, tensors) for argument in call.args]
        local = relax.Call(call.op, arguments, call.attrs, list(call.ty_args), call.span)
        rule = member.rule
        assert rule is not None, "an operator has a rule"
        if rule.local is not None:
            name = short_name(call)
            if operator_of(call) in RAGGED_OPERATORS:
                raise NotOverlappableError(
                    f"R.{name} communicates, and no rule splits it in chunks"
                )
            chunks = {member.label: self._region.chunks}
            dims = self.chunk_dims(member.step.var, member.axis)

            def position(_: int) -> relax.Expr:
                if index is None:
                    raise NotOverlappableError(f"R.{name} depends on the position of a chunk")
                return relax.const(index, "int64")

            local = rule.local(
                LocalCall(
                    call=local,
                    results=(dims,),
                    workers=chunks,
                    divisions={member.label: None},
                    teams={},
                    builder=self,
                    rank=position,
                    report=lambda _kind, _label, _why: None,
                )
            )
        return self.emit(local, str(member.step.var.name))

    def whole(self, operand: relax.Expr) -> relax.Expr:
        """Return an operand that all chunks use.

        The transpose of a matrix is repeated for each chunk, so that it is fused with the matmul.
        """
        step = self._uses.binding_of(operand)
        if step is not None and binds(step, "relax.permute_dims"):
            return self.emit(step.value, str(operand.name))
        return operand

    # ---- chunks -----------------------------------------------------------------------------

    def chunk_dims(self, tensor: Any, axis: int) -> list[Any]:
        """Return the extents of a chunk of a tensor."""
        dims = list(extents(tensor.ty) or [])
        dims[axis] = simplified(tirx.floordiv(dims[axis], self._region.chunks))
        return dims

    def slice(self, tensor: Any, axis: int, index: int, *, for_kernel: bool = True) -> relax.Var:
        """Return a chunk of a tensor: a view, or a copy if it is not contiguous or not aligned.

        Parameters
        ----------
        tensor : a tensor from outside of the region.
        axis : the axis of its chunks.
        index : the number of the chunk.
        for_kernel : whether a kernel reads it, which needs an aligned tensor.
        """
        dims = self.chunk_dims(tensor, axis)
        start = product_of([*dims[axis:], index])
        if (
            isinstance(tensor, relax.Var)
            and is_leading(dims, axis)
            and (not for_kernel or is_aligned(dims, dtype_of(tensor.ty)))
        ):
            return self.emit(comm.view(tensor, start, dims), "rows")
        begin = simplified(dims[axis] * index)
        end = simplified(dims[axis] * (index + 1))
        bounds = [relax.prim_value(_as_extent(bound)) for bound in (begin, end)]
        value = relax.op.strided_slice(tensor, [axis], bounds[:1], bounds[1:], assume_inbound=True)
        return self.emit(self._cast(value, dims), "rows")

    def _cast(self, value: relax.Expr, dims: list[Any]) -> relax.Expr:
        """Return a value whose type has the given extents."""
        value = self._builder.normalize(value)
        known = extents(value.ty)
        same = known is not None and all(
            Analyzer().can_prove_equal(a, b) for a, b in zip(known, dims, strict=True)
        )
        return value if same else relax.op.reshape(value, relax.ShapeExpr(dims))

    # ---- collectives ------------------------------------------------------------------------

    def start(self, attrs: CollectiveAttrs, tensor: relax.Expr, out: relax.Expr) -> relax.Var:
        """Start the collective of a chunk, which writes to `out`; return the request."""
        options = {
            "team": attrs.team,
            "workers": int(attrs.workers) if isinstance(attrs.team, str) else None,
            "backend": str(attrs.backend),
        }
        if attrs.split_axis is not None:
            tensor = self.shards_first(tensor, int(attrs.split_axis), int(attrs.workers))
        if attrs.kind == "allreduce":
            options.pop("workers")
            call = comm.allreduce(tensor, str(attrs.reduction), **options)
        elif attrs.kind == "allgather":
            call = comm.allgather(tensor, **options)
        elif attrs.kind == "reduce_scatter":
            call = comm.reduce_scatter(tensor, str(attrs.reduction), **options)
        else:
            call = comm.all_to_all(tensor, 0, 0, **options)
        return self.emit(comm.start(call, out), "request")

    def shards_first(self, tensor: relax.Expr, axis: int, ranks: int) -> relax.Var:
        """Return a tensor with the shards of each rank along an axis in a new axis 0."""
        dims = list(extents(tensor.ty) or [])
        shard = simplified(tirx.floordiv(dims[axis], ranks))
        if is_leading(dims, axis):
            shards = [ranks, *dims[:axis], shard, *dims[axis + 1 :]]
            return self.emit(relax.op.reshape(tensor, relax.ShapeExpr(as_extents(shards))))
        split = [*dims[:axis], ranks, shard, *dims[axis + 1 :]]
        stacked = self.emit(relax.op.reshape(tensor, relax.ShapeExpr(as_extents(split))))
        order = [axis, *range(axis), *range(axis + 1, len(split))]
        return self.emit(relax.op.permute_dims(stacked, order))

    def received_dims(self, attrs: CollectiveAttrs, dims: list[Any]) -> list[Any]:
        """Return the extents of what a rank receives, from the extents of the sent chunk."""
        dims = list(dims)
        if attrs.split_axis is not None:
            axis = int(attrs.split_axis)
            dims[axis] = simplified(tirx.floordiv(dims[axis], int(attrs.workers)))
        return dims if attrs.concat_axis is None else [int(attrs.workers), *dims]

    def concatenated(
        self, attrs: CollectiveAttrs, received: relax.Expr, dims: list[Any]
    ) -> relax.Expr:
        """Return a received chunk with the shards of all ranks in place.

        Parameters
        ----------
        attrs : the collective.
        received : what the rank received.
        dims : the extents of the chunk of the result.
        """
        if in_place(attrs, dims):
            return received
        axis = int(attrs.concat_axis or 0)
        order = [*range(1, axis + 1), 0, *range(axis + 1, len(dims) + 1)]
        moved = self.emit(relax.op.permute_dims(received, order))
        return self.emit(relax.op.reshape(moved, relax.ShapeExpr(as_extents(dims))))


def in_place(attrs: CollectiveAttrs, dims: Sequence[Any]) -> bool:
    """Return whether a collective writes its result in the order of its elements."""
    return attrs.concat_axis is None or is_leading(dims, int(attrs.concat_axis))


def is_leading(dims: Sequence[Any], axis: int) -> bool:
    """Return whether a part of a tensor along an axis is contiguous."""
    return all(constant(extent) == 1 for extent in dims[:axis])


def is_aligned(dims: Sequence[Any], dtype: str) -> bool:
    """Return whether tensors of these extents, one after another, are aligned for kernels."""
    size = product_of(dims, item_bytes(tvm.DataType(dtype)))
    return bool(Analyzer().can_prove_equal(tirx.floormod(_as_extent(size), KERNEL_ALIGNMENT), 0))


def allocation(shape: Sequence[Any], dtype: str) -> relax.Call:
    """Return a call that allocates a tensor."""
    ty = relax.TensorType(as_extents(shape), dtype)
    return alloc(relax.ShapeExpr(ty.shape.values), ty, 0, "global")


def as_extents(numbers: Sequence[Any]) -> list[Any]:
    """Return numbers as extents."""
    return [_as_extent(number) for number in numbers]


def _as_extent(number: Any) -> Any:
    return tirx.IntImm("int64", number) if isinstance(number, int) else number
