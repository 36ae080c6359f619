# SPDX-License-Identifier: Apache-2.0
"""Describe calls of packed functions as actions that their ranks must agree in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import relax

from tvm_ipc.packed_functions import AllReduceStrategy, AnyTeam, CollectiveFlag, Function, Team
from tvm_ipc.verify.comm_trace_types import KIND_OF_SYNC, Action, ActionKind
from tvm_ipc.verify.compare_collective_arguments import (
    DetailPerRank,
    ShapeNumbers,
    Signature,
    TensorSize,
)
from tvm_ipc.verify.known_calls import KnownCall, constant
from tvm_ipc.verify.known_values_in_tensors import AbstractValue, Ranks, TensorContents
from tvm_ipc.verify.per_rank_and_uniform_values import PerRank, RankModel, Teams
from tvm_ipc.verify.relax_as_plain_statements import Argument, Statement
from tvm_ipc.verify.symbolic_sizes_of_call_arguments import CallSizes

#: The tensor whose size all ranks agree in, where that is not the one they send.
_COMPARED = {"broadcast": "recv", "scatter": "recv"}
_NO_SHARDS = ShapeNumbers(())


class CallActions:
    """Creates the actions of one trace.

    `evaluate` returns the value of an argument.
    """

    def __init__(
        self,
        ranks: RankModel,
        contents: TensorContents,
        sizes: CallSizes,
        evaluate: Callable[[Argument], AbstractValue],
    ) -> None:
        self._ranks = ranks
        self._contents = contents
        self._sizes = sizes
        self._evaluate = evaluate
        #: The numbers of ranks that the program implies by splitting all ranks into teams.
        self.implied_sizes: set[int] = set()

    def action(self, call: KnownCall, step: Statement, caller: str) -> Action | None:
        """Return what a call does together with other ranks, None if it does nothing with them."""
        function = call.function
        kind = ActionKind.EXPOSE if function.exposes else KIND_OF_SYNC[function.sync]
        if kind is None:
            return None
        action = Action(kind, step, caller, self._signature(call, kind))
        if kind is ActionKind.SEND:
            return self._message(action, call)
        action.teams, action.team_copy = self.teams(call)
        return action

    def teams(self, call: KnownCall) -> tuple[Teams | None, str]:
        """Return the team of each rank, and a name that tells teams of the same ranks apart."""
        name = call.function.parameter_of_type("Team", "InGroup")
        if name is not None:
            argument = call.argument(name)
            requested = self._evaluate(argument) if type(argument) is int else None
            if isinstance(requested, Ranks) and requested.team is not None:
                members = requested.team
                teams = tuple(members if r in members else () for r in range(self._ranks.size))
                copy = requested.copy
                return (None if copy is None else teams), f"copy {copy}"
        team: AnyTeam | None = call.team()
        if isinstance(team, tuple):
            self.implied_sizes.add(len(team) - 1)
        if team is None:
            return None, ""
        is_predefined = isinstance(team, int) and team in (*Team,)
        return self._ranks.teams(team), f"team {team}" if is_predefined else "copy 0"

    def _message(self, action: Action, call: KnownCall) -> Action | None:
        """Complete the action of a send or receive; None if the program does not name the peer."""
        name = call.function.name.rpartition(".")[2]
        ranks = range(self._ranks.size)
        group_size = self._ranks.size // self._ranks.groups
        action.kind = ActionKind.SEND if name.startswith("send") else ActionKind.RECEIVE
        action.signature = Signature("", (("size", dict(action.signature.details)["size"]),))
        if name in ("send_to_next_group", "recv_from_prev_group"):
            shift = group_size if action.kind is ActionKind.SEND else -group_size
            action.peers = tuple(rank + shift if rank + shift in ranks else None for rank in ranks)
            return action
        peer_parameter = call.function.parameter_of_type("int")
        if peer_parameter is None:
            return None  # the controller may be the peer of worker 0
        argument = call.argument(peer_parameter)
        known = self._contents.known(self._evaluate(argument))
        if isinstance(known, PerRank):
            action.peers = tuple(peer if peer in ranks else None for peer in known.values)
        return action

    # ---- signatures -------------------------------------------------------------------------

    def _signature(self, call: KnownCall, kind: ActionKind) -> Signature:
        """Return the arguments that the other ranks have to pass too."""
        function = call.function
        name, root = general_name(function), None
        for suffix in ("_from_worker0", "_to_worker0"):
            if name.endswith(suffix):
                name, root = name.removesuffix(suffix), 0
        details: dict[str, Any] = {} if root is None else {"root": root}
        for parameter in function.parameters:
            details |= self._details_of(call, parameter.type, parameter.name)
        details |= {
            key: int(value)
            for key, value in function.defaults.items()
            if key in ("root", "strategy")
        }
        if "kind" in function.defaults:
            details["ReduceKind"] = int(function.defaults["kind"])
        details.setdefault("CollectiveFlag", int(CollectiveFlag.NONE))
        if name == "allreduce":
            details.setdefault("AllReduceStrategy", int(AllReduceStrategy.DEFAULT))
        if function.releases:
            details["number"] = len(call.positions(function.releases))
        compared = "tensor" if kind is ActionKind.EXPOSE else _COMPARED.get(name, "send")
        positions = call.positions(compared) or call.positions("send", "recv")
        if positions and not function.releases:
            size = self._sizes.tensor_size(call.at(positions[0]))
            if details.get("parts", _NO_SHARDS) != _NO_SHARDS:
                # `parts` specifies how much each rank sends; only the data type is compared.
                first = size.values[0] if isinstance(size, DetailPerRank) else size
                size = TensorSize(first.dtype, 0)
            details["size"] = size
        return Signature(name, tuple(sorted(details.items())))

    def _details_of(self, call: KnownCall, kind: str, name: str) -> dict[str, Any]:
        """Return what a parameter of a type and name contributes to a signature."""
        if kind in ("ReduceKind", "AllReduceStrategy", "CollectiveFlag"):
            return {kind: self._detail(call.argument(name))}
        if kind == "ReduceKindInShape":
            shape = self._sizes.shape_numbers(call.argument(name))
            has_kind = shape is not None and len(shape.numbers) == 1
            return {"ReduceKind": shape.numbers[0] if has_kind else None}
        if name in ("root", "epsilon"):
            return {name: self._detail(call.argument(name))}
        if name in ("sources", "parts"):
            return {name: self._sizes.shape_numbers(call.argument(name))}
        if name == "weight":
            return {name: self._sizes.element_count(call.argument(name))}
        return {}

    def _detail(self, argument: Argument) -> Any:
        """Return the number that is an argument, None where it is unknown."""
        known = self._contents.known(self._evaluate(argument))
        if isinstance(known, PerRank):
            return known.values[0] if known.is_uniform else DetailPerRank(known.values)
        return self._sizes.detail(argument)


def requested_team(call: KnownCall) -> Ranks | None:
    """Return the team that a call requests from the runtime, None unless its ranks are constant."""
    shape = call.argument("ranks")
    if not isinstance(shape, relax.ShapeExpr):
        return None
    ranks = [constant(rank) for rank in shape.values]
    known = tuple(rank for rank in ranks if rank is not None)
    copy = constant(call.argument("copy"))
    return Ranks(known, copy) if len(known) == len(ranks) else None


def general_name(function: Function) -> str:
    """Return the name that functions of all backends for the same collective share."""
    return (function.general_form or function.name).rpartition(".")[2]
