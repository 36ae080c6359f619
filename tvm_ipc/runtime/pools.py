# SPDX-License-Identifier: Apache-2.0
"""What a session asks of its workers that are processes, wherever they are. Imports no TVM.

`processes` has those of this machine. Those of several machines are started by what stands above
this folder: the package tells it to `beyond` when it is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from tvm_ipc.errors import IPCError

if TYPE_CHECKING:
    from tvm_ipc.runtime.config import Config


class Pool(Protocol):
    """The workers of one session but worker 0, which is a thread of the controller."""

    #: How Disco asks for it.
    key: str

    def room(self) -> int:
        """Return how many bytes a worker may leave unread before a write to it waits."""

    def pipes(self, worker_id: int) -> tuple[int, int]:
        """Return the descriptors to read from a worker and to write to it."""

    def check(self) -> None:
        """Raise if something has ended without which workers cannot join."""

    def ended(self, wait: Iterable[int] = ()) -> dict[int, int]:
        """Return the exit codes of the workers that are no more, or about to be."""

    def alarming(self) -> bool:
        """Return whether something has ended, which no hub tells of, without which none goes on."""

    def cause(self) -> tuple[str, tuple[int, ...]] | None:
        """Return what is known of deaths, and the ranks, better than from exit codes; or None.

        The ranks are empty where only hubs know them. Details come after the first line.
        """

    def kill(self) -> None:
        """Kill what still runs."""

    def join(self, seconds: float) -> None:
        """Wait for all workers to end; kill those that take longer."""

    def mute(self) -> None:
        """Let what Disco still writes go nowhere: a write to a dead worker's pipe would throw."""

    def finish(self, seconds: float | None = None) -> None:
        """End what else was started, which has so long; every worker has ended."""

    def forget(self) -> None:
        """Close the pipes; Disco calls this when its session object ends."""


class PoolOfNodes(Pool, Protocol):
    """Workers on several nodes, each of which has its own hub."""

    #: How many threads each worker may use.
    threads: int
    #: Of each node, the first rank.
    first_ranks: tuple[int, ...]

    @property
    def facts(self) -> tuple[dict[str, Any], ...]:
        """What each node is: its host, address, cores and ranks."""

    def where(self, rank: int) -> str:
        """Return the node of a worker, as errors name it."""

    def open(self, session: Any, device_ids: Any, timeout: float, room: int) -> None:
        """Open the controller's hub, and invite the workers."""


@dataclass(frozen=True)
class Wanted:
    """The workers that a session wants on nodes.

    Attributes
    ----------
    shape : how many workers, and groups.
    backend : what moves data between them.
    settings : of the session.
    compiler : whether they load all of TVM.
    flat : whether sums across nodes have one machine's bits.
    check : to be called now and then while they start; may raise what ends that.
    """

    shape: tuple[int, int]
    backend: str
    settings: Config
    compiler: bool
    flat: bool
    check: Callable[[], None]


class Hosts(Protocol):
    """Where the nodes of a session are."""

    def __str__(self) -> str:
        """Say it as `repr` of a session does."""

    def machines(self, num_workers: int) -> list[int]:
        """Return the machine of each worker, by the first of its nodes; this one is 0."""

    def start(self, wanted: Wanted) -> PoolOfNodes:
        """Start the workers."""


def _none(where: str, hosts: Any, num_workers: int) -> Hosts:
    raise IPCError(f"{where}: sessions over several machines want the package tvm_ipc whole")


#: Reads what a caller gives as `hosts`; the first argument begins the sentence of its errors.
beyond: Callable[[str, Any, int], Hosts] = _none
