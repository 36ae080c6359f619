# SPDX-License-Identifier: Apache-2.0
"""The BLAS as an external compiler: patterns for TVM's tools, and what compiles their functions.

    mod = relax.transform.FuseOpsByPattern(blas_patterns(), annotate_codegen=True)(mod)
    mod = OffloadBLAS()(mod)

Functions with `{"Codegen": "blas"}`, from these patterns, from others or written by hand, are
outlined, compiled and inlined by the passes for external compilers. A function may hold anything
that TVM can compile: its products become calls, however small they are, and the rest stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any, Final

import tvm
import tvm_ffi
from tvm import relax
from tvm.relax import dpl
from tvm.relax.backend.utils import has_leaking_intermediate_variables

from tvm_ipc import arguments
from tvm_ipc.transform.blas.offload import offload
from tvm_ipc.transform.blas.product import STEPS, refusal
from tvm_ipc.transform.byoc.compiled import Compiled
from tvm_ipc.transform.byoc.literals import CODEGEN, is_for
from tvm_ipc.transform.inline_compiler_functions import inline
from tvm_ipc.transform.ir.aliases import ModuleFacts
from tvm_ipc.transform.outline_compiler_functions import outline

COMPILER: Final = "blas"
#: Steps of the longest pattern, casts included.
_LONGEST: Final = 4


def blas_patterns() -> list[relax.transform.FusionPattern]:
    """Return patterns of products for `FuseOpsByPattern`, the longest first."""
    patterns = []
    for steps, permutations in product(range(_LONGEST, -1, -1), ((1, 1), (0, 1), (1, 0), (0, 0))):
        patterns.append(_pattern(steps, *map(bool, permutations)))
    return patterns


def _pattern(steps: int, permuted_a: bool, permuted_b: bool) -> relax.transform.FusionPattern:
    a, b = dpl.wildcard(), dpl.wildcard()
    if permuted_a:
        a = dpl.is_op("relax.permute_dims")(a)
    if permuted_b:
        b = dpl.is_op("relax.permute_dims")(b)
    matmul = dpl.is_op("relax.matmul")(a, b)
    result = matmul
    for _ in range(steps):
        result = _step(result)
    name = f"{COMPILER}.{'t' * permuted_a}matmul{'t' * permuted_b}_{steps}"
    return relax.transform.FusionPattern(name, result, {"matmul": matmul}, _check)


def _step(before: Any) -> Any:
    """Return the pattern of one step after a pattern, in either order where it has two operands."""
    found = dpl.is_op("relax.astype")(before)
    for name in STEPS:
        op = dpl.is_op(name)
        if name in ("relax.add", "relax.multiply"):
            found = found | op(before, dpl.wildcard()) | op(dpl.wildcard(), before)
        else:
            found = found | op(before)
    return found


def _check(context: relax.transform.PatternCheckContext) -> bool:
    """Whether the BLAS can have the product, and nobody else sees what is inside."""
    matmul = context.annotated_expr["matmul"]
    if refusal([*(argument.ty for argument in matmul.args), matmul.ty]):
        return False
    shapes = [
        value.ty.shape
        for value in context.matched_bindings.values()
        if value.op.name != "relax.permute_dims"
    ]
    return all(
        tvm_ffi.structural_equal(shape, matmul.ty.shape) for shape in shapes
    ) and not has_leaking_intermediate_variables(context)


def compile_blas(functions: tvm.IRModule, _options: Mapping[str, Any]) -> Compiled:
    """Compile functions for `RunModuleCodegen`: they call the BLAS, and TVM does the rest."""
    arguments.instance("compile_blas: functions", functions, tvm.IRModule, "an IRModule")
    return Compiled(
        functions={
            str(global_var.name_hint): _compiled(global_var, function)
            for global_var, function in functions.functions_items()
        }
    )


def compile_partitions(mod: tvm.IRModule) -> tvm.IRModule:
    """Compile the functions for the BLAS and inline them, so that their results are planned."""
    entries = {str(global_var.name_hint) for global_var in mod.get_global_vars()}
    mod = outline(mod, is_for(COMPILER))
    partitions = {
        global_var: _compiled(global_var, function).with_attr(CODEGEN, COMPILER)
        for global_var, function in mod.functions_items()
        if is_for(COMPILER)(function)
    }
    if not partitions:
        return mod
    result = mod.clone()
    for global_var, function in partitions.items():
        result[global_var] = function
    return inline(result, list(partitions), entries)


def _compiled(global_var: tvm.ir.GlobalVar, function: relax.Function) -> relax.Function:
    """Return the function with calls of the BLAS, without composites and its attribute."""
    name = str(global_var.name_hint)
    plain = inline(tvm.IRModule({global_var: function}), [global_var], [name])
    return offload(ModuleFacts(plain), name, "partitioned for it")
