# SPDX-License-Identifier: Apache-2.0
"""Collectives in any team of workers of several nodes, and large ones, checked on each worker.

`every_layout.py` makes them known with `import_python_module("tests.nodes.layout_functions")`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from tvm_ffi import Shape, get_global_func, register_global_func

from tests.nodes import internode_cases  # noqa: F401  what plans are looked for in
from tests.runtime import places
from tests.runtime.collective_cases import Array, numpy_type, reduce, same
from tests.runtime.collective_worker import Member, _run
from tvm_ipc.packed_functions import AllReduceStrategy, ReduceKind


class Mate(Member):
    """The calling worker as a member of any team, or of none: `size` is 0 then.

    `ranks` are those of teams of this size, one after another; `team` is what they are called.
    """

    def __init__(self, team: Any, size: int, ranks: Sequence[int], posts: bool = False) -> None:
        super().__init__(1, False, posts)
        self.team, self.size = team, 0
        if self.rank in ranks:
            place = list(ranks).index(self.rank)
            self.size, self.index = size, place % size
            self.ranks = ranks[place - self.index : place - self.index + size]
            self.first = self.ranks[0]


@register_global_func("tests.nodes.in_team")
def in_team(
    team: Any, size: int, ranks: Shape, nodes: Shape, posts: bool, plan: str, *arguments: Any
) -> str:
    """Run a plan, which is told the node of each member; return a digest of all results."""
    mate = Mate(team, size, list(ranks), posts)
    if mate.size == 0:
        return ""
    on = tuple(nodes[rank] for rank in mate.ranks)
    return _run(mate, f"tests.nodes.internode_cases.{plan}", on, *arguments)


#: Rows repeat after this many elements, so that pieces, which are even, never have the same ones.
PERIOD = 65537


def drawn(rank: int, dtype: str) -> Array:
    """The beginning of what a rank sends."""
    values = np.random.default_rng(rank).standard_normal(PERIOD) * 50
    kind = numpy_type(dtype)
    return np.asarray((abs(values) if kind.kind == "u" else values).astype(kind))


@register_global_func("tests.nodes.large")
def large(operation: str, size: int, dtype: str, nodes: Shape) -> str:
    """One collective of all workers over so many bytes; return a digest of what came out."""
    world = Mate(0, len(nodes), range(len(nodes)))
    ranks, me, root = world.size, world.rank, world.size - 1
    part = size // numpy_type(dtype).itemsize // ranks + 3
    whole = part * ranks
    rows = [drawn(rank, dtype) for rank in range(ranks)]
    sources = [(rank + ranks // 2) % ranks for rank in range(ranks)]
    more: tuple[Any, ...] = ()
    kind = ReduceKind.MAX if dtype == "bool" else ReduceKind.SUM
    if operation in ("allreduce", "reduce_scatter", "reduce"):
        wanted = np.resize(reduce(np.stack(rows), kind, tuple(nodes)), whole)
        more = (kind, root) if operation == "reduce" else (kind,)
    elif operation in ("allgather", "gather"):
        wanted = np.concatenate([np.resize(row, part) for row in rows])
    elif operation in ("broadcast", "scatter"):
        wanted = np.resize(rows[root], whole)
    elif operation == "permute":
        wanted, more = np.resize(rows[sources[me]], whole), (Shape(sources),)
    else:
        wanted, more = (
            np.concatenate([np.resize(row, whole)[_part(me, part)] for row in rows]),
            (Shape([]),),
        )
    if operation in ("reduce_scatter", "scatter"):
        wanted = wanted[_part(me, part)]
    if operation in ("gather", "broadcast", "scatter"):
        more = (root,)
    late = (AllReduceStrategy.AUTO,) if operation == "allreduce" else ()
    sends = operation not in ("broadcast", "scatter") or me == root
    receives = operation not in ("reduce", "gather") or me == root
    taken = part if operation in ("allgather", "gather") else whole
    send = places.tensor(np.resize(rows[me], taken)) if sends else None
    recv = places.empty(wanted.shape, dtype) if receives else None
    world.own(operation)(send, *more, 0, *late, 0, recv)
    if recv is None:
        return ""
    found = recv.numpy()
    assert same(found, wanted), f"{operation} of {size} bytes of {dtype} on rank {me}"
    return hashlib.sha256(found.view("uint8")).hexdigest()


def _part(place: int, count: int) -> slice:
    return slice(place * count, (place + 1) * count)


@register_global_func("tests.nodes.to_the_next_group")
def to_the_next_group(groups: int, count: int) -> None:
    """A message from each rank to the same place a group later; and from the last to worker 0."""
    rank, ranks = Member(1, False).rank, int(get_global_func("runtime.disco.world_size")())
    size = ranks // groups
    send = places.tensor(np.full(count, rank, "int64"))
    recv = places.empty((count,), "int64")
    if rank >= size:
        places.function("recv_from_prev_group")(recv)
        assert (recv.numpy() == rank - size).all()
    if rank < ranks - size:
        places.function("send_to_next_group")(send)
    if rank == 0:
        places.function("recv_from_worker")(recv, ranks - 1)
        assert (recv.numpy() == ranks - 1).all()
        places.function("send_to_worker")(send, ranks - 1)
    if rank == ranks - 1:
        places.function("send_to_worker")(send, 0)
        places.function("recv_from_worker0")(recv)
        assert (recv.numpy() == 0).all()
