# SPDX-License-Identifier: Apache-2.0
"""The pass `OffloadBLAS`, which offloads matmuls with their epilogues to OpenBLAS."""

from __future__ import annotations

from typing import Final

import tvm
from tvm import relax

from tvm_ipc import arguments
from tvm_ipc.analysis.find_aliases import ModuleAliasFacts
from tvm_ipc.analysis.walk_and_rewrite_bindings import belongs_to_others, change_functions
from tvm_ipc.cpu.blas.byoc_backend import compile_partitions
from tvm_ipc.cpu.blas.find_matmuls_with_epilogues import Matmul
from tvm_ipc.cpu.blas.matmuls_to_blas_calls import offload
from tvm_ipc.transform.module_pass import ModulePass, module_pass, option

#: The number of multiplications below which TVM's kernel, unrolled for its shape, is as fast as a
#: BLAS call. It is lower for 16-bit types, which TVM widens one element at a time. Measured by
#: `benchmarks/blas.py --threshold`.
MIN_WORK: Final = {"float64": 4096, "float32": 4096, "float16": 256, "bfloat16": 256}


@module_pass
class OffloadBLAS(ModulePass):
    """Offload the matmuls of every Relax function to BLAS, with transposes and epilogues.

    Before:

        wt = R.permute_dims(w)
        y0 = R.matmul(x, wt)
        y1 = R.add(y0, bias)
        y2 = R.nn.gelu(y1)

    After:

        y2 = R.call_dps_packed("tvm_ipc.blas.matmul", (0, 0x01, 0x41, 0, x, w, bias),
                               out_ty=R.Tensor((n, 64), "float32"))

    The first three numbers encode the axes of both operands and the steps of the epilogue
    (`packed_functions.Epilogue`), one hexadecimal digit each. The fourth is the number of parts
    whose sums are added as a tree; 0 selects the fastest order of sums. Matmuls and steps are
    computed in float32, or in float64 for float64 operands, so 16-bit types are rounded only once,
    at the end.

    Run the pass before `LegalizeOps`, while matmuls are operators, and after passes that rewrite
    operators. TVM compiles the matmuls that are not offloaded; the report gives the reasons. The
    pass does not check that BLAS is available when the program runs
    (`tvm_ipc.cpu.openblas_discovery.installed` does).

    Parameters
    ----------
    min_work : the least number of multiplications of a matmul that is offloaded; None for a
        measured threshold for its type. Unknown dimensions count as 8.

    Examples
    --------
    >>> import tvm
    >>> from tvm_ipc.cpu import OffloadBLAS
    >>> mod = tvm.script.from_source('''
    ... @I.ir_module
    ... class Model:
    ...     @R.function
    ...     def main(x: R.Tensor((64, 64), "float32"), w: R.Tensor((64, 64), "float32")):
    ...         y = R.nn.gelu(R.matmul(x, R.permute_dims(w)))
    ...         return y
    ... ''')
    >>> offloaded = OffloadBLAS()(mod).script()
    >>> "tvm_ipc.blas.matmul" in offloaded, "gelu" in offloaded
    (True, False)
    """

    min_work: int | None = option(
        arguments.integer, "a number of multiplications, 0 or more, or None", default=None
    )

    def apply(self, mod: tvm.IRModule) -> tvm.IRModule:
        """Return the module with BLAS calls."""
        mod = compile_partitions(mod)
        module = ModuleAliasFacts(mod)

        def offloaded(name: str, function: relax.Function) -> relax.Function:
            if belongs_to_others(function):
                return function
            return offload(module, name, "BLAS is faster", self._too_small)

        return change_functions(mod, offloaded)

    def _too_small(self, matmul: Matmul) -> str:
        work = matmul.work
        least = MIN_WORK[matmul.dtype] if self.min_work is None else self.min_work
        if work >= least:
            return ""
        return f"it has {work} multiplications; a call pays from {least} on"
