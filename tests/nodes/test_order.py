# SPDX-License-Identifier: Apache-2.0
"""In which order sums across nodes are added: that of the nodes, or that of one machine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tvm_ipc
from tests.nodes.node_processes import SECONDS
from tvm_ipc.nodes.find_mpi_installation import Mpi

WORKERS = 4
COUNTS = (7, 200_003)


def sums(dtype: str, **where: Any) -> list[bytes]:
    """The bits of a few sums of numbers whose order shows."""
    found = []
    with tvm_ipc.Session(WORKERS, timeout=SECONDS, **where) as session:
        for count in COUNTS:
            send, recv = (session.empty((count,), dtype) for _ in range(2))
            for rank in range(WORKERS):
                random = np.random.default_rng((count, rank))
                own = random.standard_normal(count) * 10.0 ** random.integers(-3, 4, count)
                send.debug_copy_from(rank, own.astype(dtype))
            session.allreduce(send, recv)
            every = {np.asarray(session.get(recv, rank)).tobytes() for rank in range(WORKERS)}
            assert len(every) == 1, "ranks have different bits"
            found.append(every.pop())
    return found


def test_flat_order_has_the_bits_of_one_machine(mpi: Mpi) -> None:
    one = sums("float32", threads=True)
    assert sums("float32", hosts=2, order="flat") == one
    assert sums("float32", hosts=2) != one, "these numbers do not show the order"


def test_an_order_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="Session: order is one of 'nodes', 'flat'"):
        tvm_ipc.Session(2, order="random")
