# SPDX-License-Identifier: Apache-2.0
"""What a rule is, and where operands have to be for it.

An operator is described as `einsum` describes one, by a label for each axis: of `matmul(a, b)` the
axes are those of `ik, kj -> ij`. Along each axis of the mesh one label may be divided: operands
that have it are divided along it, those that have not are replicated, and so are results. A label
that is reduced leaves a partial result. Partial operands stay partial where the operator allows
that, and are reduced first where not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from tvm import relax

from tvm_ipc.comm import Division, Mesh, Partial, Placement, Replica, Shard
from tvm_ipc.comm.placements import Placements

#: Labels of the axes of a tensor; None for an axis of extent 1 that is repeated.
Labels: TypeAlias = tuple[int | None, ...]
#: Which label an axis of the mesh divides and how, None for none.
Choice: TypeAlias = tuple[int, Division | None] | None
#: Given a label, how it is divided, and among how many ranks: where results are, or why not.
Carry: TypeAlias = Callable[[int, Division | None, int], Sequence[Placement] | str]

#: Why an axis is not divided.
ALL_OF_IT: Final = "it needs all of that axis"


class Refusal(Exception):  # noqa: N818 - it is caught, and its words become those of an error
    """Why an operator cannot be given what is there."""


@dataclass(frozen=True)
class Part:
    """What a rank computes of an operator, for rules that change more than its operands.

    Attributes
    ----------
    call : with what the rank has of its operands.
    results : the extents of what the rank has of the results.
    workers : among how many ranks a label is divided, for those that are.
    divisions : how, None for consecutive parts.
    builder : of the function that a rank runs.
    rank : the place of the rank among those that divide a label, a tensor of one int64.
    """

    call: relax.Call
    results: tuple[list[Any], ...]
    workers: Mapping[int, int]
    divisions: Mapping[int, Division | None]
    builder: relax.BlockBuilder
    rank: Callable[[int], relax.Expr]

    def emit(self, value: relax.Expr) -> relax.Expr:
        """Return a variable of the value."""
        return self.builder.emit(value)


def _never(_: Sequence[Any]) -> bool:
    return False


@dataclass(frozen=True)
class Related:
    """An axis of which operands have pieces, or parts, so that each is divided in its own way.

    Attributes
    ----------
    common : given how some operands are divided, None for consecutive parts, and among how many
        ranks: how the label is, None if it cannot be.
    of_operand : how an operand is divided if the label is.
    """

    common: Callable[[Mapping[int, Division | None], int], Division | None]
    of_operand: Callable[[int, Division, int], Division]


@dataclass(frozen=True)
class Rule:
    """What an operator does.

    Attributes
    ----------
    operands : the labels of each operand.
    results : those of each result.
    reduced : labels that no result has, and the reduction that makes the result of parts.
    whole : labels of which every rank needs all, and why.
    among : for labels that only some numbers of ranks divide: given the number, why not, or "".
    plain : labels of which parts have to be consecutive.
    counts_copies : whether reductions are right where several ranks have the same of a label.
    carry : where results are if a label is divided in some way, for rules whose results have
        another extent along it; it is asked where `whole` and `among` allow nothing, too.
    related : labels along which operands are divided in different ways; `carry` says of them where
        results are, which is asked without a division where there is none that fits.
    keeps : given the placements of the operands along one axis of the mesh, some of which are
        partial and none a shard: whether the results are partial in the same way.
    zeros : given for each operand whether it has zeros beyond the end of a label: whether results
        have.
    beyond : what operands need to have beyond the ends of their axes, if anything.
    local : what a rank calls; the operator with the rank's operands if None.
    """

    operands: tuple[Labels, ...]
    results: tuple[Labels, ...]
    reduced: Mapping[int, str] = field(default_factory=dict)
    whole: Mapping[int, str] = field(default_factory=dict)
    among: Mapping[int, Callable[[int], str]] = field(default_factory=dict)
    plain: frozenset[int] = frozenset()
    counts_copies: bool = False
    carry: Carry | None = None
    related: Mapping[int, Related] = field(default_factory=dict)
    keeps: Callable[[Sequence[Placement]], bool] = _never
    zeros: Callable[[Sequence[bool]], bool] = _never
    beyond: Mapping[int, int] = field(default_factory=dict)
    local: Callable[[Part], relax.Expr] | None = None

    def why_not(self, label: int | None, workers: int, division: Division | None = None) -> str:
        """Return why a label is not divided among some ranks, "" if it is."""
        if label is None:
            return "that axis is repeated"
        if division is not None and label in self.reduced and division.copies(workers) > 1:
            alike = len(set(division.copies_of(workers))) == 1
            if not (alike and self.counts_copies) or division.whole:
                return "it reduces over that axis, of which several ranks have the same"
        if self.carry is not None:
            found = self.carry(label, division, workers)
            return found if isinstance(found, str) else ""
        if label in self.whole:
            return self.whole[label]
        if division is not None and (label in self.plain or label in self.among):
            return f"parts of that axis are not consecutive, but {division}"
        return self.among[label](workers) if label in self.among else ""

    def results_of(self, choice: Choice, workers: int) -> list[Placement]:
        """Return where results are along an axis of the mesh that divides a label."""
        if choice is None:
            return [Replica() for _ in self.results]
        label, division = choice
        if label in self.reduced:
            return [Partial(self.reduced[label]) for _ in self.results]
        if self.carry is None:
            return [_along(axes, choice) for axes in self.results]
        found = self.carry(label, division, workers)
        if isinstance(found, str):
            raise Refusal(found)
        return list(found)

    def divided_by(
        self, here: Sequence[Placement], workers: int
    ) -> dict[tuple[int | None, Division | None], int]:
        """Return which labels operands divide and how, and the first operand that does.

        Parameters
        ----------
        here : where operands are along an axis of the mesh.
        workers : along that axis.
        """
        found: dict[tuple[int | None, Division | None], int] = {}
        related: dict[int | None, dict[int, Division | None]] = {}
        for k, (labels, one) in enumerate(zip(self.operands, here, strict=True)):
            if not isinstance(one, Shard):
                continue
            label = labels[one.axis]
            if label in self.related:
                related.setdefault(label, {})[k] = one.division
            else:
                found.setdefault((label, one.division), k)
        for label, given in related.items():
            assert label is not None, "related axes have a label"
            division = self.related[label].common(given, workers)
            found.setdefault((label, division), next(iter(given)))
        return found

    def operand_at(self, operand: int, choice: Choice, workers: int) -> Placement:
        """Return where an operand has to be along an axis of the mesh that divides a label."""
        labels = self.operands[operand]
        if choice is None or choice[0] not in labels or choice[0] not in self.related:
            return _along(labels, choice)
        label, division = choice
        assert division is not None, "a related label has a division"
        own = self.related[label].of_operand(operand, division, workers)
        return shard(labels.index(label), own, workers)


def needs_all(*labels: int | None) -> dict[int, str]:
    """Return labels as those of which every rank needs all."""
    return {label: ALL_OF_IT for label in labels if label is not None}


@dataclass(frozen=True)
class Decided:
    """Where operands have to be, and where the results are.

    Attributes
    ----------
    operands, results : their placements.
    choices : which label each axis of the mesh divides, and how.
    """

    operands: tuple[Placements, ...]
    results: tuple[Placements, ...]
    choices: tuple[Choice, ...]


def decide(mesh: Mesh, rule: Rule, names: Sequence[str], found: Sequence[Placements]) -> Decided:
    """Return where operands have to be; raise `Refusal` where that is not clear."""
    choices = [
        _choice(rule, names, [one[index] for one in found], name, workers)
        for index, (name, workers) in enumerate(mesh.axes.items())
    ]
    return placed_by(mesh, rule, names, found, choices)


def placed_by(
    mesh: Mesh,
    rule: Rule,
    names: Sequence[str],
    found: Sequence[Placements],
    choices: Sequence[Choice],
) -> Decided:
    """Return where operands have to be if each axis of the mesh divides a label."""
    operands: list[list[Placement]] = [[] for _ in found]
    results: list[list[Placement]] = [[] for _ in rule.results]
    for index, (choice, workers) in enumerate(zip(choices, mesh.axes.values(), strict=True)):
        here = [one[index] for one in found]
        targets: Sequence[Placement]
        partial = [one for one in here if isinstance(one, Partial)]
        if partial and choice is None and rule.keeps(here):
            targets = here
            outs: list[Placement] = [partial[0] for _ in results]
        else:
            targets = [rule.operand_at(k, choice, workers) for k in range(len(found))]
            outs = rule.results_of(choice, workers)
        for into, targets_of in ((operands, targets), (results, outs)):
            for one, target in zip(into, targets_of, strict=True):
                one.append(target)
    of_results = ["the result"] * len(results)
    for what, placements in zip([*names, *of_results], [*operands, *results], strict=True):
        _check_once(mesh, what, placements)
    return Decided(tuple(map(tuple, operands)), tuple(map(tuple, results)), tuple(choices))


def _choice(
    rule: Rule, names: Sequence[str], here: Sequence[Placement], mesh_axis: str, workers: int
) -> Choice:
    """Return the label that is divided along an axis of the mesh, None if none is."""
    divided: dict[tuple[int, Division | None], str] = {}
    for (label, division), k in rule.divided_by(here, workers).items():
        why_not = rule.why_not(label, workers, division)
        if label is None or why_not:
            raise Refusal(f"{names[k]} is {here[k]} along {mesh_axis!r}, and {why_not}")
        divided[label, division] = f"{names[k]} is {here[k]}"
        for other, one in enumerate(here if label in rule.related else ()):
            wanted = rule.operand_at(other, (label, division), workers)
            if isinstance(one, Shard) and one != wanted:
                divided.setdefault((label, one.division), f"{names[other]} is {one}")
    if len(divided) > 1:
        both = " and ".join(divided.values())
        different = "axes" if len({label for label, _ in divided}) > 1 else "parts of one axis"
        raise Refusal(f"{both} along {mesh_axis!r}, which are different {different} for it")
    return next(iter(divided), None)


def shard(axis: int, division: Division | None, workers: int) -> Shard:
    """Return a placement in the one way to say it."""
    return Shard(axis, None if division is None or division.is_plain(workers) else division)


def _along(labels: Labels, choice: Choice) -> Placement:
    if choice is None or choice[0] not in labels:
        return Replica()
    return Shard(labels.index(choice[0]), choice[1])


def _check_once(mesh: Mesh, what: str, placements: Sequence[Placement]) -> None:
    seen: dict[int, str] = {}
    for name, one in zip(mesh.axes, placements, strict=True):
        if isinstance(one, Shard):
            if one.axis in seen:
                raise Refusal(
                    f"axis {one.axis} of {what} would be divided along {seen[one.axis]!r} and "
                    f"{name!r}"
                )
            seen[one.axis] = name
