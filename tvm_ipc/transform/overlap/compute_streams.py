# SPDX-License-Identifier: Apache-2.0
"""Switches between the streams of a GPU on which chunks are computed: chunk i on stream i % n.

With 2 streams, the bindings of 3 chunks become

    set_stream(1); wait_stream(0); set_stream(0)   # fork: stream 1 starts where stream 0 is
    <start of chunk 0>
    set_stream(1); <start of chunk 1>
    set_stream(0); <wait, and operators of chunk 0>; <start of chunk 2>
    set_stream(1); <wait, and operators of chunk 1>
    set_stream(0); <wait, and operators of chunk 2>
    set_stream(0); wait_stream(1)                  # join

Everything of a chunk is on its stream. So the buffer that the chunk i is received into is free when
chunk i - n, on the same stream, no longer needs it, and the streams need no other events.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import relax

from tvm_ipc.comm.stream_call_builders import fork, join, set_stream
from tvm_ipc.packed_functions import MAX_STREAMS


class ComputeStreams:
    """Emits the calls that send the bindings of each chunk to its stream.

    Attributes
    ----------
    number : the number of streams; 1 if the chunks stay on the stream of the program.
    """

    def __init__(self, emit: Callable[[relax.Call], object], number: int) -> None:
        self.number = number
        self._emit = emit
        self._current = 0

    def fork(self, number: int | None = None) -> None:
        """Begin: let the other streams wait for the stream of the program."""
        self._emit_all(fork(self._limit(number)))
        self._current = 0

    def use(self, chunk: int) -> None:
        """Send what follows to the stream of a chunk."""
        stream = chunk % self.number
        if stream != self._current:
            self._emit(set_stream(stream))
            self._current = stream

    def join(self, number: int | None = None) -> None:
        """End: return to the stream of the program, which waits for the others."""
        self._emit_all(join(self._limit(number)))
        self._current = 0

    def _limit(self, number: int | None) -> int:
        return self.number if number is None else min(number, self.number)

    def _emit_all(self, calls: list[relax.Call]) -> None:
        for call in calls:
            self._emit(call)


def number_of_streams(at_a_time: int, *, used: bool) -> int:
    """Return the number of streams for chunks; 1 if they stay on the stream of the program."""
    return at_a_time if used and at_a_time <= MAX_STREAMS else 1


def describe(number: int) -> str:
    """Return the streams of the chunks as the report prints them, after the schedule."""
    return f", computed on {number} streams" if number > 1 else ""
