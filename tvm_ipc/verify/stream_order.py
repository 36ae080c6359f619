# SPDX-License-Identifier: Apache-2.0
"""Track which accesses to memory run before which, where a program uses several streams of a GPU.

    set_stream(1); wait_stream(0)
    matmul(x, w, y)                  # after everything that stream 0 has so far
    set_stream(0)
    add(y, y, z)                     # a hazard: it may read y before it is written
    wait_stream(1)

Everything on one stream runs in order. Each access has a time, which grows along the program. A
stream knows for each other stream the time up to which it has waited for that one. An access is
ordered after another one on its own stream, or on a stream that its stream has waited for since.

The requests of a rank are on a stream of their own. Memory that is freed may be allocated again at
once, so the accesses to freed storages count for the next storages. Memory of the caller was last
used on stream 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from tvm_ipc.verify.relax_as_plain_statements import Statement
from tvm_ipc.verify.storage_and_buffer_types import Memory, Storage

#: The stream of a program, and the stream of the requests of a rank.
PROGRAM, REQUESTS = 0, -1

#: By stream, the time up to which something has waited for it.
Clock = Mapping[int, int]


@dataclass(frozen=True, eq=False)
class Touch:
    """An access to memory on a stream, the last one of its kind."""

    memory: Memory
    writes: bool
    stream: int
    time: int
    step: Statement


def name_of(stream: int) -> str:
    """Return a stream as messages print it."""
    return "the stream of requests" if stream == REQUESTS else f"stream {stream}"


@dataclass(eq=False)
class StreamOrder:
    """The order of accesses at one point of a function, on any path that leads there."""

    current: int = PROGRAM
    time: int = 1  #: of the last access; the caller's are at 1
    seen: dict[int, dict[int, int]] = field(default_factory=dict)  #: by stream, its clock
    last: dict[int, int] = field(default_factory=dict)  #: by stream, the time of its last access
    #: By storage (None: all memory of the caller), stream, memory and kind, in the order of times.
    touches: dict[Storage | None, dict[int, dict[tuple[int, bool], Touch]]] = field(
        default_factory=dict
    )
    freed: dict[int, Touch] = field(default_factory=dict)  #: by stream, the last in freed memory
    #: By storage, the last accesses in the memory that it may have been allocated in.
    before: dict[Storage, dict[int, Touch]] = field(default_factory=dict)

    def copy(self) -> StreamOrder:
        """Return an independent copy."""
        touches = {
            storage: {stream: dict(of_stream) for stream, of_stream in by_stream.items()}
            for storage, by_stream in self.touches.items()
        }
        seen = {stream: dict(clock) for stream, clock in self.seen.items()}
        return StreamOrder(
            self.current,
            self.time,
            seen,
            dict(self.last),
            touches,
            dict(self.freed),
            dict(self.before),
        )

    def join(self, other: StreamOrder) -> None:
        """Become the order after a point at which two paths join."""
        self.time = max(self.time, other.time)
        streams = {PROGRAM, *self.last, *other.last, *self.seen, *other.seen}
        self.seen = {
            stream: {
                awaited: min(
                    order._seen_until(stream, awaited, self.time) for order in (self, other)
                )
                for awaited in streams - {stream}
            }
            for stream in streams
        }
        for stream, time in other.last.items():
            self.last[stream] = max(time, self.last.get(stream, 0))
        for storage, by_stream in other.touches.items():
            for stream, of_stream in by_stream.items():
                merged = self.touches.setdefault(storage, {}).setdefault(stream, {})
                both = sorted([*merged.values(), *of_stream.values()], key=lambda t: t.time)
                merged.clear()
                for touch in both:
                    _replace(merged, touch)
        _later(self.freed, other.freed)
        self.before |= other.before

    def _seen_until(self, stream: int, awaited: int, now: int) -> int:
        """Return the time up to which a stream has waited for another; now if for all of it."""
        until = self.seen.get(stream, {}).get(awaited, 0)
        last = self.last.get(awaited, 1 if awaited == PROGRAM else 0)  # the caller's are at 1
        return now if until >= last else until

    # ---- streams ----------------------------------------------------------------------------

    def wait(self, stream: int) -> None:
        """Order what follows on the current stream after everything on another one so far."""
        self.wait_until(stream, self.time, self.seen.get(stream, {}))

    def wait_until(self, stream: int, time: int, clock: Clock) -> None:
        """Order what follows after what is on another stream up to a time, when it had a clock."""
        if stream == self.current:
            return
        mine = self.seen.setdefault(self.current, {})
        for awaited, until in (*clock.items(), (stream, time)):
            mine[awaited] = max(until, mine.get(awaited, 0))

    def clock(self, stream: int) -> Clock:
        """Return what a stream has waited for so far."""
        return dict(self.seen.get(stream, {}))

    def running(self) -> list[int]:
        """Return the streams of the program for which stream 0 has not waited."""
        clock = self.seen.get(PROGRAM, {})
        return [
            stream
            for stream, time in self.last.items()
            if stream > PROGRAM and time > clock.get(stream, 0)
        ]

    # ---- accesses ---------------------------------------------------------------------------

    def conflicts(self, memory: Memory, writes: bool) -> Iterator[Touch]:
        """Yield accesses to the same storage that an access on the current stream is not after."""
        by_stream = self.touches.get(_key(memory))
        for stream, of_stream in by_stream.items() if by_stream else ():
            if stream == self.current:
                continue
            until = self.seen.get(self.current, {}).get(stream, 0)
            for touch in reversed(of_stream.values()):
                if touch.time <= until:
                    break
                if writes or touch.writes:
                    yield touch

    def unready(self, memory: Memory) -> Touch | None:
        """Return an access in memory that was freed, and may now be used too early, if any."""
        before = self.before.get(memory.storage)
        return None if before is None else self._not_after(before.values())

    def is_before_caller(self, memory: Memory) -> bool:
        """Return whether the current stream may run before what the caller did with its memory."""
        return (
            memory.storage.external
            and self.current != PROGRAM
            and self.seen.get(self.current, {}).get(PROGRAM, 0) < 1
        )

    def _not_after(self, touches: Iterable[Touch]) -> Touch | None:
        clock = self.seen.get(self.current, {})
        for touch in touches:
            if touch.stream != self.current and touch.time > clock.get(touch.stream, 0):
                return touch
        return None

    def touch(self, memory: Memory, writes: bool, step: Statement) -> None:
        """Record an access on the current stream."""
        self.time += 1
        self.last[self.current] = self.time
        by_stream = self.touches.setdefault(_key(memory), {})
        of_stream = by_stream.setdefault(self.current, {})
        _replace(of_stream, Touch(memory, writes, self.current, self.time, step))

    # ---- allocations ------------------------------------------------------------------------

    def allocate(self, storage: Storage) -> None:
        """Note that a storage may be allocated in memory that was freed."""
        if self.freed:
            self.before[storage] = dict(self.freed)

    def free(self, storage: Storage) -> None:
        """Note that a storage is freed."""
        _later(self.freed, self.before.pop(storage, {}))
        for stream, of_stream in self.touches.pop(storage, {}).items():
            *_, latest = of_stream.values()
            _later(self.freed, {stream: latest})

    def use_workspace(self, memory: Memory, step: Statement) -> Touch | None:
        """Allocate, write and free memory; return an access that it may come too early for."""
        early = self._not_after(self.freed.values())
        self.time += 1
        self.last[self.current] = self.time
        self.freed[self.current] = Touch(memory, True, self.current, self.time, step)
        return early


def _key(memory: Memory) -> Storage | None:
    return None if memory.storage.external else memory.storage


def _replace(of_stream: dict[tuple[int, bool], Touch], touch: Touch) -> None:
    """Put an access last, in place of an earlier one of the same kind to the same memory."""
    key = id(touch.memory), touch.writes
    of_stream.pop(key, None)
    of_stream[key] = touch


def _later(touches: dict[int, Touch], others: Mapping[int, Touch]) -> None:
    """Keep the later access of each stream."""
    for stream, touch in others.items():
        if stream not in touches or touches[stream].time < touch.time:
            touches[stream] = touch
