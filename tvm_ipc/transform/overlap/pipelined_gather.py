# SPDX-License-Identifier: Apache-2.0
"""All-gathers that are pipelined, chunk by chunk, with the matmuls that read their result.

Before, with 2 workers, y marked along axis 0:
    whole = R.comm.allgather(x, axis=1, ...)     # x: (3, 1, m, k), whole: (3, 2, m, k)
    y = R.matmul(whole, w)

After, with 2 streams:
    gathered = R.builtin.alloc_tensor(R.shape([2, 2, m, k]), ...)
    rows = R.comm.view(gathered, <its first half>)
    request = R.comm.start(R.comm.allgather(<chunk 0 of x>, ...), rows)
    rows1 = R.comm.view(gathered, <its second half>)
    request1 = R.comm.start(R.comm.allgather(<chunk 1 of x>, ...), rows1)
    _ = R.comm.wait(request)
    y0 = R.matmul(rows, w)
    rows2 = R.comm.view(gathered, <its first half>)
    request2 = R.comm.start(R.comm.allgather(<chunk 2 of x>, ...), rows2)
    _ = R.comm.wait(request1)
    y1 = R.matmul(rows1, w)
    _ = R.comm.wait(request2)
    y2 = R.matmul(rows2, w)
    y = R.call_dps_packed("tvm_ipc.assemble", (0, R.shape([...]), y0, y1, y2), ...)

With n streams, the gathers up to that of chunk i + n - 1 are started before the matmul of chunk i,
and there are n buffers to gather into. On a CPU a rank has one thread for asynchronous collectives
and one for the program, so the order in which gathers are started determines the schedule.
`ElideConcatCopies` computes the matmuls directly in the assembled tensor.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import prod
from typing import Any, TypeAlias

import tvm
from tvm import relax, tirx

from tvm_ipc import comm
from tvm_ipc.analysis.binding_builders import alloc
from tvm_ipc.analysis.collective_calls import name_of
from tvm_ipc.analysis.uses import Position, Uses, binds
from tvm_ipc.analysis.walk_and_rewrite_bindings import rewrite
from tvm_ipc.comm.extent_arithmetic import constant
from tvm_ipc.packed_functions.program_function_declarations import KERNEL_ALIGNMENT
from tvm_ipc.transform.overlap.candidate_types import (
    Candidate,
    MatmulChain,
    NotOverlappableError,
    RowLayout,
)
from tvm_ipc.transform.overlap.chunked_builder import BindingBuilder, Chunk, chunks_of
from tvm_ipc.transform.overlap.find_candidates import check_written, collective_of, find_gather

#: The number of chunks of a pipelined gather, or the reason why it is not pipelined.
Outcome: TypeAlias = "int | NotOverlappableError"


def pipeline_marked(
    function: relax.Function, marked: Sequence[tuple[relax.Expr, int]], streams: int
) -> tuple[relax.Function, list[Outcome]]:
    """Pipeline the gathers of marked matmuls, with a chunk for each index along an axis.

    Parameters
    ----------
    function : a function without dataflow blocks.
    marked : the results of matmuls, each with the axis of its chunks.
    streams : the number of chunks that are in flight at a time.

    Returns
    -------
    The new function, and the outcome for each marked matmul.
    """
    rewriter = _Rewrite(function, streams)
    outcomes: list[Outcome] = []
    for variable, axis in marked:
        try:
            site = rewriter.gathers.candidate(variable)
            outcomes.append(rewriter.split(site, _one_chunk_per_index(site, axis)))
        except NotOverlappableError as refusal:
            outcomes.append(refusal)
    return rewriter.result(), outcomes


def pipeline_gathers(
    function: relax.Function, chunks: int, streams: int
) -> tuple[relax.Function, list[tuple[str, Outcome]]]:
    """Pipeline all gathers of a function whose results are multiplied.

    Parameters
    ----------
    function : a function without dataflow blocks.
    chunks : the number of chunks into which the rows of a rank are split.
    streams : the number of chunks that are in flight at a time.

    Returns
    -------
    The new function, and the name of each gathered tensor with its outcome.
    """
    rewriter = _Rewrite(function, streams)
    outcomes: list[tuple[str, Outcome]] = []
    for name, candidate in rewriter.gathers.outcomes:
        try:
            if isinstance(candidate, NotOverlappableError):
                raise candidate
            outcomes.append((name, rewriter.split(candidate, _split_rows(candidate, chunks))))
        except NotOverlappableError as refusal:
            outcomes.append((name, refusal))
    return rewriter.result(), outcomes


class _Rewrite:
    """A function, and the replacements of its bindings."""

    def __init__(self, function: relax.Function, streams: int) -> None:
        self._function, self._streams = function, streams
        self._uses = Uses()
        self._uses.read(function.body)
        self.gathers = _GatherCandidates(self._uses)
        self._replacements: dict[Any, list[relax.Binding]] = {}

    def split(self, site: Candidate, chunks: list[Chunk]) -> int:
        """Pipeline a candidate; return the number of its chunks."""
        _check_users(site, self._uses)
        # Another marked matmul may share the gather, which is then pipelined already.
        if site.collective.binding.var not in self._replacements:
            self._replacements |= _replace_bindings(site, chunks, self._streams, self._uses)
        return len(chunks)

    def result(self) -> relax.Function:
        """Return the new function, or the same one if nothing is pipelined."""
        if not self._replacements:
            return self._function
        new = rewrite(self._function, lambda binding, _: self._replacements.get(binding.var))
        return relax.Function(new.params, new.body, new.ret_ty, False, new.attrs, new.span)


def without_dataflow(function: relax.Function) -> relax.Function:
    """Return a function without dataflow blocks, in which requests cannot be started."""
    return _apply_pass(relax.transform.ToNonDataflow(), function)


def with_dataflow(function: relax.Function) -> relax.Function:
    """Return a function with its pure bindings in dataflow blocks."""
    return _apply_pass(relax.transform.ConvertToDataflow(1), function)


def _apply_pass(transform: tvm.transform.Pass, function: relax.Function) -> relax.Function:
    """Apply a pass to a function in a module of its own."""
    (result,) = transform(tvm.IRModule({"main": function})).functions.values()
    return result


def _check_users(site: Candidate, uses: Uses) -> None:
    """Raise an error if a chain's result is used before all chains, which end together."""
    end = max(position.at for position in _chain_bindings(site))
    for chain in site.chains:
        if any(user.at < end for user in uses.users[chain.last.binding.var]):
            raise NotOverlappableError(
                "the result of a matmul is used before another matmul of the same gather ends"
            )


