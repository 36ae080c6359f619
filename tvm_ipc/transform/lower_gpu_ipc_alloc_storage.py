# SPDX-License-Identifier: Apache-2.0
"""The pass `LowerGPUIPCAllocStorage`, which lowers allocations in `ipc_memory` to runtime calls."""

from __future__ import annotations

from functools import partial
from typing import Any

import tvm
from tvm import relax

from tvm_ipc.analysis.binding_builders import dtype_of
from tvm_ipc.analysis.ffi_arrays import as_list
from tvm_ipc.analysis.walk_and_rewrite_bindings import change_functions, rewrite, typed
from tvm_ipc.errors import TransformError
from tvm_ipc.packed_functions import IPC_MEMORY
from tvm_ipc.packed_functions.program_function_declarations import ALLOC_STORAGE
from tvm_ipc.transform.gc_paused import gc_paused
from tvm_ipc.transform.lower_offset_alloc_tensor import lower_packed
from tvm_ipc.transform.module_pass import ModulePass, module_pass
from tvm_ipc.tvm_moved_names import StringImm

_ALLOC_STORAGE = relax.ExternFunc(ALLOC_STORAGE.name)


@module_pass
class LowerGPUIPCAllocStorage(ModulePass):
    """Lower storages in `ipc_memory` with their exact sizes, and tensors at offsets of storages.

    Before:

        storage = R.memory.alloc_storage(R.shape([4096]), 0, "ipc_memory", "float32")  # 4096 bytes
        x = R.builtin.alloc_tensor(R.shape([n, 8]), "float16", 0, "ipc_memory")

    After:

        storage = R.call_packed("runtime.disco.cuda_ipc.alloc_storage", R.shape([4096]), "uint8")
        gv = R.call_packed("runtime.disco.cuda_ipc.alloc_storage", R.shape([n, 8]), "float16")
        x = R.memory.alloc_tensor(gv, 0, R.shape([n, 8]), "float16", 0)

    The size of a storage is in bytes, whatever the type of its tensors. TVM's pass of this name
    passes the type on, so that its storages are two to eight times too large. Tensors at an offset
    of a storage in any scope are lowered as by `LowerPackedAllocTensor`, so that a pipeline with
    the passes of TVM's names needs no other pass.

    Run this pass after the memory plan (`StaticPlanBlockMemory`), and before `LowerAllocTensor` and
    `LowerRuntimeBuiltin`, which do not support the scope. Allocations that these have already
    lowered are an error.

    Raises
    ------
    TransformError
        An allocation in `ipc_memory` is of a form that cannot be lowered. The input module is
        unchanged.

    Examples
    --------
    >>> import tvm
    >>> from tvm_ipc.transform import LowerGPUIPCAllocStorage
    >>> mod = tvm.script.from_source('''
    ... @I.ir_module
    ... class Model:
    ...     @R.function(pure=False)
    ...     def main():
    ...         x = R.builtin.alloc_tensor(R.shape([4]), R.dtype("float32"), 0, "ipc_memory")
    ...         return x
    ... ''')
    >>> "runtime.disco.cuda_ipc.alloc_storage" in LowerGPUIPCAllocStorage()(mod).script()
    True
    """

    @gc_paused()
    def apply(self, mod: tvm.IRModule) -> tvm.IRModule:
        """Return the lowered module."""
        return change_functions(
            mod, lambda name, function: rewrite(function, partial(_lower, name))
        )


_STORAGE = tvm.ir.Op.get("relax.memory.alloc_storage")
_TENSOR = tvm.ir.Op.get("relax.builtin.alloc_tensor")
_TENSOR_OF_STORAGE = tvm.ir.Op.get("relax.memory.alloc_tensor")


def _lower(function: str, binding: relax.Binding, call: relax.Expr) -> list[relax.Binding] | None:
    if type(call) is not relax.Call:
        return None
    op = call.op
    # Most calls are of kernels or allocate a tensor in a storage. Checking arguments costs time.
    if type(op) is tvm.ir.GlobalVar:
        return None
    if op.same_as(_TENSOR_OF_STORAGE):
        return lower_packed(binding, call)
    if not any(map(_is_ipc_memory, as_list(call.args))):
        return None
    if op.same_as(_STORAGE):
        size, _device, _scope, _dtype = call.args
        return [relax.VarBinding(binding.var, _alloc(size, dtype_of("uint8"), call.ty))]
    if not op.same_as(_TENSOR):
        raise TransformError(
            f"LowerGPUIPCAllocStorage: function {function!r} has an allocation in "
            f"{IPC_MEMORY!r} that is neither a relax.memory.alloc_storage nor a "
            f"relax.builtin.alloc_tensor: {call}; run this pass before LowerAllocTensor and "
            "LowerRuntimeBuiltin"
        )
    shape, dtype, device, _scope = call.args
    storage = relax.Var("storage", relax.AnyType())
    arguments = [storage, device, shape, dtype, relax.prim_value(0)]
    tensor = relax.Call(_TENSOR_OF_STORAGE, arguments, ty_args=call.ty_args)
    return [
        relax.VarBinding(storage, _alloc(shape, dtype, relax.AnyType())),
        relax.VarBinding(binding.var, typed(tensor, binding.var.ty), binding.span),
    ]


def _is_ipc_memory(argument: relax.Expr) -> bool:
    return type(argument) is StringImm and argument.value == IPC_MEMORY


def _alloc(shape: relax.Expr, dtype: relax.Expr, ty: Any) -> relax.Call:
    """Return a call that allocates a storage in `ipc_memory`."""
    call = relax.Call(_ALLOC_STORAGE, [shape, dtype], ty_args=[ty])
    return typed(call, ty)
