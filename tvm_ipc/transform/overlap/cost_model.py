# SPDX-License-Identifier: Apache-2.0
"""The cost model that decides whether, and in how many chunks, `OverlapCommunication` overlaps.

The model simulates the schedule of the overlapped program with the times of a calibration. All
ranks run the same program, so one rank stands for all of them: a peer exposes a chunk at the same
time as this rank. The prediction is compared with that of the sequential program: the collective,
then the matmul, or the reverse.

    all-gather       multiply the own shard, then the chunks of peers as they arrive
    reduce-scatter   multiply and expose the chunks that peers need, then the own shard; then reduce
                     the results of each chunk as they arrive
    all-reduce       the same; then expose the reduced chunks and copy those of peers

Chunks are transferred one after another over the link into a rank, in the order in which the rank
reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tvm_ipc import arguments
from tvm_ipc.calibration import COLLECTIVES, Calibration
from tvm_ipc.packed_functions import KINDS, MAX_EXPOSED, MAX_WORKERS

#: The least predicted gain that justifies overlap, as a share of the sequential time. Wherever the
#: model was wrong to overlap, it had predicted less; see `benchmarks/overlap.py`.
LEAST_GAIN: Final = 0.1
#: Predictions within this share of the best count as equal; the fewest chunks are chosen.
_TOLERANCE: Final = 0.02


@dataclass(frozen=True)
class Workload:
    """A collective and its matmul. Extents that are unknown before the program runs are None.

    Attributes
    ----------
    kind : "allgather" (then matmul), "reduce_scatter" or "allreduce" (of a matmul).
    ranks : the number of ranks in the team.
    rows : the number of rows in a shard; the matmul has `ranks` times as many.
    inner : the extent that the matmul reduces over.
    columns : the number of columns of the result, of all matmuls that share a gathered operand.
    item_bytes : the size of a communicated element in bytes.
    blas : whether the matmul is offloaded to BLAS.
    """

    kind: str
    ranks: int
    rows: int | None
    inner: int | None
    columns: int | None
    item_bytes: int
    blas: bool

    def __post_init__(self) -> None:
        """Check every field; raise TypeError or ValueError for a wrong one."""
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
    def num_exposed(self) -> int:
        """The number of tensors that a rank exposes for each chunk."""
        return {"allgather": 1, "reduce_scatter": self.ranks - 1, "allreduce": self.ranks}[
            self.kind
        ]

    @property
    def most_chunks(self) -> int:
        """The most chunks of a shard: at most one for each row, and as many as can be exposed."""
        limit = max(1, MAX_EXPOSED // max(1, self.num_exposed))
        return limit if self.rows is None else max(1, min(limit, self.rows))


@dataclass(frozen=True)
class Choice:
    """The decision for a workload.

    Attributes
    ----------
    algorithm : "sequential", no overlap, or "direct", chunks that peers read without a copy.
    chunks : the number of chunks of each shard; 0 without overlap.
    seconds : the predicted time; None if it cannot be predicted.
    sequential_seconds : the predicted time without overlap.
    reason : the reason for the report.
    """

    algorithm: str
    chunks: int
    seconds: float | None
    sequential_seconds: float | None
    reason: str

    @property
    def overlaps(self) -> bool:
        """Return whether the workload is overlapped."""
        return self.algorithm == "direct"


def choose(
    workload: Workload, calibration: Calibration | None, chunks: int | None = None
) -> Choice:
    """Return the choice that is predicted to be fastest, or the requested one.

    A workload is overlapped only if the gain is clear. It is not overlapped if nothing can be
    predicted: without a calibration, with a calibration for another number of ranks or without
    BLAS, or with a symbolic extent, since overlap may be faster for many rows and slower for few.

    Parameters
    ----------
    workload : the collective and its matmul.
    calibration : the measured times of the machine, None if there are none.
    chunks : the requested number of chunks, 0 for no overlap; None chooses by prediction.
    """
    arguments.instance("choose: workload", workload, Workload, "a Workload")
    if calibration is not None:
        arguments.instance("choose: calibration", calibration, Calibration, "a Calibration or None")
    if chunks is not None:
        wanted = f"a number of chunks, 0 to {MAX_EXPOSED}, or None"
        chunks = arguments.integer("choose: chunks", chunks, wanted, 0, MAX_EXPOSED)
    unknown = _unpredictable(workload, calibration)
    if unknown or calibration is None:
        if chunks is None:
            return Choice("sequential", 0, None, None, f"{unknown}, so no gain can be predicted")
        return _requested(chunks, None, None, unknown)
    sequential = predict_sequential(workload, calibration)
    if chunks is not None:
        seconds = predict(workload, chunks, calibration) if chunks else sequential
        return _requested(chunks, seconds, sequential, _reason(chunks, seconds, sequential))
    predictions: dict[int, float] = {}
    count = 1
    while count <= workload.most_chunks:
        predictions[count] = predict(workload, count, calibration)
        count *= 2
    least = min(predictions.values())
    best = next(
        count for count, seconds in predictions.items() if seconds <= least * (1 + _TOLERANCE)
    )
    seconds = predictions[best]
    reason = _reason(best, seconds, sequential)
    needed = max(LEAST_GAIN, 2 * calibration.noise)
    if seconds > sequential * (1 - needed):
        reason = f"overlap would gain less than {needed:.0%}: {reason}"
        return Choice("sequential", 0, seconds, sequential, reason)
    return Choice("direct", best, seconds, sequential, reason)


def _requested(chunks: int, seconds: float | None, sequential: float | None, reason: str) -> Choice:
    algorithm = "direct" if chunks else "sequential"
    return Choice(algorithm, chunks, seconds, sequential, f"as requested; {reason}")


def predict_sequential(workload: Workload, calibration: Calibration) -> float:
    """Return the predicted seconds of the collective and the matmul without overlap."""
    return schedule(workload, 0, calibration)[-1].end


def predict(workload: Workload, chunks: int, calibration: Calibration) -> float:
    """Return the predicted seconds of the overlapped program."""
    return schedule(workload, chunks, calibration)[-1].end


def predict_collective(kind: str, size: int, ranks: int, calibration: Calibration) -> float:
    """Return the predicted seconds of a collective; `size` is that of one rank's slice in bytes."""
    traffic = KINDS[kind].slices_received(ranks) * size
    travel = _Rank(calibration).arrival(0.0, traffic) if traffic else 0.0
    return travel + calibration.collectives[kind].at(size)


