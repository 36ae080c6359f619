# SPDX-License-Identifier: Apache-2.0
"""The passes `ConvertFromCCL` and `ConvertToCCL`, between TVM's collective operators and ours.

`LegalizeOps` and the runtime treat both forms alike.
"""

from __future__ import annotations

from typing import Any, Final

import tvm
from tvm import relax

from tvm_ipc import comm
from tvm_ipc.analysis.walk_and_rewrite_bindings import change_functions, rewrite, typed, with_value
from tvm_ipc.comm.collective_attrs import CollectiveAttrs
from tvm_ipc.comm.collective_relax_op import infer, is_collective
from tvm_ipc.comm.extent_arithmetic import constant
from tvm_ipc.transform.module_pass import ModulePass, module_pass
from tvm_ipc.transform.report import Decision, note

_CCL: Final = "relax.ccl."
_CCL_REDUCTIONS: Final = ("sum", "prod", "min", "max", "avg")


@module_pass
class ConvertFromCCL(ModulePass):
    """Convert TVM's `R.ccl` operators to collectives of `tvm_ipc.comm`.

    Before:

        y = R.ccl.allgather(x, num_workers=4, in_group=False)

    After:

        y = R.comm.allgather(x, team="world", workers=4)

    Examples
    --------
    >>> import tvm
    >>> from tvm_ipc.transform import ConvertFromCCL
    >>> mod = tvm.script.from_source('''
    ... @I.ir_module
    ... class Model:
    ...     @R.function
    ...     def main(x: R.Tensor((4,), "float32")):
    ...         return R.ccl.allgather(x, 2)
    ... ''')
    >>> converted = ConvertFromCCL()(mod)
    >>> "R.ccl" in converted.script()
    False
    """

    def apply(self, mod: tvm.IRModule) -> tvm.IRModule:
        """Return the module without operators of `R.ccl`."""
        return change_functions(mod, lambda _, function: rewrite(function, self._change))

    def _change(self, binding: relax.Binding, value: relax.Expr) -> list[relax.Binding] | None:
        new = from_ccl(value)
        return None if new is None else [with_value(binding, new)]


@module_pass
class ConvertToCCL(ModulePass):
    """Convert collectives of `tvm_ipc.comm` to TVM's `R.ccl` operators.

    Before:

        y = R.comm.allgather(x, team="world", workers=4)

    After:

        y = R.ccl.allgather(x, num_workers=4, in_group=False)

    TVM has only four operators. Collectives that they cannot express are skipped; the report gives
    the reason.

    Examples
    --------
    >>> import tvm
    >>> from tvm_ipc.transform import ConvertFromCCL, ConvertToCCL
    >>> mod = tvm.script.from_source('''
    ... @I.ir_module
    ... class Model:
    ...     @R.function
    ...     def main(x: R.Tensor((4,), "float32")):
    ...         return R.ccl.allgather(x, 2)
    ... ''')
    >>> back = ConvertToCCL()(ConvertFromCCL()(mod))
    >>> "R.ccl.allgather" in back.script()
    True
    """

    def apply(self, mod: tvm.IRModule) -> tvm.IRModule:
        """Return the module with operators of `R.ccl`."""

        def convert(name: str, function: relax.Function) -> relax.Function:
            def change(binding: relax.Binding, value: relax.Expr) -> list[relax.Binding] | None:
                if not is_collective(value):
                    return None
                new, reason = _to_ccl(value)
                if new is None:
                    note(Decision("ConvertToCCL", name, str(value.attrs.kind), "skipped", reason))
                    return None
                return [with_value(binding, new)]

            return rewrite(function, change)

        return change_functions(mod, convert)


def from_ccl(value: relax.Expr) -> relax.Call | None:
    """Return the collective for an operator of `R.ccl`, None for any other expression."""
    if not isinstance(value, relax.Call) or not isinstance(value.op, tvm.ir.Op):
        return None
    name = str(value.op.name)
    if not name.startswith(_CCL):
        return None
    (x,), attrs = value.args, value.attrs
    builders = {
        "allreduce": lambda: comm.allreduce(x, str(attrs.op_type), team=_team(attrs)),
        "allgather": lambda: comm.allgather(x, team=_team(attrs), workers=int(attrs.num_workers)),
        "broadcast_from_worker0": lambda: comm.broadcast(x),
        "scatter_from_worker0": lambda: comm.scatter(
            x, axis=int(attrs.axis), workers=int(attrs.num_workers)
        ),
    }
    build = builders.get(name.removeprefix(_CCL))
    return None if build is None else typed(build(), value.ty)


def _team(attrs: Any) -> str:
    return "group" if attrs.in_group else "world"


def _to_ccl(call: relax.Call) -> tuple[relax.Call | None, str]:
    """Return the operator of `R.ccl` for a collective, or None and the reason."""
    infer(call)  # checks the arguments, of which R.ccl does not check all
    attrs = CollectiveAttrs.of(call)
    x = call.args[0]
    in_group = attrs.team == "group"
    if attrs.backend != "auto":
        return None, f"it is for the backend {attrs.backend}, but R.ccl has no choice of backend"
    if not isinstance(attrs.team, str):
        return None, "R.ccl has only the world and groups, no other teams"
    if attrs.scale is not None:
        return None, "R.ccl has no scaled sums"
    if attrs.uneven:
        return None, "R.ccl has no uneven shards"
    if attrs.kind == "allreduce":
        if attrs.reduction not in _CCL_REDUCTIONS:
            return None, f"R.ccl has no {attrs.reduction}"
        return typed(relax.op.ccl.allreduce(x, attrs.reduction, in_group), call.ty), ""
    if attrs.kind == "allgather":
        if attrs.concat_axis != 0:
            return None, f"R.ccl.allgather concatenates along axis 0, not {attrs.concat_axis}"
        return typed(relax.op.ccl.allgather(x, attrs.workers, in_group), call.ty), ""
    if attrs.kind not in ("broadcast", "scatter"):
        return None, f"R.ccl has no {attrs.kind}"
    if in_group or constant(call.args[1]) != 0:
        return None, f"R.ccl has a {attrs.kind} only from worker 0 to all workers"
    if attrs.kind == "broadcast":
        return typed(relax.op.ccl.broadcast_from_worker0(x), call.ty), ""
    scatter = relax.op.ccl.scatter_from_worker0(x, attrs.workers, attrs.split_axis)
    return typed(scatter, call.ty), ""
