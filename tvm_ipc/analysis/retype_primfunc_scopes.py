# SPDX-License-Identifier: Apache-2.0
"""Change the types of buffers: scopes in PrimFuncs, also of pointers made from them, and shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

from tvm_ipc.tvm_moved_names import TensorLoad

#: Returns the new scope of a variable that refers to memory, or None to keep its scope.
NewScope = Callable[[tirx.Var], "str | None"]


def retype(function: tirx.PrimFunc, new_scope: NewScope) -> tirx.PrimFunc:
    """Return the function with the scopes that `new_scope` returns for its variables."""
    variables: dict[int, tirx.Var] = {}

    def of_variable(var: tirx.Var) -> tirx.Var:
        retyped = variables.get(hash(var))
        if retyped is None:
            retyped = variables[hash(var)] = _with_scope(var, new_scope(var))
        return retyped

    def of_call(call: tvm.ir.Call) -> tvm.ir.Call:
        """Return a call whose pointer has the scope of the memory that it is made from."""
        if not isinstance(call.ty, tvm.ir.PointerType) or not call.args:
            return call
        source = call.args[0]
        if isinstance(source, TensorLoad):
            source = source.source
        scope = _scope(source)
        if scope is None or scope == str(call.ty.storage_scope):
            return call
        ty = tvm.ir.PointerType(call.ty.element_type, scope)
        return tvm.ir.Call(call.op, list(call.args), call.attrs, list(call.ty_args), ret_ty=ty)

    callbacks = [(tirx.Var, of_variable), (tvm.ir.Call, of_call)]
    params = [of_variable(param) for param in function.params]
    body = tvm_ffi.structural_map(function.body, callbacks)
    return tirx.PrimFunc(params, body, function.ret_type, function.attrs, function.span)


def _with_scope(var: tirx.Var, scope: str | None) -> tirx.Var:
    if scope is None:
        return var
    ty = var.ty
    if isinstance(ty, tvm.ir.PointerType):
        return tirx.Var(var.name, tvm.ir.PointerType(ty.element_type, scope), var.span)
    return tirx.Var(var.name, retyped_buffer(ty, scope=scope), var.span)


def retyped_buffer(
    ty: tirx.BufferType, *, scope: str | None = None, shape: Sequence[Any] | None = None
) -> tirx.BufferType:
    """Return the type of the same buffer in another scope, or with another shape."""
    return tirx.BufferType(
        ty.dtype,
        ty.storage_scope if scope is None else scope,
        ty.shape if shape is None else list(shape),
        ty.strides,
        ty.elem_offset,
        ty.data_alignment,
        ty.offset_factor,
        ty.layout,
        ty.allocated_addr,
        ty.span,
    )


def _scope(value: Any) -> str | None:
    """Return the memory scope of a buffer or pointer, None for any other value."""
    if isinstance(value, tirx.Var) and isinstance(value.ty, tirx.BufferType | tvm.ir.PointerType):
        return str(value.ty.storage_scope)
    if isinstance(value, tvm.ir.Call) and isinstance(value.ty, tvm.ir.PointerType):
        return str(value.ty.storage_scope)
    return None
