# SPDX-License-Identifier: Apache-2.0
"""A compiler of your own gets the functions that are for it; here they become loops in C++."""

import subprocess
import tempfile
from pathlib import Path

import numpy as np
import tvm
import tvm_ffi
from tvm.relax.dpl import is_op, wildcard
from tvm.relax.transform import FuseOpsByPattern
from tvm.script import ir as I
from tvm.script import relax as R

import tvm_ipc
from tvm_ipc.transform import RunModuleCodegen

TENSOR = "tvm::ffi::TensorView"


@I.ir_module
class Model:
    @R.function
    def main(x: R.Tensor(("n", 16), "float32"), w: R.Tensor((16, 16), "float32")):
        with R.dataflow():
            y = R.tanh(R.matmul(x, w))
            R.output(y)
        return y


def compile_cpp(functions, options):
    """Gets a module with these functions alone; returns one that defines symbols of their names."""
    names = [variable.name_hint for variable in functions.get_global_vars()]
    print(f"our compiler is given {names}")
    loop = "for (int64_t i = 0; i < x.numel(); ++i) static_cast<float*>(y.data_ptr())[i] ="
    code = "#include <cmath>\n#include <tvm/ffi/container/tensor.h>\n#include <tvm/ffi/function.h>"
    for name in names:  # a function gets its inputs, then its outputs
        body = f"{loop} std::tanh(static_cast<float*>(x.data_ptr())[i]);"
        code += (
            f"\nstatic void run_{name}(tvm::ffi::TensorView x, tvm::ffi::TensorView y) {{{body}}}"
        )
        code += f"\nTVM_FFI_DLL_EXPORT_TYPED_FUNC({name}, run_{name})"
    source = Path(tempfile.mkdtemp()) / "kernels.cc"
    source.write_text(code)
    includes = [f"-I{path}" for path in tvm_ffi.libinfo.include_paths()]
    command = ["c++", "-std=c++17", "-fPIC", *options["flags"], *includes, "-c", source]
    subprocess.run([*command, "-o", source.with_suffix(".o")], check=True)
    return tvm.runtime.load_static_library(str(source.with_suffix(".o")), names)


partitioned = FuseOpsByPattern([("cpp.tanh", is_op("relax.tanh")(wildcard()))], True, True)(Model)
module = RunModuleCodegen("cpp", compile_cpp, {"flags": ["-O2"]})(partitioned)
program = tvm.compile(module, target="llvm")
x, w = (np.random.rand(*shape).astype("float32") - 0.5 for shape in ((5, 16), (16, 16)))
with tvm_ipc.Session(num_workers=2) as session:
    y = session.get(session.load_vm_module(program)["main"](session.put(x), session.put(w)), rank=1)
np.testing.assert_allclose(y, np.tanh(x @ w), rtol=1e-4, atol=1e-6)
print("worker 1 ran it, and it says what NumPy says")
