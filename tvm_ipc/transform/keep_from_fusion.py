# SPDX-License-Identifier: Apache-2.0
"""Keeps functions from TVM's fusion whose shapes it refuses or gets wrong.

Before:
    with R.dataflow():
        y = R.call_tir(cls.slice, (x,), out_ty=R.Tensor((T.if_then_else(m < 0, m + n, m), 8)))
        z = R.call_tir(cls.relu, (y,), ...)
        R.output(z)

After:
    y = R.call_tir(cls.slice, (x,), out_ty=R.Tensor((T.if_then_else(m < 0, m + n, m), 8)))
    z = R.call_tir(cls.relu, (y,), ...)

`FuseOps` and `FuseTIR` do not know `if_then_else`, shifts, bitwise operators and casts in a shape,
which is where slices of a dynamic length have the first; they leave alone what is in no dataflow
block. Runs before `FuseOps`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, tirx

from tvm_ipc.transform.bindings import variables
from tvm_ipc.transform.report import Decision, note

_NAME = "KeepFromFusion"
_UNKNOWN = (
    *(tvm.ir.Call, tirx.Cast, tirx.LShift, tirx.RShift),
    *(tirx.BitwiseAnd, tirx.BitwiseOr, tirx.BitwiseXor, tirx.BitwiseNot),
)


@tvm.transform.module_pass(opt_level=0, name=_NAME)
class KeepFromFusion:
    """Take functions with such shapes out of dataflow blocks; the report says which and why."""

    def transform_module(
        self, mod: tvm.IRModule, _context: tvm.transform.PassContext
    ) -> tvm.IRModule:
        """Return the module with these functions changed."""
        kept = {}
        for global_var, function in mod.functions_items():
            if isinstance(function, relax.Function):
                extent = _unknown_extent(function)
                if extent is not None:
                    kept[global_var] = function
                    reason = f"TVM's fusion does not know the shape {extent}"
                    note(Decision(_NAME, global_var.name_hint, "fusion", "left out", reason))
        if not kept:
            return mod
        result = mod.clone()
        changed = relax.transform.ToNonDataflow()(tvm.IRModule(kept))
        for global_var in kept:
            result.update_func(global_var, changed[global_var.name_hint])
        return result


def _unknown_extent(function: relax.Function) -> Any:
    if not relax.analysis.defined_symbolic_vars(function):
        return None
    seen: set[int] = set()
    for variable in variables(function):
        ty = variable.ty
        if ty.__chandle__() in seen:
            continue
        seen.add(ty.__chandle__())
        for extent in _extents(ty):
            if not isinstance(extent, (tirx.IntImm, tvm.ir.Var)):
                found: list[Any] = []
                tvm_ffi.structural_walk(extent, [(_UNKNOWN, found.append)])
                if found:
                    return extent
    return None


def _extents(ty: Any) -> Iterator[Any]:
    if isinstance(ty, relax.TupleType):
        for field in ty.fields:
            yield from _extents(field)
    elif isinstance(ty, relax.ShapeType):
        yield from ty.values or ()
    elif isinstance(ty, relax.TensorType) and isinstance(ty.shape, relax.ShapeExpr):
        yield from ty.shape.values
