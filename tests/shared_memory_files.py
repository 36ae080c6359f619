# SPDX-License-Identifier: Apache-2.0
"""Files in shared memory, where other tests and programs have theirs at the same time."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

FOLDER = Path("/dev/shm")


def shared_memory_files(prefixes: Iterable[str]) -> set[Path]:
    """Return the files and folders whose names begin so."""
    return {path for prefix in prefixes for path in FOLDER.glob(f"{prefix}*")}


def wait_until_gone(files: set[Path], seconds: float = 60) -> None:
    """Wait for files to be removed: those of other programs go by themselves."""
    end = time.monotonic() + seconds
    while files := {file for file in files if file.exists()}:
        assert time.monotonic() < end, f"left behind: {sorted(map(str, files))}"
        time.sleep(0.05)
