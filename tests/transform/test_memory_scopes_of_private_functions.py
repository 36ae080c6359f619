# SPDX-License-Identifier: Apache-2.0
"""The scopes of parameters of private functions: those of their callers, or of an attribute."""

from __future__ import annotations

import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from tests.transform.scope_programs import copies, names_in, plan, reported, scopes
from tests.transform.script_forms import F8, alloc, custom_allreduce
from tvm_ipc.errors import TransformError
from tvm_ipc.transform import ScopeRegistry

TEXTURE = "global.texture"


@I.ir_module
class Kernel:
    """A private function with a kernel has a caller with a texture."""

    @T.prim_func(private=True, s_tir=True)
    def double(a: T.Buffer((8,), "float32"), b: T.Buffer((8,), "float32")):
        for i in range(8):
            with T.sblock("b"):
                v = T.axis.spatial(8, i)
                b[v] = a[v] * T.float32(2)

    @R.function(pure=False, private=True)
    def f(a: F8, y: F8):
        cls = Kernel
        _ = cls.double(a, y)
        return y

    @R.function(pure=False)
    def main(p: F8):
        cls = Kernel
        a = alloc(8, scope="global.texture")
        z = alloc(8)
        return cls.f(a, z)


def with_another_caller(module: tvm.IRModule) -> tvm.IRModule:
    """Add a caller that passes a parameter, which is in global memory."""
    builder = relax.BlockBuilder(module)
    p = relax.Var("p", F8)
    with builder.function("other", [p], pure=False):
        z = builder.emit(alloc(8))
        call = relax.Call(module.get_global_var("f"), [p, z])
        builder.emit_func_output(builder.emit(call))
    return builder.get()


def test_the_kernels_of_a_private_function_take_the_scope_of_its_callers() -> None:
    after = plan(Kernel)
    assert names_in(after["double_texture"])["a"] == TEXTURE
    assert "double_texture" in after["f"].script() and copies(after["main"]) == []


def test_where_callers_disagree_the_argument_of_one_is_copied_and_reported() -> None:
    after, report = reported(with_another_caller(Kernel))
    assert names_in(after["double_texture"])["a"] == TEXTURE
    assert (copies(after["main"]), copies(after["other"])) == ([], [("p", "p_texture")])
    (copied,) = [one for one in report.decisions if one.verdict == "copied"]
    assert (copied.function, copied.subject) == ("other", "p")
    assert f"from global to {TEXTURE} for argument 0 of 'f'" in copied.reason


def test_a_tensor_that_peers_read_is_passed_to_a_private_function_as_it_is() -> None:
    """Other callers may pass global memory, since code is the same for both."""

    @I.ir_module
    class Module:
        @R.function(pure=False, private=True)
        def f(a: F8, y: F8):
            _ = R.call_packed("mylib.read", a, y, ty_args=(R.Tuple,))
            return y

        @R.function(pure=False)
        def main(p: F8):
            cls = Module
            a = alloc(8)
            y = alloc(8)
            _ = custom_allreduce(a, y)
            return cls.f(a, y)

        @R.function(pure=False)
        def other(p: F8):
            cls = Module
            z = alloc(8)
            return cls.f(p, z)

    registry = ScopeRegistry()
    registry.demand_scope("mylib.read", "*", operand=0, writes=(1,))
    after = plan(Module, registry=registry)
    assert scopes(after["main"]) == {"a": "ipc_memory", "y": "global"}
    assert copies(after["main"]) == copies(after["other"]) == []


def with_attribute(names: list[str]) -> tvm.IRModule:
    @I.ir_module
    class Module:
        @R.function(pure=False, private=True)
        def f(a: F8, y: F8):
            R.func_attr({"tvm_ipc.param_scopes": names})
            _ = R.call_packed("tvm_ipc.copy", a, y, ty_args=(R.Tuple,))
            return y

        @R.function(pure=False)
        def main(p: F8):
            cls = Module
            a = alloc(8)
            z = alloc(8)
            _ = cls.f(a, z)
            return cls.f(p, z)

    return Module


def test_the_attribute_of_a_private_function_names_scopes_too() -> None:
    after, report = reported(with_attribute(["ipc_memory", ""]))
    assert scopes(after["main"])["a"] == "ipc_memory"
    assert copies(after["main"]) == [("p", "p_ipc")]
    (copied,) = [one for one in report.decisions if one.verdict == "copied"]
    assert "for argument 0 of 'f'" in copied.reason


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["ipc_memory"], "function 'f' has 2 parameters, but its attribute .* has 1 scope; name"),
        (["", "lost"], "the attribute 'tvm_ipc.param_scopes' of function 'f' names the unknown"),
    ],
)
def test_refused_because_the_attribute_is_wrong(names: list[str], message: str) -> None:
    with pytest.raises(TransformError, match=message):
        plan(with_attribute(names))
