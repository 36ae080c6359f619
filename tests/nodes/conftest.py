# SPDX-License-Identifier: Apache-2.0
"""The MPI that is here, and what a test has left behind."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator

import pytest

from tests.nodes.node_processes import MARK, SECONDS, marked
from tests.shared_memory_files import shared_memory_files, wait_until_gone
from tvm_ipc.errors import IPCError
from tvm_ipc.nodes.find_mpi_installation import Mpi, find_mpi


@pytest.fixture(scope="session")
def mpi() -> Mpi:
    try:
        return find_mpi()
    except IPCError as error:
        pytest.skip(str(error))


#: Our files in shared memory, and Open MPI's. MPICH's stay where an agent was killed.
PREFIXES = ("tvm_ipc", "sm_segment")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], dict[int, str]]]:
    """Return the processes that the test has started; in the end there must be none."""
    mark = uuid.uuid4().hex
    before = shared_memory_files(PREFIXES)
    monkeypatch.setenv(MARK, mark)
    yield lambda: marked(mark)
    end = time.monotonic() + SECONDS
    while left := marked(mark):
        assert time.monotonic() < end, f"left behind: {left}"
        time.sleep(0.05)
    wait_until_gone(shared_memory_files(PREFIXES) - before)
