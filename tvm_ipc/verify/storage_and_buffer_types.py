# SPDX-License-Identifier: Apache-2.0
"""Represent storages, the buffers allocated in them, and the values of a program.

A value is the memory that it may reach: a frozen set of storages and buffers, or for a tuple a
tuple of values. `ValidBuffers` indexes the buffers of a storage whose contents are intact.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from tvm_ipc.analysis.polynomials import Number
from tvm_ipc.verify.symbolic_inequalities import Assumptions


@dataclass(eq=False)
class Storage:
    """Memory that is allocated and freed as one unit."""

    name: str
    scope: str | None  #: None: unknown
    size: Number | None = None
    #: Whether it is memory of the caller or of unknown origin. Two external storages may be the
    #: same memory, and the function does not free them.
    external: bool = False

    @property
    def storage(self) -> Storage:
        """The storage itself, for memory that may be a buffer too."""
        return self


@dataclass(eq=False)
class Buffer:
    """The bytes of a storage that a tensor occupies; views of the tensor share them."""

    name: str
    storage: Storage
    begin: Number | None = 0  #: None: unknown
    end: Number | None = None  #: None: unknown
    #: Whether a value only may be this buffer: the result of an unknown call may be an argument.
    weak: bool = False
    #: The buffer that this one continues under another name: of a view, or after an `if`.
    origin: Buffer | None = None
    assumptions: Assumptions = ()  #: implied by the existence of the tensor

    def renamed(self, weak: bool, origin: Buffer | None) -> Buffer:
        """Return another buffer of the same bytes."""
        begin, end, assumptions = self.begin, self.end, self.assumptions
        return Buffer(self.name, self.storage, begin, end, weak, origin, assumptions)


Memory = Storage | Buffer
Leaf = frozenset[Memory]
Value = Leaf | tuple[Any, ...]
NOTHING: Leaf = frozenset()


def objects(value: Value) -> Iterator[Memory]:
    """Yield every storage and buffer that a value may reach."""
    if isinstance(value, frozenset):
        yield from value
    else:
        for field in value:
            yield from objects(field)


def leaves(value: Value) -> Iterator[Leaf]:
    """Yield the value, or the values of all fields of nested tuples."""
    if isinstance(value, frozenset):
        yield value
    else:
        for field in value:
            yield from leaves(field)


_BEGIN = attrgetter("begin")


class ValidBuffers:
    """The buffers of one storage whose contents are intact, indexed by their bytes.

    Buffers with static bytes are grouped by the bit length of their size and sorted by their begin.
    In each group only a short range can overlap a buffer.
    """

    __slots__ = ("_members", "_static", "_symbolic")

    def __init__(self) -> None:
        self._members: dict[Buffer, None] = {}
        self._static: dict[int, list[Buffer]] = {}  #: by the bit length of their size
        self._symbolic: dict[Buffer, None] = {}

    def __contains__(self, buffer: Buffer) -> bool:
        """Return whether the very buffer is a member."""
        return buffer in self._members

    def add(self, buffer: Buffer) -> None:
        """Add a buffer unless it is already a member."""
        if buffer in self._members:
            return
        self._members[buffer] = None
        size = _static_size(buffer)
        if size is None:
            self._symbolic[buffer] = None
        else:
            insort(self._static.setdefault(size.bit_length(), []), buffer, key=_BEGIN)

    def discard(self, buffer: Buffer) -> None:
        """Remove a buffer if it is a member."""
        if buffer not in self._members:
            return
        del self._members[buffer]
        size = _static_size(buffer)
        if size is None:
            del self._symbolic[buffer]
            return
        group = self._static[size.bit_length()]
        index = bisect_left(group, buffer.begin, key=_BEGIN)
        while group[index] is not buffer:
            index += 1
        del group[index]

    def candidates(self, buffer: Buffer) -> Iterator[Buffer]:
        """Yield all members that may overlap a buffer, and some that do not."""
        if _static_size(buffer) is None:
            yield from self._members
            return
        begin, end = buffer.begin, buffer.end
        assert isinstance(begin, int) and isinstance(end, int)
        for bits, group in self._static.items():
            low = bisect_left(group, begin - (1 << bits), key=_BEGIN)
            yield from group[low : bisect_left(group, end, lo=low, key=_BEGIN)]
        yield from self._symbolic

    def copy(self) -> ValidBuffers:
        """Return an independent copy."""
        copy = ValidBuffers()
        copy._members = dict(self._members)
        copy._static = {bits: list(group) for bits, group in self._static.items()}
        copy._symbolic = dict(self._symbolic)
        return copy

    def update(self, buffers: ValidBuffers) -> None:
        """Add all members of another collection."""
        for buffer in buffers._members:
            self.add(buffer)


def _static_size(buffer: Buffer) -> int | None:
    """Return the number of bytes, None unless both begin and end are static."""
    begin, end = buffer.begin, buffer.end
    return end - begin if isinstance(begin, int) and isinstance(end, int) else None
