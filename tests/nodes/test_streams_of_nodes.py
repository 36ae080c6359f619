# SPDX-License-Identifier: Apache-2.0
"""Programs without standard streams, or with SIGPIPE at its default action, and two nodes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tvm_ipc.errors import IPCError
from tvm_ipc.nodes.find_mpi_installation import OPEN_MPI, Mpi
from tvm_ipc.nodes.mpiexec_launcher import Launcher, NodeAddresses

Started = Callable[[], dict[int, str]]

PRINTING = """
import sys
{before}
import tvm_ipc
with tvm_ipc.Session(2, hosts=2, timeout=40) as session:
    session.import_python_module("tests.nodes.node_functions")
    write = session.get_global_func("tests.nodes.write_to_standard_streams")
    for _ in range(20):
        write("x" * 2000)
    told = [write("x").debug_get_from_remote(rank) for rank in range(2)]
print("printed")
with open(sys.argv[1], "w") as file:
    file.write("\\n".join(told))
"""
DEATH = """
import os, signal, sys, time
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
import tvm_ipc
session = tvm_ipc.Session(2, hosts=2, timeout=40)
session.sync()
who = {who}
os.kill(who, signal.SIGKILL)
time.sleep(1)  # nobody is at the other end of its connections any more
for use in (lambda: session.empty((4,), "float32"), session.close):
    try:
        use()
        print("no error")
    except tvm_ipc.errors.IPCError as error:
        print(type(error).__name__)
del session
assert signal.getsignal(signal.SIGPIPE) is signal.SIG_DFL
assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == signal.sigpending() == set()
"""


def run(code: str, *arguments: str, shell: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", f'exec "$@" {shell}', "sh", sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "TVM_USE_RUNTIME_LIB": "1"},
    )


@pytest.mark.parametrize("closed", [(1,), (1, 2), (0, 1, 2)], ids=str)
def test_workers_print_without_standard_streams(
    mpi: Mpi, started: Started, tmp_path: Path, closed: tuple[int, ...]
) -> None:
    path = tmp_path / "report"
    shell = " ".join(f"{number}>&-" for number in closed)
    result = run(PRINTING.format(before=""), str(path), shell=shell)
    assert (result.returncode, result.stdout) == (0, ""), result.stderr
    links = path.read_text().splitlines()[0].split()  # of worker 0, in the program
    assert [links[number] for number in closed] == ["/dev/null"] * len(closed)


def test_prints_of_workers_go_to_no_file_of_the_program(
    mpi: Mpi, started: Started, tmp_path: Path
) -> None:
    own = tmp_path / "own"
    before = f"own = open({str(own)!r}, 'w')\nassert own.fileno() == 1"
    result = run(PRINTING.format(before=before), str(tmp_path / "report"), shell="1>&-")
    assert result.returncode == 0, result.stderr
    assert "rank 1" not in own.read_text()


def test_prints_of_workers_arrive(mpi: Mpi, started: Started, tmp_path: Path) -> None:
    result = run(PRINTING.format(before=""), str(tmp_path / "report"))
    assert result.returncode == 0, result.stderr
    assert "rank 0" in result.stdout
    assert "rank 1" in result.stdout


@pytest.mark.parametrize(
    "who", ["session.pids[1]", "session._dispatcher.pool.nodes[1].facts['process']"]
)
def test_death_with_sigpipe_at_its_default_action(mpi: Mpi, started: Started, who: str) -> None:
    result = run(DEATH.format(who=who))
    assert (result.returncode, result.stdout) == (0, "WorkerDiedError\nno error\n"), result.stderr


def test_the_traceback_of_a_death_is_one_error(mpi: Mpi, started: Started) -> None:
    death = DEATH.partition("for use in")[0].format(who="session.pids[1]")
    result = run(death + "session.empty((4,), 'float32')")
    assert result.returncode == 1
    assert result.stderr.count("Traceback") == 1, result.stderr
    assert "During handling" not in result.stderr and "Write Error" not in result.stderr
    assert "WorkerDiedError: worker 1 of node 1 " in result.stderr
    assert len(result.stderr.splitlines()) <= 30, result.stderr


def test_launcher_that_ends_before_it_is_told(tmp_path: Path) -> None:
    path = tmp_path / "mpiexec"
    path.write_text("#!/bin/sh\nexec <&-\nexit 3\n")
    path.chmod(0o755)
    action = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        for _ in range(5):
            launcher = Launcher(
                Mpi(OPEN_MPI, path, "Open MPI 5"), NodeAddresses(2), ["x"], "x" * 100_000
            )
            launcher.process.wait()
            with pytest.raises(IPCError, match="ended with exit code 3"):
                launcher.check()
            launcher.stop(0.0)
    finally:
        signal.signal(signal.SIGPIPE, action)
