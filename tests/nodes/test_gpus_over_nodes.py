# SPDX-License-Identifier: Apache-2.0
"""Sessions on GPUs of several nodes, by NCCL: on doubles of CUDA and NCCL, and two nodes of MPI's.

The double of NCCL moves data through a file of this machine, as NCCL would over the network.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import cuda_double
from tvm_ipc.nodes.find_mpi_installation import Mpi

SCENARIOS = Path(__file__).with_name("gpus_over_nodes.py")


@pytest.mark.parametrize("scenario", ["four", "two", "refused"])
def test_session(
    scenario: str, mpi: Mpi, started: Callable[[], dict[int, str]], tmp_path: Path
) -> None:
    report = tmp_path / "report"
    settings = {"devices": 4, "memory": 1 << 30, "report": report}
    environment = cuda_double.environment(**settings)
    done = subprocess.run(
        [sys.executable, str(SCENARIOS), scenario],
        # Without TVM's compiler it starts in half the time.
        env={**environment, "TVM_USE_RUNTIME_LIB": "1", "TVM_IPC_TEST_BACKEND": "nccl"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stderr[-8000:]}"
    assert done.stdout.endswith("done\n")
    assert cuda_double.read_report(report).violations == []
