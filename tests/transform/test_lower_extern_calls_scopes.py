# SPDX-License-Identifier: Apache-2.0
"""LowerExternCalls: outputs and arguments in memory scopes."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

import tvm_ipc
from tests.transform.byoc_modules import Elementwise, apply
from tests.transform.extern_programs import TO_CALLS, declared, lowered_calls
from tests.transform.script_forms import alloc
from tvm_ipc.analysis.views_and_writes_of_calls import name_of_callee
from tvm_ipc.analysis.walk_and_rewrite_bindings import calls
from tvm_ipc.errors import TransformError
from tvm_ipc.transform import (
    LowerExternCalls,
    LowerGPUIPCAllocStorage,
    PlanMemoryScopes,
)

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
    (callee,) = [call.op for call in calls(after["main"]) if name_of_callee(call.op) == "scaled"]
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
            y = alloc(4, scope="ipc_memory")
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
