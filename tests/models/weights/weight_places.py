# SPDX-License-Identifier: Apache-2.0
"""What workers say of where their weights lie."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import tvm_ffi


@tvm_ffi.register_global_func("tests.in_large_pages", override=True)
def in_large_pages(*weights: Any) -> int:
    """Return how many bytes of these lie where this process wants large pages, had or not."""
    wanted, begin, end = [], 0, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if place := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            begin, end = (int(number, 16) for number in place.groups())
        elif line.startswith("VmFlags:") and "hg" in line.split():
            wanted.append((begin, end))
    bytes_of = [(one.data_ptr(), 4 * int(one.numpy().size)) for one in weights]
    return sum(
        max(0, min(end, at + size) - max(begin, at))
        for at, size in bytes_of
        for begin, end in wanted
    )