def _replace_bindings(
    site: Candidate, chunks: list[Chunk], streams: int, uses: Uses
) -> dict[Any, list[relax.Binding]]:
    """Return the replacement of each binding of a candidate, by its variable."""
    chain_bindings = _chain_bindings(site)
    removed = {site.collective.binding.var, *(bound.binding.var for bound in chain_bindings)}
    for chain in site.chains:
        transposed = transposed_by(chain.matmul.binding.value.args[1], uses)
        if transposed is not None:
            users = uses.users[transposed.binding.var]
            if all(user.binding is not None and user.binding.var in removed for user in users):
                removed.add(transposed.binding.var)
    # All operands of the chains are bound before the last of their bindings.
    last = max(chain_bindings, key=lambda position: position.at).binding.var
    replacements: dict[Any, list[relax.Binding]] = {variable: [] for variable in removed}
    replacements[last] = _Pipeline(site, chunks, streams, uses).build()
    return replacements


class _GatherCandidates:
    """The all-gathers of a function, each a candidate or the reason why it is none."""

    def __init__(self, uses: Uses) -> None:
        self._uses = uses
        #: The name of each gathered tensor with its candidate or reason, in program order.
        self.outcomes: list[tuple[str, Candidate | NotOverlappableError]] = []
        #: The candidate of each variable that a matmul chain binds.
        self._candidates: dict[Any, Candidate] = {}
        #: The position of each rejected all-gather with the reason.
        self._rejected: list[tuple[int, str]] = []
        for position in uses.positions.values():
            attrs = collective_of(position)
            if attrs is None or attrs.kind != "allgather" or not attrs.workers:
                continue
            name = name_of(position.binding.value.args[0])
            try:
                site = find_gather(position, attrs, int(attrs.workers), uses)
                if attrs.uneven:
                    raise NotOverlappableError("its shards are uneven")
                check_written(site, uses)
            except NotOverlappableError as error:
                self.outcomes.append((name, error))
                reason = f"; the preceding all-gather of {name} cannot be pipelined: {error}"
                self._rejected.append((position.at, reason))
                continue
            self.outcomes.append((name, site))
            self._candidates |= {bound.binding.var: site for bound in _chain_bindings(site)}

    def candidate(self, marked: relax.Expr) -> Candidate:
        """Return the candidate that computes a marked value; raise the reason if there is none."""
        position = self._uses.positions.get(marked) if isinstance(marked, relax.Var) else None
        if position is None or position.binding.var not in self._candidates:
            before = len(self._rejected)
            if position is not None:
                before = bisect_left(self._rejected, (position.at, ""))
            cause = self._rejected[before - 1][1] if before else ""
            raise NotOverlappableError(f"it is not a matmul of a gathered tensor{cause}")
        return self._candidates[position.binding.var]


