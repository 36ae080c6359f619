# SPDX-License-Identifier: Apache-2.0
"""BLAS as an external compiler: patterns for TVM's partitioning passes, and the compile function.

    mod = relax.transform.FuseOpsByPattern(blas_patterns(), annotate_codegen=True)(mod)
    mod = OffloadBLAS()(mod)

Functions with `{"Codegen": "blas"}`, from these patterns, from other patterns or written by hand,
are outlined, compiled and inlined by the passes for external compilers. A function may contain
anything that TVM can compile: its matmuls become calls, however small they are, and the rest is
compiled by TVM.
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
from tvm_ipc.analysis.find_aliases import ModuleAliasFacts
from tvm_ipc.analysis.walk_and_rewrite_bindings import change_functions
from tvm_ipc.cpu.blas.find_matmuls_with_epilogues import STEPS, refusal
from tvm_ipc.cpu.blas.matmuls_to_blas_calls import offload
from tvm_ipc.transform.byoc.check_compiler_results import Compiled
from tvm_ipc.transform.byoc.nested_relax_functions import CODEGEN, is_for
from tvm_ipc.transform.inline_compiler_functions import inline
from tvm_ipc.transform.outline_compiler_functions import outline

COMPILER: Final = "blas"
#: The number of steps in the longest pattern, with casts.
_LONGEST: Final = 4


def blas_patterns() -> list[relax.transform.FusionPattern]:
    """Return patterns of matmuls for `FuseOpsByPattern`, the longest first.

    Returns
    -------
    list of tvm.relax.transform.FusionPattern
        Patterns of a matmul and its epilogue, whose names begin with "blas.".

    Examples
    --------
    >>> import tvm
    >>> from tvm.relax.transform import FuseOpsByPattern
    >>> from tvm_ipc.cpu import OffloadBLAS, blas_patterns
    >>> mod = tvm.script.from_source('''
    ... @I.ir_module
    ... class Model:
    ...     @R.function
    ...     def main(x: R.Tensor((8, 8), "float32"), w: R.Tensor((8, 8), "float32")):
    ...         with R.dataflow():
    ...             y = R.nn.relu(R.matmul(x, w))
    ...             R.output(y)
    ...         return y
    ... ''')
    >>> partitioned = FuseOpsByPattern(blas_patterns(), annotate_codegen=True)(mod)
    >>> sorted(var.name_hint for var in partitioned.get_global_vars())
    ['fused_relax_matmul_relax_nn_relu_blas', 'main']
    >>> [var.name_hint for var in OffloadBLAS()(partitioned).get_global_vars()]
    ['main']
    """
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


def _step(operand: Any) -> Any:
    """Return the pattern of a step after `operand`; a binary step matches both orders."""
    pattern = dpl.is_op("relax.astype")(operand)
    for name in STEPS:
        op = dpl.is_op(name)
        if name in ("relax.add", "relax.multiply"):
            pattern = pattern | op(operand, dpl.wildcard()) | op(dpl.wildcard(), operand)
        else:
            pattern = pattern | op(operand)
    return pattern


def _check(context: relax.transform.PatternCheckContext) -> bool:
    """Return whether BLAS has the matmul and no intermediate result has other uses."""
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
    """Compile functions to BLAS calls for `RunModuleCodegen`; TVM compiles the rest of them.

    Parameters
    ----------
    functions : a module with the functions to compile, as `RunModuleCodegen` passes it.

    Returns
    -------
    Compiled
        The functions with BLAS calls, which are left to TVM.

    Examples
    --------
    >>> import tvm
    >>> from tvm.relax.transform import FuseOpsByPattern
    >>> from tvm_ipc.cpu import blas_patterns, compile_blas
    >>> from tvm_ipc.transform import RunModuleCodegen
    >>> mod = tvm.script.from_source('''
    ... @I.ir_module
    ... class Model:
    ...     @R.function
    ...     def main(x: R.Tensor((8, 8), "float32"), w: R.Tensor((8, 8), "float32")):
    ...         with R.dataflow():
    ...             y = R.nn.relu(R.matmul(x, w))
    ...             R.output(y)
    ...         return y
    ... ''')
    >>> partitioned = FuseOpsByPattern(blas_patterns(), annotate_codegen=True)(mod)
    >>> compiled = RunModuleCodegen("blas", compile_blas)(partitioned)
    >>> "tvm_ipc.blas.matmul" in compiled.script()
    True
    """
    arguments.instance("compile_blas: functions", functions, tvm.IRModule, "an IRModule")
    return Compiled(
        functions={
            str(global_var.name_hint): _compile(global_var, function)
            for global_var, function in functions.functions_items()
        }
    )


def compile_partitions(mod: tvm.IRModule) -> tvm.IRModule:
    """Compile the functions for BLAS and inline them, so that their memory is planned."""
    entries = {str(global_var.name_hint) for global_var in mod.get_global_vars()}
    mod = outline(mod, is_for(COMPILER))
    partitions = [var for var, function in mod.functions_items() if is_for(COMPILER)(function)]
    if not partitions:
        return mod

    def compiled(name: str, function: relax.Function) -> relax.Function:
        if not is_for(COMPILER)(function):
            return function
        return _compile(mod.get_global_var(name), function).with_attr(CODEGEN, COMPILER)

    return inline(change_functions(mod, compiled), partitions, entries)


def _compile(global_var: tvm.ir.GlobalVar, function: relax.Function) -> relax.Function:
    """Return the function with BLAS calls, without composites and without its attribute."""
    name = str(global_var.name_hint)
    plain = inline(tvm.IRModule({global_var: function}), [global_var], [name])
    return offload(ModuleAliasFacts(plain), name, "it was partitioned for BLAS")
