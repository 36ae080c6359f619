# SPDX-License-Identifier: Apache-2.0
"""Chunks on several streams of each rank's GPU, on the fake driver, against NumPy."""

from __future__ import annotations

import pytest

from tests import cuda_double

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "not __import__('shutil').which('cmake')", reason="the fake driver is built with cmake"
    ),
]

PROGRAM = """
import numpy as np
import tvm
from tvm import relax
from tvm.relax import op

import tvm_ipc
from tests.transform.test_compute_streams import events, marked, summed
from tvm_ipc.analysis.walk_and_rewrite_bindings import change_functions, rewrite
from tvm_ipc.transform import collect_report

TARGET = tvm.target.Target({"kind": "cuda", "arch": "sm_90"}, host="llvm")
GRAPHS = {"relax.backend.use_cuda_graph": True}
random = np.random.default_rng(0)


def compiled(mod, streams, computed, graphs=False, waits=True):
    config = GRAPHS if graphs else {}
    with tvm.transform.PassContext(config=config), collect_report() as report:
        lowered = tvm_ipc.get_pipeline(TARGET, 2, streams=streams)(mod)
        if not waits:
            lowered = change_functions(lowered, without_waits)
        program = tvm.compile(lowered, TARGET, relax_pipeline=tvm.transform.Sequential([]))
    (mark,) = [one for one in report.decisions if one.subject.startswith("stream=")]
    assert mark.reason.endswith(f", computed on {computed} streams"), mark.reason
    return program


def without_waits(_name, function):
    def change(binding, value):
        is_call = isinstance(value, relax.Call) and isinstance(value.op, relax.ExternFunc)
        return [] if is_call and value.op.global_symbol == "tvm_ipc.wait_stream" else None
    return rewrite(function, change)


def numbers(*shape):
    return random.integers(-4, 5, shape).astype("float32")


def gathers(session, chunks, streams, computed, **options):
    program = compiled(marked((chunks, 2, 8, 32)), streams, computed, **options)
    main = session.load_vm_module(program)
    for _ in range(3):
        x, w, b = numbers(chunks, 2, 8, 32), numbers(32, 16), numbers(16)
        mine = session.scatter(np.stack([x[:, :1], x[:, 1:]]))
        out = main["main"](mine, session.put(w), session.put(b))
        for rank in range(2):
            np.testing.assert_array_equal(session.get(out, rank), x @ w + b)


def then_more(chunks):
    # The kernel after the join, on stream 0, reads the results of all streams.
    return summed(chunks, after=lambda y: op.negative(op.nn.relu(y)))


def sums(session, chunks, streams, computed, rounds=3, **options):
    main = session.load_vm_module(compiled(then_more(chunks), streams, computed, **options))["main"]
    wrong = 0
    for _ in range(rounds):
        x, w = numbers(chunks, 8, 32), numbers(32, 16)
        shards = session.scatter(np.stack(np.split(x, 2, 2)))
        weights = session.scatter(np.stack(np.split(w, 2, 0)))
        out = main(shards, weights)
        for rank in range(2):
            wrong += not np.array_equal(session.get(out, rank), -np.maximum(x @ w, 0))
    return wrong


with tvm_ipc.Session(2, device="cuda", backend=BACKEND, threads=THREADS, timeout=60) as session:
    if MISSING:
        print("right" if sums(session, 4, 2, 2, 10, waits=False) else "no wait was missed")
    else:
        gathers(session, 4, 2, 2)
        gathers(session, 7, 3, 3)
        gathers(session, 20, 3, 3)  # in a loop
        assert sums(session, 5, 2, 2) == sums(session, 5, 3, 3) == 0
        if not THREADS:
            assert sums(session, 4, 2, 2, graphs=True) == 0
        print("right")
"""


@pytest.fixture(autouse=True)
def kernels() -> None:
    cuda_double.skip_without_kernels()


@pytest.mark.parametrize(
    ("backend", "threads"), [("cuda", False), ("cuda", True), ("nccl", False)], ids=str
)
def test_chunks_on_streams(backend: str, threads: bool) -> None:
    settings = f"BACKEND, THREADS, MISSING = {backend!r}, {threads}, False\n"
    out, report = cuda_double.run(settings + PROGRAM, devices=2, delay="3:300")
    assert out.split() == ["right"]
    assert report.violations == []


def test_the_waits_between_streams_are_needed() -> None:
    """Without them, stream 0 reads what stream 1 has not computed yet."""
    settings = "BACKEND, THREADS, MISSING = 'cuda', False, True\n"
    out, _ = cuda_double.run(settings + PROGRAM, devices=2, delay="3:3000")
    assert out.split() == ["right"]
