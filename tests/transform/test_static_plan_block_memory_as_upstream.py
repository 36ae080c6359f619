# SPDX-License-Identifier: Apache-2.0
"""StaticPlanBlockMemory: what TVM's tests of its pass state, and where ours does more.

The first part holds programs for which the best plan is TVM's; ours is then the same, but for the
element type of the storages, which says nothing of their size. The second part shows both plans.
"""

from __future__ import annotations

import pytest
import tvm
from tvm.relax import transform
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from tests.transform.memory_programs import bytes_storages, planned, storages
from tests.transform.script_forms import alloc, alloc_in, alloc_storage
from tvm_ipc.errors import TransformError
from tvm_ipc.transform import StaticPlanBlockMemory, collect_report

UPSTREAM = transform.StaticPlanBlockMemory()
OURS = StaticPlanBlockMemory(packed=True)
WHOLE = StaticPlanBlockMemory()


def same_plan(module: tvm.IRModule) -> None:
    expected = bytes_storages(UPSTREAM(module))
    for ours in (OURS, WHOLE):
        tvm.ir.assert_structural_equal(bytes_storages(ours(module)), expected)


def unchanged(module: tvm.IRModule) -> None:
    tvm.ir.assert_structural_equal(OURS(module), module)


def test_a_chain_with_a_reshape():
    @I.ir_module
    class Before:
        @T.prim_func(s_tir=True)
        def f(a: T.handle, b: T.handle):
            T.evaluate(0)

        @R.function
        def main(x: R.Tensor((2, 4), "float32")) -> R.Tensor((10,), "float32"):
            R.func_attr({"relax.force_pure": True})
            cls = Before
            a = alloc(2, 4)
            cls.f(x, a)
            b: R.Tensor((8,), "float32") = R.reshape(a, (8,))
            c = alloc(8)
            cls.f(b, c)
            d = alloc(8)
            cls.f(c, d)
            e = alloc(10)
            cls.f(d, e)
            out = alloc(10)
            cls.f(e, out)
            result: R.Tensor((10,), "float32") = out
            return result

    @I.ir_module
    class Expected:
        @T.prim_func(s_tir=True)
        def f(a: T.handle, b: T.handle):
            T.evaluate(0)

        @R.function
        def main(x: R.Tensor((2, 4), "float32")) -> R.Tensor((10,), "float32"):
            R.func_attr({"relax.force_pure": True})
            cls = Expected
            # Offsets would have to be multiples of 64: two storages need less.
            storage = alloc_storage(32)
            a = alloc_in(storage, 0, 2, 4)
            cls.f(x, a)
            b: R.Tensor((8,), "float32") = R.reshape(a, (8,))
            storage1 = alloc_storage(40)
            c = alloc_in(storage1, 0, 8)
            cls.f(b, c)
            d = alloc_in(storage, 0, 8)
            cls.f(c, d)
            e = alloc_in(storage1, 0, 10)
            cls.f(d, e)
            out = alloc(10)
            cls.f(e, out)
            result: R.Tensor((10,), "float32") = out
            return result

    tvm.ir.assert_structural_equal(OURS(Before), Expected)
    same_plan(Before)


def test_tuples_are_looked_into():
    @I.ir_module
    class Module:
        @T.prim_func(s_tir=True)
        def f(a: T.handle, b: T.handle):
            T.evaluate(0)

        @R.function
        def main(x: R.Tensor((6,), "float32")) -> R.Tensor((6,), "float32"):
            R.func_attr({"relax.force_pure": True})
            cls = Module
            a = alloc(6)
            cls.f(x, a)
            b = alloc(6)
            cls.f(x, b)
            inner = (a, b)
            c = alloc(6)
            cls.f(x, c)
            outer = (inner, c)
            first = outer[0]
            a1 = first[0]
            b1 = first[1]
            c1 = outer[1]
            d = alloc(6)
            cls.f(a1, d)
            e = alloc(6)
            cls.f(b1, e)
            g = alloc(6)
            cls.f(c1, g)
            return x

    same_plan(Module)
    assert storages(OURS(Module)) == {"global": [24] * 4}


def test_an_operator_that_is_not_lowered_may_keep_its_argument():
    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor((2, 3), "float32")):
            R.func_attr({"relax.force_pure": True})
            a = alloc(2, 3)
            _ = R.add(x, a)
            return x

    unchanged(Module)
    same_plan(Module)


