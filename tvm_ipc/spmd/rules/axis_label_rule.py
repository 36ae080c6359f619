# SPDX-License-Identifier: Apache-2.0
"""Sharding rules: how an operator relates the axes of its operands and results.

A rule labels axes as `einsum` does: `matmul(a, b)` is `ik, kj -> ij`. Along each axis of the mesh
at most one label is sharded. Operands and results that have the label are sharded along it, and the
others are replicated. Sharding a label that is reduced leaves a partial result. Partial operands
stay partial where the operator allows it, and are reduced before the operator where it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from tvm import relax

from tvm_ipc.comm import Division, Mesh, Partial, Placement, Replica, Shard, Teams
from tvm_ipc.comm.placements import Placements

#: The label of each axis of a tensor; None for an axis of extent 1 that is broadcast.
Labels: TypeAlias = tuple[int | None, ...]
#: The label that is sharded along an axis of the mesh, and its division; None for no label.
Choice: TypeAlias = tuple[int, Division | None] | None
#: Maps the division of a label and the number of ranks to the placements of the results, or to the
#: reason why the label cannot be sharded.
Propagate: TypeAlias = Callable[[Division | None, int], Sequence[Placement] | str]
#: Maps a result, its placement and the number of ranks to the label and the division that give it.
Origin: TypeAlias = Callable[[int, Shard, int], Choice]

#: Why an axis cannot be sharded.
ALL_OF_IT: Final = "it needs all of that axis"


class Refusal(Exception):  # noqa: N818 - it is caught, and its text becomes that of an error
    """Raised when an operator does not support the placements of its operands."""


@dataclass(frozen=True, eq=False)
class LocalCall:
    """The call that a rank makes, for rules that change more than the operands.

    Attributes
    ----------
    call : the call with the shards of the rank as operands.
    results : the extents of the rank's shard of each result.
    workers : by sharded label, the number of ranks that share it.
    divisions : by sharded label, its division; None for consecutive shards.
    teams : by sharded label, the teams of the ranks that share it.
    builder : builds the function that the rank runs.
    rank : returns the index of the rank among those that share a label, as a tensor of one int64.
    report : notes a collective that the call contains: its kind, the label, and the reason.
    """

    call: relax.Call
    results: tuple[list[Any], ...]
    workers: Mapping[int, int]
    divisions: Mapping[int, Division | None]
    teams: Mapping[int, Teams]
    builder: relax.BlockBuilder
    rank: Callable[[int], relax.Expr]
    report: Callable[[str, int, str], None]

    def emit(self, value: relax.Expr) -> relax.Expr:
        """Bind the value to a new variable and return the variable."""
        return self.builder.emit(value)


def _never_linear(_: Sequence[Placement]) -> bool:
    return False


def _never_zero(_: Sequence[bool]) -> bool:
    return False


@dataclass(frozen=True)
class Related:
    """An axis whose division differs from operand to operand.

    Each operand has a piece of the axis, or a repetition of it, so its own division follows from
    that of the label.

    Attributes
    ----------
    common : maps the divisions of some operands (None for consecutive shards) and the number of
        ranks to the division of the label; None if no division fits.
    of_operand : maps an operand, the division of the label and the number of ranks to the division
        of the operand.
    """

    common: Callable[[Mapping[int, Division | None], int], Division | None]
    of_operand: Callable[[int, Division, int], Division]


@dataclass(frozen=True, eq=False)
class Rule:
    """The relation between the axes of an operator's operands and those of its results.

    Attributes
    ----------
    operands : the labels of each operand.
    results : the labels of each result.
    reduced : labels that no result has, and the reduction that combines the partial results.
    whole : labels that must not be sharded, and why.
    divisibility : for labels that only some numbers of ranks can share, a function that maps the
        number to the reason why it does not fit, or to "".
    contiguous : labels whose shards have to be consecutive.
    replica_safe : whether the reductions are correct if several ranks have the same elements of a
        label.
    propagate : for labels along which results have another extent, the placements of the results.
        It takes precedence over `whole` and `divisibility`.
    origin : the inverse of `propagate`, for operators that change the division of an axis. None if
        a result has the division of its label.
    related : labels along which operands have different divisions. `propagate` returns the
        placements of the results; it gets no division if none fits all operands.
    partial_linear : whether the results are partial in the same way as the operands. It gets the
        placements of the operands along one axis of the mesh: some are partial, none is a shard.
    preserves_zeros : whether the results are zero in the padding of a label. It gets the same fact
        for each operand.
    padding : by operand, the value that it needs in the padding of its axes.
    local : builds the call that a rank makes; None for the operator on the rank's operands.
    """

    operands: tuple[Labels, ...]
    results: tuple[Labels, ...]
    reduced: Mapping[int, str] = field(default_factory=dict)
    whole: Mapping[int, str] = field(default_factory=dict)
    divisibility: Mapping[int, Callable[[int], str]] = field(default_factory=dict)
    contiguous: frozenset[int] = frozenset()
    replica_safe: bool = False
    propagate: Mapping[int, Propagate] = field(default_factory=dict)
    origin: Origin | None = None
    related: Mapping[int, Related] = field(default_factory=dict)
    partial_linear: Callable[[Sequence[Placement]], bool] = _never_linear
    preserves_zeros: Callable[[Sequence[bool]], bool] = _never_zero
    padding: Mapping[int, int] = field(default_factory=dict)
    local: Callable[[LocalCall], relax.Expr] | None = None

    def why_not(self, label: int | None, workers: int, division: Division | None = None) -> str:
        """Return why some ranks cannot share a label, or "" if they can."""
        if label is None:
            return "that axis is repeated"
        if division is not None and label in self.reduced and division.copies(workers) > 1:
            same_copies = len(set(division.copies_of(workers))) == 1
            if not (same_copies and self.replica_safe) or division.whole:
                return "it reduces over that axis, of which several ranks have the same elements"
        if label in self.propagate:
            placements = self.propagate[label](division, workers)
            return placements if isinstance(placements, str) else ""
        if label in self.whole:
            return self.whole[label]
        if division is not None and (label in self.contiguous or label in self.divisibility):
            return f"shards of that axis have to be consecutive, and are {division}"
        return self.divisibility[label](workers) if label in self.divisibility else ""

    def result_placements(self, choice: Choice, workers: int) -> list[Placement]:
        """Return the placements of the results along an axis of the mesh that shards a label."""
        if choice is None:
            return [Replica() for _ in self.results]
        label, division = choice
        if label in self.reduced:
            return [Partial(self.reduced[label]) for _ in self.results]
        if label not in self.propagate:
            return [_along(axes, choice) for axes in self.results]
        placements = self.propagate[label](division, workers)
        if isinstance(placements, str):
            raise Refusal(placements)
        return list(placements)

    def choice_of_result(self, result: int, placement: Shard, workers: int) -> Choice:
        """Return the label to shard so that a result is sharded in a given way, or None.

        The inverse of `result_placements`: it follows from the same labels.

        Parameters
        ----------
        result : the index of the result.
        placement : its placement along one axis of the mesh.
        workers : the number of ranks along that axis.
        """
        label = self.results[result][placement.axis]
        choice: Choice = None if label is None else (label, placement.division)
        if self.origin is not None:
            choice = self.origin(result, placement, workers)
        if choice is None or not any(choice[0] in labels for labels in self.operands):
            return None
        if choice[0] in self.related or self.why_not(choice[0], workers, choice[1]):
            return None
        try:
            fits = self.result_placements(choice, workers)[result] == placement
        except Refusal:
            return None
        return choice if fits else None

    def sharded_labels(
        self, placements: Sequence[Placement], workers: int
    ) -> dict[tuple[int | None, Division | None], int]:
        """Return the labels that operands shard with their divisions, each with one such operand.

        Parameters
        ----------
        placements : of the operands along one axis of the mesh.
        workers : the number of ranks along that axis.
        """
        sharded: dict[tuple[int | None, Division | None], int] = {}
        related: dict[int | None, dict[int, Division | None]] = {}
        for k, (labels, placement) in enumerate(zip(self.operands, placements, strict=True)):
            if not isinstance(placement, Shard):
                continue
            label = labels[placement.axis]
            if label in self.related:
                related.setdefault(label, {})[k] = placement.division
            else:
                sharded.setdefault((label, placement.division), k)
        for label, divisions in related.items():
            assert label is not None, "related axes have a label"
            division = self.related[label].common(divisions, workers)
            sharded.setdefault((label, division), next(iter(divisions)))
        return sharded

    def operand_placement(self, operand: int, choice: Choice, workers: int) -> Placement:
        """Return the placement that an operand needs along an axis that shards a label."""
        labels = self.operands[operand]
        if choice is None or choice[0] not in labels or choice[0] not in self.related:
            return _along(labels, choice)
        label, division = choice
        assert division is not None, "a related label has a division"
        own = self.related[label].of_operand(operand, division, workers)
        return shard(labels.index(label), own, workers)


def needs_all(*labels: int | None) -> dict[int, str]:
    """Return labels with the reason that every rank needs all of their axes."""
    return {label: ALL_OF_IT for label in labels if label is not None}


@dataclass(frozen=True)
class ResolvedPlacements:
    """The placements that an operator needs and gives.

    Attributes
    ----------
    operands : the placements that the operands must have.
    results : the placements of the results.
    choices : by axis of the mesh, the label that is sharded and its division.
    """

    operands: tuple[Placements, ...]
    results: tuple[Placements, ...]
    choices: tuple[Choice, ...]


def resolve_placements(
    mesh: Mesh, rule: Rule, names: Sequence[str], operands: Sequence[Placements]
) -> ResolvedPlacements:
    """Return the placements that operands must have, given those that they have.

    Raises
    ------
    Refusal
        The operands are sharded in ways that the operator does not support together.
    """
    choices = [
        _choose_label(rule, names, [placements[index] for placements in operands], name, workers)
        for index, (name, workers) in enumerate(mesh.axes.items())
    ]
    return placements_for_choices(mesh, rule, names, operands, choices)


def placements_for_choices(
    mesh: Mesh,
    rule: Rule,
    names: Sequence[str],
    operands: Sequence[Placements],
    choices: Sequence[Choice],
) -> ResolvedPlacements:
    """Return the placements that operands must have if each mesh axis shards the chosen label."""
    needed: list[list[Placement]] = [[] for _ in operands]
    results: list[list[Placement]] = [[] for _ in rule.results]
    for index, (choice, workers) in enumerate(zip(choices, mesh.axes.values(), strict=True)):
        current = [placements[index] for placements in operands]
        targets: Sequence[Placement]
        partial = [placement for placement in current if isinstance(placement, Partial)]
        if partial and choice is None and rule.partial_linear(current):
            targets = current
            of_results: list[Placement] = [partial[0] for _ in results]
        else:
            targets = [rule.operand_placement(k, choice, workers) for k in range(len(operands))]
            of_results = rule.result_placements(choice, workers)
        for per_tensor, along_axis in ((needed, targets), (results, of_results)):
            for placements, placement in zip(per_tensor, along_axis, strict=True):
                placements.append(placement)
    tensor_names = [*names, *["the result"] * len(results)]
    for name, placements in zip(tensor_names, [*needed, *results], strict=True):
        _check_sharded_once(mesh, name, placements)
    return ResolvedPlacements(tuple(map(tuple, needed)), tuple(map(tuple, results)), tuple(choices))


def _choose_label(
    rule: Rule, names: Sequence[str], placements: Sequence[Placement], mesh_axis: str, workers: int
) -> Choice:
    """Return the label that operands shard along an axis of the mesh, or None for none."""
    descriptions: dict[tuple[int, Division | None], str] = {}
    for (label, division), k in rule.sharded_labels(placements, workers).items():
        why_not = rule.why_not(label, workers, division)
        if label is None or why_not:
            raise Refusal(f"{names[k]} is {placements[k]} along {mesh_axis!r}, and {why_not}")
        descriptions[label, division] = f"{names[k]} is {placements[k]}"
        for operand, placement in enumerate(placements if label in rule.related else ()):
            needed = rule.operand_placement(operand, (label, division), workers)
            if isinstance(placement, Shard) and placement != needed:
                text = f"{names[operand]} is {placement}"
                descriptions.setdefault((label, placement.division), text)
    if len(descriptions) > 1:
        operands = " and ".join(descriptions.values())
        several_axes = len({label for label, _ in descriptions}) > 1
        different = "different axes" if several_axes else "different divisions of one axis"
        raise Refusal(f"{operands} along {mesh_axis!r}, which are {different} for it")
    return next(iter(descriptions), None)


def shard(axis: int, division: Division | None, workers: int) -> Shard:
    """Return a shard in canonical form: without a division if that is the default one."""
    return Shard(axis, None if division is None or division.is_plain(workers) else division)


def _along(labels: Labels, choice: Choice) -> Placement:
    if choice is None or choice[0] not in labels:
        return Replica()
    return Shard(labels.index(choice[0]), choice[1])


def _check_sharded_once(mesh: Mesh, name: str, placements: Sequence[Placement]) -> None:
    mesh_axis_of: dict[int, str] = {}
    for mesh_axis, placement in zip(mesh.axes, placements, strict=True):
        if isinstance(placement, Shard):
            if placement.axis in mesh_axis_of:
                raise Refusal(
                    f"axis {placement.axis} of {name} would be sharded along both "
                    f"{mesh_axis_of[placement.axis]!r} and {mesh_axis!r}"
                )
            mesh_axis_of[placement.axis] = mesh_axis


# ---- for `Rule.partial_linear`: operands with these placements along one axis of the mesh ----

_SUM: Final = Partial("sum")


def all_partial_alike(placements: Sequence[Placement]) -> bool:
    """Return whether all operands are partial in one way, for operators that only move elements."""
    return len(set(placements)) == 1


def all_partial_sums(placements: Sequence[Placement]) -> bool:
    """Return whether all are partial sums, for operators linear in all operands jointly."""
    return all(placement == _SUM for placement in placements)


def one_partial_sum(placements: Sequence[Placement]) -> bool:
    """Return whether one is a partial sum and the rest is replicated, for multilinear operators."""
    return sorted(map(str, placements)) == ["P[sum]", *["R"] * (len(placements) - 1)]


def first_partial_alike(placements: Sequence[Placement]) -> bool:
    """Return whether the first is partial and the rest, such as indices, is replicated."""
    return isinstance(placements[0], Partial) and all(
        str(placement) == "R" for placement in placements[1:]
    )


#: Arguments for the `Rule` of an operator that only moves elements.
MOVES: Final[dict[str, Any]] = {"partial_linear": all_partial_alike, "preserves_zeros": all}
