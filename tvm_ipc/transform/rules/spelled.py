# SPDX-License-Identifier: Apache-2.0
"""Rules that are written as text, as `einsum` has it.

    b s h, b s h, h -> b s h

is three operands whose axes have names, and one result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tvm_ipc import arguments
from tvm_ipc.comm.placements import PARTIAL_REDUCTIONS
from tvm_ipc.transform.rules import keeps
from tvm_ipc.transform.rules.operation import Operation
from tvm_ipc.transform.rules.rule import Labels, Refusal, Rule, needs_all

_AXES: Final = "axes of operands and results, such as 'n k, k m -> n m'"


class SpelledRule:
    """A rule that is written as text."""

    def __init__(
        self, name: str, axes: Any, whole: Any, reduced: Any, linear: Any, zeros: Any
    ) -> None:
        self.name = name
        self.operands, self.results = _tensors(arguments.text("declare_rule: axes", axes, _AXES))
        known = {one for tensor in (*self.operands, *self.results) for one in tensor} - {"1"}
        given = {one for tensor in self.operands for one in tensor}
        made = {one for tensor in self.results for one in tensor}
        names = f"names of axes in {axes!r}"
        if not isinstance(whole, str):
            raise arguments.wrong_type("declare_rule: whole", names, whole)
        self.whole = frozenset(whole.split())
        if not self.whole <= known:
            raise arguments.wrong_value("declare_rule: whole", names, whole)
        wanted = f"a reduction by {names} that no result has"
        arguments.instance("declare_rule: reduced", reduced, Mapping, wanted)
        for key, reduction in reduced.items():
            if key not in given - made or reduction not in PARTIAL_REDUCTIONS:
                raise arguments.wrong_value("declare_rule: reduced", wanted, reduced)
        self.reduced = dict(reduced)
        vanish = given - made - self.whole - set(self.reduced) - {"1"}
        if vanish:
            raise ValueError(
                f"declare_rule: {sorted(vanish)[0]!r} is no axis of a result in {axes!r}; say in "
                "reduced how the results of parts make the result, or in whole that it is not "
                "divided"
            )
        if missing := made - given - self.whole - {"1"}:
            raise ValueError(
                f"declare_rule: {sorted(missing)[0]!r} is no axis of an operand in {axes!r}; say "
                "in whole that it is not divided"
            )
        self.linear = arguments.flag("declare_rule: linear", linear)
        self.zeros = arguments.flag("declare_rule: zeros", zeros)
        self.labels = {one: k for k, one in enumerate(sorted(known))}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SpelledRule) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    def __call__(self, op: Operation) -> Rule:
        """Return the rule for a call."""
        found = [*map(len, map(op.dims, range(len(op.operands))))]
        made = [*map(len, map(op.made, range(len(op.results))))]
        if found != [*map(len, self.operands)] or made != [*map(len, self.results)]:
            said = ", ".join(map(" ".join, self.operands))
            raise Refusal(
                f"its rule is for operands with axes {said!r}, and gives {len(self.results)} "
                f"results; found operands with {found} axes, and results with {made}"
            )

        def labels(tensor: tuple[str, ...]) -> Labels:
            return tuple(self.labels.get(one) for one in tensor)

        return Rule(
            tuple(map(labels, self.operands)),
            tuple(map(labels, self.results)),
            reduced={self.labels[one]: reduction for one, reduction in self.reduced.items()},
            whole=needs_all(*(self.labels[one] for one in self.whole)),
            keeps=keeps.one_sum if self.linear else (lambda _: False),
            zeros=all if self.zeros else (lambda _: False),
        )


def _tensors(axes: str) -> tuple[tuple[tuple[str, ...], ...], tuple[tuple[str, ...], ...]]:
    given, arrow, made = axes.partition("->")
    sides = tuple(tuple(tuple(one.split()) for one in side.split(",")) for side in (given, made))
    names = [one for side in sides for tensor in side for one in tensor]
    twice = any(len(set(tensor) - {"1"}) + tensor.count("1") != len(tensor) for tensor in sides[0])
    twice = twice or any(len(set(tensor)) != len(tensor) for tensor in sides[1])
    if not arrow or "->" in made or twice or not all(n == "1" or n.isidentifier() for n in names):
        raise arguments.wrong_value("declare_rule: axes", _AXES, axes)
    return sides[0], sides[1]
