# SPDX-License-Identifier: Apache-2.0
"""Describe calls of packed functions as actions that their ranks must agree in."""

from __future__ import annotations

from functools import cache

from tvm import relax, tirx

from tvm_ipc.packed_functions import (
    AllReduceStrategy,
    AnyTeam,
    CollectiveFlag,
    Function,
    Parameter,
    Team,
    find,
)
from tvm_ipc.verify.comm_trace_types import KIND_OF_SYNC, Action, ActionKind
from tvm_ipc.verify.compare_collective_arguments import Detail, Signature
from tvm_ipc.verify.known_calls import KnownCall, constant
from tvm_ipc.verify.known_values_in_tensors import Ranks, TensorContents
from tvm_ipc.verify.per_rank_and_uniform_values import (
    PerRank,
    RankModel,
    Teams,
    on_rank,
    per_rank,
)
from tvm_ipc.verify.relax_as_plain_statements import Statement
from tvm_ipc.verify.symbolic_sizes_of_call_arguments import CallSizes

#: The tensor whose size all ranks agree in, where that is not the one they send.
_SIZED = {"broadcast": "recv", "scatter": "recv"}
#: Parameters in which ranks agree, besides those of certain types.
_COMPARED = frozenset(("root", "epsilon", "sources", "parts", "weight"))


class CallActions:
    """Creates the actions of one trace."""

    def __init__(self, ranks: RankModel, contents: TensorContents, sizes: CallSizes) -> None:
        self._ranks = ranks
        self._contents = contents
        self._sizes = sizes
        #: The numbers of ranks that the program implies by the ranks that it lists in teams.
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
            requested = call.value(name)
            if isinstance(requested, Ranks) and requested.team is not None:
                members = requested.team
                teams = tuple(members if r in members else () for r in range(self._ranks.size))
                copy = requested.copy
                return (None if copy is None else teams), f"copy {copy}"
        team: AnyTeam | None = call.team()
        if isinstance(team, tuple):
            self.implied_sizes.add(max(team[1:], default=0) + 1)
        if team is None:
            return None, ""
        if team == Team.GROUP and self._ranks.groups == 1 and self._ranks.are_groups_known:
            team = Team.WORLD  # the runtime has one team for both
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
        known = self._contents.known(call.value(peer_parameter))
        if isinstance(known, PerRank):
            action.peers = tuple(peer if peer in ranks else None for peer in known.values)
        return action

    # ---- signatures -------------------------------------------------------------------------

    def _signature(self, call: KnownCall, kind: ActionKind) -> Signature:
        """Return the arguments that the other ranks have to pass too."""
        function = call.function
        name, fixed, compared = _form(function)
        details = {**fixed}
        for key, parameter in compared:
            details[key] = self._detail(call, parameter)
        if function.releases:
            details["number"] = (len(call.positions(function.releases)),)
            return Signature(name, tuple(sorted(details.items())))
        sized = "tensor" if kind is ActionKind.EXPOSE else _SIZED.get(name, "send")
        positions = call.positions(sized) or call.positions("send", "recv")
        if positions:
            details["size"] = size = self._sizes.tensor_size(call.arguments[positions[0]])
            if details.get("parts", ()) != ():
                # `parts` specifies how much each rank sends; only the data type is compared.
                details["size"] = (on_rank(size, 0)[0], 0)
        return Signature(name, tuple(sorted(details.items())))

    def _detail(self, call: KnownCall, parameter: Parameter) -> Detail:
        """Return what an argument contributes to a signature."""
        argument = call.argument(parameter.name)
        if type(argument) is tirx.IntImm:
            return (int(argument.value),)
        detail: Detail
        if parameter.name == "weight":
            detail = self._sizes.element_count(argument)
        elif parameter.type in ("Shape", "ReduceKindInShape"):
            detail = self._sizes.shape_numbers(argument)
        else:
            known = self._contents.known(call.value(parameter.name))
            if not isinstance(known, PerRank):
                known = self._sizes.number(argument)
            detail = per_rank(lambda number: (number,), self._ranks, known)
        return detail


@cache
def _form(
    function: Function,
) -> tuple[str, dict[str, Detail], list[tuple[str, Parameter]]]:
    """Return what all signatures of a function share, and the parameters that differ.

    It is the name that the functions of all backends for a collective share, and details.
    """
    general = find(function.general_form) or function
    name = general.name.rpartition(".")[2]
    details: dict[str, Detail] = {"CollectiveFlag": (int(CollectiveFlag.NONE),)}
    for suffix in ("_from_worker0", "_to_worker0"):
        if name.endswith(suffix):
            name, details["root"] = name.removesuffix(suffix), (0,)
    if name == "allreduce":
        details["AllReduceStrategy"] = (int(AllReduceStrategy.DEFAULT),)
    for parameter in general.parameters:
        key = _key(parameter)
        if key and parameter.name in function.defaults:
            details[key] = (int(function.defaults[parameter.name]),)
    keys = [(_key(parameter), parameter) for parameter in function.parameters]
    return name, details, [(key, parameter) for key, parameter in keys if key]


def _key(parameter: Parameter) -> str:
    """Return the key of a parameter in signatures, "" if ranks may pass different arguments."""
    if parameter.type in ("ReduceKind", "AllReduceStrategy", "CollectiveFlag"):
        return parameter.type
    if parameter.type == "ReduceKindInShape":
        return "ReduceKind"
    return parameter.name if parameter.name in _COMPARED else ""


def requested_team(call: KnownCall) -> Ranks | None:
    """Return the team that a call requests from the runtime, None unless its ranks are constant."""
    shape = call.argument("ranks")
    if not isinstance(shape, relax.ShapeExpr):
        return None
    ranks = [constant(rank) for rank in shape.values]
    known = tuple(rank for rank in ranks if rank is not None)
    copy = constant(call.argument("copy"))
    return Ranks(known, copy) if len(known) == len(ranks) else None
