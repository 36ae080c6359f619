# SPDX-License-Identifier: Apache-2.0
"""The pass `ScheduleForCPU`, which schedules legalized kernels as vectorizable loops."""

from __future__ import annotations

from typing import Any, Final

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.target import codegen

from tvm_ipc import arguments
from tvm_ipc.analysis.views_and_writes_of_calls import operator_of
from tvm_ipc.analysis.walk_and_rewrite_bindings import calls, change_functions
from tvm_ipc.cpu.kernels.primfunc_stages import NotStagesError, read_stages
from tvm_ipc.cpu.kernels.row_fusion import schedule
from tvm_ipc.transform.module_pass import module_pass, option
from tvm_ipc.transform.report import Decision, note

_NAME: Final = "ScheduleForCPU"
_SCHEDULED: Final = "tirx.is_scheduled"
_IN_PLACE: Final = "relax.call_tir_inplace"


def _power_of_two(name: str, value: object) -> int:
    wanted = "a power of two, 1 to 64"
    number = arguments.integer(name, value, wanted, 1, 64)
    if number & (number - 1):
        raise arguments.wrong_value(name, wanted, value)
    return number


@module_pass
class ScheduleForCPU:
    """Schedule the kernels of a module for a CPU, as loops that LLVM can vectorize.

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

    Fused stages become one loop over their common axes, with memory for one row of each
    intermediate buffer. Reductions are computed in SIMD lanes. exp, sigmoid, tanh and erf of
    float32 are expanded to vector operations, within two units in the last place of the exact
    result.

    Run the pass after fusion, on modules for CPUs. It skips functions that are not a sequence of
    stages as legalization generates them, so functions that were written or scheduled by hand do
    not change. It also skips functions that are called in place, and reshapes, which
    `RewriteDataflowReshape` replaces by views. The report gives the reasons.

    Parameters
    ----------
    lanes : the number of float32 in a vector; None for that of the current target.

    Examples
    --------
    >>> import tvm
    >>> from tvm_ipc.cpu import ScheduleForCPU
    >>> from tvm_ipc.transform import LegalizeOps
    >>> mod = tvm.script.from_source('''
    ... @I.ir_module
    ... class Model:
    ...     @R.function
    ...     def main(x: R.Tensor((4, 64), "float32")):
    ...         return R.exp(x)
    ... ''')
    >>> with tvm.target.Target("llvm"):
    ...     scheduled = ScheduleForCPU()(LegalizeOps()(mod))
    >>> "T.exp" in scheduled.script()  # expanded to vector operations
    False
    """

    lanes: int | None = option(_power_of_two, default=None)

    def apply(self, mod: tvm.IRModule) -> tvm.IRModule:
        """Return the module with its kernels scheduled."""
        lanes = self.lanes or _lanes(tvm.target.Target.current())
        in_place = _called_in_place(mod)
        schedules: dict[Any, Any] = {}

        def scheduled(name: str, function: tirx.PrimFunc) -> tirx.PrimFunc:
            if name in in_place:
                note(Decision(_NAME, name, "kernel", "skipped", "it is called in place"))
                return function
            return _scheduled(name, function, lanes, schedules)

        return change_functions(mod, scheduled, tirx.PrimFunc)


def _scheduled(
    name: str, function: tirx.PrimFunc, lanes: int, schedules: dict[Any, Any]
) -> tirx.PrimFunc:
    """Return a scheduled function, shared between structurally equal ones; itself to skip it."""
    if function.attrs is not None and function.attrs.get(_SCHEDULED):
        return function
    structure = tvm_ffi.StructuralKey(function.without_attr("global_symbol"))
    schedule_or_reason = schedules.get(structure)
    if schedule_or_reason is None:
        try:
            stages = read_stages(function)
            if _is_reshape(function):
                raise NotStagesError("it is a reshape")
            schedule_or_reason = schedule(stages, lanes).with_attr(_SCHEDULED, True)
        except NotStagesError as reason:
            schedule_or_reason = str(reason)
        schedules[structure] = schedule_or_reason
    if isinstance(schedule_or_reason, str):
        note(Decision(_NAME, name, "kernel", "skipped", schedule_or_reason))
        return function
    symbol = None if function.attrs is None else function.attrs.get("global_symbol")
    return (
        schedule_or_reason
        if symbol is None
        else schedule_or_reason.with_attr("global_symbol", symbol)
    )


def _is_reshape(function: tirx.PrimFunc) -> bool:
    try:
        return bool(relax.analysis.has_reshape_pattern(function))
    except tvm.error.InternalError:
        # TVM's analysis fails for some symbolic extents. The kernel may be a reshape, which TVM
        # replaces by a view if it finds it so later.
        raise NotStagesError("TVM cannot analyse whether it is a reshape") from None


def _called_in_place(mod: tvm.IRModule) -> set[str]:
    return {
        str(call.args[0].name_hint)
        for _, function in mod.functions_items()
        if isinstance(function, relax.Function)
        for call in calls(function)
        if operator_of(call) == _IN_PLACE
    }


def _lanes(target: tvm.target.Target | None) -> int:
    if target is None or target.kind.name != "llvm":
        return 8
    if codegen.llvm_cpu_has_features("avx512f", target):
        return 16
    return 8 if codegen.llvm_cpu_has_features("avx2", target) else 4
