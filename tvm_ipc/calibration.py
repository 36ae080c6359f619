# SPDX-License-Identifier: Apache-2.0
"""Read and write calibrations: the costs of computation and communication on one machine.

`tvm-ipc bench --calibrate` measures them. The compiler's cost model uses them to decide whether and
how to overlap. Nothing is measured or read while a program runs, so all ranks decide alike. A
calibration is for one machine, one backend and one number of workers, all of which computed at the
same time during the measurement, as in a program.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tvm_ipc import arguments, this_machine
from tvm_ipc.errors import IPCError
from tvm_ipc.packed_functions import MAX_WORKERS, backends_of

#: The version of the file format; files of other versions are refused.
VERSION: Final = 1
#: The collectives that are measured, by the size of one rank's slice.
COLLECTIVES: Final = ("allgather", "reduce_scatter", "allreduce")
_AGAIN: Final = "measure again with `tvm-ipc bench --calibrate`"


@dataclass(frozen=True)
class Times:
    """Times of an operation, measured on a grid of sizes.

    Between points, the logarithm of the time is interpolated over the logarithms of the sizes.
    Above the grid, the time is proportional to the size; below it, the time is that of the least
    size. Times never decrease with the size.

    Attributes
    ----------
    axes : the sizes along each axis of the grid, in increasing order.
    seconds : the time of each point, in row-major order.
    """

    axes: tuple[tuple[int, ...], ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        """Check that sizes rise along each axis and that every point has a time."""
        if not self.axes or not all(self.axes):
            raise ValueError("a table of times has at least one size along each axis")
        for axis in self.axes:
            if axis[0] < 1 or any(a >= b for a, b in itertools.pairwise(axis)):
                raise ValueError(f"sizes of a table rise from 1 or more, unlike {list(axis)}")
        points = math.prod(map(len, self.axes))
        if len(self.seconds) != points:
            raise ValueError(f"a table of {points} points has {len(self.seconds)} times")
        if not all(0 < time < math.inf for time in self.seconds):
            raise ValueError("times are numbers of seconds above 0")
        if self.seconds != _monotonic(self.axes, self.seconds):
            raise ValueError("of two times of a table that of the larger size is smaller")

    @classmethod
    def measured(cls, axes: Iterable[Iterable[int]], seconds: Callable[..., float]) -> Times:
        """Measure each point; a time that is less than that of a smaller size is raised to it."""
        grid = tuple(tuple(axis) for axis in axes)
        return cls(grid, _monotonic(grid, [seconds(*sizes) for sizes in itertools.product(*grid)]))

    def at(self, *sizes: float) -> float:
        """Return the seconds for these sizes; 0 if one of them is 0."""
        if min(sizes) <= 0:
            return 0.0
        scale = 1.0
        lower: list[int] = []  # along each axis, the grid index below the size
        fractions: list[float] = []  # along each axis, the position between two grid points
        for axis, size in zip(self.axes, sizes, strict=True):
            clamped = min(max(size, axis[0]), axis[-1])
            scale *= max(1.0, size / axis[-1])
            index = min(bisect_right(axis, clamped), len(axis) - 1) - 1
            lower.append(max(index, 0))
            if index < 0:  # the axis has one size only
                fractions.append(0.0)
            else:
                fractions.append(
                    math.log(clamped / axis[index]) / math.log(axis[index + 1] / axis[index])
                )
        log_time = 0.0
        for corner in itertools.product((0, 1), repeat=len(self.axes)):
            weight = math.prod(
                fraction if upper else 1 - fraction
                for upper, fraction in zip(corner, fractions, strict=True)
            )
            if weight:
                point = 0
                for axis, index, upper in zip(self.axes, lower, corner, strict=True):
                    point = point * len(axis) + index + upper
                log_time += weight * math.log(self.seconds[point])
        return scale * math.exp(log_time)


def _monotonic(axes: tuple[tuple[int, ...], ...], seconds: Iterable[float]) -> tuple[float, ...]:
    """Return the times, each raised to at least those of smaller sizes along every axis."""
    times = list(seconds)
    stride = 1
    for axis in reversed(axes):
        for index in range(len(times)):
            if index // stride % len(axis):
                times[index] = max(times[index], times[index - stride])
        stride *= len(axis)
    return tuple(times)


@dataclass(frozen=True)
class Calibration:
    """The costs of operations of one machine's workers, in seconds.

    Attributes
    ----------
    machine : the result of `tvm_ipc.this_machine.name()` on that machine.
    backend : the backend between the workers.
    workers : the number of workers.
    bandwidth : bytes per second over the link into a worker; 0 if peers read each other's memory.
    latency : the latency of that link.
    wake : the delay from the arrival of data over the link until a waiting rank continues.
    matmul : a matmul kernel of TVM, float32, by rows, inner extent and columns.
    blas_matmul : a matmul of the BLAS, by the same sizes; None without a BLAS.
    collectives : each collective without the link, that is its fixed cost and local copies, by the
        bytes of one rank's slice.
    reduce : the local reduction of one slice from each worker, by the bytes of a slice.
    copy : a copy of a tensor that a peer has exposed, by bytes.
    chunk : the cost of a chunk beyond its matmul: to expose it, to find a peer's, a view, a call.
    hide : the barrier that releases the chunks at the end.
    noise : the relative difference between two measurements of one time.

    Examples
    --------
    The command `tvm-ipc bench --calibrate` measures a calibration and writes the file.

    >>> import tvm_ipc
    >>> calibration = tvm_ipc.Calibration.load("tvm-ipc-calibration.json", workers=2)
    >>> pipeline = tvm_ipc.get_pipeline("llvm", world_size=2, overlap=calibration)
    """

    machine: str
    backend: str
    workers: int
    bandwidth: float
    latency: float
    wake: float
    matmul: Times
    blas_matmul: Times | None
    collectives: Mapping[str, Times]
    reduce: Times
    copy: Times
    chunk: float
    hide: float
    noise: float

    def __post_init__(self) -> None:
        """Check every field; raise TypeError or ValueError for a wrong one."""
        arguments.text("Calibration: machine", self.machine, "the name of a machine")
        arguments.text("Calibration: backend", self.backend, "the name of a backend")
        expected = f"a number of workers, 1 to {MAX_WORKERS}"
        arguments.integer("Calibration: workers", self.workers, expected, 1, MAX_WORKERS)
        for name in ("bandwidth", "latency", "wake", "chunk", "hide", "noise"):
            value = getattr(self, name)
            arguments.not_negative(f"Calibration: {name}", value, "a number, 0 or more")
        tables = [("matmul", self.matmul, 3), ("reduce", self.reduce, 1), ("copy", self.copy, 1)]
        if self.blas_matmul is not None:
            tables.append(("blas_matmul", self.blas_matmul, 3))
        arguments.instance("Calibration: collectives", self.collectives, Mapping, "times by kind")
        if set(self.collectives) != set(COLLECTIVES):
            expected = f"the times of {', '.join(COLLECTIVES)}"
            names = list(self.collectives)
            raise arguments.wrong_value("Calibration: collectives", expected, names)
        tables += [(f"collectives: {kind}", self.collectives[kind], 1) for kind in COLLECTIVES]
        for name, table, axes in tables:
            expected = f"a table of times along {axes} {'axes' if axes > 1 else 'axis'}"
            times = arguments.instance(f"Calibration: {name}", table, Times, expected)
            if len(times.axes) != axes:
                raise arguments.wrong_value(f"Calibration: {name}", expected, times)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the calibration to a file, which `load` reads.

        Parameters
        ----------
        path : the file to write.

        Raises
        ------
        IPCError
            The file cannot be written.
        """
        target = arguments.path("Calibration.save: path", path, "a file to write")
        text = json.dumps({"version": VERSION, **dataclasses.asdict(self)}, indent=1)
        try:
            target.write_text(text + "\n")
        except OSError as error:
            raise IPCError(f"cannot write the calibration {target}: {error.strerror}") from error

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        workers: int | None = None,
        backend: str | None = None,
        any_machine: bool = False,
    ) -> Calibration:
        """Read a calibration; raise if it was measured for other conditions.

        Parameters
        ----------
        path : the file.
        workers : the required number of workers of the measurement; None accepts any.
        backend : the required backend of the measurement; None accepts any.
        any_machine : accept the calibration of another machine, on which the program will run.

        Returns
        -------
        Calibration
            The calibration.

        Raises
        ------
        IPCError
            The file cannot be read, or the calibration was measured under other conditions.
        """
        source = arguments.path("Calibration.load: path", path, "a file with a calibration")
        if workers is not None:
            expected = f"a number of workers, 1 to {MAX_WORKERS}, or None"
            workers = arguments.integer(
                "Calibration.load: workers", workers, expected, 1, MAX_WORKERS
            )
        arguments.optional_text("Calibration.load: backend", backend, "a backend or None")
        arguments.flag("Calibration.load: any_machine", any_machine)
        calibration = _read(source)
        gpus = calibration.backend not in backends_of("cpu")
        here = calibration.machine if any_machine else this_machine.name(gpus=gpus)
        worker_counts = calibration.workers, workers or calibration.workers
        differences = [
            f"it was measured {preposition} {measured}, and this is {required}"
            for preposition, measured, required in (
                ("on", calibration.machine, here),
                ("with the backend", calibration.backend, backend or calibration.backend),
                ("for", *(arguments.counted(n, "worker") for n in worker_counts)),
            )
            if measured != required
        ]
        if differences:
            raise IPCError(f"the calibration {source} is stale: {'; '.join(differences)}: {_AGAIN}")
        return calibration


