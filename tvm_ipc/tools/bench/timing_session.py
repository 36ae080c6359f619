# SPDX-License-Identifier: Apache-2.0
"""Time programs in the workers of a session."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, NamedTuple

import tvm_ffi

import tvm_ipc
from tvm_ipc.errors import IPCError
from tvm_ipc.tools import gpu_assignment
from tvm_ipc.tools.bench import worker_timing_functions

#: Target length of a measurement, in seconds: long enough to hide the clock's overhead, short
#: enough that some measurements see no interference from other programs.
_MEASUREMENT_SECONDS: Final = 5e-5
#: Calls that take longer than this, in seconds, are repeated less often.
_SLOW_CALL_SECONDS: Final = 0.02


class Event(NamedTuple):
    """A call by the VM of a rank; times are nanoseconds of the monotonic clock."""

    rank: int
    name: str
    begin: int
    end: int


def use_real_time_priority() -> None:
    """Give this process and its future workers real-time priority.

    Raises
    ------
    IPCError
        The system does not permit it.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(5))
    except OSError as error:
        raise IPCError(
            f"--real-time: the system refused real-time priority: {error.strerror}; run as root or "
            "with CAP_SYS_NICE"
        ) from error


class TimingSession:
    """Workers that run programs and measure their time.

    Parameters
    ----------
    hosts : the nodes of the workers, as for `tvm_ipc.Session`.
    """

    def __init__(self, workers: int, device: str = "cpu", hosts: Any = None) -> None:
        ids = None
        if device == "cuda":
            gpu_assignment.require_gpus("bench")
            ids = gpu_assignment.gpu_of_workers(workers)
        self.session = tvm_ipc.Session(workers, device=device, device_ids=ids, hosts=hosts)
        self.workers = workers
        try:
            self.session.import_python_module(worker_timing_functions.__name__)
            self._tensor, self._seconds, self._events = (
                self.session.get_global_func(name)
                for name in (
                    worker_timing_functions.TENSOR,
                    worker_timing_functions.SECONDS,
                    worker_timing_functions.EVENTS,
                )
            )
            self._synchronize = self.function(f"runtime.disco.{self.session.backend}.sync_worker")
            self.session.sync()
        except BaseException:
            self.session.close()
            raise

    def __enter__(self) -> TimingSession:
        """Return the session, which is already open."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        """Close the session."""
        self.session.close()

    def tensor(self, shape: Sequence[int], dtype: str = "float32", *, shared: bool = False) -> Any:
        """Return a tensor of random numbers in each worker; `shared` puts it into `ipc_memory`."""
        return self._tensor(tvm_ffi.Shape(shape), dtype, shared, 1)

    def function(self, name: str) -> Any:
        """Return a packed function of the workers by its name."""
        return self.session.get_global_func(name)

    def seconds(
        self, function: Any, arguments: Iterable[Any], repeats: int = 1, calls: int = 1
    ) -> list[float]:
        """Return the seconds of a call on the slowest worker, for each repetition."""
        seconds = self._seconds(function, self._synchronize, repeats, calls, *arguments)
        ranks = [self.session.get(seconds, rank) for rank in range(self.workers)]
        return [float(max(times)) for times in zip(*ranks, strict=True)]

    def least(self, function: Any, arguments: Sequence[Any], repeats: int = 20) -> float:
        """Return the shortest time of a call, because interference only adds to it."""
        first = min(self.seconds(function, arguments, 3))
        calls = max(1, int(_MEASUREMENT_SECONDS / first))
        repeats = repeats if first < _SLOW_CALL_SECONDS else 2
        return min(first, *self.seconds(function, arguments, repeats, calls))

    def interleaved(
        self, programs: Mapping[str, tuple[Any, Sequence[Any]]], rounds: int, calls: int = 1
    ) -> dict[str, list[float]]:
        """Run programs alternately; return the seconds of each by round.

        Each round starts with another program.
        """
        times: dict[str, list[float]] = {name: [] for name in programs}
        names = list(programs)
        for function, arguments in programs.values():
            self.seconds(function, arguments)  # allocates memory and fills caches
        for round_number in range(rounds):
            start = round_number % len(names)
            for name in [*names[start:], *names[:start]]:
                function, arguments = programs[name]
                times[name] += self.seconds(function, arguments, 1, calls)
        return times

    def events(self, program: Any, name: str, arguments: Iterable[Any]) -> list[Event]:
        """Return the calls of each worker's VM during one call, ordered by their start."""
        traces = self._events(program, name, *arguments)
        events = [
            Event(rank, *event)
            for rank in range(self.workers)
            for event in json.loads(self.session.get(traces, rank).tobytes())
        ]
        return sorted(events, key=lambda event: (event.begin, -event.end))
