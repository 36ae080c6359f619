# SPDX-License-Identifier: Apache-2.0
"""What the benchmark found, as a table, as JSON and as a plot."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from dataclasses import dataclass, field
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any, NamedTuple

from tvm_ipc.this_machine import cpu_model
from tvm_ipc.tools.format import message_size_text


class Key(NamedTuple):
    """One case of one contestant."""

    ranks: int
    dtype: str
    fresh: bool
    size: int
    name: str


@dataclass
class Results:
    """Seconds per call by round, or a note where there are none."""

    times: dict[Key, list[float]] = field(default_factory=dict)
    notes: dict[Key, str] = field(default_factory=dict)
    roles: dict[str, str] = field(default_factory=dict)
    fixed: dict[str, float] = field(default_factory=dict)

    def add(self, key: Key, seconds: float) -> None:
        self.times.setdefault(key, []).append(seconds)

    def names(self, role: str) -> list[str]:
        return [name for name, its in self.roles.items() if its == role]

    def cases(self) -> list[tuple[int, str, bool]]:
        return list(dict.fromkeys((k.ranks, k.dtype, k.fresh) for k in (*self.times, *self.notes)))

    def sizes(self, case: tuple[int, str, bool]) -> list[int]:
        return sorted({k.size for k in (*self.times, *self.notes) if k[:3] == case})

    def best(self, case: tuple[int, str, bool], size: int, role: str) -> str | None:
        """Who of a role has the smallest median."""
        there = [n for n in self.names(role) if self.times.get(Key(*case, size, n))]
        return min(there, key=lambda n: median(self.times[Key(*case, size, n)]), default=None)

    def ratio(self, case: tuple[int, str, bool], size: int, name: str, role: str) -> float | None:
        """How many times faster `name` is than the best of a role, paired round by round."""
        own, other = self.times.get(Key(*case, size, name)), self.best(case, size, role)
        if not own or other is None:
            return None
        pairs = zip(own, self.times[Key(*case, size, other)], strict=False)
        return median(theirs / mine for mine, theirs in pairs)

    def least_ratio(self, case: tuple[int, str, bool], size: int, name: str) -> float | None:
        """The same of everybody's best round: what is left where other programs disturb."""
        own = self.times.get(Key(*case, size, name))
        theirs = [self.times.get(Key(*case, size, peer)) for peer in self.names("peer")]
        if not own or not any(theirs):
            return None
        return min(min(times) for times in theirs if times) / min(own)

    def summary(self) -> list[dict[str, Any]]:
        """Per case: the ratios of the bare one-shot and of each way of ours, in a few figures."""
        found = []
        for case in self.cases():
            for name in (*self.names("bare"), *self.names("ours")):
                sizes = self.sizes(case)
                ratios = [r for s in sizes if (r := self.ratio(case, s, name, "peer"))]
                least = [r for s in sizes if (r := self.least_ratio(case, s, name))]
                if ratios:
                    found.append(
                        {
                            **dict(zip(("ranks", "dtype", "fresh"), case, strict=True)),
                            "name": name,
                            "geometric_mean": geometric_mean(ratios),
                            "minimum": min(ratios),
                            "geometric_mean_of_best_rounds": geometric_mean(least),
                        }
                    )
        return found


def _us(seconds: float) -> str:
    us = seconds * 1e6
    return f"{us:.0f}" if us >= 100 else f"{us:.1f}" if us >= 10 else f"{us:.2f}"


