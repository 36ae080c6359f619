# SPDX-License-Identifier: Apache-2.0
"""How much is live at each event of a function, where it changes for whole spans of them."""

from __future__ import annotations


class Levels:
    """A number for each event, 0 at first: a tree of halves, so that no span is walked through."""

    def __init__(self, events: int) -> None:
        self._leaves = 1 << events.bit_length()
        self._together = [0] * (2 * self._leaves)  #: what all events of a node were raised by
        self._highest = [0] * (2 * self._leaves)  #: of a node, what was raised with more left out

    def add(self, first: int, last: int, by: int) -> int:
        """Raise the events from first to last; return the highest of them."""
        return self._add(1, 0, self._leaves - 1, first, last, by)

    def _add(self, node: int, begin: int, end: int, first: int, last: int, by: int) -> int:
        if first <= begin and end <= last:
            self._together[node] += by
            self._highest[node] += by
            return self._highest[node]
        middle, left, right = (begin + end) // 2, 2 * node, 2 * node + 1
        highest = []
        if first <= middle:
            highest.append(self._add(left, begin, middle, first, last, by))
        if last > middle:
            highest.append(self._add(right, middle + 1, end, first, last, by))
        together = self._together[node]
        self._highest[node] = together + max(self._highest[left], self._highest[right])
        return together + max(highest)
