# SPDX-License-Identifier: Apache-2.0
"""Create the bindings that passes insert: allocations, casts, and calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm
from tvm import relax, tirx

from tvm_ipc.analysis.ffi_arrays import as_list
from tvm_ipc.tvm_moved_names import GenericConst, StringImm, VDevice

ALLOC = tvm.ir.Op.get("relax.builtin.alloc_tensor")

#: The type of calls without a result.
NOTHING = tvm.ir.TupleType([])


def dtype_of(name: str) -> Any:
    """Return a data type as an argument."""
    return GenericConst(tvm.DataType(name), relax.AnyType())


def do(callee: relax.Expr, arguments: Sequence[relax.Expr]) -> relax.Binding:
    """Return a binding of a call without a result."""
    ty_args = [] if isinstance(callee, tvm.ir.Op) else [NOTHING]
    call = relax.Call(callee, arguments, ty_args=ty_args, ret_ty=NOTHING)
    return relax.VarBinding(relax.Var("_", NOTHING), call)


def with_scope(call: relax.Call, scope: str, device: int) -> relax.Call:
    """Return an allocation with another memory scope."""
    args = as_list(call.args)
    args[3] = StringImm(scope)
    if call.ty.vdevice is not None:
        args[2] = tirx.IntImm("int64", device)
    return replace_call(call, call.op, args)


def replace_call(call: relax.Call, op: relax.Expr, args: list[relax.Expr]) -> relax.Call:
    """Return a call of the same type with another callee and other arguments."""
    return relax.Call(op, args, call.attrs, call.ty_args, call.span, ret_ty=call.ty)


def alloc(shape: relax.Expr, ty: Any, device: int, scope: str) -> relax.Call:
    """Return a call that allocates a tensor."""
    args = [
        shape,
        dtype_of(str(ty.dtype.dtype)),
        tirx.IntImm("int64", device),
        StringImm(scope),
    ]
    ty_args = [ty] if ty.vdevice is not None else []
    return relax.Call(ALLOC, args, ty_args=ty_args, ret_ty=ty)


def emit_alloc(
    name: str, ty: Any, scope: str, devices: list[VDevice], out: list[relax.Binding]
) -> relax.Var:
    """Append an allocation in a memory scope to `out`; return its variable."""
    device, ty = device_of(ty, devices), type_in(ty, scope, devices)
    suffix = scope.removeprefix("global.").split("_", 1)[0].split("-", 1)[0]
    return emit(f"{name}_{suffix}", alloc(ty.shape, ty, device, scope), ty, out)


def match_shape(tensor: relax.Expr, out: list[relax.Binding]) -> relax.Var:
    """Append a cast that names the extents of a tensor whose type has none; return its variable."""
    name = str(tensor.name) if isinstance(tensor, relax.Var) else "const"
    extents = [tirx.Var(f"{name}_d{axis}", "int64") for axis in range(int(tensor.ty.ndim))]
    ty = relax.TensorType(extents, tensor.ty.dtype, tensor.ty.vdevice)
    var = relax.Var(f"{name}_sized", ty)
    out.append(relax.MatchCast(var, tensor, ty))
    return var


def device_of(ty: Any, devices: list[VDevice]) -> int:
    """Return the VM's index of a tensor's device; all scopes of a device share the first one."""
    if ty.vdevice is not None:
        for index, device in enumerate(devices):
            if same_device(device, ty.vdevice):
                return index
    return 0


def same_device(a: VDevice, b: VDevice) -> bool:
    """Return whether two virtual devices are equal except for their memory scopes."""
    return a.vdevice_id == b.vdevice_id and str(a.target) == str(b.target)


def type_in(ty: Any, scope: str, devices: list[VDevice]) -> Any:
    """Return the type of a copy in another memory scope, whose device must not name the old one."""
    if ty.vdevice is None or str(ty.vdevice.memory_scope) in ("", "global", scope):
        return ty
    for device in devices:
        if same_device(device, ty.vdevice) and str(device.memory_scope) == scope:
            return relax.TensorType(ty.shape, ty.dtype, device)
    return relax.TensorType(ty.shape, ty.dtype)


def get(expr: relax.Expr, index: int) -> relax.Expr:
    """Return a field of a tuple."""
    return expr.fields[index] if isinstance(expr, relax.Tuple) else relax.TupleGetItem(expr, index)


def emit(name: str, value: relax.Expr, ty: Any, out: list[relax.Binding]) -> relax.Var:
    """Append a binding of a value to `out`; return its variable."""
    var = relax.Var(name, ty)
    out.append(relax.VarBinding(var, value))
    return var


def emit_call(name: str, args: list[relax.Expr], out: list[relax.Binding]) -> None:
    """Append a call of a packed function to `out`."""
    ty = relax.AnyType()
    call = relax.Call(relax.ExternFunc(name), args, ty_args=[ty], ret_ty=ty)
    out.append(relax.VarBinding(relax.Var("_", ty), call))
