# SPDX-License-Identifier: Apache-2.0
"""Tests of GPUs: skipped with the reason where there is none, and sessions that they share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import tvm_ipc
from tests.gpu.gpu_sessions import of_kit_or_new, open_session, why_no_gpu
from tvm_ipc.errors import IPCError
from tvm_ipc.gpu import discovery


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    wanting = [item for item in items if item.get_closest_marker("gpu")]
    if wanting and (reason := why_no_gpu()):
        for item in wanting:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def devices() -> tuple[discovery.Gpu, ...]:
    return discovery.find().devices


@pytest.fixture(scope="module")
def opened() -> Iterator[Callable[..., tvm_ipc.Session]]:
    """Sessions of a module, by number of workers, and whether they are threads; on GPUs or not.

    One at a time is on GPUs, whose memory it takes as it starts.
    """
    sessions: dict[tuple[int, bool, str], tvm_ipc.Session] = {}

    def get(workers: int, threads: bool = True, device: str = "cuda") -> tvm_ipc.Session:
        key = (workers, threads, device)
        if key not in sessions or not sessions[key].usable:
            for other in [one for one in sessions if device == one[2] == "cuda"]:
                with contextlib.suppress(IPCError):  # a test that failed has told
                    sessions.pop(other).close()
            sessions[key] = open_session(workers, threads=threads, device=device)
        return sessions[key]

    yield get
    for session in sessions.values():
        session.close()


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """The library of a program of `gpu_programs.py`, by its name and "cpu" or the capability."""
    compiled: dict[str, Path] = {}

    def get(name: str, target: str) -> Path:
        if target not in compiled:
            compiled[target] = of_kit_or_new(target, tmp_path_factory.mktemp("programs"))
        path = compiled[target] / f"{name}.{target}.so"
        if not path.is_file():
            pytest.skip(f"the kit has no program for {target}")
        return path

    return get
