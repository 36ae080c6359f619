# SPDX-License-Identifier: Apache-2.0
"""What is tested of sessions on CPUs, on GPUs; and what NVIDIA's checker says of the kernels."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.gpu_sessions import HELPERS
from tvm_ipc.gpu import discovery

pytestmark = pytest.mark.gpu
MOST_SECONDS = 300


@pytest.mark.parametrize("kind", ["processes", "threads"])
@pytest.mark.parametrize(
    ("scenario", "workers"),
    [
        *(("collectives", 2), ("collectives", 3), ("values", 2), ("errors", 3)),
        *(("deadline", 2), ("death", 3), ("of_disco", 2)),
    ],
)
def test_scenarios_of_sessions(scenario: str, workers: int, kind: str) -> None:
    if kind == "threads" and scenario == "death":
        pytest.skip("a thread cannot be killed")
    if kind == "threads" and workers > len(discovery.find().devices):
        pytest.skip(
            f"wants {workers} GPUs: those that share one are tried in test_gpu_collectives.py"
        )
    done = subprocess.run(
        [sys.executable, str(HELPERS / "sessions_on_gpus.py"), scenario, str(workers), kind],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=MOST_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert "done" in done.stdout


COLLECTIVES = """
import tvm_ffi
from tests.gpu import gpu_sessions

with gpu_sessions.open_session(2) as session:
    for strategy in range(4):
        run = session.get_global_func("tests.gpu.digest_of_cases")
        run(tvm_ffi.Shape([1, 36, 4099, 70001]), "bfloat16", 0, strategy)
    run = session.get_global_func("tests.gpu.replays")
    run(tvm_ffi.Shape([5, 70001]), "float32", 3, "private", 3)
print("all was right")
"""


@pytest.mark.parametrize("tool", ["memcheck", "synccheck"])
def test_compute_sanitizer_finds_nothing(tool: str) -> None:
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(sanitizer).exists():
        pytest.skip("compute-sanitizer is not installed")
    code = COLLECTIVES
    done = subprocess.run(
        [sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=MOST_SECONDS,
        check=False,
    )
    if "Device not supported" in done.stdout:
        pytest.skip("compute-sanitizer does not support this device")
    assert done.returncode == 0, done.stdout[-6000:]
    assert "all was right" in done.stdout
