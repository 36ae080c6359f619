# SPDX-License-Identifier: Apache-2.0
"""Compute medians and ratios for `engines.py`, and print tables in Markdown, and goals."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from statistics import geometric_mean, median
from typing import Any, NamedTuple

from engine_models import cached_per_token, weights_read

PHASES = ("prefill", "decode")
SPEED, BESIDE, BATCH = "speed", "beside", "batch"
#: The neighbour of a run that has none.
NOBODY = "no neighbour"
WIDTH = {"float32": 4, "bfloat16": 2}
OURS = "tvm_ipc"
#: The goals: against the best other engine at each point and in the mean, the share of the read
#: limit, against one worker pinned beside a neighbour, and a batch against one prompt.
NOT_SLOWER, PREFILL_MEAN, READ_SHARE = 1.0, 1.1, 0.85
BESIDE_ONE, BESIDE_SEVERAL, BATCH_GAIN = 0.9, 1.0, 5.0


class Key(NamedTuple):
    """One case of one contestant, of a part of the benchmark."""

    label: str
    threads: int
    dtype: str
    prompt: int
    part: str = SPEED
    beside: str = NOBODY
    pinned: bool = False
    batch: int = 1


class Start(NamedTuple):
    """The costs of a contestant before its first token.

    Attributes
    ----------
    conversion : seconds of its converter; 0 if it reads the folder of transformers.
    cold, warm : seconds from the start of its process to the first token, without and with caches.
    memory : MiB (PSS) of its processes after the longest prompt.
    equal : greedy tokens that are those of PyTorch, from the first on; None if not compared.
    compared : how many tokens were compared.
    """

    conversion: float
    cold: float
    warm: float
    memory: float
    equal: int | None
    compared: int


class Case(NamedTuple):
    """A contestant with a type and a number of prompts; a note explains why it has no times."""

    label: str
    threads: int
    dtype: str
    batch: int = 1
    pinned: bool = False

    def __str__(self) -> str:
        """Name it in a list of notes."""
        prompts = [f"{self.batch} prompts"] if self.batch > 1 else []
        return ", ".join(
            [self.label, self.dtype, _threads(self), *(["pinned"] if self.pinned else []), *prompts]
        )


def _threads(case: Case | Key) -> str:
    return f"{case.threads} thread{'s' if case.threads > 1 else ''}"


@dataclass
class Results:
    """Everything that was measured.

    Attributes
    ----------
    times : seconds to the first token, and from there to the last, by round.
    limits : bytes per second that so many cores read.
    missing : the command that installs an engine.
    """

    sizes: dict[str, int]
    tokens: int
    times: dict[Key, dict[int, tuple[float, float]]] = field(default_factory=dict)
    starts: dict[Case, Start] = field(default_factory=dict)
    notes: dict[Case, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    limits: dict[int, float] = field(default_factory=dict)

    def add(self, key: Key, number: int, first: float, rest: float) -> None:
        self.times.setdefault(key, {})[number] = (first, rest)

    def rate(self, key: Key, phase: str) -> float | None:
        """Return the tokens per second of all prompts together, or None without times."""
        rounds = self.times.get(key)
        if not rounds:
            return None
        if phase == "prefill":
            return key.batch * key.prompt / median(first for first, _ in rounds.values())
        return key.batch * (self.tokens - 1) / median(rest for _, rest in rounds.values())

    def ratio(self, key: Key, other: Key, phase: str) -> float | None:
        """Return the speedup of a case over another: the median of the ratios within rounds."""
        its, others = self.times.get(key, {}), self.times.get(other, {})
        which = PHASES.index(phase)
        paired = [others[n][which] / its[n][which] for n in its if n in others]
        return median(paired) * key.batch / other.batch if paired else None

    def read_share(self, key: Key) -> float | None:
        """Return the share of the read limit at which decode reads weights, keys and values."""
        rate, limit = self.rate(key, "decode"), self.limits.get(key.threads)
        if rate is None or not limit:
            return None
        cached = cached_per_token(self.sizes) * (key.prompt + self.tokens / 2)
        return rate * (weights_read(self.sizes) + cached) * WIDTH[key.dtype] / limit

    def best(self, like: Key, phase: str, ours: bool) -> Key | None:
        """Return the fastest of ours, or of the other engines, in the same case."""
        keys = [
            key
            for key in self.times
            if key._replace(label="") == like._replace(label="") and is_ours(key) == ours
        ]
        return max(keys, key=lambda key: self.rate(key, phase) or 0.0, default=None)


def is_ours(key: Key) -> bool:
    return key.label.startswith(OURS)


def markdown(rows: list[list[str]]) -> str:
    """Format a table, whose first row is the header."""
    widths = [max(3, *map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def _number(value: float | None) -> str:
    """Format a number in three digits; a dash if there is none."""
    if value is None:
        return "-"
    whole = len(str(int(value)))
    return f"{value:.{max(0, 3 - whole)}f}"


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"


def _rows(results: Results, keys: Iterable[Key]) -> list[tuple[int, str]]:
    """Return the threads and the label of each row of a table."""
    rows = dict.fromkeys((key.threads, key.label) for key in keys)
    return sorted(rows, key=lambda row: row[0])


def engine_table(results: Results) -> str:
    rows = [["engine", "version, or how to install it"]]
    rows += [[label, version] for label, version in sorted(results.versions.items())]
    rows += [[label, f"not installed: `{pip}`"] for label, pip in results.missing.items()]
    return markdown(rows)


def start_table(results: Results) -> str:
    head = ["type", "threads", "engine", "conversion s", "cold s", "warm s", "memory MiB"]
    rows = [[*head, "tokens equal to PyTorch's"]]
    for case, start in results.starts.items():
        equal = "-" if start.equal is None else f"{start.equal} of {start.compared}"
        conversion = _number(start.conversion) if start.conversion else "none"
        seconds = [_number(start.cold), _number(start.warm), f"{start.memory:.0f}"]
        rows.append([case.dtype, str(case.threads), case.label, conversion, *seconds, equal])
    return markdown(rows)


def _of(results: Results, part: str) -> list[Key]:
    return [key for key in results.times if key.part == part]


def speed_table(results: Results, phase: str) -> str:
    """Format tokens per second by contestant, in decode with the share of the read limit."""
    keys = _of(results, SPEED)
    columns = list(dict.fromkeys((key.dtype, key.prompt) for key in keys))
    rows = [["threads", "engine", *(f"{dtype}, {prompt}" for dtype, prompt in columns)]]
    for threads, label in _rows(results, keys):
        cells = []
        for dtype, prompt in columns:
            key = Key(label, threads, dtype, prompt)
            cell, share = _number(results.rate(key, phase)), results.read_share(key)
            cells.append(f"{cell} ({share:.0%})" if phase == "decode" and share else cell)
        rows.append([str(threads), label, *cells])
    for threads in sorted({key.threads for key in keys}):
        cells = [_times(gain(results, Key("", threads, *column), phase)) for column in columns]
        if any(cell != "-" for cell in cells):
            rows.append([str(threads), "tvm_ipc against the best other", *cells])
    return markdown(rows)


def gain(results: Results, like: Key, phase: str) -> float | None:
    """Return the speedup of the best of ours over the best other engine."""
    ours, other = (results.best(like, phase, ours) for ours in (True, False))
    return None if ours is None or other is None else results.ratio(ours, other, phase)


def neighbour_table(results: Results, phase: str) -> str:
    """Format tokens per second beside neighbours, and the speedup over one pinned thread."""
    keys = _of(results, BESIDE)
    kinds = list(dict.fromkeys(key.beside for key in keys))
    rows = [["type", "threads", "engine", "cores", *kinds, "against one pinned thread, at least"]]
    for case in dict.fromkeys(key._replace(beside=NOBODY) for key in keys):
        rates = [_number(results.rate(case._replace(beside=kind), phase)) for kind in kinds]
        ratios = [
            ratio
            for kind in kinds
            if kind != NOBODY and (ratio := against_pinned(results, case, kind, phase))
        ]
        cores = "the other ones" if case.pinned else "all"
        least = "-" if case.pinned or not ratios else _times(min(ratios))
        rows.append([case.dtype, str(case.threads), case.label, cores, *rates, least])
    return markdown(rows)


def against_pinned(results: Results, key: Key, kind: str, phase: str) -> float | None:
    """Return the speedup beside a neighbour over the same engine with one pinned thread."""
    label = f"{OURS}, 1 worker" if is_ours(key) else key.label
    pinned = key._replace(label=label, threads=1, beside=kind, pinned=True)
    return results.ratio(key._replace(beside=kind), pinned, phase)


def batch_table(results: Results) -> str:
    rows = [["type", "threads", "engine", "prompts", *PHASES, "decode of one", "gain"]]
    for key in _batches(results):
        one = key._replace(batch=1)
        rates = [_number(results.rate(key, phase)) for phase in PHASES]
        gained = [_number(results.rate(one, "decode")), _times(results.ratio(key, one, "decode"))]
        rows.append([key.dtype, str(key.threads), key.label, str(key.batch), *rates, *gained])
    return markdown(rows)


def _batches(results: Results) -> list[Key]:
    return [key for key in _of(results, BATCH) if key.batch > 1]


def report(results: Results) -> str:
    """Format all tables that have rows, and the reasons for gaps."""
    parts = [engine_table(results)]
    if results.starts:
        parts.append(f"Starts, and memory\n\n{start_table(results)}")
    if _of(results, SPEED):
        for phase in PHASES:
            shares = " (share of the read limit)" if phase == "decode" and results.limits else ""
            title = f"{phase.capitalize()}, tokens per second{shares}, by type and prompt"
            parts.append(f"{title}\n\n{speed_table(results, phase)}")
    if _of(results, BESIDE):
        for phase in PHASES:
            title = f"{phase.capitalize()} beside a busy process, tokens per second"
            parts.append(f"{title}\n\n{neighbour_table(results, phase)}")
    if _batches(results):
        parts.append(f"Batches, tokens per second\n\n{batch_table(results)}")
    if results.notes:
        lines = [f"- {case}: {note}" for case, note in results.notes.items()]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _goals_alone(results: Results) -> Iterator[tuple[str, bool]]:
    points = dict.fromkeys(key._replace(label="") for key in _of(results, SPEED))
    prefills = []
    for point in points:
        name = f"{point.dtype}, {point.prompt} tokens, {_threads(point)}"
        for phase in PHASES:
            if (found := gain(results, point, phase)) is not None:
                prefills += [found] if phase == "prefill" else []
                text = f"{phase}, {name}: {found:.2f}x the best other engine, {NOT_SLOWER} at least"
                yield text, found >= NOT_SLOWER
        ours = results.best(point, "decode", ours=True)
        share = results.read_share(ours) if ours is not None else None
        if share is not None and point.prompt <= 128:
            text = f"decode, {name}: {share:.0%} of the read limit, {READ_SHARE:.0%} at least"
            yield text, share >= READ_SHARE
    if prefills:
        mean = geometric_mean(prefills)
        text = f"prefill: {mean:.2f}x the best other engine in the geometric mean"
        yield f"{text}, {PREFILL_MEAN} at least", mean >= PREFILL_MEAN


def goals(results: Results) -> dict[str, bool]:
    """Return each goal that was measured, with its figure, and whether it is met."""
    made = dict(_goals_alone(results))
    for key in _of(results, BESIDE):
        if is_ours(key) and not key.pinned and key.beside != NOBODY:
            several = "1 worker" not in key.label
            wanted = BESIDE_SEVERAL if several else BESIDE_ONE
            for phase in PHASES if several or key.threads == 1 else ():
                if (found := against_pinned(results, key, key.beside, phase)) is not None:
                    text = f"{phase} beside a {key.beside} neighbour, {key.dtype}, {key.label}"
                    text += f": {found:.2f}x one pinned worker, {wanted} at least"
                    made[text] = found >= wanted
    for key in filter(is_ours, _batches(results)):
        name = f"{key.batch} prompts, {key.dtype}, {_threads(key)}, {key.label}"
        found = results.ratio(key, key._replace(batch=1), "decode")
        if found is not None and key.dtype == "bfloat16":
            text = f"decode of {name}: {found:.2f}x one prompt, {BATCH_GAIN} at least"
            made[text] = found >= BATCH_GAIN
        if (against := gain(results, key, "decode")) is not None:
            text = f"decode of {name}: {against:.2f}x the best other engine"
            made[f"{text}, {NOT_SLOWER} at least"] = against >= NOT_SLOWER
    for case, start in results.starts.items():
        if case.label.startswith(OURS) and start.equal is not None:
            text = f"greedy tokens, {case.label}, {_threads(case)}: {start.equal} of"
            made[f"{text} {start.compared} are PyTorch's"] = start.equal == start.compared
    return made


def other_tokens(results: Results) -> list[Case]:
    """Return the contestants of ours whose greedy tokens in float32 differ from PyTorch's."""
    return [
        case
        for case, start in results.starts.items()
        if case.label.startswith(OURS) and start.equal not in (None, start.compared)
    ]


def as_json(results: Results) -> dict[str, Any]:
    """Return everything that was measured as a JSON document."""
    return {
        "sizes": results.sizes,
        "tokens": results.tokens,
        "versions": results.versions,
        "missing": results.missing,
        "read_limit": results.limits,
        "starts": [{**c._asdict(), **s._asdict()} for c, s in results.starts.items()],
        "notes": [{**case._asdict(), "note": note} for case, note in results.notes.items()],
        "times": [{**key._asdict(), "rounds": rounds} for key, rounds in results.times.items()],
    }
