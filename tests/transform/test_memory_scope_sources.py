# SPDX-License-Identifier: Apache-2.0
"""What may demand a scope of PlanMemoryScopes, in which forms of a module, and what it refuses."""

from __future__ import annotations

import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from tests.transform.scope_programs import copies, plan, reported, scopes
from tests.transform.script_forms import F8, alloc, custom_allreduce
from tvm_ipc.analysis.views_and_writes_of_calls import operator_of
from tvm_ipc.analysis.walk_and_rewrite_bindings import calls
from tvm_ipc.errors import TransformError
from tvm_ipc.transform import (
    ANY,
    RESULT,
    ScopeRegistry,
    demand_scope,
    register_scope,
)


def test_a_packed_function_of_the_users_demands_a_scope():
    @I.ir_module
    class Before:
        @R.function(pure=False)
        def main():
            x = alloc(8)
            y = alloc(8)
            _ = R.call_packed("mine.step", x, y)
            return R.tuple()

    registry = ScopeRegistry()
    registry.register_scope("mine.fast")
    registry.demand_scope("mine.step", "mine.fast", operand=1)
    assert scopes(plan(Before, registry=registry)["main"]) == {"x": "global", "y": "mine.fast"}
    assert plan(Before).same_as(Before)  # other passes do not know of it


def test_the_result_of_a_packed_function_is_in_a_scope():
    @I.ir_module
    class Before:
        @R.function(pure=False)
        def main(y: F8):
            x = R.call_packed("mine.receive", ty_args=(F8,))
            z = R.call_packed("theirs.receive", ty_args=(F8,))
            _ = custom_allreduce(x, y)
            _1 = custom_allreduce(z, y)
            return R.tuple()

    registry = ScopeRegistry()
    registry.demand_scope("mine.receive", "ipc_memory", operand=RESULT)
    assert copies(plan(Before, registry=registry)["main"]) == [("z", "z_ipc")]


def test_a_relax_operator_demands_a_scope():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((8, 8), "float32")):
            R.func_attr({"relax.force_pure": True})
            y = R.matmul(x, x)
            return y

    registry = ScopeRegistry()
    registry.demand_scope("relax.matmul", "global.texture", operand=1)
    assert copies(plan(Before, registry=registry)["main"]) == [("x", "x_texture")]


def test_a_packed_function_is_called_in_an_operator_with_what_it_demands():
    @I.ir_module
    class Before:
        @R.function(pure=False)
        def main(p: F8, q: F8):
            x = R.call_pure_packed("mine.look", p, q, ty_args=(F8,))
            return x

    registry = ScopeRegistry()
    registry.demand_scope("mine.look", "ipc_memory", operand=1, writes=())
    main = plan(Before, registry=registry)["main"]
    assert copies(main) == [("q", "q_ipc")]
    (call,) = [call for call in calls(main) if operator_of(call) == "relax.call_pure_packed"]
    assert [str(argument.name) for argument in call.args[1:]] == ["p", "q_ipc"]


def test_an_unknown_function_gets_memory_that_it_may_read_as_global():
    @I.ir_module
    class Before:
        @R.function(pure=False)
        def main(p: F8, q: F8):
            R.func_attr({"tvm_ipc.param_scopes": ["ipc_memory", "global.texture"]})
            _ = R.call_packed("theirs.look", p, q)
            return R.tuple()

    assert copies(plan(Before)["main"]) == [("q", "q_global"), ("q_global", "q")]
    registry = ScopeRegistry()
    registry.demand_scope("theirs.look", ANY, operand=1)
    assert plan(Before, registry=registry).same_as(Before)


def test_an_allocation_keeps_the_scope_that_it_names():
    @I.ir_module
    class Before:
        @R.function(pure=False)
        def main(y: F8):
            x = alloc(8, scope="global.texture")
            _ = custom_allreduce(x, y)
            return R.tuple()

    after, report = reported(Before)
    assert scopes(after["main"]) == {"x": "global.texture", "x_ipc": "ipc_memory"}
    assert report.decisions[0].reason == (
        "32 bytes from global.texture to ipc_memory for operand 0 of "
        "runtime.disco.cuda_ipc.custom_allreduce; it was allocated there as x"
    )


def test_a_hint_puts_a_value_where_it_says():
    @I.ir_module
    class Before:
        @R.function(pure=False)
        def main(p: F8):
            x = alloc(8)
            y = R.hint_on_device(x, R.device(1, 0), "ipc_memory")
            q = R.hint_on_device(p, R.device(1, 0), "ipc_memory")
            _ = R.call_packed("use", y, q)
            return R.tuple()

    after = plan(Before)
    assert scopes(after["main"]) == {"x": "ipc_memory", "p_ipc": "ipc_memory"}
    assert copies(after["main"]) == [("p", "p_ipc")]
    assert "hint_on_device" not in after.script()


