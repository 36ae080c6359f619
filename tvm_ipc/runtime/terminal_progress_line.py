# SPDX-License-Identifier: Apache-2.0
"""Show the progress of an operation in one line of a terminal, on stderr, until it is cleared."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from typing import Final

from tvm_ipc.runtime.config import log_level

#: The width of our lines, unless a text in them is longer.
WIDTH: Final = 80
_CLEAR: Final = "\r\x1b[K"
_BAR: Final = 30
#: Seconds before a progress bar is shown.
_SOON: Final = 1.0
_shown = False  # whether the line of `progress` is on the screen


def _nothing() -> None:
    pass


#: Called before each output; the command line raises a Ctrl-C here that was lost.
before_output: Callable[[], None] = _nothing


def progress(text: str) -> None:
    """Show what is being done, until something else is printed.

    The text is shown in one line of a terminal, which the next text replaces. It is not shown if
    the log is printed, which has more details.
    """
    global _shown
    before_output()
    with contextlib.suppress(OSError, ValueError):
        if sys.stderr.isatty() and log_level() is None:
            columns = os.get_terminal_size(sys.stderr.fileno()).columns or WIDTH
            sys.stderr.write(_CLEAR + text[: columns - 1])
            sys.stderr.flush()
            _shown = True


def progress_bar(done: float, text: str) -> None:
    """Show how much is done, 0 to 1, and what is being done, as `progress` does."""
    full = round(done * _BAR)
    progress(f"[{'#' * full}{'.' * (_BAR - full)}] {done:4.0%} {text}")


class Bar:
    """A progress bar for an operation that may take long; it is shown after a second.

    Parameters
    ----------
    wanted : whether the bar is shown at all.
    """

    def __init__(self, wanted: bool = True) -> None:
        self._wanted = wanted
        self._show_from = time.monotonic() + _SOON

    def show(self, done: float, text: str) -> None:
        """Show how much is done, 0 to 1, and what is being done."""
        if self._wanted and time.monotonic() >= self._show_from:
            progress_bar(done, text)

    def end(self) -> None:
        """Remove the bar."""
        if self._wanted:
            clear()


def clear() -> None:
    """Remove the line of `progress`."""
    global _shown
    if _shown:
        _shown = False
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(_CLEAR)
            sys.stderr.flush()
