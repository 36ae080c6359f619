# SPDX-License-Identifier: Apache-2.0
"""Check that all ranks communicate in the same order, whatever the conditions of branches are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tvm_ipc import packed_functions
from tvm_ipc.packed_functions import Sync
from tvm_ipc.packed_functions.program_function_declarations import (
    PEER_VIEW,
    TEAM,
    TEAM_INDEX,
    WAIT,
    WORKER_ID,
    WORKER_RANK,
)
from tvm_ipc.verify.comm_trace_builder import MOST_STEPS, CommTraceBuilder, TraceTooLongError
from tvm_ipc.verify.comm_trace_types import (
    SHARED,
    Actions,
    Branch,
    actions_of,
    actions_of_rank,
    describe_branches,
    items_of,
)
from tvm_ipc.verify.compare_collective_arguments import SignatureComparer
from tvm_ipc.verify.deadlock_simulator import DeadlockSimulator, Stuck
from tvm_ipc.verify.hazard_types_and_messages import Hazard, HazardKind
from tvm_ipc.verify.module_functions_and_summary_cache import Module
from tvm_ipc.verify.per_rank_and_uniform_values import PerRank, RankModel, Uniform

#: The numbers of ranks to try for a program that does not imply its number of ranks.
_SIZES = (2, 3, 4)
#: The subject of hazards of branches.
_SHARED_ACTIONS = "communication"


def find_order_hazards(module: Module, ranks: RankModel | None) -> list[Hazard]:
    """Return the order hazards of all functions that can be called from outside."""
    statements = [module.statements(name) for name in module.names]
    called = {name for function in statements for name in function.references}
    names = {name for function in statements for name in function.packed}
    functions = [function for function in map(packed_functions.find, names) if function]
    has_branches = any(function.has_branches for function in statements)
    if not has_branches and not any(map(_lets_ranks_diverge, functions)):
        return []
    # Calls of functions of the module can involve other ranks: they may be recursive.
    if called.isdisjoint(module.names) and not any(map(_involves_peers, functions)):
        return []
    hazards: dict[tuple[Any, ...], Hazard] = {}
    for name in module.names:
        if module.is_public(name) or name not in called:
            hazards |= _check(module, name, ranks)
    return list(hazards.values())


def _check(module: Module, name: str, ranks: RankModel | None) -> dict[tuple[Any, ...], Hazard]:
    """Check one function for the number of ranks of the program, or for several numbers."""
    untried = [ranks] if ranks else [RankModel(size, are_groups_known=False) for size in _SIZES]
    hazards_by_size: list[dict[tuple[Any, ...], Hazard]] = []
    while untried:
        tried = untried.pop(0)
        trace = CommTraceBuilder(module, tried)
        try:
            actions = trace.build(name)
        except TraceTooLongError:
            kind, limit = HazardKind.BRANCHES, f"more than {MOST_STEPS} steps"
            reason = "the check follows no more steps"
            return {(name, kind): Hazard(name, kind, _SHARED_ACTIONS, limit, reason, unknown=True)}
        if ranks is None and trace.implied_sizes:
            size = max(trace.implied_sizes)
            untried = [RankModel(size, are_groups_known=False)] if tried.size != size else []
            hazards_by_size.clear()
            if untried:
                continue
        hazards_by_size.append(_TraceCheck(actions, tried, trace.comparer).hazards())
    merged: dict[tuple[Any, ...], Hazard] = {}
    for key in dict.fromkeys(key for hazards in hazards_by_size for key in hazards):
        found = [hazards[key] for hazards in hazards_by_size if key in hazards]
        is_proved = len(found) == len(hazards_by_size) and not any(h.unknown for h in found)
        merged[key] = found[0] if is_proved else replace(found[0], unknown=True)
    return merged


class _TraceCheck:
    """Checks the trace of one function for one number of ranks."""

    def __init__(self, actions: Actions, ranks: RankModel, comparer: SignatureComparer) -> None:
        self._actions, self._ranks, self._comparer = actions, ranks, comparer
        self._in_branches = frozenset(
            action
            for branch in actions
            if isinstance(branch, Branch)
            for action in actions_of([*branch.then, *branch.otherwise])
        )
        self._hazards: dict[tuple[Any, ...], Hazard] = {}

    def hazards(self) -> dict[tuple[Any, ...], Hazard]:
        """Return the hazards, by keys that do not depend on the number of ranks."""
        branches = [item for item in items_of(self._actions) if isinstance(item, Branch)]
        for branch in branches:
            if not self._is_uniform(branch) and not branch.is_same:
                self._report_branch(branch)
        if not self._may_differ(branches):
            return self._hazards
        undecided = [branch for branch in branches if not isinstance(branch.condition, PerRank)]
        keys = list(dict.fromkeys(branch.key for branch in undecided if not branch.is_same))
        choices: list[frozenset[object]] = [frozenset(), frozenset(keys)]
        for key in keys if len(keys) > 1 else ():
            choices += [frozenset({key}), frozenset(keys) - {key}]
        for choice in choices:
            self._simulate(choice, certain=len(keys) < 2)
        return self._hazards

    def _is_uniform(self, branch: Branch) -> bool:
        """Return whether ranks that communicate in a branch are known to take the same one."""
        condition = branch.condition
        if isinstance(condition, PerRank):
            return True  # the simulation covers ranks that take different branches
        if not isinstance(condition, Uniform):
            return False
        for action in actions_of([*branch.then, *branch.otherwise]):
            for rank, team in enumerate(condition.teams):
                involved: set[int | None] = {*range(self._ranks.size)}
                if action.teams is not None:
                    involved = {*action.teams[rank]}
                elif action.peers:
                    involved = {action.peers[rank]}
                if action.kind in SHARED and action.started is None and not involved <= {*team}:
                    return False
        return True

    def _may_differ(self, branches: list[Branch]) -> bool:
        """Return whether ranks that take the same branches may still act differently."""
        if any(isinstance(branch.condition, PerRank) for branch in branches):
            return True
        return any(
            action.is_message
            or action.signature.is_per_rank
            or (action.teams and any(k not in team for k, team in enumerate(action.teams)))
            for action in actions_of(self._actions)
        )

    def _simulate(self, choice: frozenset[object], certain: bool) -> None:
        """Simulate all ranks where the conditions with the chosen keys hold."""
        programs = [
            actions_of_rank(self._actions, rank, lambda branch: branch.key in choice)
            for rank in range(self._ranks.size)
        ]
        for is_buffered in (True, False):
            simulator = DeadlockSimulator(programs, self._in_branches, self._comparer, is_buffered)
            stuck = simulator.run()
            for doubt in simulator.doubts.values():
                self._report(doubt, certain=False)
            if stuck is not None:
                is_proved = is_buffered and not stuck.unknown and simulator.peer_comes(stuck)
                self._report(stuck, certain and is_proved)
                return

    def _report(self, stuck: Stuck, certain: bool) -> None:
        kind = HazardKind.DISAGREES if stuck.disagree else HazardKind.STUCK
        key = (stuck.action.function, kind, stuck.action.step.variable)
        peers = " and ".join(
            f"rank {rank} " + ("has ended" if action is None else f"is in `{action.step}`")
            for rank, action in stuck.others
        )
        related = "; ".join(filter(None, (peers or "no peer arrives", stuck.unknown)))
        workers = f"{self._ranks.size} workers run it"
        example = f"{workers} and {stuck.example}" if stuck.example else workers
        known = self._hazards.get(key)
        if known is None or (known.unknown and certain):
            self._hazards[key] = Hazard(
                stuck.action.function,
                kind,
                f"rank {stuck.rank}",
                str(stuck.action.step),
                related,
                example,
                not certain,
            )

    def _report_branch(self, branch: Branch) -> None:
        key = (branch.function, HazardKind.BRANCHES, branch.step.variable)
        then, otherwise = describe_branches(branch.then, branch.otherwise)
        related = f"one branch has {then}, the other one {otherwise}"
        self._hazards[key] = Hazard(
            branch.function, key[1], _SHARED_ACTIONS, str(branch.step), related, unknown=True
        )


def _lets_ranks_diverge(function: packed_functions.Function) -> bool:
    """Return whether ranks may act differently because of a call."""
    return function in (TEAM_INDEX, TEAM, WORKER_RANK, WORKER_ID) or function.sync is Sync.P2P


def _involves_peers(function: packed_functions.Function) -> bool:
    return (
        function.sync is not Sync.NONE
        or bool(function.exposes or function.starts)
        or function in (WAIT, PEER_VIEW)
    )
