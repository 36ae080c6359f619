# SPDX-License-Identifier: Apache-2.0
"""Check that all ranks communicate in the same order, whatever the conditions of branches are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tvm import relax

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
    branches_of,
    describe_branches,
)
from tvm_ipc.verify.compare_collective_arguments import SignatureComparer
from tvm_ipc.verify.deadlock_simulator import DeadlockSimulator, Stuck
from tvm_ipc.verify.hazard_types_and_messages import Hazard, HazardKind
from tvm_ipc.verify.module_functions_and_summary_cache import Module
from tvm_ipc.verify.per_rank_and_uniform_values import PerRank, RankModel, Uniform
from tvm_ipc.verify.relax_as_plain_statements import (
    CALL_OPERATOR,
    CALL_PACKED,
    IF,
    Argument,
    Sequence,
    Statement,
)

#: The numbers of ranks to try for a program that does not imply its number of ranks.
_SIZES = (2, 3, 4)
#: The subject of hazards of branches.
_SHARED_ACTIONS = "communication"


class DivergenceCheck:
    """Checks the functions of a module that can be called from outside."""

    def __init__(self, module: Module, ranks: RankModel | None) -> None:
        self._module = module
        self._statements = {name: module.statements(name) for name in module.names}
        self._hazards: dict[tuple[Any, ...], Hazard] = {}
        self._ranks = ranks

    def hazards(self) -> list[Hazard]:
        """Return the hazards of all functions."""
        functions = self._statements.values()
        called = {name for function in functions for name in function.references}
        steps = (step for function in functions for step in _all_steps(function.body))
        if not any(map(_may_diverge, steps)):
            return []
        # Calls of functions of the module can involve other ranks: they may be recursive.
        if called.isdisjoint(self._statements) and not any(
            _may_act(function.body) for function in functions
        ):
            return []
        for name in self._statements:
            if self._module.is_public(name) or name not in called:
                self._check(name)
        return list(self._hazards.values())

    def _check(self, name: str) -> None:
        """Check one function for the number of ranks of the program, or for several numbers."""
        untried = [self._ranks] if self._ranks else [RankModel(size) for size in _SIZES]
        hazards_by_size: list[dict[tuple[Any, ...], Hazard]] = []
        while untried:
            ranks = untried.pop(0)
            trace = CommTraceBuilder(self._module, ranks)
            try:
                actions = trace.build(name)
            except TraceTooLongError:
                kind, limit = HazardKind.BRANCHES, f"more than {MOST_STEPS} steps"
                reason = "the check follows no more steps"
                hazard = Hazard(name, kind, _SHARED_ACTIONS, limit, reason, unknown=True)
                self._hazards[name, kind] = hazard
                return
            if self._ranks is None and trace.implied_sizes:
                size = max(trace.implied_sizes)
                untried = [RankModel(size)] if ranks.size != size else []
                hazards_by_size.clear()
                if untried:
                    continue
            hazards_by_size.append(_TraceCheck(actions, ranks, trace.comparer).hazards())
        for key in dict.fromkeys(key for hazards in hazards_by_size for key in hazards):
            first = next(hazards[key] for hazards in hazards_by_size if key in hazards)
            is_proved = all(
                key in hazards and not hazards[key].unknown for hazards in hazards_by_size
            )
            self._hazards[key] = first if is_proved else replace(first, unknown=True)


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
        branches = list(branches_of(self._actions))
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


def _all_steps(sequence: Sequence) -> Iterator[Statement]:
    """Yield the statements of a sequence, those in branches included."""
    for step in sequence.steps:
        yield step
        if step.kind == IF:
            yield from _all_steps(step.then)
            yield from _all_steps(step.otherwise)


def _may_diverge(step: Statement) -> bool:
    """Return whether ranks may act differently because of a statement."""
    if step.kind not in (CALL_PACKED, CALL_OPERATOR):
        return step.kind == IF
    function = packed_functions.find(_packed_name(step))
    return function is not None and (
        function in (TEAM_INDEX, TEAM, WORKER_RANK, WORKER_ID) or function.sync is Sync.P2P
    )


def _packed_name(step: Statement) -> str:
    """Return the name of the packed function that a statement calls, "" if it calls none."""
    if step.kind == CALL_PACKED:
        return step.name
    callee = step.args[0] if step.args else None  # of an operator that calls a packed function
    return str(callee.global_symbol) if isinstance(callee, relax.ExternFunc) else ""


def _may_act(sequence: Sequence) -> bool:
    """Return whether a sequence may communicate with other ranks."""
    if _is_nested(sequence.result):
        return True  # nested calls are not examined
    for step in sequence.steps:
        if any(map(_is_nested, step.args)):
            return True
        if step.kind == IF and (_may_act(step.then) or _may_act(step.otherwise)):
            return True
        if step.kind in (CALL_PACKED, CALL_OPERATOR):
            function = packed_functions.find(_packed_name(step))
            if function is not None and _involves_peers(function):
                return True
    return False


def _involves_peers(function: packed_functions.Function) -> bool:
    return (
        function.sync is not Sync.NONE
        or bool(function.exposes or function.starts)
        or function in (WAIT, PEER_VIEW)
    )


def _is_nested(argument: Argument) -> bool:
    if type(argument) is tuple:
        return any(map(_is_nested, argument))
    return type(argument) is Statement
