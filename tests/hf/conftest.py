# SPDX-License-Identifier: Apache-2.0
"""What is compiled in tests is kept apart from what users keep."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TVM_IPC_CACHE", str(folder))
        yield folder


@pytest.fixture(autouse=True)
def _apart(cache: Path) -> None:
    pass
