# SPDX-License-Identifier: Apache-2.0
"""What this package says on the error output, unasked."""

from __future__ import annotations

import contextlib
import os
import sys


def say(text: str) -> None:
    """Write on what is the error output at that moment; one that is closed or full is no error.

    Past Python's buffer, where it can be: a child that was forked while another thread held the
    buffer's lock would wait for it for ever, and what a closed output did not take would stay in
    the buffer, and make Python end with exit code 120.
    """
    output = sys.stderr
    with contextlib.suppress(Exception):
        if output is None:  # a process without one
            return
        of_the_program = output is not sys.__stderr__
        if of_the_program:
            output.write(text)
            output.flush()
            return
        # In one write, so that lines of several processes do not mix.
        left = text.encode(output.encoding, "backslashreplace")
        while left:
            left = left[os.write(output.fileno(), left) :]
