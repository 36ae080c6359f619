# SPDX-License-Identifier: Apache-2.0
"""The page in a real browser: what lies where, what a tap shows, and that something is to be seen.

Wants `chromium`, as Debian's package of that name installs it; skipped where there is none.
"""

from __future__ import annotations

import json
import re
import shutil
import struct
import subprocess
import zlib
from collections.abc import Callable
from dataclasses import replace
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest

from tests.tools.explain.plans import (
    explanation_of,
    overlapping_plan,
    small_explanation,
    small_plan,
)
from tvm_ipc.tools.explain import html_page
from tvm_ipc.tools.inspection.explain_decisions_and_memory import Memory
from tvm_ipc.transform.report import Decision, FunctionPlan

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="no chromium here: apt-get install chromium"
)

#: Runs in the page after its own script, and leaves what it saw in the body.
LOOK = """
const box = (e) => e.getBoundingClientRect();
const overlap = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
  && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 1;
const texts = [...document.querySelectorAll(
  "h1, h2, h3, p, summary, th, td, .facts li, .legend li, .marks span, .events span, .bar > span,"
  + ".head span, .zoom button")].filter((e) => e.checkVisibility() && e.textContent.trim());
const overlaps = [];
for (const one of texts) for (const other of texts) {
  if (one === other || one.contains(other) || other.contains(one)) continue;
  if (overlap(box(one), box(other))) overlaps.push([one.textContent, other.textContent]);
}
const root = document.documentElement;
const wide = [...document.querySelectorAll("body *")].filter(
  (e) => !e.closest(".scroll, .wide") && box(e).right > innerWidth + 1);
const cut = texts.filter((e) => !e.closest(".scroll, .wide") && box(e).right > innerWidth + 1);
const shape = document.querySelector(".act.beside") || document.querySelector("svg .t.t2")
  || document.querySelector("svg .t");
const panel = document.querySelector(".detail");
const before = panel.textContent;
shape.dispatchEvent(new MouseEvent("click", { bubbles: true }));
const plan = document.querySelector(".plan"), inner = plan.querySelector(".inner");
const widths = [inner.clientWidth];
for (const index of [2, 2, 0, 1]) {
  plan.querySelectorAll(".zoom button")[index].click();
  widths.push(inner.clientWidth);
}
document.body.dataset.seen = JSON.stringify({
  overlaps, cut: cut.map((e) => e.textContent), sideways: root.scrollWidth - innerWidth,
  wide: wide.map((e) => e.outerHTML.slice(0, 80)),
  before, after: panel.textContent, titles: document.querySelectorAll("svg title").length,
  shapes: document.querySelectorAll(".inner svg .t").length,
  heights: [...document.querySelectorAll(".inner svg:not(.tracks)")].map(
    (e) => box(e).height),
  lanes: [...document.querySelectorAll(".tracks .act")].map((e) => [box(e).left, box(e).width]),
  begin: [...document.querySelectorAll(".tracks")].map((e) => box(e).left),
  widths, room: plan.querySelector(".scroll").clientWidth, width: innerWidth,
  bars: [...document.querySelectorAll(".bar")].map((bar) => {
    const fill = bar.querySelector(".fill");
    return [box(bar.querySelector(".track")).width, fill ? box(fill).width : 0];
  }),
  paper: getComputedStyle(document.body).backgroundColor,
});
"""


