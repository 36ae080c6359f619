# SPDX-License-Identifier: Apache-2.0
"""The pass `PipelineAllGather`, which gathers chunks of rows while others are multiplied."""

from __future__ import annotations

from typing import Final

import tvm
from tvm import relax

from tvm_ipc import arguments
from tvm_ipc.analysis.walk_and_rewrite_bindings import (
    belongs_to_others,
    calls,
    change_functions,
    relax_functions,
)
from tvm_ipc.transform.module_pass import ModulePass, module_pass, option
from tvm_ipc.transform.overlap.candidate_types import NotOverlappableError
from tvm_ipc.transform.overlap.chunk_loops import PrivateFunctions
from tvm_ipc.transform.overlap.pipelined_gather import (
    pipeline_gathers,
    with_dataflow,
    without_dataflow,
)
from tvm_ipc.transform.report import Decision, note

_NAME: Final = "PipelineAllGather"


@module_pass
class PipelineAllGather(ModulePass):
    """Gather the left operand of matmuls in chunks, asynchronously, while others are multiplied.

    Before, with 2 workers:

        whole = R.ccl.allgather(x, num_workers=2)    # x: (4, k)
        y = R.matmul(whole, w)

    After, in 2 chunks:

        gathered = R.builtin.alloc_tensor(R.shape([2, 4, k]), ...)
        rows = R.comm.view(gathered, <its first half>)
        request = R.comm.start(R.comm.allgather(<rows 0 and 1 of x>, ...), rows)
        rows1 = R.comm.view(gathered, <its second half>)
        request1 = R.comm.start(R.comm.allgather(<rows 2 and 3 of x>, ...), rows1)
        _ = R.comm.wait(request)
        y0 = R.matmul(<rows of rank 0 in rows>, w)
        y1 = R.matmul(<rows of rank 1 in rows>, w)
        _ = R.comm.wait(request1)
        ...
        y = R.call_dps_packed("tvm_ipc.assemble", (0, R.shape([...]), y0, y1, ...), ...)

    More than 8 chunks become a loop, in a private function that calls another one for two chunks at
    a time (see `tvm_ipc.transform.overlap.chunk_loops`). After, in 16 chunks:

        gathered = R.builtin.alloc_tensor(R.shape([2, 4, k]), ...)
        y = R.builtin.alloc_tensor(...)
        request = R.comm.start(R.comm.allgather(<chunk 0 of x>, ...), <slot 0 of gathered>)
        _ = R.comm.wait(request)
        _ = cls.main_whole_chunks(R.shape([0, 7]), R.shape([0]), gathered, x, w, y)
        request1 = R.comm.start(R.comm.allgather(<chunk 15 of x>, ...), <slot 1 of gathered>)
        _ = cls.main_whole_chunk(R.shape([14]), <slot 0 of gathered>, w, y)
        _ = R.comm.wait(request1)
        _ = cls.main_whole_chunk(R.shape([15]), <slot 1 of gathered>, w, y)

    Use `OverlapCommunication` where ranks map each other's memory: it reads the rows of peers in
    place and gathers nothing. This pass needs only asynchronous collectives. In programs that are
    written for all ranks, `comm.place(..., stream=axis)` pipelines a single matmul.

    The pass runs before `LegalizeOps`, while collectives and matmuls are operators.
    `ElideConcatCopies` must follow after `CallTIRRewrite`, so that matmuls are computed directly
    in the assembled tensor.

    Parameters
    ----------
    chunks : the number of chunks into which the rows of a rank are split.
    streams : the number of chunks that are gathered or multiplied at a time. With 1 nothing
        overlaps. In a loop there are at most 8.
    compute_streams : whether the matmuls of chunk i run on stream i % `streams` of a GPU, so that
        those of several chunks run side by side. CPUs refuse such programs.

    Examples
    --------
    >>> import tvm
    >>> from tvm_ipc.transform import PipelineAllGather
    >>> mod = tvm.script.from_source('''
    ... @I.ir_module
    ... class Model:
    ...     @R.function
    ...     def main(x: R.Tensor((64, 32), "float32"), w: R.Tensor((32, 16), "float32")):
    ...         whole = R.comm.allgather(x, workers=2)
    ...         y = R.matmul(whole, w)
    ...         return y
    ... ''')
    >>> pipelined = PipelineAllGather(chunks=2)(mod)
    >>> pipelined.script().count("tvm_ipc.start")
    2
    """

    chunks: int = option(arguments.integer, "a number of chunks, 1 or more", 1)
    streams: int = option(arguments.integer, "a number of streams, 1 or more", 1, default=2)
    compute_streams: bool = option(arguments.flag, default=False, kw_only=True)

    def apply(self, mod: tvm.IRModule) -> tvm.IRModule:
        """Return the module with pipelined gathers."""
        called = {
            str(call.op.name_hint)
            for _, function in relax_functions(mod)
            for call in calls(function)
            if isinstance(call.op, tvm.ir.GlobalVar)
        }

        functions = PrivateFunctions.of(mod)

        def changed(name: str, function: relax.Function) -> relax.Function:
            if belongs_to_others(function):
                return function
            pure = function.is_pure and name in called
            return self._pipeline(name, function, functions, pure=pure)

        return functions.add_to(change_functions(mod, changed))

    def _pipeline(
        self, name: str, function: relax.Function, functions: PrivateFunctions, *, pure: bool
    ) -> relax.Function:
        """Return a function with pipelined gathers; one that must stay pure is not changed."""
        before = without_dataflow(function)
        loops = PrivateFunctions({*functions.taken})
        after, outcomes = pipeline_gathers(
            before, self.chunks, self.streams, loops, name, compute_streams=self.compute_streams
        )
        if pure and after is not before:
            after = before
            reason = NotOverlappableError(
                "the function must stay pure, since other functions call it"
            )
            outcomes = [(tensor, reason) for tensor, _ in outcomes]
        for tensor, outcome in outcomes:
            subject = f"allgather of {tensor}"
            if isinstance(outcome, NotOverlappableError):
                note(Decision(_NAME, name, subject, "skipped", str(outcome)))
            else:
                note(Decision(_NAME, name, subject, outcome.verdict, outcome.schedule))
        if after is before:
            return function
        functions.extend(loops)
        return with_dataflow(after)
