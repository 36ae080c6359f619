# SPDX-License-Identifier: Apache-2.0
"""The pass that lowers programs for all ranks, with `R.comm.place`, to per-rank programs."""

from __future__ import annotations

import tvm
from tvm import relax

from tvm_ipc import arguments
from tvm_ipc.analysis.walk_and_rewrite_bindings import calls
from tvm_ipc.comm import Mesh
from tvm_ipc.comm.place_op import is_place
from tvm_ipc.errors import TransformError
from tvm_ipc.spmd.placements.convert_dist_annotations import convert_dist_annotations, is_annotation
from tvm_ipc.spmd.placements.lower_function import has_marks, lower_function, mesh_of_function
from tvm_ipc.spmd.placements.redistribute import NAME
from tvm_ipc.transform.module_pass import module_pass, option
from tvm_ipc.transform.overlap.candidate_types import NotOverlappableError
from tvm_ipc.transform.overlap.pipelined_gather import (
    pipeline_marked,
    with_dataflow,
    without_dataflow,
)
from tvm_ipc.transform.report import Decision, note


def _check_streams(name: str, value: object) -> int | None:
    expected = "a number of streams, 1 or more, or None"
    return None if value is None else arguments.integer(name, value, expected, 1)


@module_pass
class LowerPlacements:
    """Lower functions with `R.comm.place` to the functions that one rank runs.

    Functions without `R.comm.place` do not change. The report gives the reason for each collective.
    Run this pass before other passes that transform functions, such as `OffloadBLAS` and
    `LegalizeOps`, because they need the functions of one rank.

    Before, on a mesh of two ranks:

        @R.function
        def main(x: R.Tensor((4, 8)), w: R.Tensor((8, 6))):
            wide = R.comm.place(w, mesh, {"tp": comm.Shard(0)})
            y = R.matmul(x, wide)
            return y

    After:

        @R.function
        def main(x: R.Tensor((4, 8)), w: R.Tensor((4, 6))):
            lv = R.comm.take_shard(x, axis=1, team=[[0, 1]])
            lv1 = R.matmul(lv, w)
            y = R.comm.allreduce(lv1, "sum", team=[[0, 1]])
            return y

    A parameter has the placement of the first `R.comm.place` that is applied to it. A result has
    the placement of the `R.comm.place` that computes it. Other parameters and results are
    replicated. TVM's `R.dist.annotate_sharding` is treated like `R.comm.place`.

    If an extent is not a multiple of the number of ranks, all shards have the extent of the largest
    one. Parameters must have zeros in the padding of smaller shards, and results have them too.

    A matmul along an axis that is marked for streams is split into chunks: see
    `tvm_ipc.transform.overlap.pipelined_gather`.

    Parameters
    ----------
    streams : the number of chunks that are being gathered or multiplied at the same time, for
        matmuls along an axis that is marked for streams. With 1 nothing overlaps. None ignores the
        marks.

    Raises
    ------
    TransformError
        An operator cannot be computed from operands with these placements, or a function cannot be
        lowered for another reason. The message suggests a change of the program.

    Examples
    --------
    Each of two ranks has half of the weight, and the results are summed:

    >>> import tvm
    >>> from tvm_ipc.spmd import LowerPlacements
    >>> mod = tvm.script.from_source('''
    ... @I.ir_module
    ... class Model:
    ...     @R.function
    ...     def main(x: R.Tensor((4, 8), "float32"), w: R.Tensor((8, 6), "float32")):
    ...         sharded = R.comm.place(w, [["tp", 2]], ["S[0]"])
    ...         y = R.matmul(x, sharded)
    ...         return y
    ... ''')
    >>> lowered = LowerPlacements()(mod)
    >>> lowered["main"].params[1].ty
    R.Tensor((4, 6), dtype="float32")
    >>> 'kind="allreduce"' in lowered.script()
    True
    """

    streams: int | None = option(_check_streams, default=2, kw_only=True)

    def apply(self, mod: tvm.IRModule) -> tvm.IRModule:
        """Return the module with per-rank functions."""
        lowered = {}
        for global_var, function in mod.functions_items():
            if isinstance(function, relax.Function) and _is_placed(function):
                name = str(global_var.name_hint)
                function = convert_dist_annotations(name, function)
                mesh = mesh_of_function(name, function)
                if mesh is not None:
                    lowered[name] = self._lower(name, function, mesh, mod)
        if not lowered:
            return mod
        _check_callers(mod, lowered)
        functions = {}
        for global_var, function in mod.functions_items():
            name = str(global_var.name_hint)
            # The type of a lowered function changes, so it needs a new global variable.
            fresh = tvm.ir.GlobalVar(name) if name in lowered else global_var
            functions[fresh] = lowered.get(name, function)
        return tvm.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)

    def _lower(
        self, name: str, function: relax.Function, mesh: Mesh, mod: tvm.IRModule
    ) -> relax.Function:
        if not has_marks(function):
            return lower_function(name, function, mesh, mod)[0]
        if self.streams is None:
            lowered, marks = lower_function(name, function, mesh, mod)
            for mark in marks:
                note(Decision(NAME, name, mark.subject, "left out", "the pass has streams=None"))
            return lowered
        plain, marks = lower_function(name, without_dataflow(function), mesh, mod)
        result, outcomes = pipeline_marked(
            plain, [(mark.value, mark.axis) for mark in marks], self.streams
        )
        for mark, chunks in zip(marks, outcomes, strict=True):
            if isinstance(chunks, NotOverlappableError):
                note(Decision(NAME, name, mark.subject, "left out", str(chunks)))
            else:
                at_a_time = min(self.streams, chunks)
                reason = f"their rows are gathered asynchronously, {at_a_time} at a time"
                outcome = f"in {arguments.counted(chunks, 'chunk')}"
                note(Decision(NAME, name, mark.subject, outcome, reason))
        return with_dataflow(result)


def _is_placed(function: relax.Function) -> bool:
    return any(is_place(call) or is_annotation(call) for call in calls(function))


def _check_callers(mod: tvm.IRModule, lowered: dict[str, relax.Function]) -> None:
    for global_var, function in mod.functions_items():
        for call in calls(function) if isinstance(function, relax.Function) else ():
            if isinstance(call.op, tvm.ir.GlobalVar) and call.op.name_hint in lowered:
                raise TransformError(
                    f"{NAME}: function {global_var.name_hint!r} calls {call.op.name_hint!r}, which "
                    "places tensors: it takes shards, which the caller does not have; inline it "
                    "(relax.transform.InlinePrivateFunctions), or call it from the host"
                )
