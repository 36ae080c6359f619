# SPDX-License-Identifier: Apache-2.0
"""Any number of chunks and of blocks of rows, in loops, in workers on the fake driver of CUDA."""

from __future__ import annotations

import pytest

from tests import cuda_double

pytestmark = pytest.mark.skipif(
    "not __import__('shutil').which('cmake')", reason="the fake driver is built with cmake"
)

PROGRAM = """
from itertools import chain

import tvm
from tvm import tirx

import tvm_ipc
from tests.end_to_end.test_chunks_in_loops import batched, batches
from tests.end_to_end.test_marked_for_streams import examples, linear
from tests.runtime.tensors_of_ranks import assert_each, assert_each_tuple, put_each
from tvm_ipc.comm import Mesh

TARGET = tvm.target.Target({"kind": "cuda", "arch": "sm_90"}, host="llvm")
n = tirx.Var("n", "int64")
team = [tuple(range(WORLD))]
chunks = (examples(team, (count, WORLD, 4, 8), 16) for count in (0, 1, 2, 3, 9))
PROGRAMS = [(linear(Mesh({"d": WORLD}), "d", (n, WORLD, 4, 8), 16), chain(*chunks))]
for kind in ("allgather", "reduce_scatter"):
    examples_of = batches(kind, WORLD, 4 * WORLD, (0, 1, 3, 9))
    PROGRAMS.append((batched(kind, WORLD, n, 4 * WORLD, flat=False), examples_of))

with tvm_ipc.Session(WORLD, device="cuda", threads=THREADS, timeout=60) as session:
    for module, values in PROGRAMS:
        pipeline = tvm_ipc.get_pipeline(TARGET, WORLD, overlap=2)
        executable = tvm.compile(module, TARGET, relax_pipeline=pipeline)
        main = session.load_vm_module(executable)["main"]
        for first, others, wanted in values:
            result = main(put_each(session, first), *map(session.put, others))
            is_tuple = isinstance(wanted[0], list)
            (assert_each_tuple if is_tuple else assert_each)(result, wanted)
print("right")
"""


@pytest.mark.parametrize(("world", "threads"), [(2, False), (3, True)], ids=str)
def test_loops_on_gpus(world: int, threads: bool) -> None:
    cuda_double.skip_without_kernels()
    out, report = cuda_double.run(f"WORLD, THREADS = {world}, {threads}\n{PROGRAM}", devices=world)
    assert out.split() == ["right"]
    assert report.violations == []
