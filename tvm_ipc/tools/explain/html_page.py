# SPDX-License-Identifier: Apache-2.0
"""Format an explanation as one self-contained HTML page.

Every text that comes from the module is escaped; the page's script only moves existing text.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Final

from tvm_ipc.tools.explain.memory_plan_chart_layout import Band, bands, condense, until
from tvm_ipc.tools.explain.memory_plan_svg import figure, scope_class
from tvm_ipc.tools.explain.summary_sentences import (
    assumptions,
    barrier_cost,
    collectives_summary,
    compile_settings,
    figure_rows,
    relative_size,
    upstream_caveat,
)
from tvm_ipc.tools.explain.transfer_tracks_and_overlap import HOW, list_names, overlapping
from tvm_ipc.tools.format import bytes_text
from tvm_ipc.tools.inspection.explain_decisions_and_memory import Explanation, Memory
from tvm_ipc.transform.report import FunctionPlan, findings

#: Tables with more rows than this are collapsed.
_FOLD: Final = 40


def render(explanation: Explanation) -> str:
    """Return the page."""
    question = explanation.question
    plans = [condense(plan) for plan in explanation.report.plans]
    sections = [_function(explanation, plan, index) for index, plan in enumerate(plans)]
    title = f"Memory and collectives of {question.source}"
    remarks = f"{upstream_caveat(explanation)} {barrier_cost(explanation)}"
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{escape(title)}</title>",
            f"<style>{_asset('page.css')}</style></head><body>",
            f"<header><h1>{escape(title)}</h1>{_facts(explanation)}</header><main>",
            _figures(explanation),
            _totals(explanation.total(), remarks.strip()),
            _contents(plans),
            _decisions(explanation),
            *sections,
            f"</main><script>{_asset('page.js')}</script></body></html>",
            "",
        ]
    )


def _asset(name: str) -> str:
    return (files("tvm_ipc.tools.explain") / name).read_text("utf-8")


def _breakable(text: str) -> str:
    """Escape a text, and permit line breaks within long names."""
    return escape(text).replace(".", ".<wbr>").replace("_", "_<wbr>")


def _facts(explanation: Explanation) -> str:
    facts = [*compile_settings(explanation), *assumptions(explanation)]
    return f'<ul class="facts">{"".join(f"<li>{escape(f)}</li>" for f in facts)}</ul>'


def _figures(explanation: Explanation) -> str:
    rows = [[escape(label), escape(text)] for label, text in figure_rows(explanation)]
    return _table(["figure", "value"], rows)


def _totals(memory: Memory, remark: str) -> str:
    if not memory.scopes:
        return ""
    largest = max(
        *(
            count
            for by_scope in (memory.ours, memory.upstream, memory.least)
            for count in by_scope.values()
        ),
        1,
    )
    parts = []
    for scope in memory.scopes:
        ours = memory.ours.get(scope, 0)
        rows = [
            ("this plan", ours, ""),
            ("TVM's plan", memory.upstream.get(scope, 0), "faint"),
            ("lower bound", memory.least.get(scope, 0), "hollow"),
        ]
        bars = "".join(_bar(name, count, largest, look, ours) for name, count, look in rows)
        parts.append(
            f'<section class="{scope_class(scope)}"><h3>{escape(scope)}</h3>{bars}</section>'
        )
    return (
        f'<div class="totals">{"".join(parts)}</div><p class="muted">TVM\'s plan of the same '
        "module is counted as its runtime allocates it. The lower bound is the peak of live bytes, "
        f"which every plan needs. {escape(remark)}</p>"
    )


def _bar(name: str, count: int, largest: int, look: str, ours: int) -> str:
    fill = f'<span class="fill {look}" style="width:{100 * count / largest:.2f}%"></span>'
    return (
        f'<div class="bar"><span>{name}</span><span class="track">{fill if count else ""}</span>'
        f'<span class="value">{bytes_text(count)}{_share(ours, count) if look else ""}</span></div>'
    )


def _share(ours: int, other: int) -> str:
    text = relative_size(ours, other)
    return f'<span class="muted">{text.replace("%", "% of it")}</span>' if text else ""


def _contents(plans: Sequence[FunctionPlan]) -> str:
    if len(plans) < 2:
        return ""
    links = "".join(
        f'<a href="#function-{i}">{escape(plan.function)}</a>' for i, plan in enumerate(plans)
    )
    return f"<nav>{links}</nav>"


def _function(explanation: Explanation, plan: FunctionPlan, index: int) -> str:
    placed = bands(plan, explanation.sizes.get(plan.function, {}))
    memory = explanation.memory.get(plan.function)
    head = f'<h2 id="function-{index}">Function <code>{escape(plan.function)}</code></h2>'
    if not placed:
        return f"<section>{head}<p>This function allocates no memory.</p></section>"
    least = memory.least if memory is not None else plan.lower_bound
    return (
        f"<section>{head}<p>{escape(collectives_summary(plan))}</p>"
        f"{figure(plan, placed, least, f'hatch-{index}')}"
        f"{_transfers(plan)}{_tensors(placed)}{_events(plan)}</section>"
    )


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, stack: bool = False) -> str:
    """Return a table of HTML cells; a header that ends in `#` marks a column of numbers."""
    number = [head.endswith("#") for head in heads]

    def row(cells: Sequence[str], tag: str) -> str:
        classes = ['class="n"' if n else 'class="break"' for n in number]
        parts = zip(cells, classes, strict=True)
        return f"<tr>{''.join(f'<{tag} {kind}>{cell}</{tag}>' for cell, kind in parts)}</tr>"

    return (
        f'<div class="wide"><table{" class=stack" if stack else ""}><thead>'
        f"{row([head.rstrip('#') for head in heads], 'th')}</thead>"
        f"<tbody>{''.join(row(cells, 'td') for cells in rows)}</tbody></table></div>"
    )


def _fold(title: str, table: str, rows: int) -> str:
    opened = " open" if rows <= _FOLD else ""
    return f"<details{opened}><summary>{escape(title)}</summary>{table}</details>"


def _decisions(explanation: Explanation) -> str:
    groups = findings(explanation.report.decisions)
    if not groups:
        return "<h2>Decisions</h2><p>No pass had anything to decide.</p>"
    rows = []
    for finding in groups:
        subjects = _breakable(finding.about)
        if len(finding.decisions) > 2:
            items = "".join(
                f"<li>{_breakable(d.function)}: {_breakable(d.subject)}"
                + (f": {_breakable(d.reason)}</li>" if d.reason != finding.reason else "</li>")
                for d in finding.decisions
            )
            subjects = f"<details><summary>{subjects}</summary><ul>{items}</ul></details>"
        rows.append(
            [
                _breakable(finding.functions),
                subjects,
                f"<b>{_breakable(finding.verdict)}</b>",
                _breakable(finding.reason),
                f'<span class="muted nowrap">{escape(finding.pass_name)}</span>',
            ]
        )
    heads = ["function", "subject", "decision", "reason", "pass"]
    return f"<h2>Decisions</h2>{_table(heads, rows, stack=True)}"


def _transfers(plan: FunctionPlan) -> str:
    if not plan.transfers:
        return ""
    rows = [
        [
            _breakable(transfer.what),
            HOW.get(transfer.how, transfer.how),
            str(transfer.first),
            str(transfer.last),
            ", ".join(map(str, transfer.waits)),
            _breakable(list_names(overlapping(plan, transfer))),
        ]
        for transfer in plan.transfers
    ]
    heads = ["transfer", "how", "from#", "to#", "waits at", "overlapping kernels"]
    return _fold(f"{len(rows)} transfers", _table(heads, rows), len(rows))


def _tensors(placed: Sequence[Band]) -> str:
    rows = []
    for band in placed:
        for block in band.blocks:
            tensor = block.tensor
            size = bytes_text(block.bytes)
            if tensor.bytes is None:
                size += f'<br><span class="muted">{escape(tensor.size)}</span>'
            peers = str(until(tensor)) if until(tensor) > tensor.last else ""
            cells = [tensor.dtype, tensor.scope, block.storage]
            rows.append(
                [
                    f'<span class="name">{escape(tensor.name)}</span>',
                    *(escape(cell) for cell in cells),
                    size,
                    escape(tensor.offset) if tensor.storage >= 0 else "",
                    str(tensor.first),
                    str(tensor.last),
                    peers,
                ]
            )
    heads = ["tensor", "type", "scope", "storage", "size#", "offset#", "from#", "to#", "peers to#"]
    return _fold(f"{len(rows)} tensors", _table(heads, rows), len(rows))


def _events(plan: FunctionPlan) -> str:
    rows = []
    for index, event in enumerate(plan.events):
        extra = escape(event.collective or "")
        if event.barrier is not None:
            extra += f", exit barrier {escape(event.barrier)}"
        rows.append([str(index), f"<code>{escape(event.text)}</code>", extra])
    table = _table(["event#", "binding", "collective"], rows)
    return _fold(f"{len(rows)} events", table, len(rows))
