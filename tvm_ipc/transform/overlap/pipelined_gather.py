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
`ElideConcatCopies` computes the matmuls directly in the assembled tensor. On a GPU, the matmul of
chunk i may run on stream i % n: see `tvm_ipc.transform.overlap.compute_streams`. Many chunks, or a
symbolic number of them, become a loop: see `tvm_ipc.transform.overlap.looped_gather`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import tvm
from tvm import relax, tirx

from tvm_ipc import comm
from tvm_ipc.analysis.collective_calls import name_of
from tvm_ipc.analysis.program_order import Step, linearize
from tvm_ipc.analysis.uses import Uses
from tvm_ipc.analysis.walk_and_rewrite_bindings import Edits
from tvm_ipc.comm.extent_arithmetic import constant, format_count, simplified
from tvm_ipc.packed_functions.program_function_declarations import KERNEL_ALIGNMENT
from tvm_ipc.transform.overlap.candidate_types import (
    Candidate,
    NotOverlappableError,
)
from tvm_ipc.transform.overlap.chunk_loops import PrivateFunctions, is_looped
from tvm_ipc.transform.overlap.chunked_builder import Chunk, chunks_of
from tvm_ipc.transform.overlap.compute_streams import describe, number_of_streams
from tvm_ipc.transform.overlap.find_candidates import check_written, collective_of, find_gather
from tvm_ipc.transform.overlap.gather_steps import GatherSteps, transposed_by
from tvm_ipc.transform.overlap.looped_gather import MOST_IN_LOOP, EqualChunks, LoopedGather
from tvm_ipc.tvm_moved_names import Analyzer

#: The chunks of a gather: a list, or chunks that loops compute, one after the other.
Chunks: TypeAlias = "list[Chunk] | tuple[EqualChunks, ...]"


@dataclass(frozen=True, eq=False)
class Pipelined:
    """A gather that is pipelined, and in how many chunks."""

    chunks: Any  #: their number, which may be symbolic
    at_a_time: int  #: the most chunks that are gathered or multiplied at a time
    in_loop: bool = False
    computed_on: int = 1  #: the number of streams of a GPU on which they are multiplied

    @property
    def schedule(self) -> str:
        """The schedule as the report prints it."""
        loop = ", in a loop" * self.in_loop
        return f"{self.at_a_time} at a time{loop}{describe(self.computed_on)}"

    @property
    def verdict(self) -> str:
        """The verdict of the report."""
        return f"in {format_count(self.chunks, 'chunk')}"


#: How a gather is pipelined, or the reason why it is not.
Outcome: TypeAlias = "Pipelined | NotOverlappableError"


def pipeline_marked(
    function: relax.Function,
    marked: Sequence[tuple[relax.Expr, int]],
    streams: int,
    functions: PrivateFunctions,
    name: str,
    *,
    compute_streams: bool = False,
) -> tuple[relax.Function, list[Outcome]]:
    """Pipeline the gathers of marked matmuls, with a chunk for each index along an axis.

    Parameters
    ----------
    function : a function without dataflow blocks.
    marked : the results of matmuls, each with the axis of its chunks.
    streams : the number of chunks that are in flight at a time.
    functions : receives private functions that the new function calls.
    name : the name of the function.
    compute_streams : whether chunks are multiplied on several streams of a GPU.

    Returns
    -------
    The new function, and the outcome for each marked matmul.
    """
    rewriter = _Rewrite(function, streams, functions, name, compute_streams=compute_streams)
    outcomes: list[Outcome] = []
    for variable, axis in marked:
        try:
            site = rewriter.gathers.candidate(variable)
            outcomes.append(rewriter.split(site, _one_chunk_per_index(site, axis)))
        except NotOverlappableError as refusal:
            outcomes.append(refusal)
    return rewriter.result(), outcomes


def pipeline_gathers(
    function: relax.Function,
    chunks: int,
    streams: int,
    functions: PrivateFunctions,
    name: str,
    *,
    compute_streams: bool = False,
) -> tuple[relax.Function, list[tuple[str, Outcome]]]:
    """Pipeline all gathers of a function whose results are multiplied.

    Parameters
    ----------
    function : a function without dataflow blocks.
    chunks : the number of chunks into which the rows of a rank are split.
    streams : the number of chunks that are in flight at a time.
    functions : receives private functions that the new function calls.
    name : the name of the function.
    compute_streams : whether chunks are multiplied on several streams of a GPU.

    Returns
    -------
    The new function, and the name of each gathered tensor with its outcome.
    """
    rewriter = _Rewrite(function, streams, functions, name, compute_streams=compute_streams)
    outcomes: list[tuple[str, Outcome]] = []
    for name, candidate in rewriter.gathers.outcomes:
        try:
            if isinstance(candidate, NotOverlappableError):
                raise candidate
            outcomes.append((name, rewriter.split(candidate, _split_rows(candidate, chunks))))
        except NotOverlappableError as refusal:
            outcomes.append((name, refusal))
    return rewriter.result(), outcomes


