# SPDX-License-Identifier: Apache-2.0
"""How the demo prints: lines with a label, steps with their time, numbers for people."""

from __future__ import annotations

import time
from typing import Final

_LABEL: Final = 11
_TEXT: Final = 78


class Report:
    """Prints at once, so that the steps are seen while they happen."""

    def __init__(self) -> None:
        self._start = self._last = time.monotonic()

    def line(self, label: str, text: str) -> None:
        """Print a line; an empty label continues the one above."""
        print(f"{label:<{_LABEL}}{text}", flush=True)

    def step(self, label: str, text: str) -> None:
        """Print what was done, and the time since the step before."""
        now = time.monotonic()
        self.line(label, f"{text:<{_TEXT}}{now - self._last:6.1f} s")
        self._last = now

    def gap(self) -> None:
        """Print an empty line."""
        print(flush=True)

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._start


def size(number: float) -> str:
    """Write a number of bytes."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if number >= scale:
            return f"{number / scale:.1f} {unit}"
    return count(int(number), "byte")


def duration(seconds: float) -> str:
    """Write a time."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"


def count(number: int, noun: str) -> str:
    """Write a number and its noun."""
    return f"{number} {noun}" + ("" if number == 1 else "s")
