# SPDX-License-Identifier: Apache-2.0
"""What calls of the contract's functions have to do with other ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tvm import relax, tirx

from tvm_ipc import contract
from tvm_ipc.contract import RESULT, AnyTeam, CollectiveFlag, Meeting, Team
from tvm_ipc.contract.programs import COPY
from tvm_ipc.transform.safety.allocations import text_of
from tvm_ipc.transform.safety.calls import KnownCall, constant
from tvm_ipc.transform.safety.contents import Contents, Held, Ranks, Started, Thing
from tvm_ipc.transform.safety.known import Alike, Known, Lanes, Teams, World, alike, computed
from tvm_ipc.transform.safety.sequences import OF_MEETING, Act, Acts, Does, What, named
from tvm_ipc.transform.safety.statements import Argument, Statement


class RankCalls(Contents):
    """What a function does with other ranks, call by call."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.told: set[int] = set()  #: how many ranks there are, as divisions into teams say
        self._acts: Acts = []
        self._things: dict[int, Thing] = {}
        self._variables: dict[int, Any] = {}
        self._running: list[str] = []  #: functions of the module, each called by the one before

    def _thing(self, argument: Argument) -> Thing:
        """Return what an argument is."""
        raise NotImplementedError

    def _do(self, call: KnownCall, things: list[Thing], step: Statement) -> Thing:
        function = call.function
        act = self._act(call, step)
        if act is not None:
            self._acts.append(act)
        self._results(call, things, act)
        if function.shows:
            assert act is not None
            tensor = things[call.places(function.shows)[0]]
            return Started((act,), tensor if isinstance(tensor, Held) else None)
        if RESULT in function.scopes or function.result in ("Storage", "Tensor"):
            if not function.result_of:
                return self._fresh()
            source = things[call.places(function.result_of)[0]]
            # A tensor in a storage is another one than those that lie there later.
            return self._fresh() if function.result_of == "storage" else self._view(call, source)
        return None

    def _view(self, call: KnownCall, source: Thing) -> Thing:
        """Return a part of a tensor, which may be another one on each rank."""
        part = self._part(source)
        named = [one.name for one in call.function.parameters if one.type == "int"]
        numbers = [self._known(self._thing(call.argument(name))) for name in named]
        alike_ = call.function.named("Team") is None and computed(numbers, self._world) is not None
        return part if alike_ or not isinstance(part, Held) else replace(part, of_rank=True)

    def _results(self, call: KnownCall, things: list[Thing], act: Act | None) -> None:
        """Write what a function writes."""
        function = call.function
        bound = function.bind(len(things)) or ()
        apart = {*function.writes, *(function.peers_read if act is not None else ())}
        read = [
            self._known(thing)
            for parameter, thing in zip(bound, things, strict=True)
            if parameter.name not in apart
            and (parameter.type.startswith("Tensor") or isinstance(thing, (Lanes, Alike)))
        ]
        known = read[0] if function is COPY else computed(read, self._world)
        for parameter, thing in zip(bound, things, strict=True):
            if parameter.name not in function.writes:
                continue
            result = known
            if act is not None:
                told = act.teams if parameter.name in function.same else None
                result = None if told is None else computed([known, alike(told)], self._world)
            self._write(thing, result, beside=False)

    def _post(self, args: list[Argument], step: Statement) -> Thing:
        things = [self._thing(argument) for argument in args[1:]]
        function = contract.find(text_of(args[0]) or "")
        call = None if function is None else KnownCall(function, args[1:])
        act = Act(Does.POST, step, self._running[-1])
        if call is None or not call.fits():
            self._anything(things)
            name = text_of(args[0]) or "a function that is not known"
            act.posted = Act(Does.EXCHANGE, step, act.function, What(name))
        else:
            act.posted = self._act(call, step)
            self._results(call, things, act.posted)
        self._acts.append(act)
        return Started((act,))

    def _wait(self, does: Does, thing: Thing, step: Statement) -> Act:
        started = thing.acts if isinstance(thing, Started) else ()
        act = Act(does, step, self._running[-1], started=started)
        self._acts.append(act)
        return act

    def _peer(self, call: KnownCall, shown: Thing, step: Statement) -> Thing:
        """Wait for what another rank shows; return that."""
        act = self._wait(Does.PEER, shown, step)
        known = self._known(self._thing(call.argument("shift")))
        if isinstance(known, Lanes):
            act.shift = known.values
            if known.same and known.values[0] == 0 and isinstance(shown, Started):
                return shown.tensor
        return self._made(None)

    def _act(self, call: KnownCall, step: Statement) -> Act | None:
        """Return what a call does with other ranks, None where it does nothing."""
        function = call.function
        does = Does.SHOW if function.shows else OF_MEETING[function.meets]
        if does is None:
            return None
        act = Act(does, step, self._running[-1], self._what(call))
        if does is Does.SEND:
            return self._message(act, call)
        act.teams, act.which = self._teams(call)
        return act

    def _what(self, call: KnownCall) -> What:
        function = call.function
        details: dict[str, Any] = {}
        for parameter in function.parameters:
            if parameter.type in ("ReduceKind", "AllReduceStrategy", "CollectiveFlag"):
                details[parameter.type] = constant(call.argument(parameter.name))
            elif parameter.type == "ReduceKindInShape":
                kind = call.argument(parameter.name)
                if isinstance(kind, relax.ShapeExpr) and len(kind.values) == 1:
                    details["ReduceKind"] = constant(kind.values[0])
            elif parameter.name == "root":
                details["root"] = constant(call.argument(parameter.name))
            elif (
                parameter.name in ("send", "recv", "tensor") and function.meets is not Meeting.SOME
            ):
                details[parameter.name] = self._size(call.argument(parameter.name))
        if "kind" in function.given:
            details["ReduceKind"] = int(function.given["kind"])
        details.setdefault("CollectiveFlag", int(CollectiveFlag.NONE))
        name = named(function)
        if name.endswith("_worker0"):
            name, details["root"] = name.rpartition("_")[0].rpartition("_")[0], 0
        return What(name, tuple(details.items()))

    def _size(self, argument: Argument) -> tuple[str, int] | None:
        """Return type and number of the elements of a tensor, None where they are not known."""
        ty = self._variables[argument].ty if type(argument) is int else None
        if not isinstance(ty, relax.TensorType) or ty.dtype is None:
            return None
        if not isinstance(ty.shape, relax.ShapeExpr):
            return None
        count = 1
        for extent in ty.shape.values:
            if not isinstance(extent, tirx.IntImm):
                return None
            count *= int(extent)
        return str(ty.dtype.dtype), count

    def _teams(self, call: KnownCall) -> tuple[Teams | None, str]:
        """Return the team of each rank, and which of those of the same ranks it is."""
        name = call.function.named("Team", "InGroup")
        if name is not None:
            given = call.argument(name)
            found = self._things.get(given) if type(given) is int else None
            if isinstance(found, Ranks) and found.team is not None:
                lanes = range(self._world.size)
                teams = tuple(found.team if rank in found.team else () for rank in lanes)
                return (None if found.copy is None else teams), f"copy {found.copy}"
        team: AnyTeam | None = call.team()
        if isinstance(team, tuple):
            self.told.add(len(team) - 1)
        if team is None:
            return None, ""
        own = isinstance(team, int) and team in (*Team,)
        return self._world.teams(team), f"team {team}" if own else "copy 0"

    def _asked_for(self, call: KnownCall) -> Thing:
        given = call.argument("ranks")
        if not isinstance(given, relax.ShapeExpr):
            return None
        ranks = [constant(one) for one in given.values]
        known = tuple(rank for rank in ranks if rank is not None)
        copy = constant(call.argument("copy"))
        return Ranks(known, copy) if len(known) == len(ranks) else None

    def _place(self, call: KnownCall, things: list[Thing]) -> Thing:
        teams, _ = self._teams(call)
        (place,) = call.places("recv")
        known: Known = None
        if teams is not None and all(rank in team for rank, team in enumerate(teams)):
            known = Lanes(tuple(team.index(rank) for rank, team in enumerate(teams)))
        self._write(things[place], known, beside=False)
        return None

    def _message(self, act: Act, call: KnownCall) -> Act | None:
        """Return a message, None where the program does not say who sends it."""
        name = call.function.name.rpartition(".")[2]
        ranks, size = range(self._world.size), self._world.size // self._world.groups
        act.does = Does.SEND if name.startswith("send") else Does.RECEIVE
        act.what = What("", tuple(("size", one) for _, one in act.what.details))
        if name in ("send_to_next_group", "recv_from_prev_group"):
            shift = size if act.does is Does.SEND else -size
            act.peers = tuple(rank + shift if rank + shift in ranks else None for rank in ranks)
            return act
        other = call.function.named("int")
        if other is None:
            return None  # worker 0 may send what its controller has
        argument = call.argument(other)
        known = self._known(self._thing(argument))
        act.peers = (None,) * self._world.size
        if isinstance(known, Lanes):
            act.peers = tuple(one if one in ranks else None for one in known.values)
        return act
