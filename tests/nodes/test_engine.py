# SPDX-License-Identifier: Apache-2.0
"""The engine over MPI: messages arrive whole and in order, and after a recovery none of before."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from node_processes import SECONDS

from tvm_ipc.nodes.launcher import Places, command_line
from tvm_ipc.nodes.mpi import Mpi

PROGRAM = Path(__file__).parent / "engine_ranks.py"


def run(mpi: Mpi, ranks: int, *arguments: int) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, str(PROGRAM), *map(str, arguments)]
    return subprocess.run(
        command_line(mpi, Places(ranks), program),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


@pytest.mark.parametrize("ranks", [2, 3])
def test_messages_arrive_and_a_recovery_forgets_those_of_before(mpi: Mpi, ranks: int) -> None:
    done = run(mpi, ranks, 1 << 27, 6)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["ok"] * ranks


def test_mpi_with_too_few_tags_is_refused(mpi: Mpi) -> None:
    done = run(mpi, 2, 1 << 40, 1)
    assert done.returncode != 0
    assert "has tags up to" in done.stderr
