# SPDX-License-Identifier: Apache-2.0
"""Where PlanMemoryScopes copies: once, of what was last written, and where it runs least often."""

from __future__ import annotations

import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from tests.transform.scope_programs import copies, plan, scopes
from tests.transform.script_forms import F8, alloc, custom_allreduce
from tvm_ipc.analysis.walk_and_rewrite_bindings import bindings_of


def test_a_copy_is_shared():
    @I.ir_module
    class Before:
        @R.function(pure=False)
        def main(p: F8):
            y = alloc(8)
            _ = custom_allreduce(p, y)
            q = p
            _ = custom_allreduce(q, y)
            return R.tuple()

    assert copies(plan(Before)["main"]) == [("p", "p_ipc")]


def test_a_value_that_is_written_in_between_is_copied_again():
    @I.ir_module
    class Before:
        @T.prim_func(private=True)
        def f(a: T.Buffer((8,), "float32")):
            for i in range(8):
                a[i] = a[i] + T.float32(1)

        @R.function(pure=False)
        def main(p: F8, y: F8):
            cls = Before
            _ = custom_allreduce(p, y)
            cls.f(p)
            _ = custom_allreduce(p, y)
            return R.tuple()

    assert copies(plan(Before)["main"]) == [("p", "p_ipc"), ("p", "p_ipc")]


def test_a_value_that_a_local_function_writes_is_copied_again():
    @I.ir_module
    class Before:
        @T.prim_func(private=True)
        def f(a: T.Buffer((8,), "float32")):
            for i in range(8):
                a[i] = a[i] + T.float32(1)

        @R.function(pure=False)
        def main(p: F8, y: F8):
            cls = Before

            @R.function(pure=False)
            def step() -> R.Tuple():
                cls.f(p)
                return R.tuple()

            _ = custom_allreduce(p, y)
            step()
            _ = custom_allreduce(p, y)
            return R.tuple()

    assert copies(plan(Before)["main"]) == [("p", "p_ipc"), ("p", "p_ipc")]


@pytest.mark.parametrize(
    "other",
    [
        "q",
        'R.call_packed("last", p, ty_args=(R.Tensor((8,), "float32"),))',
        'R.call_pure_packed("last", p, ty_args=(R.Tensor((8,), "float32"),))',
        'R.match_cast(R.call_packed("last", p), R.Tensor((8,), "float32"))',
    ],
    ids=["a caller passes one tensor twice", "packed", "pure", "cast"],
)
def test_what_is_written_by_another_name_is_copied_again(other: str):
    before = tvm.script.from_source(
        f"""
@I.ir_module
class Before:
    @R.function(pure=False)
    def main(p: R.Tensor((8,), "float32"), q: R.Tensor((8,), "float32")):
        y = R.builtin.alloc_tensor(
            R.shape([8]), R.dtype("float32"), R.prim_value(0), R.str("global")
        )
        o = {other}
        _ = R.call_packed("runtime.disco.cuda_ipc.custom_allreduce", p, R.prim_value(1), y)
        _1 = R.call_packed("clear", o)
        _2 = R.call_packed("runtime.disco.cuda_ipc.custom_allreduce", p, R.prim_value(1), y)
        return R.tuple()
"""
    )
    assert len(copies(plan(before)["main"])) == 2


@pytest.mark.parametrize(("other", "found"), [("q", 1), ("p", 2), ("r", 2)])
def test_callers_say_whether_two_parameters_may_be_one_tensor(other: str, found: int):
    """`twice` needs a copy of `x`, which its write of `y` ends if that may be the same memory."""
    before = tvm.script.from_source(
        f"""
@I.ir_module
class Before:
    @R.function(pure=False, private=True)
    def twice(
        x: R.Tensor((8,), "float32"), y: R.Tensor((8,), "float32"), z: R.Tensor((8,), "float32")
    ):
        _ = R.call_packed("runtime.disco.cuda_ipc.custom_allreduce", x, R.prim_value(1), z)
        _1 = R.call_packed("clear", y)
        _2 = R.call_packed("runtime.disco.cuda_ipc.custom_allreduce", x, R.prim_value(1), z)
        _3 = R.call_packed("clear", x)
        return R.tuple()

    @R.function(pure=False)
    def main(c: R.Tensor((), "bool"), p: R.Tensor((8,), "float32")):
        cls = Before
        q = R.builtin.alloc_tensor(
            R.shape([8]), R.dtype("float32"), R.prim_value(0), R.str("global")
        )
        z = R.builtin.alloc_tensor(
            R.shape([8]), R.dtype("float32"), R.prim_value(0), R.str("global")
        )
        if c:
            r = p
        else:
            r = q
        cls.twice(p, {other}, z)
        return R.tuple()
"""
    )
    after = plan(before)
    assert len(copies(after["twice"])) == found and not copies(after["main"])


