# SPDX-License-Identifier: Apache-2.0
"""Finds what a function does with other ranks, and on which conditions."""

from __future__ import annotations

from typing import Any, Protocol

import tvm
from tvm import relax

from tvm_ipc import contract
from tvm_ipc.contract.programs import (
    PEER,
    PLACE_IN_TEAM,
    TEAM,
    WAIT,
    WORKER_ID,
    WORKER_RANK,
)
from tvm_ipc.transform.safety import calls
from tvm_ipc.transform.safety.calls import KnownCall
from tvm_ipc.transform.safety.contents import Ranks, Thing
from tvm_ipc.transform.safety.known import (
    Alike,
    Known,
    Lanes,
    World,
    alike,
    computed,
    of_expression,
    of_kernel,
)
from tvm_ipc.transform.safety.rank_calls import RankCalls
from tvm_ipc.transform.safety.sequences import Act, Acts, Branch, Does, What
from tvm_ipc.transform.safety.statements import (
    CALL_GLOBAL,
    CALL_OPERATOR,
    CALL_PACKED,
    IF,
    ITEM,
    KILL,
    SAME,
    Argument,
    Sequence,
    Statement,
    Statements,
)

#: Steps that one function may take, with those of the functions that it calls, to be followed.
MOST_STEPS = 200_000


class TooLongError(Exception):
    """A function takes more steps than are followed."""


class TracedModule(Protocol):
    """What is known of the module around a function."""

    def function(self, name: str) -> Any:
        """Return a function of the module, or None."""

    def written(self, name: str) -> frozenset[int] | None:
        """Return which parameters a PrimFunc writes, None for what is none."""

    def steps(self, name: str) -> Statements:
        """Return a function of the module as plain objects."""


