# SPDX-License-Identifier: Apache-2.0
"""What may be so in memory at one point of a program, and what a function does to its caller."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tvm_ipc.contract import AnyTeam, Team
from tvm_ipc.transform.safety.buffers import (
    NOTHING,
    Buffer,
    Storage,
    Value,
    objects,
    storage_of,
)
from tvm_ipc.transform.safety.extents import Example
from tvm_ipc.transform.safety.intact import Intact
from tvm_ipc.transform.safety.statements import Statement


@dataclass(frozen=True)
class Pending:
    """A pending read: one by peers, which may not have ended."""

    memory: Storage | Buffer
    team: AnyTeam | None  #: that reads; None: unknown
    reader: Statement  #: the collective


@dataclass(frozen=True)
class InFlight:
    """What a work that was posted does to memory until somebody has waited for it."""

    reads: tuple[Storage | Buffer, ...]
    writes: tuple[Storage | Buffer, ...]
    #: Of what it reads, what peers may read when it has ended.
    left: tuple[Storage | Buffer, ...]
    step: Statement
    shown: bool = False  #: whether it is no work: peers read what was shown, until it is hidden
    since: int = 0  #: what the program had done when it began, see `State.done`


def met(team: AnyTeam | None, passed: frozenset[AnyTeam]) -> bool:
    """Whether meetings of some teams were meetings of all ranks of one, None: of an unknown one."""
    return any(Team.contains(one, team) for one in passed)


@dataclass(frozen=True)
class Overwrite:
    """What may have been written over a buffer."""

    step: Statement
    example: Example | None  #: None: at no known sizes


@dataclass
class State:
    """What may be so at one point of a function, on any path that leads there."""

    pending: tuple[Pending, ...] = ()
    #: How many variables hold what, and which buffers that are held lie in a storage.
    holders: dict[Storage | Buffer, int] = field(default_factory=dict)
    lying: dict[Storage, set[Buffer]] = field(default_factory=dict)
    holding: set[Any] = field(default_factory=set)  #: variables that hold what they are
    intact: dict[Storage, Intact] = field(default_factory=dict)
    #: Those of which part, or maybe part, was overwritten; of the latter it may be intact.
    lost: dict[Buffer, Overwrite] = field(default_factory=dict)
    passed: frozenset[AnyTeam] = frozenset()  #: teams that met on every path since it began
    written: set[Storage] = field(default_factory=set)  #: of the caller's memory
    works: dict[Storage, InFlight] = field(default_factory=dict)  #: by what stands for the work
    done: int = 0  #: how many calls computed something, or were collectives
    #: Pairs of works that were posted in the two branches of an `if`, and have not ended there.
    exclusive: frozenset[frozenset[Storage]] = frozenset()
    #: Memory of peers, by what stands for the shown that it is of.
    peers: dict[Storage, frozenset[Storage]] = field(default_factory=dict)
    #: What was hidden on some path: memory of peers, and what stands for a shown.
    hidden: dict[Storage, Statement] = field(default_factory=dict)

    def copy(self) -> State:
        """Return a state that changes on its own."""
        return State(
            self.pending,
            dict(self.holders),
            {storage: set(buffers) for storage, buffers in self.lying.items()},
            set(self.holding),
            {storage: buffers.copy() for storage, buffers in self.intact.items()},
            dict(self.lost),
            self.passed,
            set(self.written),
            dict(self.works),
            self.done,
            self.exclusive,
            dict(self.peers),
            dict(self.hidden),
        )

    def join(self, other: State) -> None:
        """Become what may be so where two paths meet."""
        self.pending = tuple(dict.fromkeys(self.pending + other.pending))
        for thing, count in other.holders.items():
            self.holders[thing] = max(count, self.holders.get(thing, 0))
        for storage, held in other.lying.items():
            self.lying.setdefault(storage, set()).update(held)
        self.holding |= other.holding
        for storage, buffers in other.intact.items():
            self.intact.setdefault(storage, Intact()).update(buffers)
        self.lost = {**other.lost, **self.lost}
        self.passed &= other.passed
        self.written |= other.written
        self.exclusive |= other.exclusive
        mine, others = self.works.keys() - other.works, other.works.keys() - self.works
        self.exclusive |= {frozenset({a, b}) for a in mine for b in others}
        self.works |= other.works
        self.done = max(self.done, other.done)
        for shown, memory in other.peers.items():
            self.peers[shown] = memory | self.peers.get(shown, frozenset())
        self.hidden |= other.hidden

    def are_of_different_paths(self, works: list[Storage]) -> bool:
        """Whether no two of some works were posted on one path."""
        pairs = ({a, b} for k, a in enumerate(works) for b in works[:k])
        return all(frozenset(pair) in self.exclusive for pair in pairs)

    def hold(self, value: Value) -> None:
        """Count one more variable that holds a value."""
        for thing in value if type(value) is frozenset else objects(value):
            self.holders[thing] = self.holders.get(thing, 0) + 1
            if isinstance(thing, Buffer):
                self.lying.setdefault(thing.storage, set()).add(thing)

    def release(self, value: Value) -> list[Storage]:
        """Count one less; return the storages that nothing holds any more."""
        freed: list[Storage] = []
        for thing in value if type(value) is frozenset else objects(value):
            count = self.holders.get(thing, 0) - 1
            if count > 0:
                self.holders[thing] = count
                continue
            self.holders.pop(thing, None)
            storage = storage_of(thing)
            if isinstance(thing, Buffer):
                self.lost.pop(thing, None)
                if storage in self.intact:
                    self.intact[storage].discard(thing)
                self.lying.get(storage, set()).discard(thing)
            if storage not in self.holders and not self.lying.get(storage):
                self.lying.pop(storage, None)
                self.intact.pop(storage, None)
                freed.append(storage)
        return freed

    def meet(self, team: AnyTeam) -> None:
        """Forget the reads that have ended when a meeting of a team has been passed."""
        now = frozenset({team})
        self.passed |= now
        self.pending = tuple(p for p in self.pending if not met(p.team, now))


@dataclass(frozen=True)
class Access:
    """A write to memory of the caller."""

    memory: Storage | Buffer
    passed: frozenset[AnyTeam]  #: the teams that met before it, on every path
    step: Statement


@dataclass
class Summary:
    """What a function does to its caller."""

    parameters: list[Value] = field(default_factory=list)
    result: Value = NOTHING
    reads: dict[Storage, Statement] = field(default_factory=dict)
    writes: list[Access] = field(default_factory=list)
    pending: tuple[Pending, ...] = ()
    passed: frozenset[AnyTeam] = frozenset()
