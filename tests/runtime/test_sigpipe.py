# SPDX-License-Identifier: Apache-2.0
"""Programs that gave SIGPIPE its default action, as tools of the command line do."""

from __future__ import annotations

import signal

import pytest

from tests.child_python import run_code

#: Uses a session whose worker 1 was killed, and then writes to a pipe of its own.
PROGRAM = """
import os, signal, time
import numpy as np
import tvm_ipc

caught = []
def note(*_):
    caught.append("SIGPIPE")
signal.signal(signal.SIGPIPE, {action})
{session}
os.kill(worker, signal.SIGKILL)
time.sleep(0.5)  # nobody reads its pipe any more
for _ in range(3):
    try:
        {use}
        print("no error")
    except tvm_ipc.errors.IPCError as error:
        print(type(error).__name__)
del session
assert signal.getsignal(signal.SIGPIPE) is {action}
assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == signal.sigpending() == set()
print("caught", caught, flush=True)
read, write = os.pipe()
os.close(read)
try:
    os.write(write, b"x")
except BrokenPipeError:
    print("caught", caught, flush=True)
"""
OURS = """
session = tvm_ipc.Session(2, timeout=20)
worker = session.pids[1]
reference = session.put(np.ones(4))
"""
DISCOS = """
from tvm.runtime import disco
session = disco.ProcessSession(2)
tvm_ipc.init_ccl(session)
from tvm_ipc.runtime import disco_session_liveness_and_errors
worker = disco_session_liveness_and_errors.state_of(session).workers[0].process.pid
reference = session.broadcast(np.ones(4))
"""


def run(session: str, use: str, action: str = "signal.SIG_DFL") -> tuple[int, list[str]]:
    result = run_code(PROGRAM.format(session=session, use=use, action=action))
    assert result.stderr == ""
    return result.returncode, result.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize(
    "use", ["session.sync()", "session.put(np.ones(4))", "session.get(reference, 1)"]
)
def test_death_of_a_worker_is_an_error(use: str) -> None:
    told = ["WorkerDiedError", "SessionClosedError", "SessionClosedError"]
    assert run(OURS, use) == (-signal.SIGPIPE, [*told, "caught []"])


def test_session_whose_worker_died_is_closed() -> None:
    told = ["WorkerDiedError", "no error", "no error"]
    assert run(OURS, "session.close()") == (-signal.SIGPIPE, [*told, "caught []"])


def test_reference_of_a_dead_worker_ends() -> None:
    use = "reference = None; session.sync()"
    assert run(OURS, use)[1][0] == "WorkerDiedError"


def test_handler_of_the_program_is_not_called() -> None:
    code, output = run(OURS, "session.sync()", "note")
    assert (code, output[-2:]) == (0, ["caught []", "caught ['SIGPIPE']"])


@pytest.mark.parametrize("use", ["session.sync_worker_0()", "session.empty((4,), 'float32')"])
def test_death_of_a_worker_of_disco(use: str) -> None:
    told = ["WorkerDiedError"] * 3
    assert run(DISCOS, use) == (-signal.SIGPIPE, [*told, "caught []"])
