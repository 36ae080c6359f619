# SPDX-License-Identifier: Apache-2.0
"""Messages between nodes by MPI, through mpi4py, which leaves Python to others while it works.

Node k is rank k. A message that is longer than its receive has room for is an error of the ranks'
protocol, which MPI tells. Nothing here waits in MPI: all is begun, and looked at.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
from mpi4py import MPI

from tvm_ipc.errors import IPCError
from tvm_ipc.nodes.engine import pause

#: The longest message, far above what there is: MPI counts in 32 bits.
_MOST_BYTES: Final = 1 << 30
_COUNTS_TAG: Final = 1


class MpiTransport:
    """MPI among the agents. All calls come from one thread.

    Parameters
    ----------
    world : of the agents.
    largest_tag : what MPI has to be able to tell apart.
    """

    def __init__(self, world: Any, largest_tag: int) -> None:
        if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
            raise IPCError(
                f"{version()} grants the thread level {MPI.Query_thread()}, and an agent needs "
                f"{MPI.THREAD_SERIALIZED} (serialized): it calls MPI from a thread of its own"
            )
        most = world.Get_attr(MPI.TAG_UB)
        if most < largest_tag:
            raise IPCError(
                f"{version()} has tags up to {most}, and messages between nodes need "
                f"{largest_tag}: use another MPI, such as that of pip install 'tvm-ipc[mpi]'"
            )
        self._comm = world.Dup()
        self._control = world.Dup()
        for comm in (self._comm, self._control):
            comm.Set_errhandler(MPI.ERRORS_RETURN)
        #: Of each node, how many messages were sent to it, and have come from it.
        self._sent = [0] * world.size
        self._came = [0] * world.size
        self._requests: list[Any] = []
        #: Of each request its key, the node that the message comes from (-1: it is sent), and how
        #: many bytes it has, or has room for.
        self._messages: list[tuple[Any, int, int]] = []
        self._statuses: list[Any] = []

    @property
    def busy(self) -> int:
        """What is under way."""
        return len(self._requests)

    def send(self, key: Any, peer: int, tag: int, address: int, count: int) -> None:
        """Begin to send bytes."""
        data = MPI.buffer.fromaddress(address, _checked(count), readonly=True)
        self._add(self._comm.Isend([data, MPI.BYTE], peer, tag), key, -1, count)
        self._sent[peer] += 1

    def receive(self, key: Any, peer: int, tag: int, address: int, room: int) -> None:
        """Begin to receive a message of at most so many bytes."""
        data = MPI.buffer.fromaddress(address, _checked(room))
        self._add(self._comm.Irecv([data, MPI.BYTE], peer, tag), key, peer, room)

    def progress(self) -> list[tuple[Any, int]]:
        """Return the keys of those that have ended since, and how many bytes each had."""
        if not self._requests:
            return []
        ended = MPI.Request.Testsome(self._requests, self._statuses)
        if not ended:
            return []
        found = []
        for which, status in zip(ended, self._statuses, strict=False):
            key, source, count = self._messages[which]
            if source >= 0:
                if status.Is_cancelled():
                    continue
                count = status.Get_count(MPI.BYTE)
                self._came[source] += 1
            found.append((key, count))
        gone = set(ended)
        left = [i for i in range(len(self._requests)) if i not in gone]
        self._requests = [self._requests[i] for i in left]
        self._messages = [self._messages[i] for i in left]
        return found

    def flush(self, generation: int, stopped: Callable[[], bool]) -> bool:
        """Return when nothing is under way, here and towards here; false if it was stopped.

        MPI cannot take back a send, so whom it was meant for receives it: from each node as many
        messages as that one has sent. They come in the order in which they were sent, before those
        of the next generation.
        """
        for request, (_, source, _) in zip(self._requests, self._messages, strict=True):
            if source >= 0:
                request.Cancel()
        others = [node for node in range(self._comm.size) if node != self._comm.rank]
        told = np.array([(generation, sent) for sent in self._sent], np.int64)
        heard = np.zeros_like(told)
        asked = [self._control.Irecv(heard[node], node, _COUNTS_TAG) for node in others]
        asked += [self._control.Isend(told[node], node, _COUNTS_TAG) for node in others]
        # All looks are made in every round: what one waits for moves only while others look.
        counted = False
        for _ in _rounds(stopped):
            self.progress()
            counted = counted or MPI.Request.Testall(asked)
            if not counted:
                continue
            for node in others:
                if heard[node][0] != generation:
                    raise IPCError(
                        f"node {node} has recovered {heard[node][0]} times, and node "
                        f"{self._comm.rank} {generation} times"
                    )
            # A receive that was taken back and yet got its message counts as soon as it has ended.
            missing = [node for node in others if self._came[node] < heard[node][1]]
            if any(source >= 0 for _, source, _ in self._messages):
                continue
            for node in missing:
                self._drop(node, int(heard[node][1]))
            if not self.busy and not missing:
                return True
        return False

    def _drop(self, node: int, sent: int) -> None:
        """Receive into a bin what has come from a node, as far as it belongs there."""
        while self._came[node] < sent:
            status = MPI.Status()
            message = self._comm.Improbe(node, MPI.ANY_TAG, status)
            if message is None:
                return
            message.Recv([bytearray(status.Get_count(MPI.BYTE)), MPI.BYTE])
            self._came[node] += 1

    def _add(self, request: Any, key: Any, source: int, count: int) -> None:
        self._requests.append(request)
        self._messages.append((key, source, count))
        if len(self._statuses) < len(self._requests):
            self._statuses.append(MPI.Status())


def version() -> str:
    """Return the name of the MPI that is here."""
    return str(MPI.Get_library_version()).split(",")[0].strip()


def _checked(count: int) -> int:
    if not 0 <= count <= _MOST_BYTES:
        raise IPCError(f"a message between nodes has {count} bytes; it may have {_MOST_BYTES}")
    return count


def _rounds(stopped: Callable[[], bool]) -> Iterator[None]:
    start = time.perf_counter()
    while not stopped():
        yield
        pause(time.perf_counter() - start, time.sleep)
