# SPDX-License-Identifier: Apache-2.0
"""The end of a session, Ctrl-C while it waits, and interpreters that end with one open."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm

import tvm_ipc
from tests.child_python import run_code
from tests.runtime.disco_kinds import call, on_workers
from tests.runtime.fault_scenarios import at_rest, more_than, resources
from tvm_ipc.errors import IPCError, SessionClosedError

PLACES = pytest.mark.parametrize("threads", [True, False], ids=["threads", "processes"])


# ---- close -----------------------------------------------------------------------------------


@pytest.fixture(params=[True, False], ids=["threads", "processes"])
def fresh(request: pytest.FixtureRequest) -> Iterator[tvm_ipc.Session]:
    session = tvm_ipc.Session(2, threads=request.param)
    yield session
    session.close()


def running(pids: tuple[int, ...]) -> list[int]:
    """Which of the processes there are, this one left out."""
    return [pid for pid in pids if pid != os.getpid() and Path(f"/proc/{pid}").exists()]


def test_close_ends_the_workers(fresh: tvm_ipc.Session) -> None:
    assert fresh.usable
    fresh.close()
    assert not fresh.usable
    assert running(fresh.pids) == []
    fresh.close()
    fresh.shutdown()


def test_use_after_close(fresh: tvm_ipc.Session) -> None:
    x = fresh.put(np.zeros(3))
    fresh.close()
    for use in (
        fresh.sync,
        fresh.sync_worker_0,
        lambda: fresh.get(x),
        lambda: fresh.put(np.zeros(3)),
        lambda: fresh.empty((3,), "float32"),
        lambda: fresh.allreduce(x, x),
        lambda: fresh.get_global_func("runtime.disco.worker_rank"),
        lambda: fresh.import_python_module("tests.runtime.worker_functions"),
        lambda: fresh.load_vm_module(__file__),
        lambda: fresh.copy_from_worker_0(tvm.runtime.empty((3,)), x),
        lambda: x.debug_copy_from(0, np.zeros(3)),
    ):
        with pytest.raises(SessionClosedError, match="the session is closed"):
            use()


def test_block_gives_the_session_and_closes_it() -> None:
    with tvm_ipc.Session(2, threads=True) as session:
        assert isinstance(session, tvm_ipc.Session)
        assert isinstance(session, tvm.runtime.disco.Session)
        assert session.usable
    assert not session.usable


def test_session_that_nobody_holds_ends() -> None:
    session = tvm_ipc.Session(2)
    session.get_global_func("runtime.disco.worker_rank")
    value, pids = session.put(np.zeros(3)), session.pids
    del session, value
    gc.collect()
    end = time.monotonic() + 10
    while running(pids) and time.monotonic() < end:
        time.sleep(0.05)
    assert running(pids) == []


def test_nothing_is_left_of_a_session() -> None:
    def use(threads: bool) -> None:
        with tvm_ipc.Session(2, threads=threads) as session:
            x = session.put(np.zeros(3))
            session.allreduce(x, x)

    use(True)
    use(False)
    gc.collect()
    before = at_rest()
    for _ in range(5):
        use(True)
    use(False)
    end = time.monotonic() + 30
    while more_than(before, after := resources()) and time.monotonic() < end:
        time.sleep(0.05)
    assert not more_than(before, after), f"left behind: {before} became {after}"


def test_session_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    began = time.monotonic()
    # Worker 0, a thread, may not have joined yet either.
    message = r"(workers 0, 1|worker 1) did not join.*worker 1 ended with exit code 1"
    with pytest.raises(IPCError, match=message):
        tvm_ipc.Session(2)
    assert time.monotonic() - began < 30


# ---- Ctrl-C ---------------------------------------------------------------------------------


@pytest.fixture
def interrupt() -> Any:
    """Send SIGINT to this process, as Ctrl-C does, some time later."""
    timers = []

    def later(seconds: float) -> None:
        timers.append(threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)))
        timers[-1].start()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield later
    for timer in timers:
        timer.cancel()
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
@PLACES
def test_interrupt_while_waiting(threads: bool, interrupt: Callable[[float], None]) -> None:
    with tvm_ipc.Session(2, threads=threads, timeout=60) as session:
        session.import_python_module("tests.runtime.worker_functions")
        session.sync()
        call(session, "tests.sleep_on", 1, 2.5)
        x = session.put(np.ones(3))
        interrupt(0.3)
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            session.sync()
        assert time.monotonic() - began < 2.0, "it waited for the worker"
        assert session.usable
        session.allreduce(x, x)
        np.testing.assert_array_equal(on_workers(x, 2), np.full((2, 3), 2))


@PLACES
def test_interrupt_ends_the_block(threads: bool, interrupt: Callable[[float], None]) -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        tvm_ipc.Session(2, threads=threads, timeout=60) as session,
    ):
        session.import_python_module("tests.runtime.worker_functions")
        session.sync()
        call(session, "tests.sleep_on", 1, 1.0)
        interrupt(0.3)
        session.sync()
    assert not session.usable


def test_interrupt_of_the_terminal_reaches_the_controller_only() -> None:
    """A terminal sends the signal to all processes of the group; workers go on."""
    code = """
