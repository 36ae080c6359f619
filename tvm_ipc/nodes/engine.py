# SPDX-License-Identifier: Apache-2.0
"""The engine of a node: moves what its ranks have posted to other nodes, and what comes to them.

Ranks post messages in shared memory (`csrc/core/wire.h`); a thread of the node's agent takes them,
gives them to a transport (`mpi_transport.py`), and says when each is done. Bytes go straight out of
the ranks' memory and into it.

When the session has recovered from an error, messages of before may still be on their way. All
engines do then what follows, once for each recovery, in order: they take back their receives, tell
each other how many messages they have sent, and receive those that are missing into a bin. Then
ranks may post again (`flushed`).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any, Final, Protocol

import numpy as np

#: The most messages that are taken at a time.
_MOST: Final = 256
#: Seconds in which the processor is given to others and back while nothing moves, and after that
#: how long the engine sleeps: the longer, the longer nothing has moved.
_YIELD_SECONDS: Final = 500e-6
_SHORTEST_SLEEP: Final = 20e-6
_LONGEST_SLEEP: Final = 500e-6
#: How often somebody who has nothing to do looks whether to stop.
_ROUND: Final = 1.0
#: core/engine_wire.h: WireWork; disco/node_wire.h: Ended.
WORK: Final = np.dtype(
    [(name, "i4") for name in ("rank", "request", "sends", "peer", "tag", "generation")]
    + [(name, "u8") for name in ("address", "bytes")]
)
ENDED: Final = np.dtype([("rank", "i4"), ("request", "i4"), ("came", "u8")])


class Transport(Protocol):
    """What moves messages between nodes. One thread uses it."""

    @property
    def busy(self) -> int:
        """What is under way."""

    def send(self, key: Any, peer: int, tag: int, address: int, count: int) -> None:
        """Begin to send bytes; messages of one tag to a node arrive in this order."""

    def receive(self, key: Any, peer: int, tag: int, address: int, room: int) -> None:
        """Begin to receive a message of at most so many bytes."""

    def progress(self) -> list[tuple[Any, int]]:
        """Return the keys of those that have ended since, and how many bytes each had."""

    def flush(self, generation: int, stopped: Callable[[], bool]) -> bool:
        """Return when nothing is under way, here and towards here; false if it was stopped."""


class Wire(Protocol):
    """The engine's side of the wire."""

    def take(self) -> list[tuple[int, ...]]:
        """Return what was posted since, as tuples like `WORK`."""

    def done(self, ended: list[tuple[Any, int]]) -> None:
        """Say that messages have ended: of which rank and request, and the bytes that came."""

    def sleep(self, seconds: float) -> None:
        """Sleep until something is posted."""

    def ring(self) -> None:
        """End a sleep."""

    @property
    def generation(self) -> int:
        """How often the session has recovered."""

    @property
    def flushed(self) -> int:
        """The last recovery that the engine is done with."""

    @flushed.setter
    def flushed(self, generation: int) -> None: ...


class NodeWire:
    """The wire of a node whose hub is open in this process.

    Parameters
    ----------
    handle : `NodeHub.handle`.
    """

    def __init__(self, handle: Any) -> None:
        import tvm_ffi

        native = tvm_ffi.get_global_func
        self._wire = native("tvm_ipc.node.wire")(handle)
        self._take, self._done = native("tvm_ipc.node.take"), native("tvm_ipc.node.done")
        self._sleep, self._ring = native("tvm_ipc.node.sleep"), native("tvm_ipc.node.ring")
        self._generation = native("tvm_ipc.node.generation")
        self._flushed = native("tvm_ipc.node.flushed")
        self._set_flushed = native("tvm_ipc.node.set_flushed")
        self._works = np.zeros(_MOST, WORK)
        self._ended = np.zeros(_MOST, ENDED)

    def take(self) -> list[tuple[int, ...]]:
        """Return what was posted since, as tuples like `WORK`."""
        count = self._take(self._wire, self._works.ctypes.data, _MOST)
        return self._works[:count].tolist() if count else []

    def done(self, ended: list[tuple[Any, int]]) -> None:
        """Say that messages have ended."""
        for start in range(0, len(ended), _MOST):
            some = ended[start : start + _MOST]
            self._ended[: len(some)] = [(*key, came) for key, came in some]
            self._done(self._wire, self._ended.ctypes.data, len(some))

    def sleep(self, seconds: float) -> None:
        """Sleep until something is posted."""
        self._sleep(self._wire, seconds)

    def ring(self) -> None:
        """End a sleep; any thread."""
        self._ring(self._wire)

    @property
    def generation(self) -> int:
        """How often the session has recovered."""
        return int(self._generation(self._wire))

    @property
    def flushed(self) -> int:
        """The last recovery that the engine is done with."""
        return int(self._flushed(self._wire))

    @flushed.setter
    def flushed(self, generation: int) -> None:
        self._set_flushed(self._wire, generation)


class Engine:
    """A thread that does all of it, from now on until `close`.

    Parameters
    ----------
    transport : makes what moves messages, in the thread.
    """

    def __init__(self, wire: Wire, transport: Callable[[], Transport]) -> None:
        self._wire = wire
        self._stop = False
        #: What ended the thread; nothing moves any more then.
        self.error: Exception | None = None
        self._thread = threading.Thread(
            target=self._run, args=(transport,), name="tvm_ipc engine", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End the thread; what is under way stays where it is."""
        self._stop = True
        self._wire.ring()
        self._thread.join()

    def _run(self, transport: Callable[[], Transport]) -> None:
        try:
            self._serve(transport())
        except Exception as error:
            self.error = error

    def _serve(self, transport: Transport) -> None:
        wire = self._wire
        flushed = wire.flushed  # nobody else sets it
        moved = time.perf_counter()
        while not self._stop:
            for generation in range(flushed + 1, wire.generation + 1):
                if not transport.flush(generation, lambda: self._stop):
                    return
                wire.flushed = flushed = generation
            works = wire.take()
            for rank, request, sends, peer, tag, _, address, count in works:
                begin = transport.send if sends else transport.receive
                begin((rank, request), peer, tag, address, count)
            ended = transport.progress() if transport.busy else []
            if ended:
                wire.done(ended)
            now = time.perf_counter()
            if works or ended:
                moved = now
            elif transport.busy:
                pause(now - moved, wire.sleep)
            elif now - moved < _YIELD_SECONDS:  # who has just got a message soon posts another
                os.sched_yield()
            else:
                wire.sleep(_ROUND)
                moved = time.perf_counter()


def pause(since: float, sleep: Callable[[float], object]) -> None:
    """Leave the processor to others for a moment, longer if nothing has moved for longer."""
    if since < _YIELD_SECONDS:
        os.sched_yield()
    else:
        sleep(min(_LONGEST_SLEEP, max(_SHORTEST_SLEEP, since / 16)))