def test_a_packed_function_does_not_keep_its_arguments():
    @I.ir_module
    class Module:
        @R.function(pure=False)
        def main(x: R.Tensor((2, 3), "float32")):
            a = alloc(2, 3)
            _ = R.call_packed("some.function", x, a, ty_args=[R.Tuple()])
            b = alloc(2, 3)
            _1 = R.call_packed("some.function", a, b, ty_args=[R.Tuple()])
            return b

    same_plan(Module)


def test_a_tensor_that_nobody_uses_and_a_parameter_that_is_reshaped():
    @I.ir_module
    class Unused:
        @R.function
        def main(x: R.Tensor((2, 3), "float32")):
            R.func_attr({"relax.force_pure": True})
            a = alloc(2, 3)  # noqa: F841
            return x

    @I.ir_module
    class Reshaped:
        @T.prim_func(s_tir=True)
        def f(a: T.handle, b: T.handle):
            T.evaluate(0)

        @R.function
        def main(x: R.Tensor((2, 6), "float32")) -> R.Tensor((12,), "float32"):
            R.func_attr({"relax.force_pure": True})
            a: R.Tensor((12,), "float32") = R.reshape(x, (12,))
            b = alloc(12)
            Reshaped.f(a, b)
            return b

    same_plan(Unused)
    same_plan(Reshaped)
    unchanged(Reshaped)


def test_functions_are_planned_one_by_one():
    @I.ir_module
    class Module:
        @T.prim_func(s_tir=True)
        def f(a: T.handle, b: T.handle):
            T.evaluate(0)

        @R.function
        def one(x: R.Tensor((8,), "float32")) -> R.Tensor((8,), "float32"):
            R.func_attr({"relax.force_pure": True})
            a = alloc(8)
            Module.f(x, a)
            b = alloc(8)
            Module.f(a, b)
            return b

        @R.function
        def two(x: R.Tensor((10,), "float32")) -> R.Tensor((10,), "float32"):
            R.func_attr({"relax.force_pure": True})
            a = alloc(10)
            Module.f(x, a)
            b = alloc(10)
            Module.f(a, b)
            return b

    same_plan(Module)


@I.ir_module
class Bounded:
    """Three tensors of 8 * n and one of 8 * n + 8 bytes, of which two are live at once."""

    @T.prim_func(s_tir=True)
    def f(a: T.handle, b: T.handle):
        T.evaluate(0)

    @R.function
    def main(x: R.Tensor((2, "n"), "float32")) -> R.Tensor(("2 * n + 2",), "float32"):
        R.func_attr({"relax.force_pure": True})
        n = T.int64()
        cls = Bounded
        a = alloc(2, n)
        cls.f(x, a)
        b: R.Tensor((2 * n,), "float32") = R.reshape(a, (2 * n,))
        c = alloc(2 * n)
        cls.f(b, c)
        d = alloc(2 * n)
        cls.f(c, d)
        e = alloc(2 * n + 2)
        cls.f(d, e)
        out = alloc(2 * n + 2)
        cls.f(e, out)
        return out


def bounded(module: tvm.IRModule, **attributes: object) -> tvm.IRModule:
    result = module.clone()
    result.update_func(module.get_global_var("main"), module["main"].with_attrs(attributes))
    return result


@pytest.mark.parametrize(
    ("attributes", "sizes"),
    [
        ({}, [8, 8, 16, 16]),
        ({"tir_var_upper_bound": {"n": 4}}, [32, 40, 16]),
        ({"tir_var_lower_bound": {"n": 2}}, [8, 8, 16, 16]),
        ({"tir_var_upper_bound": {"n": 4}, "tir_var_lower_bound": {"n": 2}}, [32, 40, 16]),
        ({"tir_var_upper_bound": {"of_another_name": 4}}, [8, 8, 16, 16]),
    ],
)
def test_extents_with_an_upper_bound_count_as_that(attributes, sizes):
    module = bounded(Bounded, **attributes)
    same_plan(module)
    assert storages(OURS(module)) == {"global": sizes}


