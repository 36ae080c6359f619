# SPDX-License-Identifier: Apache-2.0
"""Builders of bindings that compute matmuls in chunks of rows, overlapped with communication.

Rows that are gathered, with D ranks. A rank exposes its rows in chunks, and peers multiply them
without a copy:

    exposed = R.call_pure_packed("tvm_ipc.expose", <chunk of x>, team)           for each chunk
    own = R.matmul(x, w)
    rows = R.call_pure_packed("tvm_ipc.peer_view", exposed, k, R.shape([...]))   for each chunk,
    result = R.matmul(rows, w)                                                   for k in 1 .. D - 1
    z = R.call_dps_packed("tvm_ipc.assemble", (team, R.shape([...]), own, result, ...))

Sums that are scattered:

    rows = R.call_pure_packed("tvm_ipc.own_slice", x, team, k, ...)              for each chunk,
    exposed = R.call_pure_packed("tvm_ipc.expose", R.matmul(rows, w), team)      for k in 1 .. D - 1
    own = R.matmul(<the rows of this rank>, w)
    peer = R.call_pure_packed("tvm_ipc.peer_view", exposed, -k, R.shape([...]))
    sum = R.call_dps_packed("tvm_ipc.reduce_slices", (kind, team, own, peer, ...))
    z = R.call_dps_packed("tvm_ipc.assemble", (team, R.shape([...]), sum, ...))

For an all-reduce, the sums are exposed and assembled too. Rows that cannot be split evenly are
multiplied and exposed by all ranks, and each rank sums them. Uneven shards are padded with zeros
before a reduce-scatter, and the padding is sliced off after an all-gather.

All bindings are pure, so the matmuls are fused, offloaded and lowered like others.
`ElideConcatCopies` computes the slices directly in the assembled tensor and releases exposed
tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax, tirx

from tvm_ipc.analysis.binding_builders import do
from tvm_ipc.analysis.program_order import Step
from tvm_ipc.analysis.views_and_writes_of_calls import operator_of
from tvm_ipc.comm.collective_attrs import reduction_of
from tvm_ipc.comm.extent_arithmetic import constant, divides, simplified
from tvm_ipc.comm.legalize import team_argument
from tvm_ipc.packed_functions.program_function_declarations import (
    ASSEMBLE,
    EXPOSE,
    OWN_SLICE,
    PEER_VIEW,
    REDUCE_SLICES,
    VIEW,
)
from tvm_ipc.transform.overlap.candidate_types import Candidate, MatmulChain, RowLayout


@dataclass(frozen=True, eq=False)
class Chunk:
    """A range of rows in a block of a rank's shard."""

    block: int
    start: Any
    rows: Any


