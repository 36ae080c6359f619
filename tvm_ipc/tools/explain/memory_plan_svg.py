# SPDX-License-Identifier: Apache-2.0
"""Draw a memory plan as SVG.

The drawing is stretched horizontally with the page, so all text is HTML beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import Final

from tvm_ipc.arguments import counted
from tvm_ipc.packed_functions import IPC_MEMORY
from tvm_ipc.tools.explain import timeline_svg
from tvm_ipc.tools.explain.memory_plan_chart_layout import Band, Block, until
from tvm_ipc.tools.explain.transfer_tracks_and_overlap import overlap_summary
from tvm_ipc.tools.format import bytes_text
from tvm_ipc.transform.report import Event, FunctionPlan

_WIDTH: Final = 1000
_HEIGHT: Final = 320
_LEAST_HEIGHT: Final = 72
#: Minimum width of an event when the page opens, in pixels.
_EVENT: Final = 5
#: Plans with more collectives than this are drawn with thinner lines.
_MANY: Final = 24


def scope_class(scope: str) -> str:
    """Return the CSS class of a memory scope."""
    return {"global": "scope-global", IPC_MEMORY: "scope-ipc"}.get(scope, "scope-other")


def figure(plan: FunctionPlan, bands: Sequence[Band], least: dict[str, int], name: str) -> str:
    """Return the figure of a function's plan; `name` makes the ids of its patterns unique."""
    # Tensors outside of the plan matter less, so their band has the minimum height.
    largest = max((band.bytes for band in bands if not band.own), default=1)
    count = len(plan.events)
    axis, inner = [], []
    if plan.transfers:
        axis.append(timeline_svg.axis(plan))
        title = f"<b>timeline</b> {escape(overlap_summary(plan))}"
        inner.append(f'<div class="head"><span>{title}</span></div>{timeline_svg.strip(plan)}')
    for index, band in enumerate(bands):
        share = 0 if band.own else band.bytes / largest
        height = max(_LEAST_HEIGHT, round(_HEIGHT * share))
        css_class = scope_class(band.scope)
        axis.append(f'<div class="head"></div>{_marks(band, height)}')
        inner.append(f'<div class="{css_class}"><div class="head"><span>{_head(band)}</span></div>')
        line = 0 if band.own else least.get(band.scope, 0)
        inner.append(_svg(plan, band, height, line, f"{name}-{index}"))
        inner.append("</div>")
    many = " many" if sum(e.collective is not None for e in plan.events) > _MANY else ""
    return (
        f'<figure class="plan{many}" style="--wide:{count * _EVENT}px" data-events="{count}">'
        f'<div class="grid"><div class="axis">{"".join(axis)}</div>'
        f'<div class="scroll" tabindex="0" aria-label="memory plan of {escape(plan.function)}">'
        f'<div class="inner">{"".join(inner)}{_events(count)}</div></div></div>'
        f"<figcaption>{_legend(bands, plan)}</figcaption></figure>"
    )


def _svg(plan: FunctionPlan, band: Band, height: int, least: int, name: str) -> str:
    count = max(1, len(plan.events))

    def x(event: float) -> str:
        return f"{event * _WIDTH / count:.2f}".rstrip("0").rstrip(".")

    def y(bottom: int) -> str:
        return f"{height - 1 - bottom * (height - 2) / band.bytes:.2f}"

    def box(first: float, last: float, bottom: int, size: int, rest: str, inner: str = "") -> str:
        top = float(y(bottom + size))
        end = f">{inner}</rect>" if inner else "/>"
        return (
            f'<rect x="{x(first)}" y="{top:.2f}" width="{x(last - first)}" '
            f'height="{max(float(y(bottom)) - top, 0.6):.2f}" {rest}{end}'
        )

    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {height}" height="{height}" preserveAspectRatio="none" '
        f'role="img" aria-label="{escape(band.scope)}: {escape(bytes_text(band.bytes))}">',
        f'<pattern id="{name}" class="hatch" width="7" height="7" patternUnits="userSpaceOnUse">'
        '<path d="M-1 8 L8 -1 M-4.5 4.5 L4.5 -4.5 M2.5 11.5 L11.5 2.5"/></pattern>',
    ]
    for shelf in band.shelves:
        parts.append(box(0, count, shelf.bottom, shelf.bytes, 'class="shelf"'))
    for index, block in enumerate(band.blocks):
        tensor = block.tensor
        title = f"<title>{escape(describe(plan, block))}</title>"
        kind = "own" if band.own else f"t{index % 3}"
        rectangle = (tensor.first, tensor.last + 1, block.bottom, block.bytes)
        parts.append(box(*rectangle, f'class="t {kind}"', title))
        if until(tensor) > tensor.last:
            rest = (tensor.last + 1, until(tensor) + 1, block.bottom, block.bytes)
            parts.append(box(*rest, f'class="peers" fill="url(#{name})"'))
    for index, event in enumerate(plan.events):
        if event.collective is not None:
            middle = x(index + 0.5)
            parts.append(
                f'<line class="sync {sync_class(event)}" x1="{middle}" x2="{middle}" y1="0" '
                f'y2="{height}"/>'
            )
    if least:
        parts.append(f'<line class="least" x1="0" x2="{_WIDTH}" y1="{y(least)}" y2="{y(least)}"/>')
    parts.append(f'<path class="live" d="{_steps(band, x, y)}"/></svg>')
    return "".join(parts)