class Trace(RankCalls):
    """One function that is called from outside, run with what each rank knows."""

    def __init__(self, module: TracedModule, world: World) -> None:
        super().__init__(world)
        self._module = module
        self._left = MOST_STEPS

    def of(self, name: str) -> Acts:
        """Return what a function does."""
        parameters = self._module.function(name).params
        step = Statement(relax.Var(name, None), self._module.function(name))
        self._call(name, [self._parameter(parameter.ty) for parameter in parameters], step)
        return self._acts

    def _parameter(self, ty: Any) -> Thing:
        """Return a parameter of a type."""
        if isinstance(ty, relax.TupleType):
            return tuple(self._parameter(field) for field in ty.fields)
        if not isinstance(ty, relax.TensorType):
            return None
        return self._made(None)

    def _call(self, name: str, things: list[Thing], step: Statement) -> Thing:
        """Run a function of the module."""
        function, steps = self._module.function(name), self._module.steps(name)
        if name in self._running or len(function.params) != len(things):
            here = self._running[-1]
            self._acts.append(Act(Does.EXCHANGE, step, here, What(f"all that {name} does")))
            return self._anything(things)
        self._running.append(name)
        self._things.update(zip(map(hash, function.params), things, strict=True))
        self._variables.update(steps.variables)
        result = self._sequence(steps.body)
        self._running.pop()
        return result

    def _sequence(self, sequence: Sequence) -> Thing:
        for step in sequence.steps:
            self._left -= 1
            if self._left < 0:
                raise TooLongError
            if step.kind != KILL:
                self._things[step.variable] = self._step(step)
        return self._thing(sequence.result)

    def _step(self, step: Statement) -> Thing:
        if step.kind == IF:
            return self._if(step)
        if step.kind == CALL_GLOBAL:
            return self._global(step.name, step.args, step)
        if step.kind == CALL_PACKED:
            return self._packed(step.name, step.args, step)
        if step.kind == CALL_OPERATOR:
            return self._operator(step)
        if step.kind == ITEM:
            whole = self._thing(step.args[0])
            return whole[step.args[1]] if isinstance(whole, tuple) else self._anything([whole])
        if step.kind == SAME:
            return self._bind(step, self._thing(step.args[0]))
        return self._anything([self._thing(argument) for argument in step.args])

    def _thing(self, argument: Argument) -> Thing:
        kind = type(argument)
        if kind is int:
            return self._things.get(argument)
        if kind is tuple:
            return tuple(self._thing(part) for part in argument)
        if kind is Statement:
            return self._step(argument)
        if kind is tvm.ir.GenericConst:
            number = _scalar(argument)
            same = alike(self._everyone)
            return self._made(same if number is None else Lanes((number,) * self._world.size))
        if tvm.ir.is_prim_expr(argument):
            return of_expression(argument, self._number, self._world)
        return None

    def _number(self, variable: Any) -> Known:
        found = self._things.get(hash(variable))
        return found if isinstance(found, (Lanes, Alike)) else None

    def _bind(self, step: Statement, thing: Thing) -> Thing:
        """Give names to the numbers of a shape."""
        values: Any = getattr(step.bound.ty, "values", None) or ()
        if isinstance(thing, Ranks) and thing.team is None and len(values) == 1:
            self._things[hash(values[0])] = Lanes(tuple(range(self._world.size)))
        return thing

    # ---- steps ------------------------------------------------------------------------------

    def _if(self, step: Statement) -> Thing:
        condition = self._known(self._thing(step.args[0]))
        if isinstance(condition, Lanes) and condition.same:
            return self._sequence(step.then if condition.values[0] else step.otherwise)
        branch = Branch(condition, step, self._running[-1])
        outer, before, self._acts, self._before = self._acts, self._before, branch.then, {}
        self._depth += 1
        first = self._sequence(step.then)
        then, self._acts = self._undo(), branch.otherwise
        second = self._sequence(step.otherwise)
        otherwise, self._acts, self._before = self._undo(), outer, before
        self._depth -= 1
        self._acts.append(branch)
        self._join(condition, then, otherwise)
        return self._merge(condition, first, second)

    def _global(self, name: str, args: list[Argument], step: Statement) -> Thing:
        things = [self._thing(argument) for argument in args]
        written = self._module.written(name)
        if written is None:
            function = self._module.function(name)
            if not isinstance(function, relax.Function):
                return self._anything(things)
            return self._call(name, things, step)
        known = {place: self._known(one) for place, one in enumerate(things)}
        found = of_kernel(self._module.function(name), known, self._world)
        read = computed([one for place, one in known.items() if place not in written], self._world)
        for place in written:
            if place < len(things):
                if found is not None and place in found:
                    self._write(things[place], found[place], beside=False)
                else:
                    self._write(things[place], read)
        return None

    def _operator(self, step: Statement) -> Thing:
        name, args = step.name, step.args
        if name in ("relax.call_pure_packed", "relax.call_builtin_with_ctx"):
            given = args[1:]
            if name == "relax.call_builtin_with_ctx" and given and type(given[0]) is tuple:
                given = [*given[0]]
            if isinstance(args[0], relax.ExternFunc):
                return self._packed(str(args[0].global_symbol), given, step)
        if name == "relax.vm.call_tir_dyn":
            given = [*args[1]] if type(args[1]) is tuple else [args[1]]
            return self._global(args[0].name_hint, given, step)
        things = [self._thing(argument) for argument in args]
        if name.rpartition(".")[2] in ("alloc_tensor", "alloc_storage"):
            return self._fresh()
        if name in calls.VIEW_OPERATORS:
            return self._part(things[0], name == "relax.memory.view")
        if name in calls.UNKNOWN_OPERATORS or name == "relax.call_tir_inplace":
            return self._anything(things)
        if isinstance(step.bound.ty, relax.TensorType):
            return self._made(computed(map(self._known, things), self._world))
        return None

    # ---- packed functions -------------------------------------------------------------------

    def _packed(self, name: str, args: list[Argument], step: Statement) -> Thing:
        if args and isinstance(args[0], tvm.ir.GlobalVar):  # captured in a graph, or of any shape
            given = args[1:]
            if len(given) == 1 and type(given[0]) is tuple:
                given = [*given[0]]
            return self._global(args[0].name_hint, given, step)
        things = [self._thing(argument) for argument in args]
        function = contract.find(name)
        if function is None:
            if name in calls.VIEWS:
                return self._part(things[0], is_part=False)
            return None if name in calls.READERS else self._anything(things)
        call = KnownCall(function, args)
        if not call.fits():
            return self._anything(things)
        if function is WORKER_RANK:
            return Lanes(tuple(range(self._world.size)))
        if function is WORKER_ID:
            return Ranks(None)
        if function is TEAM:
            return self._asked_for(call)
        if function is PLACE_IN_TEAM:
            return self._place(call, things)
        if function.posts:
            return self._post(args, step)
        if function is WAIT:
            self._wait(Does.WAIT, things[0], step)
            return None
        if function is PEER:
            return self._peer(call, things[0], step)
        return self._do(call, things, step)

    # ---- ranks ------------------------------------------------------------------------------


def _scalar(const: tvm.ir.GenericConst) -> int | None:
    """Return the integer that a constant is, None where it is something else."""
    value = const.value
    if isinstance(value, (bool, int)):
        return int(value)
    if not hasattr(value, "numpy"):
        return None
    array = value.numpy()
    return int(array.reshape(())) if array.size == 1 and array.dtype.kind in "biu" else None
