# SPDX-License-Identifier: Apache-2.0
"""Which indices of a whole array make a part of it.

    (((0, 2), (None, 1)), ((4, 4),))     # rows 0 and 1, then a row of zeros; columns 4 to 7

Along each axis a part has runs of indices, one after the other: where a run begins in the whole,
and how many indices it has. None stands for zeros, which the whole does not have. This module
imports nothing of ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, TypeAlias

import numpy as np

#: Where a run begins in the whole, None for zeros, and how many indices it has.
Run: TypeAlias = tuple[int | None, int]
#: Those along each axis.
Runs: TypeAlias = tuple[tuple[Run, ...], ...]
#: The same place in an array, along each axis.
Place: TypeAlias = tuple[slice, ...]


def all_of(extent: int) -> tuple[Run, ...]:
    """Return the runs along an axis of which a part has everything."""
    return ((0, extent),)


def even(extent: int, index: int, parts: int) -> tuple[Run, ...]:
    """Return the runs of one of several equal parts, with zeros beyond the end of the axis."""
    size = -(-extent // parts)
    start = min(index * size, extent)
    stop = min(start + size, extent)
    found = [(start, stop - start), (None, size - (stop - start))]
    return tuple(run for run in found if run[1])


def extents(runs: Runs) -> tuple[int, ...]:
    """Return the shape of a part."""
    return tuple(sum(count for _, count in axis) for axis in runs)


def rows(runs: Runs, begin: int, count: int) -> Runs:
    """Return the runs of some rows of a part: indices of its first axis."""
    found: list[Run] = []
    end = 0
    for start, length in runs[0]:
        low, high = max(begin, end), min(begin + count, end + length)
        if low < high:
            found.append((None if start is None else start + low - end, high - low))
        end += length
    return (tuple(found), *runs[1:])


def moves(runs: Runs) -> Iterator[tuple[Place, Place | None]]:
    """Yield places in a part, and where each of them is in the whole; None for zeros."""
    axes = []
    for axis in runs:
        ways = []
        end = 0
        for start, count in axis:
            begin, end = end, end + count
            ways.append((slice(begin, end), None if start is None else slice(start, start + count)))
        axes.append(ways)
    for way in product(*axes):
        places = [source for _, source in way if source is not None]
        yield (
            tuple(target for target, _ in way),
            (tuple(places) if len(places) == len(way) else None),
        )


def moves_of_box(
    runs: Runs, begin: Sequence[int], shape: Sequence[int]
) -> Iterator[tuple[Place, Place]]:
    """Yield places in a part, and where each of them is in a box of the whole, if it is there."""
    for target, source in moves(runs):
        if source is None:
            continue
        places = [
            (max(place.start, low), min(place.stop, low + extent))
            for place, low, extent in zip(source, begin, shape, strict=True)
        ]
        if all(start < stop for start, stop in places):
            yield (
                tuple(
                    slice(to.start + start - place.start, to.start + stop - place.start)
                    for (start, stop), to, place in zip(places, target, source, strict=True)
                ),
                tuple(
                    slice(start - low, stop - low)
                    for (start, stop), low in zip(places, begin, strict=True)
                ),
            )


def take(whole: np.ndarray[Any, Any], runs: Sequence[Sequence[Run]]) -> np.ndarray[Any, Any]:
    """Return a part of an array, in memory of its own; what it does not have is not read."""
    found = tuple(map(tuple, runs))
    part = np.empty(extents(found), whole.dtype)
    for target, source in moves(found):
        part[target] = 0 if source is None else whole[source]
    return part