def _chain_bindings(site: Candidate) -> list[Position]:
    """Return the bindings of the matmuls and their epilogues."""
    return [position for chain in site.chains for position in (chain.matmul, *chain.epilogue)]


def _one_chunk_per_index(site: Candidate, axis: int) -> list[Chunk]:
    """Return a chunk for each index along an axis; raise an error if chunks are not contiguous."""
    shape, gathered = site.input_layout.shape, site.input_layout.axis
    between = [constant(extent) for extent in shape[1:gathered]]
    if axis != 0 or gathered == 0 or any(extent != 1 for extent in between):
        raise NotOverlappableError(
            f"chunks along axis {axis} of a tensor that is gathered along axis {gathered} are not "
            "contiguous; put the axes of chunks and of ranks first in the tensor, in this order"
        )
    chunks = constant(shape[0])
    if not chunks:
        number = shape[0] if chunks is None else 0
        raise NotOverlappableError(f"the number of chunks is {number}; expected a constant above 0")
    return [Chunk(block, 0, site.rows) for block in range(chunks)]


def _split_rows(site: Candidate, chunks: int) -> list[Chunk]:
    """Return the rows of a rank in about `chunks` chunks; raise an error if sizes are unknown."""
    if site.ranks == 1:
        raise NotOverlappableError("its team has one rank")
    if site.input_layout.blocks < 1:
        raise NotOverlappableError("the number of its blocks of rows is unknown")
    sizes = [site.rows, *(layout.row_bytes for layout in site.layouts)]
    if any(constant(size) is None for size in sizes):
        raise NotOverlappableError("the size of its chunks is unknown")
    return chunks_of(site, chunks)


