# SPDX-License-Identifier: Apache-2.0
"""Builder of the steps of one chunk of a pipelined gather: the start of its gather, its matmuls."""

from __future__ import annotations

from typing import Any

from tvm import relax

from tvm_ipc import comm
from tvm_ipc.analysis.binding_builders import alloc
from tvm_ipc.analysis.program_order import Step
from tvm_ipc.analysis.shape_algebra import product_of
from tvm_ipc.analysis.uses import Uses, binds
from tvm_ipc.packed_functions.program_function_declarations import KERNEL_ALIGNMENT
from tvm_ipc.transform.overlap.candidate_types import Candidate, MatmulChain, RowLayout
from tvm_ipc.transform.overlap.chunked_builder import BindingBuilder, Chunk
from tvm_ipc.transform.overlap.compute_streams import ComputeStreams, number_of_streams
from tvm_ipc.tvm_moved_names import Analyzer


class GatherSteps:
    """Builds the bindings of the steps of one chunk: its gather and its matmuls."""

    def __init__(self, site: Candidate, uses: Uses) -> None:
        self._site, self._ranks, self._uses = site, site.ranks, uses
        self._out = BindingBuilder(site)
        #: The extents of a row.
        self._row_shape = site.input_layout.shape[site.input_layout.axis + 1 :]

    def _compute_streams(self, number: int, *, used: bool) -> ComputeStreams:
        """Return the streams on which chunks are multiplied; one if several are not used."""
        number = number_of_streams(number, used=used)
        return ComputeStreams(lambda call: self._out.emit("_", call), number)

    def _empty(self, shape: list[Any]) -> relax.Var:
        ty = relax.TensorType(shape, self._site.input_layout.dtype)
        return self._out.emit("gathered", alloc(relax.ShapeExpr(ty.shape.values), ty, 0, "global"))

    def _start(self, chunk: Chunk, out: relax.Expr) -> relax.Var:
        """Start the gather of a chunk; return the request."""
        site, attrs = self._site, self._site.attrs
        start = (site.rows * chunk.block + chunk.start) * product_of(self._row_shape)
        own = self._out.emit("rows", comm.view(site.operand, start, [chunk.rows, *self._row_shape]))
        workers = attrs.workers if isinstance(attrs.team, str) else None
        gather = comm.allgather(own, team=attrs.team, workers=workers, backend=attrs.backend)
        return self._out.emit("request", comm.start(gather, out))

    def _view_rows(self, tensor: relax.Expr, start: Any, rows: Any) -> relax.Var:
        """Return a view of `rows` rows of a tensor from row `start` on, in the matmul's shape."""
        shape = [
            *([1] * self._site.input_layout.axis),
            rows,
            *tensor.ty.shape.ty.values[-len(self._row_shape) :],
        ]
        last = shape[self._site.input_layout.axis + 1 :]
        return self._out.emit("rows", comm.view(tensor, start * product_of(last), shape))

    def _multiply(self, chain: MatmulChain, rows: relax.Expr, chunk: Chunk) -> list[relax.Var]:
        """Return the results for the rows of a chunk: one, or one for each rank."""
        # The rows of all ranks are contiguous in the result if the chunk has all rows of a block.
        if Analyzer().can_prove_equal(chunk.rows, self._site.rows):
            return [self._apply_chain(chain, rows)]
        starts = [chunk.rows * rank for rank in range(self._ranks)]
        if chunk.rows * self._site.input_layout.row_bytes % KERNEL_ALIGNMENT == 0:
            per_rank = [self._view_rows(rows, start, chunk.rows) for start in starts]
            return [self._apply_chain(chain, rank_rows) for rank_rows in per_rank]
        result = self._apply_chain(chain, rows)
        return [self._view_rows(result, start, chunk.rows) for start in starts]

    def _positions(self, layout: RowLayout, chunk: Chunk, count: int) -> list[Any]:
        """Return shift, stride and start of each of a chunk's `count` results among all rows."""
        blocks = [chunk.block * self._ranks + rank for rank in range(count)]
        starts = [(self._site.rows * block + chunk.start) * layout.row_bytes for block in blocks]
        return [number for start in starts for number in (0, 0, start)]

    def _apply_chain(self, chain: MatmulChain, rows: relax.Expr) -> relax.Var:
        """Return the result of a chain for some rows; a transpose of its matrix is repeated."""
        right = chain.matmul.value.args[1]
        transposed = transposed_by(right, self._uses)
        if transposed is None:
            return self._out.apply_chain(chain, rows)
        matrix = self._out.emit(str(right.name), transposed.value)
        return self._out.apply_chain(chain, rows, matrix)


def transposed_by(matrix: relax.Expr, uses: Uses) -> Step | None:
    """Return the binding of the transpose that computes a matrix, None if there is none."""
    step = uses.binding_of(matrix)
    return step if step is not None and binds(step, "relax.permute_dims") else None
