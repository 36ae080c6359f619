# SPDX-License-Identifier: Apache-2.0
"""Draw the timeline of a function as SVG: transfers on tracks, and kernels below them."""

# Not Perfetto's format, as in `bench/chrome_trace.py`: this timeline has events but no times,
# shares its axis with the memory plan below it, and is part of a page that works offline.

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Final

from tvm_ipc.tools.explain.transfer_tracks_and_overlap import describe, is_matmul, tracks
from tvm_ipc.transform.report import FunctionPlan, Transfer

#: Width of the drawing, as in `memory_plan_svg`.
_WIDTH: Final = 1000
#: Height of a track, and the gap between tracks, in pixels.
_TRACK: Final = 18
_GAP: Final = 4


def axis(plan: FunctionPlan) -> str:
    """Return the labels of the tracks."""
    count, height = len(tracks(plan)), _height(plan)
    middle = 100 * (1 - count * (_TRACK + _GAP) / 2 / height)
    below = 100 * _TRACK / 2 / height
    return (
        f'<div class="head"></div><div class="marks" style="height:{height}px">'
        f'<span style="bottom:{middle:.1f}%">transfers</span>'
        f'<span style="bottom:{below:.1f}%">kernels</span></div>'
    )


def strip(plan: FunctionPlan) -> str:
    """Return the drawing of the tracks."""
    height = _height(plan)
    parts = [
        f'<svg class="tracks" viewBox="0 0 {_WIDTH} {height}" height="{height}" '
        'preserveAspectRatio="none" role="img" aria-label="transfers and kernels over time">'
    ]
    rows = tracks(plan)
    for number, track in enumerate(rows):
        for transfer in track:
            parts.append(_transfer(plan, transfer, number * (_TRACK + _GAP)))
    top = len(rows) * (_TRACK + _GAP)
    for index, event in enumerate(plan.events):
        if event.computes is not None:
            overlaps = any(t.first < index < t.last for t in plan.transfers)
            kind = "product" if is_matmul(event.computes) else "other"
            title = f"{event.computes} at event {index}"
            title += "\noverlaps with a transfer" if overlaps else ""
            look = f"act {kind}{'' if overlaps else ' alone'}"
            parts.append(_box(plan, index, index, top, _TRACK, look, title))
    return "".join([*parts, "</svg>"])


def legend(plan: FunctionPlan) -> list[tuple[str, str]]:
    """Return the shapes of the legend with their texts."""
    hows = {transfer.how for transfer in plan.transfers}
    box = '<rect class="act {}" width="22" height="14"/>'
    entries = []
    if "called" in hows:
        entries.append((box.format("called"), "transfer that the program waits for"))
    if hows - {"called"}:
        entries.append((box.format("beside"), "transfer during kernels"))
        bar = f'{box.format("beside")}<line class="{{}}" x1="11" x2="11" y1="0" y2="{{}}"/>'
        entries.append((bar.format("begins", 7), "data is ready for peers"))
        entries.append((bar.format("waits", 14), "waits for peers"))
    kinds = {is_matmul(event.computes) for event in plan.events if event.computes is not None}
    if True in kinds:
        entries.append((box.format("product"), "matmul"))
    if False in kinds:
        entries.append((box.format("other"), "other kernel"))
    if kinds:
        entries.append((box.format("product alone"), "kernel without a transfer meanwhile"))
    return entries


def _height(plan: FunctionPlan) -> int:
    return len(tracks(plan)) * (_TRACK + _GAP) + _TRACK


def _transfer(plan: FunctionPlan, transfer: Transfer, top: int) -> str:
    title = describe(plan, transfer)
    if transfer.how == "called":
        return _box(plan, transfer.first, transfer.last, top, _TRACK, "act called", title)
    parts = [_box(plan, transfer.first, transfer.last, top, _TRACK, "act beside", title)]
    parts += _lines(plan, transfer.starts, top, _TRACK // 2, "begins")
    parts += _lines(plan, transfer.waits, top, _TRACK, "waits")
    return "".join(parts)


def _lines(
    plan: FunctionPlan, events: Sequence[int], top: int, height: int, look: str
) -> list[str]:
    positions = [_x(plan, event + 0.5) for event in events]
    return [
        f'<line class="{look}" x1="{x}" x2="{x}" y1="{top}" y2="{top + height}"/>'
        for x in positions
    ]


def _box(
    plan: FunctionPlan, first: int, last: int, top: int, height: int, look: str, title: str
) -> str:
    width = (last + 1 - first) * _WIDTH / len(plan.events)
    return (
        f'<rect class="{look}" x="{_x(plan, first)}" y="{top}" width="{width:.2f}" '
        f'height="{height}"><title>{escape(title)}</title></rect>'
    )


def _x(plan: FunctionPlan, event: float) -> str:
    return f"{event * _WIDTH / len(plan.events):.2f}".rstrip("0").rstrip(".")
