# SPDX-License-Identifier: Apache-2.0
"""Print labelled lines, the time of each step, and a progress bar."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Sequence
from typing import Final

from tvm_ipc.tools import terminal

#: Width of the label of a line, in characters.
_LABEL: Final = 11
#: Width of the time at the end of a step's line, in characters.
_TIME: Final = 6


class Report:
    """The output of the demo; each line is printed at once."""

    def __init__(self) -> None:
        self._start = self._last = time.monotonic()

    def line(self, label: str, text: str, end: str = "") -> None:
        """Print a text, wrapped if it is long; an empty label continues the line above."""
        width = terminal.WIDTH - _LABEL - len(end)
        *first, last = textwrap.wrap(text, width, break_long_words=False) or [""]
        for number, piece in enumerate([*first, f"{last:<{width}}{end}"]):
            terminal.print_out(f"{'' if number else label:<{_LABEL}}{piece}".rstrip())

    def table(self, label: str, lines: Sequence[str]) -> None:
        """Print the lines of a table as they are, with a label in front of the first one."""
        for number, text in enumerate(lines):
            terminal.print_out(f"{'' if number else label:<{_LABEL}}{text}".rstrip())

    def step(self, label: str, text: str) -> None:
        """Print a completed step, and the time since the previous one."""
        now = time.monotonic()
        self.line(label, text, f"{now - self._last:{_TIME}.1f} s")
        self._last = now

    def gap(self) -> None:
        """Print an empty line."""
        terminal.print_out()

    def progress(self, done: float, text: str) -> None:
        """Draw a progress bar; `done` is between 0 and 1."""
        terminal.progress_bar(done, text)

    @property
    def seconds(self) -> float:
        """The seconds since the start."""
        return time.monotonic() - self._start
