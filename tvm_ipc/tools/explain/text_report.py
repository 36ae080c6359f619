# SPDX-License-Identifier: Apache-2.0
"""Format an explanation as text, for `tvm-ipc explain --text`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Final

from tvm_ipc.tools.explain.memory_plan_chart_layout import Band, bands, condense, until
from tvm_ipc.tools.explain.summary_sentences import (
    assumptions,
    barrier_cost,
    collectives_summary,
    compile_settings,
    figure_rows,
    relative_size,
    upstream_caveat,
)
from tvm_ipc.tools.explain.transfer_tracks_and_overlap import is_matmul, overlap_summary, tracks
from tvm_ipc.tools.format import bytes_text, table_lines
from tvm_ipc.tools.inspection.explain_decisions_and_memory import Explanation, Memory
from tvm_ipc.tools.terminal import WIDTH
from tvm_ipc.transform.report import FunctionPlan, hanging_indent

#: Width of drawings, in characters.
_WIDTH: Final = 72
#: Width of the label of a headline figure.
_LABEL: Final = 13
#: Width of lines of text.
_LINE: Final = WIDTH - 1
#: Height of a band of storages, and of one of tensors without a storage.
_ROWS: Final = 12
_OWN_ROWS: Final = 3
#: Number of events that a drawing shows at most.
_MAX_EVENTS: Final = 3 * _WIDTH
#: Alternating shades of neighbouring tensors.
_SHADES: Final = "█▓▒"
_OWN: Final = "░"
_PEERS: Final = "/"
_HOW_TO_READ: Final = (
    "In the drawings of memory, events run from left to right, and bytes from bottom to top. "
    "Neighbouring tensors have different shades."
)
#: The characters that mark something in drawings of memory, and their meanings.
_LEGEND: Final = {
    "|": "| collective without a barrier at its end",
    "B": "B collective with a barrier at its end",
    ":": ": collective whose input peers do not read in place",
    _PEERS: f"{_PEERS} kept because peers may still read it",
    _OWN: f"{_OWN} in an allocation of its own",
}
#: The characters beyond ASCII, and their replacements.
CHARACTERS: Final = f"{_SHADES}{_OWN}\u2026"
_PLAIN: Final = str.maketrans(CHARACTERS, "#=-.*")


def render(explanation: Explanation, *, plain: bool = False) -> str:
    """Return the report; `plain` replaces `CHARACTERS` by ASCII."""
    paragraphs = [
        summary(explanation),
        "",
        _totals(explanation.total()),
        *textwrap.wrap(upstream_caveat(explanation), _LINE),
        *textwrap.wrap(barrier_cost(explanation), _LINE),
        "",
        str(explanation.report),
    ]
    if explanation.report.plans:
        paragraphs += ["", *textwrap.wrap(_HOW_TO_READ, _LINE)]
    for plan in map(condense, explanation.report.plans):
        head = f"Function {plan.function}: {collectives_summary(plan)}"
        paragraphs += ["", *textwrap.wrap(head, _LINE, break_long_words=False)]
        sizes = explanation.sizes.get(plan.function, {})
        if plan.transfers:
            paragraphs.append(_timeline(plan))
        paragraphs += _draw_bands(plan, sizes)
    text = "\n".join(line.rstrip() for line in "\n".join(paragraphs).splitlines())
    return text.translate(_PLAIN) if plain else text


def summary(explanation: Explanation) -> str:
    """Return the title, the settings and the headline figures."""
    lines = [
        f"Memory and collectives of {explanation.question.source}",
        *textwrap.wrap(
            "  ".join([*compile_settings(explanation), *assumptions(explanation)]), _LINE
        ),
        "",
    ]
    for label, text in figure_rows(explanation):
        lines.append(hanging_indent(text, f"{label:<{_LABEL}}", " " * _LABEL))
    return "\n".join(lines)


def _totals(memory: Memory) -> str:
    headers = ["this plan", "TVM's plan", "", "lower bound", ""]
    rows = []
    for scope in memory.scopes:
        ours, upstream, least = (
            by_scope.get(scope, 0) for by_scope in (memory.ours, memory.upstream, memory.least)
        )
        row = [scope, bytes_text(ours), bytes_text(upstream), relative_size(ours, upstream)]
        rows.append([*row, bytes_text(least), relative_size(ours, least)])
    return "\n".join(table_lines(headers, rows))


def _timeline(plan: FunctionPlan) -> str:
    """Draw the transfers on tracks, and the kernels below them."""
    count = min(len(plan.events), _MAX_EVENTS)
    wide = max(1, _WIDTH // count)  # columns of an event
    rows = [[" "] * (count * wide) for _ in range(len(tracks(plan)) + 1)]

    def mark(row: list[str], first: int, last: int, character: str) -> None:
        begin, end = first * wide, (last + 1) * wide - (wide > 1)
        row[begin:end] = character * (min(end, len(row)) - begin)

    for row, track in zip(rows, tracks(plan), strict=False):
        for transfer in track:
            mark(row, transfer.first, transfer.last, "#" if transfer.how == "called" else "-")
            if transfer.how != "called":
                for at in (*transfer.starts, *transfer.waits):
                    mark(row, at, at, "?" if at in transfer.waits else ">")
    for index, event in enumerate(plan.events[:count]):
        if event.computes is not None:
            mark(rows[-1], index, index, "x" if is_matmul(event.computes) else ".")
    lines = textwrap.wrap(overlap_summary(plan), _LINE, initial_indent="  ", subsequent_indent="  ")
    for begin in range(0, count, _WIDTH // wide):
        end = min(begin + _WIDTH // wide, count)
        if count > _WIDTH:
            lines.append(f"  events {begin} to {end - 1} of {len(plan.events)}")
        lines += [f"  {''.join(row[begin * wide : end * wide])}".rstrip() for row in rows]
    legend = {
        "#": "# transfer that the program waits for",
        "-": "- transfer during kernels",
        ">": "> data is ready for peers",
        "?": "? waits for peers",
        "x": "x matmul",
        ".": ". other kernel",
    }
    drawn = {character for row in rows for character in row}
    entries = [text for character, text in legend.items() if character in drawn]
    return "\n".join(
        [*lines, *(f"  {'   '.join(entries[k : k + 2])}" for k in range(0, len(entries), 2))]
    )


def _draw_bands(plan: FunctionPlan, sizes: Mapping[str, int]) -> Iterator[str]:
    """Yield the drawing of each band of the plan, and then the legend."""
    drawn: set[str] = set()
    for band in bands(plan, sizes):
        text, characters = _draw_band(plan, band)
        drawn |= characters
        yield text
    yield from (f"  {entry}" for mark, entry in _LEGEND.items() if mark in drawn)


def _draw_band(plan: FunctionPlan, band: Band) -> tuple[str, set[str]]:
    """Draw a band of the plan; return the drawing and its characters."""
    count = max(1, min(len(plan.events), _MAX_EVENTS))
    columns = min(_WIDTH, count * max(1, _WIDTH // count))
    rows = _OWN_ROWS if band.own else _ROWS
    cells = [[" "] * columns for _ in range(rows)]

    def fill(first: int, last: int, bottom: int, size: int, shade: str) -> None:
        if first >= count:
            return
        left = first * columns // count
        right = max(left + 1, -(-(last + 1) * columns // count))
        low = bottom * rows // band.bytes
        high = max(low + 1, -(-(bottom + size) * rows // band.bytes))
        for row in range(low, min(high, rows)):
            cells[row][left:right] = shade * (min(right, columns) - left)

    for index, block in enumerate(band.blocks):
        tensor = block.tensor
        if until(tensor) > tensor.last:
            fill(tensor.last + 1, until(tensor), block.bottom, block.bytes, _PEERS)
        shade = _OWN if band.own else _SHADES[index % len(_SHADES)]
        fill(tensor.first, tensor.last, block.bottom, block.bytes, shade)
    marks = [" "] * columns
    for index, event in enumerate(plan.events[:count]):
        if event.collective is not None:
            column = min(columns - 1, (2 * index + 1) * columns // (2 * count))
            marks[column] = {"kept": "B", "left out": "|"}.get(event.barrier or "", ":")
    label = f"{band.scope}, {bytes_text(band.bytes)}"
    if band.own:
        label += " in separate allocations"
    if count < len(plan.events):
        label += f", the first {count} of {len(plan.events)} events"
    lines = [f"  {label}", *(f"  {''.join(row)}".rstrip() for row in reversed(cells))]
    if any(mark != " " for mark in marks):
        lines.append(f"  {''.join(marks)}")
    return "\n".join(lines), {*marks, *(mark for row in cells for mark in row)}
