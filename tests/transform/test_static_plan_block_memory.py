# SPDX-License-Identifier: Apache-2.0
"""StaticPlanBlockMemory: one storage for many tensors, and the same results."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import transform
from tvm.script import ir as I
from tvm.script import relax as R

from tests.transform.memory_programs import planned, prepared, run, storages
from tests.transform.script_forms import alloc
from tvm_ipc.analysis.shape_algebra import ShapeAlgebra
from tvm_ipc.transform import StaticPlanBlockMemory, collect_report, plan_memory
from tvm_ipc.transform.report import FunctionPlan

UPSTREAM = transform.StaticPlanBlockMemory()
OURS = StaticPlanBlockMemory(packed=True)


def same_results(module: tvm.IRModule, *arguments: np.ndarray) -> None:
    """Run both plans; ours must give what TVM's gives, and need no more."""
    expected, given = (run(module, plan, *arguments) for plan in (UPSTREAM, OURS))
    np.testing.assert_array_equal(given, expected)
    assert planned(OURS(module)) <= planned(UPSTREAM(module))


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).random(shape, "float32")


def test_types_share_a_storage():
    @I.ir_module
    class Model:
        @R.function
        def main(x: R.Tensor((4, 64), "float32"), w: R.Tensor((64, 256), "float32")):
            with R.dataflow():
                wide = R.matmul(x, w)
                half = R.astype(wide, "float16")
                whole = R.astype(half, "float32")
                out = R.sum(whole)
                R.output(out)
            return out

    module = prepared(Model)
    # float32 4 KB, float16 2 KB, float32 4 KB; no more than two at once.
    assert storages(UPSTREAM(module)) == {"global": [4096, 2048, 4]}
    assert storages(OURS(module)) == {"global": [6144, 4]}
    same_results(module, random(4, 64), random(64, 256))


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_symbolic_sizes_are_packed_in_their_unit(rows):
    @I.ir_module
    class Model:
        @R.function
        def main(x: R.Tensor(("n", 64), "float32"), w: R.Tensor((64, 256), "float32")):
            with R.dataflow():
                wide = R.matmul(x, w)
                half = R.astype(wide, "float16")
                whole = R.astype(half, "float32")
                again = R.nn.relu(whole)
                out = R.sum(again, axis=1)
                R.output(out)
            return out

    module = prepared(Model)
    assert storages(UPSTREAM(module)) == {"global": [1024, 512, 1024, 4]}
    assert storages(OURS(module)) == {"global": [2048, 4]}
    same_results(module, random(rows, 64), random(64, 256))


def plan_of(module: tvm.IRModule, **options: int) -> FunctionPlan:
    """Return the plan of `main`."""
    with collect_report() as report:
        StaticPlanBlockMemory(packed=True, **options)(module)
    (plan,) = [plan for plan in report.plans if plan.function == "main"]
    return plan


def own_allocations(module: tvm.IRModule) -> set[str]:
    """Return the tensors of `main` that are in no storage."""
    return {tensor.name for tensor in plan_of(module).tensors if tensor.storage < 0}


@I.ir_module
class Branches:
    """A value that one branch alone reads, and results of both that live on."""

    @R.function
    def main(c: R.Tensor((), "bool"), x: R.Tensor((16, 16), "float32")):
        a = R.add(x, x)
        b = R.multiply(x, x)
        if c:
            d = R.add(a, b)
            e = R.multiply(d, a)
            y = R.add(e, d)
        else:
            f = R.multiply(b, b)
            g = R.add(f, b)
            y = R.multiply(g, f)
        z = R.add(y, y)
        return R.multiply(z, y)


@pytest.mark.parametrize("choice", [True, False])
def test_branches_on_the_machine(choice):
    module = prepared(Branches)
    x = random(16, 16)
    a, b = x + x, x * x
    y = (a + b) * a + (a + b) if choice else (b * b + b) * (b * b)
    result = run(module, OURS, np.array(choice), x)
    np.testing.assert_allclose(result, (y + y) * y, rtol=1e-5)


