# SPDX-License-Identifier: Apache-2.0
"""Reads and writes of memory in a state, and the hazards that they are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tvm_ipc.contract import IPC_MEMORY, AnyTeam
from tvm_ipc.contract.programs import KERNEL_ALIGNMENT
from tvm_ipc.transform.safety.buffers import Buffer, Leaf, Storage, storage_of
from tvm_ipc.transform.safety.extents import Example, Extents
from tvm_ipc.transform.safety.hazards import Alone, Hazard, HazardKind
from tvm_ipc.transform.safety.intact import Intact
from tvm_ipc.transform.safety.state import Access, InFlight, Overwrite, Pending, State, Summary, met
from tvm_ipc.transform.safety.statements import Statement


class Effects:
    """The state at one point of a function, and what the function has done so far."""

    def __init__(self, name: str, extents: Extents, hazards: dict[tuple[Any, ...], Hazard]) -> None:
        self._name = name
        self._extents = extents
        self._hazards = hazards
        #: Works beside which nothing is done, by function and variable.
        self._alone: dict[tuple[str, int], Alone] = {}
        self._state = State()
        self._summary = Summary()
        self._accesses: set[tuple[int, frozenset[AnyTeam]]] = set()

    def _compute(self, things: Iterable[Storage | Buffer], step: Statement) -> None:
        """Call a kernel, which may expect parts of tensors to begin where whole ones do."""
        self._state.done += 1
        parts = (one for one in things if isinstance(one, Buffer) and one.origin is not None)
        for part in parts:
            if isinstance(part.begin, int) and part.begin % KERNEL_ALIGNMENT:
                where = f"begins at byte {part.begin}"
                self._report(HazardKind.MISALIGNED, part, step, where, "")

    def _read(self, things: Iterable[Storage | Buffer], step: Statement) -> None:
        state, reads = self._state, self._summary.reads
        for thing in things:
            if state.lost and isinstance(thing, Buffer) and not thing.weak and thing in state.lost:
                found = state.lost.pop(thing)
                self._report(HazardKind.LOST, thing, step, found.step, found.example)
            storage = storage_of(thing)
            if state.hidden and storage in state.hidden:
                self._used_after_it_was_hidden(storage, step)
            if storage.external and storage not in reads and storage not in state.written:
                reads[storage] = step
            for work in state.works.values() if state.works else ():
                self._disturb(HazardKind.UNFINISHED, thing, work.writes, work, step)

    def _write(
        self,
        things: Iterable[Storage | Buffer],
        step: Statement,
        passed: frozenset[AnyTeam] = frozenset(),
        certain: bool = True,
    ) -> None:
        """Write, after some teams met in the callee."""
        state = self._state
        for thing in things:
            storage = storage_of(thing)
            for work in state.works.values() if state.works else ():
                kind = HazardKind.SHOWN if work.shown else HazardKind.BUSY
                self._disturb(kind, thing, work.reads + work.writes, work, step)
            for pending in state.pending:
                if not met(pending.team, passed) and self._may_overlap(thing, pending.memory):
                    example = self._overlap(thing, pending.memory)
                    self._endanger(HazardKind.WRITE, storage, step, pending, example)
            if certain and isinstance(thing, Buffer) and not thing.weak:
                self._overwrite(thing, step)
            if storage.external:
                since = state.passed | passed
                key = (id(thing), since)
                if key not in self._accesses:
                    self._accesses.add(key)
                    self._summary.writes.append(Access(thing, since, step))
                state.written.add(storage)

    def _leave_pending(
        self,
        thing: Storage | Buffer,
        team: AnyTeam | None,
        written: Iterable[Storage | Buffer],
        step: Statement,
    ) -> None:
        """Note that peers may still read memory when a collective that writes some has returned."""
        storage = storage_of(thing)
        if storage.scope not in (None, IPC_MEMORY):
            return
        pending = Pending(thing, team, step)
        for target in written:
            if storage_of(target) is storage and self._may_overlap(target, thing):
                example = self._overlap(target, thing)
                self._endanger(HazardKind.WRITE, storage, step, pending, example)
        self._state.pending += (pending,)

    # ---- works ----------------------------------------------------------------------------

    def _start(
        self,
        reads: tuple[Storage | Buffer, ...],
        writes: tuple[Storage | Buffer, ...],
        left: tuple[Storage | Buffer, ...],
        step: Statement,
    ) -> Leaf:
        """Start a work; return what stands for it. A rank does its works one after the other."""
        earlier = self._state.works
        self._state.works = {key: other for key, other in earlier.items() if other.shown}
        self._read(reads, step)
        self._write(writes, step)
        work = Storage(step.bound.name, None)
        begun = InFlight(reads, writes, left, step, since=self._state.done)
        self._state.works = {**earlier, work: begun}
        return frozenset({work})

    def _finish(self, value: tuple[Storage | Buffer, ...], step: Statement) -> None:
        """End the work that a value is; of several, that of the path that was taken."""
        works = [thing for thing in value if isinstance(thing, Storage)]
        works = [work for work in works if work in self._state.works]
        if not self._state.are_of_different_paths(works):
            self._give_away(works, step)  # which of them it is, nobody knows
            return
        for work in works:
            self._look_for_overlap(self._state.works[work], step)
            for thing in self._state.works.pop(work).left:
                # The ranks of a work meet in teams of their own.
                self._leave_pending(thing, None, (), step)

    def _look_for_overlap(self, work: InFlight, step: Statement) -> None:
        """Note a work that is waited for although nothing was done since it began."""
        state = self._state
        others = sum(not one.shown for one in state.works.values()) - (not work.shown)
        if state.done == work.since and not others:
            alone = Alone(self._name, work.step.bound.name, str(work.step), str(step))
            self._alone.setdefault((self._name, work.step.variable), alone)

    def _give_away(self, things: Iterable[Storage | Buffer], step: Statement) -> None:
        """Somebody else may wait for works, or not: that nobody does is not proved."""
        for thing in things if self._state.works else ():
            if isinstance(thing, Storage) and thing in self._state.works:
                self._never_waited(self._state.works.pop(thing), step, None)

    def _never_waited(self, work: InFlight, step: Statement, example: Example | None) -> None:
        name = work.step.bound.name
        kind, memory = HazardKind.NEVER_WAITED, f"the work {name}"
        if work.shown:
            kind, memory = HazardKind.NEVER_HIDDEN, f"what is shown as {name}"
        self._add((self._name, kind, work.step.variable), kind, memory, step, work.step, example)

    def _used_after_it_was_hidden(self, memory: Storage, step: Statement) -> None:
        key = (self._name, HazardKind.HIDDEN, memory, step.variable)
        self._add(key, HazardKind.HIDDEN, memory.name, step, self._state.hidden[memory], "")

    def _disturb(
        self,
        kind: HazardKind,
        thing: Storage | Buffer,
        used: Iterable[Storage | Buffer],
        work: InFlight,
        step: Statement,
    ) -> None:
        """Report an access to what a work uses that nobody has waited for."""
        for other in used:
            if self._may_overlap(thing, other):
                key = (self._name, kind, work.step.variable, step.variable)
                example = self._overlap(thing, other)
                self._add(key, kind, thing.name, step, work.step, example)

    def _overwrite(self, buffer: Buffer, step: Statement) -> None:
        """What lies in the same bytes is lost."""
        state = self._state
        intact = state.intact.setdefault(buffer.storage, Intact())
        origin = buffer.origin or buffer
        for other in list(intact.near(buffer)):
            if (other.origin or other) is origin or None in (other.end, buffer.end):
                continue
            if self._may_overlap(other, buffer):
                example = self._overlap(other, buffer)
                state.lost.setdefault(other, Overwrite(step, example))
                if example is not None:
                    state.lost[other] = Overwrite(step, example)
                    intact.discard(other)
        state.lost.pop(buffer, None)
        intact.add(buffer)

    def _may_overlap(self, a: Storage | Buffer, b: Storage | Buffer) -> bool:
        one, other = storage_of(a), storage_of(b)
        if one is not other:
            return one.external and other.external
        if isinstance(a, Storage) or isinstance(b, Storage):
            return True
        return not (self._ends_before(a, b) or self._ends_before(b, a))

    def _ends_before(self, a: Buffer, b: Buffer) -> bool:
        if a.end is None or b.begin is None:
            return False
        return self._extents.at_most(a.end, b.begin, a.given + b.given)

    def _overlap(self, a: Storage | Buffer, b: Storage | Buffer) -> Example | None:
        """Return sizes at which two things that may overlap do so, None if none are known."""
        if storage_of(a) is not storage_of(b) or isinstance(a, Storage) or isinstance(b, Storage):
            return ""
        if a.begin is None or a.end is None or b.begin is None or b.end is None:
            return None
        into_a = self._extents.subtract(b.end, self._extents.add(a.begin, 1))
        into_b = self._extents.subtract(a.end, self._extents.add(b.begin, 1))
        return self._extents.example(*a.given, *b.given, into_a, into_b)

    # ---- reports --------------------------------------------------------------------------

    def _endanger(
        self,
        kind: HazardKind,
        storage: Storage,
        step: Statement,
        pending: Pending,
        example: Example | None = "",
    ) -> None:
        """Report what happens to memory that peers may read, at which sizes."""
        ended = kind in (HazardKind.FREE, HazardKind.RETURN)
        key = (self._name, pending.reader.variable, None if ended else step.variable)
        self._add(key, kind, storage.name, step, pending.reader, example)

    def _report(
        self,
        kind: HazardKind,
        thing: Buffer,
        step: Statement,
        other: object,
        example: Example | None,
    ) -> None:
        """Report what is wrong with a buffer, at which sizes."""
        key = (self._name, kind, thing, step.variable)
        self._add(key, kind, f"{thing.name} in {thing.storage.name}", step, other, example)

    def _add(
        self,
        key: tuple[Any, ...],
        kind: HazardKind,
        memory: str,
        step: Statement,
        other: object,
        example: Example | None,
    ) -> None:
        known = self._hazards.get(key)
        unknown = example is None
        if known is None or (known.unknown and not unknown):
            self._hazards[key] = Hazard(
                self._name, kind, memory, str(step), str(other), example or "", unknown
            )
