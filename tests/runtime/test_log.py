# SPDX-License-Identifier: Apache-2.0
"""What is logged: nothing unless somebody asks, and then by every process, whatever happens."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable

import pytest

import tvm_ipc
from tvm_ipc.errors import IPCError, WorkerError
from tvm_ipc.runtime import log
from tvm_ipc.transform.report import Decision, collecting, note

LINE = re.compile(
    r"\d\d:\d\d:\d\d\.\d{3} tvm_ipc \[(controller|rank \d+), pid (\d+)\] [A-Z]+: +\S.*"
)
#: An error in two lines that a session recovers from, a death, and a session of threads.
EVENTS = """
import os, signal
import numpy as np
import tvm_ipc
from tvm_ipc.errors import WorkerDiedError, WorkerError
with tvm_ipc.Session(2) as session:
    try:
        session.get_global_func("no.such\\nfunction")
        session.sync()
        raise SystemExit("no error")
    except WorkerError:
        pass
    os.kill(session.pids[1], signal.SIGKILL)
    try:
        session.sync()
        raise SystemExit("no death")
    except WorkerDiedError:
        pass
with tvm_ipc.Session(2, threads=True):
    pass
"""


def run(code: str, level: str | None, **more: object) -> subprocess.CompletedProcess[str]:
    # As for most users: with PYTHONUNBUFFERED Python writes in another way.
    without = ("TVM_IPC_LOG", "PYTHONUNBUFFERED")
    environment = {name: value for name, value in os.environ.items() if name not in without}
    environment["TVM_USE_RUNTIME_LIB"] = "1"  # starts in half the time
    if level is not None:
        environment["TVM_IPC_LOG"] = level
    options = {"stderr": subprocess.PIPE, "timeout": 120, **more}
    return subprocess.run([sys.executable, "-c", code], text=True, env=environment, **options)  # type: ignore[call-overload,no-any-return]


def test_silent_by_default() -> None:
    for level in (None, " "):
        result = run(EVENTS, level)
        assert (result.returncode, result.stderr) == (0, "")


def test_every_line_names_its_process_and_all_is_told() -> None:
    result = run(EVENTS, " Debug ")
    assert result.returncode == 0, result.stderr
    lines = result.stderr.splitlines()
    assert [line for line in lines if not LINE.fullmatch(line)] == []
    told = [
        r"controller, .* session 1: starts 2 workers, processes",
        r"controller, .* session 1: backend shm: ",
        r"controller, .* session 1: deadline 300 s",
        r"rank 1, .* waits for commands",
        r"controller, .* session 1: rank 1 joined, pid \d+",
        r"controller, .* session 1: all workers are ready",
        r"controller, .* WARNING: session 1: rank 0: ValueError: the worker has no .* no\.such",
        r"controller, .* WARNING: function",
        r"controller, .* session 1: recovered",
        r"controller, .* ERROR: session 1: rank 1 .* died",
        r"controller, .* session 1: ended: rank 1",
        r"controller, .* session 2: starts 2 workers, threads",
        r"controller, .* session 2: ended$",
    ]
    for pattern in told:
        assert re.search(rf"^\S+ tvm_ipc \[{pattern}", result.stderr, re.MULTILINE), pattern
    pids = {match[2] for line in lines if (match := LINE.fullmatch(line))}
    assert len(pids) == 2


def test_level_leaves_out_what_is_below() -> None:
    result = run(EVENTS, "warning")
    assert result.returncode == 0
    levels = set(re.findall(r"\] ([A-Z]+): ", result.stderr))
    assert levels == {"WARNING", "ERROR"}


def test_a_level_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TVM_IPC_LOG", "loud")
    with pytest.raises(IPCError, match="TVM_IPC_LOG is 'loud'; it must be one of debug, info"):
        tvm_ipc.Session(2)


def test_a_program_may_listen_itself(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tvm_ipc")
    with tvm_ipc.Session(1) as session, pytest.raises(WorkerError):
        session.get_global_func("no.such.function")
        session.sync()
    assert "all workers are ready" in caplog.text
    assert "no.such.function" in caplog.text
    assert {record.name for record in caplog.records} == {"tvm_ipc.session"}


def test_decisions_of_passes_are_told(caplog: pytest.LogCaptureFixture) -> None:
    decision = Decision("OffloadBLAS", "main", "lv", "left to TVM", "it is small")
    note(decision)
    assert not collecting()
    caplog.set_level(logging.DEBUG, "tvm_ipc")
    note(decision)
    assert collecting()
    assert caplog.messages == ["OffloadBLAS: main: lv: left to TVM: it is small"]


def test_can_be_switched_off_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = logging.getLogger("tvm_ipc.test")
    monkeypatch.setenv("TVM_IPC_LOG", "info")
    log.start()
    log.start()
    logger.info("heard")
    monkeypatch.delenv("TVM_IPC_LOG")
    log.start()
    logger.error("not heard")
    assert [line.split("INFO: ")[1] for line in capsys.readouterr().err.splitlines()] == ["heard"]


def test_import_does_not_load_it(run_python: Callable[..., str]) -> None:
    loaded = run_python("import sys, tvm_ipc; print('logging' in sys.modules)")
    assert loaded.strip() == "False"


#: Threads log while the program forks; the child logs too, and so does the end of the program.
HOSTILE = """
import atexit, logging, os, sys, threading, time
import tvm_ipc
logger = logging.getLogger("tvm_ipc.test")
stop = False
def chatter():
    while not stop:
        logger.debug("x" * 100)
        time.sleep(0.001)
threads = [threading.Thread(target=chatter, daemon=True) for _ in range(3)]
session = tvm_ipc.Session(2)
for thread in threads:
    thread.start()
for _ in range(10):
    child = os.fork()
    if child == 0:
        logger.debug("in a child")
        os._exit(0)
    for _ in range(200):
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            break
        time.sleep(0.1)
    else:
        raise SystemExit("a child hangs")
    session.sync()
{end}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "end",
    [
        "stop = True",
        "atexit.register(lambda: logger.debug('late'))",  # threads go on until the end
        "os.close(2); session.close()",
        "os.dup2(os.open('/dev/full', os.O_WRONLY), 2); session.close()",
    ],
)
def test_neither_threads_nor_forks_nor_ends_hang_or_crash(end: str) -> None:
    result = run(HOSTILE.format(end=end), "debug", stderr=subprocess.DEVNULL)
    assert result.returncode == 0
