# SPDX-License-Identifier: Apache-2.0
"""Whether a collective and its matmul are worth overlapping, and in how many chunks.

The schedule of the overlapped program is simulated with the times of a calibration. All ranks run
the same program, so one rank stands for all of them, and a peer has shown a chunk when this rank
has. What is predicted is compared with the program as it is: the collective, then the matmul, or
the other way round.

    all-gather       the own part is multiplied first, then the chunks of peers as they arrive
    reduce-scatter   what peers need is multiplied and shown in chunks, then the own part; then the
                     parts of each chunk are reduced as they arrive
    all-reduce       the same, and the reduced chunks are shown and copied

Chunks travel one after the other over the link into a rank, in the order in which it asks for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tvm_ipc import arguments
from tvm_ipc.calibration import COLLECTIVES, Calibration
from tvm_ipc.contract import MAX_SHOWN, MAX_WORKERS

#: The least gain that counts, as a share of the time without overlap. Where the model was wrong to
#: overlap, what it had predicted to gain was less; see `benchmarks/overlap.py`.
LEAST_GAIN: Final = 0.1
#: Fewer chunks are taken where more gain less than this.
_AS_GOOD: Final = 0.02


@dataclass(frozen=True)
class Workload:
    """A collective and its matmul. None is an extent that is not known before the program runs.

    Attributes
    ----------
    kind : "allgather" (then matmul), "reduce_scatter" or "allreduce" (of a matmul).
    ranks : of the team.
    rows : of one rank's part: the matmul has `ranks` times as many.
    inner : the extent that is summed over.
    columns : of the result; of all matmuls that share a gathered operand.
    item_bytes : of an element of what is communicated.
    blas : whether the BLAS multiplies.
    """

    kind: str
    ranks: int
    rows: int | None
    inner: int | None
    columns: int | None
    item_bytes: int
    blas: bool

    def __post_init__(self) -> None:
        arguments.one_of("Workload: kind", self.kind, COLLECTIVES)
        ranks = f"a number of ranks, 1 to {MAX_WORKERS}"
        arguments.integer("Workload: ranks", self.ranks, ranks, 1, MAX_WORKERS)
        arguments.integer(
            "Workload: item_bytes", self.item_bytes, "a number of bytes, 1 or more", 1
        )
        arguments.flag("Workload: blas", self.blas)
        for name in ("rows", "inner", "columns"):
            value = getattr(self, name)
            if value is not None:
                arguments.integer(f"Workload: {name}", value, "an extent, 0 or more, or None", 0)

    @property
    def shows(self) -> int:
        """How often a rank shows something for each chunk."""
        return {"allgather": 1, "reduce_scatter": self.ranks - 1, "allreduce": self.ranks}[
            self.kind
        ]

    @property
    def most_chunks(self) -> int:
        """How many chunks of a part there may be: one for each row, and as many as can be shown."""
        room = max(1, MAX_SHOWN // max(1, self.shows))
        return room if self.rows is None else max(1, min(room, self.rows))


@dataclass(frozen=True)
class Choice:
    """What to do with a workload.

    Attributes
    ----------
    algorithm : "alone", as it is, or "direct", chunks that peers read where they lie.
    chunks : of each rank's part; 1 where it is left alone.
    seconds : predicted; None where that is not possible.
    alone_seconds : the same without overlap.
    reason : a sentence for the report.
    """

    algorithm: str
    chunks: int
    seconds: float | None
    alone_seconds: float | None
    reason: str

    @property
    def overlaps(self) -> bool:
        """Whether anything is to be changed."""
        return self.algorithm == "direct"


def choose(
    workload: Workload, calibration: Calibration | None, chunks: int | None = None
) -> Choice:
    """Return what is predicted to be fastest, or what was asked for.

    All is left alone unless the gain is clear, and wherever nothing can be predicted: without a
    calibration, with one for another number of ranks or without the BLAS, and where an extent is
    symbolic, since a program that is faster for many rows may be slower for few.

    Parameters
    ----------
    chunks : so many, whatever is predicted, or 0 to leave it alone; None chooses.
    """
    arguments.instance("choose: workload", workload, Workload, "a Workload")
    if calibration is not None:
        arguments.instance("choose: calibration", calibration, Calibration, "a Calibration or None")
    if chunks is not None:
        wanted = f"a number of chunks, 0 to {MAX_SHOWN}, or None"
        chunks = arguments.integer("choose: chunks", chunks, wanted, 0, MAX_SHOWN)
    unknown = _unpredictable(workload, calibration)
    if unknown or calibration is None:
        if chunks is None:
            return Choice("alone", 0, None, None, f"{unknown}, so no gain can be predicted")
        return _as_asked(chunks, None, None, unknown)
    alone = predict_alone(workload, calibration)
    if chunks is not None:
        seconds = predict(workload, chunks, calibration) if chunks else alone
        return _as_asked(chunks, seconds, alone, _says(chunks, seconds, alone))
    tried: dict[int, float] = {}
    count = 1
    while count <= workload.most_chunks:
        tried[count] = predict(workload, count, calibration)
        count *= 2
    least = min(tried.values())
    best = next(count for count, seconds in tried.items() if seconds <= least * (1 + _AS_GOOD))
    seconds = tried[best]
    says = _says(best, seconds, alone)
    needed = max(LEAST_GAIN, 2 * calibration.noise)
    if seconds > alone * (1 - needed):
        reason = f"overlap would gain less than {needed:.0%}: {says}"
        return Choice("alone", 0, seconds, alone, reason)
    return Choice("direct", best, seconds, alone, says)


def _as_asked(chunks: int, seconds: float | None, alone: float | None, says: str) -> Choice:
    algorithm = "direct" if chunks else "alone"
    return Choice(algorithm, chunks, seconds, alone, f"as asked for; {says}")


def predict_alone(workload: Workload, calibration: Calibration) -> float:
    """Return the seconds of the collective and the matmul, one after the other."""
    return schedule(workload, 0, calibration)[-1].end


def predict(workload: Workload, chunks: int, calibration: Calibration) -> float:
    """Return the seconds of the overlapped program in so many chunks."""
    return schedule(workload, chunks, calibration)[-1].end


@dataclass(frozen=True)
class PredictedStep:
    """What a rank is predicted to do from one moment to another, in seconds from the start.

    `doing` is "compute", "communicate" (a collective), "wait", "reduce", "copy" or "hide".
    """

    doing: str
    begin: float
    end: float


def schedule(workload: Workload, chunks: int, calibration: Calibration) -> list[PredictedStep]:
    """Return what each rank is predicted to do, in so many chunks; 0 is without overlap."""
    rows, inner, columns = _extents(workload)
    times = _matmul(workload, calibration)
    whole = workload.ranks * rows
    together = times(whole, inner, columns)
    rank = _Rank(calibration)
    peers = range(1, workload.ranks)
    if not chunks:
        local = calibration.collectives[workload.kind].at(_part(workload))
        moves = (2 if workload.kind == "allreduce" else 1) * len(peers) * _part(workload)
        if workload.kind != "allgather":
            rank.spend("compute", together)
        travel = rank.arrival(rank.now, moves) - rank.now if moves else 0.0
        rank.spend("communicate", travel + local)
        if workload.kind == "allgather":
            rank.spend("compute", together)
        return rank.steps

    def multiply(count: int) -> float:
        # Where few rows seem to be faster, for each of them, than all together, it is not overlap
        # that gains, and may be noise of the measurement.
        seconds = max(times(count, inner, columns), together * count / whole) if count else 0.0
        rank.spend("compute", calibration.chunk + seconds)
        return rank.now

    most = max(1, -(-rows // chunks))
    parts = [min(most, rows - at) for at in range(0, rows, most)]
    sizes = [_part(workload) * count / rows for count in parts]
    if workload.kind == "allgather":
        multiply(rows)
        for _ in peers:
            for size, count in zip(sizes, parts, strict=True):
                rank.wait(0.0, size)
                multiply(count)
        return rank.hide()
    shown = [[multiply(count) for _ in peers] for count in parts]
    multiply(rows)
    reduced = []
    for size, of_peers in zip(sizes, shown, strict=True):
        for moment in of_peers:
            rank.wait(moment, size)
        rank.spend("reduce", calibration.reduce.at(size))
        reduced.append(rank.now)
    if workload.kind == "allreduce":
        for _ in peers:
            for moment, size in zip(reduced, sizes, strict=True):
                rank.wait(moment, size)
                rank.spend("copy", calibration.copy.at(size))
    return rank.hide()


class _Rank:
    """One rank in time, and the link into it."""

    def __init__(self, calibration: Calibration) -> None:
        self._calibration = calibration
        self._free = 0.0  #: when the link is
        self.now = 0.0
        self.steps: list[PredictedStep] = []

    def spend(self, doing: str, seconds: float) -> None:
        """Do something for a while."""
        self.steps.append(PredictedStep(doing, self.now, self.now + seconds))
        self.now += seconds

    def arrival(self, shown: float, size: float) -> float:
        """Return when a rank goes on that asks for what was shown at a moment.

        It travels when all that was asked for before has arrived.
        """
        speed, latency = self._calibration.bandwidth, self._calibration.latency
        self._free = max(shown, self._free) + (size / speed if speed else 0.0)
        there = self._free + latency
        if there <= self.now:
            return self.now
        return there + (self._calibration.wake if speed or latency else 0.0)

    def wait(self, shown: float, size: float) -> None:
        """Ask for what was shown at a moment."""
        seconds = self.arrival(shown, size) - self.now
        if seconds > 0:
            self.spend("wait", seconds)

    def hide(self) -> list[PredictedStep]:
        """Meet at the end, and return all steps."""
        self.spend("hide", self._calibration.hide)
        return self.steps


def _unpredictable(workload: Workload, calibration: Calibration | None) -> str:
    """Say why nothing can be predicted; nothing if it can."""
    if calibration is None:
        return "there is no calibration (`tvm-ipc bench --calibrate` measures one, of CPUs or GPUs)"
    if None in (workload.rows, workload.inner, workload.columns):
        return "a size is known only when the program runs"
    if workload.ranks != calibration.workers:
        return (
            f"the team has {workload.ranks} ranks and the calibration was measured for "
            f"{calibration.workers} workers"
        )
    if workload.blas and calibration.blas_matmul is None:
        return "the calibration was measured without the BLAS"
    return ""


def _extents(workload: Workload) -> tuple[int, int, int]:
    if workload.rows is None or workload.inner is None or workload.columns is None:
        raise ValueError(f"predict: workload has sizes that are known, unlike {workload}")
    return workload.rows, workload.inner, workload.columns


def _part(workload: Workload) -> int:
    """Return the bytes of one rank's part of what is communicated."""
    rows, inner, columns = _extents(workload)
    return rows * (inner if workload.kind == "allgather" else columns) * workload.item_bytes


def _matmul(workload: Workload, calibration: Calibration) -> Callable[[int, int, int], float]:
    times = calibration.blas_matmul if workload.blas else calibration.matmul
    if times is None:
        raise ValueError("predict: calibration has times of the BLAS, unlike this one")
    return times.at


def _says(chunks: int, seconds: float, alone: float) -> str:
    return f"{_count(chunks)}, {_time(seconds)} predicted, {_time(alone)} without overlap"


def _count(chunks: int) -> str:
    if not chunks:
        return "left alone"
    return f"{chunks} chunk{'s' * (chunks != 1)}"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"
