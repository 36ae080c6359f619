# SPDX-License-Identifier: Apache-2.0
"""Measures a calibration: what matmuls, collectives and chunks cost while all workers are busy.

A point of a table is measured in several passes over all of it, some time apart: in each pass it is
the least of some times, since what else runs on the machine can only add to it, and the median of
these counts, since the machine itself is not always as fast. What is measured without the link is
the local work; what the link adds is told.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import tvm_ipc.blas
from tvm_ipc import machine
from tvm_ipc.bench import programs
from tvm_ipc.bench.stage import Stage
from tvm_ipc.calibration import COLLECTIVES, Calibration, Times
from tvm_ipc.contract import AllReduceStrategy, CollectiveFlag, ReduceKind, Team
from tvm_ipc.contract.collectives import ALLGATHER, ALLREDUCE, REDUCE_SCATTER
from tvm_ipc.contract.programs import COPY, HIDE, MATMUL, REDUCE_PARTS
from tvm_ipc.transform.overlap.cost import Workload

Axes = tuple[tuple[int, ...], ...]
#: Rows, inner extents and columns. TVM's kernels are slow, and cost the same for each row.
_KERNELS: Final[Axes] = ((1, 8, 64), (64, 256, 1024), (64, 256, 1024))
_BLAS: Final[Axes] = ((1, 2, 4, 8, 16, 32, 64, 128, 256, 1024), (64, 256, 1024), (64, 256, 1024))
#: Bytes of a part.
_BYTES: Final[Axes] = ((1 << 10, 1 << 13, 1 << 16, 1 << 18, 1 << 20, 1 << 22),)
#: Passes over each table, and times of each point in one.
_PASSES: Final = 5
_TIMES: Final = 5
#: A small site, whose time in many chunks is mostly that of the chunks.
_CHUNKED: Final = (64, 16, 16)
_CHUNKS: Final = (1, 16)
#: Of a link that is waited for so many times, to see how late it is noticed that data are there.
_LATENCY: Final = 5e-4
_WAITS: Final = 50


def calibrate(
    workers: int,
    bandwidth: float,
    latency: float,
    progress: Callable[[float, str], None] = lambda _, __: None,
    device: str = "cpu",
) -> Calibration:
    """Measure this machine with so many workers, on its CPU or its GPUs.

    `bandwidth` and `latency` are those of the link between them; 0 where they read each other's
    memory. `progress` hears which share is done, and what is being done.
    """
    return _Measuring(workers, bandwidth, latency, progress, device).all()


class _Measuring:
    """The steps of a calibration."""

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
        self._tell = progress
        self._blas = device == "cpu" and tvm_ipc.blas.installed()
        grids = [_KERNELS, *([_BLAS] if self._blas else []), *([_BYTES] * (len(COLLECTIVES) + 2))]
        points = _PASSES * sum(len(list(itertools.product(*grid))) for grid in grids)
        # Beside points: to compile and start, chunks and their end, and the link.
        self._steps = points + 5
        self._done = 0
        self._spreads: list[float] = []
        self._tensors: dict[tuple[tuple[int, ...], str], Any] = {}

    def _progress(self, what: str) -> None:
        self._tell(min(1.0, self._done / self._steps), what)
        self._done += 1

    def all(self) -> Calibration:
        self._progress("compiling matmuls")
        kernels = programs.compiled_kernels(
            itertools.product(*_KERNELS), self._workers, self._device
        )
        self._progress("starting workers")
        with Stage(self._workers, self._device) as stage:
            self._stage = stage
            vm = stage.session.load_vm_module(kernels)
            matmul = self._table(_KERNELS, lambda *shape: self._kernel(vm, shape))
            blas = self._table(_BLAS, self._blas_matmul) if self._blas else None
            collectives = {
                kind: self._table(_BYTES, partial(self._collective, kind)) for kind in COLLECTIVES
            }
            reduce = self._table(_BYTES, self._reduce)
            copy = self._table(_BYTES, self._copy)
            chunk, hide = self._chunk()
            # No link is emulated between GPUs.
            wake = self._wake() if self._device == "cpu" else 0.0
            backend = stage.session.backend
        bandwidth, latency = self._link
        return Calibration(
            machine=machine.name(gpus=self._device != "cpu"),
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
            hide=hide,
            noise=statistics.median(self._spreads),
        )

    def _table(self, axes: Axes, seconds: Callable[..., float]) -> Times:
        points = list(itertools.product(*axes))
        passes = [{point: seconds(*point) for point in points} for _ in range(_PASSES)]
        self._tensors.clear()
        times = {point: [one[point] for one in passes] for point in points}
        self._spreads += map(_spread, times.values())
        return Times.measured(axes, lambda *point: statistics.median(times[point]))

    def _tensor(self, shape: tuple[int, ...], role: str, shared: bool = False) -> Any:
        """Return a tensor, the same one whenever it is asked for in a table."""
        key = (shape, role)
        if key not in self._tensors:
            self._tensors[key] = self._stage.tensor(shape, shared=shared)
        return self._tensors[key]

    def _operands(self, rows: int, inner: int, columns: int) -> list[Any]:
        return [self._tensor((rows, inner), "a"), self._tensor((inner, columns), "b")]

    def _kernel(self, vm: Any, shape: tuple[int, ...]) -> float:
        rows, inner, columns = shape
        self._progress(f"multiplying {rows} x {inner} by {inner} x {columns}")
        function = vm[programs.kernel_name(rows, inner, columns)]
        return self._stage.least(function, self._operands(rows, inner, columns), _TIMES)

    def _blas_matmul(self, rows: int, inner: int, columns: int) -> float:
        self._progress(f"multiplying {rows} x {inner} by {inner} x {columns} with the BLAS")
        given = self._operands(rows, inner, columns)
        return self._least(MATMUL.name, [0, 0, 0, *given, self._tensor((rows, columns), "out")])

    def _collective(self, kind: str, size: int) -> float:
        self._progress(f"{kind} of {size} bytes from each worker")
        part, whole = size // 4, self._workers * size // 4
        rest = (int(Team.WORLD), int(CollectiveFlag.NONE))
        if kind == "allgather":
            send = self._tensor((part,), "send", shared=True)
            return self._least(ALLGATHER.name, [send, *rest, self._tensor((whole,), "recv")])
        send = self._tensor((whole,), "send", shared=True)
        add = int(ReduceKind.SUM)
        if kind == "reduce_scatter":
            return self._least(
                REDUCE_SCATTER.name, [send, add, *rest, self._tensor((part,), "recv")]
            )
        given = [send, add, rest[0], int(AllReduceStrategy.AUTO), rest[1]]
        return self._least(ALLREDUCE.name, [*given, self._tensor((whole,), "recv")])

    def _reduce(self, size: int) -> float:
        self._progress(f"adding parts of {size} bytes")
        parts = [
            self._tensor((size // 4,), f"part {k}", shared=True) for k in range(self._workers + 1)
        ]
        return self._least(REDUCE_PARTS.name, [int(ReduceKind.SUM), int(Team.WORLD), *parts])

    def _copy(self, size: int) -> float:
        self._progress(f"copying {size} bytes")
        source = self._tensor((size // 4,), "source", shared=True)
        return self._least(COPY.name, [source, self._tensor((size // 4,), "target")])

    def _least(self, name: str, given: list[Any]) -> float:
        return self._stage.least(self._stage.function(name), given, _TIMES)

    def _chunk(self) -> tuple[float, float]:
        """Return what a chunk costs beyond its matmul, and the end."""
        self._progress("showing chunks")
        rows, inner, columns = _CHUNKED
        work = Workload("allgather", self._workers, rows, inner, columns, 4, False)
        names = [programs.overlapped(count) for count in _CHUNKS]
        module = programs.variants(work, _CHUNKS)
        executable = programs.build(module, self._workers, blas=False, device=self._device)
        vm = self._stage.session.load_vm_module(executable)
        given = self._operands(rows, inner, columns)
        few, many = (self._stage.least(vm[name], given) for name in names)
        parts = (_CHUNKS[1] - _CHUNKS[0]) * max(1, self._workers - 1)
        chunk = max(0.0, (many - few) / parts)
        self._progress("hiding what was shown")
        hide = self._stage.least(self._stage.function(HIDE.name), [int(Team.WORLD)])
        return chunk, hide

    def _wake(self) -> float:
        """Return how late a rank goes on that has waited for the link."""
        self._progress("waiting for a link")
        given = [self._stage.tensor((1,), shared=True), int(Team.WORLD), int(CollectiveFlag.NONE)]
        given.append(self._stage.tensor((self._workers,)))
        gather = self._stage.function(ALLGATHER.name)
        without = self._stage.least(gather, given)
        self._stage.session.emulate_link(latency=_LATENCY)
        late = statistics.median(self._stage.seconds(gather, given, _WAITS))
        self._stage.session.emulate_link()
        return max(0.0, late - without - _LATENCY)


def _spread(times: list[float]) -> float:
    """Return by which share times differ from their median: the median of that."""
    middle = statistics.median(times)
    return statistics.median(abs(one - middle) / middle for one in times)
