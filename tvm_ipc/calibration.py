# SPDX-License-Identifier: Apache-2.0
"""What computing and communicating cost on one machine, as `tvm-ipc bench --calibrate` measured it.

A cost model asks it whether to overlap, and how. It is given to the compiler, and nothing is
measured or read while a program runs, so all ranks decide alike. It is for one machine, one backend
and one number of workers, all of which compute at once while it is measured, as in a program.
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

from tvm_ipc import arguments, machine
from tvm_ipc.contract import MAX_WORKERS, backends_of
from tvm_ipc.errors import IPCError

#: Of the file; another one is refused.
VERSION: Final = 1
#: The collectives whose time is measured; sizes are those of one rank's part.
COLLECTIVES: Final = ("allgather", "reduce_scatter", "allreduce")
_AGAIN: Final = "measure again with `tvm-ipc bench --calibrate`"


@dataclass(frozen=True)
class Times:
    """Seconds of something, measured on a grid of sizes.

    In between, the logarithm of the time is interpolated over those of the sizes; above, the time
    grows like the size; below, it is that of the least size. More never takes less time.

    Attributes
    ----------
    axes : the sizes of each axis of the grid, rising.
    seconds : of each point, the last axis fastest.
    """

    axes: tuple[tuple[int, ...], ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.axes or not all(self.axes):
            raise ValueError("a table of times has at least one size along each axis")
        for axis in self.axes:
            if axis[0] < 1 or any(a >= b for a, b in itertools.pairwise(axis)):
                raise ValueError(f"sizes of a table rise from 1 or more, unlike {list(axis)}")
        points = math.prod(map(len, self.axes))
        if len(self.seconds) != points:
            raise ValueError(f"a table of {points} points has {len(self.seconds)} times")
        if not all(0 < one < math.inf for one in self.seconds):
            raise ValueError("times are numbers of seconds above 0")
        if self.seconds != _rising(self.axes, self.seconds):
            raise ValueError("of two times of a table that of the larger size is smaller")

    @classmethod
    def measured(cls, axes: Iterable[Iterable[int]], seconds: Callable[..., float]) -> Times:
        """Measure each point; where noise made more take less time, it takes as much."""
        grid = tuple(tuple(axis) for axis in axes)
        return cls(grid, _rising(grid, [seconds(*sizes) for sizes in itertools.product(*grid)]))

    def at(self, *sizes: float) -> float:
        """Return the seconds for these sizes; nothing takes no time."""
        if min(sizes) <= 0:
            return 0.0
        scale = 1.0
        low: list[int] = []
        shares: list[float] = []
        for axis, size in zip(self.axes, sizes, strict=True):
            inside = min(max(size, axis[0]), axis[-1])
            scale *= max(1.0, size / axis[-1])
            place = min(bisect_right(axis, inside), len(axis) - 1) - 1
            low.append(max(place, 0))
            if place < 0:  # one size only
                shares.append(0.0)
            else:
                shares.append(
                    math.log(inside / axis[place]) / math.log(axis[place + 1] / axis[place])
                )
        total = 0.0
        for corner in itertools.product((0, 1), repeat=len(self.axes)):
            weight = math.prod(s if up else 1 - s for up, s in zip(corner, shares, strict=True))
            if weight:
                index = 0
                for axis, place, up in zip(self.axes, low, corner, strict=True):
                    index = index * len(axis) + place + up
                total += weight * math.log(self.seconds[index])
        return scale * math.exp(total)


def _rising(axes: tuple[tuple[int, ...], ...], seconds: Iterable[float]) -> tuple[float, ...]:
    """Return the times, each at least that of the points before it along every axis."""
    found = list(seconds)
    stride = 1
    for axis in reversed(axes):
        for index in range(len(found)):
            if index // stride % len(axis):
                found[index] = max(found[index], found[index - stride])
        stride *= len(axis)
    return tuple(found)


@dataclass(frozen=True)
class Calibration:
    """What one machine's workers need for what, in seconds.

    Attributes
    ----------
    machine : what `tvm_ipc.machine.name()` says there.
    backend : what moves data between the workers.
    workers : how many there were.
    bandwidth : bytes a second over the link into a worker; 0 where peers read each other's memory.
    latency : of that link.
    wake : how much later than its data a rank goes on that has waited for the link.
    matmul : by rows, inner extent and columns, of a kernel of TVM, float32.
    blas_matmul : the same of the BLAS; None where there is none.
    collectives : by the bytes of one rank's part, without the link: fixed cost and local copies.
    reduce : by the bytes of a part, the local reduction of the parts of all workers.
    copy : by bytes, of what a peer has shown.
    chunk : of a chunk beyond its matmul: to show it, to find a peer's, its view, a call.
    hide : the meeting at the end.
    noise : by which share a time that is measured again differs.
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
        arguments.text("Calibration: machine", self.machine, "the name of a machine")
        arguments.text("Calibration: backend", self.backend, "the name of a backend")
        wanted = f"a number of workers, 1 to {MAX_WORKERS}"
        arguments.integer("Calibration: workers", self.workers, wanted, 1, MAX_WORKERS)
        for name in ("bandwidth", "latency", "wake", "chunk", "hide", "noise"):
            value = getattr(self, name)
            wanted = "a number, 0 or more"
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise arguments.wrong_type(f"Calibration: {name}", wanted, value)
            if not 0 <= value < math.inf:
                raise arguments.wrong_value(f"Calibration: {name}", wanted, value)
        tables = [("matmul", self.matmul, 3), ("reduce", self.reduce, 1), ("copy", self.copy, 1)]
        if self.blas_matmul is not None:
            tables.append(("blas_matmul", self.blas_matmul, 3))
        arguments.instance("Calibration: collectives", self.collectives, Mapping, "times by kind")
        if set(self.collectives) != set(COLLECTIVES):
            wanted = f"the times of {', '.join(COLLECTIVES)}"
            found = list(self.collectives)
            raise arguments.wrong_value("Calibration: collectives", wanted, found)
        tables += [(f"collectives: {kind}", self.collectives[kind], 1) for kind in COLLECTIVES]
        for name, table, axes in tables:
            wanted = f"a table of times along {axes} {'axes' if axes > 1 else 'axis'}"
            found = arguments.instance(f"Calibration: {name}", table, Times, wanted)
            if len(found.axes) != axes:
                raise arguments.wrong_value(f"Calibration: {name}", wanted, found)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file that `load` reads."""
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
        """Read a calibration, and refuse one that was measured for something else.

        Parameters
        ----------
        workers, backend : what it must have been measured for; None takes any.
        any_machine : take that of another machine, on which the program is going to run.
        """
        source = arguments.path("Calibration.load: path", path, "a file with a calibration")
        if workers is not None:
            wanted = f"a number of workers, 1 to {MAX_WORKERS}, or None"
            workers = arguments.integer(
                "Calibration.load: workers", workers, wanted, 1, MAX_WORKERS
            )
        arguments.optional_text("Calibration.load: backend", backend, "a backend or None")
        arguments.flag("Calibration.load: any_machine", any_machine)
        found = _read(source)
        gpus = found.backend not in backends_of("cpu")
        here = found.machine if any_machine else machine.name(gpus=gpus)
        differences = [
            f"it was measured {how} {was}, and this is {now}"
            for how, was, now in (
                ("on", found.machine, here),
                ("with the backend", found.backend, backend or found.backend),
                ("for", _workers(found.workers), _workers(workers or found.workers)),
            )
            if was != now
        ]
        if differences:
            raise IPCError(f"the calibration {source} is stale: {'; '.join(differences)}: {_AGAIN}")
        return found


def _workers(count: int) -> str:
    return f"{count} worker{'s' * (count != 1)}"


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
            f"the calibration {source} is stale: it has version {arguments.show(version)}, and "
            f"this is tvm-ipc with version {VERSION}: {_AGAIN}"
        )
    names = {field.name for field in dataclasses.fields(Calibration)}
    for what, which in (("lacks", names - set(data)), ("also has", set(data) - names)):
        if which:
            raise _broken(source, f"it {what} {', '.join(map(repr, sorted(which)))}")
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
            f"a table of times has 'axes' and 'seconds', unlike {arguments.show(data)}"
        )
    whole = "sizes, 1 or more each"
    axes = tuple(arguments.integers("axes", axis, whole, 1) for axis in _list(data["axes"]))
    seconds = tuple(
        arguments.above_zero("seconds", one, "times above 0") for one in _list(data["seconds"])
    )
    return Times(axes, seconds)


def _list(data: Any) -> list[Any]:
    if not isinstance(data, list):
        raise ValueError(f"a list was expected, not {arguments.show(data)}")
    return data


def _broken(source: Path, why: str) -> IPCError:
    return IPCError(f"the calibration {source} is broken: {why}: {_AGAIN}")
