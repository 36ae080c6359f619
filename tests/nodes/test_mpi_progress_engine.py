# SPDX-License-Identifier: Apache-2.0
"""The engine over MPI: messages arrive whole and in order, and after a recovery none of before."""

from __future__ import annotations

import subprocess
import sys

import pytest

import tvm_ipc
from tests.nodes.node_processes import SECONDS
from tvm_ipc.errors import WorkerError
from tvm_ipc.nodes.find_mpi_installation import Mpi
from tvm_ipc.nodes.mpiexec_launcher import NodeAddresses, command_line

CHECK = """
from mpi4py import MPI
from tvm_ipc.nodes.mpi_progress_thread import check
check(MPI.COMM_WORLD, 1 << 20)
print("ok")
check(MPI.COMM_WORLD, 1 << 40)
"""

HANGING = """
import mpi4py, threading, time
mpi4py.rc.initialize = False  # MPI by itself, without a launcher, leaves files
from tvm_ipc.nodes.mpi_progress_thread import Engine
engine = Engine.__new__(Engine)
engine._stop, engine._wire = (lambda wire: None), None
for seconds in (0, 600):
    engine._thread = threading.Thread(target=time.sleep, args=(seconds,), daemon=True)
    engine._thread.start()
    print(engine.close(0.5))
"""


def test_messages_arrive_and_a_recovery_forgets_those_of_before(mpi: Mpi) -> None:
    with tvm_ipc.Session(3, hosts=3, timeout=SECONDS) as session:
        session.import_python_module("tests.nodes.message_functions")
        play = session.get_global_func("tests.nodes.play")
        for seed in range(6):
            play(3, 2 * seed, True)
            with pytest.raises(WorkerError, match="enough"):
                session.sync()
            play(3, 2 * seed + 1, False)
            session.sync()


def test_mpi_with_too_few_tags_is_refused(mpi: Mpi) -> None:
    done = subprocess.run(
        command_line(mpi, NodeAddresses(1), [sys.executable, "-c", CHECK]),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode != 0 and done.stdout.split() == ["ok"]
    assert "has tags up to" in done.stderr


def test_an_engine_that_hangs_in_mpi_is_left(mpi: Mpi) -> None:
    command = [sys.executable, "-c", HANGING]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert (done.returncode, done.stdout.split()) == (0, ["True", "False"]), done.stderr
