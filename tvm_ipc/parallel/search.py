# SPDX-License-Identifier: Apache-2.0
"""A search for the division of weights with which a rank is predicted to take least.

The program is gone through once, with some states side by side. A state says how weights are
divided so far, where the tensors lie that are still to be used, and what that has cost. Where a
weight is used for the first time, each state becomes one for each way to divide it, and the
cheapest are kept. Weights that differ by the number of their layer only are divided alike, so that
nothing branches after the first layer.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tvm import relax

from tvm_ipc.comm import Placement, Replica, Shard
from tvm_ipc.parallel.costs import Seconds, shape_of
from tvm_ipc.parallel.meet import tensors_among
from tvm_ipc.parallel.outcomes import Lies, Outcomes
from tvm_ipc.parallel.uses import variables_of
from tvm_ipc.transform.ir.rewrite import walk
from tvm_ipc.transform.rules.operation import short_name, tensor_types

#: How many states are kept where weights are chosen, and where there is no more choice.
_WIDE, _NARROW = 192, 12
#: For how many bindings a choice of a weight may have consequences: more than those of a layer.
_REACH: Final = 200
#: What it is worth to have nothing in memory, as a share of the time without division.
_MEMORY: Final = 0.1
#: Of plans that differ by less than this share, the one with the fewest collectives is taken.
_AS_GOOD: Final = 0.02


@dataclass(frozen=True)
class Weight:
    """A parameter that may be divided.

    Attributes
    ----------
    name : as plans know it.
    shape : its extents.
    size : its bytes.
    ways : where it may lie; that it is replicated comes first.
    """

    name: str
    shape: tuple[int, ...]
    size: int
    ways: tuple[Placement, ...]

    @property
    def group(self) -> tuple[str, tuple[int, ...]]:
        """What it shares with weights that are divided alike."""
        return re.sub(r"(?<![^.])\d+(?![^.])", "*", self.name), self.shape


@dataclass(frozen=True)
class Found:
    """A plan.

    Attributes
    ----------
    placements : of the weights that are divided.
    seconds : that are predicted.
    collectives : how many there are.
    """

    placements: dict[str, Shard]
    seconds: Seconds
    collectives: int


@dataclass
class _Step:
    """A binding.

    Attributes
    ----------
    var, value : of the binding.
    operands : the tensors of a call.
    params : the parameters of the function that it uses.
    key : what is the same for calls that are alike; below 0 for other bindings.
    several : whether the result is used more than once.
    dead : what is not used afterwards.
    """

    var: relax.Var
    value: relax.Expr
    operands: list[relax.Expr]
    params: list[relax.Var]
    key: int
    several: bool = False
    dead: list[relax.Var] = field(default_factory=list)


@dataclass
class _State:
    """What was decided, and what it has cost.

    Attributes
    ----------
    choices : of groups of weights, in the order in which they are used first.
    memory : what it costs that a rank has so many bytes of them.
    computing, communicating : seconds.
    collectives : how many there are.
    lie : where tensors lie that are used later.
    also : where else they were moved to already.
    """

    choices: tuple[Placement, ...] = ()
    memory: float = 0.0
    computing: float = 0.0
    communicating: float = 0.0
    collectives: int = 0
    lie: dict[relax.Var, Lies] = field(default_factory=dict)
    also: dict[relax.Var, tuple[Placement, ...]] = field(default_factory=dict)

    @property
    def cost(self) -> float:
        """What is to be least."""
        return self.memory + self.computing + self.communicating

    def move(self, seconds: float) -> None:
        """Communicate, if that takes any time."""
        self.communicating += seconds
        self.collectives += seconds > 0


class Search:
    """Plans for the functions of a program, whose times are added.

    Parameters
    ----------
    functions : that are gone through.
    weights : parameters that may be divided.
    fixed : where other parameters lie; those that are not named are replicated.
    outcomes : what becomes of calls.
    follows : whether a tensor that would be moved need not be, given it and where it lies.
    """

    def __init__(
        self,
        functions: Sequence[relax.Function],
        weights: Mapping[relax.Var, Weight],
        fixed: Mapping[relax.Var, Placement],
        outcomes: Outcomes,
        follows: Callable[[relax.Expr, Placement], bool],
    ) -> None:
        self.weights, self.fixed, self.outcomes = weights, fixed, outcomes
        self.follows = follows
        self.members: dict[Any, dict[str, Weight]] = {}
        for one in weights.values():
            self.members.setdefault(one.group, {})[one.name] = one
        self.groups: dict[Any, int] = {}
        self.keys: dict[Any, int] = {}
        total = sum(one.size for of in self.members.values() for one in of.values())
        #: The seconds without any division.
        self.whole = sum(map(self._whole, functions))
        self.price = _MEMORY * self.whole / max(1, total)
        states = [_State()]
        for function in functions:
            states = self._through(function, states)
        self.states = sorted(states, key=lambda one: one.cost)

    def best(self) -> Found:
        """Return the plan that is predicted to cost least, or hardly more with less collectives."""
        return self._found(self.states)

    def best_divided(self) -> Found | None:
        """Return the one that is predicted to cost least of those that divide anything."""
        divided = [one for one in self.states if any(isinstance(x, Shard) for x in one.choices)]
        return self._found(divided) if divided else None

    def _found(self, states: Sequence[_State]) -> Found:
        good = [one for one in states if one.cost <= states[0].cost * (1 + _AS_GOOD)]
        state = min(good, key=lambda one: one.collectives)
        placements = {
            name: choice
            for group, index in self.groups.items()
            if isinstance(choice := state.choices[index], Shard)
            for name in self.members[group]
        }
        return Found(placements, Seconds(state.computing, state.communicating), state.collectives)

    def _whole(self, function: relax.Function) -> float:
        seconds = 0.0
        for binding, value in walk(function):
            if binding is not None and isinstance(value, relax.Call):
                given = [shape_of(ty) for x in value.args for ty in tensor_types(x.ty)]
                made = [shape_of(ty) for ty in tensor_types(binding.var.ty)]
                seconds += self.outcomes.costs.operator(short_name(value), given, made)
        return seconds

    # ---- the program ------------------------------------------------------------------------

    def _through(self, function: relax.Function, states: list[_State]) -> list[_State]:
        """Return what states become that go through a function."""
        for state in states:
            state.lie, state.also = {}, {}
        steps = self._steps(function)
        seen: set[relax.Var] = set()
        left = 0  #: for how many more bindings choices may have consequences
        for step in steps:
            left -= 1
            for param in step.params:
                if param not in seen:
                    seen.add(param)
                    before = len(self.groups)
                    states = self._choose(param, states)
                    left = _REACH if len(self.groups) > before else left
            for state in states:
                self._take(step, state)
            if len(states) > 1:
                states = _cheapest(states, _WIDE if left > 0 else _NARROW)
        results = list(tensors_among([function.body.body]))
        value_of = {one.var: one.value for one in steps}
        variables = [_variable(one, value_of) for one in results]
        for state in states:
            for one, var in zip(results, variables, strict=True):
                lies = _lies(one, state)
                if not self.follows(var, lies):
                    state.move(self.outcomes.move(shape_of(one.ty), lies, Replica()))
        return states

    def _steps(self, function: relax.Function) -> list[_Step]:
        params = set(function.params)
        steps: list[_Step] = []
        uses: Counter[relax.Var] = Counter()
        last: dict[relax.Var, int] = {}
        for block in function.body.blocks:
            for binding in block.bindings[:]:
                value = binding.value
                used = list(variables_of(value))
                uses.update(used)
                last.update(dict.fromkeys(used, len(steps)))
                given = [one for one in dict.fromkeys(used) if one in params]
                step = _Step(binding.var, value, [], given, -1)
                if isinstance(value, relax.Call) and not isinstance(binding, relax.MatchCast):
                    step.operands = list(tensors_among(value.args))
                    step.key = self._key(value, binding.var)
                steps.append(step)
        uses.update(variables_of(function.body.body))
        for var, index in last.items():
            steps[index].dead.append(var)
        for step in steps:
            step.several = uses[step.var] > 1
        return steps

    def _key(self, call: relax.Call, var: relax.Var) -> int:
        words = [str(call.op), str(call.attrs), str(var.ty)]
        words += [
            str(x.ty) if isinstance(x.ty, (relax.TensorType, relax.TupleType)) else str(x)
            for x in call.args
        ]
        return self.keys.setdefault("; ".join(words), len(self.keys))

    def _choose(self, param: relax.Var, states: list[_State]) -> list[_State]:
        """Return the states with a parameter placed, in each way that there is."""
        weight = self.weights.get(param)
        if weight is None or weight.group in self.groups:
            for state in states:
                fixed = self.fixed.get(param, Replica())
                state.lie[param] = (
                    fixed if weight is None else state.choices[self.groups[weight.group]]
                )
            return states
        self.groups[weight.group] = len(self.groups)
        number = len(self.members[weight.group])
        made = []
        for state in states:
            for one in weight.ways:
                size = weight.size / (1 if isinstance(one, Replica) else self.outcomes.workers)
                made.append(
                    _State(
                        (*state.choices, one),
                        state.memory + self.price * number * size,
                        state.computing,
                        state.communicating,
                        state.collectives,
                        {**state.lie, param: one},
                        dict(state.also),
                    )
                )
        return made

    def _take(self, step: _Step, state: _State) -> None:
        """Go through a binding."""
        if step.key < 0:
            state.lie[step.var] = _lies(step.value, state)
        else:
            found = tuple(_lies(x, state) for x in step.operands)
            outcome = self.outcomes.of(
                step.key, step.value, step.var.ty, step.operands, found, step.several
            )
            state.computing += outcome.seconds
            moves = zip(step.operands, found, outcome.targets, outcome.moves, strict=True)
            for x, here, target, seconds in moves:
                if not seconds or (isinstance(here, Replica) and self.follows(x, here)):
                    continue
                # What is gathered once serves all calls that need it.
                if isinstance(x, relax.Var):
                    if target in (also := state.also.get(x, ())):
                        continue
                    state.also[x] = (*also, target)
                if isinstance(here, Replica):
                    state.computing += seconds
                else:
                    state.move(seconds)
            for seconds in outcome.reduces:
                state.move(seconds)
            state.lie[step.var] = outcome.lies
        for var in step.dead:
            state.lie.pop(var, None)
            state.also.pop(var, None)


def _lies(expr: relax.Expr, state: _State) -> Lies:
    if isinstance(expr, relax.Tuple):
        return tuple(_lies(one, state) for one in expr.fields)
    if isinstance(expr, relax.TupleGetItem):
        fields = _lies(expr.tuple_value, state)
        return fields[int(expr.index)] if isinstance(fields, tuple) else Replica()
    found = state.lie.get(expr) if isinstance(expr, relax.Var) else None
    return Replica() if found is None else found


def _variable(expr: relax.Expr, value_of: Mapping[relax.Var, relax.Expr]) -> relax.Expr:
    """Return the variable that a field of a tuple stands for."""
    if not isinstance(expr, relax.TupleGetItem) or not isinstance(expr.tuple_value, relax.Var):
        return expr
    made = value_of.get(expr.tuple_value)
    return made.fields[int(expr.index)] if isinstance(made, relax.Tuple) else expr


def _cheapest(states: Iterable[_State], number: int) -> list[_State]:
    """Return the cheapest states, of those that are alike one."""
    best: dict[Any, _State] = {}
    for state in states:
        alike = state.choices, tuple(state.lie.values()), tuple(state.also.items())
        other = best.get(alike)
        if other is None or state.cost < other.cost:
            best[alike] = state
    return sorted(best.values(), key=lambda one: one.cost)[:number]
