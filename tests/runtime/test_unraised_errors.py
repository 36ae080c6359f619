# SPDX-License-Identifier: Apache-2.0
"""An error that nobody asked for is said all the same, on stderr and by the exit code."""

from __future__ import annotations

import subprocess
import textwrap

import pytest

from tests.child_python import run_code

BEGIN = """
import gc, sys
import numpy as np
import tvm_ipc

def start():
    session = tvm_ipc.Session(2, threads={threads})
    session.import_python_module("tests.runtime.worker_functions")
    session.sync()
    return session

def fail(session):
    session.get_global_func("tests.fail_on")(-1, "ValueError", "sad and unseen")
"""

SAID = "tvm_ipc: <tvm_ipc.Session: 2 {what}, closed> ended with an error that was not raised"


def run(body: str, threads: bool) -> subprocess.CompletedProcess[str]:
    return run_code(BEGIN.format(threads=threads) + textwrap.dedent(body))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "code", "threads"),
    [
        ("session = start(); fail(session)", 1, True),
        ("session = start(); fail(session)", 1, False),
        ("session = start(); fail(session); sys.exit(0)", 1, True),
        ("session = start(); fail(session); sys.exit(3)", 3, True),
        ("def main():\n    fail(start())\nmain(); gc.collect(); print('goes on')", 1, True),
        ("def main():\n    fail(start())\nmain(); gc.collect(); print('goes on')", 1, False),
        ("with start() as session:\n    fail(session)\n    raise KeyError('mine')", 1, True),
    ],
    ids=[
        *("end", "end_of_processes", "exit_0", "exit_3", "garbage", "garbage_of_processes"),
        "other_exception",
    ],
)
def test_error_that_nobody_asked_for(body: str, code: int, threads: bool) -> None:
    done = run(body, threads)
    assert SAID.format(what="threads" if threads else "processes") in done.stderr
    assert "ranks 0-1: ValueError: sad and unseen\n" in done.stderr
    assert done.stderr.count("sad and unseen") == 1
    assert done.returncode == code
    assert ("goes on" in done.stdout) == ("goes on" in body)
    assert ("KeyError: 'mine'" in done.stderr) == ("mine" in body)


def test_nothing_is_said_where_nothing_is_left() -> None:
    done = run(
        """
        unused = start()
        used = start()
        used.put([1.0])
        # Raised already, whatever the program made of it.
        for hear in ("sync", "close", "get"):
            session = start()
            x = session.put([1])
            fail(session)
            try:
                session.get(x) if hear == "get" else getattr(session, hear)()
            except tvm_ipc.errors.WorkerError:
                pass
            del session, x
        # Cut off by the end itself.
        session = start()
        x = session.put(np.ones(1 << 20))
        for _ in range(50):
            session.allreduce(x, x)
        del session, x
        gc.collect()
        """,
        threads=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("stderr", ["None", "Broken()"])
def test_program_without_stderr_fails_too(stderr: str) -> None:
    done = run(
        f"""
        class Broken:
            def write(self, text):
                raise RuntimeError("broken")
            def flush(self):
                pass
        session = start()
        fail(session)
        sys.stderr = {stderr}
        """,
        threads=True,
    )
    assert (done.returncode, done.stderr) == (1, "")


def test_process_that_is_forked_afterwards_has_its_own_exit_code() -> None:
    done = run(
        """
        import os
        session = start()
        fail(session)
        del session
        gc.collect()
        child = os.fork()
        if child == 0:
            sys.exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """,
        threads=True,
    )
    assert (done.returncode, done.stdout) == (1, "0\n")


def test_exception_of_the_program_decides_the_exit_code() -> None:
    done = run(
        """
        try:
            with start() as session:
                fail(session)
                raise KeyError
        except KeyError:
            print("handled")
        """,
        threads=True,
    )
    assert done.returncode == 0
    assert "sad and unseen" in done.stderr
    assert done.stdout == "handled\n"
