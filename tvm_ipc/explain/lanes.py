# SPDX-License-Identifier: Apache-2.0
"""The timeline of a function as SVG: transfers in lanes, and below them what is computed."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Final

from tvm_ipc.explain.timeline import describe, is_product, lanes
from tvm_ipc.transform.report import FunctionPlan, Transfer

#: Of the drawing, as that of the memory has it.
_WIDTH: Final = 1000
#: Pixels of a lane, and between lanes.
_LANE: Final = 18
_GAP: Final = 4


def axis(plan: FunctionPlan) -> str:
    """Return what stands beside the lanes."""
    count, height = len(lanes(plan)), _height(plan)
    middle = 100 * (1 - count * (_LANE + _GAP) / 2 / height)
    below = 100 * _LANE / 2 / height
    return (
        f'<div class="head"></div><div class="marks" style="height:{height}px">'
        f'<span style="bottom:{middle:.1f}%">on its way</span>'
        f'<span style="bottom:{below:.1f}%">computed</span></div>'
    )


def strip(plan: FunctionPlan) -> str:
    """Return the lanes."""
    height = _height(plan)
    parts = [
        f'<svg class="lanes" viewBox="0 0 {_WIDTH} {height}" height="{height}" '
        'preserveAspectRatio="none" role="img" aria-label="what goes on beside what">'
    ]
    rows = lanes(plan)
    for number, lane in enumerate(rows):
        for transfer in lane:
            parts.append(_transfer(plan, transfer, number * (_LANE + _GAP)))
    top = len(rows) * (_LANE + _GAP)
    for index, event in enumerate(plan.events):
        if event.computes is not None:
            hides = any(one.first < index < one.last for one in plan.transfers)
            kind = "product" if is_product(event.computes) else "other"
            title = f"{event.computes} at event {index}"
            title += "\nwhile data are on their way" if hides else ""
            look = f"act {kind}{'' if hides else ' alone'}"
            parts.append(_box(plan, index, index, top, _LANE, look, title))
    return "".join([*parts, "</svg>"])


def legend(plan: FunctionPlan) -> list[tuple[str, str]]:
    """Return what the shapes mean: each with its text."""
    hows = {transfer.how for transfer in plan.transfers}
    box = '<rect class="act {}" width="22" height="14"/>'
    entries = []
    if "called" in hows:
        entries.append((box.format("called"), "data on their way, and the program waits"))
    if hows - {"called"}:
        entries.append((box.format("beside"), "on their way beside the program"))
        bar = f'{box.format("beside")}<line class="{{}}" x1="11" x2="11" y1="0" y2="{{}}"/>'
        entries.append((bar.format("begins", 7), "given away"))
        entries.append((bar.format("waits", 14), "waited for"))
    kinds = {is_product(event.computes) for event in plan.events if event.computes is not None}
    if True in kinds:
        entries.append((box.format("product"), "a matrix product"))
    if False in kinds:
        entries.append((box.format("other"), "another kernel"))
    if kinds:
        entries.append((box.format("product alone"), "nothing is on its way meanwhile"))
    return entries


def _height(plan: FunctionPlan) -> int:
    return len(lanes(plan)) * (_LANE + _GAP) + _LANE


def _transfer(plan: FunctionPlan, transfer: Transfer, top: int) -> str:
    title = describe(plan, transfer)
    if transfer.how == "called":
        return _box(plan, transfer.first, transfer.last, top, _LANE, "act called", title)
    parts = [_box(plan, transfer.first, transfer.last, top, _LANE, "act beside", title)]
    parts += _lines(plan, transfer.starts, top, _LANE // 2, "begins")
    parts += _lines(plan, transfer.waits, top, _LANE, "waits")
    return "".join(parts)


def _lines(
    plan: FunctionPlan, events: Sequence[int], top: int, height: int, look: str
) -> list[str]:
    places = [_x(plan, event + 0.5) for event in events]
    return [
        f'<line class="{look}" x1="{x}" x2="{x}" y1="{top}" y2="{top + height}"/>' for x in places
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
