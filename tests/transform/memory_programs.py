# SPDX-License-Identifier: Apache-2.0
"""What the tests of the memory plan share: the passes around it, and how plans are compared."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import tvm
import tvm_ffi
from tvm import relax
from tvm.relax import transform

from tests.passes_of_tvm import ALLOCATE, LOWER
from tvm_ipc.analysis.binding_builders import dtype_of
from tvm_ipc.analysis.collective_calls import match_collective
from tvm_ipc.analysis.views_and_writes_of_calls import operator_of
from tvm_ipc.analysis.walk_and_rewrite_bindings import calls, rewrite, typed
from tvm_ipc.packed_functions import CollectiveFlag
from tvm_ipc.transform import LowerGPUIPCAllocStorage, LowerPackedAllocTensor

_ALLOC_STORAGE = tvm.ir.Op.get("relax.memory.alloc_storage")

#: Up to where the memory is planned.
BEFORE = [transform.LegalizeOps(), transform.RewriteDataflowReshape(), *ALLOCATE]

#: From the planned module to what the virtual machine runs.
AFTER = [LowerPackedAllocTensor(), LowerGPUIPCAllocStorage(), *LOWER]


def compiled(module: tvm.IRModule, *passes: tvm.transform.Pass) -> Any:
    """Compile a module whose kernels exist, with passes that plan its memory."""
    pipeline = tvm.transform.Sequential([*passes, *AFTER])
    return tvm.compile(module, target="llvm", relax_pipeline=pipeline)


def prepared(module: tvm.IRModule, *passes: tvm.transform.Pass) -> tvm.IRModule:
    """Return the module in destination-passing form, then with more passes applied."""
    return tvm.transform.Sequential([*BEFORE, *passes])(module)


def run(module: tvm.IRModule, plan: tvm.transform.Pass, *arguments: Any) -> Any:
    """Return what `main` gives on the virtual machine, memory planned by `plan`."""
    machine = relax.VirtualMachine(compiled(module, plan), tvm.cpu())
    result = machine["main"](*map(tvm.runtime.tensor, arguments))
    return result.numpy() if hasattr(result, "numpy") else [part.numpy() for part in result]


def storages(module: tvm.IRModule) -> dict[str, list[int]]:
    """Return the sizes of the storages of each scope, and of tensors with their own.

    A symbolic size counts as if its variables were 1.
    """
    sizes: dict[str, list[int]] = defaultdict(list)
    functions = [f for f in module.functions.values() if isinstance(f, relax.Function)]
    for call in (call for function in functions for call in calls(function)):
        if operator_of(call) == "relax.memory.alloc_storage":
            sizes[str(call.args[2].value)].append(_value(call.args[0].values[0]))
        elif operator_of(call) == "relax.builtin.alloc_tensor":
            size = call.args[1].value.bits // 8
            for extent in call.args[0].values:
                size *= _value(extent)
            sizes[str(call.args[3].value)].append(size)
    return dict(sizes)


def left_out(module: tvm.IRModule, name: str = "main") -> list[bool]:
    """Return for each all-reduce of a function whether it does without its exit barrier."""
    collectives = [match_collective(call) for call in calls(module[name])]
    flags = [one.flags for one in collectives if one is not None and one.flags is not None]
    return [CollectiveFlag.NO_EXIT_BARRIER in flag for flag in flags]


def planned(module: tvm.IRModule) -> int:
    """Return the bytes of all allocations, a variable counted as 1."""
    return sum(sum(sizes) for sizes in storages(module).values())


def _value(expr: Any) -> int:
    analyzer = tvm.sym.Analyzer()
    one = tvm.tirx.IntImm("int64", 1)
    tvm_ffi.structural_walk(
        expr, (tvm.ir.Var, lambda var: analyzer.bind(var, one, allow_override=True))
    )
    return int(analyzer.simplify(expr))


def bytes_storages(module: tvm.IRModule) -> tvm.IRModule:
    """Return the module with every storage of type uint8, which says nothing of its size."""

    def change(binding: relax.Binding, call: relax.Expr) -> list[relax.Binding] | None:
        if not isinstance(call, relax.Call) or not call.op.same_as(_ALLOC_STORAGE):
            return None
        size, device, scope, _ = call.args
        size = relax.ShapeExpr([tvm.sym.Analyzer().canonical_simplify(size.values[0])])
        same = relax.Call(_ALLOC_STORAGE, [size, device, scope, dtype_of("uint8")])
        return [relax.VarBinding(binding.var, typed(same, call.ty))]

    result = module.clone()
    for global_var, function in module.functions_items():
        if isinstance(function, relax.Function):
            result.update_func(global_var, rewrite(function, change))
    return result
