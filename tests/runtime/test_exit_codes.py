# SPDX-License-Identifier: Apache-2.0
"""How the end of a child is reported where the program took its exit code, or limits its stack."""

from __future__ import annotations

import resource
import signal
import subprocess
import threading
from collections.abc import Iterator

import pytest

from tests.child_python import output_of_code
from tvm_ipc.runtime.start_child_process import (
    UNKNOWN_EXIT_CODE,
    ChildProcess,
    describe_exit_code,
    explain_crash,
)

UNKNOWN = "exit code unknown: the program ignores SIGCHLD"
IGNORE = "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
#: Waits for any child as soon as one ends.
REAP = """
def reap(*_):
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                return
        except ChildProcessError:
            return
signal.signal(signal.SIGCHLD, reap)
"""
SESSION = """
import os, signal, time
import tvm_ipc
from tvm_ipc.errors import IPCError, WorkerDiedError
{before}
session = tvm_ipc.Session(2)
os.kill(session.pids[1], signal.SIGKILL)
try:
    session.sync()
except WorkerDiedError as error:
    print(error)
"""
DISCO = """
import os, signal, time
import tvm_ipc
from tvm_ipc.errors import IPCError, WorkerDiedError
from tvm.runtime import disco
{before}
session = disco.ProcessSession(2)
session.init_ccl("shm")
from tvm_ipc.runtime import disco_session_liveness_and_errors
os.kill(disco_session_liveness_and_errors.state_of(session).workers[0].process.pid, signal.SIGKILL)
try:
    session._sync_all()
except WorkerDiedError as error:
    print(error)
"""
STACK = """
import resource
import tvm_ipc
from tvm_ipc.errors import IPCError, WorkerDiedError
hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
resource.setrlimit(resource.RLIMIT_STACK, (16 << 10, hard))
try:
    tvm_ipc.Session(2)
except IPCError as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.parametrize("program", [SESSION, DISCO], ids=["session", "disco"])
@pytest.mark.parametrize("before", [IGNORE, REAP], ids=["ignored", "reaped"])
def test_an_exit_code_that_the_program_took_is_unknown(program: str, before: str) -> None:
    text = output_of_code(program.format(before=before))
    assert "rank 1" in text
    assert "exit code 0" not in text
    # A handler of the program may come later than we do.
    assert UNKNOWN in text or (before == REAP and "exit code -9" in text)


@pytest.mark.parametrize("program", [SESSION, DISCO], ids=["session", "disco"])
def test_an_exit_code_is_reported(program: str) -> None:
    assert "exit code -9" in output_of_code(program.format(before=""))


def test_a_small_stack_is_named() -> None:
    text = output_of_code(STACK)
    assert "exit code -11; the limit of the stack (RLIMIT_STACK) is 16 KB" in text


def test_only_a_crash_under_a_small_stack_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = iter([8 << 20, resource.RLIM_INFINITY, 64 << 10, 64 << 10])
    monkeypatch.setattr(resource, "getrlimit", lambda _: (next(limits), resource.RLIM_INFINITY))
    assert explain_crash(-signal.SIGSEGV) == ""
    assert explain_crash(-signal.SIGSEGV) == ""
    assert explain_crash(1) == ""
    assert "64 KB" in explain_crash(-signal.SIGBUS)


@pytest.fixture
def ignored() -> Iterator[None]:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGCHLD, before)


def child(program: str) -> ChildProcess:
    return ChildProcess(["/bin/sh", "-c", program])


def test_codes_of_children() -> None:
    assert child("exit 3").wait() == 3
    assert child("kill -9 $$").wait(60.0) == -9
    with child("sleep 60") as sleeping:
        assert sleeping.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            sleeping.wait(0.01)
        sleeping.kill()
        codes: list[int] = []
        threads = [threading.Thread(target=lambda: codes.append(sleeping.wait())) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert codes == [-9] * 4
    assert describe_exit_code(3) == "exit code 3"


def test_codes_that_nobody_has(ignored: None) -> None:
    for timeout in (None, 60.0):
        one = child("exit 3")
        assert one.wait(timeout) == one.poll() == UNKNOWN_EXIT_CODE
        one.kill()  # does nothing any more
    assert describe_exit_code(UNKNOWN_EXIT_CODE).startswith(UNKNOWN)


def test_children_wait_for_their_own_children(ignored: None) -> None:
    """A process that compiles a model would take each failure of the compiler for a success."""
    from tvm_ipc.runtime.subprocess_call import run_in_child

    assert run_in_child("tests.runtime.child_call_functions:exit_code", "exit 3") == 3
