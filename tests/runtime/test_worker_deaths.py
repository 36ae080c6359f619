# SPDX-License-Identifier: Apache-2.0
"""The error of a dead worker: one short traceback, and its cause in the log."""

from __future__ import annotations

import logging
import os
import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest
import tvm_ffi

import tvm_ipc
from tests.child_python import run_code
from tvm_ipc.errors import IPCError, WorkerDiedError
from tvm_ipc.runtime import session_start
from tvm_ipc.runtime.disco_session_liveness_and_errors import State
from tvm_ipc.runtime.process_pool import PoolWithPipes, ProcessPool

KILLED = """
import os, signal, time
import tvm_ipc
with tvm_ipc.Session(2) as session:
    os.kill(session.pids[1], signal.SIGKILL)
    time.sleep(0.3)  # the process has ended before the command is sent
    session.empty((4,), "float32")
"""


def test_the_traceback_of_a_killed_worker_is_one_error() -> None:
    result = run_code(KILLED, environment={"TVM_IPC_LOG": ""})
    assert result.returncode == 1
    lines = result.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert "WorkerDiedError: rank 1 (pid " in lines[-1], result.stderr
    assert result.stderr.count("Traceback") == 1
    for internal in ("During handling", "direct cause", "Write Error", "pipe.h"):
        assert internal not in result.stderr
    assert len(lines) <= 25, result.stderr


def test_the_log_has_the_cause() -> None:
    result = run_code(KILLED, environment={"TVM_IPC_LOG": "debug"})
    before, _, after = result.stderr.partition("DEBUG: session 1: a command could not be sent")
    assert before and "InternalError" in after.partition("WorkerDiedError")[0], result.stderr


def test_a_text_about_pipes_is_no_death() -> None:
    with tvm_ipc.Session(2) as session:
        dispatcher: Any = session._dispatcher

        def refuse(*_: object) -> None:
            raise RuntimeError("Write Error: this is the argument's own text")

        with pytest.raises(RuntimeError, match="own text") as error:
            dispatcher._call_native(refuse)
        assert not isinstance(error.value, IPCError)
        assert session.usable
        session.sync()


def test_a_death_is_recognized_without_a_text(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "tvm_ipc")
    with tvm_ipc.Session(2) as session:
        dispatcher: Any = session._dispatcher
        os.kill(session.pids[1], signal.SIGKILL)
        end = time.monotonic() + 10
        while not dispatcher.pool.hung_up():
            assert time.monotonic() < end
            time.sleep(0.01)

        def refuse(*_: object) -> None:
            raise RuntimeError("in other words")

        with pytest.raises(WorkerDiedError) as error:
            dispatcher._call_native(refuse)
        assert error.value.ranks == (1,)
        assert error.value.__context__ is None
    assert "in other words" in caplog.text


def test_a_session_of_disco(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "tvm_ipc")
    codes = iter([None, None, *[-9] * 10])
    process = SimpleNamespace(pid=4711, poll=lambda: next(codes))
    worker = SimpleNamespace(worker_id=1, process=process)

    def fail() -> None:
        raise RuntimeError("Check failed: nread != -1")

    state = State([worker], bool)  # type: ignore[list-item]
    with pytest.raises(WorkerDiedError, match=r"rank 1 \(pid 4711") as error:
        state._check_answer(fail)
    assert error.value.__context__ is None
    assert "nread" in caplog.text
    with pytest.raises(RuntimeError, match="nread") as other:
        State([], bool)._check_answer(fail)
    assert not isinstance(other.value, IPCError)


def test_an_invitation_that_cannot_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the worker that has ended, whatever the failed write reports."""
    pools: list[ProcessPool] = []

    def start(*args: Any) -> ProcessPool:
        pools.append(ProcessPool(*args))
        return pools[0]

    def invite(*args: Any) -> None:
        process = pools[0].processes[1]
        process.kill()
        process.wait()
        invite_workers(*args)

    invite_workers = session_start._native_open
    monkeypatch.setattr(session_start, "ProcessPool", start)
    monkeypatch.setattr(session_start, "_native_open", invite)
    with pytest.raises(IPCError, match="worker 1 ended with exit code -9") as error:
        tvm_ipc.Session(2)
    assert "Write Error" not in str(error.value)
    assert error.value.__context__ is None


def test_an_invitation_that_fails_for_another_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("Write Error: a text of its own")

    monkeypatch.setattr(session_start, "_native_open", refuse)
    with pytest.raises(IPCError, match=r"^the session cannot start: Write Error: a text"):
        tvm_ipc.Session(2)


def test_pipes_of_a_pool() -> None:
    """Disco gets them once, and closes them without Python."""
    (reply_read, reply_write), (command_read, command_write) = os.pipe(), os.pipe()
    pool = PoolWithPipes()
    pool.offer({1: (reply_read, command_write)})
    serve = tvm_ffi.get_global_func("tvm_ipc.create_process_pool")(2, 1, pool.key)
    assert list(serve(1)) == [reply_read, command_write]
    with pytest.raises(ValueError, match="there are pipes to the workers 1 to 1, and not to 2"):
        serve(2)
    assert not pool.hung_up()
    os.close(command_read)
    assert pool.hung_up()
    pool.mute()
    os.write(command_write, b"to nobody")
    assert serve(0) is None
    for closed in (reply_read, command_write):
        with pytest.raises(OSError):
            os.fstat(closed)
    # Others may have the numbers by now.
    os.dup2(reply_write, command_write)
    pool.mute()
    pool.forget()
    assert not pool.hung_up()
    assert os.path.samestat(os.fstat(command_write), os.fstat(reply_write))
    os.close(command_write)
    os.close(reply_write)
    with pytest.raises(ValueError, match=f"there are no workers with the key {pool.key}"):
        tvm_ffi.get_global_func("tvm_ipc.create_process_pool")(2, 1, pool.key)


def test_pipes_of_a_pool_that_disco_did_not_ask_for() -> None:
    reply, command = os.pipe(), os.pipe()
    pool = PoolWithPipes()
    pool.offer({1: (reply[0], command[1])})
    pool.forget()
    for closed in (reply[0], command[1]):
        with pytest.raises(OSError):
            os.fstat(closed)
    os.close(reply[1])
    os.close(command[0])


def test_a_pool_in_python_that_is_interrupted_in_a_destructor() -> None:
    calls: list[int] = []

    def serve(worker_id: int) -> None:
        calls.append(worker_id)
        if len(calls) < 3:
            raise KeyboardInterrupt

    safe = tvm_ffi.get_global_func("tvm_ipc.pool.retry_in_destructor")(tvm_ffi.convert(serve))
    signals: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: signals.append(number))
    try:
        safe(0)
    finally:
        signal.signal(signal.SIGINT, before)
    assert calls == [0, 0, 0]
    assert signals == [signal.SIGINT]
