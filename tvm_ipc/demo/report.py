# SPDX-License-Identifier: Apache-2.0
"""How the demo prints: lines with a label, steps with their time, numbers for people, a bar."""

from __future__ import annotations

import sys
import time
from typing import Final

_LABEL: Final = 11
_TEXT: Final = 78
_BAR: Final = 30
#: Seconds between two drawings of the bar.
_PAUSE: Final = 0.05


class Report:
    """Prints at once, so that the steps are seen while they happen.

    The bar is drawn on the error output, below the lines, and only on a terminal.
    """

    def __init__(self) -> None:
        self._start = self._last = time.monotonic()
        self._terminal = sys.stderr.isatty()
        self._drawn = 0.0
        self._shown = False

    def line(self, label: str, text: str) -> None:
        """Print a line; an empty label continues the one above."""
        self.clear()
        print(f"{label:<{_LABEL}}{text}", flush=True)

    def step(self, label: str, text: str) -> None:
        """Print what was done, and the time since the step before."""
        now = time.monotonic()
        self.line(label, f"{text:<{_TEXT}}{now - self._last:6.1f} s")
        self._last = now

    def gap(self) -> None:
        """Print an empty line."""
        self.clear()
        print(flush=True)

    def progress(self, done: float, text: str) -> None:
        """Draw a bar; `done` is 0 to 1."""
        now = time.monotonic()
        if not self._terminal or (self._shown and now - self._drawn < _PAUSE):
            return
        full = round(done * _BAR)
        bar = "#" * full + "." * (_BAR - full)
        sys.stderr.write(f"\r\x1b[K[{bar}] {done:4.0%} {text}")
        sys.stderr.flush()
        self._drawn, self._shown = now, True

    def clear(self) -> None:
        """Remove the bar."""
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._shown = False

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


def count(number: int, noun: str) -> str:
    """Write a number and its noun."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def listing(numbers: list[int]) -> str:
    """Write a list as people say it."""
    *head, last = map(str, numbers)
    return f"{', '.join(head)} and {last}" if head else last