def gathers_of_matmuls(uses: Uses) -> Callable[[relax.Expr], Candidate]:
    """Return a function that returns the candidate of the gather before a marked matmul.

    That function raises the reason if there is none.
    """
    return _GatherCandidates(uses).candidate


class _Rewrite:
    """A function, and the replacements of its bindings."""

    def __init__(
        self,
        function: relax.Function,
        streams: int,
        functions: PrivateFunctions,
        name: str,
        *,
        compute_streams: bool,
    ) -> None:
        self._function, self._streams = function, streams
        self._compute_streams = compute_streams
        self._functions, self._name = functions, name
        self._uses = Uses(linearize("", function))
        self.gathers = _GatherCandidates(self._uses)
        self._edits = Edits()

    def split(self, site: Candidate, chunks: Chunks) -> Pipelined:
        """Pipeline a candidate; return how."""
        _check_users(site, self._uses)
        # Another marked matmul may share the gather, which is then pipelined already.
        if not self._edits.replaces(site.collective.var):
            self._replace_bindings(site, chunks)
        if isinstance(chunks, list):
            at_a_time = min(self._streams, len(chunks))
            return Pipelined(len(chunks), at_a_time, computed_on=self._streams_of(at_a_time))
        count = sum((loop.count for loop in chunks[1:]), chunks[0].count)
        at_a_time = min(self._streams, constant(count) or MOST_IN_LOOP, MOST_IN_LOOP)
        computed_on = self._streams_of(at_a_time)
        return Pipelined(count, at_a_time, in_loop=True, computed_on=computed_on)

    def _streams_of(self, at_a_time: int) -> int:
        return number_of_streams(at_a_time, used=self._compute_streams)

    def _replace_bindings(self, site: Candidate, chunks: Chunks) -> None:
        """Replace the bindings of a candidate, and transposes that only they use."""
        uses, chain_bindings = self._uses, _chain_bindings(site)
        replaced = [site.collective, *chain_bindings]
        for chain in site.chains:
            step = transposed_by(chain.matmul.value.args[1], uses)
            if step is not None and all(user in replaced for user in uses.users[step.var]):
                replaced.append(step)
        for step in replaced:
            self._edits.replace(step.var, [])
        # All operands of the chains are bound before the last of their bindings.
        last = max(chain_bindings, key=lambda step: step.entry)
        if isinstance(chunks, list):
            pipeline = _Pipeline(
                site, chunks, self._streams, uses, compute_streams=self._compute_streams
            )
            bindings = pipeline.build()
        else:
            loops = LoopedGather(
                site,
                self._streams,
                uses,
                self._functions,
                self._name,
                compute_streams=self._compute_streams,
            )
            bindings = loops.build(chunks)
        self._edits.replace(last.var, bindings)

    def result(self) -> relax.Function:
        """Return the new function, or the same one if nothing is pipelined."""
        new = self._edits.apply(self._function)
        if new is self._function:
            return new
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
    end = max(step.entry for step in _chain_bindings(site))
    for chain in site.chains:
        if any(user.entry < end for user in uses.users[chain.last.var]):
            raise NotOverlappableError(
                "the result of a matmul is used before another matmul of the same gather ends"
            )


class _GatherCandidates:
    """The all-gathers of a function, each a candidate or the reason why it is none."""

    def __init__(self, uses: Uses) -> None:
        self._uses = uses
        #: The name of each gathered tensor with its candidate or reason, in program order.
        self.outcomes: list[tuple[str, Candidate | NotOverlappableError]] = []
        #: The candidate of each variable that a matmul chain binds.
        self._candidates: dict[Any, Candidate] = {}
        #: The event of each rejected all-gather with the reason.
        self._rejected: list[tuple[int, str]] = []
        for step in uses.bound.values():
            attrs = collective_of(step)
            if attrs is None or attrs.kind != "allgather" or not attrs.workers:
                continue
            name = name_of(step.value.args[0])
            try:
                site = find_gather(step, attrs, int(attrs.workers), uses)
                if attrs.uneven:
                    raise NotOverlappableError("its shards are uneven")
                check_written(site, uses)
            except NotOverlappableError as error:
                self.outcomes.append((name, error))
                reason = f"; the preceding all-gather of {name} cannot be pipelined: {error}"
                self._rejected.append((step.entry, reason))
                continue
            self.outcomes.append((name, site))
            self._candidates |= {bound.var: site for bound in _chain_bindings(site)}

    def candidate(self, marked: relax.Expr) -> Candidate:
        """Return the candidate that computes a marked value; raise the reason if there is none."""
        step = self._uses.binding_of(marked)
        if step is None or step.var not in self._candidates:
            before = len(self._rejected)
            if step is not None:
                before = bisect_left(self._rejected, (step.entry, ""))
            cause = self._rejected[before - 1][1] if before else ""
            raise NotOverlappableError(f"it is not a matmul of a gathered tensor{cause}")
        return self._candidates[step.var]


