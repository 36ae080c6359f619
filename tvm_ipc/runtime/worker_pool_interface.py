# SPDX-License-Identifier: Apache-2.0
"""The interface between a session and its worker processes. Imports no TVM.

`process_pool.py` implements it for this machine, and `tvm_ipc.nodes` for several machines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from tvm_ipc.runtime.config import Config

#: Seconds in which the workers of a session must join it.
START_SECONDS: Final = 120.0


class Pool(Protocol):
    """The workers of one session except worker 0, which is a thread of the controller.

    By default, the workers need no other process.
    """

    #: The name by which Disco finds the pool.
    key: str

    def room(self) -> int:
        """Return how many bytes a worker may leave unread before a write to it waits."""

    def check(self) -> None:
        """Raise if a process has ended that workers need to join the session."""
        return

    def ended(self, wait: Iterable[int] = ()) -> dict[int, int]:
        """Return the exit codes of the workers that have ended; wait for some ranks, briefly."""

    def hung_up(self) -> bool:
        """Return whether a worker has closed its end of a pipe, as the end of its process does."""

    def alarming(self) -> bool:
        """Return whether a process that all workers need has ended without a report."""
        return False

    def cause(self) -> tuple[str, tuple[int, ...]] | None:
        """Return a text about the deaths of workers and their ranks; None if only exit codes exist.

        The ranks are empty if only session servers know them. Details follow the first line.
        """
        return None

    def kill(self) -> None:
        """Kill the processes that still run."""

    def join(self, seconds: float) -> None:
        """Wait for all workers to end; kill those that take longer."""

    def mute(self) -> None:
        """Discard what Disco still writes: a write to a dead worker's pipe would throw."""

    def finish(self, seconds: float | None = None) -> None:
        """End all other processes within some seconds; every worker has ended."""
        return

    def forget(self) -> bool:
        """Close the pipes unless Disco destroyed its session; return whether they were open."""


class PoolOfNodes(Pool, Protocol):
    """Workers on several nodes, each of which has its own session server."""

    @property
    def threads(self) -> int:
        """The number of threads that each worker may use."""

    @property
    def first_ranks(self) -> tuple[int, ...]:
        """The first rank of each node."""

    @property
    def facts(self) -> tuple[dict[str, Any], ...]:
        """The host, address, cores and ranks of each node."""

    def where(self, rank: int) -> str:
        """Return the node of a worker, as errors name it."""

    def open(self, session: Any, device_ids: Any, timeout: float, room: int) -> None:
        """Open the controller's session server, and invite the workers."""


@dataclass(frozen=True)
class PoolRequest:
    """A session's request for workers on nodes.

    Attributes
    ----------
    shape : the number of workers and the number of groups.
    backend : what moves data between the workers.
    settings : the settings of the session.
    compiler : whether the workers load all of TVM.
    flat : whether sums across nodes have the same bits as one machine's.
    check : called now and then during the start; an error that it raises ends the start.
    """

    shape: tuple[int, int]
    backend: str
    settings: Config = field(default_factory=Config)
    compiler: bool = False
    flat: bool = False
    check: Callable[[], None] = lambda: None


class Hosts(Protocol):
    """The nodes that a session was opened with."""

    def __str__(self) -> str:
        """Return the phrase that `repr` of a session has for the nodes."""

    def machines(self, num_workers: int) -> list[int]:
        """Return the machine of each worker, as the index of its first node; this machine is 0."""

    def start(self, request: PoolRequest) -> PoolOfNodes:
        """Start the workers."""