def layout(rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(t.rjust(w) for t, w in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def table(results: Results, ranks: int, dtype: str, fresh: bool) -> str:
    """One case: microseconds per call, and how many times faster ours is than the best peer."""
    case = (ranks, dtype, fresh)
    shown = {k.name for k in (*results.times, *results.notes) if k[:3] == case}
    every = [n for role in ("bare", "peer", "ours") for n in results.names(role) if n in shown]
    own = [n for n in results.names("ours") if n in shown]
    rows = [["size", "limit", *every, "best peer"]]
    rows[0] += [heading for n in own for heading in (f"{n.removeprefix('tvm_ipc ')} GB/s", "x")]
    for size in results.sizes(case):
        row = [message_size_text(size)]
        floor = results.best(case, size, "limit")
        for name in [floor, *every]:
            key = Key(*case, size, name or "")
            times = results.times.get(key)
            row.append(_us(median(times)) if times else results.notes.get(key, "-"))
        row.append(results.best(case, size, "peer") or "-")
        for name in own:
            times = results.times.get(Key(*case, size, name))
            ratio = results.ratio(case, size, name, "peer")
            row.append(f"{size / median(times) / 1e9:.1f}" if times else "-")
            row.append(f"{ratio:.1f}" if ratio is not None else "-")
        rows.append(row)
    kind = "fresh input before every call" if fresh else "same input again and again"
    head = f"\n{ranks} ranks on {os.cpu_count()} cores, {dtype}, {kind}; us per call\n"
    tail = []
    for line in results.summary():
        if (line["ranks"], line["dtype"], line["fresh"]) == case:
            tail.append(
                f"{line['name']}: {line['geometric_mean']:.2f}x the best peer "
                f"(geometric mean), {line['minimum']:.2f}x at least; "
                f"{line['geometric_mean_of_best_rounds']:.2f}x by everybody's best round"
            )
    if dtype == "bfloat16":
        tail.append(
            "no type: the MPI standard has no bfloat16; MPICH has one as an extension of its own"
        )
    return "\n".join([head, layout(rows), *tail])


def fixed_table(fixed: dict[str, float]) -> str:
    rows = [["fixed cost", "us"], *([name, _us(value)] for name, value in fixed.items())]
    return "\n" + layout(rows)


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "cpu": cpu_model() or platform.processor(),
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def write_json(results: Results, options: argparse.Namespace, path: Path) -> None:
    rows = [
        {
            **key._asdict(),
            "role": results.roles[key.name],
            "seconds": times,
            "median": median(times),
        }
        for key, times in results.times.items()
    ]
    rows += [
        {**k._asdict(), "role": results.roles[k.name], "note": n} for k, n in results.notes.items()
    ]
    document = {
        "machine": machine(),
        "options": {name: str(value) for name, value in vars(options).items()},
        "summary": results.summary(),
        "fixed_microseconds": {name: value * 1e6 for name, value in results.fixed.items()},
        "rows": rows,
    }
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(f"\nwritten: {path}")


def draw(results: Results, path: Path) -> None:
    """Time by size, a panel for each case; silent about what matplotlib is not there for."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        print("no plot: matplotlib is in the extra `bench`", file=sys.stderr)
        return
    cases = results.cases()
    columns = min(3, len(cases))
    lines = -(-len(cases) // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(6 * columns, 4.5 * lines), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(cases) :]:
        axis.axis("off")
    style = {"peer": "--o", "ours": "-o", "limit": ":", "bare": "-."}
    # Whoever is neither peer nor ours is black.
    colors = {name: f"C{i}" for i, name in enumerate(results.names("peer") + results.names("ours"))}
    for axis, case in zip(axes.flat, cases, strict=False):
        sizes = results.sizes(case)
        limits = [(s, results.best(case, s, "limit")) for s in sizes]
        curves = {
            name: [(s, Key(*case, s, name)) for s in sizes]
            for role in ("bare", "peer", "ours")
            for name in results.names(role)
        }
        curves["memory limit"] = [(s, Key(*case, s, n)) for s, n in limits if n]
        for name, points in curves.items():
            known = [(s, median(results.times[k]) * 1e6) for s, k in points if k in results.times]
            if known:
                form = style[results.roles.get(name, "limit")]
                color = colors.get(name, "black")
                axis.loglog(*zip(*known, strict=True), form, color=color, label=name, markersize=3)
        axis.set_title(f"{case[0]} ranks, {case[1]}, {'fresh' if case[2] else 'same'} input")
        axis.set_xlabel("bytes")
        axis.set_ylabel("us per call")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    figure.savefig(path, dpi=120)
    print(f"written: {path}")
