# SPDX-License-Identifier: Apache-2.0
"""Format bytes, times, counts, tables and errors; every `tvm-ipc` command prints with these."""

# Not `rich`: it would be a dependency of the wheel for one function, and what it prints depends on
# the terminal, while users redirect and compare our tables.

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tvm_ipc.errors import IPCError

_BINARY_UNITS = (
    ("PiB", 1 << 50),
    ("TiB", 1 << 40),
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
)


def bytes_text(count: float) -> str:
    """Return an amount of memory in three digits, such as `12.5 MiB`; whole numbers stay whole."""
    for unit, size in _BINARY_UNITS:
        if count >= size:
            value = count / size
            digits = 0 if value == int(value) or value >= 100 else 1 if value >= 10 else 2
            return f"{value:.{digits}f} {unit}"
    return f"{int(count)} B"


def message_size_text(size: int) -> str:
    """Return the size of a message as benchmarks label it: `64 KB` is 64 x 1024 bytes."""
    for shift, unit in ((30, "GB"), (20, "MB"), (10, "KB")):
        if size >= 1 << shift:
            return f"{size / (1 << shift):.4g} {unit}"
    return f"{size} B"


def time_text(seconds: float, micro: str = "µs") -> str:
    """Return a time in three digits, such as `12.3 µs`; `micro` is the unit of microseconds."""
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, micro)):
        if seconds >= unit * 0.9995:
            return f"{_three_digits(seconds / unit)} {name}"
    return f"{_three_digits(seconds / 1e-6)} {micro}"


def _three_digits(number: float) -> str:
    return f"{number:.{0 if number >= 99.95 else 1 if number >= 9.995 else 2}f}"


def list_text(items: Iterable[object]) -> str:
    """Return a list in prose, such as `1, 2 and 4`."""
    *head, last = map(str, items)
    return f"{', '.join(head)} and {last}" if head else last


def table_lines(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table: a label on the left of each row, right-aligned cells.

    A header with a comma is split into two lines.
    """
    split = [header.partition(", ") for header in headers]
    head = [["", *(first for first, _, _ in split)], ["", *(last for _, _, last in split)]]
    table = [*(line for line in head if any(line)), *rows]
    widths = [max(len(row[k]) for row in table) for k in range(len(table[0]))]
    return [
        "  ".join(
            f"{text:{width}}" if k == 0 else f"{text:>{width}}"
            for k, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]


def error_text(error: Exception) -> str:
    """Return the first line of an error; one of another package gets its type in front."""
    text = (str(error).splitlines() or [""])[0]
    return text if isinstance(error, IPCError) else f"{type(error).__name__}: {text}"
