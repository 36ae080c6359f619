# SPDX-License-Identifier: Apache-2.0
"""StaticPlanBlockMemory: which ranks an `if` or a call synchronizes, and what is written in it."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import tvm_ipc
from tests.transform.memory_programs import compiled
from tests.transform.test_static_plan_block_memory_barriers import (
    KEPT,
    LEFT_OUT,
    allocated,
    plan,
    random,
    rewritten,
)


def test_a_group_synchronizes_in_an_if_where_one_branch_synchronizes_all_ranks():
    @I.ir_module
    class Model:
        @R.function
        def main(c: R.Tensor((), "bool"), x: R.Tensor((32, 64), "float32")):
            a = R.ccl.allreduce(R.nn.relu(x), "sum", True)
            b = R.ccl.allreduce(R.nn.relu(a), "sum", False)
            d = R.ccl.allreduce(R.nn.relu(b), "sum", True)
            if c:
                y = R.ccl.allreduce(R.nn.relu(d), "sum", True)
            else:
                y = R.ccl.allreduce(R.nn.relu(d), "sum", False)
            return y

    # The barriers of groups are left out; that of all ranks has no substitute, because the groups
    # synchronize separately after it. In the branches nothing follows.
    planned, verdicts = plan(rewritten(Model, num_groups=2))
    assert verdicts == [LEFT_OUT, KEPT, LEFT_OUT, KEPT, KEPT]
    x = random(32, 64)
    with tvm_ipc.Session(num_workers=4, num_groups=2, timeout=60) as session:
        main = session.load_vm_module(compiled(planned))["main"]
        for choice, factor in ((True, 32), (False, 64)):
            result = main(session.put(np.array(choice)), session.put(x))
            for rank in range(4):
                np.testing.assert_allclose(session.get(result, rank=rank), factor * x, rtol=1e-5)


def test_the_ranks_that_a_binding_synchronizes_are_those_of_all_collectives_in_it():
    @I.ir_module
    class Model:
        @R.function(private=True)
        def both(x: R.Tensor((32, 64), "float32")) -> R.Tensor((32, 64), "float32"):
            a = R.comm.allreduce(x, team=[[0, 1], [2, 3]])
            return R.comm.allreduce(a, team=[[0, 2], [1, 3]])

        @R.function
        def main(x: R.Tensor((32, 64), "float32")):
            cls = Model
            a = R.comm.allreduce(R.nn.relu(x), team=[[0, 1], [2, 3]])
            b = R.comm.allreduce(R.nn.relu(a), team=[[0, 2], [1, 3]])
            c = R.comm.allreduce(R.nn.relu(b), team=[[0, 3], [1, 2]])
            return cls.both(c)

    assert plan(rewritten(Model), 1 << 20)[1] == [LEFT_OUT, LEFT_OUT, KEPT]


@pytest.mark.parametrize(
    ("case", "verdict"),
    [("both branches write", KEPT), ("one branch writes", KEPT), ("none writes", LEFT_OUT)],
)
def test_a_branch_that_writes_before_it_synchronizes(case: str, verdict: str) -> None:
    """Then peers may still read the input, although the `if` is where they synchronize again."""

    @I.ir_module
    class Kernels:
        @T.prim_func(s_tir=True)
        def double(a: T.Buffer((64,), "float32")):
            for i in range(64):
                with T.sblock("double"):
                    vi = T.axis.remap("S", [i])
                    a[vi] = a[vi] * T.float32(2)

    builder = relax.BlockBuilder(Kernels)
    double = Kernels.get_global_var("double")
    nothing = [tvm.ir.TupleType([])]
    allreduce = relax.ExternFunc("runtime.disco.cuda_ipc.custom_allreduce")
    tensor = relax.TensorType((64,), "float32")
    x, y, condition = (
        relax.Var("x", tensor),
        relax.Var("y", tensor),
        relax.Var("c", relax.TensorType((), "bool")),
    )

    def branch(parts: list[relax.Call]) -> relax.SeqExpr:
        bindings = [relax.VarBinding(relax.Var("_", nothing[0]), part) for part in parts]
        return relax.SeqExpr([relax.BindingBlock(bindings)], y)

    with builder.function("main", [condition, x, y], pure=False):
        s, t = (builder.emit(allocated("ipc_memory"), name) for name in "st")
        builder.emit(relax.Call(double, [t], ty_args=nothing))
        builder.emit(relax.Call(double, [s], ty_args=nothing))
        one = relax.prim_value(1)
        builder.emit(relax.Call(allreduce, [s, one, x], ty_args=nothing))
        write = relax.Call(double, [s], ty_args=nothing)
        synchronize = relax.Call(allreduce, [t, one, y], ty_args=nothing)
        then = [write, synchronize] if case == "both branches write" else [synchronize]
        otherwise = [synchronize] if case == "none writes" else [write, synchronize]
        builder.emit(relax.If(condition, branch(then), branch(otherwise)))
        builder.emit_func_output(y)
    assert plan(builder.get())[1][0] == verdict
