# SPDX-License-Identifier: Apache-2.0
"""Local and private functions in programs of several workers, whose scopes callers determine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import tvm_ipc
from tvm_ipc.cpu import blas_patterns
from tvm_ipc.errors import TransformError
from tvm_ipc.transform import collect_report
from tvm_ipc.transform.lift_local_functions import lift_local_functions


@pytest.fixture(scope="module", params=[2, 3, 4])
def session(request: pytest.FixtureRequest) -> Iterator[tvm_ipc.Session]:
    with tvm_ipc.Session(request.param, timeout=60) as session:
        yield session


def run(session: tvm_ipc.Session, module: tvm.IRModule, *inputs: Any) -> list[Any]:
    """The result of each worker; an input has an array for each."""
    workers = session.num_workers
    pipeline = tvm_ipc.get_pipeline("llvm", workers, blas=False)
    program = tvm.compile(module, "llvm", relax_pipeline=pipeline)
    main = session.load_vm_module(program)["main"]
    result = main(*map(session.scatter, inputs))
    return [session.get(result, rank) for rank in range(workers)]


def data(session: tvm_ipc.Session, *shape: int) -> Any:
    return np.random.default_rng(7).normal(size=(session.num_workers, *shape)).astype("float32")


@I.ir_module
class Captures:
    """The local function has a collective, and reads a variable of the function around it."""

    @R.function
    def main(x: R.Tensor(("n",), "float32"), w: R.Tensor(("n",), "float32")):
        n = T.int64()

        @R.function
        def layer(a: R.Tensor((n,), "float32")) -> R.Tensor((n,), "float32"):
            with R.dataflow():
                total = R.ccl.allreduce(R.add(a, w), "sum")
                R.output(total)
            return total

        with R.dataflow():
            y = layer(x)
            z = layer(R.multiply(y, y))
            R.output(z)
        return z


@I.ir_module
class Recursive:
    """The local function calls itself, in a branch."""

    @R.function
    def main(x: R.Tensor((4,), "float32"), w: R.Tensor((4,), "float32"), c: R.Tensor((), "bool")):
        @R.function
        def inner(a: R.Tensor((4,), "float32"), n: R.Tensor((), "bool")) -> R.Tensor(
            (4,), "float32"
        ):
            if n:

                @R.function
                def last(b: R.Tensor((4,), "float32")) -> R.Tensor((4,), "float32"):
                    return R.multiply(R.add(b, w), a)

                r = last(a)
            else:
                r = inner(R.add(a, w), R.logical_not(n))
            return r

        y = inner(x, c)
        return R.ccl.allreduce(y, "sum")


@I.ir_module
class Effects:
    """The result of the local function is not used, and it writes a captured tensor."""

    @R.function(pure=False)
    def main(x: R.Tensor((4,), "float32"), w: R.Tensor((4,), "float32")):
        @R.function(pure=False)
        def store(a: R.Tensor((4,), "float32")) -> R.Tensor((4,), "float32"):
            _ = R.call_packed("tvm_ipc.copy", a, w, ty_args=(R.Tuple,))
            return a

        _1 = store(R.exp(x))
        return R.ccl.allreduce(w, "sum")


def test_a_local_function_that_captures_variables(session: tvm_ipc.Session) -> None:
    x, w = data(session, 5), data(session, 5) + 1
    y = (x + w).sum(0)
    z = (y * y + w).sum(0)
    for result in run(session, Captures, x, w):
        np.testing.assert_allclose(result, z, rtol=1e-4)


def test_a_local_function_that_calls_itself(session: tvm_ipc.Session) -> None:
    x, w = data(session, 4), data(session, 4) - 1
    taken = np.arange(session.num_workers) % 2 == 0
    a = np.where(taken[:, None], x, x + w)
    for result in run(session, Recursive, x, w, taken):
        np.testing.assert_allclose(result, ((a + w) * a).sum(0), rtol=1e-4, atol=1e-5)


def test_the_effects_of_a_call_stay_although_its_result_is_not_used(
    session: tvm_ipc.Session,
) -> None:
    x = data(session, 4)
    for result in run(session, Effects, x, x):
        np.testing.assert_allclose(result, np.exp(x).sum(0), rtol=1e-4)


def test_local_functions_become_private_ones_that_are_called_directly() -> None:
    with collect_report() as report:
        after = lift_local_functions("test", Captures)
    text = after.script()
    assert "closure" not in text and "cls.main_layer(x, w)" in text
    assert "global_symbol" not in (after["main_layer"].attrs or {})
    (decision,) = report.decisions
    assert (decision.function, decision.verdict) == ("main", "lifted")
    assert lift_local_functions("test", after).same_as(after)


def test_the_scope_of_a_lifted_function_is_that_of_its_callers() -> None:
    """The all-reduce in the function reads the tensor that the caller has allocated."""

    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor((4,), "float32")):
            @R.function
            def total(a: R.Tensor((4,), "float32")) -> R.Tensor((4,), "float32"):
                return R.ccl.allreduce(a, "sum")

            return total(R.exp(x))

    with collect_report() as report:
        tvm_ipc.get_pipeline("llvm", 2)(Module)
    planned = [d for d in report.decisions if d.pass_name == "PlanMemoryScopes"]
    assert [(d.function, d.verdict) for d in planned] == [("main", "in ipc_memory")]


def test_refused_because_nobody_compiled_the_function_of_a_compiler() -> None:
    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor((4,), "float32")):
            @R.function
            def inner(a: R.Tensor((4,), "float32")) -> R.Tensor((4,), "float32"):
                R.func_attr({"Codegen": "cc"})
                return R.exp(a)

            return inner(x)

    message = r"get_pipeline: function 'main' contains .* compiler 'cc', .* run RunModuleCodegen"
    with pytest.raises(TransformError, match=message):
        tvm_ipc.get_pipeline("llvm", 2)(Module)


def test_functions_that_the_pipeline_compiles_are_not_lifted() -> None:
    """Those of a partition are for BLAS, and the composites in it are no local functions."""

    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor((8, 64), "float32"), w: R.Tensor((64, 64), "float32")):
            with R.dataflow():
                y = R.matmul(x, R.permute_dims(w))
                R.output(y)
            return y

    partition = relax.transform.FuseOpsByPattern(blas_patterns(), annotate_codegen=True)
    partitioned = partition(Module)
    assert lift_local_functions("test", partitioned, ["blas"]).same_as(partitioned)
    both = partitioned.clone()
    both["other"] = Captures["main"].with_attr("global_symbol", "other")
    with pytest.raises(TransformError, match="there are local functions in 'other'; run relax"):
        lift_local_functions("test", both, ["blas"])


def test_refused_because_tvm_cannot_lift_it() -> None:
    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor((4,), "float32"), w: R.Tensor((4,), "float32")):
            @R.function
            def inner(a: R.Tensor((4,), "float32")) -> R.Tensor((4,), "float32"):
                return R.add(a, w)

            other = inner
            return other(x)

    message = "LambdaLift cannot lift the local functions of 'main'; call a local function by the"
    with pytest.raises(TransformError, match=message):
        tvm_ipc.get_pipeline("llvm", 2)(Module)


def test_refused_because_a_function_with_effects_is_a_value() -> None:
    builder = relax.BlockBuilder()
    vector = R.Tensor((4,), "float32")
    a, w = relax.Var("a", vector), relax.Var("w", vector)
    x = relax.Var("x", vector)
    write = relax.Call(relax.ExternFunc("tvm_ipc.copy"), [a, w], ty_args=[relax.AnyType()])
    body = relax.SeqExpr([relax.BindingBlock([relax.VarBinding(relax.Var("_", None), write)])], a)
    local = relax.Function([a], body, vector, is_pure=False)
    with builder.function("main", [x, w], pure=False):
        inner = builder.emit(local)
        call = relax.Call(relax.ExternFunc("mylib.later"), [inner], ty_args=[relax.AnyType()])
        builder.emit(call)
        builder.emit_func_output(x)
    message = "function 'main' uses its local function '.*', which has effects, as a value; only"
    with pytest.raises(TransformError, match=message):
        tvm_ipc.get_pipeline("llvm", 2)(builder.get())


@I.ir_module
class Private:
    """A private function is called with a tensor of the caller, and with a parameter."""

    @R.function(private=True)
    def total(a: R.Tensor((4,), "float32")):
        with R.dataflow():
            b = R.ccl.allreduce(a, "sum")
            c = R.add(b, a)
            R.output(c)
        return c

    @R.function
    def main(x: R.Tensor((4,), "float32")):
        cls = Private
        y = cls.total(R.exp(x))
        z = cls.total(y)
        w = cls.total(x)
        return R.add(z, w)


def test_a_private_function_takes_the_scope_of_its_callers(session: tvm_ipc.Session) -> None:
    x = data(session, 4)

    def total(a: Any) -> Any:
        return a.sum(0) + a

    wanted = total(total(np.exp(x))) + total(x)
    for rank, result in enumerate(run(session, Private, x)):
        np.testing.assert_allclose(result, wanted[rank], rtol=1e-4)


def test_two_devices_in_one_worker_are_refused_before_the_program_runs() -> None:
    @I.ir_module
    class Module:
        I.module_global_infos({"vdevice": [I.vdevice("llvm", 0), I.vdevice("llvm", 1)]})

        @R.function
        def main(x: R.Tensor((4,), "float32", "llvm:0")):
            y = R.to_vdevice(x, "llvm:1")
            z = R.to_vdevice(R.exp(y), "llvm:0")
            return R.ccl.allreduce(z, "sum")

    message = (
        "get_pipeline: 'y' of function 'main' is on the VDevice llvm:1, and 'x' of function 'main' "
        "is on llvm:0, but each worker has one device; put all tensors on one VDevice"
    )
    with pytest.raises(TransformError, match=message):
        tvm_ipc.get_pipeline("llvm", 2)(Module)


def test_scopes_of_one_device_are_allowed(session: tvm_ipc.Session) -> None:
    @I.ir_module
    class Module:
        I.module_global_infos(
            {
                "vdevice": [
                    I.vdevice("llvm", 0),
                    I.vdevice("llvm", 0, "ipc_memory"),
                    I.vdevice("llvm", 1),
                ]
            }
        )

        @R.function
        def main(x: R.Tensor((4,), "float32", "llvm:0:global")):
            y = R.to_vdevice(R.exp(x), "llvm:0:ipc_memory")
            return R.ccl.allreduce(y, "sum")

    x = data(session, 4)
    for result in run(session, Module, x):
        np.testing.assert_allclose(result, np.exp(x).sum(0), rtol=1e-4)
