# SPDX-License-Identifier: Apache-2.0
"""The attributes of a collective, and the checks of their values.

Equality, hashing, printing and JSON of an operator come from its attributes. An attribute that has
its default is absent, so that programs print without it. A module may come from anywhere, so type
inference checks the attributes as well as the functions that create operators.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, tirx

from tvm_ipc import arguments
from tvm_ipc.comm.default_free_attrs import attributes_of, without_defaults
from tvm_ipc.comm.extent_arithmetic import constant
from tvm_ipc.comm.mesh import Teams
from tvm_ipc.packed_functions import BACKENDS, KINDS, MAX_WORKERS, Kind, ReduceKind

#: Teams that every session has: all workers, and the group of the calling worker.
NAMED_TEAMS = ("world", "group")
KNOWN_BACKENDS = ("auto", *BACKENDS)
REDUCTIONS = tuple(kind.name.lower() for kind in ReduceKind)
_LISTS = (list, tuple, tvm_ffi.Array)


@dataclass(frozen=True, eq=False)
class CollectiveAttrs:
    """Attributes of the operator `relax.comm.collective`.

    `CollectiveAttrs.of(call)` returns those of a call. The call itself has only the attributes that
    differ from their defaults, in the `tvm.ir.DictAttrs` that `call.attrs` is.

    Attributes
    ----------
    kind : one of `KINDS`.
    reduction : "sum", "prod", "min", "max", "avg", "band", "bor", "bxor" or "tree_sum", for a kind
        that reduces.
    scale : the factor of every tensor in a sum, None for no factor.
    team : "world", "group", or teams of equal size, which may leave out ranks.
    root_rank : the rank of a root that is not in the team, None if the root is an operand.
    workers : the number of ranks in a team. By default the length of the teams of `team`, and 0 for
        "world" and "group", where the number is unknown and does not matter.
    split_axis : the axis that is split among the ranks, for a kind that splits.
    concat_axis : the axis along which shards are concatenated, for a kind that concatenates.
    pairs : pairs of team indices, the sender and the receiver, for a kind with pairs. None for a
        `send_recv` whose source or target is symbolic, since both are then operands.
    uneven : whether a shard may be smaller than others; see `tvm_ipc.comm`.
    backend : the backend that runs it; "auto" is the backend of the session.

    Examples
    --------
    >>> from tvm import relax, tirx
    >>> from tvm.script import relax as R
    >>> from tvm_ipc import comm
    >>> x = relax.Var("x", R.Tensor((4, 8), "float32"))
    >>> call = comm.allgather(x, workers=2)
    >>> call
    R.comm.collective(x, concat_axis=0, kind="allgather", workers=2)
    >>> attrs = comm.CollectiveAttrs.of(call)
    >>> attrs.kind, attrs.concat_axis, attrs.workers, attrs.team
    ('allgather', 0, 2, 'world')
    """

    kind: str
    reduction: str | None = None
    scale: float | None = None
    team: Any = "world"
    root_rank: int | None = None
    workers: int = 0
    split_axis: int | None = None
    concat_axis: int | None = None
    pairs: Any = None
    uneven: bool = False
    backend: str = "auto"

    def __post_init__(self) -> None:
        """Set the number of workers of teams that list their ranks."""
        if self.workers == 0:
            object.__setattr__(self, "workers", self._listed_workers())

    def _listed_workers(self) -> int:
        """Return the length of the first team, 0 if the teams are not lists of ranks."""
        listed = isinstance(self.team, _LISTS) and self.team and isinstance(self.team[0], _LISTS)
        return len(self.team[0]) if listed else 0

    def ranks_outside(self, ranks: Iterable[int] | None) -> list[int]:
        """Return the ranks that are in none of the teams.

        Parameters
        ----------
        ranks : the ranks that run the program; None if only those that are less than the largest
            rank in a team are known to run it.

        Returns
        -------
        list of int
            The ranks, in order.

        Examples
        --------
        >>> from tvm_ipc import comm
        >>> comm.CollectiveAttrs("allreduce", "sum", team=[[0, 2]]).ranks_outside(range(4))
        [1, 3]
        """
        if isinstance(self.team, str):
            return []
        members = {int(rank) for team in self.team for rank in team}
        running = range(max(members)) if ranks is None else ranks
        return sorted(set(running) - members)

    @classmethod
    def of(cls, call: relax.Call) -> CollectiveAttrs:
        """Return the attributes of a call of the operator.

        Parameters
        ----------
        call : a call of `relax.comm.collective`.

        Returns
        -------
        CollectiveAttrs
            All attributes, with the defaults of those that the call does not have.

        Raises
        ------
        ValueError
            The call has an attribute that collectives do not have, or has no kind.

        Examples
        --------
        >>> from tvm import relax, tirx
        >>> from tvm.script import relax as R
        >>> from tvm_ipc import comm
        >>> x = relax.Var("x", R.Tensor((4, 8), "float32"))
        >>> comm.CollectiveAttrs.of(comm.broadcast(x)).backend
        'auto'
        """
        return attributes_of(cls, "collective", call.attrs)

    def to_call_attrs(self) -> tvm.ir.DictAttrs:
        """Return the attributes of a call: those that differ from their defaults.

        Returns
        -------
        tvm.ir.DictAttrs
            The attributes, from which `of` returns an equal object.

        Examples
        --------
        >>> from tvm_ipc import comm
        >>> attrs = comm.CollectiveAttrs("allreduce", reduction="sum", team=[[0, 1]])
        >>> sorted(attrs.to_call_attrs().keys())
        ['kind', 'reduction', 'team']
        """
        derived = ("workers",) if self.workers == self._listed_workers() else ()
        return without_defaults(self, also_without=derived)


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
    if attrs.scale is not None and attrs.reduction not in ("sum", "tree_sum"):
        raise ValueError(
            f"{name}: scale is {attrs.scale}; expected None, since only sums are scaled"
        )
    _check_team(kind, attrs.team, attrs.workers)
    if attrs.root_rank is not None:
        _check_root_outside(kind, attrs)
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


def _check_root_outside(kind: Kind, attrs: CollectiveAttrs) -> None:
    wanted = "None" if not kind.rooted else "the rank of a root that is not in the only team"
    root, teams = attrs.root_rank or 0, attrs.team
    fits = kind.rooted and not isinstance(teams, str) and len(teams) == 1
    if not fits or root in teams[0] or not 0 <= root < MAX_WORKERS:
        raise ValueError(f"{kind.name}: root_rank is {root}; expected {wanted}")


def teams_of(name: str, teams: Any) -> Teams:
    """Return a team or several teams as tuples of ranks; raise an error that begins with `name`."""
    wanted = f"teams of equal size, of ranks 0 to {MAX_WORKERS - 1}, such as [[0, 1], [2, 3]]"
    if not isinstance(teams, _LISTS):
        raise arguments.wrong_type(f"{name}: team", wanted, teams)
    several = teams if all(isinstance(team, _LISTS) for team in teams) else [teams]
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
    by_operands = pairs is None and kind.has_symbolic_pair
    if (pairs is not None) != kind.paired and not by_operands:
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
    if kind.has_symbolic_pair and len(pairs) != 1:
        raise ValueError(f"{kind.name}: pairs is {printed}; expected one pair")


def reduction_of(attrs: CollectiveAttrs) -> ReduceKind:
    """Return the reduction of a kind that reduces."""
    return ReduceKind[str(attrs.reduction).upper()]


def sources(attrs: CollectiveAttrs, operands: Sequence[Any]) -> list[Any]:
    """Return for each team index the index it receives from, -1 if it receives nothing.

    `operands` are the symbolic source and target, if `attrs` has no pairs. The runtime refuses -2,
    which the first entry is if the target is not an index in the team, and -3, which stands for a
    negative source.
    """
    if attrs.pairs is None:
        return _symbolic_sources(attrs.workers, *map(_as_int64, operands))
    senders = [-1] * attrs.workers
    for source, target in attrs.pairs:
        senders[target] = int(source)
    return senders


def _symbolic_sources(workers: int, source: Any, target: Any) -> list[Any]:
    none, no_target, no_source = map(_as_int64, (-1, -2, -3))
    source = tirx.Select(tirx.LT(source, _as_int64(0)), no_source, source)
    senders = [
        tirx.Select(tirx.EQ(target, _as_int64(index)), source, none) for index in range(workers)
    ]
    outside = tirx.Or(tirx.LT(target, _as_int64(0)), tirx.GE(target, _as_int64(workers)))
    return [tirx.Select(outside, no_target, senders[0]), *senders[1:]]


def _as_int64(number: Any) -> Any:
    value = constant(number)
    if value is not None:
        return tirx.IntImm("int64", value)
    return number if str(number.ty) == "int64" else tirx.Cast("int64", number)
