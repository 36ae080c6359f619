# SPDX-License-Identifier: Apache-2.0
"""The step that collectives are made of, and the ways to do an all-reduce with it.

Mirrors, by function (csrc): core/collective_step_barrier.cc `Meeting::Enter` (publish, and wait for
every peer), shm/team_operation.h `NextBuffer`, `buffer` (two staging buffers, by the step's
parity), shared_memory_layout.h `Reached`, `Seat` (two slots), allreduce.cc `Eager`, `Direct`,
`Sliced`, `Relayed`, internode_reduction_entry_points.cc `Run`, which is eager, or direct.

The input lies in memory that peers map, and each collective writes its own input as soon as the
one before it has returned: immediate reuse. Data is the number of the collective and who made it,
so old and new differ. Steps are counted modulo 8, so that they wrap.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.model.model_checker import Model, Step, expect

STEPS = 8
PIECES = 2


def reached(a: int, b: int) -> bool:
    """shared_memory_layout.h Reached, in three bits instead of 32."""
    return (a - b) % STEPS < STEPS // 2


@dataclass(frozen=True)
class Protocol:
    """The protocol as it is built; every other value is a mutation."""

    exit_barrier: bool = True
    flags: int = 2
    descriptors: int = 2
    compares_by_equality: bool = False
    zeroes_after_the_exchange: bool = False
    staging_buffers: int = 2
    publishes_before_it_writes: bool = False
    inputs: int = 1
    first_step: int = 0
    #: Cells that all teams of a rank have in common, of which each has its own.
    shared_by_teams: frozenset[str] = frozenset()


@dataclass
class Rank:
    """Writes the program of one rank."""

    me: int
    size: int
    protocol: Protocol
    team: int = 0
    members: tuple[int, ...] = ()  #: all, if none are given

    def __post_init__(self) -> None:
        self.step = self.protocol.first_step
        self.program: list[Step] = []

    def flag(self, rank: int, step: int) -> Hashable:
        return self.cell("seq", rank, step % self.protocol.flags)

    def descriptor(self, rank: int, step: int) -> Hashable:
        return self.cell("descriptor", rank, step % self.protocol.descriptors)

    def staging(self, rank: int, step: int) -> Hashable:
        return self.cell("staging", rank, step % self.protocol.staging_buffers)

    def input(self, rank: int, which: int, piece: int) -> Hashable:
        return self.cell("input", rank, (which, piece))

    def cell(self, what: str, rank: int, which: Hashable) -> Hashable:
        return (what, rank, which, 0 if what in self.protocol.shared_by_teams else self.team)

    def add(self, says: str, act: Any) -> None:
        self.program.append(Step(says, act))

    def write(self, cell: Hashable, value: Any) -> None:
        self.add(f"write {cell}", lambda m: m.__setitem__(cell, value))

    def read(self, cell: Hashable, wanted: Any) -> None:
        self.add(f"read {cell}", lambda m: expect(m[cell], wanted, str(cell)))

    def enter(self, descriptor: Any, staged: Any = None) -> None:
        """Meeting::Enter, after the caller has filled NextBuffer."""
        self.step = (self.step + 1) % STEPS
        step, me = self.step, self.me
        publish = (self.flag(me, step), step)
        if self.protocol.publishes_before_it_writes:
            self.write(*publish)
        if staged is not None:
            self.write(self.staging(me, step), staged)
        self.write(self.descriptor(me, step), descriptor)
        if not self.protocol.publishes_before_it_writes:
            self.write(*publish)
        for peer in self.peers():
            self.add(f"wait for rank {peer} in step {step}", self.arrived(peer, step))
            self.read(self.descriptor(peer, step), descriptor)
        if self.protocol.zeroes_after_the_exchange:
            self.write(self.flag(me, step), 0)

    def arrived(self, peer: int, step: int) -> Any:
        cell = self.flag(peer, step)
        if self.protocol.compares_by_equality:
            return lambda m: m[cell] == step
        return lambda m: reached(m[cell], step)

    def peers(self) -> list[int]:
        return [i for i in self.members or range(self.size) if i != self.me]

    def others_first(self) -> list[int]:
        return [(self.me + k) % self.size for k in range(self.size)]

    # ---- the ways ------------------------------------------------------------------------

    def eager(self, c: int) -> None:
        """Stage, enter, reduce the pieces of all."""
        self.enter(c, staged=("in", c, self.me))
        for peer in self.peers():
            self.read(self.staging(peer, self.step), ("in", c, peer))

    def direct(self, c: int) -> None:
        """Inputs are read where they lie, between an entry and an exit step."""
        which = c % self.protocol.inputs
        self.write(self.input(self.me, which, 0), ("in", c, self.me))
        self.enter(c)
        for peer in self.peers():
            self.read(self.input(peer, which, 0), ("in", c, peer))
        if self.protocol.exit_barrier:
            self.enter(c)

    def sliced(self, c: int, in_place: bool = False) -> None:
        """Reduce one slice of each piece where the inputs lie, exchange the slices."""
        which = c % self.protocol.inputs
        for piece in range(PIECES):
            self.write(self.input(self.me, which, piece), ("in", c, self.me, piece))
        self.enter(c)
        for piece in range(PIECES):
            for peer in self.peers():
                self.read(self.input(peer, which, piece), ("in", c, peer, piece))
            self.gather_slices(c, piece)
            if in_place:
                self.write(self.input(self.me, which, piece), ("out", c, piece))

    def in_place(self, c: int) -> None:
        """Sliced, with the output over the input."""
        self.sliced(c, in_place=True)

    def relayed(self, c: int) -> None:
        """Sliced for inputs that are staged first, as a first step told all."""
        self.enter(c)
        for piece in range(PIECES):
            self.enter(c, staged=("in", c, self.me, piece))
            for peer in self.peers():
                self.read(self.staging(peer, self.step), ("in", c, peer, piece))
            self.gather_slices(c, piece)

    def gather_slices(self, c: int, piece: int) -> None:
        """GatherSlices in allreduce.cc."""
        self.enter(c, staged=("slice", c, self.me, piece))
        for rank in self.others_first()[1:]:
            self.read(self.staging(rank, self.step), ("slice", c, rank, piece))


def collectives(ways: Sequence[str], size: int = 2, protocol: Protocol | None = None) -> Model:
    """A group of ranks that do these collectives one after the other."""
    protocol = protocol or Protocol()
    cells: dict[Hashable, Any] = {}
    programs = {}
    for me in range(size):
        rank = _member(cells, ways, Rank(me, size, protocol))
        programs[f"rank {me}"] = rank.program
    return Model(cells, programs)


def teams(ways: Sequence[Sequence[str]], size: int = 2, protocol: Protocol | None = None) -> Model:
    """Ranks with a thread for each of several teams of all of them."""
    protocol = protocol or Protocol()
    cells: dict[Hashable, Any] = {}
    programs = {}
    for me in range(size):
        for team, its_ways in enumerate(ways):
            rank = _member(cells, its_ways, Rank(me, size, protocol, team))
            programs[f"rank {me}, team {team}"] = rank.program
    return Model(cells, programs)


def _member(cells: dict[Hashable, Any], ways: Sequence[str], rank: Rank) -> Rank:
    """Write the program of a member, and the cells that are its own."""
    me, protocol = rank.me, rank.protocol
    for flag in range(protocol.flags):
        cells[rank.flag(me, flag)] = protocol.first_step
    for descriptor in range(protocol.descriptors):
        cells[rank.descriptor(me, descriptor)] = None
    for buffer in range(protocol.staging_buffers):
        cells[rank.staging(me, buffer)] = None
    for which in range(protocol.inputs):
        for piece in range(PIECES):
            cells[rank.input(me, which, piece)] = None
    for c, way in enumerate(ways):
        getattr(rank, way)(10 * rank.team + c)
    return rank


def in_turn(
    sequence: Sequence[tuple[tuple[int, ...], str]], size: int, protocol: Protocol
) -> Model:
    """Ranks that do collectives in teams of these members, one after the other."""
    cells: dict[Hashable, Any] = {}
    programs = {}
    teams = list(dict.fromkeys(members for members, _ in sequence))
    for me in range(size):
        program: list[Step] = []
        mine = {}
        for number, members in enumerate(teams):
            rank = _member(cells, (), Rank(me, size, protocol, number, members))
            mine[members], rank.program = rank, program
        for c, (members, way) in enumerate(sequence):
            if me in members:
                getattr(mine[members], way)(c)
        programs[f"rank {me}"] = program
    return Model(cells, programs)
