# SPDX-License-Identifier: Apache-2.0
"""Format a measurement, or the comparison of two, as tables for the terminal."""

from __future__ import annotations

from statistics import geometric_mean

from tvm_ipc.tools import terminal
from tvm_ipc.tools.bench import result_file
from tvm_ipc.tools.bench.result_file import Run
from tvm_ipc.tools.format import message_size_text, table_lines, time_text


def times_table(run: Run) -> list[str]:
    """Return a table with the time of each case by size, and one of the cases without a size."""
    micro = "µs" if terminal.can_print("µ") else "us"
    rows = []
    for size in run.sizes():
        times = (run.at(case, size) for case in run.cases())
        rows.append(
            [message_size_text(size), *("" if t is None else time_text(t, micro) for t in times)]
        )
    lines = table_lines(run.cases(), rows)
    fixed = {name: time_text(seconds, micro) for name, seconds in run.fixed().items()}
    return lines + _fixed_lines(fixed, 8)


def ratio_table(now: Run, saved: Run) -> list[str]:
    """Return a table with the speedup over a saved run, by size and case."""
    cases = [case for case in now.cases() if case in saved.cases()]
    rows = []
    columns: dict[str, list[float]] = {case: [] for case in cases}
    for size in now.sizes():
        row = [message_size_text(size)]
        for case in cases:
            speedup = result_file.ratio(now, saved, case, size)
            row.append(_ratio_text(speedup))
            columns[case] += [speedup.value] if speedup else []
        if any(row[1:]):
            rows.append(row)
    rows.append(["all sizes", *(f"{geometric_mean(c):.2f}" if c else "" for c in columns.values())])
    lines = table_lines(cases, rows) if cases else []
    fixed = {name: _ratio_text(result_file.ratio(now, saved, name, 0)) for name in now.fixed()}
    return lines + _fixed_lines({name: text for name, text in fixed.items() if text}, 6)


def _fixed_lines(texts: dict[str, str], width: int) -> list[str]:
    """Return an empty line, and a line for each case without a size; nothing without cases."""
    label = max(map(len, texts), default=0)
    lines = [f"{name:{label}}  {text:>{width}}" for name, text in texts.items()]
    return ["", *lines] if lines else []


def _ratio_text(speedup: result_file.Ratio | None) -> str:
    return "" if speedup is None else f"{'' if speedup.clear else '~'}{speedup.value:.2f}"
