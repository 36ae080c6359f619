# SPDX-License-Identifier: Apache-2.0
"""A program that its user stops (Ctrl-Z) for longer than the heartbeat, and continues."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from tests.nodes.node_processes import SECONDS
from tvm_ipc.nodes.find_mpi_installation import Mpi

#: Nodes and controller call each other silent after 10.
STOPPED_SECONDS = 13.0
PROGRAM = """
import sys, tvm_ipc
with tvm_ipc.Session(2, hosts=2) as session:
    x, y = session.empty((4,), "float32"), session.empty((4,), "float32")
    session.allreduce(x, y)
    session.sync()
    print("stop", flush=True)
    sys.stdin.readline()
    for _ in range(20):
        session.allreduce(x, y)
        session.sync()
    print("goes on", flush=True)
"""


def test_a_stopped_program_keeps_its_session(
    mpi: Mpi, started: Callable[[], dict[int, str]]
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as program:
        try:
            assert program.stdin is not None and program.stdout is not None
            assert program.stdout.readline() == "stop\n"
            os.kill(program.pid, signal.SIGSTOP)
            time.sleep(STOPPED_SECONDS)
            os.kill(program.pid, signal.SIGCONT)
            said, _ = program.communicate("\n", SECONDS)
            assert (program.returncode, said) == (0, "goes on\n")
        finally:
            program.kill()