def test_bounds_that_are_not_numbers_or_contradict_are_refused():
    for attribute in ("tir_var_upper_bound", "tir_var_lower_bound"):
        module = bounded(Bounded, **{"tir_var_upper_bound": {"n": 4}, attribute: {"n": [4]}})
        with pytest.raises(TypeError, match=rf"'main'.*'{attribute}' is .*; it must map names"):
            OURS(module)
    module = bounded(Bounded, tir_var_upper_bound={"n": 4}, tir_var_lower_bound={"n": 5})
    with pytest.raises(TransformError, match=r"'main': variable 'n' has the lower bound 5"):
        OURS(module)


def test_outputs_get_a_storage_of_their_bound_on_request():
    dynamic = {"relax.memory_plan_dynamic_func_output": True}
    module = bounded(Bounded, tir_var_upper_bound={"n": 4}, **dynamic)
    same_plan(module)
    assert storages(OURS(module)) == {"global": [32, 40, 40]}
    assert "relax.memory_plan_dynamic_func_output" not in OURS(module)["main"].attrs
    same_plan(bounded(Bounded, **dynamic))


def test_a_bound_of_one_of_two_extents():
    @I.ir_module
    class Module:
        @T.prim_func(s_tir=True)
        def fill(a: T.handle, n: T.int64, m: T.int64):
            T.evaluate(0)

        @T.prim_func(s_tir=True)
        def f(a: T.handle, b: T.handle):
            T.evaluate(0)

        @R.function
        def main(s: R.Shape(["n", "m"])) -> R.Tensor(("n", "m"), "float32"):
            n = T.int64()
            m = T.int64()
            R.func_attr(
                {
                    "tir_var_upper_bound": {"n": 20},
                    "relax.force_pure": True,
                    "relax.memory_plan_dynamic_func_output": 1,
                    "tir_non_negative_var": ["m"],
                }
            )
            cls = Module
            a = alloc(n, m)
            _: R.Tuple = R.vm.call_tir_dyn(cls.fill, (a, R.shape([n, m])))
            b = alloc(n, m)
            cls.f(a, b)
            c = alloc(n, m)
            cls.f(b, c)
            d = alloc(n, m)
            cls.f(c, d)
            return d

    same_plan(Module)
    assert storages(OURS(Module)) == {"global": [80, 80, 80]}


def test_a_dataflow_block():
    @I.ir_module
    class Module:
        @T.prim_func(s_tir=True)
        def f(a: T.handle, b: T.handle):
            T.evaluate(0)

        @R.function
        def main(x: R.Tensor((10,), "float32")) -> R.Tensor((10,), "float32"):
            cls = Module
            with R.dataflow():
                a = alloc(10)
                _: R.Tuple() = cls.f(x, a)
                out: R.Tensor((10,), "float32") = a
                R.output(out)
            return out

    unchanged(Module)
    same_plan(Module)


# What TVM's plan leaves alone, or keeps apart.


def test_more_a_condition_and_a_branch_share_a_storage():
    @I.ir_module
    class Module:
        @T.prim_func(s_tir=True)
        def f(a: T.handle, b: T.handle):
            T.evaluate(0)

        @R.function
        def main(x: R.Tensor((2, 3), "float32")) -> R.Tensor((2, 3), "float32"):
            R.func_attr({"relax.force_pure": True})
            cls = Module
            c = alloc(dtype="bool")
            cls.f(x, c)
            if c:
                y = x
            else:
                a = alloc(2, 3)
                cls.f(x, a)
                y = a  # noqa: F841
            return x

    tvm.ir.assert_structural_equal(UPSTREAM(Module), Module)
    assert storages(OURS(Module)) == {"global": [24]}


def test_more_branches_share_space_also_with_what_both_use():
    @I.ir_module
    class Module:
        @T.prim_func(s_tir=True)
        def f(a: T.handle, b: T.handle):
            T.evaluate(0)

        @R.function
        def main(c: R.Tensor((), "bool"), x: R.Tensor((16,), "float32")):
            R.func_attr({"relax.force_pure": True})
            cls = Module
            a = alloc(16)
            cls.f(x, a)
            if c:
                b = alloc(16)
                cls.f(a, b)
                y = b
            else:
                d = alloc(16)
                cls.f(a, d)
                y = d
            e = alloc(16)
            cls.f(y, e)
            return e

    tvm.ir.assert_structural_equal(UPSTREAM(Module), Module)
    # a and one of b and d; e is returned.
    assert storages(OURS(Module)) == {"global": [128, 64]}


