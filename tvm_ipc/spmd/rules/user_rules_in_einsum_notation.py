# SPDX-License-Identifier: Apache-2.0
"""Sharding rules that users write as text, in the notation of `einsum`.

For example `b s h, b s h, h -> b s h` is a rule with three operands and one result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tvm_ipc import arguments
from tvm_ipc.comm.placements import PARTIAL_REDUCTIONS
from tvm_ipc.spmd.rules.axis_label_rule import Labels, Refusal, Rule, needs_all, one_partial_sum
from tvm_ipc.spmd.rules.operation import Operation

_AXES: Final = "axes of operands and results, such as 'n k, k m -> n m'"


class EinsumRule:
    """A rule that a user wrote as text: see `declare_rule` for the parameters."""

    def __init__(
        self, name: str, axes: Any, whole: Any, reduced: Any, linear: Any, zeros: Any
    ) -> None:
        self.name = name
        self.operands, self.results = _parse(arguments.text("declare_rule: axes", axes, _AXES))
        of_operands = {name for tensor in self.operands for name in tensor}
        of_results = {name for tensor in self.results for name in tensor}
        all_names = (of_operands | of_results) - {"1"}
        names = f"names of axes in {axes!r}"
        if not isinstance(whole, str):
            raise arguments.wrong_type("declare_rule: whole", names, whole)
        self.whole = frozenset(whole.split())
        if not self.whole <= all_names:
            raise arguments.wrong_value("declare_rule: whole", names, whole)
        expected = f"a reduction by {names} that no result has"
        arguments.instance("declare_rule: reduced", reduced, Mapping, expected)
        for key, reduction in reduced.items():
            if key not in of_operands - of_results or reduction not in PARTIAL_REDUCTIONS:
                raise arguments.wrong_value("declare_rule: reduced", expected, reduced)
        self.reduced = dict(reduced)
        unexplained = of_operands - of_results - self.whole - set(self.reduced) - {"1"}
        if unexplained:
            raise ValueError(
                f"declare_rule: {sorted(unexplained)[0]!r} is no axis of a result in {axes!r}; "
                "specify the reduction of the partial results in `reduced`, or name the axis in "
                "`whole` if it cannot be sharded"
            )
        if missing := of_results - of_operands - self.whole - {"1"}:
            raise ValueError(
                f"declare_rule: {sorted(missing)[0]!r} is no axis of an operand in {axes!r}; name "
                "it in `whole` if it cannot be sharded"
            )
        self.linear = arguments.flag("declare_rule: linear", linear)
        self.zeros = arguments.flag("declare_rule: zeros", zeros)
        self.labels = {name: k for k, name in enumerate(sorted(all_names))}

    def __eq__(self, other: object) -> bool:
        """Compare the axes and flags of two declarations."""
        return isinstance(other, EinsumRule) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    def __call__(self, op: Operation) -> Rule:
        """Return the rule for a call."""
        operand_ndims = [len(op.dims(k)) for k in range(len(op.operands))]
        result_ndims = [len(op.result_dims(k)) for k in range(len(op.results))]
        if operand_ndims != [*map(len, self.operands)] or result_ndims != [*map(len, self.results)]:
            declared = ", ".join(map(" ".join, self.operands))
            raise Refusal(
                f"its rule is for operands with the axes {declared!r}, and "
                f"{arguments.counted(len(self.results), 'result')}; the numbers of axes are "
                f"{operand_ndims} of the operands, and {result_ndims} of the results"
            )

        def labels(tensor: tuple[str, ...]) -> Labels:
            return tuple(self.labels.get(name) for name in tensor)

        return Rule(
            tuple(map(labels, self.operands)),
            tuple(map(labels, self.results)),
            reduced={self.labels[name]: reduction for name, reduction in self.reduced.items()},
            whole=needs_all(*(self.labels[name] for name in self.whole)),
            partial_linear=one_partial_sum if self.linear else (lambda _: False),
            preserves_zeros=all if self.zeros else (lambda _: False),
        )


def _parse(axes: str) -> tuple[tuple[tuple[str, ...], ...], tuple[tuple[str, ...], ...]]:
    """Return the names of the axes of each operand, and of each result."""
    left, arrow, right = axes.partition("->")
    sides = tuple(tuple(tuple(term.split()) for term in side.split(",")) for side in (left, right))
    names = [name for side in sides for tensor in side for name in tensor]
    twice = any(len(set(tensor) - {"1"}) + tensor.count("1") != len(tensor) for tensor in sides[0])
    twice = twice or any(len(set(tensor)) != len(tensor) for tensor in sides[1])
    if not arrow or "->" in right or twice or not all(n == "1" or n.isidentifier() for n in names):
        raise arguments.wrong_value("declare_rule: axes", _AXES, axes)
    return sides[0], sides[1]
