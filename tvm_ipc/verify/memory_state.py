# SPDX-License-Identifier: Apache-2.0
"""Represent what may hold of memory at one point of a program, on any path that leads there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tvm_ipc.packed_functions import AnyTeam, Team
from tvm_ipc.verify.relax_as_plain_statements import Statement
from tvm_ipc.verify.storage_and_buffer_types import (
    Buffer,
    Memory,
    Storage,
    ValidBuffers,
    Value,
    objects,
)
from tvm_ipc.verify.stream_order import Clock, StreamOrder
from tvm_ipc.verify.symbolic_inequalities import Example


@dataclass(frozen=True)
class Pending:
    """A read by peers that may not have finished yet."""

    memory: Memory
    team: AnyTeam | None  #: the team whose ranks read; None: unknown
    reader: Statement  #: the collective


@dataclass(frozen=True)
class InFlight:
    """The memory that a started request uses until a wait, or that is exposed until its release."""

    reads: tuple[Memory, ...]
    writes: tuple[Memory, ...]
    #: Those of `reads` that peers may still read after the request has ended.
    pending_after: tuple[Memory, ...]
    step: Statement
    #: Whether this is no request but an exposed buffer, which peers read until its release.
    is_exposed: bool = False
    since: int = 0  #: the value of `MemoryState.done` when it began
    #: If the program uses several streams, the time at which a request ends on the stream of
    #: requests, and what that stream had waited for.
    end: int = 0
    clock: Clock = field(default_factory=dict)


def has_synced(team: AnyTeam | None, synced: frozenset[AnyTeam]) -> bool:
    """Return whether one of some barriers includes all ranks of a team (None: unknown)."""
    return any(Team.contains(barrier, team) for barrier in synced)


@dataclass(frozen=True)
class Overwrite:
    """A write that may have destroyed the contents of a buffer."""

    step: Statement
    example: Example | None  #: None: no sizes are known at which it does


@dataclass(eq=False)
class MemoryState:
    """The state of memory at one point of a function, joined over all paths that lead there."""

    pending: tuple[Pending, ...] = ()
    #: The number of variables that hold each object, and the held buffers of each storage.
    holders: dict[Memory, int] = field(default_factory=dict)
    allocated_in: dict[Storage, set[Buffer]] = field(default_factory=dict)
    holding: set[Any] = field(default_factory=set)  #: variables that hold their value
    valid: dict[Storage, ValidBuffers] = field(default_factory=dict)
    #: Buffers that were, or may have been, overwritten. The latter may be in `valid` too.
    lost: dict[Buffer, Overwrite] = field(default_factory=dict)
    #: Teams that passed a barrier on every path since the function began.
    passed: frozenset[AnyTeam] = frozenset()
    written: set[Storage] = field(default_factory=set)  #: memory of the caller
    #: Requests and exposed buffers in flight, by the storage that represents them.
    requests: dict[Storage, InFlight] = field(default_factory=dict)
    done: int = 0  #: the number of calls so far that computed or communicated
    #: Pairs of requests that were started in the two branches of an `if` and not ended there.
    exclusive: frozenset[frozenset[Storage]] = frozenset()
    #: Memory of peers, by the storage that represents the exposed buffer that it corresponds to.
    peers: dict[Storage, frozenset[Storage]] = field(default_factory=dict)
    #: Memory of peers and representatives of exposed buffers that were released on some path.
    released: dict[Storage, Statement] = field(default_factory=dict)
    streams: StreamOrder | None = None  #: None if the module uses only one stream

    def copy(self) -> MemoryState:
        """Return an independent copy."""
        return MemoryState(
            self.pending,
            dict(self.holders),
            {storage: set(buffers) for storage, buffers in self.allocated_in.items()},
            set(self.holding),
            {storage: buffers.copy() for storage, buffers in self.valid.items()},
            dict(self.lost),
            self.passed,
            set(self.written),
            dict(self.requests),
            self.done,
            self.exclusive,
            dict(self.peers),
            dict(self.released),
            None if self.streams is None else self.streams.copy(),
        )

    def join(self, state: MemoryState) -> None:
        """Become the state after a point at which two paths join."""
        self.pending = tuple(dict.fromkeys(self.pending + state.pending))
        for memory, count in state.holders.items():
            self.holders[memory] = max(count, self.holders.get(memory, 0))
        for storage, held in state.allocated_in.items():
            self.allocated_in.setdefault(storage, set()).update(held)
        self.holding |= state.holding
        for storage, buffers in state.valid.items():
            self.valid.setdefault(storage, ValidBuffers()).update(buffers)
        self.lost = {**state.lost, **self.lost}
        self.passed &= state.passed
        self.written |= state.written
        self.exclusive |= state.exclusive
        only_here = self.requests.keys() - state.requests
        only_there = state.requests.keys() - self.requests
        self.exclusive |= {frozenset({a, b}) for a in only_here for b in only_there}
        self.requests |= state.requests
        self.done = max(self.done, state.done)
        for exposed, peer_memory in state.peers.items():
            self.peers[exposed] = peer_memory | self.peers.get(exposed, frozenset())
        self.released |= state.released
        if self.streams is not None and state.streams is not None:
            self.streams.join(state.streams)

    def are_exclusive(self, requests: list[Storage]) -> bool:
        """Return whether no two of some requests were started on one path."""
        pairs = ({a, b} for k, a in enumerate(requests) for b in requests[:k])
        return all(frozenset(pair) in self.exclusive for pair in pairs)

    def hold(self, value: Value) -> None:
        """Count one more variable that holds a value."""
        for memory in value if type(value) is frozenset else objects(value):
            self.holders[memory] = self.holders.get(memory, 0) + 1
            if isinstance(memory, Buffer):
                self.allocated_in.setdefault(memory.storage, set()).add(memory)

    def release(self, value: Value) -> list[Storage]:
        """Count one variable less; return the storages that nothing holds any more."""
        freed: list[Storage] = []
        for memory in value if type(value) is frozenset else objects(value):
            count = self.holders.get(memory, 0) - 1
            if count > 0:
                self.holders[memory] = count
                continue
            self.holders.pop(memory, None)
            storage = memory.storage
            if isinstance(memory, Buffer):
                self.lost.pop(memory, None)
                if storage in self.valid:
                    self.valid[storage].discard(memory)
                self.allocated_in.get(storage, set()).discard(memory)
            if storage not in self.holders and not self.allocated_in.get(storage):
                self.allocated_in.pop(storage, None)
                self.valid.pop(storage, None)
                if self.streams is not None and not storage.external:
                    self.streams.free(storage)
                freed.append(storage)
        return freed

    def sync(self, team: AnyTeam) -> list[Pending]:
        """Pass a barrier of a team; return the pending reads of its ranks, which have ended."""
        synced = frozenset({team})
        self.passed |= synced
        kept: list[Pending] = []
        ended: list[Pending] = []
        for pending in self.pending:
            (ended if has_synced(pending.team, synced) else kept).append(pending)
        self.pending = tuple(kept)
        return ended
