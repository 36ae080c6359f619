# SPDX-License-Identifier: Apache-2.0
"""A session in which programs are timed: its tensors lie in the workers, and so do the clocks."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, NamedTuple

import tvm_ffi

import tvm_ipc
from tvm_ipc.bench import gpu, worker
from tvm_ipc.errors import IPCError

#: Seconds that a measurement should take, so that the clock's own time does not count. It is short,
#: so that some measurements are not disturbed by what else runs on the machine.
_ENOUGH: Final = 5e-5
#: Seconds from which on fewer repetitions do.
_LONG: Final = 0.02


class Event(NamedTuple):
    """A call that the VM of a rank made; times are nanoseconds of one clock of the machine."""

    rank: int
    name: str
    begin: int
    end: int


def take_the_cores() -> None:
    """Run before other programs, and the workers likewise.

    Raises
    ------
    IPCError
        The system does not let us.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(5))
    except OSError as error:
        raise IPCError(
            f"no real-time priority: {error.strerror}; it takes root, or CAP_SYS_NICE"
        ) from error


class Stage:
    """Workers that run programs and take the time.

    Parameters
    ----------
    hosts : where they are, as `tvm_ipc.Session` has it.
    """

    def __init__(self, workers: int, device: str = "cpu", hosts: Any = None) -> None:
        ids = gpu.shared(workers) if device == "cuda" else None
        self.session = tvm_ipc.Session(workers, device=device, device_ids=ids, hosts=hosts)
        self.workers = workers
        try:
            self.session.import_python_module(worker.__name__)
            self._tensor, self._seconds, self._events = (
                self.session.get_global_func(name)
                for name in (worker.TENSOR, worker.SECONDS, worker.EVENTS)
            )
            self._settle = self.function(f"runtime.disco.{self.session.backend}.sync_worker")
            self.session.sync()
        except BaseException:
            self.session.close()
            raise

    def __enter__(self) -> Stage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        self.session.close()

    def tensor(self, shape: Sequence[int], dtype: str = "float32", *, shared: bool = False) -> Any:
        """Return a tensor of random numbers in each worker."""
        return self._tensor(tvm_ffi.Shape(shape), dtype, shared, 1)

    def function(self, name: str) -> Any:
        """Return a packed function of the workers."""
        return self.session.get_global_func(name)

    def seconds(
        self, function: Any, given: Iterable[Any], repeats: int = 1, calls: int = 1
    ) -> list[float]:
        """Return how long a call takes the slowest worker, each time."""
        answer = self._seconds(function, self._settle, repeats, calls, *given)
        ranks = [self.session.get(answer, rank) for rank in range(self.workers)]
        return [float(max(times)) for times in zip(*ranks, strict=True)]

    def least(self, function: Any, given: Sequence[Any], repeats: int = 20) -> float:
        """Return the least of some times of a call: what others do on the machine adds to it."""
        once = min(self.seconds(function, given, 3))
        calls = max(1, int(_ENOUGH / once))
        return min(once, *self.seconds(function, given, repeats if once < _LONG else 2, calls))

    def turns(
        self, programs: Mapping[str, tuple[Any, Sequence[Any]]], rounds: int, calls: int = 1
    ) -> dict[str, list[float]]:
        """Let programs take turns; return the seconds of each by round.

        Who begins changes from round to round.
        """
        times: dict[str, list[float]] = {name: [] for name in programs}
        names = list(programs)
        for function, given in programs.values():
            self.seconds(function, given)  # allocates, and fills caches
        for number in range(rounds):
            at = number % len(names)
            for name in [*names[at:], *names[:at]]:
                function, given = programs[name]
                times[name] += self.seconds(function, given, 1, calls)
        return times

    def events(self, program: Any, name: str, given: Iterable[Any]) -> list[Event]:
        """Return what each worker's VM does in one call, by begin."""
        answer = self._events(program, name, *given)
        found = [
            Event(rank, *event)
            for rank in range(self.workers)
            for event in json.loads(self.session.get(answer, rank).tobytes())
        ]
        return sorted(found, key=lambda event: (event.begin, -event.end))
