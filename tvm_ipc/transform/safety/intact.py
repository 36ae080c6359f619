# SPDX-License-Identifier: Apache-2.0
"""The buffers of a storage whose contents are intact, found by the bytes that they lie in."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from tvm_ipc.transform.safety.buffers import Buffer

_BEGIN = attrgetter("begin")


class Intact:
    """Buffers of one storage.

    Those at static bytes are sorted by where they begin, apart from those that are twice as long:
    those before a place which may reach it are then few.
    """

    __slots__ = ("_members", "_static", "_symbolic")

    def __init__(self) -> None:
        self._members: dict[Buffer, None] = {}
        self._static: dict[int, list[Buffer]] = {}  #: by the number of bits of their length
        self._symbolic: dict[Buffer, None] = {}

    def __contains__(self, buffer: Buffer) -> bool:
        return buffer in self._members

    def add(self, buffer: Buffer) -> None:
        """Add a buffer, which may be there."""
        if buffer in self._members:
            return
        self._members[buffer] = None
        length = _length(buffer)
        if length is None:
            self._symbolic[buffer] = None
        else:
            insort(self._static.setdefault(length.bit_length(), []), buffer, key=_BEGIN)

    def discard(self, buffer: Buffer) -> None:
        """Take a buffer out, if it is there."""
        if buffer not in self._members:
            return
        del self._members[buffer]
        length = _length(buffer)
        if length is None:
            del self._symbolic[buffer]
            return
        alike = self._static[length.bit_length()]
        place = bisect_left(alike, buffer.begin, key=_BEGIN)
        while alike[place] is not buffer:
            place += 1
        del alike[place]

    def near(self, buffer: Buffer) -> Iterator[Buffer]:
        """Yield those that may overlap a buffer, and others."""
        if _length(buffer) is None:
            yield from self._members
            return
        begin, end = buffer.begin, buffer.end
        assert isinstance(begin, int) and isinstance(end, int)
        for bits, alike in self._static.items():
            low = bisect_left(alike, begin - (1 << bits), key=_BEGIN)
            yield from alike[low : bisect_left(alike, end, lo=low, key=_BEGIN)]
        yield from self._symbolic

    def copy(self) -> Intact:
        """Return buffers that change on their own."""
        other = Intact()
        other._members = dict(self._members)
        other._static = {bits: list(alike) for bits, alike in self._static.items()}
        other._symbolic = dict(self._symbolic)
        return other

    def update(self, other: Intact) -> None:
        """Add the buffers of another path."""
        for buffer in other._members:
            self.add(buffer)


def _length(buffer: Buffer) -> int | None:
    """Return the number of bytes, None where it or their place is not static."""
    begin, end = buffer.begin, buffer.end
    return end - begin if isinstance(begin, int) and isinstance(end, int) else None
