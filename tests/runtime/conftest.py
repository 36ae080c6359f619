# SPDX-License-Identifier: Apache-2.0
"""Sessions that tests share, since a worker process takes a second to start."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import tvm_ipc
from tests.runtime.disco_kinds import RANKS, Opened, on_workers, open_session


@pytest.fixture(scope="session")
def _opened() -> Iterator[dict[tuple[str, int, int], Opened]]:
    opened: dict[tuple[str, int, int], Opened] = {}
    yield opened
    for session in opened.values():
        session.end()


@pytest.fixture
def shared_session(
    _opened: dict[tuple[str, int, int], Opened],
) -> Callable[..., Any]:
    """Return a session of a kind, the same for every test that asks for the same one."""

    def get(kind: str, num_workers: int = 2, num_groups: int = 1) -> Any:
        key = (kind, num_workers, num_groups)
        if key not in _opened or not _opened[key].usable:
            _opened[key] = open_session(*key)
        return _opened[key].session

    return get


@pytest.fixture(scope="module")
def opened() -> Iterator[Callable[..., tvm_ipc.Session]]:
    """Sessions of a module, by number of ranks, of groups, and the kind of the workers."""
    sessions: dict[tuple[int, int, bool], tvm_ipc.Session] = {}

    def get(ranks: int, groups: int = 1, threads: bool = True) -> tvm_ipc.Session:
        key = (ranks, groups, threads)
        if key not in sessions or not sessions[key].usable:
            session = tvm_ipc.Session(ranks, num_groups=groups, threads=threads, timeout=60)
            for name in ("collective_worker", "worker_functions"):
                session.import_python_module(f"tests.runtime.{name}")
            sessions[key] = session
        return sessions[key]

    yield get
    for session in sessions.values():
        session.close()


@pytest.fixture(params=["ipc_threads", "ipc_processes"])
def trio(request: pytest.FixtureRequest, shared_session: Callable[..., Any]) -> Iterator[Any]:
    """Three workers of a session of ours, which must work after the test too."""
    session = shared_session(request.param, RANKS)
    yield session
    assert session.usable
    x = session.scatter(np.arange(RANKS * 4.0).reshape(RANKS, 4))
    total = session.empty((4,), "float64")
    session.allreduce(x, total)
    np.testing.assert_array_equal(on_workers(total, RANKS), [[12, 15, 18, 21]] * RANKS)
