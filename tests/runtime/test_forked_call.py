# SPDX-License-Identifier: Apache-2.0
"""A function runs in a fork beside its caller, which does without its result if it fails."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tvm_ipc.runtime.forked_call import call_in_fork


def has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def test_large_results() -> None:
    with call_in_fork(lambda: os.getpid().to_bytes(4, "little") * 1_000_000) as result:
        data = result()
    assert data is not None and len(data) == 4_000_000
    assert int.from_bytes(data[:4], "little") != os.getpid()


def fail() -> bytes:
    raise ValueError


def be_killed() -> bytes:
    os.kill(os.getpid(), signal.SIGKILL)
    return b""


@pytest.mark.parametrize("function", [fail, be_killed])
def test_no_result(function: object) -> None:
    with call_in_fork(function) as result:  # type: ignore[arg-type]
        assert result() is None


def test_fork_ends_with_the_block() -> None:
    def sleep() -> bytes:
        time.sleep(600)
        return b""

    before = has_children()
    begin = time.monotonic()
    with pytest.raises(KeyError), call_in_fork(sleep):
        raise KeyError
    assert time.monotonic() - begin < 60
    assert has_children() == before


def test_no_process_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise BlockingIOError

    monkeypatch.setattr(os, "fork", refuse)
    with call_in_fork(lambda: b"") as result:
        assert result() is None