def test_more_types_share_a_storage():
    @I.ir_module
    class Module:
        @T.prim_func(s_tir=True)
        def f(a: T.handle, b: T.handle):
            T.evaluate(0)

        @R.function
        def main(x: R.Tensor((6,), "float32"), y: R.Tensor((6,), "int32")):
            R.func_attr({"relax.force_pure": True})
            cls = Module
            a = alloc(6)
            cls.f(x, a)
            b = alloc(6, dtype="int32")
            cls.f(y, b)
            return x

    assert storages(UPSTREAM(Module)) == {"global": [24, 24]}
    assert storages(OURS(Module)) == {"global": [24]}


def test_more_views_share_a_storage_with_what_follows():
    @I.ir_module
    class Module:
        @T.prim_func(s_tir=True)
        def f(a: T.handle, b: T.handle):
            T.evaluate(0)

        @R.function
        def main():
            cls = Module
            a = alloc(16, 16)
            view = R.memory.view(a, [128], "float32", 0)
            zero = R.memory.ensure_zero_offset(view)
            b = alloc(128)
            cls.f(zero, b)
            c = alloc(64)
            cls.f(b, c)
            out = alloc(128)
            cls.f(c, out)
            return out

    # The third tensor takes a part of what the first had.
    assert storages(UPSTREAM(Module)) == {"global": [1024, 512, 512]}
    assert storages(OURS(Module)) == {"global": [1536, 512]}


def test_more_a_decreasing_extent_has_a_bound_and_two_tensors_one_storage():
    @I.ir_module
    class Module:
        @T.prim_func(s_tir=True)
        def f(a: T.handle, b: T.handle):
            T.evaluate(0)

        @R.function
        def main(x: R.Tensor(("n", "m", "T.max(n - m, 1)"), "float32")):
            n = T.int64()
            m = T.int64()
            R.func_attr({"tir_var_upper_bound": {"m": 5, "n": 20}, "relax.force_pure": True})
            cls = Module
            a: R.Tensor((n, m, T.max(n - m, 1)), "float32") = alloc(n, m, T.max(n - m, 1))
            cls.f(x, a)
            b: R.Tensor((n, m, T.max(n - m, 1)), "float32") = alloc(n, m, T.max(n - m, 1))
            cls.f(a, b)
            out: R.Tensor((n, m, T.max(n - m, 1)), "float32") = alloc(n, m, T.max(n - m, 1))
            cls.f(b, out)
            return out

    assert storages(UPSTREAM(Module))["global"][:2] == [8000, 8000]
    assert storages(OURS(Module))["global"][:1] == [16000]
    assert planned(OURS(Module)) == planned(UPSTREAM(Module))


def test_the_report_names_every_tensor():
    with collect_report() as report:
        OURS(bounded(Bounded, tir_var_upper_bound={"n": 4}))
    (plan,) = report.plans
    assert [storage.bytes for storage in plan.storages] == [32, 40]
    assert [(tensor.name, tensor.storage, tensor.size) for tensor in plan.tensors] == [
        ("a", 0, "32"),
        ("c", 1, "32"),
        ("d", 0, "32"),
        ("e", 1, "40"),
        ("out", -1, "40"),
    ]
    assert plan.lower_bound == {"global": 72}
    assert [event.text for event in plan.events][:2] == [
        "a = builtin.alloc_tensor([2, n], float32, 0, global)",
        "_ = f(x, a)",
    ]


def test_the_report_says_how_long_a_tensor_is_live():
    @I.ir_module
    class Before:
        @R.function(pure=False)
        def main(x: R.Tensor((8,), "float32")):
            free = alloc(8)
            kept = alloc(8)
            given = alloc(8)
            R.call_packed("f", x, free, ty_args=[R.Tuple()])
            R.call_packed("f", free, kept, ty_args=[R.Tuple()])
            R.call_packed("f", kept, given, ty_args=[R.Tuple()])
            R.call_builtin_with_ctx("keep", [kept], ty_args=[R.Tuple()])
            R.call_packed("f", x, x, ty_args=[R.Tuple()])
            return given

    with collect_report() as report:
        OURS(Before)
    (plan,) = report.plans
    assert [(one.name, one.storage, one.first, one.last) for one in plan.tensors] == [
        ("free", 0, 3, 4),
        ("kept", -1, 4, 7),  # to the end
        ("given", -1, 5, 7),
    ]
