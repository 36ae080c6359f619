# SPDX-License-Identifier: Apache-2.0
"""The workers of a session on several nodes, as the session asks about them."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Iterable
from typing import Any, Final

import tvm_ffi

from tvm_ipc.errors import IPCError, WorkerDiedError
from tvm_ipc.nodes.controller import Nodes
from tvm_ipc.runtime.pools import PoolOfNodes
from tvm_ipc.runtime.processes import new_key, offer, withdraw

_native = tvm_ffi.get_global_func
_open_nodes = _native("tvm_ipc.session.open_nodes")
_keep_from_children = _native("tvm_ipc.keep_from_children")
_close_kept = _native("tvm_ipc.close_kept")

#: Seconds in which an agent tells that a worker of its node has ended, or is heard to have ended
#: itself.
_CAUSE_SECONDS: Final = 1.5
_ROUND: Final = 0.02
#: Seconds between two looks for what has ended.
_LOOK_SECONDS: Final = 0.1
#: What a connection takes that nobody reads: each short command in it may be a packet of its own,
#: for which the system counts fifteen times its bytes.
_BUFFER: Final = 1 << 20
_SHARE: Final = 16


class NodePool(PoolOfNodes):
    """Worker processes on nodes, which agents have started.

    Parameters
    ----------
    nodes : what is the pool's from now on.
    """

    def __init__(self, nodes: Nodes) -> None:
        self.key = new_key()
        self.threads = min(node.threads for node in nodes.nodes)
        ranks = nodes.settings.ranks
        self.first_ranks = tuple(sum(ranks[:node]) for node in range(len(ranks)))
        self._nodes = nodes
        self._lock = threading.RLock()
        self._alarming = False
        self._looked = time.monotonic()
        for connection in nodes.pipes.values():
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        nodes.keep(_keep_from_children, _close_kept)
        offer(self)

    def open(self, session: Any, device_ids: Any, timeout: float, room: int) -> None:
        """Open the controller's hub, and invite the workers."""
        nodes = self._nodes
        links = [nodes.links.pop(node.number).detach() for node in nodes.nodes]
        _open_nodes(
            session,
            nodes.settings.backend,
            device_ids,
            timeout,
            room,
            list(nodes.settings.names),
            tvm_ffi.Shape(nodes.settings.ranks),
            [node.invitation for node in nodes.nodes],
            tvm_ffi.Shape(links),
        )

    @property
    def facts(self) -> tuple[dict[str, Any], ...]:
        """What each node is: its host, address, cores and ranks."""
        settings = self._nodes.settings
        ends = itertools.accumulate(settings.ranks)
        return tuple(
            {
                **{name: (node.facts or {}).get(name) for name in ("host", "address", "cores")},
                "ranks": tuple(range(end - count, end)),
            }
            for node, count, end in zip(self._nodes.nodes, settings.ranks, ends, strict=True)
        )

    def where(self, rank: int) -> str:
        """Return the node of a worker, as errors name it."""
        return self._nodes.where(rank)

    def room(self) -> int:
        """Return how many bytes a worker may leave unread before a write to it waits."""
        sizes = [
            connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
            for connection in self._nodes.pipes.values()
        ]
        return min(sizes, default=_BUFFER) // _SHARE

    def pipes(self, worker_id: int) -> tuple[int, int]:
        """Return the descriptor to read from a worker and to write to it, twice."""
        connection = self._nodes.pipes[worker_id].fileno()
        return connection, connection

    def check(self) -> None:
        """Raise if an agent or the launcher has ended."""
        with self._lock:
            self._nodes.check()

    def ended(self, wait: Iterable[int] = ()) -> dict[int, int]:
        """Return the exit codes of the workers that are no more, as far as agents have told."""
        with self._lock:
            self._nodes.hear()
            return dict(self._nodes.ended)

    def alarming(self) -> bool:
        """Return whether an agent or the launcher has ended; looks for it now and then."""
        if not self._alarming and time.monotonic() > self._looked + _LOOK_SECONDS:
            self._looked = time.monotonic()
            try:
                self.check()
            except WorkerDiedError:
                # Of a worker's death the hubs tell, with what else they know.
                self._alarming = not self._nodes.ended
            except IPCError:
                self._alarming = True
        return self._alarming

    def cause(self) -> tuple[str, tuple[int, ...]] | None:
        """Return who died, and where; the ranks are empty where only their hubs know them."""
        end = time.monotonic() + _CAUSE_SECONDS
        while time.monotonic() < end:
            try:
                self.check()
            except WorkerDiedError as error:
                return str(error), error.ranks
            except IPCError as error:
                return str(error), ()
            time.sleep(_ROUND)
        return None

    def kill(self) -> None:
        """Kill the workers that agents can reach."""
        with self._lock:
            self._nodes.kill()

    def join(self, seconds: float) -> None:
        """Wait for all workers to end; kill those that take longer."""
        end = time.monotonic() + seconds
        while self._any_left() and time.monotonic() < end:
            time.sleep(_ROUND)
        if self._any_left():
            self.kill()

    def _any_left(self) -> bool:
        with self._lock:
            self._nodes.hear()
            return not self._nodes.gone and len(self._nodes.ended) < len(self._nodes.pipes)

    def mute(self) -> None:
        """Let what Disco still writes go nowhere: a write to a dead worker would throw."""
        with self._lock:
            self._nodes.mute()

    def finish(self, seconds: float | None = None) -> None:
        """End agents and launcher, which have so long; every worker has ended."""
        if seconds is None:
            self._nodes.close()
        else:
            self._nodes.close(seconds)

    def forget(self) -> None:
        """Close the descriptors of the pipes, once nobody uses them."""
        if withdraw(self):
            self._nodes.forget()
