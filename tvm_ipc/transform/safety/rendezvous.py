# SPDX-License-Identifier: Apache-2.0
"""The ranks of a program, one beside the other, until all have ended or wait for each other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from tvm_ipc.transform.safety.sequences import Act, Does

#: Who meets: the ranks, in which team of theirs, and whether as works, which have their own.
_Key = tuple[tuple[int, ...], str, bool]


@dataclass(frozen=True)
class Stuck:
    """A rank that waits for ever, or that meets others who do something else."""

    rank: int
    act: Act
    others: tuple[tuple[int, Act | None], ...]  #: and where they are, None: at their end
    disagree: bool = False


@dataclass(eq=False)
class _Thread:
    """The program of a rank, or what does its works."""

    rank: int
    acts: list[Act]
    of_works: bool = False
    at: int = 0
    entered: bool = False  #: whether what is next has told others that it is there

    @property
    def now(self) -> Act | None:
        return self.acts[self.at] if self.at < len(self.acts) else None


@dataclass(eq=False)
class _Together:
    """What the ranks of a team met in, in the order of each."""

    entered: defaultdict[int, list[Act]] = field(default_factory=lambda: defaultdict(list))


class Rendezvous:
    """All ranks.

    Where `patient`, nobody waits but who has to: a message is sent before it is received, and who
    is in an exchange goes on before others are there.
    """

    def __init__(self, programs: Sequence[list[Act]], patient: bool) -> None:
        self._patient = patient
        self._programs = [_Thread(rank, acts) for rank, acts in enumerate(programs)]
        self._workers = [_Thread(rank, [], of_works=True) for rank in range(len(programs))]
        self._teams: defaultdict[_Key, _Together] = defaultdict(_Together)
        self._sent: defaultdict[tuple[int, int], list[Act]] = defaultdict(list)
        self._received: defaultdict[tuple[int, int], list[Act]] = defaultdict(list)
        self._shown: defaultdict[_Key, _Together] = defaultdict(_Together)
        #: Of posts among the works of a rank, and of shows among those to a team.
        self._places: list[dict[Act, int]] = [{} for _ in programs]
        self._stuck: Stuck | None = None

    def run(self) -> Stuck | None:
        """Return who is stuck, None where all ranks come to their end."""
        threads = [*self._programs, *self._workers]
        moved = True
        while moved and self._stuck is None:
            moved = False
            for thread in threads:
                while self._stuck is None and thread.now is not None and self._passes(thread):
                    thread.at, thread.entered = thread.at + 1, False
                    moved = True
        if self._stuck is None:
            threads = [*self._workers, *self._programs]
            waiting = [self._wait_of(one) for one in threads if one.now is not None]
            # What may come from elsewhere is why the others wait.
            self._stuck = min(waiting, key=self.comes, default=None)
        return self._stuck

    def _passes(self, thread: _Thread) -> bool:
        """Whether a thread gets over what is next."""
        act, rank = thread.now, thread.rank
        assert act is not None
        first, thread.entered = not thread.entered, True
        if act.does is Does.POST:
            assert act.posted is not None
            self._places[rank][act] = len(self._workers[rank].acts)
            self._workers[rank].acts.append(act.posted)
            return True
        if act.does is Does.WAIT:
            return all(
                self._places[rank].get(one, -1) < self._workers[rank].at for one in act.started
            )
        if act.does is Does.SHOW:
            return self._shows(act, thread)
        if act.does is Does.PEER:
            return not self._peers_missing(act, rank)
        if act.does in (Does.SEND, Does.RECEIVE):
            return self._passes_message(act, rank, first)
        return self._passes_meeting(act, thread, first)

    def _passes_message(self, act: Act, rank: int, first: bool) -> bool:
        peer = act.peers[rank]
        if peer is None:
            return True  # nobody knows whom
        sends = act.does is Does.SEND
        channel = (rank, peer) if sends else (peer, rank)
        mine = (self._sent if sends else self._received)[channel]
        others = (self._received if sends else self._sent)[channel]
        if first:
            mine.append(act)
        number = sum(one is not None for one in mine)
        if sends and self._patient:
            return True
        return len(others) >= number

    def _passes_meeting(self, act: Act, thread: _Thread, first: bool) -> bool:
        team = () if act.teams is None else act.teams[thread.rank]
        if not team:
            return True
        entered = self._teams[team, act.which, thread.of_works].entered
        if first:
            entered[thread.rank].append(act)
        number = len(entered[thread.rank])
        for rank in team:
            if len(entered[rank]) >= number:
                other = entered[rank][number - 1]
                if not act.what.may_agree(other.what):
                    self._stuck = Stuck(thread.rank, act, ((rank, other),), disagree=True)
                    return False
        if act.does is Does.EXCHANGE and self._patient:
            return True
        return all(len(entered[rank]) >= number for rank in team)

    def _shows(self, act: Act, thread: _Thread) -> bool:
        """Show something; what belongs to it must be the same."""
        team = () if act.teams is None else act.teams[thread.rank]
        shown = self._shown[team, act.which, thread.of_works].entered
        number = self._places[thread.rank][act] = len(shown[thread.rank])
        shown[thread.rank].append(act)
        for rank in team:
            if len(shown[rank]) > number and not act.what.may_agree(shown[rank][number].what):
                other = shown[rank][number]
                self._stuck = Stuck(thread.rank, act, ((rank, other),), disagree=True)
                return False
        return True

    def _peers_missing(self, act: Act, rank: int) -> list[int]:
        """Return the ranks that have not shown yet what a rank asks for."""
        missing = []
        for show in act.started:
            if show not in self._places[rank] or not show.teams or act.shift is None:
                continue
            team = show.teams[rank]
            peer = team[(team.index(rank) + act.shift[rank]) % len(team)]
            if len(self._shown[team, show.which, False].entered[peer]) <= self._places[rank][show]:
                missing.append(peer)
        return missing

    def _wait_of(self, thread: _Thread) -> Stuck:
        """Say for whom a thread waits."""
        act = thread.now
        assert act is not None
        if act.does in (Does.SEND, Does.RECEIVE):
            peer = act.peers[thread.rank]
            ranks = [] if peer is None else [peer]
        elif act.does is Does.PEER:
            ranks = self._peers_missing(act, thread.rank)
        elif act.does is Does.WAIT or act.teams is None:
            ranks = []
        else:
            entered = self._teams[act.teams[thread.rank], act.which, thread.of_works].entered
            number = len(entered[thread.rank])
            ranks = [one for one in act.teams[thread.rank] if len(entered[one]) < number]
        others = self._workers if thread.of_works else self._programs
        return Stuck(thread.rank, act, tuple((rank, others[rank].now) for rank in ranks))

    def comes(self, stuck: Stuck) -> bool:
        """Whether what a rank waits for would come later, if others did not wait."""
        if stuck.act.does not in (Does.SEND, Does.RECEIVE):
            return True
        peer = stuck.act.peers[stuck.rank]
        if peer is None:
            return False
        wanted = Does.RECEIVE if stuck.act.does is Does.SEND else Does.SEND
        program = self._programs[peer]
        rest = program.acts[program.at :]
        return any(one.does is wanted and one.peers[peer] == stuck.rank for one in rest)
