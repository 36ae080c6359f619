# SPDX-License-Identifier: Apache-2.0
"""Works on GPUs are on a stream of their own, on the double of CUDA, whose streams are late."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import cuda_double

HERE = Path(__file__).parent


def run(*command: str, backend: str = "cuda", **settings: object) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        env={**cuda_double.environment(**settings), "TVM_IPC_TEST_BACKEND": backend},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    said = f"exit code {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
    assert done.returncode == 0, said
    return done.stdout


@pytest.mark.parametrize(
    ("scenario", "kind", "devices", "backend"),
    [
        ("beside", "processes", 2, "cuda"),
        ("in_order", "processes", 2, "cuda"),
        ("in_order", "threads", 1, "cuda"),
        ("in_order", "processes", 2, "nccl"),
        ("in_order", "threads", 2, "nccl"),
        ("kept", "processes", 2, "cuda"),
        ("captured", "processes", 2, "cuda"),
        ("deadline", "processes", 2, "cuda"),
        ("deadline", "threads", 1, "cuda"),
    ],
)
def test_works(scenario: str, kind: str, devices: int, backend: str, tmp_path: Path) -> None:
    report = tmp_path / "report"
    settings = {"devices": devices, "memory": 1 << 30, "delay": "7:2000", "report": report}
    command = (str(HERE / "async_on_gpus.py"), scenario, "2", kind)
    said = run(*command, backend=backend, **settings)
    assert said.endswith("done\n")
    assert cuda_double.read_report(report).violations == []


def test_tests_of_cpus_pass_there() -> None:
    """Those of works; all pass, and take minutes: `TVM_IPC_TEST_BACKEND=cuda`, see places.py."""
    some = "goes_on or twice or kept or comes_home or not_started or post_different or waited_for"
    tests = [str(HERE / "test_async_operations.py"), "-k", some]
    run("-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, devices=4, memory=1 << 30)
