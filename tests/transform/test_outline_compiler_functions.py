# SPDX-License-Identifier: Apache-2.0
"""OutlineCompilerFunctions: every function for a compiler becomes one of the module."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from tests.transform.byoc_modules import Elementwise, apply, functions, literal, partitioned, tensor
from tvm_ipc.errors import TransformError
from tvm_ipc.transform import (
    ExistingGlobalSymbols,
    FreshGlobalSymbols,
    GlobalSymbolCache,
    MappedGlobalSymbols,
    OutlineCompilerFunctions,
)


def outline(module: tvm.IRModule, compiler=None, cache=None) -> tvm.IRModule:
    after = apply(OutlineCompilerFunctions(compiler, cache), module)
    # A second run finds nothing to do.
    tvm.ir.assert_structural_equal(OutlineCompilerFunctions(compiler, cache)(after), after)
    return after


def literals(function: relax.Function) -> list[relax.Function]:
    found: list[relax.Function] = []
    relax.analysis.post_order_visit(
        function,
        lambda node: (
            found.append(node)
            if isinstance(node, relax.Function) and not node.same_as(function)
            else None
        ),
    )
    return found


def built(body, *params: relax.Var, dataflow: bool = False) -> tvm.IRModule:
    """A module with a `main` that `body` emits into."""
    builder = relax.BlockBuilder()
    with builder.function("main", list(params)):
        if dataflow:
            with builder.dataflow():
                result = builder.emit_output(body(builder, *params))
        else:
            result = body(builder, *params)
        builder.emit_func_output(result)
    return builder.get()


def n_by_4(name: str) -> tuple[tvm.ir.Var, relax.Var]:
    n = T.Var("n", "int64")
    return n, tensor(name, n, 4)


# The behaviours of TVM's former test_compiler_function_utils.py.


@pytest.mark.parametrize("bound", [True, False], ids=["let-bound", "in call position"])
def test_functions_of_one_compiler_get_their_own_symbols_and_keep_all_else(bound: bool):
    before = partitioned(bound=bound)
    if not bound:
        before = relax.transform.Normalize()(before)
    after = outline(before, "cutlass", ExistingGlobalSymbols())
    assert set(functions(after)) == {"main", "tvmgen_cutlass_main_0"}
    outlined = after["tvmgen_cutlass_main_0"]
    assert dict(outlined.attrs) == {
        "Codegen": "cutlass",
        "Inline": True,
        "global_symbol": "tvmgen_cutlass_main_0",
    }
    (composite,) = literals(outlined)
    assert composite.attrs["Composite"] == "cutlass.dense_bias"
    assert [str(one.attrs.get("Codegen")) for one in literals(after["main"])] == ["None", "cublas"]
    (original,) = [one for one in literals(before["main"]) if one.attrs.get("Codegen") == "cutlass"]
    tvm.ir.assert_structural_equal(outlined, original)


def test_a_literal_in_call_position_is_outlined():
    def body(builder, x):
        call = relax.Call(literal(relax.op.exp, tensor("a", 2, 4)), [x])
        return builder.emit(call)

    before = built(body, tensor("x", 2, 4))
    after = outline(before)
    assert set(functions(after)) == {"main", "main_cc_0"}
    # The builder gives such a literal a variable; a tree that never met a builder has none.
    x, result = tensor("x", 2, 4), tensor("r", 2, 4)
    call = relax.Call(literal(relax.op.exp, tensor("a", 2, 4)), [x])
    block = relax.BindingBlock([relax.VarBinding(result, call)])
    function = relax.Function([x], relax.SeqExpr([block], result), result.ty, True)
    raw = tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
    tvm.ir.assert_structural_equal(OutlineCompilerFunctions()(raw), after)


# Where literals stand.


def test_a_closure_gets_its_variables_and_symbols_as_parameters():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor(("n", 4), "float32"), s: R.Tensor((4,), "float32")):
            n = T.int64()
            w = R.exp(x)

            @R.function
            def inner(a: R.Tensor((n, 4), "float32")) -> R.Tensor((n, 4), "float32"):
                R.func_attr({"Codegen": "cc", "Inline": True})
                b = R.add(a, w)
                return b

            @R.function
            def wide(a: R.Tensor((4,), "float32")) -> R.Tensor((n, 4), "float32"):
                R.func_attr({"Codegen": "cc"})
                b = R.broadcast_to(a, R.shape([n, 4]))
                return b

            y = inner(x)
            z = wide(s)
            return y, z

    @I.ir_module
    class Expected:
        @R.function
        def main_cc_0(
            a: R.Tensor(("n", 4), "float32"), w: R.Tensor(("n", 4), "float32")
        ) -> R.Tensor(("n", 4), "float32"):
            R.func_attr({"Codegen": "cc", "Inline": True})
            b = R.add(a, w)
            return b

        @R.function
        def main_cc_1(a: R.Tensor((4,), "float32"), symbols: R.Shape(["n"])) -> R.Tensor(
            ("n", 4), "float32"
        ):
            R.func_attr({"Codegen": "cc"})
            n = T.int64()
            b = R.broadcast_to(a, R.shape([n, 4]))
            return b

        @R.function
        def main(x: R.Tensor(("n", 4), "float32"), s: R.Tensor((4,), "float32")):
            n = T.int64()
            cls = Expected
            w = R.exp(x)
            y = cls.main_cc_0(x, w)
            z = cls.main_cc_1(s, R.shape([n]))
            return y, z

    tvm.ir.assert_structural_equal(outline(Before), Expected)


def test_symbols_that_no_parameter_defines_come_in_one_shape():
    @I.ir_module
    class Before:
        @R.function
        def main(
            x: R.Tensor(("n", 4), "float32"),
            y: R.Tensor(("n + 1", 4), "float32"),
            z: R.Tensor("float32", ndim=1),
        ):
            n = T.int64()
            k = T.int64()
            known = R.match_cast(z, R.Tensor((k,), "float32"))

            @R.function
            def one(a: R.Tensor((n + 1, 4), "float32")) -> R.Tensor((n + 1, 4), "float32"):
                R.func_attr({"Codegen": "cc"})
                b = R.add(a, R.sum(known))
                return b

            @R.function
            def two(a: R.Tensor((n + 1, 4), "float32")) -> R.Tensor((n + k, 4), "float32"):
                R.func_attr({"Codegen": "cc"})
                b = R.zeros(R.shape([n + k, 4]), "float32")
                return b

            r = one(y)
            q = two(y)
            return r, q

    after = outline(Before)
    names = [[param.name for param in after[f"main_cc_{i}"].params] for i in range(2)]
    assert names == [["a", "known", "symbols"], ["a", "symbols"]]
    assert [len(after[f"main_cc_{i}"].params[-1].ty.values) for i in range(2)] == [1, 2]
    vm = relax.VirtualMachine(tvm.compile(after, "llvm"), tvm.cpu())
    x, y, z = (np.ones(shape, "float32") for shape in ((2, 4), (3, 4), (5,)))
    r, q = vm["main"](*map(tvm.runtime.tensor, (x, y, z)))
    np.testing.assert_array_equal(r.numpy(), np.full((3, 4), 6))
    assert q.shape == (7, 4)


def test_a_literal_in_a_dataflow_block_is_outlined_with_what_the_block_hides():
    def body(builder, x):
        hidden = builder.emit(relax.op.exp(x), "hidden")
        inside = literal(lambda a: relax.op.add(a, hidden), tensor("a", 2, 4))
        return builder.emit(relax.Call(builder.emit(inside), [x]))

    after = outline(built(body, tensor("x", 2, 4), dataflow=True))
    assert [param.name for param in after["main_cc_0"].params] == ["a", "hidden"]
    (block,) = after["main"].body.blocks
    assert isinstance(block, relax.DataflowBlock)
    assert [type(one.var) for one in block.bindings[:-1]] == [relax.DataflowVar] * 2


def test_a_literal_that_leaves_its_dataflow_block_takes_its_variables_along():
    builder = relax.BlockBuilder()
    x = tensor("x", 2, 4)
    with builder.function("main", [x]):
        with builder.dataflow():
            hidden = builder.emit(relax.op.exp(x), "hidden")
            inside = literal(lambda a: relax.op.add(a, hidden), tensor("a", 2, 4))
            closure = builder.emit_output(inside)
        builder.emit_func_output(builder.emit(relax.Call(closure, [x])))
    after = outline(builder.get())
    (call,) = [b.value for b in after["main"].body.blocks[-1].bindings]
    assert call.op.name_hint == "main_cc_0"
    assert len(call.args) == 2


def test_literals_in_branches_are_outlined():
    @I.ir_module
    class Before:
        @R.function
        def main(c: R.Tensor((), "bool"), x: R.Tensor(("n", 4), "float32")):
            n = T.int64()
            if c:

                @R.function
                def double(a: R.Tensor((n, 4), "float32")) -> R.Tensor((n, 4), "float32"):
                    R.func_attr({"Codegen": "cc"})
                    b = R.add(a, a)
                    return b

                r = double(x)
            else:

                @R.function
                def square(a: R.Tensor((n, 4), "float32")) -> R.Tensor((n, 4), "float32"):
                    R.func_attr({"Codegen": "dd"})
                    b = R.multiply(a, x)
                    return b

                r = square(x)
            return r

    after = outline(Before)
    assert set(functions(after)) == {"main", "main_cc_0", "main_dd_0"}
    assert not literals(after["main"])
    assert [len(after[name].params) for name in ("main_cc_0", "main_dd_0")] == [1, 2]
    assert set(functions(outline(Before, "dd"))) == {"main", "main_dd_0"}


def test_nested_literals_are_outlined_and_what_is_around_them_stays():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor(("n", 4), "float32")):
            n = T.int64()

            @R.function
            def around(a: R.Tensor((n, 4), "float32")) -> R.Tensor((n, 4), "float32"):
                @R.function
                def outer(b: R.Tensor((n, 4), "float32")) -> R.Tensor((n, 4), "float32"):
                    R.func_attr({"Codegen": "cc"})

                    @R.function
                    def inner(c: R.Tensor((n, 4), "float32")) -> R.Tensor((n, 4), "float32"):
                        R.func_attr({"Codegen": "dd"})
                        d = R.add(c, a)
                        return d

                    e = inner(b)
                    return e

                f = outer(a)
                return f

            g = around(x)
            return g

    after = outline(Before)
    assert set(functions(after)) == {"main", "main_cc_0", "main_dd_0"}
    (around,) = literals(after["main"])
    assert "Codegen" not in around.attrs
    (binding,) = after["main_cc_0"].body.blocks[0].bindings
    assert binding.value.op.name_hint == "main_dd_0"
    assert len(after["main_cc_0"].params) == 2, "what the inner one captured goes through"


def test_a_closure_that_is_used_as_a_value_stays_callable():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor(("n", 4), "float32")):
            n = T.int64()

            @R.function
            def inner(a: R.Tensor((n, 4), "float32")) -> R.Tensor((n, 4), "float32"):
                R.func_attr({"Codegen": "cc"})
                b = R.add(a, x)
                return b

            other = inner
            y = other(x)
            pair = (inner, y)
            return pair

    after = outline(Before)
    (wrapper,) = literals(after["main"])
    assert not wrapper.attrs
    executable = tvm.compile(relax.transform.LambdaLift()(after), "llvm")
    vm = relax.VirtualMachine(executable, tvm.cpu())
    value = np.arange(12, dtype="float32").reshape(3, 4)
    closure, y = vm["main"](tvm.runtime.tensor(value))
    np.testing.assert_array_equal(y.numpy(), 2 * value)
    np.testing.assert_array_equal(vm.invoke_closure(closure, y).numpy(), 3 * value)


# What is shared.


def test_equal_functions_are_shared_across_callers_and_with_the_module():
    @I.ir_module
    class Before:
        @R.function
        def known(a: R.Tensor(("m", 4), "float32")) -> R.Tensor(("m", 4), "float32"):
            R.func_attr({"Codegen": "cc"})
            b = R.exp(a)
            return b

        @R.function
        def one(x: R.Tensor(("n", 4), "float32")):
            n = T.int64()

            @R.function
            def f(a: R.Tensor((n, 4), "float32")) -> R.Tensor((n, 4), "float32"):
                R.func_attr({"Codegen": "cc"})
                b = R.exp(a)
                return b

            @R.function
            def g(a: R.Tensor((n, 4), "float32")) -> R.Tensor((n, 4), "float32"):
                R.func_attr({"Codegen": "cc"})
                b = R.tanh(a)
                return b

            y = f(x)
            z = g(y)
            return z

        @R.function
        def two(x: R.Tensor(("k", 4), "float32")):
            k = T.int64()

            @R.function
            def h(q: R.Tensor((k, 4), "float32")) -> R.Tensor((k, 4), "float32"):
                R.func_attr({"Codegen": "cc"})
                r = R.tanh(q)
                return r

            y = h(x)
            return y

    after = outline(Before)
    assert set(functions(after)) == {"known", "one", "two", "one_cc_0"}
    assert [b.value.op.name_hint for b in after["one"].body.blocks[0].bindings] == [
        "known",
        "one_cc_0",
    ]
    assert after["two"].body.blocks[0].bindings[0].value.op.name_hint == "one_cc_0"


def test_constants_decide_whether_functions_are_equal():
    values = [np.full(5000, v, "float32") for v in (1, 1, 2)]
    values.append(values[0].copy())
    values[-1][2500] = 7  # where no sample of it is taken

    def body(builder, x):
        for value in values:
            inside = literal(
                lambda a, value=value: relax.op.add(a, relax.const(value)), tensor("a", 5000)
            )
            x = builder.emit(relax.Call(builder.emit(inside), [x]))
        return x

    after = outline(built(body, tensor("x", 5000)))
    assert set(functions(after)) == {"main", "main_cc_0", "main_cc_1", "main_cc_2"}
    callees = [b.value.op.name_hint for b in after["main"].body.blocks[0].bindings]
    assert callees == ["main_cc_0", "main_cc_0", "main_cc_1", "main_cc_2"]


# How they are named.


def two_with_symbols(first: str, second: str, *, equal: bool) -> tvm.IRModule:
    def body(builder, x):
        for symbol, op in (
            (first, relax.op.exp),
            (second, relax.op.exp if equal else relax.op.cos),
        ):
            inside = literal(op, tensor("a", 2, 4), attrs={"global_symbol": symbol})
            x = builder.emit(relax.Call(builder.emit(inside, f"of_{symbol}"), [x]))
        return x

    return built(body, tensor("x", 2, 4))


def test_two_equal_functions_with_one_symbol_are_one():
    after = outline(two_with_symbols("f", "f", equal=True), cache=ExistingGlobalSymbols())
    assert set(functions(after)) == {"main", "f"}


def test_a_function_that_the_module_has_under_that_symbol_is_shared():
    before = two_with_symbols("f", "g", equal=False)
    once = outline(before, cache=ExistingGlobalSymbols())
    before["f"] = relax.utils.copy_with_new_vars(once["f"])
    after = outline(before, cache=ExistingGlobalSymbols())
    assert set(functions(after)) == {"main", "f", "g"}
    tvm.ir.assert_structural_equal(after["main"], once["main"], map_free_vars=True)


def test_two_equal_functions_that_keep_their_symbols_stay_two():
    after = outline(two_with_symbols("f", "g", equal=True), cache=ExistingGlobalSymbols())
    assert set(functions(after)) == {"main", "f", "g"}
    after = outline(two_with_symbols("f", "g", equal=True), cache=FreshGlobalSymbols("cc"))
    assert set(functions(after)) == {"main", "cc_0"}


@pytest.mark.parametrize("symbols", [("f", "f"), ("main", "g")], ids=["each other", "the module"])
def test_refused_different_functions_with_one_symbol(symbols: tuple[str, str]):
    module = two_with_symbols(*symbols, equal=False)
    name = "of_f1" if symbols[0] == "f" else "of_main"
    with pytest.raises(
        TransformError,
        match=rf"ExistingGlobalSymbols returned the symbol '{symbols[0]}' for the 'cc' function "
        rf"'{name}' in 'main', but a different function of the module has this symbol",
    ):
        outline(module, cache=ExistingGlobalSymbols())
    assert set(functions(outline(module, cache=FreshGlobalSymbols()))) == {
        "main",
        "main_cc_0",
        "main_cc_1",
    }


def test_refused_existing_symbols_where_there_are_none():
    module = built(
        lambda builder, x: builder.emit(
            relax.Call(builder.emit(literal(relax.op.exp, tensor("a", 2, 4)), "inner"), [x])
        ),
        tensor("x", 2, 4),
    )
    with pytest.raises(TransformError, match="'inner' in 'main' has no attribute 'global_symbol'"):
        outline(module, cache=ExistingGlobalSymbols())
    assert set(functions(outline(module))) == {"main", "main_cc_0"}


def test_fresh_names_are_free_names():
    module = two_with_symbols("f", "g", equal=False)
    module["cc_1"] = Elementwise["scaled"].with_attr("global_symbol", "cc_1")
    after = outline(module, cache=FreshGlobalSymbols("cc"))
    assert set(functions(after)) == {"main", "cc_0", "cc_1", "cc_2"}


def test_symbols_come_from_a_map():
    module = two_with_symbols("f", "g", equal=False)
    after = outline(module, cache=MappedGlobalSymbols({"f": "exponential", "g": "cosine"}))
    assert set(functions(after)) == {"main", "exponential", "cosine"}
    assert after["cosine"].attrs["global_symbol"] == "cosine"
    after = outline(module, cache=MappedGlobalSymbols({"main.of_f": "a"}, FreshGlobalSymbols("b")))
    assert set(functions(after)) == {"main", "a", "b_0"}
    with pytest.raises(TransformError, match=r"expected a key 'g' or 'main.of_g', found 'f'"):
        outline(module, cache=MappedGlobalSymbols({"f": "a"}))


def test_a_policy_of_ones_own_names_over_several_modules():
    class Numbered(GlobalSymbolCache):
        def __init__(self) -> None:
            self.sites: list[str] = []

        def symbol(self, function, site, names):
            assert function.attrs["Codegen"] == site.compiler
            self.sites.append(f"{site.function}.{site.variable}")
            return f"library_{len(self.sites)}"

        def shares(self, symbol, function, site):
            return False

    policy = Numbered()
    first = OutlineCompilerFunctions("cc", policy)(two_with_symbols("f", "g", equal=True))
    second = OutlineCompilerFunctions("cc", policy)(two_with_symbols("h", "i", equal=True))
    assert set(functions(first)) == {"main", "library_1", "library_2"}
    assert set(functions(second)) == {"main", "library_3", "library_4"}
    assert policy.sites == ["main.of_f", "main.of_g", "main.of_h", "main.of_i"]


def test_what_a_policy_raises_is_raised_and_the_module_is_as_it_was():
    class Broken(GlobalSymbolCache):
        def symbol(self, function, site, names):
            raise KeyError("no more names")

    module = two_with_symbols("f", "g", equal=False)
    with pytest.raises(KeyError, match="no more names"):
        outline(module, cache=Broken())
    tvm.ir.assert_structural_equal(module, two_with_symbols("f", "g", equal=False))


# What is left alone.


def test_functions_for_no_compiler_and_of_the_module_are_untouched():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((2, 4), "float32")):
            @R.function
            def inner(a: R.Tensor((2, 4), "float32")) -> R.Tensor((2, 4), "float32"):
                R.func_attr({"Composite": "cc.exp"})
                b = R.exp(a)
                return b

            y = inner(x)
            return y

    for module in (Before, Elementwise):
        tvm.ir.assert_structural_equal(outline(module), module)


def test_refused_a_literal_that_calls_itself():
    n, x = n_by_4("x")
    a = tensor("a", n, 4)
    ty = relax.FuncType([a.ty], a.ty)
    itself, result = relax.Var("again", ty), relax.Var("r", a.ty)
    block = relax.BindingBlock([relax.VarBinding(result, relax.Call(itself, [a]))])
    inside = relax.Function([a], relax.SeqExpr([block], result), a.ty, True)
    out = relax.Var("out", x.ty)
    bindings = [
        relax.VarBinding(itself, inside.with_attr("Codegen", "cc")),
        relax.VarBinding(out, relax.Call(itself, [x])),
    ]
    body = relax.SeqExpr([relax.BindingBlock(bindings)], out)
    module = tvm.IRModule(
        {"main": relax.Function([x], body, x.ty, True).with_attr("global_symbol", "main")}
    )
    with pytest.raises(TransformError, match="function 'again' in 'main' calls itself"):
        OutlineCompilerFunctions()(module)
