# SPDX-License-Identifier: Apache-2.0
"""Reads and writes of memory in a state, and the hazards that they are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tvm_ipc.contract import AnyTeam
from tvm_ipc.transform.safety.buffers import Buffer, Storage, storage_of
from tvm_ipc.transform.safety.extents import Example, Extents
from tvm_ipc.transform.safety.hazards import Hazard, HazardKind
from tvm_ipc.transform.safety.intact import Intact
from tvm_ipc.transform.safety.state import Access, Overwrite, Pending, State, Summary, met
from tvm_ipc.transform.safety.statements import Statement


class Effects:
    """The state at one point of a function, and what the function has done so far."""

    def __init__(self, name: str, extents: Extents, hazards: dict[tuple[Any, ...], Hazard]) -> None:
        self._name = name
        self._extents = extents
        self._hazards = hazards
        self._state = State()
        self._summary = Summary()
        self._accesses: set[tuple[int, frozenset[AnyTeam]]] = set()

    def _read(self, things: Iterable[Storage | Buffer], step: Statement) -> None:
        state, reads = self._state, self._summary.reads
        for thing in things:
            if state.lost and isinstance(thing, Buffer) and not thing.weak and thing in state.lost:
                found = state.lost.pop(thing)
                self._report(HazardKind.LOST, thing, step, found.step, found.example)
            storage = storage_of(thing)
            if storage.external and storage not in reads and storage not in state.written:
                reads[storage] = step

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
