# SPDX-License-Identifier: Apache-2.0
"""Operators and collectives that are marked for streams, in workers on the fake driver of CUDA."""

from __future__ import annotations

import pytest

from tests import cuda_double

pytestmark = pytest.mark.skipif(
    "not __import__('shutil').which('cmake')", reason="the fake driver is built with cmake"
)

PROGRAM = """
import numpy as np
import tvm

import tvm_ipc
from tests.end_to_end.compare_with_numpy import Each
from tests.end_to_end.test_marked_operators import PROGRAMS
from tests.runtime.tensors_of_ranks import put_each
from tvm_ipc.comm import Mesh

TARGET = tvm.target.Target({"kind": "cuda", "arch": "sm_90"}, host="llvm")
NAMES = (
    *("Allgather", "Allreduce", "ReduceScatter", "AG_after", "matmul_AR", "matmul_RS"),
    *("AG_matmul along axis 1", "AG_matmul_AR", "AllgatherP2p", "AG_matmul_P2p"),
    *("ReduceScatterRing", "ReduceScatterRing of a sum"),
)

mesh = Mesh({"d": WORLD})
with tvm_ipc.Session(WORLD, device="cuda", threads=THREADS, timeout=60) as session:
    for name in NAMES:
        program = PROGRAMS[name](WORLD, 2)
        pipeline = tvm_ipc.get_pipeline(TARGET, WORLD)
        executable = tvm.compile(program.module(mesh), TARGET, relax_pipeline=pipeline)
        main = session.load_vm_module(executable)["main"]
        for first, others, right in program.examples(mesh):
            given = [put_each(session, first)]
            for other in others:
                values = other.values if isinstance(other, Each) else [other] * WORLD
                given.append(put_each(session, values))
            found = main(*given)
            for rank, array in right.items():
                np.testing.assert_array_equal(session.get(found, rank), array, f"{name}, {rank}")
print("right")
"""


@pytest.mark.parametrize(("world", "threads"), [(2, False), (3, True)], ids=str)
def test_marked_programs_on_gpus(world: int, threads: bool) -> None:
    cuda_double.skip_without_kernels()
    out, report = cuda_double.run(f"WORLD, THREADS = {world}, {threads}\n{PROGRAM}", devices=world)
    assert out.split() == ["right"]
    assert report.violations == []
