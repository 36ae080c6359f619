# SPDX-License-Identifier: Apache-2.0
"""Programs with and without overlap, timed in turns: how much of the communication is hidden.

Effective communication is the time of a program less that of its matmul alone. The efficiency is 1
less its ratio to that of the program without overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from tvm_ipc.bench import programs
from tvm_ipc.bench.stage import Event, Stage
from tvm_ipc.calibration import Calibration
from tvm_ipc.transform.overlap.cost import Choice, Workload, choose, predict, predict_alone


@dataclass(frozen=True)
class Comparison:
    """Times of the programs of one workload, in seconds by round.

    Attributes
    ----------
    matmul : the matmul alone.
    plain : without overlap.
    chunks : in so many chunks.
    """

    work: Workload
    matmul: list[float]
    plain: list[float]
    chunks: dict[int, list[float]]

    @property
    def best(self) -> int:
        """Return the number of chunks with the least median; 0 where without overlap is best."""
        every = {0: self.plain, **self.chunks}
        return min(every, key=lambda count: median(every[count]))

    @property
    def best_chunks(self) -> int:
        """Return the number of chunks with the least median."""
        return min(self.chunks, key=lambda count: median(self.chunks[count]))

    def efficiency(self, count: int) -> float | None:
        """Return which share of the communication is hidden; None if there is nothing to hide."""
        without = _exposed(self.plain, self.matmul)
        if without <= 0:
            return None
        return 1 - _exposed(self.chunks[count], self.matmul) / without

    def ratio(self, count: int) -> float:
        """Return the time in so many chunks, of that without overlap: the median of rounds."""
        times = self.chunks[count] if count else self.plain
        return median(a / b for a, b in zip(times, self.plain, strict=True))


def _exposed(times: Sequence[float], matmul: Sequence[float]) -> float:
    return median(a - b for a, b in zip(times, matmul, strict=True))


class Programs:
    """The programs of one workload, in the workers of a stage."""

    def __init__(self, stage: Stage, work: Workload, counts: Sequence[int]) -> None:
        self._stage, self._work, self._counts = stage, work, list(counts)
        executable = programs.build(programs.variants(work, counts), work.ranks, work.blas)
        self._vm = stage.session.load_vm_module(executable)
        rows, inner, columns = work.rows or 0, work.inner or 0, work.columns or 0
        whole = stage.tensor((work.ranks * rows, inner))
        weight = stage.tensor((inner, columns))
        x = stage.tensor((rows, inner)) if work.kind == "allgather" else whole
        self._given = {programs.MATMUL: [whole, weight], programs.PLAIN: [x, weight]}
        for count in counts:
            self._given[programs.overlapped(count)] = [x, weight]

    def turns(self) -> dict[str, tuple[Any, list[Any]]]:
        """Return each function, by its name, and what it is given."""
        return {name: (self._vm[name], given) for name, given in self._given.items()}

    def compare(self, rounds: int) -> Comparison:
        """Let all programs take turns."""
        times = self._stage.turns(self.turns(), rounds)
        chunks = {count: times[programs.overlapped(count)] for count in self._counts}
        return Comparison(self._work, times[programs.MATMUL], times[programs.PLAIN], chunks)

    def events(self, count: int) -> list[Event]:
        """Return what the workers do in so many chunks; 0 is without overlap."""
        name = programs.overlapped(count) if count else programs.PLAIN
        return self._stage.events(self._vm, name, self._given[name])


def counts(work: Workload, most: int = 64) -> list[int]:
    """Return the numbers of chunks that a choice is made from."""
    return [1 << k for k in range(7) if 1 << k <= min(most, work.most_chunks)]


@dataclass(frozen=True)
class Prediction:
    """What a calibration says of a workload."""

    choice: Choice
    plain: float
    chunks: dict[int, float]


def foretell(work: Workload, calibration: Calibration, tried: Sequence[int]) -> Prediction:
    """Return what is predicted for some numbers of chunks."""
    chunks = {count: predict(work, count, calibration) for count in tried}
    return Prediction(choose(work, calibration), predict_alone(work, calibration), chunks)


def table(found: Comparison, foretold: Prediction | None) -> list[str]:
    """Return lines with all times, the least and the chosen one marked."""
    foretell = foretold is not None
    lines = [f"{'':16}{'ms':>10}{'hidden':>9}{'predicted' if foretell else '':>12}".rstrip()]
    rows: list[tuple[str, int | None, list[float]]] = [("matmul alone", None, found.matmul)]
    rows += [("without overlap", 0, found.plain)]
    rows += [(_in(count), count, times) for count, times in found.chunks.items()]
    for label, count, times in rows:
        hidden = found.efficiency(count) if count else None
        line = f"{label:16}{median(times) * 1e3:10.3f}"
        line += f"{'' if hidden is None else f'{hidden:.0%}':>9}"
        marks = ["fastest"] if count == found.best else []
        if foretold is not None:
            seconds = None if count is None else {0: foretold.plain, **foretold.chunks}[count]
            line += f"{'' if seconds is None else f'{seconds * 1e3:.3f}':>12}"
            marks += ["chosen"] if count == foretold.choice.chunks else []
        lines.append(f"{line}  {', '.join(marks)}".rstrip())
    return lines


def _in(count: int) -> str:
    return f"in {count} chunk{'s' * (count != 1)}"
