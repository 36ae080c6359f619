# SPDX-License-Identifier: Apache-2.0
"""The worker pool of a session on several nodes."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Iterable
from typing import Any, Final

import tvm_ffi

from tvm_ipc.errors import IPCError, WorkerDiedError
from tvm_ipc.nodes.start_and_watch_agents import Nodes
from tvm_ipc.runtime.process_pool import any_hung_up, new_key, offer, withdraw
from tvm_ipc.runtime.worker_pool_interface import PoolOfNodes

_native = tvm_ffi.get_global_func
_open_nodes = _native("tvm_ipc.session.open_nodes")
_keep_from_children = _native("tvm_ipc.keep_from_children")
_close_kept = _native("tvm_ipc.close_kept")

#: Seconds within which an agent reports the end of a worker, or its own end is noticed.
_CAUSE_SECONDS: Final = 1.5
_ROUND: Final = 0.02
#: Seconds between two checks for processes that have ended.
_CHECK_SECONDS: Final = 0.1
#: The bytes of a connection's send buffer.
_BUFFER: Final = 1 << 20
#: The share of the buffer that unread commands may fill. Each short command may be a packet, for
#: which the system counts up to fifteen times its bytes.
_SHARE: Final = 16


class NodePool(PoolOfNodes):
    """Worker processes on nodes, which agents have started.

    Parameters
    ----------
    nodes : the started nodes. The pool takes ownership of them.
    """

    def __init__(self, nodes: Nodes) -> None:
        self.key = new_key()
        self.threads = min(node.threads for node in nodes.nodes)
        ranks = nodes.settings.ranks
        self.first_ranks = tuple(sum(ranks[:node]) for node in range(len(ranks)))
        self._nodes = nodes
        self._lock = threading.RLock()
        self._alarming = False
        self._checked = time.monotonic()
        for connection in nodes.pipes.values():
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        nodes.keep(_keep_from_children, _close_kept)
        offer(self)

    def open(self, session: Any, device_ids: Any, timeout: float, room: int) -> None:
        """Open the controller's session server, and connect it to those of the nodes."""
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
        """The host, address, cores and ranks of each node."""
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
        """Return the name of a worker's node, for error messages."""
        return self._nodes.where(rank)

    def room(self) -> int:
        """Return how many bytes of commands a worker may leave unread before a write blocks."""
        sizes = [
            connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
            for connection in self._nodes.pipes.values()
        ]
        return min(sizes, default=_BUFFER) // _SHARE

    def pipes(self, worker_id: int) -> tuple[int, int]:
        """Return the descriptors to read from and to write to a worker, which are the same."""
        connection = self._nodes.pipes[worker_id].fileno()
        return connection, connection

    def check(self) -> None:
        """Raise if an agent or the launcher has ended."""
        with self._lock:
            self._nodes.check()

    def ended(self, wait: Iterable[int] = ()) -> dict[int, int]:
        """Return the exit codes of the workers whose end the agents have reported."""
        with self._lock:
            self._nodes.update()
            return dict(self._nodes.ended)

    def hung_up(self) -> bool:
        """Return whether the connection to a worker has ended at its other end."""
        return any_hung_up(connection.fileno() for connection in self._nodes.pipes.values())

    def alarming(self) -> bool:
        """Return whether an agent or the launcher has ended; checked every `_CHECK_SECONDS`."""
        if not self._alarming and time.monotonic() > self._checked + _CHECK_SECONDS:
            self._checked = time.monotonic()
            try:
                self.check()
            except WorkerDiedError:
                # The session servers report the death of a worker themselves, with more details.
                self._alarming = not self._nodes.ended
            except IPCError:
                self._alarming = True
        return self._alarming

    def cause(self) -> tuple[str, tuple[int, ...]] | None:
        """Return a description of the death, and the ranks that died, if they are known."""
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
        """Ask the agents to kill their workers."""
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
            self._nodes.update()
            return not self._nodes.gone and len(self._nodes.ended) < len(self._nodes.pipes)

    def mute(self) -> None:
        """Discard what Disco still writes: a write to a dead worker would throw."""
        with self._lock:
            self._nodes.mute()

    def finish(self, seconds: float | None = None) -> None:
        """End agents and launcher, which have some seconds; every worker has ended."""
        if seconds is None:
            self._nodes.close()
        else:
            self._nodes.close(seconds)

    def forget(self) -> None:
        """Close the descriptors of the pipes, when they are not used any more."""
        if withdraw(self):
            self._nodes.forget()
