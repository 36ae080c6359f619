# SPDX-License-Identifier: Apache-2.0
"""The one table of what calls do with memory: views, and arguments that are written or kept.

    viewed(R.reshape(x, s))          x: the result is the same memory
    written_arguments(...)           the arguments that a call may write

The facts are those of TVM's operators and of `packed_functions`. The verifier has a table of its
own on purpose, so that a mistake here is not repeated there; `tests/analysis` compares both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Final, TypeAlias

import tvm
from tvm import relax

from tvm_ipc.analysis.ffi_arrays import as_list
from tvm_ipc.analysis.primfunc_effects import PrimFuncs
from tvm_ipc.packed_functions import PROGRAMS, find

#: Operators and packed functions whose result is a view of their first argument or a part of it.
VIEWS: Final = frozenset(
    (
        *(
            tvm.ir.Op.get(name).name  # raises an error if TVM has no such operator
            for name in ("relax.reshape", "relax.memory.view", "relax.memory.ensure_zero_offset")
        ),
        "vm.builtin.reshape",
        *(
            function.name
            for function in PROGRAMS.values()
            if function.result == "Tensor" and function.result_of == "tensor"
        ),
    )
)

#: Operators whose results are computed from their operands. TVM may lower other operators to
#: copies, and then to views: a cast to the same type, or a sum over an axis of one element.
_COMPUTING: Final = frozenset(
    tvm.ir.Op.get(f"relax.{name}").name
    for name in (
        *("matmul", "nn.softmax", "nn.log_softmax", "nn.rms_norm", "nn.layer_norm"),
        *("cos", "exp", "rsqrt", "sigmoid", "sin", "sqrt", "tanh"),
        *("nn.gelu", "nn.gelu_tanh", "nn.silu"),
        *("equal", "greater", "greater_equal", "less", "less_equal", "not_equal"),
    )
)
#: Operators that return an operand if the other one is a scalar constant, such as 0 or 1.
_BINARY: Final = frozenset(
    tvm.ir.Op.get(f"relax.{name}").name for name in ("add", "divide", "multiply", "subtract")
)
_WHERE: Final = tvm.ir.Op.get("relax.where").name
_ASTYPE: Final = tvm.ir.Op.get("relax.astype").name

#: Operators that call something unknown, which may write and keep their arguments.
CALLERS: Final = frozenset(
    (
        "relax.call_builtin_with_ctx",
        "relax.call_py_func",
        "relax.invoke_closure",
        "relax.invoke_pure_closure",
    )
)
#: Operators that may keep their arguments.
KEEPERS: Final = CALLERS | {"relax.make_closure"}
#: Operators that allocate their results, which what they call writes.
ALLOCATING: Final = ("relax.call_tir", "relax.call_tir_inplace", "relax.call_dps_packed")
#: Operators that call a packed function, which is their first argument, and return its result.
PACKED_CALLERS: Final = frozenset(("relax.call_pure_packed", "relax.call_inplace_packed"))
#: Operators that may write their arguments. Calls of anything but an operator may write them too.
WRITERS: Final = CALLERS | {"relax.call_tir_inplace", "relax.call_inplace_packed"}

#: Returns the positions that a packed function with a number of arguments may write; None: all.
PackedWrites: TypeAlias = "Callable[[relax.ExternFunc, int], Collection[int] | None]"


def name_of_callee(callee: relax.Expr) -> str:
    """Return the name of an operator or a packed function, "" for any other callee."""
    kind = type(callee)
    if kind is tvm.ir.Op:
        return str(callee.name)
    return str(callee.global_symbol) if kind is relax.ExternFunc else ""


def operator_of(value: Any) -> str:
    """Return the name of the operator that an expression calls, "" if it calls none."""
    if type(value) is not relax.Call or type(value.op) is not tvm.ir.Op:
        return ""
    return str(value.op.name)


def viewed(value: Any) -> relax.Expr | None:
    """Return the argument that the result of a call is a view of, None if it is a view of none."""
    if type(value) is not relax.Call:
        return None
    name = name_of_callee(value.op)
    if name in VIEWS:
        return value.args[0]
    if name in PACKED_CALLERS and name_of_callee(value.args[0]) in VIEWS:
        return value.args[1]
    return None


def computes_result(call: relax.Call) -> bool:
    """Return whether the result of an operator is new memory, whatever TVM lowers the call to."""
    name, arguments = call.op.name, call.args
    if name in _COMPUTING:
        return True
    if name in _BINARY:
        return all(_ndim(operand) >= 1 for operand in arguments)
    if name == _WHERE:  # with a scalar condition, or two equal tensors, it would be a copy
        condition, *branches = map(_ndim, arguments)
        return condition >= 1 and 0 in branches
    return bool(name == _ASTYPE and arguments[0].ty.dtype != call.ty.dtype)


def _ndim(expr: relax.Expr) -> int:
    """Return the number of dimensions of a tensor; -1 if it is unknown, or for other values."""
    return int(expr.ty.ndim) if isinstance(expr.ty, relax.TensorType) else -1


def registered_writes(callee: relax.ExternFunc, count: int) -> Collection[int] | None:
    """Return the positions that a function of `packed_functions` may write, None for others."""
    function = find(str(callee.global_symbol))
    return None if function is None else function.written(count)


def written_arguments(
    call: relax.Call, primfuncs: PrimFuncs, packed_writes: PackedWrites = registered_writes
) -> list[relax.Expr]:
    """Return the arguments that a call may write; all if it calls something unknown.

    Calls that allocate their results also write these.
    """
    callee, arguments = call.op, as_list(call.args)
    if type(callee) is tvm.ir.Op:
        name = callee.name
        if name in ("relax.call_tir", "relax.call_tir_inplace", "relax.vm.call_tir_dyn"):
            callee, arguments = arguments[0], _fields(arguments[1])
        elif name in PACKED_CALLERS:
            callee, *arguments = arguments
        else:
            return arguments if name in CALLERS else []
    if type(callee) is relax.ExternFunc:
        written = packed_writes(callee, len(arguments))
        return arguments if written is None else [arguments[k] for k in written]
    name = str(callee.name_hint) if type(callee) is tvm.ir.GlobalVar else ""
    if name not in primfuncs.functions:
        return arguments
    parameters = primfuncs.parameters(name)
    return [
        argument
        for argument, parameter in zip(arguments, parameters, strict=False)
        if parameter.may_be_written
    ]


def _fields(arguments: relax.Expr) -> list[relax.Expr]:
    """Return the fields of a tuple of arguments; a single argument may stand without a tuple."""
    if isinstance(arguments, relax.Tuple):
        return as_list(arguments.fields)
    if not isinstance(arguments.ty, relax.TupleType):
        return [arguments]
    return [relax.TupleGetItem(arguments, k) for k in range(len(arguments.ty.fields))]
