# SPDX-License-Identifier: Apache-2.0
"""`mpiexec -n 2 tvm-ipc node -- python main.py`: a launcher of the user's gives the nodes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable

import pytest

import tvm_ipc
from tests.nodes.node_processes import SECONDS
from tvm_ipc.__main__ import main
from tvm_ipc.errors import IPCError
from tvm_ipc.nodes.find_mpi_installation import Mpi
from tvm_ipc.nodes.mpiexec_launcher import NodeAddresses, command_line

PROGRAM = """
import sys
import numpy as np
import tvm_ipc
from tvm_ipc.errors import IPCError

with tvm_ipc.Session(3, hosts="allocation", timeout=60) as session:
    parts = session.scatter(np.arange(6, dtype="float32").reshape(3, 2))
    total = session.empty((2,), "float32")
    session.allreduce(parts, total)
    print(session.get(total, 2).tolist(), flush=True)
try:
    tvm_ipc.Session(2, hosts="allocation")
except IPCError as error:
    print(error, flush=True)
sys.exit(7)
"""


def run(mpi: Mpi, *program: str, nodes: int = 2) -> subprocess.CompletedProcess[str]:
    node = [sys.executable, "-m", "tvm_ipc", "node", "--", *program]
    return subprocess.run(
        command_line(mpi, NodeAddresses(nodes), node),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env={**os.environ, "OMPI_MCA_btl": "^sm"},
    )


def test_a_program_with_a_session(mpi: Mpi, started: Callable[[], dict[int, str]]) -> None:
    done = run(mpi, sys.executable, "-c", PROGRAM)
    assert done.returncode == 7, done.stderr
    total, again, *_ = done.stdout.splitlines()
    assert total == "[6.0, 9.0]"
    assert "have served a session" in again


@pytest.mark.parametrize(
    ("program", "code", "said"),
    [
        ((sys.executable, "-c", "print('ran'); exit(5)"), 5, "ran"),
        (("/no/such/program",), 1, "node: /no/such/program does not start: "),
        ((), 2, "tvm-ipc node: the following arguments are required: program"),
    ],
)
def test_programs_without_one(
    program: tuple[str, ...],
    code: int,
    said: str,
    mpi: Mpi,
    started: Callable[[], dict[int, str]],
) -> None:
    done = run(mpi, *program)
    assert done.returncode == code and said in done.stdout + done.stderr, done.stderr


def test_without_mpi4py_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    assert main(["node", "--", "true"]) == 1
    said = capsys.readouterr().err
    assert re.fullmatch(
        r"tvm-ipc: node: .* not load .*: pip install '\.\[mpi\]' in a checkout of tvm-ipc: .*\n",
        said,
    )


def test_elsewhere_there_is_no_allocation() -> None:
    with pytest.raises(IPCError, match="for programs that a launcher starts through tvm-ipc node"):
        tvm_ipc.Session(2, hosts="allocation")
