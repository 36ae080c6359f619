# SPDX-License-Identifier: Apache-2.0
"""The pass `LowerPackedAllocTensor`, which lowers tensors at an offset of a storage."""

from __future__ import annotations

import tvm
from tvm import relax, tirx

from tvm_ipc.analysis.walk_and_rewrite_bindings import change_functions, rewrite, with_value
from tvm_ipc.packed_functions.program_function_declarations import ALLOC_TENSOR
from tvm_ipc.transform.module_pass import ModulePass, module_pass

_ALLOC_TENSOR = tvm.ir.Op.get("relax.memory.alloc_tensor")
_PACKED = relax.ExternFunc(ALLOC_TENSOR.name)


@module_pass
class LowerPackedAllocTensor(ModulePass):
    """Lower tensors at an offset of a storage to calls of the runtime.

    Before:

        x = R.memory.alloc_tensor(storage, 256, R.shape([n, 8]), "float16", 0)
        y = R.memory.alloc_tensor(storage, 0, R.shape([8]), "float32", 0)

    After:

        x = R.call_packed("tvm_ipc.alloc_tensor", storage, 256, R.shape([n, 8]), "float16")
        y = R.memory.alloc_tensor(storage, 0, R.shape([8]), "float32", 0)

    TVM's own runtime function sets the `byte_offset` of the tensor, which compiled kernels reject.
    Ours moves the data pointer. Tensors at offset 0 are skipped, because TVM's function suffices.

    Run this pass after the memory plan (`StaticPlanBlockMemory`) and after `RewriteCUDAGraph`,
    which recognizes only the operator, and before `LowerRuntimeBuiltin`. Pipelines with
    `LowerGPUIPCAllocStorage` do not need it.

    Examples
    --------
    >>> import tvm
    >>> from tvm_ipc.transform import LowerPackedAllocTensor
    >>> mod = tvm.script.from_source('''
    ... @I.ir_module
    ... class Model:
    ...     @R.function(pure=False)
    ...     def main():
    ...         storage = R.memory.alloc_storage(R.shape([512]), 0, "global", "uint8")
    ...         x = R.memory.alloc_tensor(storage, 256, R.shape([64]), "float32")
    ...         return x
    ... ''')
    >>> "tvm_ipc.alloc_tensor" in LowerPackedAllocTensor()(mod).script()
    True
    """

    def apply(self, mod: tvm.IRModule) -> tvm.IRModule:
        """Return the lowered module."""
        return change_functions(mod, lambda _, function: rewrite(function, lower_packed))


def lower_packed(binding: relax.Binding, call: relax.Expr) -> list[relax.Binding] | None:
    """Return the bindings that replace a binding of a tensor at an offset, None for any other."""
    if type(call) is not relax.Call or not call.op.same_as(_ALLOC_TENSOR):
        return None
    arguments = call.args[:4]
    offset = arguments[1]
    if type(offset) is tirx.IntImm and int(offset.value) == 0:
        return None
    var = binding.var
    packed = relax.Call(_PACKED, arguments, ty_args=[var.ty], ret_ty=var.ty)
    return [with_value(binding, packed)]
