# SPDX-License-Identifier: Apache-2.0
"""The attributes of a collective, and the rules that they keep.

Equality, hashing, printing and JSON of an operator come from its attributes. A module may come from
anywhere, so type inference checks the rules too, not only the functions that make operators.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import tvm
import tvm_ffi
from tvm_ffi.dataclasses import py_class

from tvm_ipc import arguments
from tvm_ipc.comm.kinds import KINDS, Kind
from tvm_ipc.comm.mesh import Teams
from tvm_ipc.contract import BACKENDS, MAX_WORKERS, ReduceKind

#: Teams that every session has: all workers, and the group of a worker.
NAMED_TEAMS = ("world", "group")
KNOWN_BACKENDS = ("auto", *BACKENDS)
REDUCTIONS = tuple(kind.name.lower() for kind in ReduceKind)


@py_class("tvm_ipc.CollectiveAttrs")
class CollectiveAttrs(tvm.ir.Attrs):  # type: ignore[misc]
    """What a collective does, and with whom.

    Attributes
    ----------
    kind : one of `KINDS`.
    reduction : of a kind that reduces: "sum", "prod", "min", "max" or "avg".
    team : "world", "group", or the teams into which the ranks are divided.
    workers : the ranks of a team; 0 where it is not known, and does not matter.
    split_axis : of a kind that splits, the axis that is divided among the ranks.
    concat_axis : of a kind that joins, the axis along which the parts are put together.
    pairs : of a kind with pairs, those of a place in the team that sends, and one that receives.
    uneven : whether a part may be smaller than others: see `tvm_ipc.comm`.
    backend : who does it; "auto" is the backend of the session.
    """

    kind: str
    reduction: str | None = None
    team: Any = "world"
    workers: int = 0
    split_axis: int | None = None
    concat_axis: int | None = None
    pairs: tvm_ffi.Array[tvm_ffi.Array[int]] | None = None
    uneven: bool = False
    backend: str = "auto"


def kind_of(attrs: CollectiveAttrs) -> Kind:
    """Return the kind of a collective."""
    arguments.instance("collective: attrs", attrs, CollectiveAttrs, "attributes of a collective")
    return KINDS[arguments.one_of("collective: kind", attrs.kind, KINDS)]


def check_attributes(attrs: CollectiveAttrs) -> Kind:
    """Raise ValueError for the first rule that the attributes break; return the kind."""
    kind = kind_of(attrs)
    name = kind.name
    if kind.reduces:
        if attrs.reduction is None:
            raise ValueError(f"{name}: it reduces, and needs one of {', '.join(REDUCTIONS)}")
        arguments.one_of(f"{name}: reduction", attrs.reduction, REDUCTIONS)
    elif attrs.reduction is not None:
        raise ValueError(f"{name}: it reduces nothing, so it has no reduction {attrs.reduction!r}")
    _check_team(kind, attrs.team, attrs.workers)
    for axis, has, verb in (
        (attrs.split_axis, kind.splits, "divides"),
        (attrs.concat_axis, kind.joins, "joins"),
    ):
        if (axis is not None) != has:
            says = f"{verb} a tensor along an axis" if has else f"{verb} no tensor"
            raise ValueError(f"{name}: it {says}, so its axis cannot be {axis}")
    if attrs.uneven and not (kind.splits or kind.joins):
        raise ValueError(f"{name}: it has no parts, which might be uneven")
    _check_pairs(kind, attrs.pairs, attrs.workers)
    arguments.one_of(f"{name}: backend", attrs.backend, KNOWN_BACKENDS)
    return kind


def _check_team(kind: Kind, team: Any, workers: int) -> None:
    name = kind.name
    if isinstance(team, str):
        if team not in NAMED_TEAMS:
            raise ValueError(f"{name}: team is 'world', 'group' or teams of ranks, not {team!r}")
        needs = kind.splits or kind.joins or kind.paired
        if workers < needs or workers > MAX_WORKERS:
            raise ValueError(
                f"{name}: what it gives depends on how many ranks a team has; say 1 to "
                f"{MAX_WORKERS} workers for the team {team!r}, not {workers}"
            )
        return
    teams = teams_of(name, team)
    if len(teams[0]) != workers:
        raise ValueError(f"{name}: workers is {workers}, and a team has {len(teams[0])} ranks")


def teams_of(name: str, given: Any) -> Teams:
    """Return the teams that somebody gave, one of them or several, as they are kept."""
    wanted = f"teams of equal size, of ranks 0 to {MAX_WORKERS - 1}, such as [[0, 1], [2, 3]]"
    lists = (list, tuple, tvm_ffi.Array)
    if not isinstance(given, lists):
        raise arguments.wrong_type(f"{name}: team", wanted, given)
    listed = given if all(isinstance(one, lists) for one in given) else [given]
    teams = tuple(
        arguments.integers(f"{name}: team", one, wanted, 0, MAX_WORKERS - 1) for one in listed
    )
    shown = list(map(list, teams))
    if not teams or not all(teams):
        raise ValueError(f"{name}: a team has at least one rank; found {shown}")
    if len({len(one) for one in teams}) > 1:
        raise ValueError(f"{name}: team is {wanted}, not {shown}")
    twice = [rank for rank, count in Counter(sum(teams, ())).items() if count > 1]
    if twice:
        raise ValueError(
            f"{name}: the team {shown} has rank {twice[0]} twice; a rank has one place"
        )
    return teams


def _check_pairs(kind: Kind, pairs: Any, workers: int) -> None:
    if (pairs is not None) != kind.paired:
        says = "pairs say who sends to whom; give some" if kind.paired else "it has no pairs"
        raise ValueError(f"{kind.name}: {says}, not {pairs}")
    if pairs is None:
        return
    shown = [list(map(int, pair)) for pair in pairs]
    if not all(len(pair) == 2 and min(pair) >= 0 and max(pair) < workers for pair in shown):
        raise ValueError(
            f"{kind.name}: pairs are of two places in a team of {workers}, not {shown}"
        )
    targets = Counter(int(target) for _, target in pairs)
    if targets and max(targets.values()) > 1:
        target = targets.most_common(1)[0][0]
        raise ValueError(f"{kind.name}: place {target} would receive twice; pairs are {shown}")
    if kind.name == "send_recv" and (len(pairs) != 1 or pairs[0][0] == pairs[0][1]):
        raise ValueError(f"send_recv: one rank sends to another one, not {shown}")


def reduction_of(attrs: CollectiveAttrs) -> ReduceKind:
    """Return the reduction of a kind that reduces."""
    return ReduceKind[str(attrs.reduction).upper()]


def sources(attrs: CollectiveAttrs) -> tuple[int, ...]:
    """Return by the place of a member that of the one it receives from, -1 for nobody."""
    found = [-1] * attrs.workers
    for source, target in attrs.pairs or ():
        found[target] = int(source)
    return tuple(found)
