# SPDX-License-Identifier: Apache-2.0
"""RunModuleCodegen: everything that can go wrong in a compiler, and in what it returns."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import tirx as T

import tvm_ipc
from tests.transform.byoc_modules import Elementwise, apply, literal, tensor
from tests.transform.codegen_programs import (
    SCALED,
    codegen,
    defined,
    expected,
    problem,
    registered,
    run,
)
from tvm_ipc.errors import TransformError, WorkerError
from tvm_ipc.transform import (
    Compiled,
    CompileError,
    RunModuleCodegen,
    compile_each,
)


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
    [(None, "None"), ("scaled", "a str"), (3, "a int"), ({}, "a dict")],
    ids=str,
)
def test_refused_a_compiler_that_returns_nothing_or_something_else(result, named):
    message = problem(Elementwise, lambda given, options: result)
    assert (
        f"the compiler 'cc', given 'scaled', returned {named}; expected a runtime module" in message
    )


def test_refused_modules_that_are_none(scaled):
    message = problem(Elementwise, lambda given, options: [scaled, "scaled.o"])
    assert "returned a str among its modules; expected runtime modules" in message


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
    with pytest.raises(TransformError, match="which an attached module already defines"):
        RunModuleCodegen("cc", lambda given, options: scaled)(before)


def test_refused_a_function_of_the_wrong_arity_where_its_module_tells(compile_cpp):
    source = """
    void scaled(TensorView a, TensorView out) {}
    TVM_FFI_DLL_EXPORT_TYPED_FUNC(scaled, scaled)
    """
    wrong = compile_cpp(source, ["scaled"], library=True)
    message = problem(Elementwise, lambda given, options: wrong)
    assert "compiled the function 'scaled' with 2 parameters, but its calls have 3" in message
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
    assert "declined 'other'; expected names among 'scaled'" in message
    other = literal(relax.op.exp, tensor("a", 4))
    message = problem(Elementwise, lambda given, options: Compiled(functions={"scaled": other}))
    assert "changed the signature of 'scaled': it was R.Callable((R.Tensor((m, 4)" in message
    message = problem(
        Elementwise, lambda given, options: Compiled(declined=["scaled"], functions={"main": other})
    )
    assert (
        "returned a new function 'main', but the module already has a function of this name"
        in message
    )


def other(name: str = "exp") -> relax.Function:
    return literal(getattr(relax.op, name), tensor("a", 4), compiler=None)


def changed(given: tvm.IRModule, **attrs: object) -> Compiled:
    function = given["scaled"]
    for name, value in attrs.items():
        function = function.with_attr(f"tvm_ipc.{name}", value)
    return Compiled(functions={"scaled": function}, registered={"scaled": "x"})


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
        "registered 'scaled' as 7; expected the name of a packed function",
    ),
    "registered as nothing": (
        lambda given: registered(registered={"scaled": ""}),
        "registered 'scaled' as ''; expected the name",
    ),
    "registered a list": (
        lambda given: registered(registered=["scaled"]),
        "Compiled(registered=['scaled']); registered must be names of packed functions by name",
    ),
    "no modules": (
        lambda given: Compiled(None),
        "Compiled(modules=None); modules must be a list of",
    ),
    "the class": (lambda given: Compiled, "returned a type"),
    "declined a text": (
        lambda given: Compiled(declined="scaled"),
        "Compiled(declined='scaled'); declined must be names of functions",
    ),
    "declined a number": (lambda given: Compiled(declined=[7]), "7 as a name in Compiled(decl"),
    "an array for a constant": (
        lambda given: registered(constants={"scaled_c": np.zeros(3)}),
        "returned a ndarray as the constant 'scaled_c'; expected a tensor",
    ),
    "a constant without a name": (
        lambda given: registered(constants={3: tvm.runtime.tensor(np.zeros(3))}),
        "3 as a name in Compiled(constants=",
    ),
    "functions without names": (
        lambda given: registered(functions=[other()]),
        "functions must be functions by name",
    ),
    "a name that is none": (
        lambda given: registered(functions={"": other()}),
        "'' as a name in Compiled(functions=",
    ),
    "a new function called main": (
        lambda given: registered(functions={"main": other()}),
        "a new function 'main', but the module already has a function of this name",
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
        "contradictory results for the function 'scaled': it declined it and registered it as 'x'",
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
        "inplace_outputs is a list of parameter indices, not 'x'",
    ),
    "in place of a fraction": (
        lambda given: changed(given, inplace_outputs=[0.5]),
        "inplace_outputs is a list of parameter indices",
    ),
    "in place of nothing": (
        lambda given: changed(given, inplace_outputs=[2]),
        "inplace_outputs has the index 2; expected an index of one of the 2 parameters, or -1",
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
        (NoTextError(), "failed: NoTextError: (it cannot be converted to text: ValueError)"),
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