def test_branches_take_turns():
    module = prepared(Branches)
    # TVM plans what begins and ends in one block; a, b and both y are apart.
    assert len(storages(UPSTREAM(module))["global"]) > 4
    plan = plan_of(module)
    (storage,) = plan.storages
    # a, b and d, then a, d and e; the other branch needs b, f and g: three at once.
    assert storage.bytes == 3 * 1024 == plan.lower_bound["global"]


def test_what_one_branch_reads_is_free_in_the_other():
    @I.ir_module
    class Model:
        @R.function
        def main(c: R.Tensor((), "bool"), x: R.Tensor((16, 16), "float32")):
            a = R.add(x, x)
            if c:
                b = R.multiply(x, x)
                d = R.add(b, x)
                y = R.sum(d)
            else:
                e = R.multiply(a, a)
                y = R.sum(e)
            return y

    module = prepared(Model)
    (storage,) = plan_of(module).storages
    assert storage.bytes == 2048  # without that a, b and d at once
    x = random(16, 16)
    for choice, expected in ((True, (x * x + x).sum()), (False, (4 * x * x).sum())):
        result = run(module, OURS, np.array(choice), x)
        np.testing.assert_allclose(result, expected, rtol=1e-4)


def test_an_argument_of_a_function_of_the_module_is_followed_into_it():
    @I.ir_module
    class Model:
        @R.function(private=True)
        def reads(x: R.Tensor((64,), "float32")) -> R.Tensor((64,), "float32"):
            return R.add(x, x)

        @R.function(private=True)
        def gives_back(x: R.Tensor((64,), "float32")) -> R.Tensor((8, 8), "float32"):
            return R.reshape(x, (8, 8))

        @R.function(private=True)
        def loops(c: R.Tensor((), "bool"), x: R.Tensor((64,), "float32")) -> R.Tensor(
            (64,), "float32"
        ):
            if c:
                y = Model.loops(c, x)
            else:
                y = R.add(x, x)
            return y

        @R.function
        def main(x: R.Tensor((64,), "float32"), c: R.Tensor((), "bool")):
            cls = Model
            a = R.add(x, x)
            b = cls.reads(a)
            d = R.multiply(b, b)
            e = cls.gives_back(d)
            f = R.add(b, b)
            g = R.multiply(f, f)
            h = cls.loops(c, g)
            i = R.sum(e)
            return R.add(h, i)

    module = prepared(Model)
    plan = plan_of(module)
    at = {tensor.name: tensor for tensor in plan.tensors}
    live = [tensor for tensor in plan.tensors if tensor.storage >= 0]
    assert (
        len(live) == 4
    )  # of a, d, f, g, sum, result: not g, which a recursion has, nor the result
    assert {tensor.size for tensor in at.values() if tensor.storage < 0} == {"256"}
    x = random(64)
    result = run(module, OURS, x, np.array(False))
    expected = 2 * (2 * (2 * (x + x))) ** 2 + ((2 * (x + x)) ** 2).sum()
    np.testing.assert_allclose(result, expected, rtol=1e-4)


@tvm.register_global_func("tvm_ipc.test.itself", override=True)
def _itself(x):
    return x


def test_what_a_packed_function_returns_may_be_its_argument():
    @I.ir_module
    class Model:
        @R.function(pure=False)
        def main(x: R.Tensor((64,), "float32")):
            a = R.add(x, x)
            b = R.call_packed("tvm_ipc.test.itself", a, ty_args=R.Tensor((64,), "float32"))
            c = R.multiply(x, x)
            d = R.multiply(c, c)
            e = R.add(b, d)
            return R.sum(e)

    module = prepared(Model)
    x = random(64)
    expected = (x + x + (x * x) ** 2).sum()
    np.testing.assert_allclose(run(module, OURS, x), expected, rtol=1e-4)
    # TVM's plan gives the memory away as soon as the call has returned.
    assert not np.allclose(run(module, UPSTREAM, x), expected, rtol=1e-4)


