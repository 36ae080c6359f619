# SPDX-License-Identifier: Apache-2.0
"""Pooling, the strategy of TVM's own memory planner: tensors reuse whole storages.

A tensor takes a free storage of its dtype: the smallest one that is large enough and at most 16
times as large, or else the largest smaller one, which then grows. Packing nearly always needs less
memory. This plan is used where packing needs more, so that our planner never needs more than TVM's,
and in scopes whose memory has no address arithmetic.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

#: The largest ratio between the size of a storage and the size of a tensor that takes it.
_RANGE = 16


#: A free storage: its size, the moment at which it became free, and its index.
_Free: TypeAlias = "tuple[int, int, int]"


@dataclass(frozen=True)
class StorageRequest:
    """A tensor that needs a storage."""

    size: int
    kind: Hashable  #: only tensors of equal kind share a storage
    start: int  #: the event that allocates it
    last: int  #: the event that uses it last; before `start` if it has no use
    shared: bool  #: whether it may share a storage at all


@dataclass
class PooledStorage:
    """A storage and the tensors that use it, one after the other."""

    size: int
    members: list[int] = field(default_factory=list)


def pool(requests: Sequence[StorageRequest], *, exact: bool) -> list[PooledStorage]:
    """Return the storages for the tensors.

    Parameters
    ----------
    exact : only tensors of equal size share a storage.
    """
    storages: list[PooledStorage] = []
    free: dict[Hashable, list[_Free]] = defaultdict(list)
    used_by: dict[int, int] = {}
    moments = [(request.start, 1, index) for index, request in enumerate(requests)]
    moments += [
        (request.last, 0, index)
        for index, request in enumerate(requests)
        if request.shared and request.last >= request.start
    ]
    for moment, (_, begins, index) in enumerate(sorted(moments)):
        request = requests[index]
        available = free[request.kind]
        if not begins:
            insort(available, (storages[used_by[index]].size, moment, used_by[index]))
            continue
        choice = _find_storage(available, request.size, exact=exact) if request.shared else None
        if choice is None or request.last < request.start:
            used_by[index] = len(storages)
            storages.append(PooledStorage(request.size))
        else:
            _, _, used_by[index] = available.pop(choice)
        storage = storages[used_by[index]]
        storage.size = max(storage.size, request.size)
        storage.members.append(index)
    return storages


def _find_storage(available: list[_Free], size: int, *, exact: bool) -> int | None:
    """Return the index in `available` of the storage to take, None if none fits."""
    position = bisect_left(available, (size, -1, -1))
    if exact:
        fits = position < len(available) and available[position][0] == size
        return position if fits else None
    if position < len(available) and available[position][0] <= size * _RANGE:
        return position
    if position > 0 and available[position - 1][0] >= size // _RANGE:
        return position - 1
    return None
