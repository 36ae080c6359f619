# SPDX-License-Identifier: Apache-2.0
"""RunModuleCodegen: one compiler, all of its functions, and everything that can go wrong."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tvm
import tvm_ffi
from byoc_modules import Elementwise, apply, functions, literal, partitioned, tensor
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import tvm_ipc
from tvm_ipc.errors import TransformError, WorkerError
from tvm_ipc.transform import (
    Compiled,
    CompileError,
    ExistingGlobalSymbols,
    FreshGlobalSymbols,
    LowerExternCalls,
    RunModuleCodegen,
    compile_each,
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


@pytest.fixture(scope="session")
def compile_cpp(tmp_path_factory: pytest.TempPathFactory) -> Compile:
    """Compile C++ to an object file that the program is linked with, or to a loaded library."""

    def run(source: str, names: list[str], *, library: bool = False) -> tvm.runtime.Module:
        folder = tmp_path_factory.mktemp("cpp")
        (folder / "kernels.cc").write_text(HEAD + source)
        target = str(folder / ("kernels.so" if library else "kernels.o"))
        command = ["g++", "-std=c++17", "-O0", "-fPIC", "-shared" if library else "-c"]
        command += [f"-I{path}" for path in tvm_ffi.libinfo.include_paths()]
        command += [str(folder / "kernels.cc"), "-o", target]
        subprocess.run(command, check=True, capture_output=True)
        if library:
            return tvm.runtime.load_module(target)
        return tvm.runtime.load_static_library(target, names)

    return run


@pytest.fixture(scope="session")
def scaled(compile_cpp: Compile) -> tvm.runtime.Module:
    return compile_cpp(SCALED.format(name="scaled"), ["scaled"])


@pytest.fixture(scope="session")
def values() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((5, 4)), rng.standard_normal(4)
    return x.astype("float32"), w.astype("float32")


def expected(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    return np.maximum(np.exp(x) * w, 0) + x


def run(executable, *arguments: np.ndarray) -> np.ndarray:
    vm = relax.VirtualMachine(executable, tvm.cpu())
    return vm["main"](*map(tvm.runtime.tensor, arguments)).numpy()


def codegen(module: tvm.IRModule, compile_fn, **options) -> tvm.IRModule:
    return apply(RunModuleCodegen("cc", compile_fn, **options), module)


def defined(module: tvm.IRModule) -> set[str]:
    return {k for k, one in functions(module).items() if not isinstance(one, relax.ExternFunc)}


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


# What can go wrong.


def problem(module: tvm.IRModule, compile_fn, **options) -> str:
    before = tvm.ir.load_json(tvm.ir.save_json(module))
    with pytest.raises(TransformError) as caught:
        RunModuleCodegen("cc", compile_fn, **options)(module)
    tvm.ir.assert_structural_equal(module, before)
    tvm.compile(module, "llvm")  # builds without the compiler
    return str(caught.value)


def test_refused_a_compiler_that_raises():
    def compile_fn(given, options):
        raise ArithmeticError("scaled: no instruction for relu")

    message = problem(Elementwise, compile_fn)
    assert "the compiler 'cc', given 'scaled', failed on the function 'scaled'" in message
    assert "ArithmeticError: scaled: no instruction for relu" in message


def test_refused_a_system_compiler_that_fails(compile_cpp):
    message = problem(Elementwise, lambda given, options: compile_cpp("int main() {", ["scaled"]))
    assert "given 'scaled', failed: CalledProcessError" in message
    assert "kernels.cc:7:13: error: expected" in message


def chain(count: int) -> tvm.IRModule:
    """As many different functions as are wanted, called one after the other."""
    builder = relax.BlockBuilder()
    x = tensor("x", 4)
    with builder.function("main", [x]):
        y = x
        for number in range(count):
            inside = literal(
                lambda a, number=number: relax.op.add(a, relax.const(number, "float32")),
                tensor("a", 4),
            )
            y = builder.emit(relax.Call(builder.emit(inside), [y]))
        builder.emit_func_output(y)
    return builder.get()


def test_a_compiler_of_one_function_says_which_one_failed():
    seen: list[str] = []

    def compile_one(function, options):
        seen.append(str(function.attrs["global_symbol"]))
        if len(seen) == 7:
            raise KeyError("relax.add")
        return of_tvm("c", arity=3)

    with pytest.raises(TransformError) as caught:
        RunModuleCodegen("cc", compile_each(compile_one))(chain(12))
    assert f"and 4 more, failed on the function '{seen[-1]}': KeyError: 'relax.add'" in str(
        caught.value
    )
    module = RunModuleCodegen("cc", compile_each(lambda f, options: of_tvm("c", arity=3)))
    assert len(apply(module, Elementwise).attrs["external_mods"]) == 1


@pytest.mark.parametrize(
    ("result", "named"),
    [(None, "nothing"), ("scaled", "a str"), (3, "a int"), ({}, "a dict")],
    ids=str,
)
def test_refused_a_compiler_that_returns_nothing_or_something_else(result, named):
    message = problem(Elementwise, lambda given, options: result)
    assert f"the compiler 'cc', given 'scaled', returned {named}; a compiler returns" in message


def test_refused_modules_that_are_none(scaled):
    message = problem(Elementwise, lambda given, options: [scaled, "scaled.o"])
    assert "returned a str among its modules, which is no runtime module" in message


def test_refused_modules_with_the_wrong_symbols(compile_cpp, scaled):
    wrong = compile_cpp(SCALED.format(name="scale"), ["scale"])
    message = problem(Elementwise, lambda given, options: [wrong])
    assert "did not compile the function 'scaled': no module that it returned defines" in message
    assert "(1 returned, of the kinds static_library)" in message
    assert "(0 returned)" in problem(Elementwise, lambda given, options: [])
    message = problem(Elementwise, lambda given, options: [scaled, scaled])
    assert "returned 2 modules that define the symbol 'scaled'" in message


def test_refused_a_symbol_that_another_module_has_already(scaled):
    before = Elementwise.with_attr("external_mods", [scaled])
    with pytest.raises(TransformError, match="so does a module that was attached before"):
        RunModuleCodegen("cc", lambda given, options: scaled)(before)


def test_refused_a_function_of_the_wrong_arity_where_its_module_tells(compile_cpp):
    source = """
    void scaled(TensorView a, TensorView out) {}
    TVM_FFI_DLL_EXPORT_TYPED_FUNC(scaled, scaled)
    """
    wrong = compile_cpp(source, ["scaled"], library=True)
    message = problem(Elementwise, lambda given, options: wrong)
    assert "compiled the function 'scaled' with 2 parameters, and its calls have 3" in message
    assert "scaled(R.Tensor((m, 4), " in message


def test_a_function_of_the_wrong_arity_says_so_at_its_first_call(compile_cpp, values):
    source = """
    void scaled(TensorView a, TensorView out) {}
    TVM_FFI_DLL_EXPORT_TYPED_FUNC(scaled, scaled)
    """
    after = codegen(Elementwise, lambda given, options: compile_cpp(source, ["scaled"]))
    executable = tvm.compile(after, "llvm")
    with pytest.raises(TypeError, match=r"`scaled\(.*Expected 2 but got 3 arguments"):
        run(executable, *values)
    with tvm_ipc.Session(2) as session:
        session.load_vm_module(executable)["main"](*map(session.put, values))
        with pytest.raises(WorkerError, match="Expected 2 but got 3 arguments"):
            session.sync()


def of_tvm(target: str, *, arity: int) -> tvm.runtime.Module:
    """The function as TVM itself compiles it, which is as good a compiler as any."""

    @I.ir_module
    class Three:
        @T.prim_func(s_tir=True)
        def scaled(a: T.handle, b: T.handle, c: T.handle):
            m = T.int64()
            left = T.match_buffer(a, (m, 4), "float32")
            right = T.match_buffer(b, (4,), "float32")
            out = T.match_buffer(c, (m, 4), "float32")
            for i, j in T.grid(m, 4):
                with T.sblock("scaled"):
                    x, y = T.axis.remap("SS", [i, j])
                    out[x, y] = T.max(left[x, y] * right[y], T.float32(0))

    @I.ir_module
    class Two:
        @T.prim_func(s_tir=True)
        def scaled(a: T.handle, c: T.handle):
            m = T.int64()
            left = T.match_buffer(a, (m, 4), "float32")
            out = T.match_buffer(c, (m, 4), "float32")
            for i, j in T.grid(m, 4):
                with T.sblock("scaled"):
                    x, y = T.axis.remap("SS", [i, j])
                    out[x, y] = left[x, y]

    return tvm.tirx.build({2: Two, 3: Three}[arity], target=target)


@pytest.mark.parametrize("target", ["llvm", "c"])
def test_modules_that_tvm_made_are_external_ones_as_well(target, values):
    after = codegen(Elementwise, lambda given, options: of_tvm(target, arity=3))
    np.testing.assert_allclose(
        run(tvm.compile(after, "llvm"), *values), expected(*values), rtol=1e-5
    )
    wrong = codegen(Elementwise, lambda given, options: of_tvm(target, arity=2))
    with pytest.raises(TypeError, match=r"Expected 2 arguments when calling:\s+`scaled\("):
        run(tvm.compile(wrong, "llvm"), *values)


def test_refused_functions_that_were_not_given_or_have_another_signature():
    message = problem(Elementwise, lambda given, options: Compiled(declined=["other"]))
    assert "declined 'other', which it was not given; it was given 'scaled'" in message
    other = literal(relax.op.exp, tensor("a", 4))
    message = problem(Elementwise, lambda given, options: Compiled(functions={"scaled": other}))
    assert "changed the signature of 'scaled': it was R.Callable((R.Tensor((m, 4)" in message
    message = problem(
        Elementwise, lambda given, options: Compiled(declined=["scaled"], functions={"main": other})
    )
    assert "returned a new function 'main', and the module has one already" in message


def other(name: str = "exp") -> relax.Function:
    return literal(getattr(relax.op, name), tensor("a", 4), compiler=None)


def changed(given: tvm.IRModule, **attrs: object) -> Compiled:
    function = given["scaled"]
    for name, value in attrs.items():
        function = function.with_attr(f"tvm_ipc.{name}", value)
    return Compiled(functions={"scaled": function}, registered={"scaled": "x"})


def registered(**more: object) -> Compiled:
    return Compiled(**{"registered": {"scaled": "x"}, **more})


def calls_nobody(given: tvm.IRModule) -> Compiled:
    """The function calls one that no module has."""
    function = given["scaled"]
    nobody = tvm.ir.GlobalVar("nobody")
    relax.expr._update_type(nobody, function.ty)
    params = [relax.Var(param.name, param.ty) for param in function.params]
    builder = relax.BlockBuilder()
    with builder.function("scaled", params):
        builder.emit_func_output(builder.emit(relax.Call(nobody, params)))
    return Compiled(functions={"scaled": builder.get()["scaled"]})


MISBEHAVIOURS = {
    "registered as a number": (
        lambda given: registered(registered={"scaled": 7}),
        "registered 'scaled' as 7, which is no name of a packed function",
    ),
    "registered as nothing": (
        lambda given: registered(registered={"scaled": ""}),
        "registered 'scaled' as '', which is no name",
    ),
    "registered a list": (
        lambda given: registered(registered=["scaled"]),
        "Compiled(registered=['scaled']); registered are names of packed functions by name",
    ),
    "no modules": (lambda given: Compiled(None), "Compiled(modules=None); modules are a list of"),
    "the class": (lambda given: Compiled, "returned a type"),
    "declined a text": (
        lambda given: Compiled(declined="scaled"),
        "Compiled(declined='scaled'); declined are names of functions",
    ),
    "declined a number": (lambda given: Compiled(declined=[7]), "7 as a name in Compiled(decl"),
    "an array for a constant": (
        lambda given: registered(constants={"scaled_c": np.zeros(3)}),
        "returned a ndarray as the constant 'scaled_c', which is no tensor",
    ),
    "a constant without a name": (
        lambda given: registered(constants={3: tvm.runtime.tensor(np.zeros(3))}),
        "3 as a name in Compiled(constants=",
    ),
    "functions without names": (
        lambda given: registered(functions=[other()]),
        "functions are functions by name",
    ),
    "a name that is none": (
        lambda given: registered(functions={"": other()}),
        "'' as a name in Compiled(functions=",
    ),
    "a new function called main": (
        lambda given: registered(functions={"main": other()}),
        "a new function 'main', and the module has one already",
    ),
    "a new function that is none": (
        lambda given: registered(functions={"foo": 7}),
        "a new function 'foo' that is a int",
    ),
    "a new function for a compiler": (
        lambda given: registered(functions={"foo": other().with_attr("Codegen", "cc")}),
        "a new function 'foo' with the attribute Codegen",
    ),
    "a new function of another symbol": (
        lambda given: registered(functions={"foo": other().with_attr("global_symbol", "main")}),
        "a new function 'foo' whose global_symbol is 'main'",
    ),
    "a function for another compiler": (
        lambda given: Compiled(functions={"scaled": given["scaled"].with_attr("Codegen", "dd")}),
        "the function 'scaled' for the compiler 'dd'",
    ),
    "a function that calls nobody": (calls_nobody, "'scaled', which uses 'nobody'; neither"),
    "declined and registered": (
        lambda given: registered(declined=["scaled"]),
        "2 answers for the function 'scaled': it declined it and registered it as 'x'",
    ),
    "registered and left to TVM": (
        lambda given: registered(functions={"scaled": given["scaled"].without_attr("Codegen")}),
        "registered it as 'x' and left a changed one to TVM",
    ),
    "declined and compiled": (
        lambda given: Compiled(declined=["scaled"], functions={"scaled": given["scaled"]}),
        "declined it and returned it as compiled",
    ),
    "in place of a text": (
        lambda given: changed(given, inplace_outputs="x"),
        "inplace_outputs is a list of places of parameters, not 'x'",
    ),
    "in place of a fraction": (
        lambda given: changed(given, inplace_outputs=[0.5]),
        "inplace_outputs is a list of places of parameters",
    ),
    "in place of nothing": (
        lambda given: changed(given, inplace_outputs=[2]),
        "inplace_outputs names parameter 2 of 2",
    ),
    "scopes that are letters": (
        lambda given: changed(given, argument_scopes="ab"),
        "argument_scopes is a list of scopes, not 'ab'",
    ),
    "scopes that are numbers": (
        lambda given: changed(given, argument_scopes=[3, 4]),
        "argument_scopes is a list of scopes",
    ),
}


@pytest.mark.parametrize("name", MISBEHAVIOURS)
def test_refused_with_words_whatever_a_compiler_returns(name: str):
    compile_fn, words = MISBEHAVIOURS[name]
    before = tvm.ir.load_json(tvm.ir.save_json(Elementwise))
    with pytest.raises(TransformError) as caught:
        RunModuleCodegen("cc", lambda given, options: compile_fn(given))(Elementwise)
    tvm.ir.assert_structural_equal(Elementwise, before)
    assert "the compiler 'cc', given 'scaled'" in str(caught.value)
    assert words in str(caught.value)


class NoTextError(Exception):
    def __str__(self) -> str:
        raise ValueError


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (NoTextError(), "failed: NoTextError: (its text cannot be had: ValueError)"),
        (ValueError("\ud800"), r"failed: ValueError: \ud800"),  # which TVM cannot carry
        (SystemExit("no licence"), "failed: SystemExit: no licence"),
        (StopIteration("x"), "failed: StopIteration: x"),
        (CompileError("scaled", "no"), "failed on the function 'scaled': no"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_refused_with_words_whatever_a_compiler_raises(problem: BaseException, words: str):
    def compile_fn(given, options):
        raise problem

    with pytest.raises(TransformError) as caught:
        RunModuleCodegen("cc", compile_fn)(Elementwise)
    assert "the compiler 'cc', given 'scaled'" in str(caught.value)
    assert words in str(caught.value)


def test_a_compiler_may_do_what_it_likes_with_what_it_is_given():
    options = {"level": 3}

    def compile_fn(given, options):
        function = given["scaled"]
        for global_var in given.get_global_vars():
            del given[global_var]
        given[tvm.ir.GlobalVar("main")] = function
        given.update_global_info("vdevice", [relax.VDevice("llvm")])
        options.clear()
        return registered()

    after = codegen(Elementwise, compile_fn, options=options)
    assert defined(after) == {"main"}
    assert options == {"level": 3}
    assert not after.global_infos


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
    assert "'inner' is for 'cc' and uses 'helper', which is not" in message


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
    assert "returned a PosixPath; a compiler returns a runtime module" in message
