# SPDX-License-Identifier: Apache-2.0
"""All-to-all of rows whose numbers only their senders know, against NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm_ffi

import tvm_ipc
from tests.runtime.disco_kinds import refused
from tests.runtime.ragged_rows import SPREADS, check, rows_of
from tests.runtime.tensors_of_ranks import put_each

OpenSession = Callable[[int], tvm_ipc.Session]
#: Rows and what a row has: small ones, which go with the counts, and some larger than a staging
#: buffer, which go in pieces or are read in place.
SIZES = ((0, (4,)), (5, (3,)), (40, ()), (64, (2, 5)), (900, (257,)), (3, (0,)))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("memory", ["arena", "private", "mixed"])
def test_rows_arrive_in_the_order_of_senders(ranks: int, memory: str, opened: OpenSession) -> None:
    session = opened(ranks)
    for number, spread in enumerate(SPREADS):
        for rows, row in SIZES:
            sent = rows_of(spread, ranks, rows, row, "float32")
            check(session, sent, "float32", memory, flags=number % 2, spare=number % 3)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float64"])
def test_types_and_groups(dtype: str, opened: OpenSession) -> None:
    for groups in (2, 5):
        for memory in ("arena", "private"):
            check(opened(3), rows_of("uneven", 3, 300, (90,), dtype, groups), dtype, memory)


def test_workers_that_are_processes() -> None:
    with tvm_ipc.Session(3, timeout=60) as session:
        for rows, row in SIZES[1:]:
            check(session, rows_of("uneven", 3, rows, row, "float32"), "float32")


def test_teams(opened: OpenSession) -> None:
    """Two pairs of four ranks, each of which exchanges its own rows."""
    session = opened(4)
    pairs = ((0, 2), (3, 1))
    send = put_each(session, [np.full((4, 3), rank, "float32") for rank in range(4)])
    counts = put_each(session, [np.array([rank, 1], "int64") for rank in range(4)])
    recv, received = session.empty((6, 3), "float32"), session.empty((2,), "int64")
    teams = tvm_ffi.Shape([2, *pairs[0], *pairs[1]])
    session.get_global_func("tvm_ipc.ragged_all_to_all")(send, counts, teams, 0, recv, received)
    for pair in pairs:
        for index, rank in enumerate(pair):
            many = [peer if index == 0 else 1 for peer in pair]
            np.testing.assert_array_equal(session.get(received, rank), many)
            found = session.get(recv, rank)[: sum(many), 0]
            np.testing.assert_array_equal(found, np.repeat(pair, many))


def test_only_the_rows_that_are_sent_move(opened: OpenSession) -> None:
    """Counts and rows; neither rows of a rank for itself, nor the rest of the result."""
    session = opened(4)
    count = session.get_global_func("tvm_ipc.bytes_received")

    def received() -> list[int]:
        total = count()
        return [int(total.debug_get_from_remote(rank)) for rank in range(4)]

    for memory in ("arena", "private"):
        rows = rows_of("uneven", 4, 800, (96,), "float32", 2)
        before = received()
        check(session, rows, "float32", memory, spare=5000)
        moved = [b - a for a, b in zip(before, received(), strict=True)]
        for rank, many in enumerate(moved):
            routed = rows.counts[:, rank].sum() - rows.counts[rank, rank].sum()
            assert routed * 96 * 4 <= many <= routed * 96 * 4 * 1.05


def call(session: Any, **changed: Any) -> None:
    """Exchange a row for each rank, of float32, with some arguments changed."""
    ranks = session.num_workers
    tensors: dict[str, Any] = {
        "send": ((4, 6), "float32"),
        "counts": [[1] * ranks] * ranks,
        "recv": ((4, 6), "float32"),
        "recv_counts": ((ranks,), "int64"),
    }
    made = {}
    for name, value in {**tensors, **changed}.items():
        if isinstance(value, list):
            made[name] = put_each(session, [np.array(one, "int64") for one in value])
        else:
            made[name] = session.empty(*value) if isinstance(value, tuple) else value
    send, counts, recv, recv_counts = (made[name] for name in tensors)
    run = session.get_global_func("tvm_ipc.ragged_all_to_all")
    run(send, counts, 0, 0, recv, recv_counts)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"counts": [[3, 2]] * 2}, "the sum of counts is 5, and send has 4 rows"),
        ({"counts": [[-1, 2]] * 2}, "a count for worker 0 is -1; send has 4 rows"),
        ({"counts": [[0, 5]] * 2}, "a count for worker 1 is 5; send has 4 rows"),
        (
            {"counts": ((2,), "int32"), "recv_counts": ((2,), "int32")},
            "counts has the type int32; it must be int64",
        ),
        (
            {"counts": [[1, 1, 1]] * 2, "recv_counts": ((3,), "int64")},
            "counts has 3 numbers; a team of 2 has the same number of them for each worker",
        ),
        ({"recv_counts": ((4,), "int64")}, "counts has 2 x int64, recv_counts has 4 x int64"),
        ({"recv": ((4, 6), "float16")}, "send is float32, recv is float16"),
        ({"recv": ((5,), "float32")}, "recv has 5 elements, which are no rows of 6"),
        ({"send": ((), "float32")}, "send has no axes; its first axis counts rows"),
        (
            {"counts": ((1 << 15,), "int64"), "recv_counts": ((1 << 15,), "int64")},
            "counts has 32768 numbers, and the most are 16384",
        ),
    ],
)
def test_what_is_refused(changed: dict[str, Any], message: str, opened: OpenSession) -> None:
    session = opened(2)
    call(session, **changed)
    assert refused(session, "ValueError", f"ragged_all_to_all: {message}")
    call(session)
    session.sync()


def test_too_many_rows_for_the_result(opened: OpenSession) -> None:
    session = opened(3)
    counts = [[0, 2, 1], [0, 2, 0], [0, 1, 0]]
    call(session, counts=counts, recv=((4, 6), "float32"))
    message = "ragged_all_to_all: worker 1 of the team receives 5 rows, and recv has room for 4"
    assert refused(session, "ValueError", message, "the capacity of the operator") == {1}
    call(session, counts=counts, recv=((5, 6), "float32"))
    session.sync()


def test_outputs_that_overlap_are_refused(opened: OpenSession) -> None:
    session = opened(2)
    x = session.empty((4, 6), "float32")
    call(session, send=x, recv=x)
    message = "recv overlaps send; outputs must be apart from all else"
    assert refused(session, "ValueError", f"ragged_all_to_all: {message}")
    counts = session.put(np.ones(2, "int64"))
    call(session, counts=counts, recv_counts=counts)
    assert refused(session, "ValueError", "ragged_all_to_all: recv_counts overlaps counts")
