# SPDX-License-Identifier: Apache-2.0
"""Find the parts of a function that run on several streams of a GPU.

    set_stream(1); wait_stream(0)     # the region begins
    matmul(a, w, c)                   # stream 1
    set_stream(0)
    matmul(b, w, d)                   # stream 0
    wait_stream(1)                    # the region ends: stream 0 has waited for all others
    add(c, d, e)

Within a region, only what is on one stream runs in the order of the program.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tvm import relax, tirx

from tvm_ipc.analysis.program_order import Linear, Region, Step
from tvm_ipc.packed_functions import Function, find


@dataclass(eq=False)
class StreamRegion:
    """The events from the first call that leaves stream 0 to the one after which all is on it."""

    first: Step
    last: Step  #: the last binding of its region if the streams are not joined
    #: The events from which on a stream is current, in order, and its number (None: unknown).
    switches: list[tuple[int, int | None]]

    @property
    def begin(self) -> int:
        """The first event."""
        return self.first.entry

    @property
    def end(self) -> int:
        """The last event."""
        return self.last.index

    def holds(self, event: int) -> bool:
        """Return whether an event is in the region."""
        return self.begin <= event <= self.end

    def stream_of(self, events: Iterable[int]) -> int | None:
        """Return the stream of all of some events; None if they are on several, or it is unknown.

        Events outside of the region are on several streams.
        """
        streams = {self._stream_at(event) for event in events}
        return streams.pop() if len(streams) == 1 else None

    def _stream_at(self, event: int) -> int | None:
        if not self.holds(event):
            return None
        number = bisect_right(self.switches, event, key=lambda switch: switch[0])
        return self.switches[number - 1][1] if number else 0


def find_stream_regions(program: Linear) -> list[StreamRegion]:
    """Return the regions of a function in order; a region in a branch of another is part of it.

    If a program goes on on a stream that has not waited for stream 0 since the last join, the
    region begins where the function or the branch does.
    """
    calls = {step: called for step in program.points if (called := stream_call(step))}
    if not calls:
        return []
    found: list[StreamRegion] = []
    _Search(program, calls, found).search(program.body)
    return sorted(found, key=lambda region: region.begin)


class _Search:
    """Finds the regions among the bindings of a function body or a branch, and in branches."""

    def __init__(
        self,
        program: Linear,
        calls: dict[Step, tuple[Function, int | None]],
        found: list[StreamRegion],
    ) -> None:
        self._program, self._calls, self._found = program, calls, found
        self._own: list[StreamRegion] = []  #: without those in branches
        self._current: StreamRegion | None = None
        self._stream: int | None = 0
        self._running: set[int | None] = set()  #: for which stream 0 has not waited
        self._forked: set[int | None] = {0}  #: which have waited for stream 0
        self._is_unknown = False  #: whether the streams of the current region are unknown

    def search(self, region: Region) -> None:
        """Add the regions of a function body or a branch."""
        steps = self._program.steps[region]
        for number, step in enumerate(steps):
            if step.branches:
                self._enter(step)
            elif step in self._calls:
                function, stream = self._calls[step]
                if function.sets_stream:
                    self._set(step, stream, steps, number)
                elif self._stream == 0 and stream is not None:
                    self._running.discard(stream)
            if self._current is not None and self._stream == 0 and not self._running:
                self._current.last, self._current = step, None
                self._forked, self._is_unknown = {0}, False
        if self._current is not None:
            self._current.last = steps[-1]

    def _enter(self, step: Step) -> None:
        """Search branches, which are not searched if they are part of the current region."""
        if self._current is None:
            for branch in step.branches:
                _Search(self._program, self._calls, self._found).search(branch)
        elif any(branch.holds(call.entry) for branch in step.branches for call in self._calls):
            self._running.add(None)
            self._stream = None  # it depends on the branch
            self._become_unknown(self._current)

    def _set(self, step: Step, stream: int | None, steps: list[Step], number: int) -> None:
        """Follow a call that sets the stream."""
        self._stream = stream
        if self._current is None and stream == 0:
            return
        if self._current is None:
            self._current = StreamRegion(step, step, [])
            self._own.append(self._current)
            self._found.append(self._current)
        if stream not in self._forked:
            if stream is None or not self._waits(steps[number + 1 : number + 2]):
                self._begin_with(steps[0])
            self._forked.add(stream)
        if stream != 0:
            self._running.add(stream)
        self._current.switches.append((step.entry, None if self._is_unknown else stream))

    def _waits(self, steps: list[Step]) -> bool:
        """Return whether the first of some steps waits for a stream that is after stream 0."""
        call = self._calls.get(steps[0]) if steps else None
        return call is not None and not call[0].sets_stream and call[1] in self._forked

    def _begin_with(self, first: Step) -> None:
        """Let the current region begin with a step; it includes all regions before it."""
        assert self._current is not None, "a region is open"
        self._current.first = first
        self._become_unknown(self._current)
        for region in self._own[:-1]:
            self._found.remove(region)
        self._own = [self._current]

    def _become_unknown(self, region: StreamRegion) -> None:
        self._is_unknown = True
        region.switches = [(region.begin, None)]


def stream_call(step: Step) -> tuple[Function, int | None] | None:
    """Return the function that a step calls to set or order streams, and the number of the stream.

    The number is None if it is not a constant.
    """
    value: Any = step.value
    if type(value) is not relax.Call or type(value.op) is not relax.ExternFunc:
        return None
    function = find(str(value.op.global_symbol))
    if function is None or not function.orders_streams:
        return None
    number = value.args[0]
    return function, int(number.value) if isinstance(number, tirx.IntImm) else None
