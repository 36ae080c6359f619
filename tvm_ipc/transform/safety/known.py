# SPDX-License-Identifier: Apache-2.0
"""What is known of a number or a tensor on each rank: what it is, or that ranks have the same.

A condition of an `if` decides which collectives a rank is in. It is known where it was computed
from the rank's number, and it is the same on all ranks where it came out of an all-reduce.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

import tvm
import tvm_ffi
from tvm import s_tir, tirx

from tvm_ipc.contract import AnyTeam, Team
from tvm_ipc.transform.safety.examples import evaluate

#: The team of each rank, () where it is in none.
Teams = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class World:
    """How many ranks run a program, and in how many groups."""

    size: int
    groups: int = 1

    def teams(self, team: AnyTeam) -> Teams | None:
        """Return the team of each rank, None where only the session knows it."""
        ranks = tuple(range(self.size))
        if team == Team.WORLD:
            return (ranks,) * self.size
        if team == Team.GROUP:
            size = self.size // self.groups
            return tuple(ranks[rank // size * size :][:size] for rank in ranks)
        if isinstance(team, int):
            return None
        size, *members = team
        parts = [tuple(members[k : k + size]) for k in range(0, len(members), max(1, size))]
        return tuple(next((part for part in parts if rank in part), ()) for rank in ranks)


@dataclass(frozen=True)
class Lanes:
    """What each rank has."""

    values: tuple[int, ...]

    @property
    def same(self) -> bool:
        """Whether all ranks have the same."""
        return len(set(self.values)) == 1


@dataclass(frozen=True)
class Alike:
    """What all ranks of a team have the same of, whatever that is."""

    teams: Teams
    key: int  #: of what is the same in different places of the program


#: None: nothing is known.
Known = Lanes | Alike | None

_keys = count()


def alike(teams: Teams) -> Alike:
    """Return something that ranks have the same of, another one than all before."""
    return Alike(teams, next(_keys))


def computed(of: Iterable[Known], world: World) -> Known:
    """Return what is known of something that is computed of others alone."""
    teams = world.teams(Team.WORLD)
    assert teams is not None
    for one in of:
        if one is None or (isinstance(one, Lanes) and not one.same):
            return None
        if isinstance(one, Alike):
            pairs = list(zip(teams, one.teams, strict=True))
            if not all(set(a) <= set(b) or set(b) <= set(a) for a, b in pairs):
                return None
            teams = tuple(min(pair, key=len) for pair in pairs)
    return alike(teams)


def of_expression(expr: Any, known: Callable[[Any], Known], world: World) -> Known:
    """Return what is known of an expression of variables."""
    variables: set[Any] = set()
    tvm_ffi.structural_walk(expr, [(tvm.ir.Var, variables.add)])
    given = {variable: known(variable) for variable in variables}
    if any(not isinstance(one, Lanes) for one in given.values()):
        return computed(given.values(), world)
    lanes: list[int] = []
    for rank in range(world.size):
        value = evaluate(expr, lambda one, k=rank: _lane(given[one], k))  # type: ignore[misc]
        if value is None:
            return computed(given.values(), world)
        lanes.append(value)
    return Lanes(tuple(lanes))


def _lane(known: Known, rank: int) -> int | None:
    return known.values[rank] if isinstance(known, Lanes) else None


def of_kernel(
    function: tirx.PrimFunc, given: Mapping[int, Known], world: World
) -> dict[int, Lanes] | None:
    """Return what a kernel of scalars computes, by the places of its parameters.

    None where it is no such kernel, or where not all that it reads is known.
    """
    stores: list[Any] = []
    others: list[Any] = []
    tvm_ffi.structural_walk(
        function.body,
        [(tirx.BufferStore, stores.append), *((kind, others.append) for kind in _NOT_OF_SCALARS)],
    )
    if any(map(_depends, others)) or any(_elements(store.buffer) != 1 for store in stores):
        return None
    places = {parameter: place for place, parameter in enumerate(function.params)}
    found: dict[Any, tuple[int, ...]] = {}
    for parameter, place in places.items():
        one = given.get(place)
        if isinstance(one, Lanes) and _elements(parameter) == 1:
            found[parameter] = one.values
    for store in stores:
        values = [_stored(store, found, rank) for rank in range(world.size)]
        known = tuple(value for value in values if value is not None)
        if len(known) != world.size:
            return None
        found[store.buffer] = known
    written = {store.buffer for store in stores} & places.keys()
    return {places[buffer]: Lanes(found[buffer]) for buffer in written}


def _stored(store: Any, found: Mapping[Any, tuple[int, ...]], rank: int) -> int | None:
    def loaded(load: Any) -> int | None:
        return found[load.source][rank] if load.source in found else None

    return evaluate(store.value, lambda _: None, loaded)


def _elements(buffer: Any) -> int | None:
    """Return how many elements a buffer has, None where that is symbolic."""
    extents = getattr(buffer.ty, "shape", None)
    if extents is None or not all(isinstance(one, tirx.IntImm) for one in extents):
        return None
    return math.prod(map(int, extents))


_NOT_OF_SCALARS = (
    *(tirx.For, tirx.While, tirx.IfThenElse, tirx.Evaluate, tirx.DeclBuffer),
    *(s_tir.MatchBufferRegion, s_tir.SBlock, s_tir.SBlockRealize),
)


def _depends(node: Any) -> bool:
    """Whether a store within it, or another one, may not be done, or be done again."""
    if isinstance(node, s_tir.SBlock):
        return node.init is not None
    if isinstance(node, s_tir.SBlockRealize):
        return not isinstance(node.predicate, tirx.IntImm) or not int(node.predicate)
    return True
