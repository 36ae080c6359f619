# SPDX-License-Identifier: Apache-2.0
"""How much work something takes, the same on every machine and under any load."""

from __future__ import annotations

import sys
from collections.abc import Callable
from math import log2
from typing import Any


def work(action: Callable[[], object]) -> int:
    """Return how many instructions Python runs; what it calls in C counts as one."""
    count = 0

    def trace(frame: Any, _event: str, _argument: object) -> Any:
        nonlocal count
        count += 1
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return count


def power(action: Callable[[int], object], least: int) -> float:
    """Return the power of a size that the work grows with, from a least size to four times it.

    What is there at any size does not count.
    """
    few, more, many = (
        work(lambda size=size: action(size)) for size in (least, 2 * least, 4 * least)
    )
    return log2((many - more) / (more - few))
