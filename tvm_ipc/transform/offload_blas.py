# SPDX-License-Identifier: Apache-2.0
"""Gives matrix products to the BLAS, each with its permuted operands and its epilogue.

Before:
    wt = R.permute_dims(w)
    y0 = R.matmul(x, wt)
    y1 = R.add(y0, bias)
    y2 = R.nn.gelu(y1)

After:
    y2 = R.call_dps_packed("tvm_ipc.blas.matmul", (0, 0x01, 0x41, x, w, bias),
                           out_ty=R.Tensor((n, 64), "float32"))

The numbers are the axes of both operands and the steps (`contract.Epilogue`), a digit each. Sums
and steps are float32 (float64 of float64), so between the steps of 16-bit floats nothing is
rounded.

Runs while products are still operators: before `LegalizeOps`, and after passes that rewrite
operators. What it leaves alone is TVM's as before; a report says why. Whether the BLAS is there
when the program runs is not asked (`tvm_ipc.blas.installed` tells).
"""

from __future__ import annotations

from typing import Final

import tvm
from tvm import relax

from tvm_ipc import arguments
from tvm_ipc.transform.blas.offload import offload
from tvm_ipc.transform.blas.partition import compile_partitions
from tvm_ipc.transform.blas.product import Product
from tvm_ipc.transform.ir.aliases import ModuleFacts
from tvm_ipc.transform.ir.rewrite import belongs_to_others, change_functions
from tvm_ipc.transform.module_pass import module_pass, option

#: Below so many multiplications TVM's kernel, unrolled for its shape, is as fast as a call; TVM
#: widens 16-bit floats one by one. Measured by `benchmarks/blas.py --threshold`.
MIN_WORK: Final = {"float64": 4096, "float32": 4096, "float16": 256, "bfloat16": 256}


@module_pass
class OffloadBLAS:
    """Let the BLAS do the matrix products of every Relax function.

    Parameters
    ----------
    min_work : the least number of multiplications of a product to be worth a call; None means
        what was measured for its type. Dimensions that are not known count as 8.
    """

    min_work: int | None = option(
        arguments.integer, "a number of multiplications, 0 or more, or None", default=None
    )

    def apply(self, mod: tvm.IRModule) -> tvm.IRModule:
        """Return the module with calls of the BLAS."""
        mod = compile_partitions(mod)
        module = ModuleFacts(mod)

        def offloaded(name: str, function: relax.Function) -> relax.Function:
            if belongs_to_others(function):
                return function
            return offload(module, name, "the BLAS is faster", self._too_small)

        return change_functions(mod, offloaded)

    def _too_small(self, product: Product) -> str:
        work = product.work
        least = MIN_WORK[product.dtype] if self.min_work is None else self.min_work
        if work >= least:
            return ""
        return f"{work} multiplications, and a call is worth it from {least} on"
