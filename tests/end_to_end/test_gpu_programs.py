# SPDX-License-Identifier: Apache-2.0
"""Programs that `get_pipeline` made for GPUs, in workers on the double of CUDA, against NumPy."""

from __future__ import annotations

import pytest

from tests import cuda_double

pytestmark = pytest.mark.skipif(
    "not __import__('shutil').which('cmake')", reason="the double is built with cmake"
)

PROGRAM = """
import numpy as np
import tvm
from tvm import relax
from tvm.script import relax as R

import tvm_ipc
from tvm_ipc import comm
from tvm_ipc.transform import collect_report

TARGET = tvm.target.Target({"kind": "cuda", "arch": "sm_90"}, host="llvm")
GRAPHS = {"relax.backend.use_cuda_graph": True}
ROWS, WIDTH = 8, 32
random = np.random.default_rng(0)


def layers(world):
    '''Two sums over ranks, each with a residual and a norm after it.'''
    builder = relax.BlockBuilder()
    x, residual = (relax.Var(name, R.Tensor((ROWS, WIDTH), "float32")) for name in ("x", "r"))
    w = relax.Var("w", R.Tensor((WIDTH, WIDTH), "float32"))
    g = relax.Var("g", R.Tensor((WIDTH,), "float32"))
    with builder.function("main", [x, residual, w, g], {"num_input": 2}):
        with builder.dataflow():
            normed, stream = x, residual
            for _ in range(2):
                part = builder.emit(relax.op.matmul(normed, w))
                total = builder.emit(relax.op.ccl.allreduce(part, "sum", in_group=False))
                stream = builder.emit(relax.op.add(stream, total))
                normed = builder.emit(relax.op.nn.rms_norm(stream, g, axes=[-1], epsilon=1e-5))
            out = builder.emit_output(relax.op.add(normed, stream))
        builder.emit_func_output(out)
    return builder.get()


def layers_in_numpy(given):
    xs, streams, ws, gs = given
    normed = list(xs)
    for _ in range(2):
        total = sum(x @ w for x, w in zip(normed, ws))
        streams = [stream + total for stream in streams]
        scales = [np.sqrt((s * s).mean(-1, keepdims=True) + 1e-5) for s in streams]
        normed = [s / scale * g for s, scale, g in zip(streams, scales, gs)]
    return [a + b for a, b in zip(normed, streams)]


def sequence_parallel(world):
    '''An all-gather before a product, and a reduce-scatter after another.'''
    builder = relax.BlockBuilder()
    x = relax.Var("x", R.Tensor((ROWS, WIDTH), "float32"))
    up = relax.Var("up", R.Tensor((WIDTH, WIDTH), "float32"))
    down = relax.Var("down", R.Tensor((WIDTH, WIDTH), "float32"))
    with builder.function("main", [x, up, down], {"num_input": 1}):
        with builder.dataflow():
            rows = builder.emit(comm.allgather(x, workers=world))
            y = builder.emit(relax.op.nn.relu(builder.emit(relax.op.matmul(rows, up))))
            z = builder.emit(relax.op.matmul(y, down))
            mine = builder.emit(comm.reduce_scatter(z, "sum", workers=world))
            out = builder.emit_output(relax.op.add(mine, x))
        builder.emit_func_output(out)
    return builder.get()


def sequence_parallel_in_numpy(given):
    xs, ups, downs = given
    rows = np.concatenate(xs)
    total = sum(np.maximum(rows @ up, 0) @ down for up, down in zip(ups, downs))
    return [part + x for part, x in zip(np.split(total, len(xs)), xs)]


def beside(world):
    '''Sums over ranks, and products that do not need them.'''
    builder = relax.BlockBuilder()
    x = relax.Var("x", R.Tensor((ROWS, WIDTH), "float32"))
    w = relax.Var("w", R.Tensor((WIDTH, WIDTH), "float32"))
    with builder.function("main", [x, w], {"num_input": 1}):
        with builder.dataflow():
            y = x
            for _ in range(3):
                part = builder.emit(relax.op.matmul(y, w))
                total = builder.emit(comm.allreduce(part, "sum"))
                more = builder.emit(relax.op.matmul(builder.emit(relax.op.nn.relu(part)), w))
                y = builder.emit(relax.op.add(total, builder.emit(relax.op.matmul(more, w))))
            out = builder.emit_output(y)
        builder.emit_func_output(out)
    return builder.get()


def beside_in_numpy(given):
    xs, ws = given
    ys = xs
    for _ in range(3):
        parts = [y @ w for y, w in zip(ys, ws)]
        total = sum(parts)
        ys = [total + np.maximum(part, 0) @ w @ w for part, w in zip(parts, ws)]
    return ys


PROGRAMS = {
    "layers": (layers, layers_in_numpy, [(ROWS, WIDTH), (ROWS, WIDTH), (WIDTH, WIDTH), (WIDTH,)]),
    "sequence": (
        sequence_parallel,
        sequence_parallel_in_numpy,
        [(ROWS, WIDTH), (WIDTH, WIDTH), (WIDTH, WIDTH)],
    ),
    "beside": (beside, beside_in_numpy, [(ROWS, WIDTH), (WIDTH, WIDTH)]),
}


def to_workers(session, arrays):
    tensor = session.empty(arrays[0].shape, "float32")
    for rank, array in enumerate(arrays):
        tensor.debug_copy_from(rank, array)
    return tensor


def check(session, name, world, graphs, overlap, posts=False):
    build, expected, shapes = PROGRAMS[name]
    context = tvm.transform.PassContext(config=GRAPHS if graphs else {})
    with context, collect_report() as report:
        pipeline = tvm_ipc.get_pipeline(TARGET, world, overlap=overlap, async_collectives=posts)
        program = tvm.compile(build(world), TARGET, relax_pipeline=pipeline)
    posted = [one for one in report.decisions if one.verdict == "asynchronous"]
    assert len(posted) == (3 if posts else 0)
    main = session.load_vm_module(program)["main"]
    weights = [
        [random.uniform(-0.3, 0.3, shape).astype("float32") for _ in range(world)]
        for shape in shapes
    ]
    tensors = [to_workers(session, arrays) for arrays in weights]
    for _ in range(3):  # captured, and replayed; other numbers at the same places
        first = [random.uniform(-1, 1, shapes[0]).astype("float32") for _ in range(world)]
        for rank, array in enumerate(first):
            tensors[0].debug_copy_from(rank, array)
        found = main(*tensors)
        for rank, right in enumerate(expected([first, *weights[1:]])):
            np.testing.assert_allclose(session.get(found, rank), right, rtol=1e-4, atol=1e-5)


world, threads = WORLD, THREADS
with tvm_ipc.Session(world, device="cuda", threads=threads, timeout=60) as session:
    for name in PROGRAMS:
        for graphs in (False,) if threads else (False, True):  # threads are refused to capture
            for overlap in (None, 1, 2):
                if name != "beside":
                    check(session, name, world, graphs, overlap)
            if name == "beside":
                check(session, name, world, graphs, None, posts=True)
print("right")
"""


@pytest.fixture(autouse=True)
def kernels() -> None:
    cuda_double.skip_without_kernels()


@pytest.mark.parametrize(("world", "threads"), [(2, False), (3, True)], ids=str)
def test_programs_on_gpus(world: int, threads: bool) -> None:
    out, report = cuda_double.run(f"WORLD, THREADS = {world}, {threads}\n{PROGRAM}", devices=world)
    assert out.split() == ["right"]
    assert report.violations == []
    assert threads or report.calls.get("cudaGraphLaunch", 0) > 0
