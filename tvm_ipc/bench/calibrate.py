# SPDX-License-Identifier: Apache-2.0
"""Measures a calibration: what matmuls, collectives and chunks cost while all workers are busy.

Each time is the least of some, since what else runs on the machine can only add to it. What is
measured without the link is the local work; what the link adds is told.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from typing import Any, Final

import tvm_ipc.blas
from tvm_ipc import machine
from tvm_ipc.bench import programs
from tvm_ipc.bench.stage import Stage
from tvm_ipc.calibration import COLLECTIVES, Calibration, Times
from tvm_ipc.contract import BACKENDS, AllReduceStrategy, CollectiveFlag, ReduceKind, Team
from tvm_ipc.contract.collectives import ALLGATHER, ALLREDUCE, REDUCE_SCATTER
from tvm_ipc.contract.programs import COPY, HIDE, MATMUL, REDUCE_PARTS
from tvm_ipc.transform.overlap.cost import Workload

Axes = tuple[tuple[int, ...], ...]
#: Rows, inner extents and columns. TVM's kernels are slow, and cost the same for each row.
_KERNELS: Final[Axes] = ((1, 8, 64), (64, 256, 1024), (64, 256, 1024))
_BLAS: Final[Axes] = ((1, 4, 16, 64, 256, 1024), (64, 256, 1024), (64, 256, 1024))
#: Bytes of a part.
_BYTES: Final[Axes] = ((1 << 10, 1 << 13, 1 << 16, 1 << 18, 1 << 20, 1 << 22),)
#: A small site, whose time in many chunks is mostly that of the chunks.
_CHUNKED: Final = (64, 16, 16)
_CHUNKS: Final = (1, 16)
#: Of a link that is waited for so many times, to see how late it is noticed that data are there.
_LATENCY: Final = 5e-4
_WAITS: Final = 50
#: Sites whose time is taken again and again, to see by how much it varies.
_NOISE: Final = ((64, 256, 256), (128, 512, 256), (256, 512, 512))
_NOISE_ROUNDS: Final = 22


def calibrate(
    workers: int,
    bandwidth: float,
    latency: float,
    progress: Callable[[float, str], None] = lambda _, __: None,
) -> Calibration:
    """Measure this machine with so many workers.

    `bandwidth` and `latency` are those of the link between them; 0 where they read each other's
    memory. `progress` hears which share is done, and what is being done.
    """
    return _Measuring(workers, bandwidth, latency, progress).all()


class _Measuring:
    """The steps of a calibration."""

    def __init__(
        self,
        workers: int,
        bandwidth: float,
        latency: float,
        progress: Callable[[float, str], None],
    ) -> None:
        self._workers = workers
        self._link = (bandwidth, latency)
        self._tell = progress
        self._blas = tvm_ipc.blas.installed()
        grids = [_KERNELS, *([_BLAS] if self._blas else []), *([_BYTES] * (len(COLLECTIVES) + 2))]
        points = sum(len(list(itertools.product(*grid))) for grid in grids)
        # Beside points: to compile and start, chunks and their end, the link, and noise.
        self._steps = points + 5 + len(_NOISE)
        self._done = 0

    def _progress(self, what: str) -> None:
        self._tell(min(1.0, self._done / self._steps), what)
        self._done += 1

    def all(self) -> Calibration:
        self._progress("compiling matmuls")
        kernels = programs.compiled_kernels(itertools.product(*_KERNELS), self._workers)
        self._progress("starting workers")
        with Stage(self._workers) as stage:
            self._stage = stage
            vm = stage.session.load_vm_module(kernels)
            matmul = Times.measured(_KERNELS, lambda *shape: self._kernel(vm, shape))
            blas = Times.measured(_BLAS, self._blas_matmul) if self._blas else None
            collectives = {
                kind: Times.measured(_BYTES, lambda size, kind=kind: self._collective(kind, size))
                for kind in COLLECTIVES
            }
            reduce = Times.measured(_BYTES, self._reduce)
            copy = Times.measured(_BYTES, self._copy)
            chunk, hide = self._chunk()
            wake = self._wake()
            noise = statistics.median(self._noise(shape) for shape in _NOISE)
        bandwidth, latency = self._link
        return Calibration(
            machine=machine.name(),
            backend=BACKENDS[0],
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
            noise=noise,
        )

    def _operands(self, rows: int, inner: int, columns: int) -> list[Any]:
        return [self._stage.tensor((rows, inner)), self._stage.tensor((inner, columns))]

    def _kernel(self, vm: Any, shape: tuple[int, ...]) -> float:
        rows, inner, columns = shape
        self._progress(f"multiplying {rows} x {inner} by {inner} x {columns}")
        function = vm[programs.kernel_name(rows, inner, columns)]
        return self._stage.least(function, self._operands(rows, inner, columns))

    def _blas_matmul(self, rows: int, inner: int, columns: int) -> float:
        self._progress(f"multiplying {rows} x {inner} by {inner} x {columns} with the BLAS")
        given = self._operands(rows, inner, columns)
        out = self._stage.tensor((rows, columns))
        return self._stage.least(self._stage.function(MATMUL.name), [0, 0, 0, *given, out])

    def _collective(self, kind: str, size: int) -> float:
        self._progress(f"{kind} of {size} bytes from each worker")
        part, whole = size // 4, self._workers * size // 4
        rest = (int(Team.WORLD), int(CollectiveFlag.NONE))
        if kind == "allgather":
            send, recv = (self._stage.tensor((n,), shared=n == part) for n in (part, whole))
            return self._least(ALLGATHER.name, [send, *rest, recv])
        send = self._stage.tensor((whole,), shared=True)
        add = int(ReduceKind.SUM)
        if kind == "reduce_scatter":
            return self._least(REDUCE_SCATTER.name, [send, add, *rest, self._stage.tensor((part,))])
        given = [send, add, rest[0], int(AllReduceStrategy.AUTO), rest[1]]
        return self._least(ALLREDUCE.name, [*given, self._stage.tensor((whole,))])

    def _reduce(self, size: int) -> float:
        self._progress(f"adding parts of {size} bytes")
        parts = [self._stage.tensor((size // 4,), shared=True) for _ in range(self._workers + 1)]
        return self._least(REDUCE_PARTS.name, [int(ReduceKind.SUM), int(Team.WORLD), *parts])

    def _copy(self, size: int) -> float:
        self._progress(f"copying {size} bytes")
        source, target = (self._stage.tensor((size // 4,), shared=s) for s in (True, False))
        return self._least(COPY.name, [source, target])

    def _least(self, name: str, given: list[Any]) -> float:
        return self._stage.least(self._stage.function(name), given)

    def _chunk(self) -> tuple[float, float]:
        """Return what a chunk costs beyond its matmul, and the end."""
        self._progress("showing chunks")
        rows, inner, columns = _CHUNKED
        work = Workload("allgather", self._workers, rows, inner, columns, 4, False)
        names = [programs.overlapped(count) for count in _CHUNKS]
        module = programs.variants(work, _CHUNKS)
        vm = self._stage.session.load_vm_module(programs.build(module, self._workers, blas=False))
        given = self._operands(rows, inner, columns)
        few, many = (self._stage.least(vm[name], given) for name in names)
        parts = (_CHUNKS[1] - _CHUNKS[0]) * max(1, self._workers - 1)
        chunk = max(0.0, (many - few) / parts)
        self._progress("hiding what was shown")
        hide = self._least(HIDE.name, [int(Team.WORLD)])
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

    def _noise(self, shape: tuple[int, int, int]) -> float:
        """Return by which share two medians of times of one program differ."""
        rows, inner, columns = shape
        self._progress(f"repeating a program of {rows} x {inner} x {columns}")
        work = Workload("allgather", self._workers, rows, inner, columns, 4, self._blas)
        executable = programs.build(programs.plain(work), self._workers, self._blas)
        function = self._stage.session.load_vm_module(executable)[programs.PLAIN]
        both = (function, self._operands(rows, inner, columns))
        times = self._stage.turns({"one": both, "other": both}, _NOISE_ROUNDS // 2)
        one, other = (statistics.median(found) for found in times.values())
        return abs(one - other) / max(one, other)