@dataclass(frozen=True)
class PredictedStep:
    """A predicted activity of a rank, with its begin and end in seconds from the start.

    `activity` is "compute", "communicate" (a collective), "wait", "reduce", "copy" or "hide".
    """

    activity: str
    begin: float
    end: float


def schedule(workload: Workload, chunks: int, calibration: Calibration) -> list[PredictedStep]:
    """Return the predicted steps of each rank; 0 chunks stand for the sequential program."""
    rows, inner, columns = _extents(workload)
    times = _matmul(workload, calibration)
    all_rows = workload.ranks * rows
    together = times(all_rows, inner, columns)
    rank = _Rank(calibration)
    peers = range(1, workload.ranks)
    if not chunks:
        if workload.kind != "allgather":
            rank.spend("compute", together)
        shard = _shard_rows(workload)
        rank.spend(
            "communicate", predict_collective(workload.kind, shard, workload.ranks, calibration)
        )
        if workload.kind == "allgather":
            rank.spend("compute", together)
        return rank.steps

    def multiply(count: int) -> float:
        # A matmul of few rows is not predicted to be faster per row than that of all rows: such a
        # gain is not due to overlap, and may be measurement noise.
        seconds = max(times(count, inner, columns), together * count / all_rows) if count else 0.0
        rank.spend("compute", calibration.chunk + seconds)
        return rank.now

    largest = max(1, -(-rows // chunks))
    chunk_rows = [min(largest, rows - at) for at in range(0, rows, largest)]
    sizes = [_shard_rows(workload) * count / rows for count in chunk_rows]
    if workload.kind == "allgather":
        multiply(rows)
        for _ in peers:
            for size, count in zip(sizes, chunk_rows, strict=True):
                rank.wait(0.0, size)
                multiply(count)
        return rank.release()
    exposed = [[multiply(count) for _ in peers] for count in chunk_rows]
    multiply(rows)
    reduced = []
    for size, exposed_of_chunk in zip(sizes, exposed, strict=True):
        for moment in exposed_of_chunk:
            rank.wait(moment, size)
        rank.spend("reduce", calibration.reduce.at(size))
        reduced.append(rank.now)
    if workload.kind == "allreduce":
        for _ in peers:
            for moment, size in zip(reduced, sizes, strict=True):
                rank.wait(moment, size)
                rank.spend("copy", calibration.copy.at(size))
    return rank.release()


class _Rank:
    """The simulated clock of a rank and of the link into it."""

    def __init__(self, calibration: Calibration) -> None:
        self._calibration = calibration
        self._link_free = 0.0  #: the time at which the link becomes free
        self.now = 0.0
        self.steps: list[PredictedStep] = []

    def spend(self, activity: str, seconds: float) -> None:
        """Add a step that takes some seconds."""
        self.steps.append(PredictedStep(activity, self.now, self.now + seconds))
        self.now += seconds

    def arrival(self, exposed: float, size: float) -> float:
        """Return when this rank has read a chunk that was exposed at some time.

        Its transfer begins when all chunks that were read before have arrived.
        """
        speed, latency = self._calibration.bandwidth, self._calibration.latency
        self._link_free = max(exposed, self._link_free) + (size / speed if speed else 0.0)
        arrival = self._link_free + latency
        if arrival <= self.now:
            return self.now
        return arrival + (self._calibration.wake if speed or latency else 0.0)

    def wait(self, exposed: float, size: float) -> None:
        """Wait for a chunk that was exposed at some time."""
        seconds = self.arrival(exposed, size) - self.now
        if seconds > 0:
            self.spend("wait", seconds)

    def release(self) -> list[PredictedStep]:
        """Add the barrier at the end; return all steps."""
        self.spend("hide", self._calibration.hide)
        return self.steps


def _unpredictable(workload: Workload, calibration: Calibration | None) -> str:
    """Return why no time can be predicted, "" if it can."""
    if calibration is None:
        return "there is no calibration (`tvm-ipc bench --calibrate` measures one, of CPUs or GPUs)"
    if None in (workload.rows, workload.inner, workload.columns):
        return "an extent is only known when the program runs"
    if workload.ranks != calibration.workers:
        return (
            f"the team has {arguments.counted(workload.ranks, 'rank')}, but the calibration was "
            f"measured with {arguments.counted(calibration.workers, 'worker')}"
        )
    if workload.blas and calibration.blas_matmul is None:
        return "the calibration was measured without BLAS"
    return ""


def _extents(workload: Workload) -> tuple[int, int, int]:
    if workload.rows is None or workload.inner is None or workload.columns is None:
        raise ValueError(f"predict: workload is {workload}; expected known extents")
    return workload.rows, workload.inner, workload.columns


def _shard_rows(workload: Workload) -> int:
    """Return the size in bytes of the shard that a rank communicates."""
    rows, inner, columns = _extents(workload)
    return rows * (inner if workload.kind == "allgather" else columns) * workload.item_bytes


def _matmul(workload: Workload, calibration: Calibration) -> Callable[[int, int, int], float]:
    times = calibration.blas_matmul if workload.blas else calibration.matmul
    if times is None:
        raise ValueError("predict: calibration has no times of BLAS, which the workload needs")
    return times.at


def _reason(chunks: int, seconds: float, sequential: float) -> str:
    return f"{_count(chunks)}, {_time(seconds)} predicted, {_time(sequential)} without overlap"


def _count(chunks: int) -> str:
    if not chunks:
        return "not overlapped"
    return arguments.counted(chunks, "chunk")


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"
