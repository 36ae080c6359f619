# SPDX-License-Identifier: Apache-2.0
"""A segment tree with range additions and a maximum, for the bytes that are live at each event."""

from __future__ import annotations


class RangeMaxTree:
    """A number for each event, 0 at first; an addition to a range takes logarithmic time."""

    def __init__(self, events: int) -> None:
        self._leaves = 1 << events.bit_length()
        self._added = [0] * (2 * self._leaves)  #: by node, what was added to all of its events
        #: By node, the maximum of its events, without additions to nodes above it.
        self._maximum = [0] * (2 * self._leaves)

    def add(self, first: int, last: int, by: int) -> int:
        """Add to the events from first to last; return the maximum of them."""
        return self._add(1, 0, self._leaves - 1, first, last, by)

    def _add(self, node: int, begin: int, end: int, first: int, last: int, by: int) -> int:
        if first <= begin and end <= last:
            self._added[node] += by
            self._maximum[node] += by
            return self._maximum[node]
        middle, left, right = (begin + end) // 2, 2 * node, 2 * node + 1
        maxima = []
        if first <= middle:
            maxima.append(self._add(left, begin, middle, first, last, by))
        if last > middle:
            maxima.append(self._add(right, middle + 1, end, first, last, by))
        added = self._added[node]
        self._maximum[node] = added + max(self._maximum[left], self._maximum[right])
        return added + max(maxima)
