# SPDX-License-Identifier: Apache-2.0
"""Compare programs with and without overlap, and compute how much communication is hidden.

The exposed communication of a program is its time minus that of its matmul. The overlap efficiency
is 1 minus the ratio of the exposed communication with overlap to that without.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from tvm_ipc.arguments import counted
from tvm_ipc.calibration import Calibration
from tvm_ipc.tools.bench import overlap_programs
from tvm_ipc.tools.bench.timing_session import Event, TimingSession
from tvm_ipc.transform.overlap.cost_model import (
    Choice,
    Workload,
    choose,
    predict,
    predict_sequential,
)


@dataclass(frozen=True)
class Comparison:
    """Times of the programs of one workload, in seconds by round.

    Attributes
    ----------
    matmul : the matmul without communication.
    plain : the program without overlap.
    chunks : the program with overlap, by number of chunks.
    """

    work: Workload
    matmul: list[float]
    plain: list[float]
    chunks: dict[int, list[float]]

    @property
    def best(self) -> int:
        """Return the number of chunks with the lowest median; 0 if no overlap is fastest."""
        times = {0: self.plain, **self.chunks}
        return min(times, key=lambda count: median(times[count]))

    @property
    def best_chunks(self) -> int:
        """Return the number of chunks with the lowest median among those with overlap."""
        return min(self.chunks, key=lambda count: median(self.chunks[count]))

    def efficiency(self, count: int) -> float | None:
        """Return the share of hidden communication; None if there is nothing to hide."""
        exposed = _exposed(self.plain, self.matmul)
        if exposed <= 0:
            return None
        return 1 - _exposed(self.chunks[count], self.matmul) / exposed

    def ratio(self, count: int) -> float:
        """Return the time in `count` chunks relative to no overlap, as the median over rounds."""
        times = self.chunks[count] if count else self.plain
        return median(a / b for a, b in zip(times, self.plain, strict=True))


def _exposed(times: Sequence[float], matmul: Sequence[float]) -> float:
    return median(a - b for a, b in zip(times, matmul, strict=True))


class Programs:
    """The programs of one workload, loaded in the workers of a session."""

    def __init__(self, timing: TimingSession, work: Workload, counts: Sequence[int]) -> None:
        self._timing, self._work, self._counts = timing, work, list(counts)
        executable = overlap_programs.build(
            overlap_programs.variants(work, counts), work.ranks, work.blas
        )
        self._vm = timing.session.load_vm_module(executable)
        rows, inner, columns = work.rows or 0, work.inner or 0, work.columns or 0
        all_rows = timing.tensor((work.ranks * rows, inner))
        weight = timing.tensor((inner, columns))
        x = timing.tensor((rows, inner)) if work.kind == "allgather" else all_rows
        self._arguments = {
            overlap_programs.MATMUL: [all_rows, weight],
            overlap_programs.PLAIN: [x, weight],
        }
        for count in counts:
            self._arguments[overlap_programs.overlapped(count)] = [x, weight]

    def interleaved(self) -> dict[str, tuple[Any, list[Any]]]:
        """Return each function and its arguments, by name."""
        return {name: (self._vm[name], arguments) for name, arguments in self._arguments.items()}

    def compare(self, rounds: int) -> Comparison:
        """Time all programs alternately."""
        times = self._timing.interleaved(self.interleaved(), rounds)
        chunks = {count: times[overlap_programs.overlapped(count)] for count in self._counts}
        return Comparison(
            self._work,
            times[overlap_programs.MATMUL],
            times[overlap_programs.PLAIN],
            chunks,
        )

    def events(self, count: int) -> list[Event]:
        """Return a trace of the program in `count` chunks; 0 is without overlap."""
        name = overlap_programs.overlapped(count) if count else overlap_programs.PLAIN
        return self._timing.events(self._vm, name, self._arguments[name])


def counts(work: Workload, most: int = 64) -> list[int]:
    """Return the candidate numbers of chunks for a workload."""
    return [1 << k for k in range(7) if 1 << k <= min(most, work.most_chunks)]


@dataclass(frozen=True)
class Prediction:
    """The choice and the times that a calibration predicts for a workload."""

    choice: Choice
    plain: float
    chunks: dict[int, float]


def make_prediction(work: Workload, calibration: Calibration, counts: Sequence[int]) -> Prediction:
    """Return the prediction for some numbers of chunks."""
    chunks = {count: predict(work, count, calibration) for count in counts}
    return Prediction(choose(work, calibration), predict_sequential(work, calibration), chunks)


def table(comparison: Comparison, prediction: Prediction | None) -> list[str]:
    """Return a table of all times that marks the fastest and the chosen variant."""
    column = "" if prediction is None else "predicted ms"
    lines = [f"{'variant':16}{'ms':>10}{'hidden':>9}{column:>14}".rstrip()]
    rows: list[tuple[str, int | None, list[float]]] = [("matmul alone", None, comparison.matmul)]
    rows += [("without overlap", 0, comparison.plain)]
    rows += [
        (f"in {counted(count, 'chunk')}", count, times)
        for count, times in comparison.chunks.items()
    ]
    for label, count, times in rows:
        hidden = comparison.efficiency(count) if count else None
        line = f"{label:16}{median(times) * 1e3:10.3f}"
        line += f"{'' if hidden is None else f'{hidden:.0%}':>9}"
        marks = ["fastest"] if count == comparison.best else []
        if prediction is not None:
            seconds = None if count is None else {0: prediction.plain, **prediction.chunks}[count]
            line += f"{'' if seconds is None else f'{seconds * 1e3:.3f}':>14}"
            marks += ["chosen"] if count == prediction.choice.chunks else []
        lines.append(f"{line}  {', '.join(marks)}".rstrip())
    return lines
