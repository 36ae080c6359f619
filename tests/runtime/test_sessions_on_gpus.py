# SPDX-License-Identifier: Apache-2.0
"""Sessions on GPUs, from the call in Python to the kernels, on the double of CUDA.

All of tests/runtime can be run there, or on real GPUs: see `places.py`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import cuda_double
import pytest

SCENARIOS = Path(__file__).with_name("sessions_on_gpus.py")


@pytest.mark.parametrize(
    ("scenario", "workers", "kind"),
    [
        ("collectives", 2, "processes"),
        ("collectives", 3, "threads"),
        ("collectives", 4, "processes"),
        ("values", 3, "processes"),
        ("values", 2, "threads"),
        ("errors", 3, "processes"),
        ("errors", 3, "threads"),
        ("deadline", 2, "processes"),
        ("deadline", 2, "threads"),
        ("death", 3, "processes"),
        ("of_disco", 2, "processes"),
        ("of_disco", 2, "threads"),
    ],
)
def test_session(scenario: str, workers: int, kind: str, tmp_path: Path) -> None:
    report = tmp_path / "report"
    settings = {"devices": 4, "memory": 1 << 30, "report": report}
    done = subprocess.run(
        [sys.executable, str(SCENARIOS), scenario, str(workers), kind],
        env=cuda_double.environment(**settings),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stderr[-5000:]}"
    assert done.stdout.endswith("done\n")
    assert cuda_double.read_report(report).violations == []
