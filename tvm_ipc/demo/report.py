# SPDX-License-Identifier: Apache-2.0
"""How the demo prints: lines with a label, steps with their time, numbers for people, a bar."""

from __future__ import annotations

import textwrap
import time
from typing import Final

from tvm_ipc import terminal

_LABEL: Final = 11
#: Characters of a step's time, at the end of its line.
_TIME: Final = 6


class Report:
    """Prints at once, so that the steps are seen while they happen."""

    def __init__(self) -> None:
        self._start = self._last = time.monotonic()

    def line(self, label: str, text: str, end: str = "") -> None:
        """Print a text, in several lines if it is long; an empty label continues the one above."""
        width = terminal.WIDTH - _LABEL - len(end)
        *first, last = textwrap.wrap(text, width, break_long_words=False) or [""]
        for number, part in enumerate([*first, f"{last:<{width}}{end}"]):
            terminal.say(f"{'' if number else label:<{_LABEL}}{part}".rstrip())

    def step(self, label: str, text: str) -> None:
        """Print what was done, and the time since the step before."""
        now = time.monotonic()
        self.line(label, text, f"{now - self._last:{_TIME}.1f} s")
        self._last = now

    def gap(self) -> None:
        """Print an empty line."""
        terminal.say()

    def progress(self, done: float, text: str) -> None:
        """Draw a bar; `done` is 0 to 1."""
        terminal.progress_bar(done, text)

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
