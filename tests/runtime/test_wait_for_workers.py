# SPDX-License-Identifier: Apache-2.0
"""What is said of workers that do not join, where who ended is told late, or never."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from tvm_ipc.errors import IPCError, WorkerDiedError
from tvm_ipc.runtime import wait_workers_joined_or_left

REPORT: dict[str, Any] = {
    **{"joined": [0, 1, 2], "pids": [1, 2, 3, 0], "dead": [1], "errors": [], "refusals": []},
    **{"lost": [], "changed": ""},
}


@pytest.fixture(autouse=True)
def _a_death(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait_workers_joined_or_left, "_wait_joined", lambda *_: False)
    monkeypatch.setattr(wait_workers_joined_or_left, "_report", lambda _: json.dumps(REPORT))


def test_a_cause_that_is_told_later() -> None:
    asked = 0

    def ended() -> dict[int, int]:
        nonlocal asked
        asked += 1
        if asked == 3:
            raise WorkerDiedError("worker 1 of node 0 (a) died of SIGKILL", (1,))
        return {}

    with pytest.raises(WorkerDiedError, match="worker 1 of node 0"):
        wait_workers_joined_or_left.wait_for_workers(
            SimpleNamespace(num_workers=4), "session 1", ended
        )


def test_a_cause_that_nobody_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait_workers_joined_or_left, "_EXIT_CODE_SECONDS", 0.1)
    said = r"worker 3 did not join the session; worker 1 died;"
    with pytest.raises(IPCError, match=said):
        wait_workers_joined_or_left.wait_for_workers(
            SimpleNamespace(num_workers=4), "session 1", dict
        )
