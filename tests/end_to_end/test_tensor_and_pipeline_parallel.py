# SPDX-License-Identifier: Apache-2.0
"""Tensor and pipeline parallelism as mlc-llm has them: each group of a session runs one stage.

A function that dispatches by group calls the stages. The all-reduces of a stage are in the group,
and the passes run in mlc-llm's order, with TVM's passes for IPC memory or with ours.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.s_tir import dlight
from tvm.script import relax as R

import tvm_ipc
from tests.passes_of_tvm import ALLOCATE, FUSE, LOWER
from tvm_ipc.transform import collect_report

ROWS, HIDDEN, INNER, LAYERS = 3, 8, 12, 2
PASSES = {"ours": tvm_ipc.transform, "TVM's": relax.transform}
CUSTOM, OWN, DISCO = (
    f'"{name}"'
    for name in (
        "runtime.disco.cuda_ipc.custom_allreduce",
        "tvm_ipc.allreduce",
        "runtime.disco.allreduce",
    )
)
#: The numbers of workers and of groups.
SESSIONS = [(2, 1), (3, 1), (2, 2), (4, 2), (3, 3), (4, 4)]


def as_mlc_llm_does(passes: Any, strategy: int) -> tvm.transform.Pass:
    return tvm.transform.Sequential(
        [
            *FUSE,
            relax.transform.DeadCodeElimination(),
            dlight.ApplyDefaultSchedule(dlight.cpu.GEMV()),
            relax.transform.RewriteDataflowReshape(),
            *ALLOCATE,
            passes.IPCAllReduceRewrite(strategy),
            passes.StaticPlanBlockMemory(),
            relax.transform.RewriteCUDAGraph(),
            passes.LowerGPUIPCAllocStorage(),
            *LOWER,
        ]
    )


def model(shards: int, stages: int, in_group: bool = True) -> tvm.IRModule:
    """Layers `x + allreduce(relu(x @ up) @ down)`, LAYERS of them in each stage.

    `up` and `down` of a layer are fields of a packed parameter, and each stage gets its own.
    """
    inner = INNER // shards
    x_type = R.Tensor((ROWS, HIDDEN), "float32")
    packed = R.Tuple(
        *[R.Tensor(shape, "float32") for shape in ((HIDDEN, inner), (inner, HIDDEN))] * LAYERS
    )
    builder = relax.BlockBuilder()
    functions = [
        stage(builder, f"stage{number}", x_type, packed, (number, stages), in_group)
        for number in range(stages)
    ]
    x, weights = relax.Var("x", x_type), relax.Var("weights", packed)
    with builder.function("main", [x, weights], pure=False):
        calls = [[function, x, weights] for function in functions]
        name, result = "tests.dispatch_function_by_group", relax.AnyType()
        arguments = [relax.prim_value(shards), calls]
        called = relax.op.call_builtin_with_ctx(name, arguments, ty_args=result)
        builder.emit_func_output(builder.emit(called))
    return builder.get()


def stage(
    builder: relax.BlockBuilder,
    name: str,
    x_type: Any,
    packed: Any,
    position: tuple[int, int],
    in_group: bool,
) -> Any:
    number, stages = position
    x, weights = relax.Var("x", x_type), relax.Var("weights", packed)
    with builder.function(name, [x, weights], pure=False):
        with builder.dataflow():
            if number > 0:
                receive = "runtime.disco.recv_from_prev_group"
                y = builder.emit(relax.op.call_dps_packed(receive, [], out_ty=x_type))
            else:
                y = x
            for layer in range(LAYERS):
                up, down = (builder.emit(weights[2 * layer + i]) for i in range(2))
                hidden = builder.emit(relax.op.nn.relu(relax.op.matmul(y, up)))
                part = builder.emit(relax.op.matmul(hidden, down))
                y = builder.emit(relax.op.add(y, relax.op.ccl.allreduce(part, "sum", in_group)))
            y = builder.emit_output(y)
        if number < stages - 1:
            send = relax.ExternFunc("runtime.disco.send_to_next_group")
            builder.emit(relax.Call(send, [y], ty_args=[relax.AnyType()]))
        return builder.emit_func_output(y)


def expected(x: Any, weights: Any) -> Any:
    for up, down in weights:
        x = x + np.maximum(x @ up, 0) @ down
    return x


@pytest.mark.parametrize(("workers", "groups"), SESSIONS)
@pytest.mark.parametrize("strategy", [1, 3])
@pytest.mark.parametrize("whose", PASSES)
def test_each_group_runs_a_stage(whose: str, strategy: int, workers: int, groups: int) -> None:
    shards = workers // groups
    lowered = []

    @tvm.transform.module_pass(opt_level=0)
    def pipeline(mod: Any, _: Any) -> Any:
        lowered.append(as_mlc_llm_does(PASSES[whose], strategy)(mod))
        return lowered[-1]

    program = tvm.compile(model(shards, groups), "llvm", relax_pipeline=pipeline)
    text = lowered[0].script()
    # Our plan drops exit barriers, which only the second function can do without.
    found = text.count(CUSTOM) + text.count(OWN)
    assert (found, text.count(DISCO)) == (groups * LAYERS, 0)
    rng = np.random.default_rng(workers)
    x = rng.normal(size=(ROWS, HIDDEN)).astype("float32")
    shapes = ((HIDDEN, INNER), (INNER, HIDDEN))
    whole = [
        tuple(rng.normal(size=shape).astype("float32") for shape in shapes)
        for _ in range(groups * LAYERS)
    ]
    shards_of = [
        [np.split(one, shards, axis=axis) for axis, one in ((1, up), (0, down))]
        for up, down in whole
    ]
    with tvm_ipc.Session(workers, num_groups=groups, timeout=60) as session:
        session.import_python_module("tests.runtime.worker_functions")
        weights = []
        for layer in range(LAYERS):
            for which in range(2):
                reference = session.empty(shards_of[0][which][0].shape, "float32")
                for rank in range(workers):
                    group, shard = divmod(rank, shards)
                    array = shards_of[group * LAYERS + layer][which][shard]
                    reference.debug_copy_from(rank, np.ascontiguousarray(array))
                weights.append(reference)
        packed = session.tuple(weights)
        main = session.load_vm_module(program)["main"]
        for _ in range(3):  # storages are used again
            result = main(session.put(x), packed)
            for rank in range(workers):
                layers = whole[: (rank // shards + 1) * LAYERS]
                np.testing.assert_allclose(
                    session.get(result, rank=rank), expected(x, layers), rtol=1e-3, atol=1e-3
                )


def test_a_sum_over_all_workers_stays_one_in_a_session_with_groups() -> None:
    """TVM's pass would make it a sum in the group."""

    @tvm.transform.module_pass(opt_level=0)
    def pipeline(mod: Any, _: Any) -> Any:
        return as_mlc_llm_does(tvm_ipc.transform, 3)(mod)

    builder = relax.BlockBuilder()
    x = relax.Var("x", R.Tensor((5,), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            ours = builder.emit(relax.op.ccl.allreduce(relax.op.exp(x), "sum", True))
            every = builder.emit(relax.op.ccl.allreduce(relax.op.exp(x), "sum", False))
            most = builder.emit(relax.op.ccl.allreduce(relax.op.exp(x), "max", True))
            result = builder.emit_output(relax.op.stack([ours, every, most]))
        builder.emit_func_output(result)
    with collect_report() as report:
        program = tvm.compile(builder.get(), "llvm", relax_pipeline=pipeline)
    reasons = [d.reason for d in report.decisions if d.pass_name == "IPCAllReduceRewrite"]
    group = "the workers of each group, which"
    assert reasons == [
        f"sum over {group} runtime.disco.cuda_ipc.custom_allreduce computes",
        "sum over all workers, which tvm_ipc.allreduce computes",
        f"max over {group} tvm_ipc.allreduce computes",
    ]
    arrays = np.random.default_rng(0).normal(size=(4, 5)).astype("float32")
    with tvm_ipc.Session(4, num_groups=2, timeout=60) as session:
        reference = session.empty((5,), "float32")
        for rank, array in enumerate(arrays):
            reference.debug_copy_from(rank, array)
        result = session.load_vm_module(program)["main"](reference)
        for rank in range(4):
            group_of = np.exp(arrays[rank // 2 * 2 :][:2])
            wanted = np.stack([group_of.sum(0), np.exp(arrays).sum(0), group_of.max(0)])
            np.testing.assert_allclose(session.get(result, rank=rank), wanted, rtol=1e-5)
