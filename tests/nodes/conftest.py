# SPDX-License-Identifier: Apache-2.0
"""The MPI that is here, and what a test has left behind."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tvm_ipc.errors import IPCError
from tvm_ipc.nodes.mpi import Mpi, find_mpi

MARK = "TVM_IPC_TEST_MARK"
SECONDS = 60.0


@pytest.fixture(scope="session")
def mpi() -> Mpi:
    try:
        return find_mpi()
    except IPCError as error:
        pytest.skip(str(error))


def marked(mark: str) -> dict[int, str]:
    """The command lines of the processes that have the mark in their environment."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                    line = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                    found[int(folder.name)] = line.decode()
            except OSError:  # it has ended
                pass
    return found


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], dict[int, str]]]:
    """Return the processes that the test has started; in the end there must be none."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    yield lambda: marked(mark)
    end = time.monotonic() + SECONDS
    while left := marked(mark):
        assert time.monotonic() < end, f"left behind: {left}"
        time.sleep(0.05)
