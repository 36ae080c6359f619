# SPDX-License-Identifier: Apache-2.0
"""Puts calls of the BLAS in the places of products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import relax

from tvm_ipc.contract import pack_digits
from tvm_ipc.contract.programs import MATMUL
from tvm_ipc.transform.blas.product import Product, find_products
from tvm_ipc.transform.ir.aliases import ModuleFacts
from tvm_ipc.transform.ir.rewrite import rewrite
from tvm_ipc.transform.report import Decision, collecting, note


def offload(
    module: ModuleFacts, name: str, why: str, too_small: Callable[[Product], str] = lambda _: ""
) -> relax.Function:
    """Return a function of the module in which the BLAS does what it can.

    Parameters
    ----------
    why : what the report says of products that the BLAS gets.
    too_small : says of a product why it is not worth a call, or nothing.
    """
    chosen = []
    for product in find_products(module, name):
        reason = product.refusal or too_small(product)
        if collecting():
            verdict = "left to TVM" if reason else "given to the BLAS"
            note(Decision("OffloadBLAS", name, product.subject, verdict, reason or why))
        if not reason:
            chosen.append(product)
    return _replace(module.functions[name], chosen)


def _replace(function: relax.Function, products: list[Product]) -> relax.Function:
    """Return the function with calls in place of the products."""
    if not products:
        return function
    builder = relax.BlockBuilder()
    calls: dict[Any, list[relax.Binding]] = {
        variable: [] for variable in _unused_permutations(products)
    }
    for product in products:
        *inner, last = product.bindings
        calls.update({binding.var: [] for binding in inner})
        calls[last.var] = [relax.VarBinding(last.var, _call(product, builder), last.span)]
    return rewrite(function, lambda binding, _: calls.get(binding.var))


def _call(product: Product, builder: relax.BlockBuilder) -> relax.Expr:
    """Return the call that gives the product's result."""
    numbers = [product.a_axes, product.b_axes, pack_digits(product.steps)]
    arguments = [*map(relax.prim_value, numbers), product.a, product.b, *product.operands]
    result = product.bindings[-1].var.ty
    return builder.normalize(relax.call_dps_packed(MATMUL.name, relax.Tuple(arguments), result))


def _unused_permutations(products: list[Product]) -> set[Any]:
    """Return the permuted variables that nothing reads once the products stand as calls."""
    left: dict[Any, int] = {}
    for product in products:
        for variable, uses in product.permutations:
            left[variable] = left.get(variable, uses) - 1
    return {variable for variable, uses in left.items() if uses == 0}