def test_what_a_function_that_calls_itself_writes_is_copied_again():
    """Through the third parameter, into which the second one comes with the next call."""

    @I.ir_module
    class Before:
        @R.function(pure=False, private=True)
        def again(c: R.Tensor((), "bool"), x: F8, y: F8) -> R.Tuple():
            cls = Before
            _ = R.call_packed("clear", y)
            if c:
                r: R.Tuple() = cls.again(c, x, x)
            else:
                r: R.Tuple() = R.tuple()
            return r

        @R.function(pure=False)
        def main(c: R.Tensor((), "bool"), p: F8, y: F8):
            cls = Before
            q = alloc(8)
            _ = custom_allreduce(p, y)
            cls.again(c, p, q)
            _1 = custom_allreduce(p, q)
            return R.tuple()

    assert len(copies(plan(Before)["main"])) == 2


def test_what_is_written_last_is_copied_again_for_the_result():
    @I.ir_module
    class Before:
        @R.function(pure=False, private=True)
        def receive():
            y = alloc(8)
            x = R.call_packed("theirs.receive", ty_args=(F8,))
            _ = custom_allreduce(x, y)
            _1 = R.call_packed("clear", x)
            return x

        @R.function(pure=False)
        def main():
            cls = Before
            y = alloc(8)
            x = cls.receive()
            _ = custom_allreduce(x, y)
            x1 = cls.receive()
            _1 = custom_allreduce(x1, y)
            return R.tuple()

    after = plan(Before)
    assert copies(after["receive"]) == [("x", "x_ipc"), ("x", "x_ipc")]
    assert not copies(after["main"])


def test_a_kernel_that_only_reads_does_not_end_a_copy():
    @I.ir_module
    class Before:
        @T.prim_func(private=True)
        def f(a: T.Buffer((8,), "float32"), b: T.Buffer((8,), "float32")):
            for i in range(8):
                b[i] = a[i]

        @R.function(pure=False)
        def main(p: F8):
            cls = Before
            y = alloc(8)
            _ = custom_allreduce(p, y)
            cls.f(p, y)
            _ = custom_allreduce(p, y)
            return R.tuple()

    assert copies(plan(Before)["main"]) == [("p", "p_ipc")]


def test_a_constant_of_several_functions_is_no_memory_that_they_share():
    """Each function copies it at its own place, though the module holds it once."""
    constant = relax.const([1.0, 2.0], "float32")
    functions = {}
    for name in ("one", "other"):
        y = relax.Var("y", constant.ty)
        args = [constant, relax.prim_value(1), y]
        call = relax.Call(
            relax.ExternFunc("runtime.disco.cuda_ipc.custom_allreduce"),
            args,
            ty_args=[relax.AnyType()],
        )
        pairs = [(relax.Var("_", relax.AnyType()), call) for _ in range(2)]
        block = relax.BindingBlock([relax.VarBinding(*pair) for pair in pairs])
        function = relax.Function([y], relax.SeqExpr([block], y), y.ty, is_pure=False)
        functions[name] = function.with_attr("global_symbol", name)
    after = plan(relax.transform.Normalize()(tvm.IRModule(functions)))
    assert copies(after["one"]) == copies(after["other"]) == [("const", "const_ipc")]