def test_what_a_cache_is_given_is_copied():
    @I.ir_module
    class Model:
        @R.function(pure=False)
        def main(cache: R.Any, x: R.Tensor((64,), "float32")):
            a = R.add(x, x)
            appended = R.call_packed(
                "vm.builtin.attention_kv_cache_append", cache, a, ty_args=R.Any()
            )
            b = R.add(x, x)
            c = R.call_packed("some.function", b, ty_args=R.Any())
            return (appended, c)

    assert len(own_allocations(prepared(Model))) == 1  # b, which may be what c is


def test_views_of_packed_tensors():
    @I.ir_module
    class Model:
        @R.function
        def main(x: R.Tensor((8, 8), "float32")):
            a = R.add(x, x)
            b = R.multiply(a, a)
            view = R.memory.view(b, R.shape([32]), R.dtype("float32"), R.prim_value(128))
            zero = R.memory.ensure_zero_offset(view)
            c = R.add(zero, zero)
            flat = R.reshape(c, R.shape([4, 8]))
            d = R.multiply(flat, flat)
            return R.sum(d)

    module = prepared(Model)
    x = random(8, 8)
    expected = ((2 * (4 * x * x).ravel()[32:]) ** 2).sum()
    np.testing.assert_allclose(run(module, OURS, x), expected, rtol=1e-4)


def test_outputs_in_tuples_have_their_own_allocations():
    @I.ir_module
    class Model:
        @R.function
        def main(x: R.Tensor((64,), "float32")):
            with R.dataflow():
                a = R.add(x, x)
                b = R.multiply(a, a)
                pair = R.split(b, 2)
                c = pair[1]
                d = R.add(c, c)
                out = (b, (d, x))
                R.output(out)
            return out

    module = prepared(Model)
    plan = plan_of(module)
    assert sorted(tensor.bytes for tensor in plan.tensors if tensor.storage < 0) == [128, 256]


def test_a_tensor_that_a_local_function_captures_is_kept():
    @I.ir_module
    class Model:
        @R.function(pure=False)
        def main(x: R.Tensor((64,), "float32")):
            a = alloc(64)
            _ = R.call_packed("f", x, a, ty_args=[R.Tuple()])

            @R.function(pure=False)
            def inner(y: R.Tensor((64,), "float32")) -> R.Tensor((64,), "float32"):
                _1 = R.call_packed("f", y, a, ty_args=[R.Tuple()])
                return y

            b = alloc(64)
            _2 = R.call_packed("f", x, b, ty_args=[R.Tuple()])
            z = inner(b)
            return z

    assert own_allocations(Model) == {"a", "b"}


def test_other_scopes_and_other_devices_have_storages_of_their_own():
    @I.ir_module
    class Model:
        @R.function(pure=False)
        def main(x: R.Tensor((64,), "float32")):
            a = alloc(64, scope="global.vtcm")
            _ = R.call_packed("f", x, a, ty_args=[R.Tuple()])
            b = alloc(32, scope="global.vtcm")
            _1 = R.call_packed("f", a, b, ty_args=[R.Tuple()])
            c = alloc(64, scope="global.vtcm")
            _2 = R.call_packed("f", b, c, ty_args=[R.Tuple()])
            d: R.Tensor((64,), "float32") = R.builtin.alloc_tensor(
                R.shape([64]), R.dtype("float32"), 1, R.str("global")
            )
            _3 = R.call_packed("f", c, d, ty_args=[R.Tuple()])
            e = alloc(64)
            _4 = R.call_packed("f", d, e, ty_args=[R.Tuple()])
            g = alloc(8, 8, 4, scope="global.texture")
            _5 = R.call_packed("f", e, g, ty_args=[R.Tuple()])
            return x

    plan = plan_of(Model)
    # Vector memory has no addresses to add to, and a texture no size that the elements tell.
    assert [(t.name, t.storage, t.offset) for t in plan.tensors] == [
        ("a", 0, "0"),
        ("b", 1, "0"),
        ("c", 0, "0"),
        ("d", 2, "0"),
        ("e", 3, "0"),
        ("g", -1, "0"),
    ]


