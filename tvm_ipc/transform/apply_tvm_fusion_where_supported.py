# SPDX-License-Identifier: Apache-2.0
"""The pass `FuseSupported`, which applies TVM's fusion passes where they are correct."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, tirx

from tvm_ipc import arguments
from tvm_ipc.analysis.ffi_arrays import as_list
from tvm_ipc.analysis.rewrite_cyclic_match_casts import without_cycles
from tvm_ipc.analysis.walk_and_rewrite_bindings import (
    change_functions,
    relax_functions,
    rewrite,
    walk,
    with_value,
)
from tvm_ipc.transform.module_pass import ModulePass, module_pass, option
from tvm_ipc.transform.report import Decision, note
from tvm_ipc.tvm_moved_names import BitwiseAnd, BitwiseNot, BitwiseOr, BitwiseXor, LShift, RShift

_NAME = "FuseSupported"
_UNSUPPORTED = (
    *(tvm.ir.Call, tirx.Cast, LShift, RShift),
    *(BitwiseAnd, BitwiseOr, BitwiseXor, BitwiseNot),
)


def _passes(name: str, value: object) -> list[tvm.transform.Pass]:
    """Return a list of passes, or raise an error that names the argument."""
    wanted = "a sequence of passes"
    passes = list(arguments.instance(name, value, Iterable, wanted))
    if not all(isinstance(item, tvm.transform.Pass) for item in passes):
        raise arguments.wrong_type(name, wanted, value)
    return passes


@module_pass
class FuseSupported(ModulePass):
    """Apply fusion passes to the functions that they support; the report lists the others.

        FuseSupported([FoldConstant(), FuseOps(), FuseTIR()])

    TVM's passes fail on functions in which the shape of a tensor contains an `if_then_else`, a
    shift, a bitwise operator or a cast. Slices of dynamic length have such shapes. These functions
    are skipped, as in a pipeline without fusion.

    In other functions, casts that define a symbolic extent by itself are rewritten first, because
    they would make `FuseTIR` overflow the stack (see
    `tvm_ipc.analysis.rewrite_cyclic_match_casts`).

    Fields of tuple literals are replaced before the passes run, because TVM's FuseOps moves the
    field into a fused function and leaves the tuple outside. `R.index_tensor` with one index tensor
    is legalized to such a field.

    Before:

        y = R.call_tir(cls.add, (x, x), ...)
        z = (y,)[0]

    After:

        y = R.call_tir(cls.add, (x, x), ...)
        z = y

    Parameters
    ----------
    passes : the passes of fusion, and other passes that rebuild types.

    Examples
    --------
    >>> import tvm
    >>> from tvm.relax.transform import AnnotateTIROpPattern, FuseOps, FuseTIR
    >>> from tvm_ipc.transform import FuseSupported, LegalizeOps
    >>> mod = tvm.script.from_source('''
    ... @I.ir_module
    ... class Model:
    ...     @R.function
    ...     def main(x: R.Tensor((4,), "float32")):
    ...         with R.dataflow():
    ...             y = R.exp(x)
    ...             z = R.sin(y)
    ...             R.output(z)
    ...         return z
    ... ''')
    >>> fuse = FuseSupported([AnnotateTIROpPattern(), FuseOps(), FuseTIR()])
    >>> fused = fuse(LegalizeOps()(mod))
    >>> fused.script().count("R.call_tir")
    1
    """

    passes: Sequence[tvm.transform.Pass] = option(_passes)

    def apply(self, mod: tvm.IRModule) -> tvm.IRModule:
        """Return the module after the passes, with unsupported functions unchanged."""
        mod = change_functions(mod, lambda _, function: rewrite(function, _forward_tuple_field))
        supported, skipped = mod.clone(), {}
        for global_var, function in relax_functions(mod):
            extent = _unsupported_extent(function)
            if extent is None:
                acyclic = without_cycles(function)
                if acyclic is not function:
                    supported.update_func(global_var, acyclic)
            else:
                name = global_var.name_hint
                skipped[name] = function
                supported.update_func(global_var, relax.ExternFunc(name, function.ty))
                reason = f"TVM's fusion does not support the shape {extent}"
                note(Decision(_NAME, name, "fusion", "skipped", reason))
        result = tvm.transform.Sequential(self.passes)(supported)
        if not skipped:
            return result
        present = {global_var.name_hint for global_var in result.functions}
        for global_var, function in mod.functions_items():
            name = global_var.name_hint
            if name in skipped or (isinstance(function, tirx.PrimFunc) and name not in present):
                target = result.get_global_var(name) if name in present else global_var
                result.update_func(target, function)
        return result


def _forward_tuple_field(binding: relax.Binding, value: relax.Expr) -> list[relax.Binding] | None:
    """Return a binding of the field itself in place of a field of a tuple literal."""
    if type(value) is not relax.TupleGetItem or type(value.tuple_value) is not relax.Tuple:
        return None
    return [with_value(binding, value.tuple_value.fields[int(value.index)])]


def _unsupported_extent(function: relax.Function) -> Any:
    """Return an extent that TVM's fusion does not support, None if there is none."""
    if not relax.analysis.defined_symbolic_vars(function):
        return None
    seen: set[int] = set()  # addresses of types and shapes, most of which occur many times
    for ty in _types(function):
        for extent in _extents(ty, seen):
            if type(extent) is not tirx.IntImm and type(extent) is not tvm.ir.Var:
                unsupported: list[Any] = []
                tvm_ffi.structural_walk(extent, [(_UNSUPPORTED, unsupported.append)])
                if unsupported:
                    return extent
    return None


def _types(function: relax.Function) -> Iterator[Any]:
    """Yield the types of all variables, also of those in branches and local functions."""
    yield from (param.ty for param in function.params)
    for binding, value in walk(function):
        if binding is not None:
            yield binding.var.ty
        if isinstance(value, relax.Function):
            yield from (param.ty for param in value.params)


def _extents(ty: Any, seen: set[int]) -> Iterator[Any]:
    """Yield the extents of a type, except for types and shapes that were seen before."""
    if ty.__chandle__() in seen:
        return
    seen.add(ty.__chandle__())
    kind = type(ty)
    if kind is relax.TensorType:
        shape = ty.shape
        if type(shape) is relax.ShapeExpr and shape.__chandle__() not in seen:
            seen.add(shape.__chandle__())
            yield from as_list(shape.values)
    elif kind is relax.TupleType:
        for field in as_list(ty.fields):
            yield from _extents(field, seen)
    elif kind is relax.ShapeType:
        yield from ty.values or ()