def test_a_view_copies_no_more_than_it_shows():
    @I.ir_module
    class Before:
        @R.function(pure=False)
        def main(p: F8, y: R.Tensor((2,), "float32")):
            v = R.memory.view(p, R.shape([2]), R.dtype("float32"), R.prim_value(8))
            _ = custom_allreduce(v, y)
            return R.tuple()

    assert copies(plan(Before)["main"]) == [("v", "v_ipc")]


def test_one_branch_copies_inside_it():
    @I.ir_module
    class Before:
        @R.function(pure=False)
        def main(c: R.Tensor((), "bool"), p: F8, y: F8):
            if c:
                _ = custom_allreduce(p, y)
                r = R.tuple()
            else:
                r = R.tuple()
            return r

    @I.ir_module
    class Expected:
        @R.function(pure=False)
        def main(c: R.Tensor((), "bool"), p: F8, y: F8):
            if c:
                p_ipc = alloc(8, scope="ipc_memory")
                _c: R.Any = R.call_packed("tvm_ipc.copy", p, p_ipc, ty_args=(R.Any,))
                _ = R.call_packed(
                    "runtime.disco.cuda_ipc.custom_allreduce", p_ipc, R.prim_value(1), y
                )
                r = R.tuple()
            else:
                r = R.tuple()
            return r

    tvm.ir.assert_structural_equal(plan(Before), Expected)


def test_a_branch_and_what_follows_it_share_a_copy_before_it():
    """Inside and behind it would run one and a half times as often."""

    @I.ir_module
    class Before:
        @R.function(pure=False)
        def main(c: R.Tensor((), "bool"), p: F8):
            y = alloc(8)
            if c:
                _ = custom_allreduce(p, y)
                _r = R.tuple()
            else:
                _r = R.tuple()
            _ = custom_allreduce(p, y)
            return R.tuple()

    function = plan(Before)["main"]
    assert copies(function) == [("p", "p_ipc")]
    names = [str(binding.var.name) for binding in bindings_of(function.body)]
    assert names[1:4] == ["p_ipc", "_", "_r"]


def test_a_write_in_a_branch_keeps_the_copies_apart():
    @I.ir_module
    class Before:
        @T.prim_func(private=True)
        def f(a: T.Buffer((8,), "float32")):
            for i in range(8):
                a[i] = a[i] + T.float32(1)

        @R.function(pure=False)
        def main(c: R.Tensor((), "bool"), p: F8, y: F8):
            cls = Before
            if c:
                cls.f(p)
                _ = custom_allreduce(p, y)
                _r = R.tuple()
            else:
                _r = R.tuple()
            _ = custom_allreduce(p, y)
            return R.tuple()

    function = plan(Before)["main"]
    assert copies(function) == [("p", "p_ipc"), ("p", "p_ipc")]


def test_the_larger_demand_decides_where_the_tensor_lies():
    """Three kernels need one scope, one the other: one copy, not three."""

    @I.ir_module
    class Before:
        @T.prim_func(private=True)
        def write(a: T.Buffer((8,), "float32")):
            for i in range(8):
                a[i] = T.float32(i)

        @T.prim_func(private=True)
        def read(
            a: T.Buffer((8,), "float32", scope="global.texture"), y: T.Buffer((8,), "float32")
        ):
            for i in range(8):
                y[i] = a[i]

        @T.prim_func(private=True)
        def change(a: T.Buffer((8,), "float32", scope="global.vtcm"), y: T.Buffer((8,), "float32")):
            for i in range(8):
                y[i] = a[i]
                a[i] = y[i]

        @R.function(pure=False)
        def main(y: F8):
            cls = Before
            x = alloc(8)
            cls.write(x)
            cls.read(x, y)
            cls.change(x, y)
            cls.change(x, y)
            return R.tuple()

    function = plan(Before)["main"]
    assert scopes(function) == {"x": "global.vtcm", "x_texture": "global.texture"}
    assert copies(function) == [("x", "x_texture")]


