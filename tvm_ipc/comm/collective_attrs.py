# SPDX-License-Identifier: Apache-2.0
"""The attributes of a collective, and the checks of their values.

Equality, hashing, printing and JSON of an operator come from its attributes. A module may come from
anywhere, so type inference checks the attributes as well as the functions that create operators.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import tvm
import tvm_ffi
from tvm_ffi.dataclasses import py_class

from tvm_ipc import arguments
from tvm_ipc.comm.collective_kinds import KINDS, Kind
from tvm_ipc.comm.mesh import Teams
from tvm_ipc.packed_functions import BACKENDS, MAX_WORKERS, ReduceKind

#: Teams that every session has: all workers, and the group of the calling worker.
NAMED_TEAMS = ("world", "group")
KNOWN_BACKENDS = ("auto", *BACKENDS)
REDUCTIONS = tuple(kind.name.lower() for kind in ReduceKind)


@py_class("tvm_ipc.CollectiveAttrs")
class CollectiveAttrs(tvm.ir.Attrs):  # type: ignore[misc]
    """Attributes of the operator `relax.comm.collective`.

    Attributes
    ----------
    kind : one of `KINDS`.
    reduction : "sum", "prod", "min", "max" or "avg", for a kind that reduces.
    team : "world", "group", or the teams into which the ranks are split.
    workers : the number of ranks in a team; 0 where it is unknown and does not matter.
    split_axis : the axis that is split among the ranks, for a kind that splits.
    concat_axis : the axis along which shards are concatenated, for a kind that concatenates.
    pairs : pairs of team indices, the sender and the receiver, for a kind with pairs.
    uneven : whether a shard may be smaller than others; see `tvm_ipc.comm`.
    backend : the backend that runs it; "auto" is the backend of the session.

    Examples
    --------
    >>> from tvm import relax
    >>> from tvm.script import relax as R
    >>> from tvm_ipc import comm
    >>> x = relax.Var("x", R.Tensor((4, 8), "float32"))
    >>> attrs = comm.allgather(x, workers=2).attrs
    >>> attrs.kind, attrs.concat_axis, attrs.workers
    ('allgather', 0, 2)
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
    """Return the kind of a collective; raise ValueError if its attributes are inconsistent."""
    kind = kind_of(attrs)
    name = kind.name
    if kind.reduces:
        if attrs.reduction is None:
            raise ValueError(f"{name}: reduction is None; expected one of {', '.join(REDUCTIONS)}")
        arguments.one_of(f"{name}: reduction", attrs.reduction, REDUCTIONS)
    elif attrs.reduction is not None:
        raise ValueError(
            f"{name}: reduction is {attrs.reduction!r}; expected None, since {name} does not reduce"
        )
    _check_team(kind, attrs.team, attrs.workers)
    for parameter, axis, expected in (
        ("split_axis", attrs.split_axis, kind.splits),
        ("concat_axis", attrs.concat_axis, kind.concatenates),
    ):
        if (axis is not None) != expected:
            wanted = "an axis of x" if expected else f"None, since {name} does not have one"
            raise ValueError(f"{name}: {parameter} is {axis}; expected {wanted}")
    if attrs.uneven and not (kind.splits or kind.concatenates):
        raise ValueError(f"{name}: uneven is True; expected False, since {name} has no shards")
    _check_pairs(kind, attrs.pairs, attrs.workers)
    arguments.one_of(f"{name}: backend", attrs.backend, KNOWN_BACKENDS)
    return kind


def _check_team(kind: Kind, team: Any, workers: int) -> None:
    name = kind.name
    if isinstance(team, str):
        if team not in NAMED_TEAMS:
            raise ValueError(f"{name}: team is 'world', 'group' or teams of ranks, not {team!r}")
        needs = kind.splits or kind.concatenates or kind.paired
        if workers < needs or workers > MAX_WORKERS:
            raise ValueError(
                f"{name}: workers is {workers} for the team {team!r}; expected 1 to {MAX_WORKERS}, "
                "since the result depends on the number of ranks in a team"
            )
        return
    teams = teams_of(name, team)
    if len(teams[0]) != workers:
        raise ValueError(f"{name}: workers is {workers}, but a team has {len(teams[0])} ranks")


def teams_of(name: str, teams: Any) -> Teams:
    """Return a team or several teams as tuples of ranks; raise an error that begins with `name`."""
    wanted = f"teams of equal size, of ranks 0 to {MAX_WORKERS - 1}, such as [[0, 1], [2, 3]]"
    lists = (list, tuple, tvm_ffi.Array)
    if not isinstance(teams, lists):
        raise arguments.wrong_type(f"{name}: team", wanted, teams)
    several = teams if all(isinstance(team, lists) for team in teams) else [teams]
    checked = tuple(
        arguments.integers(f"{name}: team", team, wanted, 0, MAX_WORKERS - 1) for team in several
    )
    printed = list(map(list, checked))
    if not checked or not all(checked):
        raise ValueError(f"{name}: team is {printed}; expected at least one rank in each team")
    if len({len(team) for team in checked}) > 1:
        raise ValueError(f"{name}: team is {wanted}, not {printed}")
    duplicates = [rank for rank, count in Counter(sum(checked, ())).items() if count > 1]
    if duplicates:
        raise ValueError(
            f"{name}: the team {printed} has rank {duplicates[0]} twice; expected each rank once"
        )
    return checked


def _check_pairs(kind: Kind, pairs: Any, workers: int) -> None:
    if (pairs is not None) != kind.paired:
        wanted = "pairs of a sender and a receiver" if kind.paired else "None"
        raise ValueError(f"{kind.name}: pairs is {pairs}; expected {wanted}")
    if pairs is None:
        return
    printed = [list(map(int, pair)) for pair in pairs]
    if not all(len(pair) == 2 and min(pair) >= 0 and max(pair) < workers for pair in printed):
        raise ValueError(
            f"{kind.name}: pairs is {printed}; expected pairs of indices in a team of {workers}"
        )
    targets = Counter(int(target) for _, target in pairs)
    if targets and max(targets.values()) > 1:
        target = targets.most_common(1)[0][0]
        raise ValueError(
            f"{kind.name}: pairs is {printed}, in which team index {target} receives twice; "
            "expected each receiver once"
        )
    if kind.name == "send_recv" and (len(pairs) != 1 or pairs[0][0] == pairs[0][1]):
        raise ValueError(f"send_recv: pairs is {printed}; expected one pair of different ranks")


def reduction_of(attrs: CollectiveAttrs) -> ReduceKind:
    """Return the reduction of a kind that reduces."""
    return ReduceKind[str(attrs.reduction).upper()]


def sources(attrs: CollectiveAttrs) -> tuple[int, ...]:
    """Return for each team index the index it receives from, -1 if it receives nothing."""
    senders = [-1] * attrs.workers
    for source, target in attrs.pairs or ():
        senders[target] = int(source)
    return tuple(senders)
