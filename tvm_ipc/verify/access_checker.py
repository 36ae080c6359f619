# SPDX-License-Identifier: Apache-2.0
"""Apply reads, writes, requests and exposures to a memory state, and report their hazards."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from tvm_ipc.packed_functions import IPC_MEMORY, AnyTeam
from tvm_ipc.packed_functions.program_function_declarations import KERNEL_ALIGNMENT
from tvm_ipc.verify.hazard_types_and_messages import HazardKind, HazardReporter
from tvm_ipc.verify.memory_state import InFlight, MemoryState, Overwrite, Pending, has_synced
from tvm_ipc.verify.relax_as_plain_statements import Statement
from tvm_ipc.verify.relax_function_effect_summary import Access, Summary
from tvm_ipc.verify.storage_and_buffer_types import (
    Buffer,
    Leaf,
    Memory,
    Storage,
    ValidBuffers,
)
from tvm_ipc.verify.stream_order import PROGRAM, REQUESTS, StreamOrder, Touch, name_of
from tvm_ipc.verify.symbolic_inequalities import Example, Extents

#: The begin of the name of memory that a call allocates and frees.
_WORKSPACE: Final = "the memory that "


class AccessChecker:
    """Tracks the memory state of one function and the summary of its accesses.

    `state` is the state at the statement that is being interpreted. The interpreter replaces it
    where paths branch.
    """

    def __init__(
        self, extents: Extents, reporter: HazardReporter, *, uses_streams: bool = False
    ) -> None:
        self.state = MemoryState(streams=StreamOrder() if uses_streams else None)
        self.summary = Summary()
        self._extents = extents
        self._reporter = reporter
        self._recorded_writes: set[tuple[int, frozenset[AnyTeam]]] = set()

    # ---- reads and writes -------------------------------------------------------------------

    def run_kernel(self, operands: Iterable[Memory], step: Statement) -> None:
        """Count a kernel call, and check that its views begin where a kernel expects a tensor."""
        self.state.done += 1
        for memory in operands:
            if not isinstance(memory, Buffer) or memory.origin is None:
                continue
            if isinstance(memory.begin, int) and memory.begin % KERNEL_ALIGNMENT:
                where = f"begins at byte {memory.begin}"
                self.report(HazardKind.MISALIGNED, memory, step, where, "")

    def read(self, accessed: Iterable[Memory], step: Statement) -> None:
        """Read memory."""
        state, reads = self.state, self.summary.reads
        for memory in accessed:
            if state.lost and isinstance(memory, Buffer) and not memory.weak:
                overwrite = state.lost.pop(memory, None)
                if overwrite is not None:
                    self.report(HazardKind.LOST, memory, step, overwrite.step, overwrite.example)
            storage = memory.storage
            if state.streams is not None:
                self.touch(memory, step, writes=False)
            if state.released and storage in state.released:
                self._report_use_after_release(storage, step)
            if storage.external and storage not in reads and storage not in state.written:
                reads[storage] = step
            for request in state.requests.values() if state.requests else ():
                self._check_request(HazardKind.UNFINISHED, memory, request.writes, request, step)

    def write(
        self,
        accessed: Iterable[Memory],
        step: Statement,
        passed: frozenset[AnyTeam] = frozenset(),
        certain: bool = True,
    ) -> None:
        """Write memory, after the callee has passed barriers of some teams."""
        state = self.state
        for memory in accessed:
            storage = memory.storage
            if state.streams is not None:
                self.touch(memory, step, writes=True)
            for request in state.requests.values() if state.requests else ():
                kind = HazardKind.EXPOSED if request.is_exposed else HazardKind.BUSY
                self._check_request(kind, memory, request.reads + request.writes, request, step)
            for pending in state.pending:
                if not has_synced(pending.team, passed):
                    self._check_pending(memory, pending, step)
            if certain and isinstance(memory, Buffer) and not memory.weak:
                self._overwrite(memory, step)
            if storage.external:
                since = state.passed | passed
                key = (id(memory), since)
                if key not in self._recorded_writes:
                    self._recorded_writes.add(key)
                    self.summary.writes.append(Access(memory, since, step))
                state.written.add(storage)

    def add_pending(
        self, memory: Memory, team: AnyTeam | None, written: Iterable[Memory], step: Statement
    ) -> None:
        """Record that peers may still read memory after a collective that wrote some returned."""
        storage = memory.storage
        if storage.scope not in (None, IPC_MEMORY):
            return
        pending = Pending(memory, team, step)
        for target in written:
            if target.storage is storage:
                self._check_pending(target, pending, step)
        self.state.pending += (pending,)

    def _overwrite(self, buffer: Buffer, step: Statement) -> None:
        """Invalidate the buffers that share bytes with a written one."""
        state = self.state
        valid = state.valid.setdefault(buffer.storage, ValidBuffers())
        origin = buffer.origin or buffer
        for candidate in list(valid.candidates(buffer)):
            if (candidate.origin or candidate) is origin:
                continue
            if self._may_overlap(candidate, buffer):
                example = self._overlap(candidate, buffer)
                state.lost.setdefault(candidate, Overwrite(step, example))
                if example is not None:
                    state.lost[candidate] = Overwrite(step, example)
                    valid.discard(candidate)
        state.lost.pop(buffer, None)
        valid.add(buffer)

    # ---- requests ---------------------------------------------------------------------------

    def start(
        self,
        reads: tuple[Memory, ...],
        writes: tuple[Memory, ...],
        pending_after: tuple[Memory, ...],
        step: Statement,
    ) -> Leaf:
        """Start a request; return the storage that represents it.

        A rank runs its requests in order, so a new one does not conflict with those before it.
        """
        earlier, streams = self.state.requests, self.state.streams
        self.state.requests = {key: entry for key, entry in earlier.items() if entry.is_exposed}
        stream = PROGRAM
        if streams is not None:
            stream, streams.current = streams.current, REQUESTS
            streams.wait(stream)
        self.read(reads, step)
        self.write(writes, step)
        request = Storage(step.bound.name, None)
        started = InFlight(reads, writes, pending_after, step, since=self.state.done)
        if streams is not None:
            streams.current = stream
            started = replace(started, end=streams.time, clock=streams.clock(REQUESTS))
        self.state.requests = {**earlier, request: started}
        return frozenset({request})

    def wait(self, value: Iterable[Memory], step: Statement) -> None:
        """End the request that a value represents; of exclusive ones, that of the path taken."""
        requests = self._in_flight(value)
        if not self.state.are_exclusive(requests):
            self.give_away(requests, step)  # which of them ends is unknown
            return
        if self.state.streams is not None and requests:
            first = min((self.state.requests[request] for request in requests), key=_end)
            self.state.streams.wait_until(REQUESTS, first.end, first.clock)
        for request in requests:
            self._check_overlap_is_useful(self.state.requests[request], step)
            for memory in self.state.requests.pop(request).pending_after:
                # Requests use barriers of their own.
                self.add_pending(memory, None, (), step)

    def give_away(self, values: Iterable[Memory], step: Statement) -> None:
        """Pass requests to unknown code, which may or may not wait for them."""
        for request in self._in_flight(values):
            self.report_never_waited(self.state.requests.pop(request), step, None)

    def _in_flight(self, values: Iterable[Memory]) -> list[Storage]:
        """Return the requests and exposed buffers that some values represent."""
        if not self.state.requests:
            return []
        represented = set(values)
        return [request for request in self.state.requests if request in represented]

    def _check_overlap_is_useful(self, request: InFlight, step: Statement) -> None:
        """Note a request that is waited for although nothing was done since it started."""
        state = self.state
        started = sum(not entry.is_exposed for entry in state.requests.values())
        if state.done == request.since and started == (not request.is_exposed):
            begun = request.step
            self._reporter.add_useless_overlap(begun.variable, begun.bound.name, begun, step)

    def _check_request(
        self,
        kind: HazardKind,
        memory: Memory,
        used: Iterable[Memory],
        request: InFlight,
        step: Statement,
    ) -> None:
        """Report an access to memory that a request in flight uses."""
        for target in used:
            if self._may_overlap(memory, target):
                key = (kind, request.step.variable, step.variable)
                example = self._overlap(memory, target)
                self._reporter.add(kind, key, memory.name, step, request.step, example)

    # ---- exposed buffers --------------------------------------------------------------------

    def expose(self, tensor: Leaf, step: Statement) -> Leaf:
        """Let peers read a tensor; return it and the storage that represents the exposure."""
        self.read(tensor, step)
        exposed = Storage(step.bound.name, None)
        since = self.state.done
        self.state.requests[exposed] = InFlight(
            tuple(tensor), (), (), step, is_exposed=True, since=since
        )
        return tensor | {exposed}

    def peer_view(self, exposed: Leaf, may_wait: bool, step: Statement) -> Leaf:
        """Return memory of a peer, or the rank's own tensor: the peer may be the rank itself.

        Unless the peer is known to be the rank itself, the call may wait for it.
        """
        self._read_exposed(exposed, step)
        name, requests, peers = step.bound.name, self.state.requests, self.state.peers
        for representative, entry in requests.items():
            if may_wait and representative in exposed:
                self._check_overlap_is_useful(entry, step)
        peer_memory = Storage(name, None)
        result: set[Memory] = {Buffer(name, peer_memory)}
        if self.state.streams is not None:  # a copy, for which the current stream waits
            for memory in result:
                self.state.streams.touch(memory, True, step)
        for memory in exposed:
            if isinstance(memory, Storage) and memory in requests:
                peers[memory] = peers.get(memory, frozenset()) | {peer_memory}
            else:
                result.add(memory)
        return frozenset(result)

    def release(self, values: list[Leaf], step: Statement) -> None:
        """End exposures; a barrier of the call ends the reads of peers."""
        for value in values:
            self._read_exposed(value, step)
        for value in values:
            self._release(value, step)

    def _read_exposed(self, value: Leaf, step: Statement) -> None:
        """Use an exposed buffer, whose tensor only peers read."""
        self.read([memory for memory in value if isinstance(memory, Storage)], step)

    def _release(self, value: Leaf, step: Statement) -> None:
        """End an exposure: neither this rank nor its peers may use the peer views any more."""
        state = self.state
        exposed = self._in_flight(value)
        if not state.are_exclusive(exposed):
            self.give_away(exposed, step)  # which of them ends is unknown
        for representative in exposed:
            entry = state.requests.pop(representative, None)
            if state.streams is not None and entry is not None:
                for memory in entry.reads:  # peers have read it when this stream goes on
                    state.streams.touch(memory, False, step)
            for memory in (representative, *state.peers.pop(representative, ())):
                state.released[memory] = step
                for request in state.requests.values():
                    used = request.reads + request.writes
                    self._check_request(HazardKind.BUSY, memory, used, request, step)

    # ---- streams ----------------------------------------------------------------------------

    def sync(self, team: AnyTeam, step: Statement) -> None:
        """Pass a barrier of a team, on the current stream."""
        for pending in self.state.sync(team):
            if self.state.streams is not None:
                self.state.streams.touch(pending.memory, False, step)

    def set_stream(self, stream: int | None, step: Statement) -> None:
        """Go on on another stream."""
        if stream is None:
            self._report_stream("the stream", step, "its number is not a constant")
        elif self.state.streams is not None:
            self.state.streams.current = stream

    def wait_stream(self, stream: int | None, step: Statement) -> None:
        """Let the current stream wait for another one; an unknown one orders nothing."""
        if stream is not None and self.state.streams is not None:
            self.state.streams.wait(stream)

    def check_joined(self, step: Statement) -> None:
        """Report that a function ends on another stream than 0, or before another one has ended."""
        streams = self.state.streams
        if streams is None:
            return
        if streams.current != PROGRAM:
            where = name_of(streams.current)
            self._report_stream(
                where, step, "call tvm_ipc.set_stream(0) at the end of the function"
            )
        for stream in streams.running():
            missing = f"call tvm_ipc.wait_stream({stream}) on stream 0 first"
            self._report_stream(name_of(stream), step, missing)

    def check_on_program_stream(self, name: str, step: Statement) -> None:
        """Report the call of a function that uses several streams on another stream than 0."""
        streams = self.state.streams
        if streams is not None and streams.current != PROGRAM:
            needed = f"{name} uses several streams, so it must be called on stream 0"
            self._report_stream(name_of(streams.current), step, needed)

    def check_same_stream(self, other: MemoryState, step: Statement) -> None:
        """Report that two paths that join end on different streams."""
        mine, theirs = self.state.streams, other.streams
        if mine is not None and theirs is not None and mine.current != theirs.current:
            needed = "both branches must end on the same stream"
            self._report_stream(name_of(theirs.current), step, needed)

    def _report_stream(self, memory: str, step: Statement, needed: str) -> None:
        kind = HazardKind.STREAM
        self._reporter.add(kind, (kind, step.variable, memory), memory, step, needed, "")

    def allocate(self, value: Iterable[Memory]) -> None:
        """Note that storages are new."""
        if self.state.streams is not None:
            self.summary.allocates = True
            for memory in value:
                self.state.streams.allocate(memory.storage)

    def use_workspace(self, name: str, step: Statement, example: Example | None = "") -> None:
        """Run code that allocates and frees memory of its own; with None, it only may do so."""
        streams = self.state.streams
        if streams is None:
            return
        self.summary.allocates = True
        memory = Storage(f"{_WORKSPACE}{name} allocates", None)
        early = streams.use_workspace(memory, step)
        if early is not None:
            self._report_early(memory.name, early, step, example)

    def touch(self, memory: Memory, step: Statement, *, writes: bool) -> None:
        """Check that an access is ordered after those on other streams, and record it."""
        streams = self.state.streams
        assert streams is not None, "the module uses several streams"
        here = name_of(streams.current)
        for other in streams.conflicts(memory, writes):
            if self._may_overlap(memory, other.memory):
                there = name_of(other.stream)
                related = (
                    f"`{other.step}` uses it on {there}, and this call on {here}; "
                    f"{_wait_for(other.stream)}"
                )
                is_same = memory is other.memory
                example = "" if is_same else self._overlap(memory, other.memory)
                kind = HazardKind.UNORDERED
                key = (kind, other.step.variable, step.variable)
                self._reporter.add(kind, key, memory.name, step, related, example)
        if streams.is_before_caller(memory):
            related = f"the caller uses it on stream 0, and this call on {here}; {_wait_for(0)}"
            kind = HazardKind.UNORDERED
            self._reporter.add(kind, (kind, step.variable), memory.name, step, related, "")
        early = streams.unready(memory)
        if early is not None:
            self._report_early(memory.name, early, step, "")
        streams.touch(memory, writes, step)

    def _report_early(
        self, memory: str, early: Touch, step: Statement, example: Example | None
    ) -> None:
        """Report the use of memory that may have been freed while another stream uses it."""
        name, there = early.memory.name, name_of(early.stream)
        related = f"`{early.step}` uses {name} on {there}, and its memory is freed in between"
        related += f"; {_wait_for(early.stream)}"
        if not name.startswith(_WORKSPACE):
            related += f", or keep {name} until then"
        kind = HazardKind.REUSED
        self._reporter.add(
            kind, (kind, early.step.variable, memory), memory, step, related, example
        )

    # ---- overlap of memory ------------------------------------------------------------------

    def _may_overlap(self, a: Memory, b: Memory) -> bool:
        storage_a, storage_b = a.storage, b.storage
        if storage_a is not storage_b:
            return storage_a.external and storage_b.external
        if isinstance(a, Storage) or isinstance(b, Storage):
            return True
        return not (self._ends_before(a, b) or self._ends_before(b, a))

    def _ends_before(self, a: Buffer, b: Buffer) -> bool:
        if a.end is None or b.begin is None:
            return False
        if isinstance(a.end, int) and isinstance(b.begin, int):
            return a.end <= b.begin
        return self._extents.at_most(a.end, b.begin, a.assumptions + b.assumptions)

    def _overlap(self, a: Memory, b: Memory) -> Example | None:
        """Return sizes at which memory that may overlap does so, None if none are known."""
        if a.storage is not b.storage or isinstance(a, Storage) or isinstance(b, Storage):
            return ""
        if a.begin is None or a.end is None or b.begin is None or b.end is None:
            return None
        into_a = self._extents.subtract(b.end, self._extents.add(a.begin, 1))
        into_b = self._extents.subtract(a.end, self._extents.add(b.begin, 1))
        return self._extents.example(*a.assumptions, *b.assumptions, into_a, into_b)

    # ---- reports ----------------------------------------------------------------------------

    def _check_pending(self, memory: Memory, pending: Pending, step: Statement) -> None:
        """Report a write to memory that peers may still read."""
        if self._may_overlap(memory, pending.memory):
            example = self._overlap(memory, pending.memory)
            storage = memory.storage
            self.report_pending(HazardKind.WRITE, storage, step, pending, example)

    def report_pending(
        self,
        kind: HazardKind,
        storage: Storage,
        step: Statement,
        pending: Pending,
        example: Example | None = "",
    ) -> None:
        """Report that a statement writes, frees or returns storage that peers may still read."""
        frees = kind in (HazardKind.FREE, HazardKind.RETURN)
        key = (pending.reader.variable, None if frees else step.variable)
        self._reporter.add(kind, key, storage.name, step, pending.reader, example)

    def report_never_waited(
        self, request: InFlight, step: Statement, example: Example | None
    ) -> None:
        """Report a request without a wait, or an exposed buffer without a release."""
        name = request.step.bound.name
        kind, memory = HazardKind.NEVER_WAITED, f"the request {name}"
        if request.is_exposed:
            kind, memory = HazardKind.NEVER_RELEASED, f"the exposed buffer {name}"
        key = (kind, request.step.variable)
        self._reporter.add(kind, key, memory, step, request.step, example)

    def report(
        self,
        kind: HazardKind,
        buffer: Buffer,
        step: Statement,
        related: object,
        example: Example | None,
    ) -> None:
        """Report a hazard of a buffer; see `HazardReporter.add`."""
        memory = f"{buffer.name} in {buffer.storage.name}"
        self._reporter.add(kind, (kind, buffer, step.variable), memory, step, related, example)

    def _report_use_after_release(self, memory: Storage, step: Statement) -> None:
        kind = HazardKind.RELEASED
        key = (kind, memory, step.variable)
        self._reporter.add(kind, key, memory.name, step, self.state.released[memory], "")


def _wait_for(stream: int) -> str:
    """Return how to order what follows after a stream."""
    if stream == REQUESTS:
        return "wait for the request on this stream first"
    return f"call tvm_ipc.wait_stream({stream}) on this stream first"


def _end(request: InFlight) -> int:
    return request.end
