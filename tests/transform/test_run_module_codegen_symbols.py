# SPDX-License-Identifier: Apache-2.0
"""RunModuleCodegen: which symbols compiled functions get, and whom they may call."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import tvm_ipc
from tests.transform.byoc_modules import Elementwise, functions, literal, tensor
from tests.transform.codegen_programs import (
    SCALED,
    codegen,
    defined,
    expected,
    problem,
    registered,
    run,
)
from tvm_ipc.errors import TransformError
from tvm_ipc.transform import (
    Compiled,
    FreshGlobalSymbols,
    LowerExternCalls,
    RunModuleCodegen,
)


def test_functions_that_a_compiler_returns_may_call_each_other(values):
    @I.ir_module
    class Returned:
        @R.function(private=True)
        def product(a: R.Tensor(("k", 4), "float32"), b: R.Tensor((4,), "float32")) -> R.Tensor(
            ("k", 4), "float32"
        ):
            k = T.int64()
            c: R.Tensor((k, 4), "float32") = R.multiply(b, a)
            return c

        @R.function
        def scaled(a: R.Tensor(("k", 4), "float32"), b: R.Tensor((4,), "float32")) -> R.Tensor(
            ("k", 4), "float32"
        ):
            k = T.int64()
            cls = Returned
            c: R.Tensor((k, 4), "float32") = cls.product(a, b)
            d: R.Tensor((k, 4), "float32") = R.nn.relu(c)
            return d

    after = codegen(Elementwise, lambda given, options: Compiled(functions=functions(Returned)))
    assert defined(after) == {"main", "scaled", "product"}
    result = run(tvm.compile(after, "llvm"), *values)
    np.testing.assert_allclose(result, expected(*values), rtol=1e-5)


@pytest.mark.parametrize("lower", [False, True])
def test_a_symbol_is_never_that_of_a_kernel(compile_cpp, values, lower: bool):
    @I.ir_module
    class Module:
        @R.function
        def multiply(a: R.Tensor(("m", 4), "float32"), b: R.Tensor((4,), "float32")) -> R.Tensor(
            ("m", 4), "float32"
        ):
            R.func_attr({"Codegen": "cc"})
            c = R.nn.relu(R.multiply(a, b))
            return c

        @R.function
        def main(x: R.Tensor(("n", 4), "float32"), w: R.Tensor((4,), "float32")):
            cls = Module
            y = cls.multiply(x, w)
            z = R.multiply(y, w)
            return z

    source = SCALED.format(name="multiply")
    library = compile_cpp(source, ["multiply"], library=True)
    after = codegen(Module, lambda given, options: library, lower=lower)
    pipeline = tvm_ipc.get_pipeline("llvm", world_size=1)
    x, w = values
    result = run(relax.build(after, "llvm", relax_pipeline=pipeline), x, w)
    np.testing.assert_allclose(result, np.maximum(x * w, 0) * w, rtol=1e-5)


def test_refused_a_symbol_that_is_the_name_of_another_function(values):
    def compile_fn(given, options):
        return Compiled(registered={"scaled": "main"})

    with pytest.raises(
        TransformError, match="registered 'scaled' as 'main', which is a function of"
    ):
        RunModuleCodegen("cc", compile_fn)(Elementwise)
    declared = codegen(Elementwise, lambda given, options: registered(), lower=False)
    declared["x"] = Elementwise["main"].with_attr("global_symbol", "x")
    with pytest.raises(TransformError, match="'x' is the symbol of an external function and"):
        LowerExternCalls()(declared)


def test_refused_functions_that_use_others_of_the_module():
    @I.ir_module
    class Module:
        @R.function(private=True)
        def helper(a: R.Tensor((4,), "float32")) -> R.Tensor((4,), "float32"):
            b: R.Tensor((4,), "float32") = R.exp(a)
            return b

        @R.function
        def inner(a: R.Tensor((4,), "float32")) -> R.Tensor((4,), "float32"):
            R.func_attr({"Codegen": "cc"})
            cls = Module
            b: R.Tensor((4,), "float32") = cls.helper(a)
            return b

        @R.function
        def main(x: R.Tensor((4,), "float32")):
            cls = Module
            y = cls.inner(x)
            return y

    message = problem(Module, lambda given, options: None)
    assert "'inner' is for the compiler 'cc', but uses 'helper', which is not" in message


def test_functions_are_named_by_the_policy(compile_cpp, values):
    def compile_fn(given, options):
        (name,) = functions(given)
        assert name == "kernel_0"
        return Compiled(declined=[name])

    builder = relax.BlockBuilder()
    x = tensor("x", 4)
    with builder.function("main", [x]):
        inside = builder.emit(literal(relax.op.exp, tensor("a", 4)))
        builder.emit_func_output(builder.emit(relax.Call(inside, [x])))
    codegen(builder.get(), compile_fn, cache=FreshGlobalSymbols("kernel"))


def test_paths_are_no_modules(tmp_path: Path):
    message = problem(Elementwise, lambda given, options: tmp_path / "kernels.o")
    assert "returned a PosixPath; expected a runtime module" in message
