# SPDX-License-Identifier: Apache-2.0
"""Sessions that tests share, since a worker process takes a second to start."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from disco_kinds import Opened, open_session


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
