# SPDX-License-Identifier: Apache-2.0
"""LowerExternCalls: outputs become arguments, with the shapes that the arguments imply."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import tvm
import tvm_ffi
from byoc_modules import Elementwise, apply, functions
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import tvm_ipc
from tvm_ipc.errors import TransformError
from tvm_ipc.transform import (
    LowerExternCalls,
    LowerGPUIPCAllocStorage,
    MarkCompilerFunctionsAsExtern,
    PlanMemoryScopes,
    script,
)

ALLOC_TENSOR = tvm.ir.Op.get("relax.builtin.alloc_tensor")
TO_CALLS = tvm.transform.Sequential(
    [
        relax.transform.LegalizeOps(),
        relax.transform.ToNonDataflow(),
        relax.transform.RemovePurityChecking(),
        relax.transform.CallTIRRewrite(),
    ]
)


def declared(module: tvm.IRModule, **attrs: list[object]) -> tvm.IRModule:
    """The module with its functions for `cc` declared; attributes go to all of them."""
    result = module.clone()
    for global_var, function in module.functions_items():
        if isinstance(function, relax.Function) and "Codegen" in function.attrs:
            for name, value in attrs.items():
                function = function.with_attr(f"tvm_ipc.{name}", value)
            result[global_var] = function
    return apply(MarkCompilerFunctionsAsExtern("cc"), result)


def lowered_calls(module: tvm.IRModule, name: str = "main") -> list[str]:
    """The calls of packed functions and the allocations of a function, one text for each."""
    names: dict[relax.Var, str] = {}

    def named(value: object) -> str:
        if not isinstance(value, relax.Var):
            return str(value)
        base = value.name.rstrip("0123456789")
        free = (f"{base}{number or ''}" for number in itertools.count())
        return names.setdefault(value, next(one for one in free if one not in names.values()))

    texts = []
    for block in module[name].body.blocks:
        for binding in block.bindings:
            value = binding.value
            if not isinstance(value, relax.Call):
                continue
            if isinstance(value.op, relax.ExternFunc):
                texts.append(f"{value.op.global_symbol}({', '.join(map(named, value.args))})")
            elif value.op == ALLOC_TENSOR:
                extents = [getattr(one, "name", one) for one in value.args[0].values]
                shape = ", ".join(one if isinstance(one, str) else str(int(one)) for one in extents)
                texts.append(f"{named(binding.var)} = alloc ({shape}) {value.args[3].value}")
    return texts


@pytest.fixture
def register(request: pytest.FixtureRequest) -> Callable[..., None]:
    def put(name: str, function: Callable[..., None]) -> None:
        tvm_ffi.register_global_func(name, function, override=True)
        request.addfinalizer(lambda: tvm_ffi.registry.remove_global_func(name))

    return put


def run(module: tvm.IRModule, *arguments: np.ndarray):
    vm = relax.VirtualMachine(tvm.compile(module, "llvm"), tvm.cpu())
    return vm["main"](*map(tvm.runtime.tensor, arguments))


# The two forms of a call.


def test_in_a_pure_function_the_call_stays_pure():
    @I.ir_module
    class Expected:
        scaled = R.ExternFunc("scaled")

        @R.function
        def main(x: R.Tensor(("n", 4), "float32"), w: R.Tensor((4,), "float32")) -> R.Tensor(
            ("n", 4), "float32"
        ):
            n = T.int64()
            with R.dataflow():
                y: R.Tensor((n, 4), "float32") = R.exp(x)
                z = R.call_dps_packed("scaled", (y, w), out_ty=R.Tensor((n, 4), "float32"))
                r: R.Tensor((n, 4), "float32") = R.add(z, x)
                R.output(r)
            return r

    after = apply(LowerExternCalls(), declared(Elementwise))
    tvm.ir.assert_structural_equal(after, Expected)


def test_where_outputs_are_allocated_already_the_call_gets_its_own():
    early = TO_CALLS(apply(LowerExternCalls(), declared(Elementwise)))
    late = apply(LowerExternCalls(), TO_CALLS(declared(Elementwise)))
    tvm.ir.assert_structural_equal(late, early)
    assert "scaled(y, w, alloc1)" in lowered_calls(early)


def test_a_module_without_declarations_is_untouched():
    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor((4,), "float32")):
            y = R.call_pure_packed("other", x, ty_args=(R.Tensor((4,), "float32"),))
            return y

    module = Module.clone()
    module[tvm.ir.GlobalVar("other")] = relax.ExternFunc("other")
    for one in (Module, module, Elementwise):
        assert apply(LowerExternCalls(), one).same_as(one)


# Shapes.


@I.ir_module
class Shapes:
    """Outputs whose shapes come from tensors, from a shape, and from both."""

    @R.function
    def grow(a: R.Tensor(("m", 4), "float32"), s: R.Shape(["k"])) -> R.Tuple(
        R.Tensor(("m * k", 4), "float32"),
        R.Tuple(R.Tensor(("m + k",), "int64"), R.Tensor(("m", 4), "float32")),
    ):
        R.func_attr({"Codegen": "cc"})
        m = T.int64()
        k = T.int64()
        b = R.zeros(R.shape([m * k, 4]), "float32")
        c = R.zeros(R.shape([m + k]), "int64")
        return (b, (c, a))

    @R.function
    def main(x: R.Tensor(("n", 4), "float32")):
        n = T.int64()
        cls = Shapes
        y = cls.grow(x, R.shape([n + 1]))
        inside = y[1]
        one = y[0]
        two = inside[0]
        three = inside[1]
        return (one, two, three)


@pytest.mark.parametrize("late", [False, True])
def test_outputs_of_nested_tuples_follow_from_shapes(register, late: bool):
    def grow(a, shape, out, counts, copy):
        assert list(shape) == [a.shape[0] + 1]
        assert list(out.shape) == [a.shape[0] * shape[0], 4]
        assert list(counts.shape) == [a.shape[0] + shape[0]]
        out.copyfrom(np.full(out.shape, 3, "float32"))
        counts.copyfrom(np.arange(counts.shape[0]))
        copy.copyfrom(a.numpy())

    register("grow", grow)
    module = declared(Shapes)
    if late:
        module = TO_CALLS(module)
    after = apply(LowerExternCalls(), module)
    for rows in (0, 1, 5):
        value = np.random.rand(rows, 4).astype("float32")
        one, two, three = run(after, value)
        np.testing.assert_array_equal(one.numpy(), np.full((rows * (rows + 1), 4), 3))
        np.testing.assert_array_equal(two.numpy(), np.arange(2 * rows + 1))
        np.testing.assert_array_equal(three.numpy(), value)


@I.ir_module
class Unknown:
    """The caller knows less than the signature."""

    @R.function
    def twice(a: R.Tensor(("m", 4), "float32")) -> R.Tensor(("2 * m", 4), "float32"):
        R.func_attr({"Codegen": "cc"})
        b = R.concat([a, a], axis=0)
        return b

    @R.function
    def main(x: R.Tensor("float32", ndim=2)):
        cls = Unknown
        y = cls.twice(x)
        return y


def test_extents_that_the_caller_does_not_know_are_found_and_checked_when_it_runs(register):
    register("twice", lambda a, out: out.copyfrom(np.concatenate([a.numpy()] * 2)))
    after = apply(LowerExternCalls(), declared(Unknown))
    assert any(
        isinstance(binding, relax.MatchCast)
        for block in after["main"].body.blocks
        for binding in block.bindings
    )
    value = np.random.rand(3, 4).astype("float32")
    np.testing.assert_array_equal(run(after, value).numpy(), np.concatenate([value, value]))
    with pytest.raises(Exception, match=r"match|shape"):
        run(after, np.zeros((3, 5), "float32"))


def test_calls_in_branches_and_local_functions_are_lowered(register):
    @I.ir_module
    class Module:
        @R.function
        def negated(a: R.Tensor(("m",), "float32")) -> R.Tensor(("m",), "float32"):
            R.func_attr({"Codegen": "cc"})
            b = R.negative(a)
            return b

        @R.function
        def main(c: R.Tensor((), "bool"), x: R.Tensor(("n",), "float32")):
            n = T.int64()
            cls = Module

            @R.function
            def local(y: R.Tensor((n,), "float32")) -> R.Tensor((n,), "float32"):
                z = cls.negated(y)
                return z

            if c:
                r = cls.negated(x)
            else:
                r = local(x)
            return r

    register("negated", lambda a, out: out.copyfrom(-a.numpy()))
    after = relax.transform.LambdaLift()(apply(LowerExternCalls(), declared(Module)))
    value = np.arange(3, dtype="float32")
    for condition in (True, False):
        np.testing.assert_array_equal(run(after, np.array(condition), value).numpy(), -value)


@pytest.mark.parametrize("late", [False, True])
def test_tuples_are_arguments_and_there_may_be_none(register, late: bool):
    @I.ir_module
    class Module:
        @R.function
        def total(
            p: R.Tuple(R.Tensor(("m",), "float32"), R.Tensor(("k",), "float32")),
        ) -> R.Tensor(("m + k",), "float32"):
            R.func_attr({"Codegen": "cc"})
            a = p[0]
            b = p[1]
            c = R.concat([a, b])
            return c

        @R.function
        def ones() -> R.Tensor((3,), "float32"):
            R.func_attr({"Codegen": "cc"})
            a = R.ones(R.shape([3]), "float32")
            return a

        @R.function
        def main(p: R.Tuple(R.Tensor(("n",), "float32"), R.Tensor("float32", ndim=1))):
            cls = Module
            a = cls.ones()
            b = cls.total(p)
            c = cls.total((a, b))
            return c

    def total(pair, out):
        out.copyfrom(np.concatenate([one.numpy() for one in pair]))

    register("total", total)
    register("ones", lambda out: out.copyfrom(np.ones(3, "float32")))
    module = declared(Module)
    after = apply(LowerExternCalls(), TO_CALLS(module) if late else module)
    one, two = np.random.rand(2).astype("float32"), np.random.rand(4).astype("float32")
    vm = relax.VirtualMachine(tvm.compile(after, "llvm"), tvm.cpu())
    result = vm["main"]([tvm.runtime.tensor(one), tvm.runtime.tensor(two)])
    np.testing.assert_array_equal(result.numpy(), np.concatenate([np.ones(3), one, two]))


# What is refused.


def refused(result: object, *params: object) -> str:
    """The message about a call of a declaration with these types."""
    x = relax.Var("x", relax.TensorType([T.Var("n", "int64"), 4], "float32"))
    ty = relax.FuncType([x.ty, *params], result)
    declaration = relax.ExternFunc("f", ty).with_attr("tvm_ipc.extern", True)
    global_var = tvm.ir.GlobalVar("f")
    relax.expr._update_type(global_var, ty)
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        builder.emit_func_output(builder.emit(relax.Call(global_var, [x])))
    module = builder.get()
    module[global_var] = declaration
    with pytest.raises(TransformError, match="function 'main' calls the extern 'f'") as caught:
        LowerExternCalls()(module)
    return str(caught.value)


def test_refused_outputs_whose_shape_depends_on_data():
    assert "its shape depends on data" in refused(relax.TensorType(dtype="float32", ndim=2))
    assert "output 1 is" in refused(
        relax.TupleType(
            [relax.TensorType([4], "float32"), relax.TensorType(dtype="float32", ndim=1)]
        )
    )


def test_refused_outputs_whose_shape_no_parameter_defines():
    result = relax.TensorType([T.Var("unknown", "int64")], "float32")
    assert "depends on unknown, which no parameter defines" in refused(result)


def test_refused_outputs_that_are_no_tensors():
    assert "it is no tensor" in refused(relax.ShapeType(ndim=2))


def test_refused_outputs_of_unknown_element_type():
    assert "its element type is unknown" in refused(relax.TensorType([4], None))


def test_refused_a_declaration_that_is_used_as_a_value():
    builder = relax.BlockBuilder()
    module = declared(Elementwise)
    global_var = module.get_global_var("scaled")
    x = relax.Var("x", relax.TensorType([4], "float32"))
    with builder.function("other", [x]):
        builder.emit_func_output(builder.emit(relax.Tuple([x, global_var])))
    module[tvm.ir.GlobalVar("other")] = builder.get()["other"]
    with pytest.raises(TransformError, match="'other' uses the extern 'scaled' as a value"):
        apply(LowerExternCalls(), module)


# Outputs in place.


@I.ir_module
class InPlace:
    @R.function
    def bump(a: R.Tensor(("m",), "float32"), b: R.Tensor(("m",), "float32")) -> R.Tuple(
        R.Tensor(("m",), "float32"), R.Tensor(("m",), "float32")
    ):
        R.func_attr({"Codegen": "cc"})
        c = R.add(a, b)
        d = R.subtract(a, b)
        return (c, d)

    @R.function
    def main(x: R.Tensor(("n",), "float32")):
        cls = InPlace
        dead = R.exp(x)
        kept = R.exp(dead)
        first = cls.bump(dead, kept)
        one = first[0]
        second = cls.bump(x, kept)
        two = second[0]
        third = cls.bump(kept, x)
        three = third[0]
        four = third[1]
        return (one, two, three, four, kept)


def bump(a, b, difference):
    """The sum is in place of `a`."""
    one, two = a.numpy(), b.numpy()
    difference.copyfrom(one - two)
    a.copyfrom(one + two)


@pytest.mark.parametrize("late", [False, True])
def test_an_output_overwrites_what_nobody_looks_at_again_and_a_copy_of_the_rest(register, late):
    register("bump", bump)
    module = declared(InPlace, inplace_outputs=[0, -1])
    if late:
        module = TO_CALLS(module)
    after = apply(LowerExternCalls(), module)
    copies = [text for text in lowered_calls(after) if text.startswith("tvm_ipc.copy")]
    copied = [text.split("(")[1].split(",")[0] for text in copies]
    # Before outputs are allocated nothing is known of `dead`, so that is copied too.
    assert copied == (["x", "kept"] if late else ["dead", "x", "kept"])
    value = np.random.rand(5).astype("float32")
    one, two, three, four, kept = (result.numpy() for result in run(after, value))
    exp, expexp = np.exp(value), np.exp(np.exp(value))
    np.testing.assert_allclose(one, exp + expexp, rtol=1e-5)
    np.testing.assert_allclose(two, value + expexp, rtol=1e-5)
    np.testing.assert_allclose(three, expexp + value, rtol=1e-5)
    np.testing.assert_allclose(four, expexp - value, rtol=1e-5)
    np.testing.assert_allclose(kept, expexp, rtol=1e-5)


def test_a_chain_in_place_uses_one_buffer(register):
    @I.ir_module
    class Chain:
        @R.function
        def negated(a: R.Tensor(("m",), "float32")) -> R.Tensor(("m",), "float32"):
            R.func_attr({"Codegen": "cc"})
            b = R.negative(a)
            return b

        @R.function
        def main(x: R.Tensor(("n",), "float32")):
            cls = Chain
            y = R.exp(x)
            a = cls.negated(y)
            b = cls.negated(a)
            c = cls.negated(b)
            return c

    register("negated", lambda a: a.copyfrom(-a.numpy()))
    after = apply(LowerExternCalls(), TO_CALLS(declared(Chain, inplace_outputs=[0])))
    assert [t for t in lowered_calls(after) if "alloc" in t and "=" in t] == [
        "alloc = alloc (n) global"
    ]
    value = np.random.rand(5).astype("float32")
    np.testing.assert_allclose(run(after, value).numpy(), -np.exp(value), rtol=1e-5)


def test_what_a_tuple_a_view_or_a_branch_holds_is_not_overwritten(register):
    @I.ir_module
    class Held:
        @R.function
        def negated(a: R.Tensor(("m",), "float32")) -> R.Tensor(("m",), "float32"):
            R.func_attr({"Codegen": "cc"})
            b = R.negative(a)
            return b

        @R.function
        def main(c: R.Tensor((), "bool"), x: R.Tensor((4,), "float32")):
            cls = Held
            y = R.exp(x)
            pair = (y, x)
            a = cls.negated(y)
            z = R.exp(a)
            view = R.reshape(z, R.shape([2, 2]))
            b = cls.negated(z)
            w = R.exp(b)
            if c:
                d = cls.negated(w)
                e = R.add(d, w)
            else:
                e = w
            return (pair, view, e)

    register("negated", lambda a: a.copyfrom(-a.numpy()))
    after = apply(LowerExternCalls(), TO_CALLS(declared(Held, inplace_outputs=[0])))
    value = np.random.rand(4).astype("float32")
    for condition in (True, False):
        pair, view, e = run(after, np.array(condition), value)
        exp = np.exp(value)
        np.testing.assert_allclose(pair[0].numpy(), exp, rtol=1e-5)
        np.testing.assert_allclose(view.numpy().ravel(), np.exp(-exp), rtol=1e-5)
        last = np.exp(-np.exp(-exp))
        np.testing.assert_allclose(e.numpy(), 0 * last if condition else last, atol=1e-5)


SHARED = {
    "one argument twice, of which it overwrites the first": (
        [0, -1],
        """
        a = R.exp(x)
        r = cls.bump(a, a)
        """,
        ["a"],
    ),
    "one argument twice, of which it overwrites both": (
        [0, 1],
        """
        a = R.exp(x)
        r = cls.bump(a, a)
        """,
        ["a"],
    ),
    "what a packed function has returned, read later": (
        [0, -1],
        """
        a = R.exp(x)
        y = R.call_packed("last", x, a, ty_args=(R.Tensor((4,), "float32"),))
        one = cls.bump(a, x)
        r = (one, y)
        """,
        ["a"],
    ),
    "what a packed function has returned, overwritten": (
        [0, -1],
        """
        y = R.call_packed("last", x, ty_args=(R.Tensor((4,), "float32"),))
        r = cls.bump(y, x)
        """,
        ["y"],
    ),
    "what a function of the module has returned": (
        [0, -1],
        """
        a = R.exp(x)
        y = cls.same(a)
        one = cls.bump(a, x)
        two = cls.bump(y, x)
        r = (one, two)
        """,
        ["a"],
    ),
    "a view beside what it views": (
        [0, -1],
        """
        a = R.exp(x)
        v = R.memory.view(a, R.shape([2, 2]))
        w = R.memory.view(v, R.shape([4]))
        r = cls.bump(a, w)
        """,
        ["a"],
    ),
    "what one of two branches returns": (
        [0, -1],
        """
        a = R.exp(x)
        if c:
            b = a
        else:
            b = x
        one = cls.bump(a, x)
        r = (one, b)
        """,
        ["a"],
    ),
    "a field of a tuple": (
        [0, -1],
        """
        a = R.exp(x)
        p = (x, (a, a))
        q = p[1]
        b = q[0]
        d = R.match_cast(q[1], R.Tensor((4,), "float32"))
        r = cls.bump(b, d)
        """,
        ["b"],
    ),
    "nothing but itself": (
        [0, 1],
        """
        a = R.exp(x)
        b = R.exp(a)
        p = (a, b)
        d = p[0]
        e = R.match_cast(b, R.Tensor((4,), "float32"))
        r = cls.bump(d, e)
        """,
        [],
    ),
}


@pytest.mark.parametrize("name", SHARED)
def test_what_may_be_the_same_memory_is_copied(register, name: str):
    inplace, body, copied = SHARED[name]
    module = tvm.script.from_source(
        f"""
