# SPDX-License-Identifier: Apache-2.0
"""Programs whose standard streams are closed: no file of a session takes their numbers."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
CLOSED = [c for count in range(1, 4) for c in itertools.combinations((0, 1, 2), count)]
#: Opens a session, lets its workers print, and reports what is behind the standard streams.
PROGRAM = """
import json, os, subprocess, sys
{before}
import tvm_ipc
{session}
    session.import_python_module("tests.runtime.worker_functions")
    say = session.get_global_func("tests.write_to_standard_streams")
    for _ in range(20):
        say("x" * 2000)
    {wait}
    ranks = [say("x").debug_get_from_remote(rank) for rank in range(2)]

def refused(use):
    try:
        use()
    except OSError as error:
        return error.strerror

report = {{
    "ranks": [json.loads(text) for text in ranks],
    "python": [stream is None for stream in (sys.stdin, sys.stdout, sys.stderr)],
    "refused": [
        refused(lambda: os.read(0, 1)),
        refused(lambda: os.write(1, b"x")),
        refused(lambda: os.write(2, b"x")),
    ],
    "child": subprocess.run([sys.executable, "-S", "-c", '''
import os, sys
def closed(number):
    try:
        os.fstat(number)
    except OSError:
        return True
    return False
sys.exit(sum(closed(number) << number for number in range(3)))
''']).returncode,
}}
with open(sys.argv[1], "w") as file:
    json.dump(report, file)
"""
OURS = "with tvm_ipc.Session(2, timeout=20, threads={threads}) as session:"
DISCOS = """
from tvm.runtime import disco
session = disco.ProcessSession(2)
tvm_ipc.init_ccl(session)
if True:"""


def report_of(closed: tuple[int, ...], tmp_path: Path, **parts: str) -> Any:
    """Run the program without some streams, and return what it reports."""
    path = tmp_path / "report"
    shell = " ".join(f"{number}>&-" for number in closed)
    code = PROGRAM.format(**{"before": "", "wait": "session.sync()", **parts})
    result = subprocess.run(
        ["sh", "-c", f'exec "$@" {shell}', "sh", sys.executable, "-c", code, str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "TVM_USE_RUNTIME_LIB": "1"},
    )
    assert result.returncode == 0, result.stderr
    return json.loads(path.read_text())


def check(report: Any, closed: tuple[int, ...]) -> None:
    for links in report["ranks"]:
        for number in closed:
            assert links[number] == "/dev/null", links
    assert report["python"] == [number in closed for number in range(3)]
    for number in closed:
        assert report["refused"][number] == "Bad file descriptor"
    assert report["child"] == sum(1 << number for number in closed)


@pytest.mark.slow
@pytest.mark.parametrize("closed", CLOSED, ids=str)
def test_worker_processes_print_without_standard_streams(
    closed: tuple[int, ...], tmp_path: Path
) -> None:
    check(report_of(closed, tmp_path, session=OURS.format(threads=False)), closed)


@pytest.mark.parametrize("closed", [(1,), (0, 1, 2)], ids=str)
def test_worker_threads_print_without_standard_streams(
    closed: tuple[int, ...], tmp_path: Path
) -> None:
    check(report_of(closed, tmp_path, session=OURS.format(threads=True)), closed)


@pytest.mark.parametrize("closed", [(1,), (0, 1, 2)], ids=str)
def test_workers_of_disco_print_without_standard_streams(
    closed: tuple[int, ...], tmp_path: Path
) -> None:
    wait = "session._sync_worker(0), session._sync_worker(1)"
    check(report_of(closed, tmp_path, session=DISCOS, wait=wait), closed)


def test_program_that_closes_its_streams_between_sessions(tmp_path: Path) -> None:
    before = """
import tvm_ipc
with tvm_ipc.Session(2, timeout=20):
    pass
os.closerange(0, 3)
sys.stdin = sys.stdout = sys.stderr = None
"""
    report = report_of((), tmp_path, before=before, session=OURS.format(threads=False))
    assert [links[1] for links in report["ranks"]] == ["/dev/null"] * 2
    assert report["child"] == 0b111


def test_file_of_the_program_with_the_number_of_a_closed_stream_stays_as_it_is(
    tmp_path: Path,
) -> None:
    path = tmp_path / "own"
    before = f"own = open({str(path)!r}, 'w')\nassert own.fileno() == 1"
    report_of((1,), tmp_path, before=before, session=OURS.format(threads=False))
    # Worker 0 is a thread of the program, whose descriptor 1 it is; worker 1 does not inherit it.
    assert "rank 1" not in path.read_text()
