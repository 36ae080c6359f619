# SPDX-License-Identifier: Apache-2.0
"""Pooling: whole storages go from tensor to tensor, the strategy of TVM's own memory plan.

A tensor takes a storage of its dtype that is free again: the smallest one that is large enough and
at most 16 times as large, else the largest smaller one, which then grows. Packing is better nearly
always; where it is not, this plan is taken, so that ours never needs more. Scopes whose memory has
no addresses that can be moved are planned this way only.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

#: The largest ratio between what a tensor needs and a storage that it takes.
_RANGE = 16


#: A storage that is free: its size, since when, its index.
_Free: TypeAlias = "tuple[int, int, int]"


@dataclass(frozen=True)
class Request:
    """A tensor that wants a storage."""

    size: int
    kind: Hashable  #: storages go from tensor to tensor of one kind
    start: int  #: the event that allocates it
    last: int  #: the event that uses it last; before `start` where none does
    shared: bool  #: whether it may get or pass on a storage at all


@dataclass
class Pooled:
    """A storage and the tensors that use it, one after the other."""

    size: int
    members: list[int] = field(default_factory=list)


def pool(requests: Sequence[Request], *, exact: bool) -> list[Pooled]:
    """Return the storages; with `exact` only equal sizes share one."""
    storages: list[Pooled] = []
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
        place = _find(available, request.size, exact=exact) if request.shared else None
        if place is None or request.last < request.start:
            used_by[index] = len(storages)
            storages.append(Pooled(request.size))
        else:
            _, _, used_by[index] = available.pop(place)
        storage = storages[used_by[index]]
        storage.size = max(storage.size, request.size)
        storage.members.append(index)
    return storages


def _find(available: list[_Free], size: int, *, exact: bool) -> int | None:
    """Return the place of the storage to take, if there is one."""
    place = bisect_left(available, (size, -1, -1))
    if exact:
        found = place < len(available) and available[place][0] == size
        return place if found else None
    if place < len(available) and available[place][0] <= size * _RANGE:
        return place
    if place > 0 and available[place - 1][0] >= size // _RANGE:
        return place - 1
    return None
