# SPDX-License-Identifier: Apache-2.0
"""Represent the arguments in which the ranks of a collective must agree, and compare them.

Sizes may be symbolic. Two sizes are equal if that is proved for all values of the shape variables,
and different if there is an example. Otherwise the result is unknown, which never counts as equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any

from tvm_ipc.analysis.polynomials import Number
from tvm_ipc.packed_functions import AllReduceStrategy
from tvm_ipc.verify.per_rank_and_uniform_values import PerRank, on_rank
from tvm_ipc.verify.symbolic_inequalities import Example, Extents


class Agreement(Enum):
    """The result of comparing the arguments of two ranks."""

    YES = "yes"
    NO = "no"
    UNKNOWN = "unknown"


#: An argument in which ranks must agree: its numbers, such as those of a shape, or the data type
#: and the size of a tensor. None: unknown; `PerRank`: its value on each rank.
Detail = tuple[Any, ...] | PerRank | None


@dataclass(frozen=True)
class Signature:
    """The name of a collective and the arguments in which its ranks must agree."""

    name: str
    details: tuple[tuple[str, Detail], ...] = ()

    @property
    def is_known(self) -> bool:
        """Return whether all details are known."""
        return all(_is_known(detail) for _, detail in self.details)

    @property
    def is_per_rank(self) -> bool:
        """Return whether ranks pass different arguments to one call."""
        return any(isinstance(detail, PerRank) for _, detail in self.details)

    def is_same(self, other: Signature) -> bool:
        """Return whether two calls are known to pass the same arguments on each rank."""
        return self == other and self.is_known


def _is_known(detail: Detail) -> bool:
    if isinstance(detail, PerRank):
        return all(map(_is_known, detail.values))
    return detail is not None and None not in detail


#: The default strategies of an all-reduce: some backends pass the first, others the second.
_DEFAULT_STRATEGIES = {(AllReduceStrategy.DEFAULT,), (AllReduceStrategy.AUTO,)}

#: The result of a comparison, and sizes at which the arguments differ.
_Result = tuple[Agreement, Example]
_YES, _NO, _UNKNOWN = (Agreement.YES, ""), (Agreement.NO, ""), (Agreement.UNKNOWN, "")


class SignatureComparer:
    """Compares the signatures of calls of two ranks."""

    def __init__(self, extents: Extents) -> None:
        self._extents = extents
        #: Variables that a check in the program relates to others: they cannot have all values.
        self.related: set[Any] = set()
        self._compare_symbolic = cache(self._compare_expressions)

    def compare(self, a: Signature, rank_a: int, b: Signature, rank_b: int) -> _Result:
        """Return whether the calls of two ranks agree, and sizes at which they do not."""
        details_a, details_b = dict(a.details), dict(b.details)
        if a.name != b.name or details_a.keys() != details_b.keys():
            return _NO
        overall = _YES
        for key, value in details_a.items():
            result = self._compare_details(on_rank(value, rank_a), on_rank(details_b[key], rank_b))
            if result[0] is Agreement.NO and {value, details_b[key]} == _DEFAULT_STRATEGIES:
                result = _UNKNOWN if key == "AllReduceStrategy" else result
            if result[0] is Agreement.NO:
                return result
            if result[0] is Agreement.UNKNOWN:
                overall = result
        return overall

    def _compare_details(self, a: tuple[Any, ...] | None, b: tuple[Any, ...] | None) -> _Result:
        if a is None or b is None:
            return _UNKNOWN
        if len(a) != len(b):
            return _NO
        return _combine(*map(self._compare_numbers, a, b))

    def _compare_numbers(self, a: Any, b: Any) -> _Result:
        if a is None or b is None:
            return _UNKNOWN
        if a == b:
            return _YES
        if not isinstance(a, tuple) and not isinstance(b, tuple):
            return _NO
        return self._compare_symbolic(a, b)

    def _compare_expressions(self, a: Number, b: Number) -> _Result:
        extents = self._extents
        if extents.at_most(a, b) and extents.at_most(b, a):
            return _YES
        difference, negated = extents.subtract(a, b), extents.subtract(b, a)
        sizes = tuple(number for number in (a, b) if not isinstance(number, int))
        for excess in (difference, negated):
            example = extents.example(*sizes, extents.subtract(excess, 1))
            if example is not None:
                unrelated = self.related.isdisjoint(extents.variables(*sizes))
                return (Agreement.NO if unrelated else Agreement.UNKNOWN), example
        return _UNKNOWN


def _combine(*results: _Result) -> _Result:
    """Return the first result that is NO, else the first that is UNKNOWN, else YES."""
    for agreement in (Agreement.NO, Agreement.UNKNOWN):
        for result in results:
            if result[0] is agreement:
                return result
    return _YES
