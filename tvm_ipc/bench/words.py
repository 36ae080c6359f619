# SPDX-License-Identifier: Apache-2.0
"""Sizes, times and tables as people read them."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import geometric_mean

from tvm_ipc import terminal
from tvm_ipc.bench import run
from tvm_ipc.bench.run import Run


def size_text(size: int) -> str:
    """Return a size such as 64 KB; units are powers of 1024."""
    for shift, unit in ((30, "GB"), (20, "MB"), (10, "KB")):
        if size >= 1 << shift:
            return f"{size / (1 << shift):.4g} {unit}"
    return f"{size} B"


def time_text(seconds: float, micro: str = "µs") -> str:
    """Return a time such as 12.3 µs, in three digits."""
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, micro)):
        if seconds >= unit * 0.9995:
            return f"{_three(seconds / unit)} {name}"
    return f"{_three(seconds / 1e-6)} {micro}"


def _three(number: float) -> str:
    return f"{number:.{0 if number >= 99.95 else 1 if number >= 9.995 else 2}f}"


def times_table(found: Run) -> list[str]:
    """Return lines with the time of each case by size, and those of a session."""
    micro = "µs" if terminal.can_say("µ") else "us"
    rows = []
    for size in found.sizes():
        times = (found.at(case, size) for case in found.cases())
        rows.append([size_text(size), *("" if t is None else time_text(t, micro) for t in times)])
    lines = _layout(found.cases(), rows)
    fixed = {name: time_text(seconds, micro) for name, seconds in found.fixed().items()}
    if fixed:
        wide = max(map(len, fixed))
        lines += ["", *(f"{name:{wide}}  {time:>8}" for name, time in fixed.items())]
    return lines


def ratio_table(now: Run, saved: Run) -> list[str]:
    """Return lines with how many times as fast a run is as a saved one, by size and case."""
    cases = [case for case in now.cases() if case in saved.cases()]
    rows = []
    columns: dict[str, list[float]] = {case: [] for case in cases}
    for size in now.sizes():
        row = [size_text(size)]
        for case in cases:
            found = run.ratio(now, saved, case, size)
            row.append(_ratio_text(found))
            columns[case] += [found.value] if found else []
        if any(row[1:]):
            rows.append(row)
    rows.append(["all sizes", *(f"{geometric_mean(c):.2f}" if c else "" for c in columns.values())])
    lines = _layout(cases, rows) if cases else []
    fixed = {name: _ratio_text(run.ratio(now, saved, name, 0)) for name in now.fixed()}
    fixed = {name: text for name, text in fixed.items() if text}
    if fixed:
        wide = max(map(len, fixed))
        lines += ["", *(f"{name:{wide}}  {text:>6}" for name, text in fixed.items())]
    return lines


def _ratio_text(found: run.Ratio | None) -> str:
    return "" if found is None else f"{'' if found.clear else '~'}{found.value:.2f}"


def _layout(cases: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Set a table, whose heads stand in two lines where they have a comma."""
    heads = [case.partition(", ") for case in cases]
    lines = [["", *(first for first, _, _ in heads)], ["", *(last for _, _, last in heads)]]
    table = [*(line for line in lines if any(line)), *rows]
    wide = [max(len(row[k]) for row in table) for k in range(len(table[0]))]
    return [
        "  ".join(
            f"{text:{width}}" if k == 0 else f"{text:>{width}}"
            for k, (text, width) in enumerate(zip(row, wide, strict=True))
        ).rstrip()
        for row in table
    ]
