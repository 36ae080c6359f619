# SPDX-License-Identifier: Apache-2.0
"""Keeps functions from TVM's fusion whose shapes it refuses or gets wrong.

    KeepFromFusion([FoldConstant(), FuseOps(), FuseTIR()])

does what these passes do, but for functions in which the shape of a tensor has an `if_then_else`, a
shift, a bitwise operator or a cast: the passes do not know them there. Slices of a dynamic length
have the first. Such a function stays as it is, as in TVM's pipeline without fusion.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, tirx

from tvm_ipc import arguments
from tvm_ipc.transform.ir.rewrite import walk
from tvm_ipc.transform.module_pass import module_pass, option
from tvm_ipc.transform.report import Decision, note

_NAME = "KeepFromFusion"
_UNKNOWN = (
    *(tvm.ir.Call, tirx.Cast, tirx.LShift, tirx.RShift),
    *(tirx.BitwiseAnd, tirx.BitwiseOr, tirx.BitwiseXor, tirx.BitwiseNot),
)


def _passes(name: str, given: object) -> list[tvm.transform.Pass]:
    wanted = "a sequence of passes"
    found = list(arguments.instance(name, given, Iterable, wanted))
    if not all(isinstance(one, tvm.transform.Pass) for one in found):
        raise arguments.wrong_type(name, wanted, given)
    return found


@module_pass
class KeepFromFusion:
    """Apply passes to functions whose shapes they know; the report says which others are left.

    Parameters
    ----------
    passes : those of fusion, and others that rebuild types.
    """

    passes: Sequence[tvm.transform.Pass] = option(_passes)

    def apply(self, mod: tvm.IRModule) -> tvm.IRModule:
        """Return the module that the passes give, with what they do not know as it was."""
        rest, kept = mod.clone(), {}
        for global_var, function in mod.functions_items():
            extent = _unknown_extent(function) if isinstance(function, relax.Function) else None
            if extent is not None:
                name = global_var.name_hint
                kept[name] = function
                rest.update_func(global_var, relax.ExternFunc(name, function.ty))
                reason = f"TVM's fusion does not know the shape {extent}"
                note(Decision(_NAME, name, "fusion", "left out", reason))
        result = tvm.transform.Sequential(self.passes)(rest)
        if not kept:
            return result
        there = {global_var.name_hint for global_var in result.functions}
        for global_var, function in mod.functions_items():
            name = global_var.name_hint
            if name in kept or (isinstance(function, tirx.PrimFunc) and name not in there):
                place = result.get_global_var(name) if name in there else global_var
                result.update_func(place, function)
        return result


def _unknown_extent(function: relax.Function) -> Any:
    if not relax.analysis.defined_symbolic_vars(function):
        return None
    seen: set[int] = set()  # types and shapes, of which most are those of a parameter or an operand
    for ty in _types(function):
        for extent in _extents(ty, seen):
            if type(extent) is not tirx.IntImm and type(extent) is not tvm.ir.Var:
                found: list[Any] = []
                tvm_ffi.structural_walk(extent, [(_UNKNOWN, found.append)])
                if found:
                    return extent
    return None


def _types(function: relax.Function) -> Iterator[Any]:
    """Yield the types of all variables, those in branches and local functions too."""
    yield from (param.ty for param in function.params)
    for binding, value in walk(function):
        if binding is not None:
            yield binding.var.ty
        if isinstance(value, relax.Function):
            yield from (param.ty for param in value.params)


def _extents(ty: Any, seen: set[int]) -> Iterator[Any]:
    """Yield the extents of a type, but for those of what was seen before."""
    if ty.__chandle__() in seen:
        return
    seen.add(ty.__chandle__())
    kind = type(ty)
    if kind is relax.TensorType:
        shape = ty.shape
        if type(shape) is relax.ShapeExpr and shape.__chandle__() not in seen:
            seen.add(shape.__chandle__())
            yield from shape.values[:]
    elif kind is relax.TupleType:
        for field in ty.fields[:]:
            yield from _extents(field, seen)
    elif kind is relax.ShapeType:
        yield from ty.values or ()