def _steps(band: Band, x: Callable[[float], str], y: Callable[[int], str]) -> str:
    """Return the path of the live bytes; events that do not change them are skipped."""
    parts: list[str] = []
    last = -1
    for index, total in enumerate(band.live):
        if total != last:
            parts.append(f"{'H' if parts else 'M'}{x(index)}" + (" " if not parts else "V"))
            parts[-1] += y(total)
            last = total
    return "".join(parts) + f"H{_WIDTH}"


def describe(plan: FunctionPlan, block: Block) -> str:
    """Return the tooltip of a tensor."""
    tensor = block.tensor
    size = bytes_text(block.bytes)
    if tensor.bytes is None:
        size += f" ({tensor.size})"
    location = block.storage if tensor.storage < 0 else f"{block.storage} at {tensor.offset}"
    lines = [
        f"{tensor.name}: {tensor.dtype}, {size} in {tensor.scope}, {location}",
        f"allocated at event {tensor.first}{_event_text(plan, tensor.first)}",
        f"last used at event {tensor.last}{_event_text(plan, tensor.last)}",
    ]
    if until(tensor) > tensor.last:
        lines.append(
            f"peers may read it until event {until(tensor)}{_event_text(plan, until(tensor))}"
        )
    return "\n".join(lines)


def sync_class(event: Event) -> str:
    """Return the CSS class of the line of a collective."""
    return {"kept": "kept", "left out": "left-out"}.get(event.barrier or "", "plain")


def _event_text(plan: FunctionPlan, event: int) -> str:
    return f": {plan.events[event].text}" if 0 <= event < len(plan.events) else ""


def _head(band: Band) -> str:
    if band.own:
        text = f"separate allocations, {counted(len(band.blocks), 'tensor')}"
    else:
        text = f"{counted(len(band.shelves), 'storage')}, {bytes_text(band.bytes)}"
    return f"<b>{escape(band.scope)}</b> {text}"


def _marks(band: Band, height: int) -> str:
    marks = [
        '<span class="zero" style="bottom:0">0</span>',
        f'<span class="top" style="bottom:100%">{bytes_text(band.bytes)}</span>',
    ]
    if height > 2 * _LEAST_HEIGHT:
        marks.append(f'<span style="bottom:50%">{bytes_text(band.bytes // 2)}</span>')
    return f'<div class="marks" style="height:{height}px">{"".join(marks)}</div>'


def _events(count: int) -> str:
    most = max(8, count * _EVENT // 140)
    step = next((s for s in (1, 2, 5, 10, 20, 50, 100, 200, 500) if count / s <= most), 1000)
    ticks = [index for index in range(0, count, step) if index + step / 2 <= count]
    spans = [f'<span style="left:{100 * t / count:.2f}%">{t or "event 0"}</span>' for t in ticks]
    return f'<div class="events">{"".join(spans)}<span style="left:100%">{count}</span></div>'


def _legend(bands: Sequence[Band], plan: FunctionPlan) -> str:
    kinds = {sync_class(event) for event in plan.events if event.collective is not None}
    first = scope_class(bands[0].scope)
    peers = next((b for b in bands if any(until(k.tensor) > k.tensor.last for k in b.blocks)), None)
    entries = [
        (first, '<rect class="t" width="22" height="14"/>', "tensor at its place in a storage"),
    ]
    if any(band.own for band in bands):
        entries.append(
            (
                "",
                '<rect class="t own" width="22" height="14"/>',
                "tensor with an allocation of its own",
            )
        )
    if peers is not None:
        hatch = (
            '<pattern id="legend" class="hatch" width="7" height="7" '
            'patternUnits="userSpaceOnUse"><path d="M-1 8 L8 -1 M-4.5 4.5 L4.5 -4.5"/></pattern>'
            '<rect class="peers" width="22" height="14" fill="url(#legend)"/>'
        )
        entries.append((scope_class(peers.scope), hatch, "kept because peers may still read it"))
    for kind, text in (
        ("kept", "collective with a barrier at its end"),
        ("left-out", "collective without a barrier at its end"),
        ("plain", "collective whose input peers do not read in place"),
    ):
        if kind in kinds:
            line = f'<line class="sync {kind}" x1="11" x2="11" y1="0" y2="14"/>'
            entries.append(("", line, text))
    entries.append(("", '<path class="live" d="M0 11H8V4H22"/>', "bytes in use"))
    entries.append(
        ("", '<line class="least" x1="0" x2="22" y1="7" y2="7"/>', "least that any plan needs")
    )
    if plan.transfers:
        entries += [("", shape, text) for shape, text in timeline_svg.legend(plan)]
    items = [
        f'<li class="{kind}"><svg viewBox="0 0 22 14" aria-hidden="true">{shape}</svg>{text}</li>'
        for kind, shape, text in entries
    ]
    return f'<ul class="legend">{"".join(items)}</ul>'
