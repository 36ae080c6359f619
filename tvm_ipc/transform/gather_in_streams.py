# SPDX-License-Identifier: Apache-2.0
"""Gathers the rows of matrix products as works, chunk by chunk, while others are multiplied.

Before, with 2 workers:
    whole = R.ccl.allgather(x, num_workers=2)    # x: (4, k)
    y = R.matmul(whole, w)

After, in 2 chunks:
    gathered = R.builtin.alloc_tensor(R.shape([2, 4, k]), ...)
    rows = R.comm.view(gathered, <its first half>)
    work = R.comm.post(R.comm.allgather(<rows 0 and 1 of x>, ...), rows)
    rows1 = R.comm.view(gathered, <its second half>)
    work1 = R.comm.post(R.comm.allgather(<rows 2 and 3 of x>, ...), rows1)
    _ = R.comm.wait(work)
    part = R.matmul(<rows of rank 0 in rows>, w)
    part1 = R.matmul(<rows of rank 1 in rows>, w)
    _ = R.comm.wait(work1)
    ...
    y = R.call_dps_packed("tvm_ipc.join", (0, R.shape([...]), part, part1, ...), ...)

`OverlapCommunication` reads the rows of others where they lie, and gathers nothing: it is the one
to take where ranks map each other's memory. This one needs a collective alone. In programs for all
ranks `comm.place(..., stream=axis)` says the same of one product.

Runs while all of these are operators, before `LegalizeOps`; `PlaceParts` has to follow after
`CallTIRRewrite`, so that products are written where they are joined.
"""

from __future__ import annotations

from typing import Final

import tvm
from tvm import relax

from tvm_ipc import arguments
from tvm_ipc.transform.ir.rewrite import belongs_to_others, calls, change_functions
from tvm_ipc.transform.module_pass import module_pass, option
from tvm_ipc.transform.overlap.site import LeftAloneError
from tvm_ipc.transform.overlap.streams import (
    gathers_in_streams,
    with_dataflow,
    without_dataflow,
)
from tvm_ipc.transform.report import Decision, note

_NAME: Final = "GatherInStreams"


@module_pass
class GatherInStreams:
    """Gather the rows of matrix products as works, in chunks.

    Parameters
    ----------
    chunks : into how many the rows of a rank are divided.
    streams : how many chunks have their rows on their way, or are multiplied, at a time. With 1
        nothing goes on meanwhile.
    """

    chunks: int = option(arguments.integer, "a number of chunks, 1 or more", 1)
    streams: int = option(arguments.integer, "a number of streams, 1 or more", 1, default=2)

    def apply(self, mod: tvm.IRModule) -> tvm.IRModule:
        """Return the module with chunks."""
        called = {
            str(call.op.name_hint)
            for _, function in mod.functions_items()
            for call in (calls(function) if isinstance(function, relax.Function) else ())
            if isinstance(call.op, tvm.ir.GlobalVar)
        }

        def changed(name: str, function: relax.Function) -> relax.Function:
            if belongs_to_others(function):
                return function
            return self._changed(name, function, pure=function.is_pure and name in called)

        return change_functions(mod, changed)

    def _changed(self, name: str, function: relax.Function, *, pure: bool) -> relax.Function:
        before = without_dataflow(function)
        after, said = gathers_in_streams(before, self.chunks, self.streams)
        if pure and after is not before:
            after, why = before, LeftAloneError("the function is pure for others that call it")
            said = [(of, why) for of, _ in said]
        for of, chunks in said:
            if isinstance(chunks, LeftAloneError):
                note(Decision(_NAME, name, f"allgather of {of}", "left alone", str(chunks)))
            else:
                how = f"{min(chunks, self.streams)} at a time"
                note(Decision(_NAME, name, f"allgather of {of}", f"in {chunks} chunks", how))
        return function if after is before else with_dataflow(after)
