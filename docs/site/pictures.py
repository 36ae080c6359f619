# SPDX-License-Identifier: Apache-2.0
"""Draws the pictures in docs/pictures: `python docs/site/pictures.py`; a test draws them again.

Colours are seen on white and on black, since a page's picture does not know which it is on.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "docs" / "pictures"
GREY, BLUE, ORANGE, TEAL = "#808891", "#4f86c6", "#d9822b", "#17998a"


def _svg(width: int, height: int, label: str, parts: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'role="img" aria-label="{label}" font-family="system-ui, sans-serif" font-size="13" '
        f'fill="{GREY}">'
    )
    return "\n".join(["<!-- SPDX-License-Identifier: Apache-2.0 -->", head, *parts, "</svg>", ""])


def _text(x: float, y: float, text: str, anchor: str = "start", more: str = "") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" {more}>{text}</text>'


# ---- the all-reduce, from the table that its benchmark printed ------------------------------


def measured() -> list[tuple[str, float, float, float]]:
    """Return size, microseconds of the best peer, ours from IPC memory, ours from other memory."""
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    text = text.partition("\n## All-reduce\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\d+ [KM]B) \|(.*)\|$", text, re.MULTILINE)
    return [
        (size, *(float(cells.split("|")[k]) for k in (1, 2, 4)))  # type: ignore[misc]
        for size, cells in rows
    ]


def allreduce() -> str:
    """Return the times of the table, both axes by powers of ten."""
    rows = measured()
    left, top, wide, high, low, decades = 70, 44, 560, 250, 0.3, 5.3

    def y(time: float) -> float:
        return top + high * (1 - (math.log10(time) - math.log10(low)) / decades)

    step = wide / (len(rows) - 1)
    parts = [_text(left, 20, "all-reduce of float32 between two workers on two cores")]
    for power in range(5):
        line = y(10**power)
        name = f"{10**power} µs" if power < 3 else f"{10 ** (power - 3)} ms"
        parts.append(f'<path d="M{left} {line:.1f}h{wide}" stroke="{GREY}" opacity=".25"/>')
        parts.append(_text(left - 8, line + 4, name, "end"))
    parts += [
        _text(left + k * step, top + high + 20, row[0], "middle") for k, row in enumerate(rows)
    ]
    series = (
        ("best of MPICH, Open MPI and gloo", GREY, 1),
        ("tvm-ipc, ordinary input", TEAL, 3),
        ("tvm-ipc, input in IPC memory", ORANGE, 2),
    )
    for number, (name, colour, column) in enumerate(series):
        points = [(left + k * step, y(float(row[column]))) for k, row in enumerate(rows)]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.5"/>'
        )
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.5" fill="{colour}"/>' for a, b in points]
        height = top + 180 + 20 * number
        parts.append(f'<path d="M{left + 300} {height}h22" stroke="{colour}" stroke-width="2.5"/>')
        parts.append(_text(left + 330, height + 4, name))
    return _svg(660, 330, "microseconds of an all-reduce by size, three lines", parts)


# ---- a memory plan, from the pipeline's report ----------------------------------------------


def memory_plan() -> str:
    """Return the plan of the prefill of the demo's decoder, with two layers."""
    from tvm_ipc import get_pipeline
    from tvm_ipc.examples.tensor_parallel_decoder import decoder_model as model
    from tvm_ipc.examples.tensor_parallel_decoder.decoder_config import Config
    from tvm_ipc.tools.explain.memory_plan_chart_layout import bands, condense, until
    from tvm_ipc.tools.format import bytes_text
    from tvm_ipc.transform import collect_report

    with collect_report() as report:
        get_pipeline("llvm", 2, blas=True)(model.build(Config(layers=2), 2))
    (plan,) = [condense(one) for one in report.plans if one.function == "prefill"]
    placed = [one for one in bands(plan, {"n": 128, "total": 128, "s": 128}) if not one.own]
    left, top, wide = 10, 20, 640
    step = wide / len(plan.events)
    scale = 300 / sum(one.bytes for one in placed)
    parts: list[str] = []
    for band in placed:
        colour = BLUE if band.scope == "global" else ORANGE
        what = "each worker's own" if band.scope == "global" else "peers map it"
        parts.append(_text(left, top, f"{band.scope}: {bytes_text(band.bytes)}; {what}"))
        bottom = top + 10 + band.bytes * scale
        parts.append(
            f'<rect x="{left}" y="{top + 10}" width="{wide}" height="{band.bytes * scale:.1f}" '
            f'fill="{colour}" opacity=".12"/>'
        )
        for block in band.blocks:
            tensor = block.tensor
            place = (
                f'x="{left + tensor.first * step:.1f}" '
                f'y="{bottom - (block.bottom + block.bytes) * scale:.1f}" '
                f'height="{max(block.bytes * scale, 1.5):.1f}"'
            )
            own = (tensor.last - tensor.first + 1) * step
            whole = (until(tensor) - tensor.first + 1) * step
            look = f'fill="{colour}" stroke="{GREY}" stroke-width=".5"'
            parts.append(f'<rect {place} width="{whole:.1f}" {look} opacity=".35"/>')
            parts.append(f'<rect {place} width="{own:.1f}" {look}/>')
        top = round(bottom) + 30
    said = "from left to right: what the program does; pale: until all peers have read it"
    parts.append(_text(left, top, said))
    return _svg(660, top + 14, "storages of a memory plan over time", parts)


# ---- what `tvm-ipc bench` draws, of the measurement beside it ---------------------------------


def bench() -> str:
    """Return the picture of a saved measurement."""
    from tvm_ipc.tools.bench import plot_svg, result_file

    drawn = plot_svg.draw(result_file.load(PICTURES / "bench.json"), None, "")
    # Without its paper, since a page may be dark.
    drawn = re.sub(r"<rect [^>]*/>\n", "", drawn).replace(plot_svg.INK, GREY)
    drawn = drawn.replace(f'stroke="{plot_svg.FAINT}"', f'stroke="{GREY}" opacity=".25"')
    return f"<!-- SPDX-License-Identifier: Apache-2.0 -->\n{drawn}"


DRAWN = {"allreduce.svg": allreduce, "bench.svg": bench, "memory_plan.svg": memory_plan}

if __name__ == "__main__":
    for name, draw in DRAWN.items():
        (PICTURES / name).write_text(draw())
