# SPDX-License-Identifier: Apache-2.0
"""The tests of GPUs and the benchmark work where there is none: on the double of CUDA."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.gpu_sessions import BENCHMARKS, HERE
from tvm_ipc.gpu import discovery

cuda_double = pytest.importorskip("tests.cuda_double", reason="a kit has no double of CUDA")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "TVM_IPC_DOUBLE_KERNELS" in os.environ or not discovery.find().architectures,
        reason="runs on the double already, or tvm_ipc was built without CUDA kernels",
    ),
]
#: Some of each test: all of them take five minutes there.
SOME = (
    "bits_are_those and (2-bfloat16 or 3-int64 or 5-float32) or strategies_have or 36-float32 "
    "or replayed or (of_more_ranks and 3-) or want_queues or two_streams or another_stream "
    "or (test_on_gpus and processes)"
)


def run(report: Path, devices: int, *command: str) -> str:
    """Run it on the double; check that nothing was wrong that a driver would not notice."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=HERE.parents[1],
        env=cuda_double.environment(devices=devices, memory=2 << 30, report=report),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    assert cuda_double.read_report(report).violations == []
    return done.stdout


#: With a GPU for each rank: what is different there.
APART = "36-float32 or replayed or two_streams or (test_on_gpus and processes)"


@pytest.mark.parametrize(("devices", "some"), [(1, SOME), (2, APART)], ids=["one GPU", "two GPUs"])
def test_tests_pass(devices: int, some: str, tmp_path: Path) -> None:
    tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "-k", some, str(HERE)]
    said = run(tmp_path / "report", devices, *tests)
    assert " passed" in said.splitlines()[-1]


def test_benchmark_runs(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    command = [str(BENCHMARKS / "allreduce_cuda.py"), "--smoke", "--json", str(results)]
    said = run(tmp_path / "report", 1, *command)
    assert "2 threads: microseconds" in said
    assert "2 processes: microseconds" in said
    assert '"what": "fused norm"' in results.read_text()
    assert '"what": "norm apart"' in results.read_text()
    assert "nothing is judged" in said
