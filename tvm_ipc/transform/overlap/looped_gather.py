# SPDX-License-Identifier: Apache-2.0
"""All-gathers that are pipelined with matmuls in loops, for any number of chunks.

Before, with 2 workers, y marked along axis 0:
    whole = R.comm.allgather(x, axis=1, ...)     # x: (n, 1, m, k), whole: (n, 2, m, k)
    y = R.matmul(whole, w)

After, with 2 streams:
    gathered = R.builtin.alloc_tensor(R.shape([2, 2 * m, k]), ...)
    y = R.builtin.alloc_tensor(R.shape([n, 2, m, k]), ...)
    if n > 0:
        <start and wait: the gather of chunk 0 into slot 0>
        loop(R.shape([0, (n - 1) // 2]), gathered, x, w, y)
        <the last chunk, or the last two>

A step of the loop, which `tvm_ipc.transform.overlap.chunk_loops` builds:
    odd = R.comm.start(R.comm.allgather(<chunk 2 * i + 1 of x>, ...), <slot 1>)
    <chunk 2 * i of y> = R.matmul(<slot 0>, w)
    even = R.comm.start(R.comm.allgather(<chunk 2 * i + 2 of x>, ...), <slot 0>)
    _ = R.comm.wait(odd)
    <chunk 2 * i + 1 of y> = R.matmul(<slot 1>, w)
    _ = R.comm.wait(even)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tvm import relax, tirx

from tvm_ipc import comm
from tvm_ipc.analysis.binding_builders import alloc
from tvm_ipc.analysis.uses import Uses
from tvm_ipc.comm.extent_arithmetic import constant, simplified
from tvm_ipc.transform.overlap.candidate_types import Candidate, unit_of
from tvm_ipc.transform.overlap.chunk_loops import Callee, PrivateFunctions, run_if, run_loop
from tvm_ipc.transform.overlap.chunked_builder import Chunk
from tvm_ipc.transform.overlap.gather_steps import GatherSteps

#: The most chunks that are gathered or multiplied at a time in a loop.
MOST_IN_LOOP: Final = 8


@dataclass(frozen=True, eq=False)
class EqualChunks:
    """Chunks of equal size, whose number may be symbolic."""

    count: Any
    at: Callable[[Any], Chunk]  #: returns the chunk of an index
    rows: Any


class LoopedGather(GatherSteps):
    """Builds the bindings of a pipelined gather in a loop, for any number of chunks of equal size.

    A step of the loop multiplies as many chunks as there are streams. It begins with its first
    chunk gathered and ends with that of the next step, so that no request is in flight between
    steps. With 2 streams:

        start(2 i + 1); multiply(2 i)
        start(2 i + 2); wait(2 i + 1); multiply(2 i + 1); wait(2 i + 2)

    Steps of 2 chunks multiply the rest. On a GPU, a step may use several streams: what uses slot k
    runs on stream k, and the step ends when the stream of the program waits for all of them.
    """

    def __init__(
        self,
        site: Candidate,
        streams: int,
        uses: Uses,
        functions: PrivateFunctions,
        name: str,
        *,
        compute_streams: bool = False,
    ) -> None:
        super().__init__(site, uses)
        self._streams, self._functions = min(streams, MOST_IN_LOOP), functions
        self._computed_on = self._compute_streams(self._streams, used=compute_streams)
        self._prefix = f"{name}_{site.collective.var.name}"
        self._results: list[relax.Var] = []
        self._chunks: EqualChunks
        self._slots: list[tuple[relax.Var, Any]]
        self._multiply_chunk: Callee

    def build(self, loops: Sequence[EqualChunks]) -> list[relax.Binding]:
        """Return the bindings; add the functions that they call."""
        for chain in self._site.chains:
            ty = chain.last.var.ty
            self._out.rebind(chain.last, alloc(relax.ShapeExpr(ty.shape.values), ty, 0, "global"))
            self._results.append(chain.last.var)
        bindings = self._out.take()
        for chunks in loops:
            self._chunks = chunks
            bindings += self._loop(_as_index(chunks.count))
        return bindings

    def _loop(self, count: Any) -> list[relax.Binding]:
        """Return the bindings for chunks of equal size."""
        functions, prefix = self._functions, self._prefix
        self._slots = self._allocate_equal_slots()
        allocation = self._out.take()
        self._multiply_chunk = self._outline_chunk(functions, f"{prefix}_chunk")
        if self._streams == 1:
            return [*allocation, *self._run_steps(count, 1, 0)]
        done: Any = 0
        steps: list[relax.Binding] = []
        for size in dict.fromkeys((self._streams, 2)):
            left = simplified(count - done)
            number = simplified(tirx.floordiv(left - 1, size))
            steps += self._run_steps(number, size, done)
            done = simplified(done + number * size)
        last = self._bindings(self._multiply_slot, count - 1, 0)
        both = self._bindings(self._last_two, count)
        rest = run_if(tirx.floormod(left, 2) < 1, both, last)
        first = self._bindings(self._first)
        return [*allocation, *run_if(count > 0, [*first, *steps, *rest])]

    def _run_steps(self, number: Any, size: int, first: Any) -> list[relax.Binding]:
        """Add the loop over some steps of `size` chunks; return bindings that run it."""
        if constant(number) == 0:
            return []
        index, begin = tirx.Var("index", "int64"), tirx.Var("first", "int64")
        own = [relax.Var("first", relax.ShapeType([begin]))]
        params = [relax.Var("index", relax.ShapeType([index])), *own]
        bindings = self._bindings(self._step, begin + index * size, size)
        name, shapeless = f"{self._prefix}_chunk_step", [self._site.operand]
        body = self._functions.outline(name, params, bindings, self._results, shapeless)
        loop = self._functions.add_loop(f"{self._prefix}_chunks", body, own)
        return [run_loop(loop, number, relax.ShapeExpr([_as_index(first)]))]

    def _bindings(self, build: Callable[..., None], *args: Any) -> list[relax.Binding]:
        """Return the bindings that a method builds."""
        build(*args)
        return self._out.take()

    def _outline_chunk(self, functions: PrivateFunctions, name: str) -> Callee:
        """Add the function that multiplies the rows of a chunk."""
        index = tirx.Var("index", "int64")
        ty = relax.TensorType(self._slot_shape(), self._site.input_layout.dtype)
        rows = relax.Var("rows", ty)
        self._multiply_rows(index, rows)
        params = [relax.Var("index", relax.ShapeType([index])), rows]
        return functions.outline(name, params, self._out.take(), self._results)

    def _multiply_rows(self, index: Any, rows: relax.Expr) -> None:
        """Multiply the rows of a chunk, and write the results to their positions."""
        chunk = self._chunks.at(simplified(index))
        for k, chain in enumerate(self._site.chains):
            slices = self._multiply(chain, rows, chunk)
            positions = self._positions(self._site.output_layouts[k], chunk, len(slices))
            self._out.assemble_into(self._results[k], positions, slices)

    def _step(self, first: Any, size: int) -> None:
        """Build one step of the loop, which begins with a chunk."""
        if size == 1:
            self._gather(first, 0)()
            self._multiply_rows(first, self._slot(0))
            return
        waits: list[Callable[[], object]] = [lambda: None]
        self._computed_on.fork(size)
        for k in range(size):
            # The chunk after the step goes to the first slot, which must have been multiplied.
            for ahead in range(len(waits), min(k + size - 1, size) + 1):
                self._use_slot(ahead % size)
                waits.append(self._gather(first + ahead, ahead % size))
            self._use_slot(k)
            waits[k]()
            self._multiply_rows(first + k, self._slot(k))
        self._computed_on.join(size)
        waits[size]()

    def _use_slot(self, slot: int) -> None:
        """Send what follows to the stream of a slot, which all chunks in this slot use."""
        self._computed_on.use(slot)

    def _first(self) -> None:
        """Build the gather of the first chunk."""
        self._gather(0, 0)()

    def _last_two(self, count: Any) -> None:
        """Build the steps of the last two chunks, the first of which is gathered already."""
        wait = self._gather(count - 1, 1)
        self._multiply_slot(count - 2, 0)
        wait()
        self._multiply_slot(count - 1, 1)

    def _gather(self, index: Any, slot: int) -> Callable[[], object]:
        """Start the gather of a chunk into a slot; return a function that builds the wait."""
        chunk = self._chunks.at(simplified(index))
        rows = self._view_rows(*self._slots[slot], chunk.rows * self._ranks)
        request = self._start(chunk, rows)
        return lambda: self._out.emit("_", comm.wait(request))

    def _multiply_slot(self, index: Any, slot: int) -> None:
        """Call the function that multiplies a chunk, whose rows are in a slot."""
        position = relax.ShapeExpr([_as_index(simplified(index))])
        self._out.emit("_", self._multiply_chunk.call(position, self._slot(slot)))

    def _slot(self, slot: int) -> relax.Var:
        """Return the rows in a slot."""
        return self._view_rows(*self._slots[slot], self._chunks.rows * self._ranks)

    def _allocate_equal_slots(self) -> list[tuple[relax.Var, Any]]:
        """Return the slots that chunks are gathered into, each a tensor and its first row."""
        # Slots in one tensor are known to be disjoint in the functions that it is passed to.
        rows = self._chunks.rows * self._ranks
        unit = unit_of([self._site.input_layout])
        stride = simplified(tirx.floordiv(rows + (unit - 1), unit) * unit)
        buffer = self._empty([self._streams, stride, *self._row_shape])
        return [(buffer, stride * k) for k in range(self._streams)]

    def _slot_shape(self) -> list[Any]:
        """Return the shape of the gathered rows of a chunk."""
        rows = self._chunks.rows * self._ranks
        return [*([1] * self._site.input_layout.axis), rows, *self._row_shape]


def _as_index(number: Any) -> Any:
    return tirx.IntImm("int64", number) if isinstance(number, int) else number