class _Pipeline:
    """Builds the bindings of a pipelined gather."""

    def __init__(self, site: Candidate, chunks: list[Chunk], streams: int, uses: Uses) -> None:
        self._site, self._ranks, self._uses = site, site.ranks, uses
        self._chunks, self._streams = chunks, min(streams, len(chunks))
        self._out = BindingBuilder(site)
        #: The extents of a row.
        self._row_shape = site.input_layout.shape[site.input_layout.axis + 1 :]

    def build(self) -> list[relax.Binding]:
        """Return the bindings."""
        slots = self._allocate_slots()
        rows: list[relax.Var] = []  # the rows of each chunk whose gather is started
        requests: list[relax.Var] = []
        results: list[list[relax.Expr]] = [[] for _ in self._site.chains]
        positions: list[list[Any]] = [[] for _ in self._site.chains]
        for index, chunk in enumerate(self._chunks):
            for ahead in range(len(requests), min(index + self._streams, len(self._chunks))):
                # Each chunk gets a new view of its slot, so that no pass merges the matmuls of
                # chunks that use the same slot.
                next_chunk = self._chunks[ahead]
                total = next_chunk.rows * self._ranks
                rows.append(self._view_rows(*slots[ahead % self._streams], total))
                requests.append(self._start(next_chunk, rows[ahead]))
            self._out.emit("_", comm.wait(requests[index]))
            for k, chain in enumerate(self._site.chains):
                chunk_results = self._multiply(chain, rows[index], chunk)
                results[k] += chunk_results
                positions[k] += self._positions(
                    self._site.output_layouts[k], chunk, len(chunk_results)
                )
        for k, chain in enumerate(self._site.chains):
            self._out.assemble(chain.last, positions[k], results[k])
        return self._out.take()

    def _allocate_slots(self) -> list[tuple[relax.Var, Any]]:
        """Return the slots that chunks are gathered into, each a tensor and its first row."""
        most = max((chunk.rows for chunk in self._chunks), key=lambda rows: constant(rows) or 0)
        rows = most * self._ranks
        if tvm.sym.Analyzer().can_prove_equal(
            tirx.floormod(rows * self._site.input_layout.row_bytes, KERNEL_ALIGNMENT), 0
        ):
            buffer = self._empty([self._streams, rows, *self._row_shape])
            return [(buffer, rows * k) for k in range(self._streams)]
        return [(self._empty([1, rows, *self._row_shape]), 0) for _ in range(self._streams)]

    def _empty(self, shape: list[Any]) -> relax.Var:
        ty = relax.TensorType(shape, self._site.input_layout.dtype)
        return self._out.emit("gathered", alloc(relax.ShapeExpr(ty.shape.values), ty, 0, "global"))

    def _start(self, chunk: Chunk, out: relax.Expr) -> relax.Var:
        """Start the gather of a chunk; return the request."""
        site, attrs = self._site, self._site.attrs
        start = (site.rows * chunk.block + chunk.start) * _count(self._row_shape)
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
        return self._out.emit("rows", comm.view(tensor, start * _count(last), shape))

    def _multiply(self, chain: MatmulChain, rows: relax.Expr, chunk: Chunk) -> list[relax.Var]:
        """Return the results for the rows of a chunk: one, or one for each rank."""
        # The rows of all ranks are contiguous in the result if the chunk has all rows of a block.
        if tvm.sym.Analyzer().can_prove_equal(chunk.rows, self._site.rows):
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
        left, right = chain.matmul.binding.value.args
        replaced = {left: rows}
        transposed = transposed_by(right, self._uses)
        if transposed is not None:
            replaced[right] = self._out.emit(str(right.name), transposed.binding.value)
        for position in (chain.matmul, *chain.epilogue):
            value, variable = position.binding.value, position.binding.var
            args = [replaced.get(x, x) if isinstance(x, relax.Var) else x for x in value.args]
            call = relax.Call(value.op, args, value.attrs, list(value.ty_args), value.span)
            rows = replaced[variable] = self._out.emit(str(variable.name), call)
        return rows


def transposed_by(matrix: relax.Expr, uses: Uses) -> Position | None:
    """Return the binding of the transpose that computes a matrix, None if there is none."""
    position = uses.positions.get(matrix) if isinstance(matrix, relax.Var) else None
    return position if position is not None and binds(position, "relax.permute_dims") else None


def _count(extents: Sequence[Any]) -> Any:
    """Return the product of extents."""
    numbers = [constant(extent) for extent in extents]
    return prod(e if n is None else n for e, n in zip(extents, numbers, strict=True))