@I.ir_module
class OnDevices:
    """`x` is annotated, `p` comes in one scope, the result must be in another."""

    I.module_global_infos(
        {
            "vdevice": [
                I.vdevice("llvm"),
                I.vdevice("llvm", 0, "global.texture"),
                I.vdevice("llvm", 0, "global.vtcm"),
            ]
        }
    )

    @T.prim_func(private=True)
    def f(a: T.Buffer((8,), "float32"), b: T.Buffer((8,), "float32")):
        for i in range(8):
            b[i] = a[i]

    @R.function(pure=False)
    def main(
        p: R.Tensor((8,), "float32", "llvm:1"), q: R.Tensor((8,), "float32", "llvm:0")
    ) -> R.Tensor((8,), "float32", "llvm:2"):
        cls = OnDevices
        x: R.Tensor((8,), "float32", "llvm:2") = R.builtin.alloc_tensor(
            R.shape([8]), R.dtype("float32"), R.prim_value(2), R.str("global.vtcm")
        )
        cls.f(p, x)
        return x


def test_the_scope_of_a_vdevice_is_a_demand():
    after = plan(OnDevices)
    assert {g.name_hint for g in after.get_global_vars()} == {"main", "f_texture_vtcm"}


def moved(scope: str) -> tvm.IRModule:
    """A parameter on a virtual device, moved to another scope of it."""
    devices = [relax.VDevice("llvm", 0, "global"), relax.VDevice("llvm", 0, scope)]
    x = relax.Var("x", relax.TensorType((8,), "float32", devices[0]))
    y = relax.Var("y", relax.TensorType((8,), "float32", devices[1]))
    call = relax.op.to_vdevice(x, devices[1])
    block = relax.BindingBlock([relax.VarBinding(y, call)])
    body = relax.SeqExpr([block], y)
    function = relax.Function([x], body, y.ty, is_pure=False).with_attr("global_symbol", "main")
    module = tvm.IRModule({"main": function}, global_infos={"vdevice": devices})
    return relax.transform.Normalize()(module)


def test_a_move_between_scopes_of_one_device_is_a_copy_of_ours():
    function = plan(moved("ipc_memory"))["main"]
    assert copies(function) == [("x", "x_ipc")]
    alloc = function.body.blocks[0].bindings[0]
    assert int(alloc.value.args[2].value) == 0, "a scope is no device of its own"
    assert "to_vdevice" not in function.script()


def test_a_move_between_devices_is_left_to_tvm():
    """The tensor has no device before, so it is not known to be on the one it goes to."""
    device = relax.VDevice("llvm", 0, "ipc_memory")
    x = relax.Var("x", relax.TensorType((8,), "float32"))
    y = relax.Var("y", relax.TensorType((8,), "float32", device))
    block = relax.BindingBlock([relax.VarBinding(y, relax.op.to_vdevice(x, device))])
    function = relax.Function([x], relax.SeqExpr([block], x), x.ty, is_pure=False)
    function = function.with_attr("global_symbol", "main")
    module = tvm.IRModule({"main": function}, global_infos={"vdevice": [device]})
    module = relax.transform.Normalize()(module)
    assert plan(module).same_as(module)


# Before CallTIRRewrite.


@I.ir_module
class CallTir:
    @T.prim_func(private=True)
    def f(a: T.Buffer((8,), "float32"), b: T.Buffer((8,), "float32")):
        for i in range(8):
            b[i] = a[i]

    @R.function(pure=False)
    def main(p: F8, y: F8):
        cls = CallTir
        x = R.call_tir(cls.f, (p,), out_ty=F8)
        _ = custom_allreduce(x, y)
        return R.tuple()


def test_a_call_tir_becomes_an_allocation_and_a_call():
    @I.ir_module
    class Expected:
        @T.prim_func(private=True)
        def f(a: T.Buffer((8,), "float32"), b: T.Buffer((8,), "float32")):
            for i in range(8):
                b[i] = a[i]

        @R.function(pure=False)
        def main(p: F8, y: F8):
            cls = Expected
            out = alloc(8, scope="ipc_memory")
            cls.f(p, out)
            x = out
            _ = custom_allreduce(x, y)
            return R.tuple()

    tvm.ir.assert_structural_equal(plan(CallTir), Expected)


