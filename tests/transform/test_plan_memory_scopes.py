# SPDX-License-Identifier: Apache-2.0
"""PlanMemoryScopes: scopes flow out of PrimFuncs, into them, and through everything in between."""

from __future__ import annotations

import pytest
import tvm
import tvm_ffi
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from tests.transform.scope_programs import copies, names_in, plan, reported, scopes
from tests.transform.script_forms import F8, alloc, custom_allreduce
from tvm_ipc.transform import EraseMemoryScopes

A = "global.texture"


# What TVM's PlanDevices did with the scopes of lowered functions, in Relax.


def test_scopes_flow_out_of_a_primfunc_and_into_it_and_a_clash_is_copied():
    """`a` takes the scope of its parameter, `b` brings its own, `c` and the result clash."""

    @I.ir_module
    class Before:
        @T.prim_func(private=True)
        def gem(
            a: T.Buffer((8, 8), "float32", scope="global.texture"),
            b: T.Buffer((8, 8), "float32"),
            c: T.Buffer((8, 8), "float32", scope="global.vtcm"),
            d: T.Buffer((8, 8), "float32", scope="global.texture"),
        ):
            for i, j in T.grid(8, 8):
                d[i, j] = a[i, j] * b[j, i] + c[i, j]

        @R.function(pure=False)
        def outer(
            a: R.Tensor((8, 8), "float32"),
            b: R.Tensor((8, 8), "float32"),
            c: R.Tensor((8, 8), "float32"),
        ):
            R.func_attr(
                {"tvm_ipc.param_scopes": ["global.texture", "global.vtcm", "global.texture"]}
            )
            cls = Before
            d = alloc(8, 8, scope="global.vtcm")
            cls.gem(a, b, c, d)
            return R.tuple()

    @I.ir_module
    class Expected:
        @T.prim_func(private=True)
        def gem_vtcm(
            a: T.Buffer((8, 8), "float32", scope="global.texture"),
            b: T.Buffer((8, 8), "float32", scope="global.vtcm"),
            c: T.Buffer((8, 8), "float32", scope="global.vtcm"),
            d: T.Buffer((8, 8), "float32", scope="global.texture"),
        ):
            for i, j in T.grid(8, 8):
                d[i, j] = a[i, j] * b[j, i] + c[i, j]

        @R.function(pure=False)
        def outer(
            a: R.Tensor((8, 8), "float32"),
            b: R.Tensor((8, 8), "float32"),
            c: R.Tensor((8, 8), "float32"),
        ):
            R.func_attr(
                {"tvm_ipc.param_scopes": ["global.texture", "global.vtcm", "global.texture"]}
            )
            cls = Expected
            d = alloc(8, 8, scope="global.vtcm")
            c_vtcm = alloc(8, 8, scope="global.vtcm")
            _c: R.Any = R.call_packed("tvm_ipc.copy", c, c_vtcm, ty_args=(R.Any,))
            d_texture = alloc(8, 8, scope="global.texture")
            cls.gem_vtcm(a, b, c_vtcm, d_texture)
            _d: R.Any = R.call_packed("tvm_ipc.copy", d_texture, d, ty_args=(R.Any,))
            return R.tuple()

    after, report = reported(Before)
    tvm.ir.assert_structural_equal(after, Expected)
    verdicts = {(d.subject, d.verdict) for d in report.decisions}
    assert verdicts == {("c", "copied"), ("d", "copied"), ("gem_vtcm", "specialised")}
    tvm.ir.assert_structural_equal(plan(after), after)


def test_refused_to_specialise_because_a_pointer_leaves_the_primfunc():
    """A copy in a scope that the code knows stands in for the specialisation."""

    @I.ir_module(check_well_formed=False)
    class Before:
        @T.prim_func(private=True, check_well_formed=False)
        def f(a: T.Buffer((8,), "float32"), b: T.Buffer((8,), "float32")):
            T.evaluate(T.call_extern("void", "read", a.data))
            for i in range(8):
                b[i] = a[i]

        @R.function(pure=False)
        def main(a: F8, b: F8):
            R.func_attr({"tvm_ipc.param_scopes": ["global.texture", "global.texture"]})
            cls = Before
            cls.f(a, b)
            return R.tuple()

    after, report = reported(Before)
    assert copies(after["main"]) == [("a", "a_global"), ("a_global", "a")]
    assert [str(p.ty.storage_scope) for p in after["f_texture"].params] == ["global", A]
    reasons = [d.reason for d in report.decisions if d.verdict == "copied"]
    assert "not specialised: parameter 0 of 'f' has its pointer passed to" in reasons[0]