@I.ir_module
class Module:
    @R.function
    def bump(a: R.Tensor((4,), "float32"), b: R.Tensor((4,), "float32")) -> R.Tuple(
        R.Tensor((4,), "float32"), R.Tensor((4,), "float32")
    ):
        R.func_attr({{"Codegen": "cc"}})
        c = R.add(a, b)
        d = R.subtract(a, b)
        return (c, d)

    @R.function(private=True)
    def same(a: R.Tensor((4,), "float32")) -> R.Tensor((4,), "float32"):
        return a

    @R.function(pure=False)
    def main(c: R.Tensor((), "bool"), x: R.Tensor((4,), "float32")):
        cls = Module{body}
        return r
"""
    )

    def overwriting(*given):
        params = given[:2]
        values = [one.numpy() for one in params]
        for index in (one for one in inplace if one != -1):
            values[index] = params[index].numpy()
            params[index].copyfrom(np.full(4, np.nan, "float32"))
        values = [
            values[index] if index in inplace else one.numpy() for index, one in enumerate(params)
        ]
        places = [params[0], given[-1] if inplace[1] == -1 else params[1]]
        for place, value in zip(
            places, (values[0] + values[1], values[0] - values[1]), strict=True
        ):
            place.copyfrom(value)

    def flat(result):
        if isinstance(result, tvm.runtime.Tensor):
            return [result.numpy()]
        return [one for part in result for one in flat(part)]

    register("last", lambda *given: given[-1])
    value = np.random.rand(4).astype("float32")
    results = []
    for attrs, bump in (({}, plain), ({"inplace_outputs": inplace}, overwriting)):
        register("bump", bump)
        after = apply(LowerExternCalls(), TO_CALLS(declared(module, **attrs)))
        results.append(flat(run(after, np.array(True), value)))
    np.testing.assert_allclose(results[1], results[0], rtol=1e-5)
    copies = [text for text in lowered_calls(after) if text.startswith("tvm_ipc.copy")]
    assert [text.split("(")[1].split(",")[0] for text in copies] == copied


def plain(a, b, total, difference):
    total.copyfrom(a.numpy() + b.numpy())
    difference.copyfrom(a.numpy() - b.numpy())


# Memory scopes.


def test_scopes_of_outputs_and_arguments_hold_at_every_call():
    module = TO_CALLS(
        declared(Elementwise, argument_scopes=["ipc_memory", ""], output_scopes=["ipc_memory"])
    )
    after = apply(LowerExternCalls(), module)
    assert lowered_calls(after) == [
        "alloc = alloc (n, 4) global",
        "alloc1 = alloc (n, 4) ipc_memory",
        "tvm_ipc.copy(y, alloc1)",
        "alloc2 = alloc (n, 4) ipc_memory",
        "scaled(alloc1, w, alloc2)",
        "alloc3 = alloc (n, 4) global",
    ]
    (callee,) = [
        binding.value.op
        for binding in after["main"].body.blocks[0].bindings
        if isinstance(binding.value, relax.Call)
        and isinstance(binding.value.op, relax.ExternFunc)
        and binding.value.op.global_symbol == "scaled"
    ]
    assert list(callee.attrs["tvm_ipc.scopes"]) == ["ipc_memory", "", "ipc_memory"]


def test_the_solver_makes_arguments_in_their_scopes():
    module = TO_CALLS(
        declared(Elementwise, argument_scopes=["ipc_memory", ""], output_scopes=["ipc_memory"])
    )
    lowered = apply(LowerExternCalls(place_arguments=False), module)
    assert not any("copy" in text for text in lowered_calls(lowered))
    after = apply(PlanMemoryScopes(), lowered)
    assert lowered_calls(after) == [
        "alloc = alloc (n, 4) ipc_memory",
        "alloc1 = alloc (n, 4) ipc_memory",
        "scaled(y, w, alloc1)",
        "alloc2 = alloc (n, 4) global",
    ]


def test_what_a_call_only_reads_is_copied_there_and_not_back():
    @I.ir_module
    class Module:
        @R.function
        def negated(a: R.Tensor((4,), "float32")) -> R.Tensor((4,), "float32"):
            R.func_attr({"Codegen": "cc"})
            b = R.negative(a)
            return b

        @R.function
        def main(x: R.Tensor((4,), "float32")):
            cls = Module
            z = cls.negated(x)
            return z

    module = TO_CALLS(declared(Module, argument_scopes=["ipc_memory"]))
    after = apply(PlanMemoryScopes(), LowerExternCalls(place_arguments=False)(module))
    assert lowered_calls(after) == [
        "alloc = alloc (4) global",
        "x_ipc = alloc (4) ipc_memory",
        "tvm_ipc.copy(x, x_ipc)",
        "negated(x_ipc, alloc)",
    ]


def test_refused_by_the_solver_scopes_that_nobody_knows():
    module = TO_CALLS(declared(Elementwise, argument_scopes=["global.nowhere", ""]))
    lowered = apply(LowerExternCalls(place_arguments=False), module)
    with pytest.raises(TransformError, match=r"global\.nowhere"):
        PlanMemoryScopes()(lowered)


def test_an_argument_that_is_in_its_scope_is_not_copied():
    @I.ir_module
    class Module:
        @R.function
        def negated(a: R.Tensor(("m",), "float32")) -> R.Tensor(("m",), "float32"):
            R.func_attr({"Codegen": "cc"})
            b = R.negative(a)
            return b

        @R.function(pure=False)
        def main(x: R.Tensor((4,), "float32")):
            cls = Module
            y = R.builtin.alloc_tensor(
                R.shape([4]), R.dtype("float32"), R.prim_value(0), R.str("ipc_memory")
            )
            _ = R.call_packed("fill", x, y)
            z = cls.negated(y)
            return z

    after = apply(LowerExternCalls(), declared(Module, argument_scopes=["ipc_memory"]))
    assert lowered_calls(after) == [
        "y = alloc (4) ipc_memory",
        "fill(x, y)",
        "alloc = alloc (4) global",
        "negated(y, alloc)",
    ]


def test_scopes_work_when_the_program_runs(register):
    register("scaled", lambda a, b, out: out.copyfrom(a.numpy() * b.numpy()))
    module = TO_CALLS(
        declared(Elementwise, argument_scopes=["ipc_memory", ""], output_scopes=["ipc_memory"])
    )
    module = LowerGPUIPCAllocStorage()(apply(LowerExternCalls(), module))
    x, w = np.random.rand(3, 4).astype("float32"), np.random.rand(4).astype("float32")
    with tvm_ipc.Session(2, threads=True) as session:
        main = session.load_vm_module(tvm.compile(module, "llvm"))["main"]
        result = session.get(main(session.put(x), session.put(w)), rank=1)
    np.testing.assert_allclose(result, np.exp(x) * w + x, rtol=1e-5)


def test_outputs_are_allocated_on_their_virtual_device():
    device = relax.VDevice("llvm", 1, "global")
    x = relax.Var("x", relax.TensorType([4], "float32", device))
    ty = relax.FuncType([x.ty], x.ty)
    global_var = tvm.ir.GlobalVar("f")
    relax.expr._update_type(global_var, ty)
    builder = relax.BlockBuilder()
    with builder.function("main", [x], pure=False):
        builder.emit_func_output(builder.emit(relax.Call(global_var, [x])))
    module = builder.get()
    module[global_var] = relax.ExternFunc("f", ty).with_attr("tvm_ipc.extern", True)
    module.update_global_info("vdevice", [relax.VDevice("llvm", 0, "global"), device])
    after = LowerExternCalls()(module)
    (alloc, *_) = after["main"].body.blocks[0].bindings
    assert int(alloc.value.args[2].value) == 1


# How it is read.


def test_a_module_with_declarations_can_be_printed():
    text = script(declared(Elementwise))
    assert text.startswith("# scaled: R.Callable((R.Tensor((m, 4), dtype=")
    assert 'scaled = R.ExternFunc("scaled")' in text
    assert "cls.scaled(y, w)" in text
    assert script(Elementwise) == Elementwise.script()
    assert set(functions(Elementwise)) == {"scaled", "main"}
