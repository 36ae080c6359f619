# SPDX-License-Identifier: Apache-2.0
"""Turns TVM's collective operators into `relax.comm.collective`, and back.

Before `ConvertFromCCL`, after `ConvertToCCL`:
    y = R.ccl.allgather(x, num_workers=4, in_group=False)

After `ConvertFromCCL`, before `ConvertToCCL`:
    y = R.comm.allgather(x, team="world", workers=4)

Both mean the same to `LegalizeOps` and to the runtime. TVM has four operators; what `ConvertToCCL`
cannot say with them it leaves alone, and the report says why.
"""

from __future__ import annotations

from typing import Any, Final

import tvm
from tvm import relax

from tvm_ipc import comm
from tvm_ipc.comm.extents import constant
from tvm_ipc.comm.operator import NAME, infer
from tvm_ipc.transform.ir.rewrite import change_functions, rewrite, typed, with_value
from tvm_ipc.transform.module_pass import module_pass
from tvm_ipc.transform.report import Decision, note

_CCL: Final = "relax.ccl."


@module_pass
class ConvertFromCCL:
    """Turn `R.ccl` operators into collectives of `tvm_ipc.comm`."""

    def apply(self, mod: tvm.IRModule) -> tvm.IRModule:
        """Return the module without operators of `R.ccl`."""
        return change_functions(mod, lambda _, function: rewrite(function, self._change))

    def _change(self, binding: relax.Binding, value: relax.Expr) -> list[relax.Binding] | None:
        new = from_ccl(value)
        return None if new is None else [with_value(binding, new)]


@module_pass
class ConvertToCCL:
    """Turn collectives of `tvm_ipc.comm` into operators of `R.ccl`, where TVM has them."""

    def apply(self, mod: tvm.IRModule) -> tvm.IRModule:
        """Return the module with operators of `R.ccl`."""

        def converted(name: str, function: relax.Function) -> relax.Function:
            def change(binding: relax.Binding, value: relax.Expr) -> list[relax.Binding] | None:
                if not isinstance(value, relax.Call) or not _is(value, NAME):
                    return None
                new, reason = _to_ccl(value)
                if new is None:
                    note(
                        Decision("ConvertToCCL", name, str(value.attrs.kind), "left alone", reason)
                    )
                    return None
                return [with_value(binding, new)]

            return rewrite(function, change)

        return change_functions(mod, converted)


def _is(call: relax.Call, name: str) -> bool:
    return isinstance(call.op, tvm.ir.Op) and call.op.name == name


def from_ccl(value: relax.Expr) -> relax.Call | None:
    """Return the collective that an operator of TVM is, None for everything else."""
    if not isinstance(value, relax.Call) or not isinstance(value.op, tvm.ir.Op):
        return None
    name = str(value.op.name)
    if not name.startswith(_CCL):
        return None
    (x,), attrs = value.args, value.attrs
    made = {
        "allreduce": lambda: comm.allreduce(x, str(attrs.op_type), team=_team(attrs)),
        "allgather": lambda: comm.allgather(x, team=_team(attrs), workers=int(attrs.num_workers)),
        "broadcast_from_worker0": lambda: comm.broadcast(x),
        "scatter_from_worker0": lambda: comm.scatter(
            x, axis=int(attrs.axis), workers=int(attrs.num_workers)
        ),
    }.get(name.removeprefix(_CCL))
    return None if made is None else typed(made(), value.ty)


def _team(attrs: Any) -> str:
    return "group" if attrs.in_group else "world"


def _to_ccl(call: relax.Call) -> tuple[relax.Call | None, str]:
    """Return the operator of TVM that a collective is, or None, and why there is none."""
    infer(call)  # the rules that R.ccl has no words for
    attrs = call.attrs
    x = call.args[0]
    in_group = attrs.team == "group"
    if attrs.backend != "auto":
        return None, f"it is for the backend {attrs.backend}, and R.ccl names none"
    if not isinstance(attrs.team, str):
        return None, "R.ccl has the world and groups alone, no other teams"
    if attrs.uneven:
        return None, "R.ccl has no uneven parts"
    if attrs.kind == "allreduce":
        return typed(relax.op.ccl.allreduce(x, attrs.reduction, in_group), call.ty), ""
    if attrs.kind == "allgather":
        if attrs.concat_axis != 0:
            return None, f"R.ccl.allgather joins along axis 0, not {attrs.concat_axis}"
        return typed(relax.op.ccl.allgather(x, attrs.workers, in_group), call.ty), ""
    if attrs.kind not in ("broadcast", "scatter"):
        return None, f"R.ccl has no {attrs.kind}"
    if in_group or constant(call.args[1]) != 0:
        return None, f"R.ccl has a {attrs.kind} from the first of all workers alone"
    if attrs.kind == "broadcast":
        return typed(relax.op.ccl.broadcast_from_worker0(x), call.ty), ""
    made = relax.op.ccl.scatter_from_worker0(x, attrs.workers, attrs.split_axis)
    return typed(made, call.ty), ""