def _read(source: Path) -> Calibration:
    try:
        text = source.read_text(encoding="utf-8")
    except OSError as error:
        raise IPCError(f"cannot read the calibration {source}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise _broken(source, "it is no text") from error
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _broken(source, f"it is no JSON: {error}") from error
    if not isinstance(data, dict):
        raise _broken(source, f"it holds a {type(data).__name__} and no table of names")
    version = data.pop("version", None)
    if version != VERSION:
        raise IPCError(
            f"the calibration {source} is stale: it has version {arguments.quote(version)}, and "
            f"this is tvm-ipc with version {VERSION}: {_AGAIN}"
        )
    names = {field.name for field in dataclasses.fields(Calibration)}
    for verb, wrong_names in (("lacks", names - set(data)), ("also has", set(data) - names)):
        if wrong_names:
            raise _broken(source, f"it {verb} {', '.join(map(repr, sorted(wrong_names)))}")
    try:
        for name in ("matmul", "blas_matmul", "reduce", "copy"):
            if data[name] is not None or name != "blas_matmul":
                data[name] = _times(data[name])
        if not isinstance(data["collectives"], dict):
            raise ValueError("'collectives' is no table")
        data["collectives"] = {k: _times(v) for k, v in data["collectives"].items()}
        return Calibration(**data)
    except (TypeError, ValueError, OverflowError) as error:
        raise _broken(source, str(error)) from error


def _times(data: Any) -> Times:
    if not isinstance(data, dict) or set(data) != {"axes", "seconds"}:
        raise ValueError(
            f"a table of times has 'axes' and 'seconds', unlike {arguments.quote(data)}"
        )
    expected = "sizes, 1 or more each"
    axes = tuple(arguments.integers("axes", axis, expected, 1) for axis in _list(data["axes"]))
    seconds = tuple(
        arguments.above_zero("seconds", time, "times above 0") for time in _list(data["seconds"])
    )
    return Times(axes, seconds)


def _list(data: Any) -> list[Any]:
    if not isinstance(data, list):
        raise ValueError(f"a list was expected, not {arguments.quote(data)}")
    return data


def _broken(source: Path, reason: str) -> IPCError:
    return IPCError(f"the calibration {source} is broken: {reason}: {_AGAIN}")