def chunks_of(site: Candidate, chunks: int) -> list[Chunk]:
    """Return the rows of a shard in about `chunks` chunks; a chunk has rows of one block."""
    blocks = range(site.input_layout.blocks)
    if not blocks:  # their number is unknown
        return []
    total, per_block = site.rows, -(-chunks // site.input_layout.blocks)
    number = constant(total)
    step = per_block * site.unit
    if number is not None:
        size = -(-number // step) * site.unit or 1
        starts = range(0, number, size) if number else (0,)
        return [Chunk(b, start, min(size, number - start)) for b in blocks for start in starts]
    if per_block == 1:
        return [Chunk(b, 0, simplified(total)) for b in blocks]
    if divides(step, total):
        size = simplified(tirx.floordiv(total, per_block))
        return [Chunk(b, simplified(size * k), size) for b in blocks for k in range(per_block)]
    size = simplified(tirx.floordiv(total + (step - 1), step) * site.unit)
    symbolic = [simplified(tirx.min(total, size * k)) if k else 0 for k in range(per_block)]
    return [
        Chunk(b, start, simplified(tirx.min(size, total - start)))
        for b in blocks
        for start in symbolic
    ]


class BindingBuilder:
    """A builder of the bindings that replace those of a candidate."""

    def __init__(self, site: Candidate) -> None:
        self._site = site
        self._team = team_argument(site.attrs.team)
        self._builder = relax.BlockBuilder()
        self._new_var = relax.DataflowVar if site.collective.in_dataflow else relax.Var
        self._bindings: list[relax.Binding] = []

    def take(self) -> list[relax.Binding]:
        """Return and remove the bindings that were built since the last call."""
        bindings, self._bindings = self._bindings, []
        return bindings

    def new_builder(self) -> BindingBuilder:
        """Return an empty builder for the same candidate."""
        return BindingBuilder(self._site)

    def append(self, binding: relax.Binding) -> None:
        """Add a binding that was built elsewhere."""
        self._bindings.append(binding)

    def call_pure(self, function: str, args: list[Any], shape: list[Any], dtype: str) -> Any:
        """Bind the tensor that a packed function returns to a new variable."""
        ty = relax.TensorType(shape, dtype)
        return self.emit("rows", _call_pure(function, [*args, relax.ShapeExpr(shape)], ty))

    def emit(self, name: str, value: relax.Expr) -> Any:
        """Bind a value to a new variable."""
        value = self._builder.normalize(value)
        variable = self._new_var(name, value.ty)
        self._bindings.append(relax.VarBinding(variable, value))
        return variable

    def rebind(self, step: Step, value: relax.Expr) -> None:
        """Bind a value to the variable of an existing binding, which it replaces."""
        value = self._builder.normalize(value)
        self._bindings.append(relax.VarBinding(step.var, value, step.binding.span))

    def apply_chain(self, chain: MatmulChain, rows: Any, matrix: Any = None) -> Any:
        """Return the result of a chain for `rows` in place of its operand.

        `matrix` replaces the right operand of the matmul.
        """
        left, right = chain.matmul.value.args
        replaced = {left: rows} if matrix is None else {left: rows, right: matrix}
        for step in (chain.matmul, *chain.epilogue):
            value = step.value
            if operator_of(value) != "relax.reshape":  # a chunk of rows has its own shape
                args = [
                    replaced[arg]
                    if isinstance(arg, relax.Var) and arg in replaced
                    else self._drop_unit_axes(rows, arg)
                    for arg in value.args
                ]
                call = relax.Call(value.op, args, value.attrs, list(value.ty_args), value.span)
                rows = self.emit(str(step.var.name), call)
            replaced[step.var] = rows
        return rows

    def _drop_unit_axes(self, rows: Any, arg: Any) -> Any:
        """Return an argument that is the same for all rows, without leading axes of extent 1."""
        if not isinstance(arg.ty, relax.TensorType) or arg.ty.ndim <= rows.ty.ndim:
            return arg
        shape = arg.ty.shape.values[int(arg.ty.ndim) - int(rows.ty.ndim) :]
        return self.emit("same", relax.op.reshape(arg, shape))

    def match_cast(self, name: str, value: relax.Expr, ty: Any) -> Any:
        """Bind a value to a new variable of a type that introduces symbolic extents."""
        variable = self._new_var(name, ty)
        self._bindings.append(relax.MatchCast(variable, value, ty))
        return variable

    def assemble_call(self, positions: list[Any], slices: list[Any], ty: Any) -> relax.Call:
        """Return a call that assembles slices; three positions each: shift, stride and start."""
        shape = relax.ShapeExpr([_as_extent(number) for number in positions])
        return _call_dps(ASSEMBLE.name, [self._team, shape, *slices], ty)

    def assemble_into(self, out: Any, positions: list[Any], slices: list[Any]) -> None:
        """Write slices to their positions in an allocated tensor."""
        shape = relax.ShapeExpr([_as_extent(number) for number in positions])
        self._bindings.append(
            do(relax.ExternFunc(ASSEMBLE.name), [self._team, shape, *slices, out])
        )

    def assemble(self, step: Step, positions: list[Any], slices: list[Any]) -> None:
        """Bind assembled slices to the variable of an existing binding."""
        self.rebind(step, self.assemble_call(positions, slices, step.var.ty))


class ChunkedBuilder:
    """Replaces a collective and its matmuls by matmuls of chunks that peers read in place."""

    def __init__(self, site: Candidate, chunks: int) -> None:
        self._site = site
        self._team = team_argument(site.attrs.team)
        self._ranks = site.ranks
        self._chunks = chunks_of(site, chunks)
        self._whole = [Chunk(block, 0, site.rows) for block in range(site.input_layout.blocks)]
        self._operand = site.operand
        self._out = BindingBuilder(site)
        self._exposed: list[Any] = []

    def take(self) -> list[relax.Binding]:
        """Return and remove the bindings that were built since the last call."""
        return self._out.take()

    # ---- all-gather -----------------------------------------------------------------------

    def expose(self) -> None:
        """Expose the rows of this rank, chunk by chunk."""
        name = str(self._site.operand.name)
        self._exposed = [
            self._expose(name, self._own_rows(chunk, self._chunks)) for chunk in self._chunks
        ]

    def multiply(self, chains: Sequence[MatmulChain]) -> None:
        """Multiply the rows of this rank, then those of peers as they become available."""
        site = self._site
        slices: list[list[Any]] = [[] for _ in chains]
        positions: list[list[Any]] = [[] for _ in chains]

        def add(rows: Any, shift: int, chunk: Chunk) -> None:
            for k, chain in enumerate(chains):
                layout = site.output_layouts[site.chains.index(chain)]
                slices[k].append(self._out.apply_chain(chain, rows))
                positions[k] += self._position(layout, shift, chunk)

        for chunk in self._whole:
            add(self._own_rows(chunk, self._whole), 0, chunk)
        for shift in range(1, self._ranks):
            for chunk, exposed in zip(self._chunks, self._exposed, strict=True):
                add(self._peer_view(exposed, shift, site.input_layout, chunk), shift, chunk)
        for k, chain in enumerate(chains):
            if not site.uneven:
                self._out.assemble(chain.last, positions[k], slices[k])
                continue
            layout = site.output_layouts[site.chains.index(chain)]
            ty = relax.TensorType([_as_extent(extent) for extent in layout.shape], layout.dtype)
            call = self._out.assemble_call(positions[k], slices[k], ty)
            self._slice_rows(chain.last, layout, self._out.emit("assembled", call))

    # ---- reduce-scatter and all-reduce ----------------------------------------------------

    def sum(self) -> None:
        """Multiply and expose the rows of peers, multiply the own rows, and reduce the results.

        For an all-reduce, also expose the sums and assemble them with those of peers.
        """
        site, output = self._site, self._site.output_layouts[0]
        (chain,) = site.chains
        if site.uneven:
            self._operand = self._pad_operand()
        exposed: list[list[Any]] = [[] for _ in self._chunks]
        # Peers read results in this order: the result that is read first must be exposed first.
        for chunk, exposed_of_chunk in zip(self._chunks, exposed, strict=True):
            for shift in range(1, self._ranks):
                result = self._out.apply_chain(chain, self._own_slice(shift, chunk))
                exposed_of_chunk.append(self._expose("product", result))
        if constant(site.remainder) != 0:
            start, remainder_chunk = site.rows * site.ranks, Chunk(0, 0, site.remainder)
            rows = self._view(
                site.operand,
                start * site.input_layout.row_bytes,
                site.input_layout,
                remainder_chunk,
            )
            remainder = self._out.apply_chain(chain, rows)
            exposed_remainder = self._expose("remainder", remainder)
        own_results = [
            self._out.apply_chain(chain, self._own_slice(0, chunk)) for chunk in self._whole
        ]
        sums = []
        for chunk, exposed_of_chunk in zip(self._chunks, exposed, strict=True):
            own_result = own_results[chunk.block]
            if len(self._chunks) > len(self._whole):
                own_result = self._view(own_result, output.row_bytes * chunk.start, output, chunk)
            rows = Chunk(chunk.block, chunk.start, own_result.ty.shape.ty.values[output.axis])
            peer_results = [
                self._peer_view(tensor, -shift, output, rows)
                for shift, tensor in enumerate(exposed_of_chunk, 1)
            ]
            sums.append(self._reduce([own_result, *peer_results]))
        if site.kind == "reduce_scatter":
            offsets = [self._offset(output, chunk, 1) for chunk in self._chunks]
            positions = [n for offset in offsets for n in (0, 0, offset)]
            self._out.assemble(site.collective, positions, sums)
            return
        positions = [n for chunk in self._chunks for n in self._position(output, 0, chunk)]
        exposed_sums = [self._expose("sum", tensor) for tensor in sums]
        if constant(site.remainder) != 0:
            rows = Chunk(0, 0, remainder.ty.shape.ty.values[output.axis])
            shifts = range(1, self._ranks)
            peer_results = [
                self._peer_view(exposed_remainder, -shift, output, rows) for shift in shifts
            ]
            sums.append(self._reduce([remainder, *peer_results]))
            positions += [0, 0, start * output.row_bytes]
        for shift in range(1, self._ranks):
            for chunk, exposed_sum in zip(self._chunks, exposed_sums, strict=True):
                sums.append(self._peer_view(exposed_sum, shift, output, chunk))
                positions += self._position(output, shift, chunk)
        self._out.assemble(site.collective, positions, sums)

    def _reduce(self, slices: list[Any]) -> Any:
        """Return the reduction of the slices of all ranks."""
        kind = relax.prim_value(int(reduction_of(self._site.attrs)))
        call = _call_dps(REDUCE_SLICES.name, [kind, self._team, *slices], slices[0].ty)
        return self._out.emit("sum", call)

    # ---- uneven shards --------------------------------------------------------------------

    def _pad_operand(self) -> Any:
        """Return the operand padded with zeros to the rows of all shards."""
        layout, site = self._site.input_layout, self._site
        shape = [_as_extent(extent) for extent in layout.shape]
        shape[layout.axis] = _as_extent(site.extent)
        padding_shape = [*shape]
        padding_shape[layout.axis] = _as_extent(site.rows * site.ranks - site.extent)
        operand = self._out.emit("operand", relax.op.reshape(site.operand, shape))
        padding = self._out.emit("padding", relax.op.zeros(padding_shape, layout.dtype))
        return self._out.emit("padded", relax.op.concat([operand, padding], layout.axis))

    def _slice_rows(self, step: Step, layout: RowLayout, assembled: Any) -> None:
        """Bind an assembled tensor without its padding to the variable of an existing binding."""
        ty = step.var.ty
        if layout.blocks == 1:
            sliced = _call_pure(VIEW.name, [assembled, 0, ty.shape], ty)
        else:
            end = relax.prim_value(_as_extent(self._site.extent))
            rows = relax.op.strided_slice(assembled, [layout.axis], [0], [end], assume_inbound=True)
            sliced = relax.op.reshape(self._out.emit("rows", rows), ty.shape)
        self._out.rebind(step, sliced)

    # ---- rows -----------------------------------------------------------------------------

    def _own_rows(self, chunk: Chunk, chunks: Sequence[Chunk]) -> Any:
        """Return one of the chunks into which the rows of this rank are split."""
        operand, layout = self._site.operand, self._site.input_layout
        if len(chunks) == 1:
            return operand
        return self._view(operand, self._offset(layout, chunk, 1), layout, chunk)

    def _offset(self, layout: RowLayout, chunk: Chunk, ranks: int) -> Any:
        """Return the offset of a chunk in bytes if each block has the rows of `ranks` ranks."""
        return (self._site.rows * (chunk.block * ranks) + chunk.start) * layout.row_bytes

    def _position(self, layout: RowLayout, shift: int, chunk: Chunk) -> list[Any]:
        """Return the position of a peer's chunk among all rows: shift, stride and start."""
        return [shift, self._site.rows * layout.row_bytes, self._offset(layout, chunk, self._ranks)]

    def _own_slice(self, shift: int, chunk: Chunk) -> Any:
        """Return a chunk of the rows that belong to the rank `shift` positions after this one."""
        layout = self._site.input_layout
        position = self._position(layout, shift, chunk)
        return self._rows(OWN_SLICE.name, [self._operand, self._team, *position], layout, chunk)

    def _view(self, tensor: Any, offset: Any, layout: RowLayout, chunk: Chunk) -> Any:
        return self._rows(VIEW.name, [tensor, offset], layout, chunk)

    def _peer_view(self, exposed: Any, shift: int, layout: RowLayout, chunk: Chunk) -> Any:
        return self._rows(PEER_VIEW.name, [exposed, shift], layout, chunk)

    def _rows(self, name: str, args: list[Any], layout: RowLayout, chunk: Chunk) -> Any:
        """Return rows that a packed function returns; a symbolic number of rows gets a name."""
        # TVM's CanonicalizeBindings substitutes the name by the simplified extent. If that is a
        # variable, and the type here is not simplified, the variable is then bound to an expression
        # of itself, and the next substitution recurses until the stack overflows.
        extent = simplified(_as_extent(chunk.rows))
        shape = layout.shape_of_rows(extent)
        ty = relax.TensorType(shape, layout.dtype)
        rows = self._out.emit("rows", _call_pure(name, [*args, relax.ShapeExpr(shape)], ty))
        if constant(extent) is not None or isinstance(extent, tirx.Var):
            return rows
        named = relax.TensorType(layout.shape_of_rows(tirx.Var("rows", "int64")), layout.dtype)
        return self._out.match_cast("rows", rows, named)

    def _expose(self, name: str, tensor: Any) -> Any:
        call = _call_pure(EXPOSE.name, [tensor, self._team], relax.AnyType())
        return self._out.emit(f"{name}_exposed", call)


def _call_dps(name: str, args: list[Any], ty: Any) -> relax.Call:
    """Return a call of a packed function that writes its result to its last parameter."""
    return relax.op.call_dps_packed(name, relax.Tuple(args), out_ty=ty)


def _call_pure(name: str, args: list[Any], ty: Any) -> relax.Call:
    """Return a pure call of a packed function; arguments may be Python integers."""
    exprs = [arg if isinstance(arg, relax.Expr) else _as_extent(arg) for arg in args]
    exprs = [relax.prim_value(expr) if tvm.ir.is_prim_expr(expr) else expr for expr in exprs]
    return relax.op.call_pure_packed(name, *exprs, ty_args=[ty])


def _as_extent(number: Any) -> Any:
    """Return a number as an extent."""
    return tirx.IntImm("int64", number) if isinstance(number, int) else number
