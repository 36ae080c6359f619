# SPDX-License-Identifier: Apache-2.0
"""Sessions on GPUs, from the call in Python to the kernels, on the double of CUDA.

All of tests/runtime can be run there, or on real GPUs: see `places.py`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import cuda_double

SCENARIOS = Path(__file__).with_name("sessions_on_gpus.py")


@pytest.mark.parametrize(
    ("scenario", "workers", "kind", "devices"),
    [
        ("collectives", 2, "processes", 4),
        ("collectives", 3, "threads", 4),
        ("collectives", 4, "processes", 4),
        ("values", 3, "processes", 4),
        ("values", 2, "threads", 4),
        ("waits", 3, "threads", 1),
        ("waits", 2, "threads", 2),
        ("errors", 3, "processes", 4),
        ("errors", 3, "threads", 4),
        ("deadline", 2, "processes", 4),
        ("deadline", 2, "threads", 1),
        ("death", 3, "processes", 4),
        ("beside", 2, "threads", 4),
        ("of_disco", 2, "processes", 4),
        ("of_disco", 2, "threads", 4),
    ],
)
def test_session(scenario: str, workers: int, kind: str, devices: int, tmp_path: Path) -> None:
    report = tmp_path / "report"
    settings = {"devices": devices, "memory": 1 << 30, "report": report}
    done = subprocess.run(
        [sys.executable, str(SCENARIOS), scenario, str(workers), kind],
        # Without TVM's compiler it starts in half the time.
        env={**cuda_double.environment(**settings), "TVM_USE_RUNTIME_LIB": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stderr[-5000:]}"
    assert done.stdout.endswith("done\n")
    assert cuda_double.read_report(report).violations == []


def test_tests_of_cpus_pass_there() -> None:
    """Some of them, which take seconds; `places.py` says how to run others."""
    here = Path(__file__).parent
    disagree = "operations_that_differ or order_that_differs or nobody"
    wrong = "vm_function or no_memory_holds or value_of_another or without_a_text"
    commands = (
        [str(here / "test_teams.py"), str(here / "test_views.py")],
        [str(here / "test_session_disagreement.py"), "-k", disagree],
        [str(here / "test_session_errors.py"), "-k", wrong],
    )
    for tests in commands:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
            env={
                **cuda_double.environment(devices=4, memory=1 << 30),
                "TVM_IPC_TEST_BACKEND": "cuda",
            },
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-5000:]
