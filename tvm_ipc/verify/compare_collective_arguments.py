# SPDX-License-Identifier: Apache-2.0
"""Represent the arguments in which the ranks of a collective must agree, and compare them.

Sizes may be symbolic. Two sizes are equal if that is proved for all values of the shape variables,
and different if there is an example. Otherwise the result is unknown, which never counts as equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from tvm_ipc.analysis.polynomials import Number
from tvm_ipc.packed_functions import AllReduceStrategy
from tvm_ipc.verify.symbolic_inequalities import Example, Extents


class Agreement(Enum):
    """The result of comparing the arguments of two ranks."""

    YES = "yes"
    NO = "no"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class TensorSize:
    """The data type and the number of elements of a tensor; None: unknown."""

    dtype: str | None
    count: Number | None


@dataclass(frozen=True)
class ShapeNumbers:
    """The numbers of a shape, in order; None: unknown."""

    numbers: tuple[Number | None, ...]


@dataclass(frozen=True)
class SymbolicNumber:
    """A number that depends on shape variables."""

    number: Number


@dataclass(frozen=True)
class DetailPerRank:
    """A detail that depends on the rank: its value on each rank."""

    values: tuple[Any, ...]


@dataclass(frozen=True)
class Signature:
    """The name of a collective and the arguments in which its ranks must agree; None: unknown."""

    name: str
    details: tuple[tuple[str, Any], ...] = ()

    @property
    def is_known(self) -> bool:
        """Return whether all details are known."""
        return all(map(_is_known, (value for _, value in self.details)))

    @property
    def is_per_rank(self) -> bool:
        """Return whether ranks pass different arguments to one call."""
        return any(isinstance(value, DetailPerRank) for _, value in self.details)

    def is_same(self, other: Signature) -> bool:
        """Return whether two calls are known to pass the same arguments on each rank."""
        return self == other and self.is_known


def _is_known(value: Any) -> bool:
    if isinstance(value, DetailPerRank):
        return all(map(_is_known, value.values))
    if isinstance(value, ShapeNumbers):
        return None not in value.numbers
    if isinstance(value, TensorSize):
        return None not in (value.dtype, value.count)
    return value is not None


#: The default strategies of an all-reduce: some backends pass the first, others the second.
_DEFAULT_STRATEGIES = {AllReduceStrategy.DEFAULT, AllReduceStrategy.AUTO}

#: The result of a comparison, and sizes at which the arguments differ.
_Result = tuple[Agreement, Example]
_YES, _NO, _UNKNOWN = (Agreement.YES, ""), (Agreement.NO, ""), (Agreement.UNKNOWN, "")


class SignatureComparer:
    """Compares the signatures of calls of two ranks."""

    def __init__(self, extents: Extents) -> None:
        self._extents = extents
        #: Variables that a check in the program relates to others: they cannot have all values.
        self.related: set[Any] = set()
        self._compared: dict[tuple[Number, Number], _Result] = {}

    def compare(self, a: Signature, rank_a: int, b: Signature, rank_b: int) -> _Result:
        """Return whether the calls of two ranks agree, and sizes at which they do not."""
        details_a, details_b = dict(a.details), dict(b.details)
        if a.name != b.name or details_a.keys() != details_b.keys():
            return _NO
        overall = _YES
        for key, value in details_a.items():
            result = self._compare_details(_at(value, rank_a), _at(details_b[key], rank_b))
            if result[0] is Agreement.NO and {value, details_b[key]} == _DEFAULT_STRATEGIES:
                result = _UNKNOWN if key == "AllReduceStrategy" else result
            if result[0] is Agreement.NO:
                return result
            if result[0] is Agreement.UNKNOWN:
                overall = result
        return overall

    def _compare_details(self, a: Any, b: Any) -> _Result:
        if isinstance(a, TensorSize) and isinstance(b, TensorSize):
            return _combine(
                _compare_constants(a.dtype, b.dtype), self._compare_numbers(a.count, b.count)
            )
        if isinstance(a, ShapeNumbers) and isinstance(b, ShapeNumbers):
            if len(a.numbers) != len(b.numbers):
                return _NO
            pairs = zip(a.numbers, b.numbers, strict=True)
            return _combine(*(self._compare_numbers(x, y) for x, y in pairs))
        if isinstance(a, SymbolicNumber) or isinstance(b, SymbolicNumber):
            return self._compare_numbers(_number_of(a), _number_of(b))
        return _compare_constants(a, b)

    def _compare_numbers(self, a: Number | None, b: Number | None) -> _Result:
        if a is None or b is None:
            return _UNKNOWN
        if a == b:
            return _YES
        if isinstance(a, int) and isinstance(b, int):
            return _NO
        key = (a, b)
        if key not in self._compared:
            self._compared[key] = self._compare_symbolic(a, b)
        return self._compared[key]

    def _compare_symbolic(self, a: Number, b: Number) -> _Result:
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


def _at(value: Any, rank: int) -> Any:
    return value.values[rank] if isinstance(value, DetailPerRank) else value


def _number_of(value: Any) -> Number | None:
    return value.number if isinstance(value, SymbolicNumber) else value


def _compare_constants(a: Any, b: Any) -> _Result:
    if a is None or b is None:
        return _UNKNOWN
    return _YES if a == b else _NO


def _combine(*results: _Result) -> _Result:
    """Return the first result that is NO, else the first that is UNKNOWN, else YES."""
    for agreement in (Agreement.NO, Agreement.UNKNOWN):
        for result in results:
            if result[0] is agreement:
                return result
    return _YES