@pytest.mark.parametrize("alignment", [64, 256])
def test_offsets_are_aligned(alignment):
    @I.ir_module
    class Model:
        @R.function
        def main(x: R.Tensor((100, 7), "float32")):
            a = R.add(x, x)
            b = R.astype(a, "int8")
            c = R.add(a, R.astype(b, "float32"))
            return R.sum(c)

    module = prepared(Model)
    plan = plan_of(module, alignment=alignment)
    offsets = {int(tensor.offset) for tensor in plan.tensors}
    assert max(offsets) > 0
    assert all(offset % alignment == 0 for offset in offsets)
    x = random(100, 7)
    expected = (x + x + (x + x).astype("int8")).sum()
    result = run(module, StaticPlanBlockMemory(packed=True, alignment=alignment), x)
    np.testing.assert_allclose(result, expected, rtol=1e-4)


def test_tensors_without_elements():
    @I.ir_module
    class Model:
        @R.function
        def main(x: R.Tensor((0, 8), "float32"), y: R.Tensor((4,), "float32")):
            a = R.add(x, x)
            b = R.multiply(a, a)
            c = R.add(y, y)
            d = R.add(c, R.sum(b))
            return R.add(d, d)

    x, y = np.zeros((0, 8), "float32"), random(4)
    np.testing.assert_allclose(run(prepared(Model), OURS, x, y), 4 * y, rtol=1e-6)


def test_sizes_that_no_offset_suits_share_whole_storages():
    @I.ir_module
    class Model:
        @R.function
        def main(x: R.Tensor(("n",), "float32")):
            with R.dataflow():
                a = R.add(x, x)
                b = R.multiply(a, a)
                c = R.add(b, b)
                d = R.multiply(c, c)
                R.output(d)
            return d

    module = prepared(Model)
    # 4 * n bytes: an offset of 4 * n would not be aligned, one of 64 * n would cost too much.
    assert storages(OURS(module)) == storages(UPSTREAM(module)) == {"global": [4, 4, 4]}
    for rows in (0, 1, 77):
        x = random(rows)
        np.testing.assert_allclose(run(module, OURS, x), (8 * x * x) ** 2, rtol=1e-4)


def test_the_plan_can_be_asked_for_alone():
    module = prepared(Branches)
    before = module.script()
    (plan,) = plan_memory(module, packed=True)
    assert [storage.size.factor for storage in plan.storages] == [3 * 1024]
    assert module.script() == before


def test_sizes_that_are_written_differently_are_equal():
    n = tvm.tirx.Var("n", "int64")
    x = relax.Var("x", relax.TensorType((n,), "float32"))
    function = relax.Function([x], relax.SeqExpr([], x), relax.TensorType((n,), "float32"))
    sizes = ShapeAlgebra("f", function)
    quotient = tvm.tirx.Div(n * tvm.tirx.IntImm("int64", 3), tvm.tirx.IntImm("int64", 3))
    dtype = tvm.DataType("float32")
    assert sizes.of([quotient, n], dtype) == sizes.of([n, n], dtype) != sizes.of([n], dtype)


def test_one_call_object_that_is_bound_twice_makes_two_tensors():
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((64,), "float32"))
    ty = relax.TensorType((64,), "float32")
    arguments = [
        relax.ShapeExpr([64]),
        tvm.ir.GenericConst(tvm.DataType("float32"), relax.AnyType()),
        relax.prim_value(0),
        tvm.ir.StringImm("global"),
    ]
    with builder.function("main", [x], pure=False):
        alloc = builder.normalize(
            relax.Call(tvm.ir.Op.get("relax.builtin.alloc_tensor"), arguments)
        )
        kernel = relax.ExternFunc("kernel")
        a, b = relax.Var("a", ty), relax.Var("b", ty)
        for var in (a, b):
            builder.emit_normalized(relax.VarBinding(var, alloc))
        builder.emit(relax.Call(kernel, [x, a], ty_args=[tvm.ir.TupleType([])]))
        builder.emit(relax.Call(kernel, [a, b], ty_args=[tvm.ir.TupleType([])]))
        builder.emit_func_output(x)
    plan = plan_of(builder.get())
    assert [(tensor.name, tensor.offset) for tensor in plan.tensors] == [("a", "0"), ("b", "256")]
