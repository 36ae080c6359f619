# SPDX-License-Identifier: Apache-2.0
"""A measurement as a picture: SVG, which every browser shows, and which needs no other package.

Above are times by size; below either how many copies each collective takes the time of, or how many
times as fast it is as in a saved run. Both axes of a panel go by powers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from tvm_ipc.bench import run
from tvm_ipc.bench.run import Run
from tvm_ipc.bench.suite import COPIED
from tvm_ipc.bench.words import size_text, time_text

_COLOURS = ("#6b7280", "#2563eb", "#ea580c", "#0f9d7a", "#9333ea", "#b45309", "#db2777")
#: Of words, and of the lines behind those of cases.
INK, FAINT = "#1f2937", "#d5d9e0"
_WIDTH, _LEFT, _RIGHT = 760, 76, 24
_HIGH, _GAP = 250, 74


@dataclass(frozen=True)
class _Panel:
    """One pair of axes; a line for each case, by the number of its size."""

    title: str
    lines: dict[str, list[tuple[int, float]]]
    ticks: Sequence[float]
    name: Callable[[float], str]
    marked: float | None = None  #: a value that is drawn as a line of its own


def draw(now: Run, saved: Run | None, name: str) -> str:
    """Return a picture of a run; `name` is that of the file with the saved one."""
    panels = [_times(now)]
    below = _copies(now) if saved is None else _ratios(now, saved, name)
    panels += [below] if below.lines else []
    names = {size_text(size): None for size in now.sizes()}
    where = "GPUs" if now.device == "cuda" else now.device.upper()
    title = f"Collectives of {now.workers} workers, {where}"
    top, parts = 80, [_text(_LEFT, 26, title, size=17, bold=True)]
    parts.append(_text(_LEFT, 46, now.about.get("machine", "")))
    colours = dict(zip(now.cases(), _cycled(len(now.cases())), strict=True))
    for panel in panels:
        parts += _drawn(panel, top, list(names), colours)
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


def _cycled(count: int) -> list[str]:
    return [_COLOURS[k % len(_COLOURS)] for k in range(count)]


def _times(now: Run) -> _Panel:
    lines = _lines(now, lambda case, size: now.at(case, size))
    found = [value for line in lines.values() for _, value in line]
    low, high = math.floor(math.log10(min(found))), math.ceil(math.log10(max(found)))
    ticks = [10.0**power for power in range(low, max(high, low + 1) + 1)]
    return _Panel("time of a call", lines, ticks, _short_time)


def _copies(now: Run) -> _Panel:
    def ratio(case: str, size: int) -> float | None:
        copied, own = now.at(COPIED, size), now.at(case, size)
        return own / copied if own and copied and case != COPIED else None

    title = "how many copies of as many bytes would take the same time"
    return _by_twos(title, _lines(now, ratio))


def _ratios(now: Run, saved: Run, name: str) -> _Panel:
    def ratio(case: str, size: int) -> float | None:
        found = run.ratio(now, saved, case, size)
        return found.value if found else None

    return _by_twos(f"times as fast as in {name}", _lines(now, ratio))


def _by_twos(title: str, lines: dict[str, list[tuple[int, float]]]) -> _Panel:
    found = [1.0, *(value for line in lines.values() for _, value in line)]
    low, high = math.floor(math.log2(min(found))), math.ceil(math.log2(max(found)))
    ticks = [2.0**power for power in range(min(low, -1), max(high, 1) + 1)]
    return _Panel(title, lines, ticks, lambda tick: f"{tick:.3g}x", 1.0)


def _lines(
    now: Run, value: Callable[[str, int], float | None]
) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    for case in now.cases():
        points = [(k, value(case, size)) for k, size in enumerate(now.sizes())]
        if known := [(k, one) for k, one in points if one is not None]:
            found[case] = known
    return found


def _short_time(seconds: float) -> str:
    text, unit = time_text(seconds).split()
    return f"{float(text):g} {unit}"


def _drawn(panel: _Panel, top: int, sizes: list[str], colours: dict[str, str]) -> list[str]:
    wide = _WIDTH - _LEFT - _RIGHT
    first, last = math.log(panel.ticks[0]), math.log(panel.ticks[-1])

    def x(number: int) -> float:
        return _LEFT + wide * (number + 0.5) / len(sizes)

    def y(value: float) -> float:
        return top + 14 + _HIGH * (1 - (math.log(value) - first) / (last - first))

    parts = [_text(_LEFT, top, panel.title, bold=True)]
    every = -(-len(panel.ticks) // 8)
    for number, tick in enumerate(panel.ticks):
        if number % every and tick != panel.marked:
            continue
        marked = tick == panel.marked
        look = f'stroke="{INK if marked else FAINT}"' + ' stroke-dasharray="5 4"' * marked
        parts.append(f'<path d="M{_LEFT} {y(tick):.1f}h{wide}" {look}/>')
        parts.append(_text(_LEFT - 8, y(tick) + 4, panel.name(tick), "end"))
    bottom = top + 14 + _HIGH
    parts += [_text(x(k), bottom + 20, text, "middle") for k, text in enumerate(sizes)]
    for case, points in panel.lines.items():
        places = [(x(k), y(value)) for k, value in points]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
        look = f'fill="none" stroke="{colours[case]}" stroke-width="2.2"'
        parts.append(f'<polyline points="{path}" {look}/>')
        parts += [
            f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.4" fill="{colours[case]}"/>' for a, b in places
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