def _chain_bindings(site: Candidate) -> list[Step]:
    """Return the bindings of the matmuls and their epilogues."""
    return [step for chain in site.chains for step in (chain.matmul, *chain.epilogue)]


def _one_chunk_per_index(site: Candidate, axis: int) -> Chunks:
    """Return a chunk for each index along an axis; raise an error if chunks are not contiguous."""
    shape, gathered = site.input_layout.shape, site.input_layout.axis
    between = [constant(extent) for extent in shape[1:gathered]]
    if axis != 0 or gathered == 0 or any(extent != 1 for extent in between):
        raise NotOverlappableError(
            f"chunks along axis {axis} of a tensor that is gathered along axis {gathered} are not "
            "contiguous; put the axes of chunks and of ranks first in the tensor, in this order"
        )
    chunks = constant(shape[0])
    if chunks == 0:
        raise NotOverlappableError("the number of chunks is 0; expected 1 or more")
    if chunks is None or is_looped(chunks):
        return (EqualChunks(shape[0], lambda block: Chunk(block, 0, site.rows), site.rows),)
    return [Chunk(block, 0, site.rows) for block in range(chunks)]


def _split_rows(site: Candidate, chunks: int) -> Chunks:
    """Return the rows of a rank in about `chunks` chunks; raise an error if sizes are unknown."""
    if site.ranks == 1:
        raise NotOverlappableError("its team has one rank")
    if site.input_layout.blocks < 1:
        raise NotOverlappableError("the number of its blocks of rows is unknown")
    sizes = [site.rows, *(layout.row_bytes for layout in site.layouts)]
    if any(constant(size) is None for size in sizes):
        raise NotOverlappableError("the size of its chunks is unknown")
    pieces = chunks_of(site, chunks)
    blocks = site.input_layout.blocks
    rows, per_block = pieces[0].rows, len(pieces) // blocks
    last = pieces[-1]
    if not is_looped(len(pieces)):
        return pieces
    number = per_block - (last.rows != rows)  #: of chunks of equal size in a block

    def chunk_at(index: Any) -> Chunk:
        block, position = tirx.floordiv(index, number), tirx.floormod(index, number)
        return Chunk(simplified(block), simplified(position * rows), rows)

    equal = [EqualChunks(blocks * number, chunk_at, rows)] if number else []
    if last.rows != rows:
        equal.append(EqualChunks(blocks, lambda b: Chunk(b, last.start, last.rows), last.rows))
    return tuple(equal)


class _Pipeline(GatherSteps):
    """Builds the bindings of a pipelined gather whose chunks are unrolled."""

    def __init__(
        self,
        site: Candidate,
        chunks: list[Chunk],
        streams: int,
        uses: Uses,
        *,
        compute_streams: bool,
    ) -> None:
        super().__init__(site, uses)
        self._chunks, self._streams = chunks, min(streams, len(chunks))
        self._computed_on = self._compute_streams(self._streams, used=compute_streams)

    def build(self) -> list[relax.Binding]:
        """Return the bindings."""
        slots = self._allocate_slots()
        rows: list[relax.Var] = []  # the rows of each chunk whose gather is started
        requests: list[relax.Var] = []
        results: list[list[relax.Expr]] = [[] for _ in self._site.chains]
        positions: list[list[Any]] = [[] for _ in self._site.chains]
        self._computed_on.fork()
        for index, chunk in enumerate(self._chunks):
            for ahead in range(len(requests), min(index + self._streams, len(self._chunks))):
                # Each chunk gets a new view of its slot, so that no pass merges the matmuls of
                # chunks that use the same slot.
                next_chunk = self._chunks[ahead]
                self._computed_on.use(ahead)
                total = next_chunk.rows * self._ranks
                rows.append(self._view_rows(*slots[ahead % self._streams], total))
                requests.append(self._start(next_chunk, rows[ahead]))
            self._computed_on.use(index)
            self._out.emit("_", comm.wait(requests[index]))
            for k, chain in enumerate(self._site.chains):
                chunk_results = self._multiply(chain, rows[index], chunk)
                results[k] += chunk_results
                positions[k] += self._positions(
                    self._site.output_layouts[k], chunk, len(chunk_results)
                )
        self._computed_on.join()
        for k, chain in enumerate(self._site.chains):
            self._out.assemble(chain.last, positions[k], results[k])
        return self._out.take()

    def _allocate_slots(self) -> list[tuple[relax.Var, Any]]:
        """Return the slots that chunks are gathered into, each a tensor and its first row."""
        most = max((chunk.rows for chunk in self._chunks), key=lambda rows: constant(rows) or 0)
        rows = most * self._ranks
        if Analyzer().can_prove_equal(
            tirx.floormod(rows * self._site.input_layout.row_bytes, KERNEL_ALIGNMENT), 0
        ):
            buffer = self._empty([self._streams, rows, *self._row_shape])
            return [(buffer, rows * k) for k in range(self._streams)]
        return [(self._empty([1, rows, *self._row_shape]), 0) for _ in range(self._streams)]
