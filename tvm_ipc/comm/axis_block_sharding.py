# SPDX-License-Identifier: Apache-2.0
"""Block sharding: axes whose shards are not consecutive and of equal size.

    2/2x3/2x4       2 groups of 3 heads of 4 elements: the first 2 of 4 ranks have the first group,
                    one of them 2 of its heads, the other the third head and zeros
    2/2x4           2 heads of 4 elements on 4 ranks: each head is on two of them
    8/2+4/2+4/2     queries, keys and values in one axis, each of which is sharded by itself

An axis is a concatenation of segments. The extent of a segment is a product of factors, the
outermost first. Each factor is split among some ranks into blocks of equal size, with zeros beyond
its end; ranks that no factor distinguishes have copies. The shard of a rank is its block of the
first segment, followed by its block of the second, and so on.
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

#: An extent, and the number of ranks among which it is split.
Factor: TypeAlias = tuple[int, int]
Segment: TypeAlias = tuple[Factor, ...]

_FACTOR: Final = r"\d+(?:/\d+)?"
_TEXT: Final = re.compile(rf"{_FACTOR}(?:x{_FACTOR})*(?:\+{_FACTOR}(?:x{_FACTOR})*)*")
_WANTED: Final = "a division of an axis, such as '2/2x3/2x4' or '8/2+4/2+4/2'"


@dataclass(frozen=True)
class Division:
    """Division of an axis into one shard for each rank.

    Parameters
    ----------
    segments : the segments of the axis, each a sequence of factors (extent, number of ranks).

    Examples
    --------
    Queries, keys and values in one axis, each split between two ranks:

    >>> from tvm_ipc import comm
    >>> division = comm.Division.of("heads", "4/2+2/2+2/2")
    >>> division.extent, division.shard_extent
    (8, 4)
    >>> division.table(2).tolist()
    [[0, 1, 4, 6], [2, 3, 5, 7]]
    """

    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        """Check the segments, and merge the factors of each into as few as possible."""
        wanted = "segments, each of them factors as (extent, ranks)"
        try:
            segments = [[(int(e), int(n)) for e, n in segment] for segment in self.segments]
        except (TypeError, ValueError):
            raise arguments.wrong_type("Division: segments", wanted, self.segments) from None
        if not segments or any(not segment for segment in segments):
            raise arguments.wrong_value("Division: segments", f"{wanted}, at least one", segments)
        if any(e < 1 or n < 1 for segment in segments for e, n in segment):
            raise arguments.wrong_value("Division: segments", f"{wanted}, all 1 or more", segments)
        object.__setattr__(self, "segments", tuple(map(_merge_factors, segments)))

    @staticmethod
    def of(name: str, text: str) -> Division:
        """Return the division that a text specifies; raise an error that begins with `name`.

        Parameters
        ----------
        name : the beginning of error messages.
        text : the division, such as "2/2x3/2x4"; see the introduction of this module.

        Returns
        -------
        Division
            The division.

        Raises
        ------
        ValueError
            The text has another form.
        """
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
        """Return the division into consecutive shards.

        Parameters
        ----------
        extent : the extent of the axis.
        workers : the number of ranks along the axis of the mesh.

        Returns
        -------
        Division
            A division with one shard for each rank, padded if the ranks do not divide the extent.
        """
        return Division((((extent, workers),),))

    def __str__(self) -> str:
        """Return the text that `of` parses, such as "8/2+4/2"."""
        return "+".join(
            "x".join(str(e) if n == 1 else f"{e}/{n}" for e, n in segment)
            for segment in self.segments
        )

    # ---- shards of ranks --------------------------------------------------------------------

    @cached_property
    def extent(self) -> int:
        """The extent of the whole axis."""
        return sum(_extent(segment) for segment in self.segments)

    @cached_property
    def shard_extent(self) -> int:
        """The extent of a shard."""
        return sum(_shard_of_segment(segment) for segment in self.segments)

    @cached_property
    def padded(self) -> bool:
        """Return whether the shard of a rank is padded with zeros."""
        return any(e % n for segment in self.segments for e, n in segment)

    @cached_property
    def whole(self) -> bool:
        """Return whether every rank has the whole axis."""
        return all(n == 1 for segment in self.segments for _, n in segment)

    def is_plain(self, workers: int) -> bool:
        """Return whether shards are consecutive and each is on one rank.

        Parameters
        ----------
        workers : the number of ranks along the axis of the mesh.

        Returns
        -------
        bool
            True if the division is that of `plain`.
        """
        return len(self.segments) == 1 and [n for _, n in self.segments[0]] == [workers]

    def why_not(self, extent: int | None, workers: int) -> str:
        """Return why the division does not apply to an axis, "" if it does.

        Parameters
        ----------
        extent : the extent of the axis; None if it is unknown.
        workers : the number of ranks along the axis of the mesh.

        Returns
        -------
        str
            The reason as a sentence; "" if the division applies.
        """
        if extent is not None and extent != self.extent:
            return f"{self} divides an axis of extent {self.extent}, but the extent is {extent}"
        for segment in self.segments:
            ranks = prod(n for _, n in segment)
            if workers % ranks:
                return f"{self} needs a multiple of {ranks} ranks, but there are {workers}"
        return ""

    def copies_of(self, workers: int) -> list[int]:
        """Return for each segment the number of ranks that have a copy of an element.

        Parameters
        ----------
        workers : the number of ranks along the axis of the mesh.

        Returns
        -------
        list of int
            The number for each segment.
        """
        return [workers // prod(n for _, n in segment) for segment in self.segments]

    def copies(self, workers: int) -> int:
        """Return the largest number of ranks that have a copy of the same element.

        Parameters
        ----------
        workers : the number of ranks along the axis of the mesh.

        Returns
        -------
        int
            The maximum over all segments.
        """
        return max(self.copies_of(workers))

    def table(self, workers: int) -> np.ndarray[Any, Any]:
        """Return the indices of each rank's shard, one row a rank; -1 stands for padding.

        Parameters
        ----------
        workers : the number of ranks along the axis of the mesh.

        Returns
        -------
        numpy.ndarray
            Indices into the axis, of shape (workers, shard_extent).
        """
        rows = []
        for rank in range(workers):
            row: list[int] = []
            begin = 0
            for segment in self.segments:
                indices = np.zeros(1, np.int64)
                ranks = 1
                for extent, n in segment:
                    ranks *= n
                    size = -(-extent // n)
                    block = rank * ranks // workers % n
                    own = np.arange(block * size, (block + 1) * size)
                    inner = np.where(own < extent, own, -1)
                    combined = indices[:, None] * extent + inner
                    padding = (indices[:, None] < 0) | (inner < 0)
                    indices = np.where(padding, -1, combined).ravel()
                row += [int(index) + begin if index >= 0 else -1 for index in indices]
                begin += _extent(segment)
            rows.append(row)
        return np.array(rows, np.int64).reshape(workers, self.shard_extent)

    def runs(self, index: int, workers: int) -> tuple[tuple[int | None, int], ...]:
        """Return the runs of consecutive indices in a shard as pairs (first index, count).

        The first index of a run of padding is None.

        Parameters
        ----------
        index : the index of the rank along the axis of the mesh.
        workers : the number of ranks along the axis of the mesh.

        Returns
        -------
        tuple of pairs
            The runs, in the order of the shard.

        Examples
        --------
        >>> from tvm_ipc import comm
        >>> comm.Division.of("heads", "4/2+2/2").runs(1, 2)
        ((2, 2), (5, 1))
        """
        runs: list[tuple[int | None, int]] = []
        for element in self.table(workers)[index].tolist():
            start, count = runs[-1] if runs else (-1, 0)
            padding = element < 0
            if start is None if padding else start is not None and element == start + count > 0:
                runs[-1] = (start, count + 1)
            else:
                runs.append((None if padding else element, 1))
        return tuple(runs)

    # ---- divisions of derived axes ----------------------------------------------------------

    def times(self, inner: int) -> Division:
        """Return the division of the axis merged with an inner axis of extent `inner`.

        Parameters
        ----------
        inner : the extent of the inner axis, which is not sharded.

        Returns
        -------
        Division
            The division of the merged axis.
        """
        return Division(tuple((*segment, (inner, 1)) for segment in self.segments))

    def over(self, inner: int) -> Division | None:
        """Return the division after an inner axis is split off; None if a shard splits it.

        Parameters
        ----------
        inner : the extent of the inner axis.

        Returns
        -------
        Division or None
            The division of the outer axis.
        """
        outer = [_split_off_inner(segment, inner) for segment in self.segments]
        return None if None in outer else Division(tuple(segment for segment in outer if segment))

    def under(self, outer: int) -> Division | None:
        """Return the division after an outer axis is split off; None if that one is sharded.

        Parameters
        ----------
        outer : the extent of the outer axis.

        Returns
        -------
        Division or None
            The division of the inner axis.
        """
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
        """Return the division of the axis merged with an outer axis of extent `outer`.

        Parameters
        ----------
        outer : the extent of the outer axis, which is not sharded.

        Returns
        -------
        Division
            The division of the merged axis.
        """
        if outer == 1 or len(self.segments) > 1:
            return Division(self.segments * outer)
        return Division((((outer, 1), *self.segments[0]),))

    def repeated(self, count: int, workers: int) -> Division:
        """Return the division after each index is repeated `count` times.

        The ranks that had copies of an index share its repetitions.

        Parameters
        ----------
        count : how often each index is repeated.
        workers : the number of ranks along the axis of the mesh.

        Returns
        -------
        Division
            The division of the longer axis.
        """
        with_copies = zip(self.segments, self.copies_of(workers), strict=True)
        return Division(tuple((*segment, (count, copies)) for segment, copies in with_copies))

    def unrepeated(self, count: int, workers: int) -> Division | None:
        """Return the inverse of `repeated`; None if there is none.

        Parameters
        ----------
        count : how often each index was repeated.
        workers : the number of ranks along the axis of the mesh.

        Returns
        -------
        Division or None
            The division before the repetition.
        """
        division = self.over(count)
        if division is not None and division.repeated(count, workers) == self:
            return division
        outer = [segment[:-1] or ((1, 1),) for segment in self.segments]
        if any(segment[-1][0] != count for segment in self.segments):
            return None
        division = Division(tuple(outer))
        return division if division.repeated(count, workers) == self else None

    def between(self, begin: int, end: int) -> tuple[Division, int, int] | None:
        """Return the division of a slice of whole segments, and its bounds in the shard.

        Parameters
        ----------
        begin : the first index of the slice in the axis.
        end : the index after the last one.

        Returns
        -------
        tuple or None
            The division and the two bounds; None if the slice cuts through a segment.
        """
        starts, own = [0], [0]
        for segment in self.segments:
            starts.append(starts[-1] + _extent(segment))
            own.append(own[-1] + _shard_of_segment(segment))
        if begin not in starts or end not in starts or begin >= end:
            return None
        first, last = starts.index(begin), starts.index(end)
        return Division(self.segments[first:last]), own[first], own[last]


def concatenated(divisions: Iterable[Division]) -> Division:
    """Return the division of the concatenation of axes."""
    return Division(tuple(segment for division in divisions for segment in division.segments))


def _extent(segment: Segment) -> int:
    return prod(extent for extent, _ in segment)


def _shard_of_segment(segment: Segment) -> int:
    return prod(-(-extent // n) for extent, n in segment)


def _merge_factors(segment: Sequence[Factor]) -> Segment:
    """Return the same segment with the fewest factors."""
    factors: list[Factor] = []
    for extent, n in segment:
        if extent == n == 1:
            continue
        if factors:
            outer, ranks = factors[-1]
            whole = n == 1 and outer % ranks == 0
            single = outer == ranks and extent % n == 0
            if whole or single:
                factors[-1] = (outer * extent, ranks * n)
                continue
        factors.append((extent, n))
    return tuple(factors) or ((1, 1),)


def _split_off_inner(segment: Segment, inner: int) -> Segment | None:
    """Return the segment without an inner axis of extent `inner`; None if a shard splits it."""
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
