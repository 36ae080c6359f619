# SPDX-License-Identifier: Apache-2.0
"""Matmuls of any number of blocks of rows, overlapped with communication by loops over blocks.

A batch of sequences whose rows are split between ranks has a block of rows for each sequence.
`ChunkedBuilder` unrolls the blocks. This builder splits the blocks of a rank into a constant number
of chunks, which are exposed and read like those of `ChunkedBuilder`, and computes the blocks of a
chunk in a loop:

    exposed = R.call_pure_packed("tvm_ipc.expose", x, team)         # x: (n, m, k), n blocks
    loop(R.shape([0, n]), R.shape([0, 0]), x, w, out)               # the blocks of this rank
    rows = R.call_pure_packed("tvm_ipc.peer_view", exposed, 1, R.shape([n, m, k]))
    loop(R.shape([0, n]), R.shape([0, 1]), rows, w, out)            # those of a peer

The body of the loop multiplies one block:

    block = R.call_pure_packed("tvm_ipc.view", rows, <begin of block i>, R.shape([1, m, k]))
    R.call_packed("tvm_ipc.assemble", team, <position in out>, R.matmul(block, w), out)

The loop does not communicate, so the number of blocks may differ between runs, but not between
ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm import relax, tirx

from tvm_ipc.analysis.binding_builders import alloc
from tvm_ipc.analysis.shape_algebra import product_of
from tvm_ipc.comm.extent_arithmetic import constant, simplified
from tvm_ipc.packed_functions.program_function_declarations import OWN_SLICE, PEER_VIEW, VIEW
from tvm_ipc.transform.overlap.candidate_types import Candidate, MatmulChain, RowLayout
from tvm_ipc.transform.overlap.chunk_loops import Callee, PrivateFunctions, is_looped, run_loop
from tvm_ipc.transform.overlap.chunked_builder import Chunk, ChunkedBuilder


def number_of_blocks(site: Candidate) -> Any:
    """Return the number of blocks of rows of a candidate, which may be symbolic."""
    layout = site.input_layout
    return simplified(product_of(layout.shape[: layout.axis], 1))


def has_looped_blocks(site: Candidate) -> bool:
    """Return whether the blocks of rows of a candidate are computed in a loop."""
    return is_looped(number_of_blocks(site))


@dataclass(frozen=True, eq=False)
class _Group:
    """A chunk of a rank's rows: consecutive blocks."""

    first: Any
    blocks: Any


