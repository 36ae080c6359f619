# SPDX-License-Identifier: Apache-2.0
"""Describe parts of an array by spans of indices along each axis, and extract them.

    (((0, 2), (None, 1)), ((4, 4),))     # rows 0 and 1, then a row of zeros; columns 4 to 7

A span is its start in the whole array and its number of indices. Along each axis, a part is the
concatenation of its spans. A span that starts at None is zeros, which are not in the whole array.
Imports no other module of tvm_ipc.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, TypeAlias

import numpy as np

#: The start of a span in the whole array, None for zeros, and its number of indices.
Span: TypeAlias = tuple[int | None, int]
#: The spans of a part along each axis.
Spans: TypeAlias = tuple[tuple[Span, ...], ...]
#: A box in an array: a slice along each axis.
Slices: TypeAlias = tuple[slice, ...]


def whole_axis(extent: int) -> tuple[Span, ...]:
    """Return the spans along an axis of which a part has all indices."""
    return ((0, extent),)


def even_shard(extent: int, index: int, shards: int) -> tuple[Span, ...]:
    """Return the spans of one of several equal shards, padded with zeros at the end of the axis."""
    size = -(-extent // shards)
    start = min(index * size, extent)
    stop = min(start + size, extent)
    spans = [(start, stop - start), (None, size - (stop - start))]
    return tuple(span for span in spans if span[1])


def shape_of(spans: Spans) -> tuple[int, ...]:
    """Return the shape of a part."""
    return tuple(sum(count for _, count in axis) for axis in spans)


def rows(spans: Spans, begin: int, count: int) -> Spans:
    """Return the spans of some rows of a part: indices along its first axis."""
    row_spans: list[Span] = []
    end = 0
    for start, length in spans[0]:
        low, high = max(begin, end), min(begin + count, end + length)
        if low < high:
            row_spans.append((None if start is None else start + low - end, high - low))
        end += length
    return (tuple(row_spans), *spans[1:])


def slice_pairs(spans: Spans) -> Iterator[tuple[Slices, Slices | None]]:
    """Yield the boxes of a part, each with the same box in the whole array; None for zeros."""
    axes = []
    for axis in spans:
        pairs = []
        end = 0
        for start, count in axis:
            begin, end = end, end + count
            source = None if start is None else slice(start, start + count)
            pairs.append((slice(begin, end), source))
        axes.append(pairs)
    for box in product(*axes):
        sources = [source for _, source in box if source is not None]
        yield (
            tuple(target for target, _ in box),
            (tuple(sources) if len(sources) == len(box) else None),
        )


def slice_pairs_in_box(
    spans: Spans, begin: Sequence[int], shape: Sequence[int]
) -> Iterator[tuple[Slices, Slices]]:
    """Yield the boxes of a part in a box of the whole array, each with the same box there."""
    for target, source in slice_pairs(spans):
        if source is None:
            continue
        common = [
            (max(indices.start, low), min(indices.stop, low + extent))
            for indices, low, extent in zip(source, begin, shape, strict=True)
        ]
        if all(start < stop for start, stop in common):
            yield (
                tuple(
                    slice(to.start + start - indices.start, to.start + stop - indices.start)
                    for (start, stop), to, indices in zip(common, target, source, strict=True)
                ),
                tuple(
                    slice(start - low, stop - low)
                    for (start, stop), low in zip(common, begin, strict=True)
                ),
            )


def extract(whole: np.ndarray[Any, Any], spans: Sequence[Sequence[Span]]) -> np.ndarray[Any, Any]:
    """Return a copy of a part of an array; the rest of the array is not read."""
    axes = tuple(map(tuple, spans))
    part = np.empty(shape_of(axes), whole.dtype)
    for target, source in slice_pairs(axes):
        part[target] = 0 if source is None else whole[source]
    return part