@pytest.fixture
def browse(tmp_path: Path) -> Callable[..., str]:
    """Runs the browser on a page; returns what it prints."""

    def run(html: str, *options: str, size: tuple[int, int] = (1200, 1600)) -> str:
        path = tmp_path / "page.html"
        path.write_text(html, "utf-8")
        result = subprocess.run(
            [
                str(BROWSER),
                "--headless",
                "--no-sandbox",  # which root cannot have; the page is our own
                "--disable-gpu",
                "--hide-scrollbars",
                f"--user-data-dir={tmp_path / 'profile'}",
                f"--window-size={size[0]},{size[1]}",
                "--virtual-time-budget=3000",
                *options,
                path.as_uri(),
            ],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    return run


#: The browser's window is never narrower than 500 pixels; a frame in it can be.
FRAME = """<!DOCTYPE html><body><iframe width="{}" height="{}" style="border: 0" srcdoc="{}"
onload="document.body.dataset.seen = this.contentDocument.body.dataset.seen"></iframe></body>"""


def look(browse: Callable[..., str], html: str, size: tuple[int, int], *options: str) -> Any:
    html = html.replace("</body>", f"<script>{LOOK}</script></body>")
    if size[0] < 500:
        html, size = FRAME.format(*size, escape(html)), (size[0] + 500, size[1])
    dom = browse(html, "--dump-dom", *options, size=size)
    seen = re.search(r'data-seen="([^"]*)"', dom)
    assert seen is not None, "the script of the page, or of the test, failed"
    return json.loads(unescape(seen[1]))


def many_layers(layers: int) -> FunctionPlan:
    """The small plan again and again, as a decoder has it."""
    plan = small_plan()
    count = len(plan.events)
    tensors = [
        replace(
            t,
            name=f"{t.name}_of_a_rather_long_name{layer}",
            first=t.first + layer * count,
            last=t.last + layer * count,
            peers_until=None if t.peers_until is None else t.peers_until + layer * count,
        )
        for layer in range(layers)
        for t in plan.tensors
    ]
    return replace(plan, tensors=tuple(tensors), events=plan.events * layers)


@pytest.mark.slow
@pytest.mark.parametrize("layers", [1, 12, 160])
@pytest.mark.parametrize("width", [320, 420, 820, 1400])
def test_nothing_overlaps_or_is_cut_off(
    browse: Callable[..., str], width: int, layers: int
) -> None:
    explanation = small_explanation()
    explanation.report.plans[:] = [many_layers(layers), replace(small_plan(), function="a" * 90)]
    name = "runtime.disco.cuda_ipc.custom_allreduce"
    explanation.memory["a_scope_of_somebody_with_a_long_name" * 2] = Memory(
        {"a_scope_of_somebody_with_a_long_name" * 2: 1}, {}, {}
    )
    reason = f"a {name} that is rather long, for a reason that takes some words to tell"
    explanation.report.decisions.append(
        Decision("LowerGPUIPC" * 5, "main", name * 3, "kept", reason)
    )
    seen = look(browse, html_page.render(explanation), (width, 1200))
    assert seen["width"] == width
    assert seen["overlaps"] == []
    assert seen["cut"] == []
    assert seen["wide"] == []
    assert seen["sideways"] <= 0
    assert seen["shapes"] == 5 * layers + 5
    assert min(seen["heights"]) >= 70


@pytest.mark.slow
@pytest.mark.parametrize("width", [320, 420, 800, 1400])
def test_bars_keep_their_proportions(browse: Callable[..., str], width: int) -> None:
    explanation = small_explanation()
    sizes = {"global": (2_570, 2_770, 2_000), "ipc_memory": (1_000, 2_010, 0), "tiny": (1, 0, 0)}
    plans = [{scope: size[i] << 10 for scope, size in sizes.items()} for i in range(3)]
    explanation.memory["main"] = Memory(*plans)
    html = html_page.render(explanation)
    seen = look(browse, html, (width, 1200))
    (track,) = {round(track, 1) for track, _ in seen["bars"]}
    assert track > 100
    largest = max(max(size) for size in sizes.values())
    scopes = explanation.memory["main"].scopes
    counts = [count for scope in scopes for count in sizes[scope]]
    for count, (_, bar) in zip(counts, seen["bars"], strict=True):
        # What there is can be seen, and nothing else.
        least = 2 if count else 0
        assert bar == pytest.approx(max(least, track * count / largest), abs=0.6), count


def test_tap_shows_what_a_tensor_is(browse: Callable[..., str]) -> None:
    seen = look(browse, html_page.render(small_explanation()), (1200, 900))
    assert seen["before"].startswith("Point at a tensor")
    assert seen["after"].startswith("d: float32, 400 B (n * T.int64(4)) in global, symbolic at 0")
    assert "last used at event 5: allreduce(d)" in seen["after"]
    assert seen["titles"] == 0  # or the browser would show each twice


@pytest.mark.slow
@pytest.mark.parametrize("width", [320, 420, 820, 1400])
def test_lanes_lie_over_the_events(browse: Callable[..., str], width: int) -> None:
    plan = overlapping_plan()
    seen = look(browse, html_page.render(explanation_of(plan)), (width, 1200))
    assert (seen["overlaps"], seen["cut"], seen["wide"]) == ([], [], [])
    event = seen["widths"][-1] / len(plan.events)
    found = [((left - seen["begin"][0]) / event, extent / event) for left, extent in seen["lanes"]]
    spans = [(0, 8), (9, 1), (5, 4), (2, 1), (4, 1), (6, 1)]  # lane by lane, and what is computed
    for one, span in zip(found, spans, strict=True):
        assert one == pytest.approx(span, abs=0.1)


def test_tap_shows_what_is_on_its_way(browse: Callable[..., str]) -> None:
    seen = look(browse, html_page.render(explanation_of(overlapping_plan())), (1200, 900))
    assert seen["after"].startswith("2 chunks of x: exposed to peers at event 0, 1")
    assert "meanwhile: 2 x blas.matmul, silu" in seen["after"]
    assert seen["titles"] == 0


def test_plan_can_be_stretched(browse: Callable[..., str]) -> None:
    explanation = small_explanation()
    explanation.report.plans[:] = [many_layers(160)]
    seen = look(browse, html_page.render(explanation), (1200, 900))
    start, wider, widest, back, fit = seen["widths"]
    assert start > seen["room"]  # too many events for the page's width
    assert (round(wider / start), round(widest / wider), round(widest / back)) == (2, 2, 2)
    assert fit == seen["room"]


def test_dark_page_for_those_who_want_one(browse: Callable[..., str]) -> None:
    html = html_page.render(small_explanation())
    light = look(browse, html, (800, 900), "--blink-settings=preferredColorScheme=1")
    dark = look(browse, html, (800, 900), "--blink-settings=preferredColorScheme=0")
    assert min(map(int, re.findall(r"\d+", light["paper"]))) > 200
    assert max(map(int, re.findall(r"\d+", dark["paper"]))) < 60


def test_picture_has_the_colors_of_the_plan(browse: Callable[..., str], tmp_path: Path) -> None:
    picture = tmp_path / "page.png"
    html = html_page.render(small_explanation())
    browse(
        html, "--blink-settings=preferredColorScheme=1", f"--screenshot={picture}", size=(700, 900)
    )
    colors = pixels(picture.read_bytes())
    for name, color in {"global": (0x3A, 0x6E, 0xA5), "ipc": (0xC4, 0x66, 0x1F)}.items():
        assert colors.get(color, 0) > 500, name


def test_printed_page_is_whole(browse: Callable[..., str], tmp_path: Path) -> None:
    explanation = small_explanation()
    explanation.report.plans[:] = [many_layers(160)]
    printed = tmp_path / "page.pdf"
    browse(html_page.render(explanation), f"--print-to-pdf={printed}")
    assert printed.read_bytes().startswith(b"%PDF")


def pixels(png: bytes) -> dict[tuple[int, ...], int]:
    """Count the colors of a picture, 8 bits a channel and not interlaced."""
    width, _height, depth, kind, *_, interlaced = struct.unpack(">IIBBBBB", png[16:29])
    assert (depth, interlaced) == (8, 0)
    channels = {2: 3, 6: 4}[kind]
    data, place = b"", 8
    while place < len(png):
        (length,) = struct.unpack(">I", png[place : place + 4])
        if png[place + 4 : place + 8] == b"IDAT":
            data += png[place + 8 : place + 8 + length]
        place += 12 + length
    raw = zlib.decompress(data)
    stride = width * channels
    above = bytearray(stride)
    counts: dict[tuple[int, ...], int] = {}
    for start in range(0, len(raw), stride + 1):
        line = bytearray(raw[start + 1 : start + 1 + stride])
        _undo(raw[start], line, above, channels)
        above = line
        for at in range(0, stride, channels):
            color = tuple(line[at : at + 3])
            counts[color] = counts.get(color, 0) + 1
    return counts


def _undo(how: int, line: bytearray, above: bytearray, channels: int) -> None:
    """Undo the filter of a line."""
    for at in range(len(line) if how else 0):
        left = line[at - channels] if at >= channels else 0
        corner = above[at - channels] if at >= channels else 0
        up = above[at]
        if how == 4:
            guess = left + up - corner
            near = min((left, up, corner), key=lambda value: abs(guess - value))
        else:
            near = (left, up, (left + up) // 2)[how - 1]
        line[at] = (line[at] + near) & 255
