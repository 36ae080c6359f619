# SPDX-License-Identifier: Apache-2.0
"""LowerExternCalls: outputs become arguments, with the shapes that the arguments imply."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from tests.transform.byoc_modules import Elementwise, apply, functions
from tests.transform.extern_programs import TO_CALLS, declared, lowered_calls, run
from tvm_ipc.analysis.walk_and_rewrite_bindings import bindings_of
from tvm_ipc.errors import TransformError
from tvm_ipc.transform import (
    LowerExternCalls,
    script,
)

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
    assert any(isinstance(b, relax.MatchCast) for b in bindings_of(after["main"].body))
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
    assert "it is not a tensor" in refused(relax.ShapeType(ndim=2))


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


# How it is read.


def test_a_module_with_declarations_can_be_printed():
    text = script(declared(Elementwise))
    assert text.startswith("# scaled: R.Callable((R.Tensor((m, 4), dtype=")
    assert 'scaled = R.ExternFunc("scaled")' in text
    assert "cls.scaled(y, w)" in text
    assert script(Elementwise) == Elementwise.script()
    assert set(functions(Elementwise)) == {"scaled", "main"}
