# SPDX-License-Identifier: Apache-2.0
"""Simulate the ranks of a program until all have ended or none can continue."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tvm_ipc.verify.comm_trace_types import Action, ActionKind
from tvm_ipc.verify.compare_collective_arguments import Agreement, SignatureComparer

#: The ranks of a team, the name that tells teams of the same ranks apart, and whether the team is
#: used by requests, which synchronize among themselves.
_TeamKey = tuple[tuple[int, ...], str, bool]


@dataclass(frozen=True)
class Stuck:
    """A rank that waits indefinitely, or whose call disagrees with that of another rank."""

    rank: int
    action: Action
    #: The ranks it waits for or disagrees with, and their current actions; None: has ended.
    others: tuple[tuple[int, Action | None], ...]
    disagree: bool = False
    example: str = ""  #: sizes at which they disagree
    unknown: str = ""  #: why the rank may not be stuck, "" if it is


@dataclass(eq=False)
class _Thread:
    """The program of a rank, or the thread that runs its requests."""

    rank: int
    actions: list[Action]
    runs_requests: bool = False
    position: int = 0
    entered: bool = False  #: whether the current action is recorded where peers look for it

    @property
    def current(self) -> Action | None:
        return self.actions[self.position] if self.position < len(self.actions) else None


#: The actions that each rank of a team has entered, in order.
_TeamLogs = defaultdict[_TeamKey, defaultdict[int, list[Action]]]


class DeadlockSimulator:
    """Runs the actions of all ranks.

    If `is_buffered`, a rank waits only where every implementation waits: sends complete before
    they are received, and partially synchronizing collectives return before all ranks entered.
    """

    def __init__(
        self,
        programs: Sequence[list[Action]],
        in_branches: frozenset[Action],
        comparer: SignatureComparer,
        is_buffered: bool,
    ) -> None:
        self._is_buffered = is_buffered
        self._in_branches = in_branches  #: actions that not all ranks may do
        self._comparer = comparer
        #: Possible hazards that stop no rank, by action and whether they are disagreements.
        self.doubts: dict[tuple[Action, bool], Stuck] = {}
        self._programs = [_Thread(rank, actions) for rank, actions in enumerate(programs)]
        self._workers = [_Thread(rank, [], runs_requests=True) for rank in range(len(programs))]
        self._entered: _TeamLogs = defaultdict(lambda: defaultdict(list))
        self._sent: defaultdict[tuple[int, int], list[Action]] = defaultdict(list)
        self._received: defaultdict[tuple[int, int], list[Action]] = defaultdict(list)
        self._exposed: _TeamLogs = defaultdict(lambda: defaultdict(list))
        #: By rank: the index of a START among its requests, of an EXPOSE among those to its team.
        self._indices: list[dict[Action, int]] = [{} for _ in programs]
        self._stuck: Stuck | None = None

    def run(self) -> Stuck | None:
        """Return a rank that is stuck, None if all ranks end."""
        threads = [*self._programs, *self._workers]
        progressed = True
        while progressed and self._stuck is None:
            progressed = False
            for thread in threads:
                while self._stuck is None and thread.current is not None and self._passes(thread):
                    thread.position, thread.entered = thread.position + 1, False
                    progressed = True
        if self._stuck is None:
            threads = [*self._workers, *self._programs]
            waiting = [self._wait_of(thread) for thread in threads if thread.current is not None]
            # A rank whose peer never comes is the cause; the others wait for it.
            self._stuck = min(waiting, key=self.peer_comes, default=None)
        return self._stuck

    def _passes(self, thread: _Thread) -> bool:
        """Return whether a thread can complete its current action now."""
        action, rank = thread.current, thread.rank
        assert action is not None
        is_first, thread.entered = not thread.entered, True
        if action.kind is ActionKind.START:
            assert action.started is not None
            self._indices[rank][action] = len(self._workers[rank].actions)
            self._workers[rank].actions.append(action.started)
            return True
        if action.kind is ActionKind.WAIT:
            ended = self._workers[rank].position
            if not action.starts:  # unknown, so possibly the last one
                return ended >= len(self._workers[rank].actions)
            return all(self._indices[rank].get(start, -1) < ended for start in action.starts)
        if action.kind is ActionKind.EXPOSE:
            return self._expose(action, thread)
        if action.kind is ActionKind.PEER_VIEW:
            return not self._missing_peers(action, rank)
        if action.kind in (ActionKind.SEND, ActionKind.RECEIVE):
            return self._passes_message(action, rank, is_first)
        return self._passes_sync(action, thread, is_first)

    def _passes_message(self, action: Action, rank: int, is_first: bool) -> bool:
        if not action.peers:
            self._doubt(action, rank, "its peer is unknown")
            return True
        peer = action.peers[rank]
        if peer is None:
            return True  # there is no such rank: the call raises an error
        sends = action.kind is ActionKind.SEND
        channel = (rank, peer) if sends else (peer, rank)
        own_ends = (self._sent if sends else self._received)[channel]
        peer_ends = (self._received if sends else self._sent)[channel]
        if is_first:
            own_ends.append(action)
            if len(peer_ends) >= len(own_ends) and not self._agree(
                action, rank, peer_ends[len(own_ends) - 1], peer
            ):
                return False
        if sends and self._is_buffered:
            return True
        return len(peer_ends) >= len(own_ends)

    def _passes_sync(self, action: Action, thread: _Thread, is_first: bool) -> bool:
        if action.teams is None:
            if action in self._in_branches:
                self._doubt(action, thread.rank, "its team is unknown")
            return True
        team = action.teams[thread.rank]
        if not team:
            return True
        entered = self._entered[team, action.team_copy, thread.runs_requests]
        if is_first and not self._enter(entered, action, thread.rank, team):
            return False
        count = len(entered[thread.rank])
        if action.kind is ActionKind.PARTIAL and self._is_buffered:
            return True
        return all(len(entered[peer]) >= count for peer in team)

    def _expose(self, action: Action, thread: _Thread) -> bool:
        """Record an exposed buffer; return whether it agrees with those of the peers."""
        team = () if action.teams is None else action.teams[thread.rank]
        exposed = self._exposed[team, action.team_copy, thread.runs_requests]
        self._indices[thread.rank][action] = len(exposed[thread.rank])
        return self._enter(exposed, action, thread.rank, team)

    def _enter(
        self, log: dict[int, list[Action]], action: Action, rank: int, team: tuple[int, ...]
    ) -> bool:
        """Record an action of a rank; return whether it agrees with those of the peers."""
        index = len(log[rank])
        log[rank].append(action)
        return all(
            self._agree(action, rank, log[peer][index], peer)
            for peer in team
            if len(log[peer]) > index
        )

    def _agree(self, action: Action, rank: int, peer_action: Action, peer: int) -> bool:
        """Return whether two ranks may do two actions together; note it where that is unknown."""
        if action is peer_action and not action.signature.is_per_rank:
            return True
        agreement, example = self._comparer.compare(
            action.signature, rank, peer_action.signature, peer
        )
        if agreement is Agreement.YES:
            return True
        stuck = Stuck(rank, action, ((peer, peer_action),), disagree=True, example=example)
        if agreement is Agreement.NO:
            self._stuck = stuck
            return False
        why = "that they pass equal arguments could not be proved"
        self.doubts.setdefault((action, True), replace(stuck, unknown=why))
        return True

    def _doubt(self, action: Action, rank: int, why: str) -> None:
        self.doubts.setdefault((action, False), Stuck(rank, action, (), unknown=why))

    def _missing_peers(self, action: Action, rank: int) -> list[int]:
        """Return the ranks that have not exposed yet the buffer that a PEER_VIEW views."""
        missing = []
        for start in action.starts:
            if start not in self._indices[rank] or not start.teams:
                continue
            team = start.teams[rank]
            peers: Sequence[int] = team  # if the peer is unknown, any of them
            if action.shift is not None and rank in team:
                peers = [team[(team.index(rank) + action.shift[rank]) % len(team)]]
            exposed = self._exposed[team, start.team_copy, False]
            missing += [peer for peer in peers if len(exposed[peer]) <= self._indices[rank][start]]
        return missing

    def _wait_of(self, thread: _Thread) -> Stuck:
        """Return which ranks a thread waits for."""
        action = thread.current
        assert action is not None
        unknown = ""
        if action.is_message:
            peer = action.peers[thread.rank]
            awaited = [] if peer is None else [peer]
        elif action.kind is ActionKind.PEER_VIEW:
            awaited = self._missing_peers(action, thread.rank)
            unknown = (
                "" if action.shift is not None else "the peer whose tensor it views is unknown"
            )
        elif action.kind is ActionKind.WAIT or action.teams is None:
            awaited = []
            waits_for_any = action.kind is ActionKind.WAIT and not action.starts
            unknown = "the request that it waits for is unknown" if waits_for_any else ""
        else:
            team = action.teams[thread.rank]
            entered = self._entered[team, action.team_copy, thread.runs_requests]
            count = len(entered[thread.rank])
            awaited = [peer for peer in team if len(entered[peer]) < count]
        threads = self._workers if thread.runs_requests else self._programs
        others = tuple((rank, threads[rank].current) for rank in awaited)
        return Stuck(thread.rank, action, others, unknown=unknown)

    def peer_comes(self, stuck: Stuck) -> bool:
        """Return whether the awaited action would come later if no other rank waited."""
        if stuck.disagree or not stuck.action.is_message:
            return True
        peer = stuck.action.peers[stuck.rank]
        if peer is None:
            return False
        wanted = ActionKind.RECEIVE if stuck.action.kind is ActionKind.SEND else ActionKind.SEND
        program = self._programs[peer]
        return any(
            action.kind is wanted and (not action.peers or action.peers[peer] == stuck.rank)
            for action in program.actions[program.position :]
        )
