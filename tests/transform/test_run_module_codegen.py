# SPDX-License-Identifier: Apache-2.0
"""RunModuleCodegen: one compiler, all of its functions, on the way to an executable."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import tvm_ipc
from tests.transform.byoc_modules import Elementwise, apply, functions, literal, partitioned, tensor
from tests.transform.codegen_programs import (
    SCALED,
    caller_of,
    codegen,
    defined,
    expected,
    run,
)
from tvm_ipc.transform import (
    Compiled,
    ExistingGlobalSymbols,
    LowerExternCalls,
    RunModuleCodegen,
)

# The way of a module.


@pytest.mark.parametrize("build", [tvm.compile, relax.build])
def test_what_was_compiled_runs_in_the_executable(scaled, values, build):
    after = codegen(Elementwise, lambda functions, options: scaled)
    assert defined(after) == {"main"}
    np.testing.assert_allclose(run(build(after, "llvm"), *values), expected(*values), rtol=1e-5)
    # The input module still builds without the compiler.
    np.testing.assert_allclose(
        run(tvm.compile(Elementwise, "llvm"), *values), expected(*values), rtol=1e-5
    )


def test_declarations_can_wait_for_our_pipeline(scaled, values, tmp_path):
    after = codegen(Elementwise, lambda functions, options: [scaled], lower=False)
    assert isinstance(after["scaled"], relax.ExternFunc)
    assert after["main"].same_as(Elementwise["main"])
    pipeline = tvm_ipc.get_pipeline("llvm", world_size=2, dump=tmp_path / "dump")
    executable = relax.build(after, "llvm", relax_pipeline=pipeline)
    np.testing.assert_allclose(run(executable, *values), expected(*values), rtol=1e-5)
    assert "# scaled: R.Callable" in (tmp_path / "dump" / "1-dispatch.py").read_text()


def test_an_exported_library_holds_it_and_workers_load_it(scaled, values, tmp_path):
    after = codegen(Elementwise, lambda functions, options: scaled)
    path = tmp_path / "model.so"
    tvm.compile(after, "llvm").export_library(str(path))
    np.testing.assert_allclose(
        run(tvm.runtime.load_module(str(path)), *values), expected(*values), rtol=1e-5
    )
    with tvm_ipc.Session(2) as session:
        main = session.load_vm_module(str(path))["main"]
        result = main(*map(session.put, values))
        for rank in range(2):
            np.testing.assert_allclose(session.get(result, rank), expected(*values), rtol=1e-5)


def test_the_compiler_gets_its_functions_and_only_these_and_the_options():
    seen: list[object] = []

    def compile_fn(given, options):
        relax.analysis.well_formed(given)
        seen.extend([sorted(functions(given)), options])
        return Compiled(declined=list(functions(given)))

    module = partitioned()
    apply(RunModuleCodegen("cutlass", compile_fn, {"level": 3}, ExistingGlobalSymbols()), module)
    assert seen == [["tvmgen_cutlass_main_0"], {"level": 3}]


def test_a_compiler_without_functions_is_not_called():
    def compile_fn(given, options):
        raise AssertionError

    for module in (Elementwise, apply(LowerExternCalls(), Elementwise)):
        after = apply(RunModuleCodegen("other", compile_fn), module)
        tvm.ir.assert_structural_equal(after, module)


def test_two_compilers_in_one_module(compile_cpp, values):
    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor(("n", 4), "float32"), w: R.Tensor((4,), "float32")):
            n = T.int64()

            @R.function
            def one(a: R.Tensor((n, 4), "float32"), b: R.Tensor((4,), "float32")) -> R.Tensor(
                (n, 4), "float32"
            ):
                R.func_attr({"Codegen": "cc"})
                c = R.nn.relu(R.multiply(a, b))
                return c

            @R.function
            def two(a: R.Tensor((n, 4), "float32"), b: R.Tensor((4,), "float32")) -> R.Tensor(
                (n, 4), "float32"
            ):
                R.func_attr({"Codegen": "dd"})
                c = R.nn.relu(R.multiply(a, b))
                return c

            y = one(x, w)
            z = two(y, w)
            return z

    def compile_fn(given, options):
        names = list(functions(given))
        assert names == [f"main_{options['letters']}_0"]
        return compile_cpp(SCALED.format(name=names[0]), names)

    after = Module
    for letters in ("cc", "dd"):
        after = apply(RunModuleCodegen(letters, compile_fn, {"letters": letters}), after)
    assert len(after.attrs["external_mods"]) == 2
    x, w = values
    result = np.maximum(np.maximum(x * w, 0) * w, 0)
    np.testing.assert_allclose(run(tvm.compile(after, "llvm"), x, w), result, rtol=1e-5)


def test_an_entry_of_the_module_can_be_compiled_whole(compile_cpp, values):
    module = tvm.IRModule({"main": Elementwise["scaled"].with_attr("global_symbol", "main")})

    def compile_fn(given, options):
        assert list(functions(given)) == ["main_cc_0"]
        return compile_cpp(SCALED.format(name="main_cc_0"), ["main_cc_0"])

    after = codegen(module, compile_fn)
    assert defined(after) == {"main"}
    x, w = values
    np.testing.assert_allclose(
        run(tvm.compile(after, "llvm"), x, w), np.maximum(x * w, 0), rtol=1e-5
    )


def test_the_declaration_of_an_entry_can_wait_for_our_pipeline(values):
    def compile_fn(given, options):
        return Compiled(registered={"main_cc_0": "test.byoc.entry"})

    tvm_ffi.register_global_func(
        "test.byoc.entry",
        lambda a, b, out: out.copyfrom(np.maximum(a.numpy() * b.numpy(), 0)),
        override=True,
    )
    module = tvm.IRModule({"main": Elementwise["scaled"].with_attr("global_symbol", "main")})
    after = codegen(module, compile_fn, lower=False)
    assert isinstance(after["main_cc_0"], relax.ExternFunc)
    pipeline = tvm_ipc.get_pipeline("llvm", world_size=1)
    executable = relax.build(after, "llvm", relax_pipeline=pipeline)
    x, w = values
    np.testing.assert_allclose(run(executable, x, w), np.maximum(x * w, 0), rtol=1e-5)


def test_literals_that_nobody_calls_are_not_compiled():
    builder = relax.BlockBuilder()
    x = tensor("x", 4)
    with builder.function("main", [x]):
        builder.emit(literal(relax.op.exp, tensor("a", 4)))
        inside = builder.emit(literal(relax.op.cos, tensor("a", 4)))
        builder.emit_func_output(builder.emit(relax.Call(inside, [x])))

    def compile_fn(given, options):
        (function,) = functions(given).values()
        assert "R.cos" in function.script()
        return Compiled(declined=list(functions(given)))

    assert set(functions(codegen(builder.get(), compile_fn))) == {"main"}


def test_some_functions_are_compiled_and_the_rest_is_left_to_tvm(scaled, values):
    module = Elementwise.clone()
    other = literal(lambda a: relax.op.add(a, a), tensor("a", T.Var("k", "int64"), 4))
    module["doubled"] = other.with_attr("global_symbol", "doubled")
    module["main"] = caller_of(module, "scaled", "doubled")
    after = codegen(module, lambda given, options: Compiled(modules=[scaled], declined=["doubled"]))
    assert defined(after) == {"main"}
    x, w = values
    np.testing.assert_allclose(
        run(tvm.compile(after, "llvm"), x, w), 2 * np.maximum(x * w, 0), rtol=1e-5
    )


def test_changed_functions_take_the_place_of_those_that_were_given(values):
    @I.ir_module
    class Changed:
        @R.function
        def scaled(a: R.Tensor(("k", 4), "float32"), b: R.Tensor((4,), "float32")) -> R.Tensor(
            ("k", 4), "float32"
        ):
            k = T.int64()
            c: R.Tensor((k, 4), "float32") = R.multiply(b, a)
            d: R.Tensor((k, 4), "float32") = R.maximum(c, R.const(0, "float32"))
            return d

    after = codegen(Elementwise, lambda given, options: Compiled(functions=functions(Changed)))
    assert set(functions(after)) == {"scaled", "main"}
    np.testing.assert_allclose(
        run(tvm.compile(after, "llvm"), *values), expected(*values), rtol=1e-5
    )


def test_a_changed_function_says_what_its_declaration_says():
    def compile_fn(given, options):
        changed = given["scaled"].with_attr("tvm_ipc.inplace_outputs", [0])
        return Compiled(functions={"scaled": changed}, registered={"scaled": "mylib.scaled"})

    after = codegen(Elementwise, compile_fn, lower=False)
    assert after["scaled"].global_symbol == "mylib.scaled"
    assert list(after["scaled"].attrs["tvm_ipc.inplace_outputs"]) == [0]


def test_packed_functions_that_exist_at_run_time_need_no_module(values):
    def compile_fn(given, options):
        return Compiled(registered={"scaled": "test.byoc.scaled"})

    tvm_ffi.register_global_func(
        "test.byoc.scaled",
        lambda a, b, out: out.copyfrom(np.maximum(a.numpy() * b.numpy(), 0)),
        override=True,
    )
    after = codegen(Elementwise, compile_fn)
    np.testing.assert_allclose(
        run(tvm.compile(after, "llvm"), *values), expected(*values), rtol=1e-5
    )


def test_constants_are_handed_over_without_copies():
    weight = relax.const(np.random.rand(1000, 4).astype("float32"))
    builder = relax.BlockBuilder()
    x = tensor("x", 1000, 4)
    with builder.function("main", [x]):
        inside = builder.emit(
            literal(lambda a: relax.op.add(a, weight), tensor("a", 1000, 4)), "inner"
        )
        builder.emit_func_output(builder.emit(relax.Call(inside, [x])))
    addresses: list[int] = []

    def compile_fn(given, options):
        (function,) = functions(given).values()
        (value,) = [b.value for block in function.body.blocks for b in block.bindings][:1]
        constant = value.args[1].value
        addresses.append(constant.data_ptr())
        return Compiled(
            registered={"main_cc_0": "test.byoc.add"}, constants={"main_cc_0_weight": constant}
        )

    after = codegen(builder.get(), compile_fn)
    kept = after.attrs["const_name_to_constant"]["main_cc_0_weight"]
    assert addresses == [weight.value.data_ptr()] == [kept.data_ptr()]
    tvm_ffi.register_global_func(
        "test.byoc.add", lambda a, out: out.copyfrom(a.numpy() + kept.numpy()), override=True
    )
    value = np.random.rand(1000, 4).astype("float32")
    result = run(tvm.compile(after, "llvm"), value)
    np.testing.assert_array_equal(result, value + weight.value.numpy())
