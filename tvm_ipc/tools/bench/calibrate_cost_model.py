# SPDX-License-Identifier: Apache-2.0
"""Measure a calibration for the cost model: matmuls, collectives and chunks with all workers busy.

Each table is measured in several passes. A pass takes the shortest of several times, because
interference only adds to a time. The table holds the median over the passes, because the speed of
the machine varies. All times are local work; the emulated link is specified, not measured.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import tvm_ipc.cpu.openblas_discovery
from tvm_ipc import this_machine
from tvm_ipc.calibration import COLLECTIVES, Calibration, Times
from tvm_ipc.packed_functions import KINDS, AllReduceStrategy, CollectiveFlag, ReduceKind, Team
from tvm_ipc.packed_functions.collective_declarations import ALLGATHER
from tvm_ipc.packed_functions.program_function_declarations import (
    COPY,
    MATMUL,
    REDUCE_SLICES,
    RELEASE,
)
from tvm_ipc.tools.bench import overlap_programs
from tvm_ipc.tools.bench.timing_session import TimingSession
from tvm_ipc.transform.overlap.cost_model import Workload

Axes = tuple[tuple[int, ...], ...]
#: Rows, inner extents and columns. TVM's kernels cost the same for each row, so two rows suffice.
_KERNELS: Final[Axes] = ((1, 8, 64), (64, 256, 1024), (64, 256, 1024))
_BLAS: Final[Axes] = ((1, 2, 4, 8, 16, 32, 64, 128, 256, 1024), (64, 256, 1024), (64, 256, 1024))
#: Bytes of each rank's slice of a tensor.
_BYTES: Final[Axes] = ((1 << 10, 1 << 13, 1 << 16, 1 << 18, 1 << 20, 1 << 22),)
#: Passes over each table, and repetitions of each point in a pass.
_PASSES: Final = 5
_REPEATS: Final = 5
#: Rows, inner extent and columns of a matmul so small that the chunks dominate its time.
_CHUNKED: Final = (64, 16, 16)
_CHUNKS: Final = (1, 16)
#: Latency of the emulated link, and repetitions, for measuring how late a waiting rank wakes up.
_LATENCY: Final = 5e-4
_WAKE_REPEATS: Final = 50


def calibrate(
    workers: int,
    bandwidth: float,
    latency: float,
    progress: Callable[[float, str], None] = lambda _, __: None,
    device: str = "cpu",
) -> Calibration:
    """Measure this machine with `workers` workers, on its CPU or its GPUs.

    `bandwidth` and `latency` describe the link between the workers; 0 if they share memory.
    `progress` is called with the completed fraction and a description of the current step.
    """
    return _CalibrationRun(workers, bandwidth, latency, progress, device).measure()


class _CalibrationRun:
    """The measurements of one calibration."""

    def __init__(
        self,
        workers: int,
        bandwidth: float,
        latency: float,
        progress: Callable[[float, str], None],
        device: str,
    ) -> None:
        self._workers = workers
        self._device = device
        self._link = (bandwidth, latency)
        self._report_progress = progress
        self._blas = device == "cpu" and tvm_ipc.cpu.openblas_discovery.installed()
        grids = [_KERNELS, *([_BLAS] if self._blas else []), *([_BYTES] * (len(COLLECTIVES) + 2))]
        points = _PASSES * sum(len(list(itertools.product(*grid))) for grid in grids)
        # Five steps are no points: compile, start, chunks, release, wake.
        self._steps = points + 5
        self._done = 0
        self._spreads: list[float] = []
        self._tensors: dict[tuple[tuple[int, ...], str], Any] = {}

    def _progress(self, step: str) -> None:
        self._report_progress(min(1.0, self._done / self._steps), step)
        self._done += 1

    def measure(self) -> Calibration:
        self._progress("compiling matmuls")
        kernels = overlap_programs.compiled_kernels(
            itertools.product(*_KERNELS), self._workers, self._device
        )
        self._progress("starting workers")
        with TimingSession(self._workers, self._device) as timing:
            self._timing = timing
            vm = timing.session.load_vm_module(kernels)
            matmul = self._measure_table(_KERNELS, lambda *shape: self._kernel(vm, shape))
            blas = self._measure_table(_BLAS, self._blas_matmul) if self._blas else None
            collectives = {
                kind: self._measure_table(_BYTES, partial(self._collective, kind))
                for kind in COLLECTIVES
            }
            reduce = self._measure_table(_BYTES, self._reduce)
            copy = self._measure_table(_BYTES, self._copy)
            chunk, release = self._chunk_and_release()
            # There is no emulated link between GPUs.
            wake = self._wake() if self._device == "cpu" else 0.0
            backend = timing.session.backend
        bandwidth, latency = self._link
        return Calibration(
            machine=this_machine.name(gpus=self._device != "cpu"),
            backend=backend,
            workers=self._workers,
            bandwidth=bandwidth,
            latency=latency,
            wake=wake,
            matmul=matmul,
            blas_matmul=blas,
            collectives=collectives,
            reduce=reduce,
            copy=copy,
            chunk=chunk,
            hide=release,
            noise=statistics.median(self._spreads),
        )

    def _measure_table(self, axes: Axes, seconds: Callable[..., float]) -> Times:
        points = list(itertools.product(*axes))
        passes = [{point: seconds(*point) for point in points} for _ in range(_PASSES)]
        self._tensors.clear()
        times = {point: [times_of_pass[point] for times_of_pass in passes] for point in points}
        self._spreads += map(_relative_spread, times.values())
        return Times.measured(axes, lambda *point: statistics.median(times[point]))

    def _tensor(self, shape: tuple[int, ...], role: str, shared: bool = False) -> Any:
        """Return a tensor, which all points of a table share."""
        key = (shape, role)
        if key not in self._tensors:
            self._tensors[key] = self._timing.tensor(shape, shared=shared)
        return self._tensors[key]

    def _operands(self, rows: int, inner: int, columns: int) -> list[Any]:
        return [self._tensor((rows, inner), "a"), self._tensor((inner, columns), "b")]

    def _kernel(self, vm: Any, shape: tuple[int, ...]) -> float:
        rows, inner, columns = shape
        self._progress(f"multiplying {rows} x {inner} by {inner} x {columns}")
        function = vm[overlap_programs.kernel_name(rows, inner, columns)]
        return self._timing.least(function, self._operands(rows, inner, columns), _REPEATS)

    def _blas_matmul(self, rows: int, inner: int, columns: int) -> float:
        self._progress(f"multiplying {rows} x {inner} by {inner} x {columns} with OpenBLAS")
        operands = self._operands(rows, inner, columns)
        return self._least(
            MATMUL.name, [0, 0, 0, 0, *operands, self._tensor((rows, columns), "out")]
        )

    def _collective(self, kind: str, size: int) -> float:
        self._progress(f"{kind} of {size} bytes from each worker")
        own, total = size // 4, self._workers * size // 4
        entry = KINDS[kind]
        arguments = {
            "send": self._tensor((own if entry.concatenates else total,), "send", shared=True),
            "kind": int(ReduceKind.SUM),
            "team": int(Team.WORLD),
            "strategy": int(AllReduceStrategy.AUTO),
            "flags": int(CollectiveFlag.NONE),
            "recv": self._tensor((own if entry.splits else total,), "recv"),
        }
        function = entry.function
        return self._least(function.name, [arguments[p.name] for p in function.parameters])

    def _reduce(self, size: int) -> float:
        self._progress(f"adding slices of {size} bytes")
        slices = [
            self._tensor((size // 4,), f"slice {k}", shared=True) for k in range(self._workers + 1)
        ]
        return self._least(REDUCE_SLICES.name, [int(ReduceKind.SUM), int(Team.WORLD), *slices])

    def _copy(self, size: int) -> float:
        self._progress(f"copying {size} bytes")
        source = self._tensor((size // 4,), "source", shared=True)
        return self._least(COPY.name, [source, self._tensor((size // 4,), "target")])

    def _least(self, name: str, arguments: list[Any]) -> float:
        return self._timing.least(self._timing.function(name), arguments, _REPEATS)

    def _chunk_and_release(self) -> tuple[float, float]:
        """Return the seconds that a chunk adds to its matmul, and those of the final release."""
        self._progress("exposing chunks")
        rows, inner, columns = _CHUNKED
        work = Workload("allgather", self._workers, rows, inner, columns, 4, False)
        names = [overlap_programs.overlapped(count) for count in _CHUNKS]
        module = overlap_programs.variants(work, _CHUNKS)
        executable = overlap_programs.build(module, self._workers, blas=False, device=self._device)
        vm = self._timing.session.load_vm_module(executable)
        operands = self._operands(rows, inner, columns)
        few, many = (self._timing.least(vm[name], operands) for name in names)
        added = (_CHUNKS[1] - _CHUNKS[0]) * max(1, self._workers - 1)
        chunk = max(0.0, (many - few) / added)
        self._progress("releasing exposed tensors")
        release = self._timing.least(self._timing.function(RELEASE.name), [int(Team.WORLD)])
        return chunk, release

    def _wake(self) -> float:
        """Return the seconds from the arrival of data over a link to the rank's continuation."""
        self._progress("waiting for an emulated link")
        send = self._timing.tensor((1,), shared=True)
        recv = self._timing.tensor((self._workers,))
        arguments = [send, int(Team.WORLD), int(CollectiveFlag.NONE), recv]
        gather = self._timing.function(ALLGATHER.name)
        without_link = self._timing.least(gather, arguments)
        self._timing.session.emulate_link(latency=_LATENCY)
        with_link = statistics.median(self._timing.seconds(gather, arguments, _WAKE_REPEATS))
        self._timing.session.emulate_link()
        return max(0.0, with_link - without_link - _LATENCY)


def _relative_spread(times: list[float]) -> float:
    """Return the median deviation from the median, relative to the median."""
    middle = statistics.median(times)
    return statistics.median(abs(seconds - middle) / middle for seconds in times)