def test_the_smaller_of_two_tensors_is_copied():
    """The first demand is for a view of 8 bytes, the second for all 32."""

    @I.ir_module
    class Before:
        @T.prim_func(private=True)
        def write(a: T.Buffer((8,), "float32", scope="global.vtcm")):
            for i in range(8):
                a[i] = T.float32(i)

        @R.function(pure=False)
        def main(y: R.Tensor((2,), "float32")):
            cls = Before
            x = alloc(8)
            v = R.memory.view(x, R.shape([2]), R.dtype("float32"), R.prim_value(8))
            _ = custom_allreduce(v, y)
            cls.write(x)
            return R.tuple()

    function = plan(Before)["main"]
    assert scopes(function) == {"x": "global.vtcm", "v_ipc": "ipc_memory"}
    assert copies(function) == [("v", "v_ipc")]


def test_what_is_written_in_another_scope_is_copied_back():
    @I.ir_module
    class Before:
        @T.prim_func(private=True)
        def change(a: T.Buffer((8,), "float32", scope="global.vtcm")):
            for i in range(8):
                a[i] = a[i] + T.float32(1)

        @R.function(pure=False)
        def main(p: F8):
            cls = Before
            cls.change(p)
            return R.tuple()

    assert copies(plan(Before)["main"]) == [("p", "p_vtcm"), ("p_vtcm", "p")]


def test_an_output_that_holds_nothing_yet_is_not_copied_in():
    @I.ir_module
    class Before:
        @T.prim_func(private=True)
        def write(a: T.Buffer((8,), "float32", scope="global.vtcm")):
            for i in range(8):
                a[i] = T.float32(i)

        @R.function(pure=False)
        def main() -> F8:
            cls = Before
            x = alloc(8, scope="ipc_memory")
            cls.write(x)
            return x

    assert copies(plan(Before)["main"]) == [("x_vtcm", "x"), ("x", "x_global")]


def test_fields_of_a_returned_tuple_are_copied_alone():
    @I.ir_module
    class Before:
        @R.function(pure=False)
        def main(p: F8, y: F8):
            x = alloc(8, scope="ipc_memory")
            t = (p, x)
            return t

    @I.ir_module
    class Expected:
        @R.function(pure=False)
        def main(p: F8, y: F8):
            x = alloc(8, scope="ipc_memory")
            t = (p, x)
            x_global = alloc(8)
            _c: R.Any = R.call_packed("tvm_ipc.copy", x, x_global, ty_args=(R.Any,))
            field = t[0]
            result = (field, x_global)
            return result

    tvm.ir.assert_structural_equal(plan(Before), Expected)


def test_the_result_of_a_function_that_must_be_global_is_copied_for_each_caller():
    @I.ir_module
    class Before:
        @R.function(pure=False, private=True)
        def pick(c: R.Tensor((), "bool"), p: F8, q: F8) -> F8:
            if c:
                r = p
            else:
                r = q
            return r

        @R.function(pure=False)
        def main(c: R.Tensor((), "bool"), p: F8, y: F8):
            cls = Before
            x = cls.pick(c, p, p)
            _ = custom_allreduce(x, y)
            return R.tuple()

    after = plan(Before)
    assert sum(len(copies(after[name])) for name in ("pick", "main")) == 1
    tvm.ir.assert_structural_equal(plan(after), after)


def test_a_tensor_of_unknown_extents_is_measured_first():
    @I.ir_module
    class Before:
        @R.function(pure=False)
        def main(p: R.Tensor(ndim=2, dtype="float32"), y: F8):
            _ = custom_allreduce(p, y)
            return R.tuple()

    @I.ir_module
    class Expected:
        @R.function(pure=False)
        def main(p: R.Tensor(ndim=2, dtype="float32"), y: F8):
            m = T.int64()
            n = T.int64()
            sized = R.match_cast(p, R.Tensor((m, n), "float32"))
            p_ipc = alloc(m, n, scope="ipc_memory")
            _c: R.Any = R.call_packed("tvm_ipc.copy", sized, p_ipc, ty_args=(R.Any,))
            _ = custom_allreduce(p_ipc, y)
            return R.tuple()

    tvm.ir.assert_structural_equal(plan(Before), Expected, map_free_vars=True)
