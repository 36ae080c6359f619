# SPDX-License-Identifier: Apache-2.0
"""What is tested of sessions on CPUs, on GPUs; and what NVIDIA's checker says of the kernels."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_sessions import HELPERS, HERE

pytestmark = pytest.mark.gpu
#: Of tests/runtime: what sessions do is the same on every device.
FILES = (
    "test_collectives.py",
    "test_allreduce_norm.py",
    "test_disco_collectives.py",
    "test_divisions.py",
    "test_teams.py",
    "test_session_disagreement.py",
    "test_faults.py",
)
MOST_SECONDS = 300


@pytest.mark.parametrize("name", FILES)
def test_as_on_cpus(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(HELPERS / name)],
        cwd=HERE.parents[1],
        env={**os.environ, "TVM_IPC_TEST_BACKEND": "cuda"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=MOST_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout.splitlines()[-1], done.stdout[-2000:]


COLLECTIVES = """
import sys
sys.path[:0] = {paths!r}
import gpu_sessions, tvm_ffi

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
    code = COLLECTIVES.format(paths=[str(HERE), str(HELPERS)])
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