def test_all_names_of_a_buffer_take_its_scope():
    @I.ir_module
    class Before:
        @T.prim_func(private=True, s_tir=True)
        def f(a: T.Buffer((8, 8), "float32"), b: T.Buffer((8, 8), "float32")):
            for i, j in T.grid(8, 8):
                with T.sblock("b"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    row = T.match_buffer(b[vi, 0:8], (8,), offset_factor=1)
                    row[vj] = a[vi, vj]

        @R.function(pure=False)
        def main(a: R.Tensor((8, 8), "float32"), b: R.Tensor((8, 8), "float32")):
            R.func_attr({"tvm_ipc.param_scopes": ["", "global.texture"]})
            cls = Before
            cls.f(a, b)
            return R.tuple()

    found = names_in(plan(Before)["f_texture"])
    assert found == {"a": "global", "b": "global.texture", "row": "global.texture"}


def test_pointers_and_the_buffers_declared_of_them_take_the_scope():
    @I.ir_module(check_well_formed=False)
    class Before:
        @T.prim_func(private=True, check_well_formed=False)
        def f(a: T.Buffer((8, 8), "float32"), b: T.Buffer((8, 8), "float32")):
            p: T.let[T.handle("float32")] = a.data
            flat = T.decl_buffer((64,), "float32", data=p)
            for i, j in T.grid(8, 8):
                b[i, j] = flat[i * 8 + j]

        @R.function(pure=False)
        def main(a: R.Tensor((8, 8), "float32"), b: R.Tensor((8, 8), "float32")):
            R.func_attr({"tvm_ipc.param_scopes": ["global.texture", ""]})
            cls = Before
            cls.f(a, b)
            return R.tuple()

    function = plan(Before)["f_texture"]
    found = names_in(function)
    assert found == dict.fromkeys(["a", "p", "flat"], "global.texture") | {"b": "global"}
    pointers = []

    def visit(call) -> None:
        if isinstance(call.ty, tvm.ir.PointerType):
            pointers.append(str(call.ty.storage_scope))

    tvm_ffi.structural_walk(function.body, [(tvm.ir.Call, visit)])
    assert pointers == ["global.texture"], "a pointer is in the scope of what it points to"


def test_one_specialisation_serves_equal_demands():
    @I.ir_module
    class Before:
        @T.prim_func(private=True)
        def f(a: T.Buffer((8,), "float32"), b: T.Buffer((8,), "float32")):
            for i in range(8):
                b[i] = a[i]

        @R.function(pure=False)
        def main(a: F8, b: F8, c: F8):
            R.func_attr({"tvm_ipc.param_scopes": ["global.texture", "global.vtcm", ""]})
            cls = Before
            cls.f(a, c)
            cls.f(b, c)
            cls.f(a, c)
            cls.f(c, c)
            return R.tuple()

    after = plan(Before)
    names = {g.name_hint for g in after.get_global_vars()}
    assert names == {"main", "f", "f_texture", "f_vtcm"}
    called = [str(b.value.op.name_hint) for b in after["main"].body.blocks[0].bindings]
    assert called == ["f_texture", "f_vtcm", "f_texture", "f"]


def test_a_specialisation_has_a_name_of_its_own():
    @I.ir_module
    class Before:
        @T.prim_func(private=True)
        def f(a: T.Buffer((8,), "float32"), b: T.Buffer((8,), "float32")):
            for i in range(8):
                b[i] = a[i]

        @T.prim_func(private=True)
        def f_texture(a: T.Buffer((8,), "float32")):
            for i in range(8):
                a[i] = T.float32(0)

        @T.prim_func(private=True)
        def f_texture_1(a: T.Buffer((8,), "float32")):
            for i in range(8):
                a[i] = T.float32(1)

        @R.function(pure=False)
        def main(a: F8, b: F8):
            R.func_attr({"tvm_ipc.param_scopes": ["global.texture", ""]})
            cls = Before
            cls.f_texture(b)
            cls.f_texture_1(b)
            cls.f(a, b)
            return R.tuple()

    after = plan(Before)
    called = [str(b.value.op.name_hint) for b in after["main"].body.blocks[0].bindings]
    assert called == ["f_texture", "f_texture_1", "f_texture_2"]
    tvm.ir.assert_structural_equal(after["f_texture"], Before["f_texture"])


def test_a_scope_that_code_must_know_flows_through_ifs_to_the_code():
    @I.ir_module
    class Before:
        @T.prim_func(private=True)
        def f(a: T.Buffer((8,), "float32"), b: T.Buffer((8,), "float32")):
            for i in range(8):
                b[i] = a[i]

        @R.function(pure=False)
        def main(c: R.Tensor((), "bool"), p: F8, q: F8):
            R.func_attr({"tvm_ipc.param_scopes": ["", "global.texture", "global.texture"]})
            cls = Before
            y = alloc(8)
            if c:
                r = p
            else:
                r = q
            if c:
                s = r
            else:
                s = r
            cls.f(s, y)
            return R.tuple()

    after = plan(Before)
    assert not copies(after["main"])
    assert [str(p.ty.storage_scope) for p in after["f_texture"].params] == [A, "global"]


def test_a_primfunc_that_pins_global_gets_global():
    @I.ir_module
    class Before:
        @T.prim_func(private=True)
        def f(a: T.Buffer((8,), "float32"), b: T.Buffer((8,), "float32")):
            T.func_attr({"tvm_ipc.param_scopes": ["global", ""]})
            for i in range(8):
                b[i] = a[i]

        @R.function(pure=False)
        def main(a: F8, b: F8):
            R.func_attr({"tvm_ipc.param_scopes": ["ipc_memory", "ipc_memory"]})
            cls = Before
            cls.f(a, b)
            return R.tuple()

    assert copies(plan(Before)["main"]) == [("a", "a_global")]


def test_transparent_scopes_flow_in_on_request():
    @I.ir_module
    class Before:
        @T.prim_func(private=True)
        def f(a: T.Buffer((8,), "float32"), b: T.Buffer((8,), "float32")):
            for i in range(8):
                b[i] = a[i]

        @R.function(pure=False)
        def main(a: F8, b: F8):
            R.func_attr({"tvm_ipc.param_scopes": ["ipc_memory", ""]})
            cls = Before
            cls.f(a, b)
            return R.tuple()

    assert plan(Before).same_as(Before)
    after = plan(Before, specialise_transparent=True)
    assert [str(p.ty.storage_scope) for p in after["f_ipc"].params] == ["ipc_memory", "global"]
    erased = EraseMemoryScopes()(after)
    assert [str(p.ty.storage_scope) for p in erased["f_ipc"].params] == ["global", "global"]
    tvm.ir.assert_structural_equal(erased["f_ipc"], Before["f"])


# Through everything that stands between a demand and an allocation.


@pytest.mark.parametrize("kind", ["let", "tuple", "match_cast", "view", "nested tuple"])
def test_a_scope_is_found_through(kind):
    @I.ir_module
    class Before:
        @T.prim_func(private=True)
        def f(a: T.Buffer((8,), "float32")):
            for i in range(8):
                a[i] = T.float32(i)

        @R.function(pure=False)
        def let(y: F8):
            cls = Before
            x = alloc(8)
            cls.f(x)
            x1 = x
            x2 = x1
            _ = custom_allreduce(x2, y)
            return R.tuple()

        @R.function(pure=False)
        def tuple(y: F8):
            cls = Before
            x = alloc(8)
            cls.f(x)
            t = (y, x)
            x2 = t[1]
            _ = custom_allreduce(x2, y)
            return R.tuple()

        @R.function(pure=False)
        def nested_tuple(y: F8):
            cls = Before
            x = alloc(8)
            cls.f(x)
            t = ((y, x), y)
            u = t[0]
            x2 = u[1]
            _ = custom_allreduce(x2, y)
            return R.tuple()

        @R.function(pure=False)
        def match_cast(y: F8):
            n = T.int64()
            cls = Before
            x = alloc(8)
            cls.f(x)
            x2 = R.match_cast(x, R.Tensor((n,), "float32"))
            _ = custom_allreduce(x2, y)
            return R.tuple()

        @R.function(pure=False)
        def view(y: F8):
            cls = Before
            x = alloc(8)
            cls.f(x)
            x1 = R.memory.view(x, R.shape([2, 4]))
            x2 = R.memory.ensure_zero_offset(x1)
            _ = custom_allreduce(x2, y)
            return R.tuple()

    function = plan(Before)[kind.replace(" ", "_")]
    assert scopes(function) == {"x": "ipc_memory"} and not copies(function)


def test_both_branches_of_an_if_allocate_where_its_result_must_be():
    @I.ir_module
    class Before:
        @R.function(pure=False)
        def main(c: R.Tensor((), "bool"), y: F8):
            if c:
                a = alloc(8)
                x = a
            else:
                b = alloc(8)
                x = b
            _ = custom_allreduce(x, y)
            return R.tuple()

    function = plan(Before)["main"]
    assert scopes(function) == {"a": "ipc_memory", "b": "ipc_memory"} and not copies(function)


def test_only_the_branch_that_brings_a_parameter_copies():
    @I.ir_module
    class Before:
        @R.function(pure=False)
        def main(c: R.Tensor((), "bool"), p: F8):
            y = alloc(8)
            if c:
                a = alloc(8)
                x = a
            else:
                x = p
            _ = custom_allreduce(x, y)
            return R.tuple()

    @I.ir_module
    class Expected:
        @R.function(pure=False)
        def main(c: R.Tensor((), "bool"), p: F8):
            y = alloc(8)
            if c:
                a = alloc(8, scope="ipc_memory")
                x = a
            else:
                p_ipc = alloc(8, scope="ipc_memory")
                _c: R.Any = R.call_packed("tvm_ipc.copy", p, p_ipc, ty_args=(R.Any,))
                x = p_ipc
            _ = custom_allreduce(x, y)
            return R.tuple()

    tvm.ir.assert_structural_equal(plan(Before), Expected)


def test_a_private_function_allocates_where_its_callers_need_it():
    @I.ir_module
    class Before:
        @R.function(pure=False, private=True)
        def make():
            a = alloc(8)
            return a

        @R.function(pure=False, private=True)
        def reduce(x: F8, y: F8):
            _ = custom_allreduce(x, y)
            return R.tuple()

        @R.function(pure=False)
        def main(y: F8):
            cls = Before
            x = cls.make()
            cls.reduce(x, y)
            b = alloc(8)
            cls.reduce(b, y)
            return R.tuple()

    after = plan(Before)
    assert scopes(after["make"]) == {"a": "ipc_memory"}
    assert scopes(after["main"]) == {"b": "ipc_memory"}
    assert not any(copies(after[name]) for name in ("make", "reduce", "main"))


def test_a_recursive_function_gets_its_parameter_where_it_needs_it():
    """The outermost caller copies once; the recursion would copy each time."""

    @I.ir_module
    class Before:
        @R.function(pure=False, private=True)
        def again(c: R.Tensor((), "bool"), x: F8, y: F8) -> R.Tuple():
            cls = Before
            _ = custom_allreduce(x, y)
            if c:
                r: R.Tuple() = cls.again(c, x, y)
            else:
                r: R.Tuple() = R.tuple()
            return r

        @R.function(pure=False)
        def main(c: R.Tensor((), "bool"), p: F8):
            cls = Before
            y = alloc(8)
            cls.again(c, p, y)
            return R.tuple()

    after = plan(Before)
    assert copies(after["main"]) == [("p", "p_ipc")] and not copies(after["again"])


def test_a_local_function_is_seen_through():
    @I.ir_module
    class Before:
        @R.function(pure=False)
        def main(y: F8):
            @R.function(pure=False)
            def make() -> F8:
                a = alloc(8)
                return a

            @R.function(pure=False)
            def reduce(x: F8) -> R.Tuple():
                _ = custom_allreduce(x, y)
                return R.tuple()

            x = make()
            reduce(x)
            return R.tuple()

    function = plan(Before)["main"]
    assert scopes(function) == {"a": "ipc_memory"} and not copies(function)


def test_a_function_that_is_called_from_outside_takes_and_returns_global():
    @I.ir_module
    class Before:
        @R.function(pure=False)
        def make(y: F8):
            a = alloc(8)
            _ = custom_allreduce(a, y)
            return a

        @R.function(pure=False)
        def main(y: F8):
            cls = Before
            x = cls.make(y)
            _ = custom_allreduce(x, y)
            return R.tuple()

    after = plan(Before)
    assert scopes(after["make"]) == {"a": "ipc_memory", "a_global": "global"}
    assert copies(after["make"]) == [("a", "a_global")]
    assert copies(after["main"]) == [("x_raw", "x_ipc")]
