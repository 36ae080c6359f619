# SPDX-License-Identifier: Apache-2.0
"""Replacement of matmuls by BLAS calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import relax

from tvm_ipc.analysis.find_aliases import ModuleAliasFacts
from tvm_ipc.analysis.walk_and_rewrite_bindings import rewrite
from tvm_ipc.cpu.blas.find_matmuls_with_epilogues import Matmul, find_matmuls
from tvm_ipc.packed_functions import pack_digits
from tvm_ipc.packed_functions.program_function_declarations import MATMUL
from tvm_ipc.transform.report import Decision, collecting, note


def offload(
    module: ModuleAliasFacts,
    name: str,
    accepted_reason: str,
    too_small: Callable[[Matmul], str] = lambda _: "",
) -> relax.Function:
    """Return a function of the module with its matmuls offloaded to BLAS where possible.

    Parameters
    ----------
    module : the alias facts of the module.
    name : the name of the function.
    accepted_reason : the reason in the report for matmuls that are offloaded.
    too_small : returns why a matmul is not worth a call, "" if it is.
    """
    offloaded = []
    for matmul in find_matmuls(module, name):
        reason = matmul.refusal or too_small(matmul)
        if collecting():
            verdict = "left to TVM" if reason else "offloaded to BLAS"
            note(Decision("OffloadBLAS", name, matmul.subject, verdict, reason or accepted_reason))
        if not reason:
            offloaded.append(matmul)
    return _replace(module.functions[name], offloaded)


def _replace(function: relax.Function, matmuls: list[Matmul]) -> relax.Function:
    """Return the function with calls in place of the matmuls."""
    if not matmuls:
        return function
    builder = relax.BlockBuilder()
    calls: dict[Any, list[relax.Binding]] = {
        variable: [] for variable in unused_permutations(matmuls)
    }
    for matmul in matmuls:
        *inner, last = matmul.bindings
        calls.update({binding.var: [] for binding in inner})
        calls[last.var] = [relax.VarBinding(last.var, call_of(matmul, builder), last.span)]
    return rewrite(function, lambda binding, _: calls.get(binding.var))


def call_of(
    matmul: Matmul, builder: relax.BlockBuilder, *, parts: int = 0, ty: Any = None
) -> relax.Expr:
    """Return the BLAS call of a matmul.

    Parameters
    ----------
    matmul : the matmul.
    builder : infers the type of the call.
    parts : the parts of the inner dimension whose sums are added as a tree; 0 for any order.
    ty : the type of the result; None for that of the matmul and its epilogue.
    """
    numbers = [matmul.a_axes, matmul.b_axes, pack_digits(matmul.steps), parts]
    arguments = [*map(relax.prim_value, numbers), matmul.a, matmul.b, *matmul.operands]
    result = matmul.bindings[-1].var.ty if ty is None else ty
    return builder.normalize(relax.call_dps_packed(MATMUL.name, relax.Tuple(arguments), result))


def unused_permutations(matmuls: list[Matmul]) -> set[Any]:
    """Return the permuted variables without uses after the matmuls are replaced."""
    remaining: dict[Any, int] = {}
    for matmul in matmuls:
        for variable, uses in matmul.permutations:
            remaining[variable] = remaining.get(variable, uses) - 1
    return {variable for variable, uses in remaining.items() if uses == 0}
