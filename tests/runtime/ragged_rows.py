# SPDX-License-Identifier: Apache-2.0
"""Rows that ranks send each other, as many as their counts have, and what NumPy makes of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from tvm_ffi import Shape

from tests.runtime.collective_cases import Array, numpy_type
from tests.runtime.tensors_of_ranks import put_each, write_each

#: How rows are spread over the receivers.
SPREADS = ("uneven", "none", "all_to_one", "to_itself", "one_sends", "equal")


@dataclass(frozen=True)
class Rows:
    """The rows and counts that all ranks send.

    Attributes
    ----------
    sends : the rows of each rank, with some beyond those that it sends.
    counts : for each sender, how many rows each receiver gets, by group.
    """

    sends: list[Array]
    counts: Array

    @property
    def received(self) -> list[Array]:
        """The rows of each receiver, in the order of the senders."""
        ends = np.cumsum(self.counts.sum(2), 1)
        per_rank = [
            [send[end - many : end] for send, end, many in zip(self.sends, to, of, strict=True)]
            for to, of in zip(ends.T, self.counts.sum(2).T, strict=True)
        ]
        return [np.concatenate(rows) for rows in per_rank]


def counts_of(spread: str, ranks: int, rows: int, groups: int, random: Any) -> Array:
    """Return the counts of each sender for each receiver and group: at most `rows` in all."""
    counts = np.zeros((ranks, ranks, groups), "int64")
    for sender in range(ranks):
        drawn = random.integers(0, rows // (ranks * groups) + 1, (ranks, groups))
        if spread == "all_to_one":
            counts[sender, ranks - 1, -1] = rows
        elif spread == "to_itself":
            counts[sender, sender, 0] = rows - sender % 2 if rows else 0
        elif spread == "equal":
            counts[sender] = rows // (ranks * groups)
        elif spread == "uneven" or (spread == "one_sends" and sender == 0):
            counts[sender] = drawn
    return counts


def rows_of(
    spread: str, ranks: int, rows: int, row: tuple[int, ...], dtype: str, groups: int = 1
) -> Rows:
    random = np.random.default_rng((ranks, rows, len(row), groups, SPREADS.index(spread)))
    sends = [
        (random.integers(-100, 100, (rows, *row)) + 100 * rank).astype(numpy_type(dtype))
        for rank in range(ranks)
    ]
    return Rows(sends, counts_of(spread, ranks, rows, groups, random))


def tensor(session: Any, shape: tuple[int, ...], dtype: str, memory: str) -> Any:
    """Return a tensor in the arenas, in private memory, or in the one on some ranks."""
    size = max(1, int(np.prod(shape)) * numpy_type(dtype).itemsize)
    if memory == "private":
        return session.empty(shape, dtype)
    function = "tests.ipc_tensor" if memory == "arena" else "tests.ipc_tensor_on_even_ranks"
    return session.get_global_func(function)(size, Shape(shape), tvm.DataType(dtype))


def check(
    session: Any, rows: Rows, dtype: str, memory: str = "private", flags: int = 0, spare: int = 0
) -> None:
    """Send the rows, and compare with NumPy; `spare` is the room that no rank needs."""
    ranks = session.num_workers
    groups = rows.counts.shape[2]
    shape = rows.sends[0].shape
    capacity = max(map(len, rows.received)) + spare
    send = tensor(session, shape, dtype, memory)
    write_each(send, rows.sends)
    flat = rows.counts.reshape(ranks, -1) if groups == 1 else rows.counts
    counts = put_each(session, flat)
    recv = session.empty((capacity, *shape[1:]), dtype)
    recv_counts = session.empty(flat.shape[1:], "int64")
    run = session.get_global_func("tvm_ipc.ragged_all_to_all")
    run(send, counts, 0, flags, recv, recv_counts)
    if flags:  # the promise was that the input stays until the next collective
        session.allreduce(session.put(np.zeros(1)), session.empty((1,), "float64"))
    for rank, right in enumerate(rows.received):
        found = session.get(recv, rank)[: len(right)]
        np.testing.assert_array_equal(found.astype("float64"), right.astype("float64"))
        own = rows.counts[:, rank].reshape(flat.shape[1:])
        np.testing.assert_array_equal(session.get(recv_counts, rank), own)
        assert session.get(send, rank).tobytes() == rows.sends[rank].tobytes()
