# SPDX-License-Identifier: Apache-2.0
"""Ranks that disagree about what they do together, and ranks that are late.

Both sides are told on every rank, or who was missing; the session works afterwards.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tvm_ffi

import tvm_ipc
from tests.runtime.disco_kinds import RANKS, call, errors_at_sync, refused
from tests.runtime.places import PREFIX
from tvm_ipc.errors import DeadlineError, SessionClosedError
from tvm_ipc.packed_functions import ReduceKind

ALLREDUCE = "tvm_ipc.allreduce"


def disagree(trio: tvm_ipc.Session, rank: int, one: tuple[Any, ...], rest: Any) -> str:
    """Let one rank do something else than the others; return what every rank says."""
    (name, *args), (other, *others) = one, rest
    call(trio, "tests.call_elsewhere", rank, name, other, len(args), *args, *others)
    errors = errors_at_sync(trio)
    assert [(r, kind) for r, kind, _ in errors] == [(r, "MismatchError") for r in range(RANKS)]
    messages = {message for _, _, message in errors}
    assert len(messages) == 1
    return messages.pop()


@pytest.mark.parametrize("rank", range(RANKS))
def test_operations_that_differ(rank: int, trio: tvm_ipc.Session) -> None:
    x, all_of_x = trio.empty((4,), "float32"), trio.empty((4 * RANKS,), "float32")
    message = disagree(
        trio,
        rank,
        (f"{PREFIX}allreduce", x, 0, True, x),
        (f"{PREFIX}allgather", x, True, all_of_x),
    )
    for other in range(RANKS):
        what = "allreduce(sum" if other == rank else "allgather of 4 x float32"
        assert f"rank {other} called {what}" in message
    assert message.startswith("the ranks disagree: ")


def variants(trio: tvm_ipc.Session) -> dict[str, tuple[Any, Any, str, str]]:
    """Two calls that differ in one thing, and what an error shows of each."""

    def reduce(count: int, dtype: str, kind: int, strategy: int, flags: int) -> tuple[Any, ...]:
        x = trio.empty((count,), dtype)
        return (ALLREDUCE, x, kind, True, strategy, flags, x)

    def exchange(count: int, *parts: int) -> tuple[Any, ...]:
        send, recv = (trio.empty((count,), "float32") for _ in range(2))
        return ("tvm_ipc.all_to_all", send, tvm_ffi.Shape(parts), True, 0, recv)

    def permute(*sources: int) -> tuple[Any, ...]:
        send, recv = (trio.empty((4,), "float32") for _ in range(2))
        return ("tvm_ipc.permute", send, tvm_ffi.Shape(sources), 0, 0, recv)

    def ragged(row: int, groups: int) -> tuple[Any, ...]:
        send, recv = (trio.empty((6, row), "float32") for _ in range(2))
        counts = trio.put(np.zeros((RANKS, groups), "int64"))
        received = trio.empty((RANKS, groups), "int64")
        return ("tvm_ipc.ragged_all_to_all", send, counts, 0, 0, recv, received)

    def rooted(name: str, root: int, flags: int = 0) -> tuple[Any, ...]:
        send, recv = trio.empty((12,), "float32"), trio.empty((12 * RANKS,), "float32")
        pair = (recv, send) if name == "scatter" else (send, recv)
        pair = (send, send) if name == "broadcast" else pair
        return (f"tvm_ipc.{name}", pair[0], root, 0, flags, pair[1])

    usual = (4, "float32", 0, 1, 0)
    big = 300_000  # beyond all thresholds
    x, y = trio.empty((4,), "float32"), trio.empty((5,), "float32")
    return {
        "size": (reduce(*usual), reduce(5, *usual[1:]), "4 x float32", "5 x float32"),
        "large_size": (
            reduce(big, *usual[1:]),
            reduce(big + 1, *usual[1:]),
            f"{big} x float32",
            f"{big + 1} x float32",
        ),
        "small_and_large": (
            reduce(*usual),
            reduce(big, *usual[1:]),
            "4 x float32",
            f"{big} x float32",
        ),
        "dtype": (reduce(*usual), reduce(4, "int32", 0, 1, 0), "4 x float32", "4 x int32"),
        "reduction": (reduce(*usual), reduce(4, "float32", 3, 1, 0), "(sum,", "(max,"),
        "strategy": (
            reduce(*usual),
            reduce(4, "float32", 0, 2, 0),
            "strategy 1",
            "strategy 2",
        ),
        "flags": (reduce(*usual), reduce(4, "float32", 0, 1, 1), "flags 0", "flags 1"),
        "broadcast_size": (
            (f"{PREFIX}broadcast_from_worker0", x, True, x),
            (f"{PREFIX}broadcast_from_worker0", y, True, y),
            "broadcast from/to rank 0 of 4 x float32",
            "broadcast from/to rank 0 of 5 x float32",
        ),
        "parts": (
            exchange(4, 4, 0, 0, 0, 4, 0, 0, 0, 4),
            exchange(4, 0, 4, 0, 0, 0, 4, 4, 0, 0),
            "all_to_all(parts with hash",
            "all_to_all(parts with hash",
        ),
        "parts_and_equal_ones": (
            exchange(6, 6, 0, 0, 0, 6, 0, 0, 0, 6),
            exchange(6),
            ") of 18 x float32",
            "all_to_all of 6 x float32",
        ),
        "rows": (ragged(4, 2), ragged(5, 2), ") of 4 x float32", ") of 5 x float32"),
        "counts": (
            ragged(4, 2),
            ragged(4, 3),
            "ragged_all_to(parts with hash",
            "ragged_all_to(parts with hash",
        ),
        "sources": (
            permute(1, 2, 0),
            permute(1, -1, 0),
            "permute(parts with hash",
            "permute(parts with hash",
        ),
        "sources_of_whom_one_is_nobody": (
            permute(-1, 0, 0),
            permute(0, 0, 0),
            "permute(parts with hash",
            "permute(parts with hash",
        ),
        **{
            f"{name}_root": (
                rooted(name, 0),
                rooted(name, 1),
                f"{name} from/to rank 0 of 12 x float32",
                f"{name} from/to rank 1 of 12 x float32",
            )
            for name in ("broadcast", "scatter", "gather")
        },
        "gather_flags": (
            rooted("gather", 0, 1),
            rooted("gather", 0),
            "gather(flags 1) from/to rank 0",
            "gather from/to rank 0",
        ),
        "broadcast_and_gather": (
            (f"{PREFIX}broadcast_from_worker0", x, True, x),
            (f"{PREFIX}gather_to_worker0", x, True, trio.empty((4 * RANKS,), "float32")),
            "broadcast from/to rank 0",
            "gather from/to rank 0",
        ),
    }


@pytest.mark.parametrize(
    "what",
    [
        *("size", "large_size", "small_and_large", "dtype", "reduction", "strategy", "flags"),
        *("broadcast_size", "broadcast_and_gather", "parts", "parts_and_equal_ones"),
        *("rows", "counts"),
        *("sources", "sources_of_whom_one_is_nobody", "broadcast_root", "scatter_root"),
        *("gather_root", "gather_flags"),
    ],
)
@pytest.mark.parametrize("rank", [0, RANKS - 1])
def test_arguments_that_differ(what: str, rank: int, trio: tvm_ipc.Session) -> None:
    one, rest, mine, theirs = variants(trio)[what]
    message = disagree(trio, rank, one, rest)
    for part, shown in zip(message.split("; "), _shown(rank, mine, theirs), strict=True):
        assert shown in part


def _shown(rank: int, mine: str, theirs: str) -> list[str]:
    return [mine if other == rank else theirs for other in range(RANKS)]


def test_order_that_differs(trio: tvm_ipc.Session) -> None:
    x, y = trio.empty((4,), "float32"), trio.empty((5,), "float32")
    for first, second in ((x, y), (y, x)):
        call(
            trio,
            "tests.call_elsewhere",
            *(1, f"{PREFIX}allreduce", f"{PREFIX}allreduce", 4),
            *(first, 0, True, first, second, 0, True, second),
        )
    errors = errors_at_sync(trio)
    assert [(rank, kind) for rank, kind, _ in errors] == [
        (r, "MismatchError") for r in range(RANKS)
    ]
    assert "rank 1 called allreduce(sum, strategy 3, flags 0) of 4 x float32" in errors[0][2]


def test_sums_in_different_orders(trio: tvm_ipc.Session) -> None:
    x = trio.empty((4,), "float32")
    message = disagree(
        trio,
        1,
        (ALLREDUCE, x, int(ReduceKind.TREE_SUM), 0, 3, 0, x),
        (ALLREDUCE, x, int(ReduceKind.SUM), 0, 3, 0, x),
    )
    assert "allreduce(sum, strategy 3" in message and "allreduce(tree_sum, strategy 3" in message


def test_every_rank_says_so_every_time(trio: tvm_ipc.Session) -> None:
    x, y = trio.empty((4,), "float32"), trio.empty((5,), "float32")
    for round_ in range(100):
        disagree(
            trio,
            round_ % RANKS,
            (f"{PREFIX}allreduce", x, 0, True, x),
            (f"{PREFIX}allreduce", y, 0, True, y),
        )


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("allreduce", (0, 0, 0, 0)),
        ("reduce_scatter", (0, 0, 0)),
        ("allgather", (0, 0)),
        ("all_to_all", (tvm_ffi.Shape([]), 0, 0)),
        ("permute", (tvm_ffi.Shape(range(RANKS)), 0, 0)),
    ],
)
def test_each_rank_reports_its_wrong_arguments_however_late(
    name: str, options: tuple[Any, ...], trio: tvm_ipc.Session
) -> None:
    x, y = trio.empty((4,), "float32"), trio.empty((5,), "float32")
    call(trio, "tests.call_late", 1, 0.3, f"tvm_ipc.{name}", x, *options, y)
    assert refused(trio, "ValueError", f"{name}: ") == set(range(RANKS))


@pytest.mark.parametrize(
    ("count", "dtype", "theirs"),
    [(5, "float32", "5 x float32"), (4, "int32", "4 x int32"), (20_000, "int8", "20000 x int8")],
)
def test_message_that_is_not_what_the_receiver_wants(
    count: int, dtype: str, theirs: str, trio: tvm_ipc.Session
) -> None:
    sent, wanted = trio.empty((count,), dtype), trio.empty((4,), "float32")
    call(trio, "tests.call_on", 0, f"{PREFIX}send_to_worker", sent, 2)
    call(trio, "tests.call_on", 2, f"{PREFIX}recv_from_worker", wanted, 0)
    ((rank, kind, message),) = errors_at_sync(trio)
    assert (rank, kind) == (2, "MismatchError")
    assert f"rank 0 called send of {theirs} to rank 2" in message
    assert "wanted to receive 4 x float32" in message


# ---- ranks that are late --------------------------------------------------------------------

#: Seconds; the ranks that are not late must keep it on a busy machine.
SHORT_TIMEOUT = 2


@pytest.fixture(params=[True, False], ids=["threads", "processes"])
def impatient(request: pytest.FixtureRequest) -> Iterator[tvm_ipc.Session]:
    """Two groups of two. A busy machine can end such a session, so each test has its own."""
    with tvm_ipc.Session(4, num_groups=2, threads=request.param, timeout=SHORT_TIMEOUT) as session:
        session.import_python_module("tests.runtime.worker_functions")
        session.sync()  # or a test's timeout would include the import
        yield session


def deadline(trio: tvm_ipc.Session, seconds: float = 3.0) -> str:
    began = time.monotonic()
    with pytest.raises(DeadlineError) as error:
        trio.sync()
    assert SHORT_TIMEOUT - 0.1 < time.monotonic() - began < seconds + 6  # the machine may be busy
    return str(error.value)


def test_rank_that_does_not_call_is_named(impatient: tvm_ipc.Session) -> None:
    x = impatient.empty((4,), "float32")
    call(impatient, "tests.call_unless", 2, f"{PREFIX}allreduce", x, 0, False, x)
    message = deadline(impatient)
    waited = rf"allreduce\(sum.* of 4 x float32 waited {SHORT_TIMEOUT} s"
    assert re.search(rf"ranks? [013, -]+: DeadlineError: {waited}", message)
    assert f"for rank 2 (pid {impatient.pids[2]})" in message
    assert "TVM_IPC_TIMEOUT" in message
    assert impatient.usable
    impatient.allreduce(x, x, in_group=False)
    impatient.sync()


def test_group_and_world_do_not_meet(impatient: tvm_ipc.Session) -> None:
    x = impatient.empty((4,), "float32")
    in_group, in_world = (x, 0, True, x), (x, 0, False, x)
    name = f"{PREFIX}allreduce"
    call(impatient, "tests.call_elsewhere", 1, name, name, 4, *in_group, *in_world)
    message = deadline(impatient)
    # Rank 1 waits for the other one of its group, all others for rank 1.
    assert re.search(r"rank 1: .* for rank 0 \(pid|ranks? [023, -]+: .* for rank 1 \(pid", message)
    assert impatient.usable


def test_divisions_into_teams_that_differ(impatient: tvm_ipc.Session) -> None:
    x, both = impatient.empty((4,), "float32"), impatient.empty((8,), "float32")
    rows, columns = tvm_ffi.Shape([2, 0, 1, 2, 3]), tvm_ffi.Shape([2, 0, 2, 1, 3])
    name = "tvm_ipc.allgather"
    call(impatient, "tests.call_elsewhere", 1, name, name, 4, x, columns, 0, both, x, rows, 0, both)
    message = deadline(impatient)
    # Rank 1 waits for rank 3, which is in a team with rank 2; rank 0 waits for rank 1.
    missing = {0: (0, 1, 1), 1: (1, 3, 3)}  # what rank waits in the team of which ranks for whom
    assert any(
        re.search(
            rf"rank {rank}: .*\(ranks {one}, {other}\) waited {SHORT_TIMEOUT} s for rank {late}",
            message,
        )
        for rank, (one, other, late) in missing.items()
    )
    assert impatient.usable
    impatient.get_global_func(name)(x, columns, 0, both)
    impatient.sync()


def test_message_that_nobody_sends(impatient: tvm_ipc.Session) -> None:
    x = impatient.empty((4,), "float32")
    call(impatient, "tests.call_on", 3, f"{PREFIX}recv_from_worker", x, 1)
    message = deadline(impatient)
    assert f"rank 3: DeadlineError: receive from rank 1 (pid {impatient.pids[1]})" in message
    assert "4 x float32" in message
    assert impatient.usable


def test_message_that_nobody_takes(impatient: tvm_ipc.Session) -> None:
    """More than fits into the packets between two ranks."""
    x = impatient.empty((1_000_000,), "float32")
    call(impatient, "tests.call_on", 3, f"{PREFIX}send_to_worker", x, 1)
    message = deadline(impatient)
    assert f"rank 3: DeadlineError: send to rank 1 (pid {impatient.pids[1]})" in message
    assert impatient.usable


@pytest.mark.slow
@pytest.mark.parametrize("threads", [True, False], ids=["threads", "processes"])
def test_rank_that_is_busy_for_longer_than_the_timeout(threads: bool) -> None:
    with tvm_ipc.Session(2, threads=threads, timeout=SHORT_TIMEOUT) as session:
        session.import_python_module("tests.runtime.worker_functions")
        x = session.empty((4,), "float32")
        call(session, "tests.sleep_on", 1, 6.0)
        session.allreduce(x, x)
        message = deadline(session, 6.0)
        assert f"rank 1 (pid {session.pids[1]}) did not answer within {SHORT_TIMEOUT} s" in message
        assert "no longer usable" in message
        assert not session.usable
        with pytest.raises(SessionClosedError, match="not usable any more: rank 1"):
            session.sync()


def test_rank_that_is_late_but_in_time(trio: tvm_ipc.Session) -> None:
    x = trio.put(np.ones(4))
    call(trio, "tests.sleep_on", 2, 0.7)
    trio.allreduce(x, x)
    np.testing.assert_array_equal(trio.get(x, 1), np.full(4, 3))


def test_timeout_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TVM_IPC_TIMEOUT", "0.3")
    with tvm_ipc.Session(2, threads=True) as session:
        assert session.timeout == 0.3
        session.import_python_module("tests.runtime.worker_functions")
        x = session.empty((4,), "float32")
        call(session, "tests.call_on", 1, f"{PREFIX}allreduce", x, 0, False, x)
        with pytest.raises(DeadlineError, match=r"waited 0\.3 s for rank 0"):
            session.sync()
