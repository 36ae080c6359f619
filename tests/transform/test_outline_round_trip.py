# SPDX-License-Identifier: Apache-2.0
"""InlineCompilerFunctions: the way back from OutlineCompilerFunctions."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax.dpl import is_op, wildcard
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from tests.transform.byoc_modules import Elementwise, apply, functions, partitioned
from tvm_ipc.analysis.views_and_writes_of_calls import operator_of
from tvm_ipc.analysis.walk_and_rewrite_bindings import bindings_of
from tvm_ipc.errors import TransformError
from tvm_ipc.transform import (
    ExistingGlobalSymbols,
    InlineCompilerFunctions,
    OutlineCompilerFunctions,
)


def canonical(module: tvm.IRModule) -> tvm.IRModule:
    return relax.transform.CanonicalizeBindings()(module)


def test_bodies_with_their_composites_replace_the_calls():
    outlined = OutlineCompilerFunctions("cutlass", ExistingGlobalSymbols())(partitioned())
    (global_var,) = [v for v in outlined.get_global_vars() if "cutlass" in v.name_hint]
    for chosen in (
        InlineCompilerFunctions("cutlass"),
        InlineCompilerFunctions(functions=[global_var]),
        InlineCompilerFunctions(functions=["tvmgen_cutlass_main_0"]),
    ):
        after = apply(chosen, outlined)
        assert set(functions(after)) == {"main"}
        text = after["main"].script()
        assert "cutlass" not in text
        assert "cublas.batch_matmul" in text, "the other compiler's function is as it was"
        values = [binding.value for binding in bindings_of(after["main"].body)]
        operators = [name for name in map(operator_of, values) if name]
        assert operators == ["relax.permute_dims", "relax.matmul", "relax.add"]


def test_a_partitioned_module_comes_back_as_it_was():
    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor(("n", 8), "float32"), w: R.Tensor((8, 8), "float32")):
            n = T.int64()
            with R.dataflow():
                a: R.Tensor((n, 8), "float32") = R.matmul(x, w)
                b: R.Tensor((n, 8), "float32") = R.nn.relu(a)
                c: R.Tensor((n, 8), "float32") = R.matmul(b, w)
                d: R.Tensor((n, 8), "float32") = R.nn.relu(c)
                R.output(d)
            return d

    pattern = is_op("relax.nn.relu")(is_op("relax.matmul")(wildcard(), wildcard()))
    cut = tvm.transform.Sequential(
        [
            relax.transform.FuseOpsByPattern([("cc.matmul_relu", pattern)]),
            relax.transform.MergeCompositeFunctions(),
        ]
    )(Module)
    assert len(functions(cut)) > 1
    outlined = apply(OutlineCompilerFunctions(), cut)
    back = apply(InlineCompilerFunctions(), outlined)
    tvm.ir.assert_structural_equal(canonical(back), canonical(Module))


def test_closures_come_back_with_what_they_captured():
    @I.ir_module
    class Before:
        @R.function
        def main(c: R.Tensor((), "bool"), x: R.Tensor(("n", 4), "float32")):
            n = T.int64()
            w = R.exp(x)

            @R.function
            def inner(a: R.Tensor((4,), "float32")) -> R.Tensor((n, 4), "float32"):
                R.func_attr({"Codegen": "cc"})
                b = R.broadcast_to(a, R.shape([n, 4]))
                d = R.add(b, w)
                return d

            if c:
                r = inner(R.const([1.0, 2.0, 3.0, 4.0], "float32"))
            else:
                r = w
            return r

    @I.ir_module
    class Expected:
        @R.function
        def main(c: R.Tensor((), "bool"), x: R.Tensor(("n", 4), "float32")):
            n = T.int64()
            w = R.exp(x)
            if c:
                b = R.broadcast_to(R.const([1.0, 2.0, 3.0, 4.0], "float32"), R.shape([n, 4]))
                d = R.add(b, w)
                r = d
            else:
                r = w
            return r

    outlined = apply(OutlineCompilerFunctions(), Before)
    for module in (outlined, Before):
        after = apply(InlineCompilerFunctions(), module)
        tvm.ir.assert_structural_equal(canonical(after), canonical(Expected))


def test_shapes_that_the_caller_does_not_know_are_matched_when_it_runs():
    @I.ir_module
    class Before:
        @R.function
        def rows(a: R.Tensor(("m", 4), "float32")) -> R.Tensor(("m", 4), "float32"):
            R.func_attr({"Codegen": "cc"})
            m = T.int64()
            b = R.zeros(R.shape([m, 4]), "float32")
            c = R.add(a, b)
            return c

        @R.function
        def main(x: R.Tensor("float32", ndim=2)):
            cls = Before
            y = cls.rows(x)
            return y

    after = apply(InlineCompilerFunctions(), Before)
    vm = relax.VirtualMachine(tvm.compile(after, "llvm"), tvm.cpu())
    value = np.ones((3, 4), "float32")
    np.testing.assert_array_equal(vm["main"](tvm.runtime.tensor(value)).numpy(), value)
    with pytest.raises(Exception, match=r"match_cast|shape"):
        vm["main"](tvm.runtime.tensor(np.ones((3, 5), "float32")))


def test_a_body_with_a_branch_leaves_no_dataflow_block_around_it():
    @I.ir_module
    class Before:
        @R.function
        def chosen(c: R.Tensor((), "bool"), a: R.Tensor((4,), "float32")) -> R.Tensor(
            (4,), "float32"
        ):
            R.func_attr({"Codegen": "cc"})
            if c:
                r = R.exp(a)
            else:
                r = R.cos(a)
            return r

        @R.function
        def main(c: R.Tensor((), "bool"), x: R.Tensor((4,), "float32")):
            cls = Before
            with R.dataflow():
                y = cls.chosen(c, x)
                R.output(y)
            return y

    after = apply(InlineCompilerFunctions(), Before)
    assert set(functions(after)) == {"main"}


def test_an_entry_of_the_module_stays_and_is_for_no_compiler():
    module = tvm.IRModule({"scaled": Elementwise["scaled"]})
    after = apply(InlineCompilerFunctions(), module)
    assert set(functions(after)) == {"scaled"}
    assert dict(after["scaled"].attrs) == {"Inline": True, "global_symbol": "scaled"}


def test_other_compilers_and_modules_without_any_are_untouched():
    tvm.ir.assert_structural_equal(apply(InlineCompilerFunctions("dd"), Elementwise), Elementwise)


def test_refused_what_cannot_be_inlined():
    with pytest.raises(
        TransformError, match="the module has no function 'f'; the functions are 'main', 'sca"
    ):
        InlineCompilerFunctions(functions=["f"])(Elementwise)
    with pytest.raises(TransformError, match="'main' is for no compiler"):
        InlineCompilerFunctions(functions=["main"])(Elementwise)
    with pytest.raises(
        TransformError, match="'scaled' is for the compiler 'cc'; only functions for dd"
    ):
        InlineCompilerFunctions("dd", ["scaled"])(Elementwise)
    with pytest.raises(TypeError, match="functions is a collection of names"):
        InlineCompilerFunctions(functions="scaled")
    with pytest.raises(TypeError, match="compiler is a name or None"):
        InlineCompilerFunctions(1)


def test_refused_functions_that_call_each_other_in_a_circle():
    @I.ir_module
    class Circle:
        @R.function
        def one(a: R.Tensor((4,), "float32")) -> R.Tensor((4,), "float32"):
            R.func_attr({"Codegen": "cc"})
            cls = Circle
            b: R.Tensor((4,), "float32") = cls.two(a)
            return b

        @R.function
        def two(a: R.Tensor((4,), "float32")) -> R.Tensor((4,), "float32"):
            R.func_attr({"Codegen": "cc"})
            cls = Circle
            b: R.Tensor((4,), "float32") = cls.one(a)
            return b

    with pytest.raises(TransformError, match="call each other recursively"):
        InlineCompilerFunctions()(Circle)
