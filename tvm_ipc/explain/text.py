# SPDX-License-Identifier: Apache-2.0
"""What `tvm-ipc explain --text` prints."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Final

from tvm_ipc.explain.layout import Band, bands, condense, until
from tvm_ipc.explain.timeline import hidden, is_product, lanes
from tvm_ipc.explain.words import (
    against,
    assumptions,
    barriers,
    bytes_text,
    findings,
    headline,
    setting,
    spent,
    upstream,
)
from tvm_ipc.inspection.explanation import Explanation, Memory
from tvm_ipc.terminal import WIDTH
from tvm_ipc.transform.report import FunctionPlan

_WIDTH: Final = 72
#: Of lines of words.
_LINE: Final = WIDTH - 1
_ROWS: Final = 12
_OWN_ROWS: Final = 3
#: With more events than this only the first are shown: there would be nothing to see.
_MOST: Final = 3 * _WIDTH
#: Neighbours in the plan are told apart by these.
_SHADES: Final = "█▓▒"
_OWN: Final = "░"
_PEERS: Final = "/"
#: Beyond ASCII, and what may stand for it.
CHARACTERS: Final = f"{_SHADES}{_OWN}\u2026"
_PLAIN: Final = str.maketrans(CHARACTERS, "#=-.*")


def render(explanation: Explanation, *, plain: bool = False) -> str:
    """Return everything but single tensors and events; `plain` is without `CHARACTERS`."""
    parts = [
        f"Memory and collectives of {explanation.question.source}",
        *textwrap.wrap("  ".join([*setting(explanation), *assumptions(explanation)]), _LINE),
        "",
        *textwrap.wrap(headline(explanation), _LINE),
        "",
        _totals(explanation.total()),
        *textwrap.wrap(upstream(explanation), _LINE),
        *textwrap.wrap(spent(explanation), _LINE),
        "",
        _decisions(explanation),
    ]
    for plan in map(condense, explanation.report.plans):
        head = f"Function {plan.function}: {barriers(plan)}"
        parts += ["", *textwrap.wrap(head, _LINE, break_long_words=False)]
        sizes = explanation.sizes.get(plan.function, {})
        if plan.transfers:
            parts.append(_timeline(plan))
        parts += [_picture(plan, band) for band in bands(plan, sizes)]
    text = "\n".join(part.rstrip() for part in "\n".join(parts).splitlines())
    return text.translate(_PLAIN) if plain else text


def _totals(memory: Memory) -> str:
    rows = [["scope", "this plan", "TVM's plan", "", "the least", ""]]
    for scope in memory.scopes:
        ours, theirs, least = (
            kind.get(scope, 0) for kind in (memory.ours, memory.upstream, memory.least)
        )
        row = [scope, bytes_text(ours), bytes_text(theirs), against(ours, theirs)]
        rows.append([*row, bytes_text(least), against(ours, least)])
    return _table(rows)


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if not i else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def _decisions(explanation: Explanation) -> str:
    lines = ["Decisions"]
    for one in findings(explanation.report.decisions):
        head = f"{one.functions}: {one.about}: {one.verdict}"
        lines.append(_fill(head, "  ", "    "))
        reason = f"{one.reason} ({one.pass_name})"
        lines.append(_fill(reason, "      ", "      "))
    return "\n".join(lines) if len(lines) > 1 else "There was nothing to decide."


def _fill(text: str, first: str, rest: str) -> str:
    # Names are long, and of no use in pieces.
    wrapper = textwrap.TextWrapper(_LINE, break_long_words=False, break_on_hyphens=False)
    wrapper.initial_indent, wrapper.subsequent_indent = first, rest
    return wrapper.fill(text)


def _timeline(plan: FunctionPlan) -> str:
    """Return as characters what is on its way, and below it what is computed."""
    count = min(len(plan.events), _MOST)
    wide = max(1, _WIDTH // count)  # columns of an event
    rows = [[" "] * (count * wide) for _ in range(len(lanes(plan)) + 1)]

    def mark(row: list[str], first: int, last: int, character: str) -> None:
        begin, end = first * wide, (last + 1) * wide - (wide > 1)
        row[begin:end] = character * (min(end, len(row)) - begin)

    for row, lane in zip(rows, lanes(plan), strict=False):
        for one in lane:
            mark(row, one.first, one.last, "#" if one.how == "called" else "-")
            if one.how != "called":
                for at in (*one.starts, *one.waits):
                    mark(row, at, at, "?" if at in one.waits else ">")
    for index, event in enumerate(plan.events[:count]):
        if event.computes is not None:
            mark(rows[-1], index, index, "x" if is_product(event.computes) else ".")
    lines = textwrap.wrap(hidden(plan), _LINE, initial_indent="  ", subsequent_indent="  ")
    for begin in range(0, count, _WIDTH // wide):
        end = min(begin + _WIDTH // wide, count)
        if count > _WIDTH:
            lines.append(f"  events {begin} to {end - 1} of {len(plan.events)}")
        lines += [f"  {''.join(row[begin * wide : end * wide])}".rstrip() for row in rows]
    words = {
        "#": "# the program waits for data",
        "-": "- data on their way",
        ">": "> given away",
        "?": "? waited for",
        "x": "x matrix product",
        ".": ". other kernel",
    }
    drawn = {character for row in rows for character in row}
    parts = [text for character, text in words.items() if character in drawn]
    return "\n".join(
        [*lines, *(f"  {'   '.join(parts[k : k + 3])}" for k in range(0, len(parts), 3))]
    )


def _picture(plan: FunctionPlan, band: Band) -> str:
    """Return the plan as characters: time to the right, bytes upwards."""
    count = max(1, min(len(plan.events), _MOST))
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
            place = min(columns - 1, (2 * index + 1) * columns // (2 * count))
            marks[place] = {"kept": "B", "left out": "|"}.get(event.barrier or "", ":")
    label = f"{band.scope}, {bytes_text(band.bytes)}"
    if band.own:
        label += " outside of storages"
    if count < len(plan.events):
        label += f", the first {count} of {len(plan.events)} events"
    lines = [f"  {label}", *(f"  {''.join(row)}".rstrip() for row in reversed(cells))]
    if any(mark != " " for mark in marks):
        lines.append(f"  {''.join(marks)}")
        lines.append(f"  {_key(marks, cells)}")
    return "\n".join(lines)


def _key(marks: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    words = {
        "|": "| collective, no exit barrier",
        "B": "B collective with one",
        ":": ": other collective",
    }
    parts = [text for mark, text in words.items() if mark in marks]
    if any(_PEERS in row for row in cells):
        parts.append(f"{_PEERS} kept for peers")
    return "   ".join(parts)
