# SPDX-License-Identifier: Apache-2.0
"""What the tests of memory scopes look at in a module."""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import relax

from tvm_ipc.transform import PlanMemoryScopes, Report, collect_report


def plan(module: tvm.IRModule, **options) -> tvm.IRModule:
    return PlanMemoryScopes(**options)(module)


def reported(module: tvm.IRModule, **options) -> tuple[tvm.IRModule, Report]:
    with collect_report() as report:
        after = plan(module, **options)
    return after, report


def scopes(function: relax.Function) -> dict[str, str]:
    """The scope of each allocation of a function, by the name of its variable."""
    found: dict[str, str] = {}

    def visit(node) -> None:
        if isinstance(node, relax.SeqExpr):
            for block in node.blocks:
                for binding in block.bindings:
                    value = binding.value
                    name = str(getattr(getattr(value, "op", None), "name", ""))
                    if name == "relax.builtin.alloc_tensor":
                        found[str(binding.var.name)] = str(value.args[3].value)

    relax.analysis.post_order_visit(function, visit)
    return found


def copies(function: relax.Function) -> list[tuple[str, str]]:
    """The copies between scopes of a function: names of source and target."""
    found: list[tuple[str, str]] = []

    def visit(node) -> None:
        if (
            isinstance(node, relax.Call)
            and isinstance(node.op, relax.ExternFunc)
            and str(node.op.global_symbol) == "tvm_ipc.copy"
        ):
            source, target = node.args
            found.append((str(getattr(source, "name", "const")), str(target.name)))

    relax.analysis.post_order_visit(function, visit)
    return found


def names_in(function: tvm.tirx.PrimFunc) -> dict[str, str]:
    """The scope of every buffer and pointer of a PrimFunc, by its name."""
    found: dict[str, str] = {}

    def visit(var) -> None:
        if isinstance(var.ty, tvm.tirx.BufferType | tvm.ir.PointerType):
            found[str(var.name)] = str(var.ty.storage_scope)

    tvm_ffi.structural_walk(function, [(tvm.tirx.Var, visit)])
    return found
