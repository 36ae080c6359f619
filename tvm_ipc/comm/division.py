# SPDX-License-Identifier: Apache-2.0
"""How an axis is divided among ranks where its parts are not consecutive and of one size.

    2/2x3/2x4       2 groups of 3 heads of 4 elements: the first 2 of 4 ranks have the first group,
                    one of them 2 of its heads, the other one the third head and zeros
    2/2x4           2 heads of 4 elements on 4 ranks: each head is on two of them
    8/2+4/2+4/2     queries, keys and values in one axis, each of which is divided by itself

An axis is a row of segments, and a segment a product of factors, the outermost first. Each factor
is divided among some ranks into parts of one size, with zeros beyond its end; ranks that no factor
tells apart have copies. A rank has its part of the first segment, then of the second, and so on.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Final, TypeAlias

import numpy as np

from tvm_ipc import arguments

#: An extent, and among how many ranks it is divided.
Factor: TypeAlias = tuple[int, int]
Segment: TypeAlias = tuple[Factor, ...]

_FACTOR: Final = r"\d+(?:/\d+)?"
_TEXT: Final = re.compile(rf"{_FACTOR}(?:x{_FACTOR})*(?:\+{_FACTOR}(?:x{_FACTOR})*)*")
_WANTED: Final = "how an axis is divided, such as '2/2x3/2x4' or '8/2+4/2+4/2'"


@dataclass(frozen=True)
class Division:
    """How an axis is divided.

    Parameters
    ----------
    segments : of the axis, each of them factors as (extent, among how many ranks).
    """

    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        wanted = "segments, each of them factors as (extent, ranks)"
        try:
            given = [[(int(e), int(n)) for e, n in segment] for segment in self.segments]
        except (TypeError, ValueError):
            raise arguments.wrong_type("Division: segments", wanted, self.segments) from None
        if not given or any(not one for one in given):
            raise arguments.wrong_value("Division: segments", f"{wanted}, at least one", given)
        if any(e < 1 or n < 1 for segment in given for e, n in segment):
            raise arguments.wrong_value("Division: segments", f"{wanted}, all 1 or more", given)
        object.__setattr__(self, "segments", tuple(map(_merged, given)))

    @staticmethod
    def of(name: str, text: str) -> Division:
        """Return what a text says."""
        text = arguments.text(name, text, _WANTED).replace(" ", "")
        if not _TEXT.fullmatch(text):
            raise arguments.wrong_value(name, _WANTED, text)
        segments = []
        for segment in text.split("+"):
            factors = [factor.partition("/") for factor in segment.split("x")]
            segments.append(tuple((int(e), int(n or 1)) for e, _, n in factors))
        return Division(tuple(segments))

    @staticmethod
    def plain(extent: int, workers: int) -> Division:
        """Return the division into consecutive parts."""
        return Division((((extent, workers),),))

    def __str__(self) -> str:
        return "+".join(
            "x".join(str(e) if n == 1 else f"{e}/{n}" for e, n in segment)
            for segment in self.segments
        )

    # ---- what ranks have --------------------------------------------------------------------

    @cached_property
    def extent(self) -> int:
        """Of all of the axis."""
        return sum(_extent(segment) for segment in self.segments)

    @cached_property
    def part(self) -> int:
        """The extent of what a rank has."""
        return sum(_part(segment) for segment in self.segments)

    @cached_property
    def padded(self) -> bool:
        """Whether a rank has zeros."""
        return any(e % n for segment in self.segments for e, n in segment)

    @cached_property
    def whole(self) -> bool:
        """Whether every rank has all of the axis."""
        return all(n == 1 for segment in self.segments for _, n in segment)

    def is_plain(self, workers: int) -> bool:
        """Whether parts are consecutive and each on one rank."""
        return len(self.segments) == 1 and [n for _, n in self.segments[0]] == [workers]

    def why_not(self, extent: int | None, workers: int) -> str:
        """Return why an axis is not divided so, "" if it can be."""
        if extent is not None and extent != self.extent:
            return f"{self} is an axis of {self.extent}, and this one has {extent}"
        for segment in self.segments:
            ranks = prod(n for _, n in segment)
            if workers % ranks:
                return f"{self} is among {ranks} ranks, and {workers} are no multiple of them"
        return ""

    def copies_of(self, workers: int) -> list[int]:
        """Return on how many ranks each element of each segment is."""
        return [workers // prod(n for _, n in segment) for segment in self.segments]

    def copies(self, workers: int) -> int:
        """Return on how many ranks the element is that is on most of them."""
        return max(self.copies_of(workers))

    def table(self, workers: int) -> np.ndarray[Any, Any]:
        """Return the indices that each rank has, a row for each; -1 for zeros."""
        rows = []
        for rank in range(workers):
            row: list[int] = []
            begin = 0
            for segment in self.segments:
                found = np.zeros(1, np.int64)
                ranks = 1
                for extent, n in segment:
                    ranks *= n
                    size = -(-extent // n)
                    place = rank * ranks // workers % n
                    own = np.arange(place * size, (place + 1) * size)
                    inner = np.where(own < extent, own, -1)
                    both = found[:, None] * extent + inner
                    found = np.where((found[:, None] < 0) | (inner < 0), -1, both).ravel()
                row += [int(one) + begin if one >= 0 else -1 for one in found]
                begin += _extent(segment)
            rows.append(row)
        return np.array(rows, np.int64).reshape(workers, self.part)

    def runs(self, index: int, workers: int) -> tuple[tuple[int | None, int], ...]:
        """Return the runs of indices that a rank has: their beginnings, None for zeros; counts."""
        found: list[tuple[int | None, int]] = []
        for one in self.table(workers)[index].tolist():
            start, count = found[-1] if found else (-1, 0)
            if start is None if one < 0 else start is not None and one == start + count > 0:
                found[-1] = (start, count + 1)
            else:
                found.append((None if one < 0 else one, 1))
        return tuple(found)

    # ---- axes made of it --------------------------------------------------------------------

    def times(self, inner: int) -> Division:
        """Return the division of the axis with one of some extent inside of it."""
        return Division(tuple((*segment, (inner, 1)) for segment in self.segments))

    def over(self, inner: int) -> Division | None:
        """Return the division without an axis inside of it; None if parts are not made of it."""
        found = [_without(segment, inner) for segment in self.segments]
        return None if None in found else Division(tuple(one for one in found if one))

    def under(self, outer: int) -> Division | None:
        """Return the division without an axis outside of it that is not divided."""
        if outer == 1:
            return self
        count, rest = divmod(len(self.segments), outer)
        if not rest and self.segments == self.segments[:count] * outer:
            return Division(self.segments[:count])
        if len(self.segments) > 1:
            return None
        (extent, n), *inner = self.segments[0]
        if n > 1 or extent % outer:
            return None
        return Division((((extent // outer, 1), *inner),))

    def within(self, outer: int) -> Division:
        """Return the division of the axis with one of some extent outside of it."""
        if outer == 1 or len(self.segments) > 1:
            return Division(self.segments * outer)
        return Division((((outer, 1), *self.segments[0]),))

    def repeated(self, count: int, workers: int) -> Division:
        """Return the division where each index stands `count` times; copies have some of them."""
        both = zip(self.segments, self.copies_of(workers), strict=True)
        return Division(tuple((*segment, (count, copies)) for segment, copies in both))

    def unrepeated(self, count: int, workers: int) -> Division | None:
        """Return the division of which this one is where each index stands `count` times."""
        found = self.over(count)
        if found is not None and found.repeated(count, workers) == self:
            return found
        outer = [segment[:-1] or ((1, 1),) for segment in self.segments]
        if any(segment[-1][0] != count for segment in self.segments):
            return None
        found = Division(tuple(outer))
        return found if found.repeated(count, workers) == self else None

    def between(self, begin: int, end: int) -> tuple[Division, int, int] | None:
        """Return the division of a slice of whole segments, and where a rank has it."""
        starts, own = [0], [0]
        for segment in self.segments:
            starts.append(starts[-1] + _extent(segment))
            own.append(own[-1] + _part(segment))
        if begin not in starts or end not in starts or begin >= end:
            return None
        first, last = starts.index(begin), starts.index(end)
        return Division(self.segments[first:last]), own[first], own[last]


def joined(divisions: Iterable[Division]) -> Division:
    """Return the division of axes one after the other."""
    return Division(tuple(segment for one in divisions for segment in one.segments))


def _extent(segment: Segment) -> int:
    return prod(extent for extent, _ in segment)


def _part(segment: Segment) -> int:
    return prod(-(-extent // n) for extent, n in segment)


def _merged(segment: Sequence[Factor]) -> Segment:
    """Return the fewest factors that say the same."""
    found: list[Factor] = []
    for extent, n in segment:
        if extent == n == 1:
            continue
        if found:
            outer, ranks = found[-1]
            whole = n == 1 and outer % ranks == 0
            single = outer == ranks and extent % n == 0
            if whole or single:
                found[-1] = (outer * extent, ranks * n)
                continue
        found.append((extent, n))
    return tuple(found) or ((1, 1),)


def _without(segment: Segment, inner: int) -> Segment | None:
    factors = list(segment)
    while inner > 1:
        extent, n = factors.pop()
        size = -(-extent // n)
        if extent % inner == 0 and size % inner == 0:
            factors.append((extent // inner, n))
            inner = 1
        elif n == 1 and inner % extent == 0 and factors:
            inner //= extent
        else:
            return None
    return tuple(factors) or ((1, 1),)
