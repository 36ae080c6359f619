# SPDX-License-Identifier: Apache-2.0
"""A function in a process of its own: its result, its errors, and its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tvm_ipc import errors
from tvm_ipc.runtime.subprocess_call import ChildError, run_in_child

NOT_UTF8 = "'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"
#: A program without `if __name__ == "__main__"`, which would run again where it is imported.
PROGRAM = """
from tvm_ipc.runtime.subprocess_call import run_in_child
run_in_child("tests.runtime.child_call_functions:wait", None, lambda pids: print(pids, flush=True))
"""


def call(name: str, given: Any, *more: Any) -> Any:
    return run_in_child(f"tests.runtime.child_call_functions:{name}", given, *more)


def gone(*pids: int) -> bool:
    """Whether processes end soon; those that nobody waits for may stay as zombies."""
    for _ in range(200):
        if not any(map(lives, pids)):
            return True
        time.sleep(0.05)
    return False


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_result() -> None:
    heard: list[str] = []
    given = {"word": "ä \ud800", "many": list(range(100_000))}
    found = call("answer", given, heard.append)
    assert heard == ["one", "two, with ä \ud800"]
    assert found["given"] == given
    assert found["main"] is None, "the main module of the caller is not imported"
    assert not {"tvm", "tvm_ffi", "torch"} & set(found["modules"]), "only what it needs itself"
    assert gone(found["pid"])
    assert not Path(found["temporary"]).exists(), "with what it has left there"


def test_it_ends_at_once_after_a_result(capfd: pytest.CaptureFixture[str]) -> None:
    begin = time.monotonic()
    assert call("linger", 9.0) == "done"
    assert time.monotonic() - begin < 8.0
    assert capfd.readouterr().err == "logged\n", "nothing is lost"


def test_in_a_thread() -> None:
    with ThreadPoolExecutor(2) as threads:
        first, second = (threads.submit(call, "answer", {"word": "a"}) for _ in range(2))
    assert first.result()["pid"] != second.result()["pid"]


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ("ValueError", ValueError, "this is wrong"),
        ("MemoryError", MemoryError, "this is wrong"),
        ("own", errors.ModelError, "of a class of its own"),
        ("unicode", UnicodeError, NOT_UTF8),
        ("key", KeyError, "\"('a', 1)\""),
        ("long", ValueError, "a line\nand another"),
    ],
)
def test_errors(given: str, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as raised:
        call("fail", given)
    assert (type(raised.value), str(raised.value)) == (kind, message)
    assert isinstance(raised.value.__cause__, ChildError)
    assert "child_call_functions.py" in str(raised.value.__cause__)


def test_what_is_not_there() -> None:
    with pytest.raises(AttributeError, match="nothing"):
        call("nothing", None)
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        run_in_child("no_such_module:main", None)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (3, "to count ended with exit code 3; try again"),
        (-signal.SIGKILL, "was killed by SIGKILL, which the system does where memory is short"),
        (-signal.SIGSEGV, "was killed by SIGSEGV; try again"),
    ],
)
def test_ends_without_a_result(given: int, said: str) -> None:
    with pytest.raises(errors.IPCError, match=said):
        call("end", given, lambda _: None, "to count")


def test_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    said = r"needed to count, which cannot start: .*No such file"
    with pytest.raises(errors.IPCError, match=said):
        call("answer", {"word": ""}, lambda _: None, "to count")


def test_an_interruption_ends_it_and_what_it_has_started() -> None:
    found: list[int] = []

    def heard(pids: str) -> None:
        found.extend(map(int, pids.split()))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        call("wait", None, heard)
    assert not Path(f"/proc/{found[0]}").exists(), "it is waited for"
    assert gone(*found)


def test_it_does_not_outlive_a_caller_that_is_killed(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, str(program)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid, other = map(int, process.stdout.readline().split())
    try:
        process.kill()
        process.communicate()
        assert gone(pid)
    finally:
        os.kill(other, signal.SIGKILL)