import os, signal, time, numpy as np, tvm_ipc
with tvm_ipc.Session(2) as session:
    x = session.put(np.ones(3))
    try:
        os.killpg(0, signal.SIGINT)
        time.sleep(10)
    except KeyboardInterrupt:
        pass
    session.allreduce(x, x)
    print(session.get(x, 1)[0], session.usable)
"""
    result = run_code(code, start_new_session=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "2.0 True\n", "")


# ---- the end of the interpreter -------------------------------------------------------------


def left(pids: str) -> list[str]:
    """Which of these processes are there still, after a moment to end in."""
    end = time.monotonic() + 5
    names = pids.split()[1:]
    while time.monotonic() < end:
        names = [name for name in names if Path("/proc", name).exists()]
        if not names:
            break
        time.sleep(0.05)
    return names


ENDINGS = {
    "nothing_pending": "",
    "values": "y = session.put(x0); session.allreduce(x, y)",
    "commands_pending": "[f(i) for i in range(100)]; session.allreduce(x, x)",
    "sleeping_worker": "session.get_global_func('tests.sleep_on')(1, 0.5)",
    "in_a_function": "def main():\n  s = tvm_ipc.Session(2, threads={threads}); s.put(x0)\nmain()",
    "in_a_cycle": "class Holder: pass\nh = Holder(); h.h = h; h.s = session; h.x = session.put(x0)",
    "sys_exit": "sys.exit(0)",
    "two_sessions": "other = tvm_ipc.Session(2, threads=True); y = other.put(x0)",
    "callback_pending": "c = session.get_global_func('tests.parameters_by_name')()",
}
START = """
import sys
import numpy as np, tvm_ipc
session = tvm_ipc.Session(2, threads={threads})
session.import_python_module("tests.runtime.worker_functions")
x0 = np.ones(3)
x = session.put(x0)
f = session.get_global_func("tests.next_int")
print(*session.pids, flush=True)
"""


@pytest.mark.slow
@PLACES
@pytest.mark.parametrize("ending", ENDINGS)
def test_interpreter_ends_without_close(ending: str, threads: bool) -> None:
    result = run_code((START + ENDINGS[ending]).replace("{threads}", str(threads)))
    assert (result.returncode, result.stderr) == (0, "")
    pids = result.stdout
    assert left(pids) == []


@PLACES
def test_interpreter_ends_with_an_exception(threads: bool) -> None:
    result = run_code(
        (START + "raise ValueError('of the user')").replace("{threads}", str(threads))
    )
    assert result.returncode == 1
    assert result.stderr.endswith("ValueError: of the user\n")
    assert result.stderr.count("Traceback") == 1
    assert left(result.stdout) == []


@pytest.mark.slow
@pytest.mark.parametrize("where", ["session.sync()", "time.sleep(100)"])
def test_one_interrupt_ends_a_program_whose_worker_does_not(where: str) -> None:
    """Without a `with` block: nobody waits for the worker again at the end of the program."""
    code = f"""
import os, signal, threading, time
session.get_global_func("tests.sleep_on")(1, 100.0)
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
{where}
"""
    result = run_code((START + code).replace("{threads}", "False"))
    assert result.returncode == -signal.SIGINT
    assert result.stderr.endswith("KeyboardInterrupt\n")
    assert left(result.stdout) == []


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("end", ["", "session.close()"])
def test_session_that_outlives_the_modules(end: str, workers: int) -> None:
    """As with a function of the program that is in `sys.excepthook`."""
    code = f"""
import sys, tvm_ipc
def of_this_module(): pass
sys.kept = of_this_module
session = tvm_ipc.Session({workers})
x = session.put([1.0])
print(*session.pids[1:])
{end}
"""
    result = run_code(code)
    assert (result.returncode, result.stderr) == (0, "")
    assert left(result.stdout) == []


def test_workers_end_after_a_controller_that_did_not_clean_up() -> None:
    result = run_code((START + "import os; os._exit(3)").replace("{threads}", "False"))
    assert (result.returncode, result.stderr) == (3, "")
    assert left(result.stdout) == []


def test_what_workers_print_arrives() -> None:
    code = """
import tvm_ipc
with tvm_ipc.Session(2) as session:
    session.import_python_module("tests.runtime.worker_functions")
    session.get_global_func("tests.print_text")("hello")
"""
    result = run_code(code)
    assert result.returncode == 0
    assert sorted(result.stdout.splitlines()) == ["hello from rank 0", "hello from rank 1"]


def test_session_of_the_user_ends_with_the_interpreter() -> None:
    code = """
import tvm, tvm_ipc, numpy as np
from tvm.runtime import disco
session = disco.{kind}(2)
tvm_ipc.init_ccl(session)
x = session.broadcast(np.ones(3))
session.allreduce(x, x)
print(x.debug_get_from_remote(1).numpy()[0])
"""
    for kind in ("ProcessSession", "ThreadedSession"):
        result = run_code(code.replace("{kind}", kind))
        assert (result.returncode, result.stdout, result.stderr) == (0, "2.0\n", "")
