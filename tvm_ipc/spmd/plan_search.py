# SPDX-License-Identifier: Apache-2.0
"""A beam search for the placements of weights with the least predicted time.

The search walks the program once with several states. A state has the placements chosen so far,
those of the tensors that are still used later, and the cost up to this point. At the first use of a
weight each state branches over the candidate placements of the weight, and the cheapest states are
kept. Weights that differ only by the number of their layer get the same placement, so the search
branches in the first layer only.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from tvm import relax

from tvm_ipc.analysis.resolve_variables import body_bindings, expanded, variables_of
from tvm_ipc.comm import Placement, Replica, Shard
from tvm_ipc.spmd.op_costs import Seconds, seconds_of_function, shape_of
from tvm_ipc.spmd.rules.axis_label_rule import Choice
from tvm_ipc.spmd.rules.operation import tensors_among
from tvm_ipc.spmd.sharded_call_costs import CallCosts, ResultPlacements

#: The number of states that are kept while choices are recent, and afterwards.
_WIDE, _NARROW = 192, 12
#: The number of bindings after a choice during which it counts as recent; more than a layer has.
_REACH: Final = 200
#: The price of storing all weights, as a fraction of the time with replicated weights.
_MEMORY: Final = 0.1
#: Among plans whose costs differ by less than this fraction, the fewest collectives win.
_AS_GOOD: Final = 0.02


@dataclass(frozen=True)
class Weight:
    """A parameter that may be sharded.

    Attributes
    ----------
    name : the name of the parameter in plans.
    shape : its extents.
    size : its bytes.
    candidates : the placements to try; the first one is replicated.
    """

    name: str
    shape: tuple[int, ...]
    size: int
    candidates: tuple[Placement, ...]

    @property
    def group(self) -> tuple[str, tuple[int, ...]]:
        """Return the key of the weights that get the same placement."""
        return re.sub(r"(?<![^.])\d+(?![^.])", "*", self.name), self.shape


@dataclass(frozen=True)
class FoundPlan:
    """A plan with its predicted time.

    Attributes
    ----------
    placements : the placements of the weights that are sharded.
    seconds : the predicted time.
    collectives : the number of collectives.
    """

    placements: dict[str, Shard]
    seconds: Seconds
    collectives: int


@dataclass(eq=False)
class _Step:
    """A binding of the program.

    Attributes
    ----------
    var, value : the variable and the value of the binding.
    operands : the tensors among the arguments of a call.
    params : the parameters of the function that it uses.
    key : a number that equal calls share; negative for bindings that are no calls.
    several_uses : whether the result is used more than once.
    dead : the variables that are not used afterwards.
    """

    var: relax.Var
    value: relax.Expr
    operands: list[relax.Expr]
    params: list[relax.Var]
    key: int
    several_uses: bool = False
    dead: list[relax.Var] = field(default_factory=list)


@dataclass(eq=False)
class _State:
    """A partial plan and its cost so far.

    Attributes
    ----------
    choices : the placements of groups of weights, in the order of their first uses.
    memory : the price of the bytes of weights on a rank, in seconds.
    computing, communicating : the predicted seconds.
    collectives : the number of collectives.
    placements : the placements of the tensors that are used later.
    copies : further placements in which these tensors are available already.
    """

    choices: tuple[Placement, ...] = ()
    memory: float = 0.0
    computing: float = 0.0
    communicating: float = 0.0
    collectives: int = 0
    placements: dict[relax.Var, ResultPlacements] = field(default_factory=dict)
    copies: dict[relax.Var, tuple[Placement, ...]] = field(default_factory=dict)

    @property
    def cost(self) -> float:
        """Return the cost that the search minimizes, in seconds."""
        return self.memory + self.computing + self.communicating

    def move(self, seconds: float) -> None:
        """Add the time of a collective, if it takes any."""
        self.communicating += seconds
        self.collectives += seconds > 0


class Search:
    """The search of a plan for the functions of a program, whose times are added.

    Parameters
    ----------
    functions : the functions of the program.
    weights : the parameters that may be sharded.
    fixed : the placements of other parameters; those without one are replicated.
    call_costs : the costs of calls.
    stays : returns whether a tensor with a placement need not be moved.
    preferred : by variable of a call, the label that it shards if its operands shard none.
    """

    def __init__(
        self,
        functions: Sequence[relax.Function],
        weights: Mapping[relax.Var, Weight],
        fixed: Mapping[relax.Var, Placement],
        call_costs: CallCosts,
        stays: Callable[[relax.Expr, Placement], bool],
        preferred: Mapping[relax.Var, Choice],
    ) -> None:
        self.weights, self.fixed, self.call_costs = weights, fixed, call_costs
        self.stays, self.preferred = stays, preferred
        #: The weights of each group, by name.
        self.members: dict[Any, dict[str, Weight]] = {}
        for weight in weights.values():
            self.members.setdefault(weight.group, {})[weight.name] = weight
        #: The index of each group in the choices of a state.
        self.groups: dict[Any, int] = {}
        self.keys: dict[Any, int] = {}
        total = sum(weight.size for group in self.members.values() for weight in group.values())
        #: The predicted seconds with all weights replicated.
        self.replicated_seconds = sum(
            seconds_of_function(function, call_costs.costs).total for function in functions
        )
        self.price_per_byte = _MEMORY * self.replicated_seconds / max(1, total)
        states = [_State()]
        for function in functions:
            states = self._walk(function, states)
        self.states = sorted(states, key=lambda state: state.cost)

    def best(self) -> FoundPlan:
        """Return the cheapest plan, or one that costs hardly more with fewer collectives."""
        return self._plan(self.states)

    def best_sharded(self) -> FoundPlan | None:
        """Return the cheapest plan that shards a weight, or None if no state does."""
        sharded = [
            state
            for state in self.states
            if any(isinstance(placement, Shard) for placement in state.choices)
        ]
        return self._plan(sharded) if sharded else None

    def _plan(self, states: Sequence[_State]) -> FoundPlan:
        good = [state for state in states if state.cost <= states[0].cost * (1 + _AS_GOOD)]
        state = min(good, key=lambda state: state.collectives)
        placements = {
            name: choice
            for group, index in self.groups.items()
            if isinstance(choice := state.choices[index], Shard)
            for name in self.members[group]
        }
        return FoundPlan(
            placements, Seconds(state.computing, state.communicating), state.collectives
        )

    # ---- the program ------------------------------------------------------------------------

    def _walk(self, function: relax.Function, states: list[_State]) -> list[_State]:
        """Return the states after a function."""
        for state in states:
            state.placements, state.copies = {}, {}
        steps = self._steps(function)
        seen: set[relax.Var] = set()
        recent = 0  #: The number of bindings for which the last choice still counts as recent.
        for step in steps:
            recent -= 1
            for param in step.params:
                if param not in seen:
                    seen.add(param)
                    before = len(self.groups)
                    states = self._choose(param, states)
                    recent = _REACH if len(self.groups) > before else recent
            for state in states:
                self._advance(step, state)
            if len(states) > 1:
                states = _cheapest(states, _WIDE if recent > 0 else _NARROW)
        result_tensors = list(tensors_among([function.body.body]))
        values = {step.var: step.value for step in steps}
        variables = list(tensors_among([expanded(function.body.body, values)]))
        for state in states:
            for result, var in zip(result_tensors, variables, strict=True):
                placement = _placements_of(result, state)
                if not self.stays(var, placement):
                    state.move(self.call_costs.move(shape_of(result.ty), placement, Replica()))
        return states

    def _steps(self, function: relax.Function) -> list[_Step]:
        params = set(function.params)
        uses = Counter(variables_of(function.body.body))
        steps: list[_Step] = []
        last: dict[relax.Var, _Step] = {}
        for binding in body_bindings(function):
            var, value = binding.var, binding.value
            used = Counter(variables_of(value))
            uses.update(used)
            step = _Step(var, value, [], [x for x in used if x in params], -1)
            if isinstance(value, relax.Call) and not isinstance(binding, relax.MatchCast):
                step.operands = list(tensors_among(value.args))
                step.key = self._key(value, var)
            steps.append(step)
            last.update(dict.fromkeys(used, step))
        for var, step in last.items():
            step.dead.append(var)
        for step in steps:
            step.several_uses = uses[step.var] > 1
        return steps

    def _key(self, call: relax.Call, var: relax.Var) -> int:
        words = [str(call.op), str(call.attrs), str(var.ty)]
        if var in self.preferred:
            words.append(str(self.preferred[var]))
        words += [
            str(x.ty) if isinstance(x.ty, (relax.TensorType, relax.TupleType)) else str(x)
            for x in call.args
        ]
        return self.keys.setdefault("; ".join(words), len(self.keys))

    def _choose(self, param: relax.Var, states: list[_State]) -> list[_State]:
        """Return the states with a parameter placed, one for each candidate placement."""
        weight = self.weights.get(param)
        if weight is None or weight.group in self.groups:
            for state in states:
                fixed = self.fixed.get(param, Replica())
                state.placements[param] = (
                    fixed if weight is None else state.choices[self.groups[weight.group]]
                )
            return states
        self.groups[weight.group] = len(self.groups)
        count = len(self.members[weight.group])
        branches = []
        for state in states:
            for placement in weight.candidates:
                workers = 1 if isinstance(placement, Replica) else self.call_costs.workers
                size = weight.size / workers
                branch = replace(
                    state,
                    choices=(*state.choices, placement),
                    memory=state.memory + self.price_per_byte * count * size,
                    placements={**state.placements, param: placement},
                    copies=dict(state.copies),
                )
                branches.append(branch)
        return branches

    def _advance(self, step: _Step, state: _State) -> None:
        """Add a binding to a state."""
        if step.key < 0:
            state.placements[step.var] = _placements_of(step.value, state)
        else:
            current = tuple(_placements_of(x, state) for x in step.operands)
            cost = self.call_costs.of(
                step.key,
                step.value,
                step.var.ty,
                step.operands,
                current,
                step.several_uses,
                self.preferred.get(step.var),
            )
            state.computing += cost.seconds
            moves = zip(step.operands, current, cost.targets, cost.moves, strict=True)
            for x, placement, target, seconds in moves:
                if not seconds or (isinstance(placement, Replica) and self.stays(x, placement)):
                    continue
                # A tensor is moved once for all calls that need it in the same placement.
                if isinstance(x, relax.Var):
                    if target in (copies := state.copies.get(x, ())):
                        continue
                    state.copies[x] = (*copies, target)
                if isinstance(placement, Replica):
                    state.computing += seconds
                else:
                    state.move(seconds)
            for seconds in cost.reduces:
                state.move(seconds)
            state.placements[step.var] = cost.placements
        for var in step.dead:
            state.placements.pop(var, None)
            state.copies.pop(var, None)


def _placements_of(expr: relax.Expr, state: _State) -> ResultPlacements:
    if isinstance(expr, relax.Tuple):
        return tuple(_placements_of(field, state) for field in expr.fields)
    if isinstance(expr, relax.TupleGetItem):
        fields = _placements_of(expr.tuple_value, state)
        return fields[int(expr.index)] if isinstance(fields, tuple) else Replica()
    placements = state.placements.get(expr) if isinstance(expr, relax.Var) else None
    return Replica() if placements is None else placements


def _cheapest(states: Iterable[_State], number: int) -> list[_State]:
    """Return the cheapest states, without duplicates that differ only by their costs."""
    best: dict[Any, _State] = {}
    for state in states:
        key = state.choices, tuple(state.placements.values()), tuple(state.copies.items())
        duplicate = best.get(key)
        if duplicate is None or state.cost < duplicate.cost:
            best[key] = state
    return sorted(best.values(), key=lambda state: state.cost)[:number]
