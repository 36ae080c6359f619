# SPDX-License-Identifier: Apache-2.0
"""The processes that a test has started, wherever they are: their environment has a mark."""

from __future__ import annotations

from pathlib import Path

MARK = "TVM_IPC_TEST_MARK"
SECONDS = 60.0


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
