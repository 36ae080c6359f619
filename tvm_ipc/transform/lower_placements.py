# SPDX-License-Identifier: Apache-2.0
"""Makes of a program for all ranks, which says where its tensors lie, what one rank runs.

Before, on a mesh of two ranks:
    @R.function
    def main(x: R.Tensor((4, 8)), w: R.Tensor((8, 6))):
        wide = R.comm.place(w, mesh, {"tp": comm.Shard(0)})
        y = R.matmul(x, wide)
        return y

After:
    @R.function
    def main(x: R.Tensor((4, 8)), w: R.Tensor((4, 6))):
        lv = R.comm.take_part(x, axis=1, team=[[0, 1]])
        lv1 = R.matmul(lv, w)
        y = R.comm.allreduce(lv1, "sum", team=[[0, 1]])
        return y

A parameter lies where the first place says that is directly on it, a result where a place says that
makes it; what is not said is replicated. Parts of an axis that the ranks do not divide have the
extent of the largest one, in parameters and results with zeros beyond the end. TVM's
`R.dist.annotate_sharding` is a place, too. A product along an axis that is marked for streams
becomes chunks: see `tvm_ipc.transform.overlap.streams`.

Runs before everything else that looks into functions, `OffloadBLAS` and `LegalizeOps` above all.
"""

from __future__ import annotations

import tvm
from tvm import relax

from tvm_ipc import arguments
from tvm_ipc.comm import Mesh
from tvm_ipc.errors import TransformError
from tvm_ipc.transform.ir.rewrite import calls
from tvm_ipc.transform.module_pass import module_pass, option
from tvm_ipc.transform.overlap.site import LeftAloneError
from tvm_ipc.transform.overlap.streams import in_streams, with_dataflow, without_dataflow
from tvm_ipc.transform.placements.dist import with_places
from tvm_ipc.transform.placements.function import has_marks, lower_function, mesh_of_function
from tvm_ipc.transform.placements.redistribute import NAME
from tvm_ipc.transform.report import Decision, note


def _streams(name: str, given: object) -> int | None:
    wanted = "a number of streams, 1 or more, or None"
    return None if given is None else arguments.integer(name, given, wanted, 1)


@module_pass
class LowerPlacements:
    """Turn functions with `R.comm.place` into those that one rank runs.

    What each collective is for is in the report. Functions without a place stay as they are.

    Parameters
    ----------
    streams : of a product along an axis that is marked for streams, how many chunks have their rows
        on their way, or are multiplied, at a time. With 1 nothing goes on meanwhile; with None the
        program is as it would be without marks.

    Raises
    ------
    TransformError
        It is not clear what ranks have to exchange, or would cost more than the program shows.
    """

    streams: int | None = option(_streams, default=2, kw_only=True)

    def apply(self, mod: tvm.IRModule) -> tvm.IRModule:
        """Return the module without places."""
        lowered = {}
        for global_var, function in mod.functions_items():
            if isinstance(function, relax.Function):
                name = str(global_var.name_hint)
                function = with_places(name, function)
                mesh = mesh_of_function(name, function)
                if mesh is not None:
                    lowered[name] = self._lower(name, function, mesh, mod)
        if not lowered:
            return mod
        _check_callers(mod, lowered)
        functions = {}
        for global_var, function in mod.functions_items():
            name = str(global_var.name_hint)
            # Another variable, since the function has another type.
            fresh = tvm.ir.GlobalVar(name) if name in lowered else global_var
            functions[fresh] = lowered.get(name, function)
        return tvm.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)

    def _lower(
        self, name: str, function: relax.Function, mesh: Mesh, mod: tvm.IRModule
    ) -> relax.Function:
        if not has_marks(function):
            return lower_function(name, function, mesh, mod)[0]
        if self.streams is None:
            lowered, marked = lower_function(name, function, mesh, mod)
            for one in marked:
                note(Decision(NAME, name, one.subject, "left out", "the pass was given no streams"))
            return lowered
        plain, marked = lower_function(name, without_dataflow(function), mesh, mod)
        result, said = in_streams(plain, [(one.value, one.axis) for one in marked], self.streams)
        for one, chunks in zip(marked, said, strict=True):
            if isinstance(chunks, LeftAloneError):
                note(Decision(NAME, name, one.subject, "left out", str(chunks)))
            else:
                how = f"their rows are gathered as works, {min(self.streams, chunks)} at a time"
                note(Decision(NAME, name, one.subject, f"in {chunks} chunks", how))
        return with_dataflow(result)


def _check_callers(mod: tvm.IRModule, lowered: dict[str, relax.Function]) -> None:
    for global_var, function in mod.functions_items():
        for call in calls(function) if isinstance(function, relax.Function) else ():
            if isinstance(call.op, tvm.ir.GlobalVar) and call.op.name_hint in lowered:
                raise TransformError(
                    f"{NAME}: function {global_var.name_hint!r} calls {call.op.name_hint!r}, which "
                    "places tensors: one rank is given parts, and the caller has none; inline it "
                    "(relax.transform.InlinePrivateFunctions), or call it from the host"
                )
