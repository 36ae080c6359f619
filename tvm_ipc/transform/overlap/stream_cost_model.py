# SPDX-License-Identifier: Apache-2.0
"""The cost model that decides whether a tensor that is marked for streams is computed in chunks.

The model simulates the chunks of one rank with the times of a calibration. Data travels while the
program computes. The processor time of a collective, which a calibration measures without a link,
is added to that of the program, because a core for it may not be idle. The second half of an
all-reduce begins when its first half has been summed, so when the program waits.

The prediction is compared with that of the program without chunks: each matmul, then each
collective. It is also compared with what `OverlapCommunication` is predicted to reach without the
mark.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tvm_ipc.arguments import counted
from tvm_ipc.calibration import COLLECTIVES, Calibration
from tvm_ipc.packed_functions import KINDS
from tvm_ipc.transform.overlap.cost_model import LEAST_GAIN, Workload, choose, predict_collective

_ALLREDUCE: Final = "allreduce"
#: The argument of `R.comm.place` that keeps a mark that does not pay.
_FORCE: Final = "place(..., force=True) keeps the chunks"


@dataclass(frozen=True)
class ChunkMatmul:
    """A matmul in chunks.

    Attributes
    ----------
    rows, inner, columns : the extents of the matmul of one chunk.
    whole_rows, whole_columns : the extents of the matmul without chunks.
    stage : the number of collectives before it.
    """

    rows: int
    inner: int
    columns: int
    whole_rows: int
    whole_columns: int
    stage: int = 0


@dataclass(frozen=True)
class ChunkCollective:
    """A collective in chunks.

    Attributes
    ----------
    kind : its kind.
    slice_bytes : the size of one rank's slice of a chunk.
    stage : the stage that it ends.
    """

    kind: str
    slice_bytes: float
    stage: int = 0


@dataclass(frozen=True)
class MarkedWork:
    """The work that computes a marked tensor.

    Attributes
    ----------
    ranks : the number of ranks in the team.
    chunks : the number of chunks.
    streams : the number of chunks that are communicated or computed at a time.
    matmuls, collectives : the operators of a chunk that take time.
    ring : whether chunks are the shards of ranks, sent by each rank to one other at a time.
    blas : whether matmuls are offloaded to BLAS.
    overlap : the same work for `OverlapCommunication`; None if it does not support it.
    """

    ranks: int
    chunks: int
    streams: int
    matmuls: tuple[ChunkMatmul, ...]
    collectives: tuple[ChunkCollective, ...]
    ring: bool = False
    blas: bool = False
    overlap: Workload | None = None


@dataclass(frozen=True)
class MarkChoice:
    """The decision about a mark.

    Attributes
    ----------
    keeps : whether the marked tensor is computed in chunks.
    reason : the reason for the report; "" if nothing can be predicted.
    seconds : the predicted time in chunks; None if it cannot be predicted.
    whole_seconds : the predicted time without chunks.
    """

    keeps: bool
    reason: str
    seconds: float | None = None
    whole_seconds: float | None = None


def choose_mark(work: MarkedWork, calibration: Calibration, *, force: bool = False) -> MarkChoice:
    """Return whether a marked tensor is computed in chunks.

    It is if nothing can be predicted, because the author of the program has asked for it.

    Parameters
    ----------
    work : what is computed and communicated.
    calibration : the measured times of the machine.
    force : whether the author keeps the chunks even if they do not pay.
    """
    unknown = _unpredictable(work, calibration)
    if unknown:
        return MarkChoice(True, f"no time can be predicted: {unknown}")
    chunked, whole = predict_marked(work, calibration), predict_whole(work, calibration)
    times = f"{_time(chunked)} predicted, {_time(whole)} without chunks"
    needed = max(LEAST_GAIN, 2 * calibration.noise)
    reason = ""
    if chunked > whole:
        reason = f"it would be {chunked / whole - 1:.0%} slower: {times}"
    elif chunked > whole * (1 - needed):
        reason = f"it would be {1 - chunked / whole:.0%} faster, less than {needed:.0%}: {times}"
    direct = choose(work.overlap, calibration) if work.overlap is not None else None
    seconds = direct.seconds if direct is not None and direct.overlaps else None
    if not reason and seconds is not None and seconds < chunked:
        reason = (
            f"OverlapCommunication would be {1 - seconds / chunked:.0%} faster: "
            f"{_time(chunked)} predicted, {_time(seconds)} with it"
        )
    if not reason or force:
        forced = f"; force=True, although {reason}" if reason else f"; {times}"
        return MarkChoice(True, forced.removeprefix("; "), chunked, whole)
    return MarkChoice(False, f"{reason}; {_FORCE}", chunked, whole)


def predict_whole(work: MarkedWork, calibration: Calibration) -> float:
    """Return the predicted seconds without chunks."""
    times = calibration.blas_matmul if work.blas else calibration.matmul
    assert times is not None, "the calibration has times of BLAS"
    seconds = sum(times.at(m.whole_rows, m.inner, m.whole_columns) for m in work.matmuls)
    for collective in work.collectives:
        size = collective.slice_bytes * (1 if work.ring else work.chunks)
        seconds += predict_collective(collective.kind, round(size), work.ranks, calibration)
    return seconds


def predict_marked(work: MarkedWork, calibration: Calibration) -> float:
    """Return the predicted seconds in chunks."""
    simulation = _Simulation(work, calibration)
    return simulation.ring() if work.ring else simulation.pipeline()


class _Simulation:
    """The clocks of a rank and of the link into it."""

    def __init__(self, work: MarkedWork, calibration: Calibration) -> None:
        self._work, self._calibration = work, calibration
        self._now = self._link_free = 0.0
        self._last = max((c.stage + 1 for c in work.collectives), default=0)
        self._done = [0] * (self._last + 1)
        #: The collectives of each chunk that have started, and when their data arrives.
        self._arrivals: dict[tuple[int, int], list[tuple[ChunkCollective, float]]] = {}

    def pipeline(self) -> float:
        """Return the time of all chunks, in the order in which the program starts them."""
        self._reach(self._last, self._work.chunks - 1)
        return self._now

    def _reach(self, stage: int, chunk: int) -> None:
        """Run a stage of all chunks up to one, and what must be before it."""
        work = self._work
        streams = min(work.streams, work.chunks)
        while self._done[stage] <= chunk:
            current = self._done[stage]
            if stage > 0:
                self._reach(stage - 1, min(current + streams - 1, work.chunks - 1))
            if stage < self._last and current >= streams:
                self._reach(stage + 1, current - streams)
            if self._done[stage] == current:
                self._run(stage, current)
                self._done[stage] += 1

    def _run(self, stage: int, chunk: int) -> None:
        for collective, arrival in self._arrivals.pop((stage, chunk), []):
            size = collective.slice_bytes
            processor = self._calibration.collectives[collective.kind].at(size)
            if collective.kind == _ALLREDUCE:
                self._wait(arrival, processor / 2)
                arrival = self._start(self._traffic(collective) / 2)
                processor /= 2
            self._wait(arrival, processor)
        for matmul in self._work.matmuls:
            if matmul.stage == stage:
                self._now += self._matmul(matmul)
        for collective in self._work.collectives:
            if collective.stage == stage:
                halves = 2 if collective.kind == _ALLREDUCE else 1
                arrival = self._start(self._traffic(collective) / halves)
                self._arrivals.setdefault((stage + 1, chunk), []).append((collective, arrival))

    def _traffic(self, collective: ChunkCollective) -> float:
        """Return the bytes that a rank receives in a collective of a chunk."""
        slices = KINDS[collective.kind].slices_received(self._work.ranks)
        return slices * collective.slice_bytes

    def ring(self) -> float:
        """Return the time of a ring: a shard travels while another one is computed."""
        (collective,) = self._work.collectives
        others = self._work.ranks - 1
        size = collective.slice_bytes
        processor = self._calibration.collectives[collective.kind].at(size) / others
        compute = sum(map(self._matmul, self._work.matmuls))
        if collective.kind == "allgather":
            for _ in range(others):
                arrival = self._start(size)
                self._now += compute
                self._wait(arrival, processor)
            return self._now + compute
        arrivals = []
        for _ in range(others):
            self._now += compute
            arrivals.append(self._start(size))
        self._now += compute
        for arrival in arrivals:
            self._wait(arrival, processor)
        return self._now + self._calibration.reduce.at(size)

    def _matmul(self, matmul: ChunkMatmul) -> float:
        """Return the time of a matmul of a chunk, which is not faster per row than all of it."""
        times = self._calibration.blas_matmul if self._work.blas else self._calibration.matmul
        assert times is not None, "the calibration has times of BLAS"
        whole = times.at(matmul.whole_rows, matmul.inner, matmul.whole_columns)
        share = matmul.rows * matmul.columns / (matmul.whole_rows * matmul.whole_columns)
        seconds = max(times.at(matmul.rows, matmul.inner, matmul.columns), whole * share)
        return self._calibration.chunk + seconds

    def _start(self, traffic: float) -> float:
        """Start a transfer; return when its data arrives."""
        speed, latency = self._calibration.bandwidth, self._calibration.latency
        self._link_free = max(self._now, self._link_free) + (traffic / speed if speed else 0.0)
        return self._link_free + latency

    def _wait(self, arrival: float, processor: float) -> None:
        """Wait until data has arrived, and add the processor time of its collective."""
        if arrival > self._now:
            self._now = arrival + self._calibration.wake
        self._now += processor + self._calibration.chunk


def _unpredictable(work: MarkedWork, calibration: Calibration) -> str:
    """Return why no time can be predicted, "" if it can."""
    if work.ranks != calibration.workers:
        workers = counted(calibration.workers, "worker")
        return f"the team has {counted(work.ranks, 'rank')}, the calibration {workers}"
    if work.blas and calibration.blas_matmul is None:
        return "the calibration was measured without BLAS"
    for collective in work.collectives:
        if collective.kind not in COLLECTIVES:
            return f"the calibration has no times of {collective.kind}"
    return ""


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"
