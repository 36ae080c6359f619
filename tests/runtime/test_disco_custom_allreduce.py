# SPDX-License-Identifier: Apache-2.0
"""All-reduce of tensors in IPC memory under upstream's names, on CPU workers.

The cases of TVM's own tests/python/disco/test_custom_allreduce.py, for sessions of the user's and
of ours, and a program that upstream's passes lowered to these functions.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import transform
from tvm.s_tir import dlight
from tvm.script import relax as R
from tvm_ffi import Shape

from tests.passes_of_tvm import ALLOCATE, LOWER
from tests.runtime.disco_kinds import KINDS, on_workers
from tests.runtime.places import ON_GPUS
from tests.runtime.tensors_of_ranks import write_each
from tvm_ipc.packed_functions import AllReduceStrategy

SHAPES = [(2, 3), (3, 4), (128, 128)]
LAYERS = 14


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("strategy", AllReduceStrategy)
def test_allreduce_of_ipc_memory(
    kind: str,
    shape: tuple[int, ...],
    strategy: AllReduceStrategy,
    shared_session: Callable[..., Any],
) -> None:
    session = shared_session(kind, 2)
    dtype = tvm.DataType("float32")
    storage = session.get_global_func("runtime.disco.cuda_ipc.alloc_storage")(Shape(shape), dtype)
    source = session.get_global_func("vm.builtin.alloc_tensor")(storage, 0, Shape(shape), dtype)
    target = session.empty(shape, "float32")
    count = int(np.prod(shape))
    arrays = [
        np.arange(count, dtype="float32").reshape(shape),
        np.arange(1, 1 - count, -1, dtype="float32").reshape(shape),
    ]
    write_each(source, arrays)
    session.get_global_func("runtime.disco.cuda_ipc.custom_allreduce")(
        source, int(strategy), target
    )
    for before, kept, result in zip(
        arrays, on_workers(source, 2), on_workers(target, 2), strict=True
    ):
        np.testing.assert_array_equal(result, arrays[0] + arrays[1])
        np.testing.assert_array_equal(kept, before, err_msg="the input was written")


def layers(count: int, shape: tuple[int, int]) -> Any:
    """count times: multiply by 0.75 and sum over the workers."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", R.Tensor(shape, "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            y = x
            for _ in range(count):
                scaled = builder.emit(relax.op.multiply(y, relax.const(0.75, "float32")))
                y = builder.emit(relax.op.ccl.allreduce(scaled, "sum"))
            result = builder.emit_output(y)
        builder.emit_func_output(result)
    return builder.get()


def lower_as_upstream(module: Any, strategy: AllReduceStrategy) -> Any:
    """Upstream's passes for IPC memory, in the order that their best known user has them."""
    planned = tvm.transform.Sequential(
        [
            transform.LegalizeOps(),
            transform.RewriteDataflowReshape(),
            *ALLOCATE,
            transform.IPCAllReduceRewrite(int(strategy)),
            transform.StaticPlanBlockMemory(),
        ]
    )(module)
    text = planned.script()
    assert text.count('"runtime.disco.cuda_ipc.custom_allreduce"') == LAYERS
    assert '"ipc_memory"' in text
    return tvm.transform.Sequential([transform.LowerGPUIPCAllocStorage(), *LOWER])(planned)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Callable[[AllReduceStrategy], str]:
    directory = tmp_path_factory.mktemp("layers")

    def compiled(strategy: AllReduceStrategy) -> str:
        path: Path = directory / f"{strategy.name}.so"
        if not path.exists():
            on_gpus = tvm.target.Target({"kind": "cuda", "arch": "sm_90"}, host="llvm")
            target = on_gpus if ON_GPUS else tvm.target.Target("llvm")
            with target:
                module = lower_as_upstream(layers(LAYERS, (64, 512)), strategy)
                if ON_GPUS:
                    module = dlight.ApplyDefaultSchedule(dlight.gpu.Fallback())(module)
                relax.build(module, target, relax_pipeline=None).export_library(str(path))
        return str(path)

    return compiled


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", [AllReduceStrategy.ONESHOT, AllReduceStrategy.AUTO])
def test_layers_that_share_one_ipc_storage(
    kind: str,
    strategy: AllReduceStrategy,
    shared_session: Callable[..., Any],
    program: Callable[..., str],
) -> None:
    """Upstream's plan writes the next layer where slower peers may still read this one."""
    session = shared_session(kind, 2)
    main = session.load_vm_module(program(strategy))["main"]
    start = np.random.default_rng(0).integers(-8, 8, (2, 64, 512)).astype("float32")
    inputs = session.scatter(start)
    values = start
    for _ in range(LAYERS):
        scaled = values * np.float32(0.75)
        values = np.stack([scaled[0] + scaled[1]] * 2)
    for _ in range(5):
        np.testing.assert_array_equal(on_workers(main(inputs), 2), values)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", AllReduceStrategy)
@pytest.mark.parametrize(("workers", "groups"), [(4, 2), (3, 3)])
def test_in_a_session_with_groups_it_sums_in_the_group(
    kind: str,
    strategy: AllReduceStrategy,
    workers: int,
    groups: int,
    shared_session: Callable[..., Any],
) -> None:
    session = shared_session(kind, workers, groups)
    x, y = session.empty((5,), "float32"), session.empty((5,), "float32")
    arrays = [np.arange(5, dtype="float32") * 10**rank for rank in range(workers)]
    write_each(x, arrays)
    session.get_global_func("runtime.disco.cuda_ipc.custom_allreduce")(x, int(strategy), y)
    size = workers // groups
    for rank, result in enumerate(on_workers(y, workers)):
        wanted = np.sum(arrays[rank // size * size :][:size], axis=0)
        np.testing.assert_array_equal(result, wanted)
