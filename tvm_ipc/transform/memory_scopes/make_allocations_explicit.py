# SPDX-License-Identifier: Apache-2.0
"""Lowers calls that allocate their outputs to explicit allocations, which have a scope.

Before:
    x = R.call_tir(cls.f, (p,), out_ty=R.Tensor((8,), "float32"))

After:
    alloc = R.builtin.alloc_tensor(R.shape([8]), "float32", 0, "global")
    cls.f(p, alloc)
    x = alloc
"""

from __future__ import annotations

from collections.abc import Sequence

import tvm
from tvm import relax

from tvm_ipc.analysis.binding_builders import alloc, device_of, emit, get
from tvm_ipc.analysis.program_order import Step
from tvm_ipc.analysis.walk_and_rewrite_bindings import Edits, change_functions
from tvm_ipc.transform.memory_scopes.constraint_types import ScopedFunction
from tvm_ipc.transform.memory_scopes.operator_scope_demands import GLOBAL
from tvm_ipc.tvm_moved_names import VDevice


def may_allocate(function: ScopedFunction, step: Step) -> bool:
    """Return whether a step may be replaced by an allocation and a call that writes it."""
    return not function.pure and not step.in_dataflow


def lower_calls(module: tvm.IRModule, sites: Sequence[tuple[ScopedFunction, Step]]) -> tvm.IRModule:
    """Return the module with the calls at `sites` in destination-passing style."""
    devices = list(module.global_infos.get("vdevice", []))
    edits = Edits()
    for _, step in sites:
        edits.replace(step.var, _lower_call(step.binding, step.value, devices))
    return change_functions(module, lambda _, function: edits.apply(function))


def _lower_call(
    binding: relax.Binding, call: relax.Call, devices: list[VDevice]
) -> list[relax.Binding]:
    out: list[relax.Binding] = []
    callee, arguments = call.args[0], call.args[1]
    inputs = [arguments]
    if isinstance(arguments.ty, relax.TupleType):
        inputs = [get(arguments, index) for index in range(len(arguments.ty.fields))]
        inputs = [
            emit("field", field, field.ty, out) if isinstance(field, relax.TupleGetItem) else field
            for field in inputs
        ]
    many = isinstance(call.ty, relax.TupleType)
    types = list(call.ty.fields) if many else [call.ty]
    inplace_indices = [-1] * len(types)
    if str(call.op.name) == "relax.call_tir_inplace":
        inplace_indices = [int(index) for index in call.attrs.inplace_indices]
    outputs: list[relax.Expr] = []
    allocated: list[relax.Expr] = []
    for ty, index in zip(types, inplace_indices, strict=True):
        if index >= 0:
            outputs.append(inputs[index])
            continue
        name = f"alloc{len(outputs)}" if many else "alloc"
        outputs.append(emit(name, alloc(ty.shape, ty, device_of(ty, devices), GLOBAL), ty, out))
        allocated.append(outputs[-1])
    ty = relax.AnyType() if isinstance(callee, relax.ExternFunc) else relax.TupleType([])
    emit("_", relax.Call(callee, [*inputs, *allocated], ret_ty=ty), ty, out)
    result = relax.Tuple(outputs) if many else outputs[0]
    if isinstance(binding, relax.MatchCast):
        out.append(relax.MatchCast(binding.var, result, binding.ty, binding.span))
    else:
        out.append(relax.VarBinding(binding.var, result, binding.span))
    return out
