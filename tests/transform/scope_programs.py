# SPDX-License-Identifier: Apache-2.0
"""What the tests of memory scopes look at in a module."""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import relax

from tvm_ipc.analysis.views_and_writes_of_calls import name_of_callee, operator_of
from tvm_ipc.analysis.walk_and_rewrite_bindings import calls, walk
from tvm_ipc.transform import PlanMemoryScopes, Report, collect_report


def plan(module: tvm.IRModule, **options) -> tvm.IRModule:
    return PlanMemoryScopes(**options)(module)


def reported(module: tvm.IRModule, **options) -> tuple[tvm.IRModule, Report]:
    with collect_report() as report:
        after = plan(module, **options)
    return after, report


def scopes(function: relax.Function) -> dict[str, str]:
    """The scope of each allocation of a function, by the name of its variable."""
    return {
        str(binding.var.name): str(value.args[3].value)
        for binding, value in walk(function)
        if operator_of(value) == "relax.builtin.alloc_tensor"
    }


def copies(function: relax.Function) -> list[tuple[str, str]]:
    """The copies between scopes of a function: names of source and target."""
    found = [call for call in calls(function) if name_of_callee(call.op) == "tvm_ipc.copy"]
    return [(str(getattr(x, "name", "const")), str(y.name)) for x, y in (c.args for c in found)]


def names_in(function: tvm.tirx.PrimFunc) -> dict[str, str]:
    """The scope of every buffer and pointer of a PrimFunc, by its name."""
    found: dict[str, str] = {}

    def visit(var) -> None:
        if isinstance(var.ty, tvm.tirx.BufferType | tvm.ir.PointerType):
            found[str(var.name)] = str(var.ty.storage_scope)

    tvm_ffi.structural_walk(function, [(tvm.tirx.Var, visit)])
    return found
