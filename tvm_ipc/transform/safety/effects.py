# SPDX-License-Identifier: Apache-2.0
"""Reads and writes of memory in a state, and the hazards that they are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tvm_ipc.transform.safety.extents import Extents
from tvm_ipc.transform.safety.hazards import Hazard, HazardKind
from tvm_ipc.transform.safety.memory import (
    Access,
    Buffer,
    Pending,
    State,
    Storage,
    Summary,
    met,
    storage_of,
)
from tvm_ipc.transform.safety.steps import Step


class Effects:
    """The state at one point of a function, and what the function has done so far."""

    def __init__(self, name: str, extents: Extents, hazards: dict[tuple[Any, ...], Hazard]) -> None:
        self._name = name
        self._extents = extents
        self._hazards = hazards
        self._state = State()
        self._summary = Summary()
        self._accesses: set[tuple[int, frozenset[str]]] = set()

    def _read(self, things: Iterable[Storage | Buffer], step: Step) -> None:
        state, reads = self._state, self._summary.reads
        for thing in things:
            if state.lost and isinstance(thing, Buffer) and not thing.weak and thing in state.lost:
                self._report(HazardKind.LOST, thing, step, state.lost.pop(thing))
            storage = storage_of(thing)
            if storage.external and storage not in reads and storage not in state.written:
                reads[storage] = step

    def _write(
        self,
        things: Iterable[Storage | Buffer],
        step: Step,
        passed: frozenset[str] = frozenset(),
        certain: bool = True,
    ) -> None:
        """Write, after the callee has passed some meetings."""
        state = self._state
        for thing in things:
            storage = storage_of(thing)
            for pending in state.pending:
                if not met(pending.in_group, passed) and self._may_overlap(thing, pending.memory):
                    self._endanger(HazardKind.WRITE, storage, step, pending)
            if certain and isinstance(thing, Buffer) and not thing.weak:
                self._overwrite(thing, step)
            if storage.external:
                since = state.passed | passed
                key = (id(thing), since)
                if key not in self._accesses:
                    self._accesses.add(key)
                    self._summary.writes.append(Access(thing, since, step))
                state.written.add(storage)

    def _overwrite(self, buffer: Buffer, step: Step) -> None:
        """What lies in the same bytes is lost."""
        state = self._state
        intact = state.intact.setdefault(buffer.storage, {})
        origin = buffer.origin or buffer
        for other in list(intact):
            if (other.origin or other) is origin or None in (other.end, buffer.end):
                continue
            if self._may_overlap(other, buffer):
                state.lost[other] = step
                del intact[other]
        state.lost.pop(buffer, None)
        intact[buffer] = None

    def _may_overlap(self, a: Storage | Buffer, b: Storage | Buffer) -> bool:
        one, other = storage_of(a), storage_of(b)
        if one is not other:
            return one.external and other.external
        if isinstance(a, Storage) or isinstance(b, Storage):
            return True
        return not (self._ends_before(a, b) or self._ends_before(b, a))

    def _ends_before(self, a: Buffer, b: Buffer) -> bool:
        return a.end is not None and b.begin is not None and self._extents.at_most(a.end, b.begin)

    # ---- reports --------------------------------------------------------------------------

    def _endanger(self, kind: HazardKind, storage: Storage, step: Step, pending: Pending) -> None:
        """Report what happens to memory that peers may read."""
        ended = kind in (HazardKind.FREE, HazardKind.RETURN)
        key = (self._name, pending.reader.variable, None if ended else step.variable)
        if key not in self._hazards:
            hazard = Hazard(self._name, kind, storage.name, str(step), str(pending.reader))
            self._hazards[key] = hazard

    def _report(self, kind: HazardKind, thing: Buffer, step: Step, other: object) -> None:
        key = (self._name, kind, thing, step.variable)
        where = f"{thing.name} in {thing.storage.name}"
        self._hazards.setdefault(key, Hazard(self._name, kind, where, str(step), str(other)))
