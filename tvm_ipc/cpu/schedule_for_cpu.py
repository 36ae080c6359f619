# SPDX-License-Identifier: Apache-2.0
"""The pass `ScheduleForCPU`, which schedules legalized kernels as vectorizable loops."""

from __future__ import annotations

from typing import Any, Final, NoReturn

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.target import codegen

from tvm_ipc import arguments
from tvm_ipc.analysis.views_and_writes_of_calls import operator_of
from tvm_ipc.analysis.walk_and_rewrite_bindings import calls, change_functions
from tvm_ipc.cpu.kernels.primfunc_stages import NotStagesError, read_stages
from tvm_ipc.cpu.kernels.row_fusion import schedule
from tvm_ipc.cpu.kernels.vector_math import has_functions
from tvm_ipc.cpu.operators_with_fixed_order import has_float_arithmetic
from tvm_ipc.errors import TransformError
from tvm_ipc.transform.module_pass import ModulePass, module_pass, option
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
class ScheduleForCPU(ModulePass):
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
    reproducible : whether the bits of an operator's result must not depend on what it is fused
        with. Then each result of an operator is rounded to its type, and a kernel whose sums or
        functions are left to TVM is refused. The target must not have fused multiply-add, which
        LLVM uses where it can: see `cpu_target(reproducible=True)`.

    Raises
    ------
    TransformError
        The result of a kernel would not be reproducible.

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
    reproducible: bool = option(arguments.flag, default=False, kw_only=True)

    def apply(self, mod: tvm.IRModule) -> tvm.IRModule:
        """Return the module with its kernels scheduled."""
        lanes = self.lanes or _lanes(tvm.target.Target.current())
        in_place = _called_in_place(mod)
        schedules: dict[Any, Any] = {}

        def scheduled(name: str, function: tirx.PrimFunc) -> tirx.PrimFunc:
            if name in in_place:
                return self._skip(name, function, "it is called in place")
            result = self._schedule(function, lanes, schedules)
            if isinstance(result, str):
                return self._skip(name, function, result)
            if self.reproducible and has_functions(result.body):
                self._refuse(name, "a function is evaluated in a branch, where it is not expanded")
            return result

        return change_functions(mod, scheduled, tirx.PrimFunc)

    def _schedule(
        self, function: tirx.PrimFunc, lanes: int, schedules: dict[Any, Any]
    ) -> tirx.PrimFunc | str:
        """Return a scheduled function, shared between structurally equal ones; or why not."""
        if function.attrs is not None and function.attrs.get(_SCHEDULED):
            return function
        structure = tvm_ffi.StructuralKey(function.without_attr("global_symbol"))
        found = schedules.get(structure)
        if found is None:
            try:
                stages = read_stages(function)
                if _is_reshape(function):
                    raise NotStagesError("it is a reshape")
                found = schedule(stages, lanes, reproducible=self.reproducible)
                found = found.with_attr(_SCHEDULED, True)
            except NotStagesError as reason:
                found = str(reason)
            schedules[structure] = found
        symbol = None if function.attrs is None else function.attrs.get("global_symbol")
        if isinstance(found, str) or symbol is None:
            return found
        return found.with_attr("global_symbol", symbol)

    def _skip(self, name: str, function: tirx.PrimFunc, reason: str) -> tirx.PrimFunc:
        note(Decision(_NAME, name, "kernel", "skipped", reason))
        if self.reproducible and has_float_arithmetic(function):
            self._refuse(name, f"TVM schedules it, since {reason}")
        return function

    def _refuse(self, name: str, reason: str) -> NoReturn:
        raise TransformError(
            f"{_NAME}: the results of the kernel {name!r} are not reproducible: {reason}; change "
            "the operator, or compile the program without reproducible=True"
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