def test_several_outputs_of_a_call_tir_are_apart():
    @I.ir_module
    class Before:
        @T.prim_func(private=True)
        def f(
            a: T.Buffer((8,), "float32"),
            b: T.Buffer((8,), "float32"),
            c: T.Buffer((8,), "float32", scope="global.texture"),
        ):
            for i in range(8):
                b[i] = a[i]
                c[i] = a[i]

        @R.function(pure=False)
        def main(p: F8, y: F8):
            cls = Before
            t = R.call_tir(cls.f, (p,), out_ty=[F8, F8])
            b = t[0]
            c = t[1]
            _ = custom_allreduce(b, y)
            _1 = custom_allreduce(c, y)
            _2 = R.call_packed("tvm_ipc.copy", c, y)
            return R.tuple()

    after = plan(Before)
    assert scopes(after["main"]) == {
        "alloc0": "ipc_memory",
        "alloc1": "global.texture",
        "alloc1_ipc": "ipc_memory",
    }
    assert copies(after["main"]) == [("alloc1", "alloc1_ipc"), ("c", "y")]
    tvm.ir.assert_structural_equal(plan(after), after)


def test_call_dps_packed_and_call_tir_inplace():
    @I.ir_module
    class Before:
        @T.prim_func(private=True)
        def f(a: T.Buffer((8,), "float32")):
            for i in range(8):
                a[i] = a[i] + T.float32(1)

        @R.function(pure=False)
        def main(p: F8, y: F8):
            cls = Before
            x = R.call_dps_packed("fill", (p,), out_ty=F8)
            z = R.call_tir_inplace(cls.f, (x,), inplace_indices=[0], out_ty=F8)
            _ = custom_allreduce(z, y)
            return R.tuple()

    after = plan(Before)
    assert scopes(after["main"]) == {"alloc": "ipc_memory"} and not copies(after["main"])


def test_refused_because_a_dataflow_block_cannot_allocate():
    @I.ir_module
    class Before:
        @T.prim_func(private=True)
        def f(a: T.Buffer((8,), "float32"), b: T.Buffer((8,), "float32")):
            for i in range(8):
                b[i] = a[i]

        @R.function
        def main(p: F8):
            cls = Before
            with R.dataflow():
                x = R.call_tir(cls.f, (p,), out_ty=F8)
                y = R.call_dps_packed(
                    "runtime.disco.cuda_ipc.custom_allreduce",
                    (x, R.prim_value(1)),
                    out_ty=F8,
                )
                R.output(y)
            return y

    text = Before.script()
    with pytest.raises(
        TransformError, match=r"'main'.*at x, which is in a dataflow block; run rel"
    ):
        plan(Before)
    assert Before.script() == text


def test_refused_because_the_function_is_pure():
    @I.ir_module
    class Before:
        @R.function
        def main(p: F8):
            y = R.call_dps_packed(
                "runtime.disco.cuda_ipc.custom_allreduce",
                (p, R.prim_value(1)),
                out_ty=F8,
            )
            return y

    with pytest.raises(TransformError, match=r"'main'.* pure function; run .*RemovePurityChecking"):
        plan(Before)


# What is wrong with a module, or a demand.


def test_refused_because_the_scope_of_an_allocation_is_unknown():
    @I.ir_module
    class Before:
        @R.function(pure=False)
        def main():
            x = alloc(8, scope="icp_memory")
            return x

    with pytest.raises(
        TransformError,
        match=r"allocation of x names the unknown memory scope 'icp_memory'; expected",
    ):
        plan(Before)


def test_refused_because_the_scope_of_a_parameter_is_unknown():
    @I.ir_module
    class Before:
        @T.prim_func(private=True)
        def f(a: T.Buffer((8,), "float32", scope="nowhere")):
            for i in range(8):
                a[i] = T.float32(i)

        @R.function(pure=False)
        def main(p: F8):
            cls = Before
            cls.f(p)
            return R.tuple()

    with pytest.raises(TransformError, match=r"parameter 0 of 'f' names the unknown .*'nowhere'"):
        plan(Before)


def test_refused_because_there_are_not_as_many_scopes_as_parameters():
    @I.ir_module
    class Before:
        @R.function(pure=False)
        def main(p: F8):
            R.func_attr({"tvm_ipc.param_scopes": ["global", "global"]})
            return R.tuple()

    with pytest.raises(TransformError, match=r"'main' has 1 parameter, .* has 2 scopes"):
        plan(Before)


def test_refused_because_two_demands_meet_in_memory_that_is_written():
    """A copy would leave the writer with one tensor, and the reader with another."""

    @I.ir_module
    class Before:
        @T.prim_func(private=True)
        def f(a: T.Buffer((8,), "float32")):
            for i in range(8):
                a[i] = a[i] + T.float32(1)

        @R.function(pure=False)
        def main(c: R.Tensor((), "bool"), p: F8):
            R.func_attr({"tvm_ipc.param_scopes": ["", "global.texture"]})
            cls = Before
            if c:
                z = p
            else:
                a = alloc(8, scope="global.vtcm")
                z = a
            cls.f(z)
            return R.tuple()

    with pytest.raises(TransformError, match=r"vtcm'.*'global\.texture'.*is written after"):
        plan(Before)