class LoopedBlocksBuilder(ChunkedBuilder):
    """Replaces a collective and its matmuls by loops over the blocks of rows of each chunk."""

    def __init__(
        self, site: Candidate, chunks: int, functions: PrivateFunctions, name: str
    ) -> None:
        super().__init__(site, chunks)
        self._functions = functions
        self._prefix = f"{name}_{site.collective.var.name}"
        self._blocks = number_of_blocks(site)
        self._all = _Group(tirx.IntImm("int64", 0), self._blocks)
        self._groups = self._split(chunks)

    def _split(self, chunks: int) -> list[_Group]:
        """Return the blocks in groups of equal size, of which the last ones may have fewer."""
        blocks = self._blocks
        if chunks == 1:
            return [self._all]
        size = simplified(tirx.floordiv(blocks + (chunks - 1), chunks))
        groups = []
        for number in range(chunks):
            first = simplified(tirx.min(blocks, size * number)) if number else self._all.first
            groups.append(_Group(first, simplified(tirx.min(size, blocks - first))))
        return groups

    # ---- all-gather -----------------------------------------------------------------------

    def expose(self) -> None:
        """Expose the rows of this rank, chunk by chunk."""
        site, layout = self._site, self._site.input_layout
        operand, name = site.operand, str(site.operand.name)
        for group in self._groups:
            rows = operand if len(self._groups) == 1 else self._group_view(operand, layout, group)
            self._exposed.append(self._expose(name, rows))

    def multiply(self, chains: Sequence[MatmulChain]) -> None:
        """Multiply the blocks of this rank, then those of peers as they become available."""
        site = self._site
        outs = [self._allocate_result(chain) for chain in chains]
        loop = self._gathered_loop(chains, outs)

        def run(group: _Group, shift: int, source: Any) -> None:
            position = relax.ShapeExpr([group.first, tirx.IntImm("int64", shift)])
            self._out.append(run_loop(loop, group.blocks, position, source))

        # Several axes may enumerate the blocks; a view has one.
        run(self._all, 0, self._group_view(site.operand, site.input_layout, self._all))
        for shift in range(1, self._ranks):
            for group, exposed in zip(self._groups, self._exposed, strict=True):
                shape = self._group_shape(site.input_layout, group)
                run(group, shift, self._call(PEER_VIEW.name, [exposed, shift], shape))
        for chain, out in zip(chains, outs, strict=True):
            if site.uneven:
                self._slice_rows(chain.last, self._layout_of(chain), out)

    def _allocate_result(self, chain: MatmulChain) -> Any:
        """Allocate the result of a chain, with rows beyond the end if shards are uneven."""
        layout = self._layout_of(chain)
        if self._site.uneven:
            ty = relax.TensorType([_as_extent(extent) for extent in layout.shape], layout.dtype)
            return self._out.emit("assembled", _allocation(ty))
        self._out.rebind(chain.last, _allocation(chain.last.var.ty))
        return chain.last.var

    def _layout_of(self, chain: MatmulChain) -> RowLayout:
        return self._site.output_layouts[self._site.chains.index(chain)]

    def _gathered_loop(self, chains: Sequence[MatmulChain], outs: Sequence[Any]) -> Callee:
        """Add a loop that multiplies blocks of gathered rows, and writes to the results."""
        site, layout, out = self._site, self._site.input_layout, self._out.new_builder()
        index, first, shift = (tirx.Var(name, "int64") for name in ("index", "first", "shift"))
        source = self._source("source", layout)
        rows = out.call_pure(
            VIEW.name,
            [source, index * site.rows * layout.row_bytes],
            layout.shape_of_rows(_as_extent(site.rows)),
            layout.dtype,
        )
        for chain, result in zip(chains, outs, strict=True):
            chunk = Chunk(first + index, 0, site.rows)
            position = self._position(self._layout_of(chain), shift, chunk)
            out.assemble_into(result, position, [out.apply_chain(chain, rows)])
        own = [relax.Var("position", relax.ShapeType([first, shift])), source]
        return self._add_loop(index, own, out.take(), outs)

    # ---- reduce-scatter -------------------------------------------------------------------

    def sum(self) -> None:
        """Multiply and expose the blocks of peers, multiply the own ones, and reduce."""
        site, output = self._site, self._site.output_layouts[0]
        (chain,) = site.chains
        if site.uneven:
            self._operand = self._pad_operand()
        loop = self._product_loop(chain)
        exposed: list[list[Any]] = []
        for group in self._groups:
            products = [self._products(loop, group, shift) for shift in range(1, self._ranks)]
            exposed.append([self._expose("product", product) for product in products])
        own_products = self._products(loop, self._all, 0)
        sums, positions = [], []
        for group, exposed_of_group in zip(self._groups, exposed, strict=True):
            own = own_products
            if len(self._groups) > 1:
                own = self._group_view(own_products, output, group)
            shape = self._group_shape(output, group)
            peers = [
                self._call(PEER_VIEW.name, [tensor, -shift], shape, output.dtype)
                for shift, tensor in enumerate(exposed_of_group, 1)
            ]
            sums.append(self._reduce([own, *peers]))
            positions += [0, 0, group.first * site.rows * output.row_bytes]
        self._out.assemble(site.collective, positions, sums)

    def _products(self, loop: Callee, group: _Group, shift: int) -> Any:
        """Return the products of the blocks of a chunk of the rank `shift` after this one."""
        output = self._site.output_layouts[0]
        ty = relax.TensorType(self._group_shape(output, group), output.dtype)
        products = self._out.emit("products", _allocation(ty))
        position = relax.ShapeExpr([group.first, tirx.IntImm("int64", shift)])
        self._out.append(run_loop(loop, group.blocks, position, products))
        return products

    def _product_loop(self, chain: MatmulChain) -> Callee:
        """Add a loop that multiplies blocks of one rank, and writes them to a tensor."""
        site, layout, out = self._site, self._site.input_layout, self._out.new_builder()
        output = site.output_layouts[0]
        index, first, shift = (tirx.Var(name, "int64") for name in ("index", "first", "shift"))
        target = self._source("products", output)
        chunk = Chunk(first + index, 0, site.rows)
        rows = out.call_pure(
            OWN_SLICE.name,
            [self._operand, self._team, *self._position(layout, shift, chunk)],
            layout.shape_of_rows(_as_extent(site.rows)),
            layout.dtype,
        )
        begin = index * site.rows * output.row_bytes
        out.assemble_into(target, [0, 0, begin], [out.apply_chain(chain, rows)])
        own = [relax.Var("position", relax.ShapeType([first, shift])), target]
        return self._add_loop(index, own, out.take(), [target])

    # ---- blocks ---------------------------------------------------------------------------

    def _source(self, name: str, layout: RowLayout) -> relax.Var:
        """Return a parameter for any number of blocks of a rank's rows."""
        shape = self._group_shape(layout, _Group(0, tirx.Var("blocks", "int64")))
        return relax.Var(name, relax.TensorType(shape, layout.dtype))

    def _add_loop(
        self,
        index: Any,
        own: list[relax.Var],
        bindings: list[relax.Binding],
        no_alias: Sequence[Any],
    ) -> Callee:
        """Add a loop over blocks, whose body has the own parameters `index` and `own`."""
        params = [relax.Var("index", relax.ShapeType([index])), *own]
        name, shapeless = f"{self._prefix}_block", [self._operand]
        body = self._functions.outline(name, params, bindings, no_alias, shapeless)
        return self._functions.add_loop(f"{self._prefix}_blocks", body, own)

    def _group_shape(self, layout: RowLayout, group: _Group) -> list[Any]:
        """Return the shape of a rank's rows of some blocks."""
        _, *rows = layout.shape_of_rows(_as_extent(self._site.rows))
        return [_as_extent(group.blocks), *rows]

    def _group_view(self, tensor: Any, layout: RowLayout, group: _Group) -> Any:
        """Return a view of the blocks of a chunk."""
        begin = group.first * self._site.rows * layout.row_bytes
        shape = self._group_shape(layout, group)
        return self._call(VIEW.name, [tensor, begin], shape, layout.dtype)

    def _call(self, name: str, args: list[Any], shape: list[Any], dtype: str | None = None) -> Any:
        return self._out.call_pure(name, args, shape, dtype or self._site.input_layout.dtype)


def _allocation(ty: Any) -> relax.Call:
    return alloc(relax.ShapeExpr(ty.shape.values), ty, 0, "global")


def _as_extent(number: Any) -> Any:
    value = constant(number)
    return number if value is None else tirx.IntImm("int64", value)
