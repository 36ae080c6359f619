# SPDX-License-Identifier: Apache-2.0
"""What operators do to axes, and what of it follows for placements.

An operator is described as `einsum` describes one, by a label for each axis: of `matmul(a, b)` the
axes are those of `ik, kj -> ij`. Along each axis of the mesh one label may be divided: operands
that have it are divided along it, those that have not are replicated, and so is the result. A label
that is summed over leaves a partial sum. Partial operands stay partial where the operator allows
that, and are reduced first where not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from tvm_ipc.comm import Mesh, Partial, Placement, Replica, Shard
from tvm_ipc.comm.placements import Placements

#: Labels of the axes of a tensor; None for an axis that cannot be divided, such as one of extent 1
#: that is repeated.
Labels: TypeAlias = tuple[int | None, ...]


class Refusal(Exception):  # noqa: N818 - it is caught, and its words become those of an error
    """Why an operator cannot be given what is there."""


@dataclass(frozen=True)
class Rule:
    """What an operator does.

    Attributes
    ----------
    operands : the labels of each operand.
    result : those of the result.
    summed : labels that are summed over.
    whole : labels of which every rank needs all.
    keeps : given the placements of the operands along one axis of the mesh, some of which are
        partial and none a shard: whether the result is partial in the same way.
    zeros : whether the result is zero where all operands are.
    """

    operands: tuple[Labels, ...]
    result: Labels
    summed: frozenset[int] = frozenset()
    whole: frozenset[int] = frozenset()
    keeps: Callable[[Sequence[Placement]], bool] = field(default=lambda _: False)
    zeros: bool = False


@dataclass(frozen=True)
class Decided:
    """Where operands have to be, and where the result is."""

    operands: tuple[Placements, ...]
    result: Placements


def decide(mesh: Mesh, rule: Rule, names: Sequence[str], found: Sequence[Placements]) -> Decided:
    """Return where operands have to be; raise `Refusal` where that is not clear."""
    operands: list[list[Placement]] = [[] for _ in found]
    result: list[Placement] = []
    for index, name in enumerate(mesh.axes):
        here = [one[index] for one in found]
        label = _label(rule, names, here, name)
        partial = [one for one in here if isinstance(one, Partial)]
        if partial and label is None and rule.keeps(here):
            targets: Sequence[Placement] = here
            out: Placement = partial[0]
        else:
            targets = [_along(labels, label) for labels in rule.operands]
            summed = label is not None and label in rule.summed
            out = Partial("sum") if summed else _along(rule.result, label)
        for operand, target in zip(operands, targets, strict=True):
            operand.append(target)
        result.append(out)
    for what, placements in [*zip(names, operands, strict=True), ("the result", result)]:
        _check_once(mesh, what, placements)
    return Decided(tuple(map(tuple, operands)), tuple(result))


def _label(
    rule: Rule, names: Sequence[str], here: Sequence[Placement], mesh_axis: str
) -> int | None:
    """Return the label that is divided along an axis of the mesh, None if none is."""
    divided: dict[int, str] = {}
    for what, labels, one in zip(names, rule.operands, here, strict=True):
        if not isinstance(one, Shard):
            continue
        label = labels[one.axis]
        if label is None:
            raise Refusal(f"{what} is {one} along {mesh_axis!r}, and that axis is repeated")
        if label in rule.whole:
            raise Refusal(f"{what} is {one} along {mesh_axis!r}, and it needs all of that axis")
        divided.setdefault(label, f"{what} is {one}")
    if len(divided) > 1:
        both = " and ".join(divided.values())
        raise Refusal(f"{both} along {mesh_axis!r}, which are different axes for it")
    return next(iter(divided), None)


def _along(labels: Labels, label: int | None) -> Placement:
    return Shard(labels.index(label)) if label is not None and label in labels else Replica()


def _check_once(mesh: Mesh, what: str, placements: Sequence[Placement]) -> None:
    seen: dict[Shard, str] = {}
    for name, one in zip(mesh.axes, placements, strict=True):
        if isinstance(one, Shard):
            if one in seen:
                raise Refusal(
                    f"axis {one.axis} of {what} would be divided along {seen[one]!r} and {name!r}"
                )
            seen[one] = name
