# SPDX-License-Identifier: Apache-2.0
"""Represent what is known of a value on each rank: the value itself, or that it is uniform.

The condition of an `if` decides which collectives a rank calls. Its value is known if the program
computes it from the rank. It is uniform if it is, for example, the result of an all-reduce.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

from tvm_ipc.packed_functions import AnyTeam, Team
from tvm_ipc.tvm_moved_names import MatchBufferRegion, SBlock, SBlockRealize
from tvm_ipc.verify.evaluate_at_sample_points import evaluate

#: The members of the team of each rank, () for a rank without a team.
Teams = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class RankModel:
    """The number of ranks that run a program, and of the groups that they form."""

    size: int
    groups: int = 1
    are_groups_known: bool = True  #: whether `groups` is that of the session, and no assumption

    @cached_property
    def world(self) -> Teams:
        """The team of all ranks, for each rank."""
        return (tuple(range(self.size)),) * self.size

    def teams(self, team: AnyTeam) -> Teams | None:
        """Return the team of each rank, None if only the session knows it."""
        if team == Team.WORLD:
            return self.world
        ranks = self.world[0]
        if team == Team.GROUP:
            size = self.size // self.groups
            return tuple(ranks[rank // size * size :][:size] for rank in ranks)
        if isinstance(team, int):
            return None
        size, *members = team
        teams = [tuple(members[k : k + size]) for k in range(0, len(members), max(1, size))]
        return tuple(next((team for team in teams if rank in team), ()) for rank in ranks)


@dataclass(frozen=True)
class PerRank:
    """A number, or another argument of a call, whose value on each rank is known."""

    values: tuple[Any, ...]

    @property
    def is_uniform(self) -> bool:
        """Return whether all ranks have the same value."""
        return self.values.count(self.values[0]) == len(self.values)


def on_rank(value: Any, rank: int) -> Any:
    """Return the value that a rank has."""
    return value.values[rank] if isinstance(value, PerRank) else value


def per_rank(function: Callable[..., Any], ranks: RankModel, *operands: Any) -> Any:
    """Return the result of a function, for each rank where the results or operands differ."""
    if not any(isinstance(operand, PerRank) for operand in operands):
        return function(*operands)
    values = tuple(
        function(*(on_rank(operand, rank) for operand in operands)) for rank in range(ranks.size)
    )
    return values[0] if len(set(values)) == 1 else PerRank(values)


@dataclass(frozen=True)
class Uniform:
    """An unknown value that is the same on all ranks of a team."""

    teams: Teams
    key: int  #: equal values of different statements share it


#: The knowledge of a value; None: nothing is known.
KnownValue = PerRank | Uniform | None

_keys = count()


def uniform(teams: Teams) -> Uniform:
    """Return a new value, different from all before, that is the same on all ranks of a team."""
    return Uniform(teams, next(_keys))


def computed(operands: Iterable[KnownValue], ranks: RankModel) -> KnownValue:
    """Return what is known of a value that depends on some operands only."""
    teams = ranks.world
    for operand in operands:
        if operand is None or (isinstance(operand, PerRank) and not operand.is_uniform):
            return None
        if isinstance(operand, Uniform):
            pairs = list(zip(teams, operand.teams, strict=True))
            if not all(set(a) <= set(b) or set(b) <= set(a) for a, b in pairs):
                return None
            teams = tuple(min(pair, key=len) for pair in pairs)
    return uniform(teams)


def of_expression(expr: Any, known: Callable[[Any], KnownValue], ranks: RankModel) -> KnownValue:
    """Return what is known of an expression, from what `known` returns for its variables."""
    variables: set[Any] = set()
    tvm_ffi.structural_walk(expr, [(tvm.ir.Var, variables.add)])
    operands = {variable: known(variable) for variable in variables}
    if any(not isinstance(operand, PerRank) for operand in operands.values()):
        return computed(operands.values(), ranks)
    values: list[int] = []
    for rank in range(ranks.size):
        value = evaluate(expr, lambda var, k=rank: _at_rank(operands[var], k))  # type: ignore[misc]
        if value is None:
            return computed(operands.values(), ranks)
        values.append(value)
    return PerRank(tuple(values))


def _at_rank(known: KnownValue, rank: int) -> int | None:
    return known.values[rank] if isinstance(known, PerRank) else None


def of_kernel(
    function: tirx.PrimFunc, arguments: Mapping[int, KnownValue], ranks: RankModel
) -> dict[int, PerRank] | None:
    """Return the results of a kernel that computes scalars, by the positions of its parameters.

    The result is None for other kernels, and if a value that the kernel reads is unknown.
    """
    stores: list[Any] = []
    control_flow: list[Any] = []
    tvm_ffi.structural_walk(
        function.body,
        [
            (tirx.BufferStore, stores.append),
            *((kind, control_flow.append) for kind in _CONTROL_FLOW),
        ],
    )
    if any(map(_may_skip_or_repeat, control_flow)):
        return None
    if any(_elements(store.buffer) != 1 for store in stores):
        return None
    positions = {parameter: position for position, parameter in enumerate(function.params)}
    contents: dict[Any, tuple[int, ...]] = {}
    for parameter, position in positions.items():
        argument = arguments.get(position)
        if isinstance(argument, PerRank) and _elements(parameter) == 1:
            contents[parameter] = argument.values
    for store in stores:
        values = [_stored(store, contents, rank) for rank in range(ranks.size)]
        known = tuple(value for value in values if value is not None)
        if len(known) != ranks.size:
            return None
        contents[store.buffer] = known
    written = {store.buffer for store in stores} & positions.keys()
    return {positions[buffer]: PerRank(contents[buffer]) for buffer in written}


def _stored(store: Any, contents: Mapping[Any, tuple[int, ...]], rank: int) -> int | None:
    """Return the value that a statement stores on a rank, None if it is unknown."""

    def loaded(load: Any) -> int | None:
        return contents[load.source][rank] if load.source in contents else None

    return evaluate(store.value, lambda _: None, loaded)


def _elements(buffer: Any) -> int | None:
    """Return the number of elements of a buffer, None if it is symbolic."""
    extents = getattr(buffer.ty, "shape", None)
    if extents is None or not all(isinstance(extent, tirx.IntImm) for extent in extents):
        return None
    return math.prod(map(int, extents))


#: Statements that a kernel of scalars must not contain, unless they run exactly once.
_CONTROL_FLOW = (
    *(tirx.For, tirx.While, tirx.IfThenElse, tirx.Evaluate, tirx.DeclBuffer),
    *(MatchBufferRegion, SBlock, SBlockRealize),
)


def _may_skip_or_repeat(node: Any) -> bool:
    """Return whether a statement may run stores less or more than once."""
    if isinstance(node, SBlock):
        return node.init is not None
    if isinstance(node, SBlockRealize):
        return not isinstance(node.predicate, tirx.IntImm) or not int(node.predicate)
    return True
