# SPDX-License-Identifier: Apache-2.0
"""Apply reads, writes, requests and exposures to a memory state, and report their hazards."""

from __future__ import annotations

from collections.abc import Iterable

from tvm_ipc.packed_functions import IPC_MEMORY, AnyTeam
from tvm_ipc.packed_functions.program_function_declarations import KERNEL_ALIGNMENT
from tvm_ipc.verify.hazard_types_and_messages import HazardKind, HazardReporter
from tvm_ipc.verify.known_calls import KnownCall, constant
from tvm_ipc.verify.memory_state import InFlight, MemoryState, Overwrite, Pending, has_synced
from tvm_ipc.verify.relax_as_plain_statements import Statement
from tvm_ipc.verify.relax_function_effect_summary import Access, Summary
from tvm_ipc.verify.storage_and_buffer_types import (
    NOTHING,
    Buffer,
    Leaf,
    Memory,
    Storage,
    ValidBuffers,
    Value,
    objects,
    storage_of,
)
from tvm_ipc.verify.symbolic_inequalities import Example, Extents


class AccessChecker:
    """Tracks the memory state of one function and the summary of its accesses.

    `state` is the state at the statement that is being interpreted. The interpreter replaces it
    where paths branch.
    """

    def __init__(self, extents: Extents, reporter: HazardReporter) -> None:
        self.state = MemoryState()
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
            storage = storage_of(memory)
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
            storage = storage_of(memory)
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
        storage = storage_of(memory)
        if storage.scope not in (None, IPC_MEMORY):
            return
        pending = Pending(memory, team, step)
        for target in written:
            if storage_of(target) is storage:
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
        earlier = self.state.requests
        self.state.requests = {key: entry for key, entry in earlier.items() if entry.is_exposed}
        self.read(reads, step)
        self.write(writes, step)
        request = Storage(step.bound.name, None)
        started = InFlight(reads, writes, pending_after, step, since=self.state.done)
        self.state.requests = {**earlier, request: started}
        return frozenset({request})

    def wait(self, value: Iterable[Memory], step: Statement) -> None:
        """End the request that a value represents; of exclusive ones, that of the path taken."""
        requests = self._in_flight(value)
        if not self.state.are_exclusive(requests):
            self.give_away(requests, step)  # which of them ends is unknown
            return
        for request in requests:
            self._check_overlap_is_useful(self.state.requests[request], step)
            for memory in self.state.requests.pop(request).pending_after:
                # Requests use barriers of their own.
                self.add_pending(memory, None, (), step)

    def give_away(self, values: Iterable[Memory], step: Statement) -> None:
        """Pass requests to unknown code, which may or may not wait for them."""
        for request in dict.fromkeys(self._in_flight(values)):
            self.report_never_waited(self.state.requests.pop(request), step, None)

    def _in_flight(self, values: Iterable[Memory]) -> list[Storage]:
        """Return the requests and exposed buffers that some values represent."""
        requests = self.state.requests
        if not requests:
            return []
        return [memory for memory in values if isinstance(memory, Storage) and memory in requests]

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

    def access_exposed(self, call: KnownCall, values: list[Value], step: Statement) -> Value:
        """Expose or release buffers, or return the view of a peer's exposed buffer."""
        function = call.function

        def operands(name: str) -> list[Leaf]:
            return [frozenset(objects(values[index])) for index in call.positions(name)]

        for name in function.reads:
            for value in operands(name):
                # Only peers read the tensor of an exposed buffer.
                own = value if function.exposes else [m for m in value if isinstance(m, Storage)]
                self.read(own, step)
        if function.exposes:
            return self._expose(operands(function.exposes)[0], step)
        if not function.releases:
            exposed = operands(function.result_of)[0]
            if constant(call.argument("shift")) != 0:
                for representative, entry in self.state.requests.items():
                    if representative in exposed:
                        self._check_overlap_is_useful(entry, step)
            return self._peer_view(exposed, step)
        for value in operands(function.releases):
            self._release(value, step)
        team = call.barrier_team()
        if team is not None:
            self.state.sync(team)
        return NOTHING

    def _expose(self, tensor: Leaf, step: Statement) -> Leaf:
        """Let peers read a tensor; return it and the storage that represents the exposure."""
        exposed = Storage(step.bound.name, None)
        since = self.state.done
        self.state.requests[exposed] = InFlight(
            tuple(tensor), (), (), step, is_exposed=True, since=since
        )
        return tensor | {exposed}

    def _peer_view(self, exposed: Leaf, step: Statement) -> Leaf:
        """Return memory of a peer, or the rank's own tensor: the peer may be the rank itself."""
        name, requests, peers = step.bound.name, self.state.requests, self.state.peers
        peer_memory = Storage(name, None)
        result: set[Memory] = {Buffer(name, peer_memory)}
        for memory in exposed:
            if isinstance(memory, Storage) and memory in requests:
                peers[memory] = peers.get(memory, frozenset()) | {peer_memory}
            else:
                result.add(memory)
        return frozenset(result)

    def _release(self, value: Leaf, step: Statement) -> None:
        """End an exposure: neither this rank nor its peers may use the peer views any more."""
        state = self.state
        exposed = self._in_flight(value)
        if not state.are_exclusive(exposed):
            self.give_away(exposed, step)  # which of them ends is unknown
        for representative in exposed:
            state.requests.pop(representative, None)
            for memory in (representative, *state.peers.pop(representative, ())):
                state.released[memory] = step
                for request in state.requests.values():
                    used = request.reads + request.writes
                    self._check_request(HazardKind.BUSY, memory, used, request, step)

    # ---- overlap of memory ------------------------------------------------------------------

    def _may_overlap(self, a: Memory, b: Memory) -> bool:
        storage_a, storage_b = storage_of(a), storage_of(b)
        if storage_a is not storage_b:
            return storage_a.external and storage_b.external
        if isinstance(a, Storage) or isinstance(b, Storage):
            return True
        return not (self._ends_before(a, b) or self._ends_before(b, a))

    def _ends_before(self, a: Buffer, b: Buffer) -> bool:
        if a.end is None or b.begin is None:
            return False
        return self._extents.at_most(a.end, b.begin, a.assumptions + b.assumptions)

    def _overlap(self, a: Memory, b: Memory) -> Example | None:
        """Return sizes at which memory that may overlap does so, None if none are known."""
        if storage_of(a) is not storage_of(b) or isinstance(a, Storage) or isinstance(b, Storage):
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
            storage = storage_of(memory)
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