def test_refused_because_a_function_is_called_with_too_few_arguments():
    x = relax.Var("x", relax.TensorType((8,), "float32"))
    callee = tvm.ir.GlobalVar("f")
    one = relax.Function([x], relax.SeqExpr([], x), x.ty).with_attr("global_symbol", "f")
    r = relax.Var("r", x.ty)
    block = relax.BindingBlock([relax.VarBinding(r, relax.Call(callee, []))])
    main = relax.Function([], relax.SeqExpr([block], r), x.ty).with_attr("global_symbol", "main")
    module = tvm.IRModule({callee: one, "main": main})
    with pytest.raises(TransformError, match="'main' calls 'f' with 0 arguments, but it has 1"):
        plan(module)


def test_refused_because_nobody_knows_how_large_a_copy_is():
    @I.ir_module
    class Before:
        @R.function(pure=False)
        def main(y: F8):
            x: R.Any = R.call_packed("theirs.receive", ty_args=(R.Any,))
            _ = custom_allreduce(x, y)
            return R.tuple()

    with pytest.raises(TransformError, match=r"'main' x must be copied.*how large.*match_cast"):
        plan(Before)


def test_refused_because_the_module_lacks_what_it_calls():
    r = relax.Var("r", relax.TensorType((8,), "float32"))
    block = relax.BindingBlock([relax.VarBinding(r, relax.Call(tvm.ir.GlobalVar("f"), []))])
    main = relax.Function([], relax.SeqExpr([block], r), r.ty).with_attr("global_symbol", "main")
    with pytest.raises(TransformError, match="'main' calls 'f', which is not in the module"):
        plan(tvm.IRModule({"main": main}))


def test_refused_because_a_call_is_nested_in_another():
    x = relax.Var("x", relax.TensorType((8,), "float32"))
    inner = relax.Call(relax.ExternFunc("f"), [x], ret_ty=x.ty)
    r = relax.Var("r", x.ty)
    call = relax.Call(relax.ExternFunc("tvm_ipc.copy"), [inner, x], ret_ty=x.ty)
    block = relax.BindingBlock([relax.VarBinding(r, call)])
    main = relax.Function([x], relax.SeqExpr([block], r), x.ty).with_attr("global_symbol", "main")
    with pytest.raises(TransformError, match=r"a call is nested in another one.*Normalize"):
        plan(tvm.IRModule({"main": main}))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda r: r.demand_scope("f", "nowhere"),
            "unknown memory scope 'nowhere'; expected one of",
        ),
        (lambda r: r.demand_scope("f", ANY, operand=RESULT), "a result cannot be in ANY"),
        (lambda r: r.demand_scope("tvm_ipc.allreduce", "global"), "already demands 'ipc_memory'"),
        (
            lambda r: r.demand_scope("tvm_ipc.allreduce", "ipc_memory", writes=()),
            r"already declared to write operands \(5,\), but writes is \(\)",
        ),
        (
            lambda r: r.register_scope("global", transparent=False),
            "already registered as transparent",
        ),
    ],
)
def test_refused_because_a_demand_is_wrong(call, message):
    with pytest.raises(ValueError, match=message):
        call(ScopeRegistry())


def test_refused_because_the_operand_is_no_index():
    with pytest.raises(TypeError, match="the index of an argument, or RESULT"):
        ScopeRegistry().demand_scope("mine.look", "ipc_memory", operand="result")


def test_a_default_registry_takes_demands_of_all_passes():
    assert demand_scope.__self__ is register_scope.__self__
    demand_scope("tvm_ipc.allreduce", "ipc_memory")  # as it is: no error
    register_scope("ipc_memory", transparent=True)


def test_a_module_without_demands_is_the_same_object():
    @I.ir_module
    class Before:
        @R.function
        def main(x: F8):
            with R.dataflow():
                y = R.add(x, x)
                R.output(y)
            return y

    assert plan(Before).same_as(Before)


def test_scopes_flow_through_parts_of_tensors():
    """So what shows a part lets the whole be allocated where peers read it, and copies nothing."""

    @I.ir_module
    class Before:
        @R.function(pure=False)
        def main(y: F8):
            x = alloc(16)
            half = R.call_packed("tvm_ipc.view", x, 32, R.shape([8]), ty_args=F8)
            own = R.call_packed("tvm_ipc.own_slice", x, 0, 0, 32, 0, R.shape([8]), ty_args=F8)
            flat = R.call_packed("vm.builtin.reshape", own, R.shape([8]), ty_args=F8)
            _ = R.call_packed("tvm_ipc.allreduce", half, 0, 0, 3, 0, y)
            _1 = R.call_packed("tvm_ipc.allreduce", flat, 0, 0, 3, 0, y)
            return R.tuple()

    planned = plan(Before)["main"]
    assert scopes(planned) == {"x": "ipc_memory"}
    assert copies(planned) == []
