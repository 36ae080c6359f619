# SPDX-License-Identifier: Apache-2.0
"""Lowers calls that allocate their outputs, so that these are allocations with a scope.

Before:
    x = R.call_tir(cls.f, (p,), out_ty=R.Tensor((8,), "float32"))

After:
    alloc = R.builtin.alloc_tensor(R.shape([8]), "float32", 0, "global")
    cls.f(p, alloc)
    x = alloc
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import tvm
from tvm import relax

from tvm_ipc.transform.ir.build import alloc, device_of, emit, get
from tvm_ipc.transform.ir.program import Step
from tvm_ipc.transform.ir.rewrite import change_functions, rewrite
from tvm_ipc.transform.scopes.demands import GLOBAL
from tvm_ipc.transform.scopes.facts import FunctionFacts

ALLOCATING: Final = ("relax.call_tir", "relax.call_tir_inplace", "relax.call_dps_packed")


def in_dataflow(step: Step) -> bool:
    """Whether a step is in a dataflow block."""
    return isinstance(step.region.blocks[step.block], relax.DataflowBlock)


def may_allocate(function: FunctionFacts, step: Step) -> bool:
    """Whether an allocation, and what writes it, may stand in place of a step."""
    return not function.pure and not in_dataflow(step)


def lower_calls(module: tvm.IRModule, places: Sequence[tuple[FunctionFacts, Step]]) -> tvm.IRModule:
    """Return the module with calls of `ALLOCATING` operators in destination-passing style."""
    devices = list(module.global_infos.get("vdevice", []))
    chosen = {hash(step.var) for _, step in places}

    def change(binding: relax.Binding, value: relax.Expr) -> list[relax.Binding] | None:
        return _lowered(binding, value, devices) if hash(binding.var) in chosen else None

    return change_functions(module, lambda _, function: rewrite(function, change))


def _lowered(
    binding: relax.Binding, call: relax.Call, devices: list[relax.VDevice]
) -> list[relax.Binding]:
    out: list[relax.Binding] = []
    callee, packed = call.args[0], call.args[1]
    inputs = [packed]
    if isinstance(packed.ty, relax.TupleType):
        inputs = [get(packed, index) for index in range(len(packed.ty.fields))]
        inputs = [
            emit("field", one, one.ty, out) if isinstance(one, relax.TupleGetItem) else one
            for one in inputs
        ]
    many = isinstance(call.ty, relax.TupleType)
    types = list(call.ty.fields) if many else [call.ty]
    places = [-1] * len(types)
    if str(call.op.name) == "relax.call_tir_inplace":
        places = [int(index) for index in call.attrs.inplace_indices]
    results: list[relax.Expr] = []
    for ty, place in zip(types, places, strict=True):
        if place >= 0:
            results.append(inputs[place])
            continue
        name = f"alloc{len(results)}" if many else "alloc"
        made = alloc(ty.shape, ty, device_of(ty, devices), GLOBAL)
        results.append(emit(name, made, ty, out))
    fresh = [one for one, place in zip(results, places, strict=True) if place < 0]
    ty = relax.AnyType() if isinstance(callee, relax.ExternFunc) else relax.TupleType([])
    emit("_", relax.Call(callee, [*inputs, *fresh], ret_ty=ty), ty, out)
    result = relax.Tuple(results) if many else results[0]
    if isinstance(binding, relax.MatchCast):
        out.append(relax.MatchCast(binding.var, result, binding.ty, binding.span))
    else:
        out.append(relax.VarBinding(binding.var, result, binding.span))
    return out
