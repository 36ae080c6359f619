# SPDX-License-Identifier: Apache-2.0
"""Plot a measurement as SVG, without a plotting package.

The upper panel shows times by size. The lower panel shows the time of each collective relative to a
copy, or the speedup over a saved run. All axes are logarithmic.
"""

# matplotlib (the extra `bench`) would be 60 MB of packages for `--plot`. The documentation has this
# plot, too, and is built without it.

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from tvm_ipc.tools.bench import result_file
from tvm_ipc.tools.bench.collective_times import COPIED
from tvm_ipc.tools.bench.result_file import Run
from tvm_ipc.tools.format import message_size_text, time_text

_COLOURS = ("#6b7280", "#2563eb", "#ea580c", "#0f9d7a", "#9333ea", "#b45309", "#db2777")
#: Colours of text and of grid lines.
INK, FAINT = "#1f2937", "#d5d9e0"
_WIDTH, _LEFT, _RIGHT = 760, 76, 24
_HIGH, _GAP = 250, 74


@dataclass(frozen=True)
class _Panel:
    """One pair of axes with a line for each case; x values are indices of sizes."""

    title: str
    lines: dict[str, list[tuple[int, float]]]
    ticks: Sequence[float]
    name: Callable[[float], str]
    marked: float | None = None  #: a value that gets a dashed grid line


def draw(now: Run, saved: Run | None, name: str) -> str:
    """Return a plot of a run; `name` is the file of the saved run."""
    panels = [_times_panel(now)]
    lower = _relative_to_copy(now) if saved is None else _speedups(now, saved, name)
    panels += [lower] if lower.lines else []
    names = {message_size_text(size): None for size in now.sizes()}
    device = "GPUs" if now.device == "cuda" else now.device.upper()
    title = f"Collectives of {now.workers} workers, {device}"
    top, parts = 80, [_text(_LEFT, 26, title, size=17, bold=True)]
    parts.append(_text(_LEFT, 46, now.about.get("machine", "")))
    colours = dict(zip(now.cases(), _repeat_colours(len(now.cases())), strict=True))
    for panel in panels:
        parts += _draw_panel(panel, top, list(names), colours)
        top += _HIGH + _GAP
    parts += _legend(colours, top - 14)
    height = top + 8 + 20 * (-(-len(colours) // 3) - 1)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" height="{height}" role="img" aria-label="times of collectives by size" '
        f'font-family="system-ui, sans-serif" font-size="13" fill="{INK}">'
    )
    paper = f'<rect width="{_WIDTH}" height="{height}" fill="white"/>'
    return "\n".join([head, paper, *parts, "</svg>", ""])


def _repeat_colours(count: int) -> list[str]:
    return [_COLOURS[k % len(_COLOURS)] for k in range(count)]


def _times_panel(now: Run) -> _Panel:
    lines = _lines(now, lambda case, size: now.at(case, size))
    values = [value for line in lines.values() for _, value in line]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    ticks = [10.0**power for power in range(low, max(high, low + 1) + 1)]
    return _Panel("time of a call", lines, ticks, _short_time)


def _relative_to_copy(now: Run) -> _Panel:
    def ratio(case: str, size: int) -> float | None:
        copied, own = now.at(COPIED, size), now.at(case, size)
        return own / copied if own and copied and case != COPIED else None

    title = "time of a call relative to a copy of as many bytes"
    return _panel_of_ratios(title, _lines(now, ratio))


def _speedups(now: Run, saved: Run, name: str) -> _Panel:
    def ratio(case: str, size: int) -> float | None:
        speedup = result_file.ratio(now, saved, case, size)
        return speedup.value if speedup else None

    return _panel_of_ratios(f"speedup over {name}", _lines(now, ratio))


def _panel_of_ratios(title: str, lines: dict[str, list[tuple[int, float]]]) -> _Panel:
    values = [1.0, *(value for line in lines.values() for _, value in line)]
    low, high = math.floor(math.log2(min(values))), math.ceil(math.log2(max(values)))
    ticks = [2.0**power for power in range(min(low, -1), max(high, 1) + 1)]
    return _Panel(title, lines, ticks, lambda tick: f"{tick:.3g}x", 1.0)


def _lines(
    now: Run, value: Callable[[str, int], float | None]
) -> dict[str, list[tuple[int, float]]]:
    lines: dict[str, list[tuple[int, float]]] = {}
    for case in now.cases():
        points = [(k, value(case, size)) for k, size in enumerate(now.sizes())]
        if measured := [(k, y) for k, y in points if y is not None]:
            lines[case] = measured
    return lines


def _short_time(seconds: float) -> str:
    text, unit = time_text(seconds).split()
    return f"{float(text):g} {unit}"


def _draw_panel(panel: _Panel, top: int, sizes: list[str], colours: dict[str, str]) -> list[str]:
    width = _WIDTH - _LEFT - _RIGHT
    first, last = math.log(panel.ticks[0]), math.log(panel.ticks[-1])

    def x(number: int) -> float:
        return _LEFT + width * (number + 0.5) / len(sizes)

    def y(value: float) -> float:
        return top + 14 + _HIGH * (1 - (math.log(value) - first) / (last - first))

    parts = [_text(_LEFT, top, panel.title, bold=True)]
    every = -(-len(panel.ticks) // 8)
    for number, tick in enumerate(panel.ticks):
        if number % every and tick != panel.marked:
            continue
        marked = tick == panel.marked
        look = f'stroke="{INK if marked else FAINT}"' + ' stroke-dasharray="5 4"' * marked
        parts.append(f'<path d="M{_LEFT} {y(tick):.1f}h{width}" {look}/>')
        parts.append(_text(_LEFT - 8, y(tick) + 4, panel.name(tick), "end"))
    bottom = top + 14 + _HIGH
    parts += [_text(x(k), bottom + 20, text, "middle") for k, text in enumerate(sizes)]
    for case, points in panel.lines.items():
        points_on_page = [(x(k), y(value)) for k, value in points]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points_on_page)
        look = f'fill="none" stroke="{colours[case]}" stroke-width="2.2"'
        parts.append(f'<polyline points="{path}" {look}/>')
        parts += [
            f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.4" fill="{colours[case]}"/>'
            for a, b in points_on_page
        ]
    return parts


def _legend(colours: dict[str, str], top: int) -> list[str]:
    parts = []
    step = (_WIDTH - _LEFT - _RIGHT) // 3
    for number, (case, colour) in enumerate(colours.items()):
        left, line = _LEFT + step * (number % 3), top + 20 * (number // 3)
        parts.append(f'<path d="M{left} {line - 4}h22" stroke="{colour}" stroke-width="2.2"/>')
        parts.append(f'<circle cx="{left + 11}" cy="{line - 4}" r="3.4" fill="{colour}"/>')
        parts.append(_text(left + 30, line, case))
    return parts


def _text(
    x: float, y: float, text: str, anchor: str = "start", *, size: int = 13, bold: bool = False
) -> str:
    weight = ' font-weight="600"' * bold
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"{weight}>'
        f"{escape(text)}</text>"
    )
