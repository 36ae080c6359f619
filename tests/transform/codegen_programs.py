# SPDX-License-Identifier: Apache-2.0
"""What the tests of RunModuleCodegen compile, and with what."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import tirx as T

from tests.transform.byoc_modules import apply, functions, tensor
from tvm_ipc.errors import TransformError
from tvm_ipc.transform import (
    Compiled,
    RunModuleCodegen,
)

SCALED = """
void {name}(TensorView a, TensorView b, TensorView out) {{
  const float *x = static_cast<float*>(a.data_ptr()), *y = static_cast<float*>(b.data_ptr());
  float* z = static_cast<float*>(out.data_ptr());
  for (int64_t i = 0; i < out.numel(); ++i) z[i] = std::max(x[i] * y[i % 4], 0.0f);
}}
TVM_FFI_DLL_EXPORT_TYPED_FUNC({name}, {name})
"""
HEAD = """
#define TVM_FFI_DLL_EXPORT_INCLUDE_METADATA 1
#include <algorithm>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>
using tvm::ffi::TensorView;
"""

Compile = Callable[[str, list[str]], tvm.runtime.Module]


def expected(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    return np.maximum(np.exp(x) * w, 0) + x


def run(executable, *arguments: np.ndarray) -> np.ndarray:
    vm = relax.VirtualMachine(executable, tvm.cpu())
    return vm["main"](*map(tvm.runtime.tensor, arguments)).numpy()


def codegen(module: tvm.IRModule, compile_fn, **options) -> tvm.IRModule:
    return apply(RunModuleCodegen("cc", compile_fn, **options), module)


def defined(module: tvm.IRModule) -> set[str]:
    return {k for k, one in functions(module).items() if not isinstance(one, relax.ExternFunc)}


def caller_of(module: tvm.IRModule, first: str, second: str) -> relax.Function:
    x, w = tensor("x", T.Var("n", "int64"), 4), tensor("w", 4)
    builder = relax.BlockBuilder()
    with builder.function("main", [x, w]):
        y = builder.emit(relax.Call(module.get_global_var(first), [x, w]))
        builder.emit_func_output(builder.emit(relax.Call(global_var(module, second), [y])))
    return builder.get()["main"]


def global_var(module: tvm.IRModule, name: str) -> tvm.ir.GlobalVar:
    found = module.get_global_var(name)
    if found.ty is None or not isinstance(found.ty, relax.FuncType):
        relax.expr._update_type(found, module[name].ty)
    return found


def problem(module: tvm.IRModule, compile_fn, **options) -> str:
    before = tvm.ir.load_json(tvm.ir.save_json(module))
    with pytest.raises(TransformError) as caught:
        RunModuleCodegen("cc", compile_fn, **options)(module)
    tvm.ir.assert_structural_equal(module, before)
    tvm.compile(module, "llvm")  # builds without the compiler
    return str(caught.value)


def registered(**more: object) -> Compiled:
    return Compiled(**{"registered": {"scaled": "x"}, **more})
