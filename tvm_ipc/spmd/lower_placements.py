# SPDX-License-Identifier: Apache-2.0
"""The pass that lowers programs for all ranks, with `R.comm.place`, to per-rank programs."""

from __future__ import annotations

import tvm
from tvm import relax

from tvm_ipc import arguments
from tvm_ipc.analysis.walk_and_rewrite_bindings import calls
from tvm_ipc.calibration import Calibration
from tvm_ipc.comm import Mesh
from tvm_ipc.comm.place_op import is_place
from tvm_ipc.errors import TransformError
from tvm_ipc.spmd.placements.convert_dist_annotations import (
    convert_dist_annotations,
    is_distributed_tuple,
    uses_dist,
)
from tvm_ipc.spmd.placements.lower_function import has_marks, lower_function
from tvm_ipc.spmd.placements.place_calls import meshes_of_function
from tvm_ipc.spmd.placements.redistribute import NAME
from tvm_ipc.spmd.rules.operator_rule_table import use_primfuncs
from tvm_ipc.spmd.streams.split_at_marks import StreamOptions, split_at_marks
from tvm_ipc.spmd.tuple_parameters import with_separate_fields, with_tuples
from tvm_ipc.transform.module_pass import ModulePass, module_pass, option
from tvm_ipc.transform.overlap.chunk_loops import PrivateFunctions
from tvm_ipc.transform.overlap.pipelined_gather import with_dataflow, without_dataflow
from tvm_ipc.transform.report import Decision, note


def _check_streams(name: str, value: object) -> int | None:
    expected = "a number of streams, 1 or more, or None"
    return None if value is None else arguments.integer(name, value, expected, 1)


@module_pass
class LowerPlacements(ModulePass):
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
    replicated. TVM's `R.dist.annotate_sharding`, `R.dist.redistribute` and `R.DTensor` are treated
    like `R.comm.place`.

    A function may use several meshes. `R.comm.place` on another mesh moves the tensor there, and
    ranks skip what only ranks of other meshes need.

    If an extent is not a multiple of the number of ranks, all shards have the extent of the largest
    one. Parameters must have zeros in the padding of smaller shards, and results have them too.

    A tensor that is marked for streams is computed in chunks along the marked axis, together with
    the operators and collectives before it: see `tvm_ipc.spmd.streams`.

    Parameters
    ----------
    streams : the number of chunks that are communicated or computed at the same time, for tensors
        that are marked for streams. With 1 nothing overlaps. None ignores the marks.
    calibration : the measured times of the machine. A mark is left out if its chunks are predicted
        to be slower, or hardly faster, unless it has `force=True`. None honours all marks.
    blas : whether matmuls are offloaded to BLAS, which determines their predicted times.
    compute_streams : whether chunk i of a marked tensor is computed on stream i % `streams` of a
        GPU, so that operators of several chunks run side by side. CPUs refuse such programs.

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
    calibration: Calibration | None = option(
        arguments.instance, Calibration, "a tvm_ipc.Calibration", default=None, kw_only=True
    )
    blas: bool = option(arguments.flag, default=False, kw_only=True)
    compute_streams: bool = option(arguments.flag, default=False, kw_only=True)

    def apply(self, mod: tvm.IRModule) -> tvm.IRModule:
        """Return the module with per-rank functions."""
        with use_primfuncs(mod):
            return self._apply(mod)

    def _apply(self, mod: tvm.IRModule) -> tvm.IRModule:
        lowered = {}
        added: dict[tvm.ir.GlobalVar, tvm.tirx.PrimFunc] = {}
        loops = PrivateFunctions.of(mod)
        for global_var, function in mod.functions_items():
            if isinstance(function, relax.Function) and _is_placed(function):
                name = str(global_var.name_hint)
                converted = convert_dist_annotations(name, function)
                meshes = meshes_of_function(converted)
                if not meshes:
                    continue
                known = _with_functions(mod, added)
                # Callers pass shards of the fields of a tuple of distributed tensors.
                separate = any(is_distributed_tuple(param.ty) for param in function.params)
                fields = with_separate_fields(converted) if separate else converted
                of_rank = self._lower(name, fields, meshes, known, added, loops)
                lowered[name] = with_tuples(of_rank, converted) if separate else of_rank
        if not lowered:
            return mod
        _check_callers(mod, lowered)
        functions = {}
        for global_var, function in mod.functions_items():
            name = str(global_var.name_hint)
            # The type of a lowered function changes, so it needs a new global variable.
            fresh = tvm.ir.GlobalVar(name) if name in lowered else global_var
            functions[fresh] = lowered.get(name, function)
        functions |= loops.added
        return _with_functions(
            tvm.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos), added
        )

    def _lower(
        self,
        name: str,
        function: relax.Function,
        meshes: list[Mesh],
        mod: tvm.IRModule,
        added: dict[tvm.ir.GlobalVar, tvm.tirx.PrimFunc],
        loops: PrivateFunctions,
    ) -> relax.Function:
        """Return the function of a rank, and add the PrimFuncs that it needs."""
        is_pipelined = has_marks(function) and self.streams is not None
        lowered = lower_function(
            name, without_dataflow(function) if is_pipelined else function, meshes, mod
        )
        added.update(lowered.primfuncs)
        marks = lowered.marks
        if not is_pipelined:
            for mark in marks:
                note(Decision(NAME, name, mark.subject, "left out", "the pass has streams=None"))
            return lowered.function
        assert self.streams is not None
        options = StreamOptions(self.streams, self.calibration, self.blas, self.compute_streams)
        result, decisions = split_at_marks(lowered.function, marks, options, loops, name)
        for mark, (verdict, reason) in zip(marks, decisions, strict=True):
            note(Decision(NAME, name, mark.subject, verdict, reason))
        return with_dataflow(result)


def _with_functions(
    mod: tvm.IRModule, added: dict[tvm.ir.GlobalVar, tvm.tirx.PrimFunc]
) -> tvm.IRModule:
    """Return the module with further functions; itself if there are none."""
    if not added:
        return mod
    functions = dict(mod.functions_items())
    return tvm.IRModule({**functions, **added}, attrs=mod.attrs, global_infos=mod.global_infos)


def _is_placed(function: relax.Function) -> bool:
    return any(map(is_place, calls(function))) or uses_dist(function)


def _check_callers(mod: tvm.IRModule, lowered: dict[str, relax.Function]) -> None:
    for global_var, function in mod.functions_items():
        for call in calls(function) if isinstance(function, relax.Function) else ():
            if isinstance(call.op, tvm.ir.GlobalVar) and call.op.name_hint in lowered:
                raise TransformError(
                    f"{NAME}: function {global_var.name_hint!r} calls {call.op.name_hint!r}, which "
                    "places tensors: it takes shards, which the caller does not have; inline it "
                    "(relax.transform.InlinePrivateFunctions), or call it from the host"
                )
