# SPDX-License-Identifier: Apache-2.0
"""What the tests of LowerExternCalls begin with, and how they look at what comes out."""

from __future__ import annotations

import itertools

import numpy as np
import tvm
from tvm import relax

from tests.transform.byoc_modules import apply
from tvm_ipc.analysis.walk_and_rewrite_bindings import bindings_of
from tvm_ipc.transform import (
    MarkCompilerFunctionsAsExtern,
)

ALLOC_TENSOR = tvm.ir.Op.get("relax.builtin.alloc_tensor")
TO_CALLS = tvm.transform.Sequential(
    [
        relax.transform.LegalizeOps(),
        relax.transform.ToNonDataflow(),
        relax.transform.RemovePurityChecking(),
        relax.transform.CallTIRRewrite(),
    ]
)


def declared(module: tvm.IRModule, **attrs: list[object]) -> tvm.IRModule:
    """The module with its functions for `cc` declared; attributes go to all of them."""
    result = module.clone()
    for global_var, function in module.functions_items():
        if isinstance(function, relax.Function) and "Codegen" in function.attrs:
            for name, value in attrs.items():
                function = function.with_attr(f"tvm_ipc.{name}", value)
            result[global_var] = function
    return apply(MarkCompilerFunctionsAsExtern("cc"), result)


def lowered_calls(module: tvm.IRModule, name: str = "main") -> list[str]:
    """The calls of packed functions and the allocations of a function, one text for each."""
    names: dict[relax.Var, str] = {}

    def named(value: object) -> str:
        if not isinstance(value, relax.Var):
            return str(value)
        base = value.name.rstrip("0123456789")
        free = (f"{base}{number or ''}" for number in itertools.count())
        return names.setdefault(value, next(one for one in free if one not in names.values()))

    texts = []
    for binding in bindings_of(module[name].body):
        value = binding.value
        if not isinstance(value, relax.Call):
            continue
        if isinstance(value.op, relax.ExternFunc):
            texts.append(f"{value.op.global_symbol}({', '.join(map(named, value.args))})")
        elif value.op == ALLOC_TENSOR:
            extents = [getattr(one, "name", one) for one in value.args[0].values]
            shape = ", ".join(one if isinstance(one, str) else str(int(one)) for one in extents)
            texts.append(f"{named(binding.var)} = alloc ({shape}) {value.args[3].value}")
    return texts


def run(module: tvm.IRModule, *arguments: np.ndarray):
    vm = relax.VirtualMachine(tvm.compile(module, "llvm"), tvm.cpu())
    return vm["main"](*map(tvm.runtime.tensor, arguments))
