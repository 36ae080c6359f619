# SPDX-License-Identifier: Apache-2.0
"""Gives kernels that nobody scheduled loops of which vectors can be made.

Before:
    for i in range(n):
        with T.sblock("exp"):
            vi = T.axis.spatial(n, i)
            b[vi] = T.exp(a[vi] * T.float32(2))
    for i in range(n):
        with T.sblock("add"):
            vi = T.axis.spatial(n, i)
            c[vi] = b[vi] + a[vi]

After:
    for i in range(n):
        c[i] = ... + a[i]       # e**(a[i] * 2), in additions, multiplications and selections

Fused stages become one loop over what they have in common, with memory for one row of what lies
between; sums go in lanes; exp, sigmoid, tanh and erf of float32 are operations of vectors, within
two units in the last place of the exact result.

Runs after fusion, on modules for CPUs. A function is left as it is if it is no sequence of stages
as legalization makes them, so what somebody wrote or scheduled stays; if it is called in place; and
if it is a reshape, of which `RewriteDataflowReshape` makes a view.
"""

from __future__ import annotations

from typing import Any, Final

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.target import codegen

from tvm_ipc import arguments
from tvm_ipc.transform.ir.rewrite import calls
from tvm_ipc.transform.kernels.rows import schedule
from tvm_ipc.transform.kernels.stages import NotStagesError, read_stages
from tvm_ipc.transform.module_pass import module_pass, option
from tvm_ipc.transform.report import Decision, note

_NAME: Final = "ScheduleForCPU"
_SCHEDULED: Final = "tirx.is_scheduled"
_IN_PLACE: Final = "relax.call_tir_inplace"


def _power_of_two(name: str, given: object) -> int:
    wanted = "a power of two, 1 to 64"
    number = arguments.integer(name, given, wanted, 1, 64)
    if number & (number - 1):
        raise arguments.wrong_value(name, wanted, given)
    return number


@module_pass
class ScheduleForCPU:
    """Schedule the kernels of a module for a CPU; the report says which are left alone, and why.

    Parameters
    ----------
    lanes : how many float32 a vector has; None means as many as those of the current target.
    """

    lanes: int | None = option(_power_of_two, default=None)

    def apply(self, mod: tvm.IRModule) -> tvm.IRModule:
        """Return the module with its kernels scheduled."""
        lanes = self.lanes or _lanes(tvm.target.Target.current())
        in_place = _called_in_place(mod)
        made: dict[Any, Any] = {}
        result = mod.clone()
        for global_var, function in mod.functions_items():
            if not isinstance(function, tirx.PrimFunc):
                continue
            name = str(global_var.name_hint)
            if global_var in in_place:
                note(Decision(_NAME, name, "kernel", "left alone", "it is called in place"))
                continue
            scheduled = _scheduled(name, function, lanes, made)
            if scheduled is not None:
                result.update_func(global_var, scheduled)
        return result


def _scheduled(
    name: str, function: tirx.PrimFunc, lanes: int, made: dict[Any, Any]
) -> tirx.PrimFunc | None:
    """Return a function scheduled, one that is like another as that was; None to leave it alone."""
    if function.attrs is not None and function.attrs.get(_SCHEDULED):
        return None
    alike = tvm_ffi.StructuralKey(function.without_attr("global_symbol"))
    found = made.get(alike)
    if found is None:
        try:
            stages = read_stages(function)
            if relax.analysis.has_reshape_pattern(function):
                raise NotStagesError("it is a reshape")
            found = schedule(stages, lanes).with_attr(_SCHEDULED, True)
        except NotStagesError as reason:
            found = str(reason)
        made[alike] = found
    if isinstance(found, str):
        note(Decision(_NAME, name, "kernel", "left alone", found))
        return None
    symbol = None if function.attrs is None else function.attrs.get("global_symbol")
    return found if symbol is None else found.with_attr("global_symbol", symbol)


def _called_in_place(mod: tvm.IRModule) -> set[Any]:
    in_place = tvm.ir.Op.get(_IN_PLACE)
    return {
        call.args[0]
        for _, function in mod.functions_items()
        if isinstance(function, relax.Function)
        for call in calls(function)
        if call.op.same_as(in_place)
    }


def _lanes(target: tvm.target.Target | None) -> int:
    if target is None or target.kind.name != "llvm":
        return 8
    if codegen.llvm_cpu_has_features("avx512f", target):
        return 16
    return 8 if codegen.llvm_cpu_has_features("avx2", target) else 4
