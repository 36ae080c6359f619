# SPDX-License-Identifier: Apache-2.0
"""Every collective against NumPy, bit for bit: ranks x sizes x types x where the memory lies.

Reductions add in rank order, 16-bit floats in float32, so there is one right answer. The workers
check it themselves, and that inputs and the bytes around outputs stay as they were.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tvm_ffi

import tvm_ipc
from tests.runtime import disco_kinds
from tests.runtime.collective_cases import MEMORIES, MOVED, REDUCED
from tests.runtime.disco_kinds import on_workers
from tests.runtime.places import PREFIX
from tvm_ipc.errors import WorkerError
from tvm_ipc.packed_functions import AllReduceStrategy, ReduceKind

RANKS = (1, 2, 3, 4, 5, 8)


def some(ranks: tuple[int, ...], all_types_on: int) -> list[tuple[int, str]]:
    """Numbers of ranks, and types to reduce: all on one of them, one of each kind on the others.

    A type's arithmetic does not depend on who calls it; `tests/native/test_reduce.cc` has it with
    all types from any number of ranks.
    """
    types = {n: REDUCED if n == all_types_on else ("bfloat16", "float32", "int8") for n in ranks}
    return [(n, dtype) for n in ranks for dtype in types[n]]


OpenSession = Callable[..., tvm_ipc.Session]


def run(session: tvm_ipc.Session, plan: str, *arguments: Any, groups: int = 1) -> list[str]:
    """Run the cases of a plan on all ranks; return each one's digest of its results."""
    digests = start(session, groups, True, plan, *arguments)
    return on_workers(digests, session.num_workers)


def start(session: tvm_ipc.Session, groups: int, in_group: bool, plan: str, *args: Any) -> Any:
    return session.get_global_func("tests.run_collectives")(groups, in_group, plan, *args)


@pytest.mark.parametrize(
    "ranks",
    [1, 2, 3, pytest.param(4, marks=pytest.mark.slow), pytest.param(5, marks=pytest.mark.slow), 8],
)
def test_allreduce_every_way(ranks: int, opened: OpenSession) -> None:
    digests = run(opened(ranks), "allreduces_by_way")
    assert len(set(digests)) == 1, "ranks have different bits"


@pytest.mark.parametrize(
    ("ranks", "count", "dtype"),
    [
        (4, 2880 * 402, "float16"),
        (8, 7168 * 149, "float16"),
        (8, 5120 * 205, "float16"),
        (8, 36, "float32"),
    ],
)
def test_tails(ranks: int, count: int, dtype: str, opened: OpenSession) -> None:
    """Sizes at which others left the end of the output as it was."""
    session = opened(ranks)
    numbers = (np.arange(count) % 97).astype(dtype)
    given = session.put(numbers)
    allreduce = session.get_global_func("tvm_ipc.allreduce")
    for strategy in AllReduceStrategy:
        out = session.put(np.full(count, np.nan, dtype))
        session.call_packed(allreduce, given, 0, 0, int(strategy), 0, out)
        for rank in (0, ranks - 1):
            np.testing.assert_array_equal(session.get(out, rank), ranks * numbers)


@pytest.mark.parametrize(("ranks", "dtype"), some(RANKS, 5))
def test_allreduce_every_type(ranks: int, dtype: str, opened: OpenSession) -> None:
    digests = run(opened(ranks), "allreduces_by_type", dtype)
    assert len(set(digests)) == 1, "ranks have different bits"


@pytest.mark.parametrize(("ranks", "dtype"), some((1, 2, 3, 5), 3))
def test_reduce_scatter(ranks: int, dtype: str, opened: OpenSession) -> None:
    run(opened(ranks), "reduce_scatters", dtype)


@pytest.mark.parametrize(("ranks", "dtype"), some((1, 2, 3, 5), 3))
def test_reduce(ranks: int, dtype: str, opened: OpenSession) -> None:
    run(opened(ranks), "reduces", dtype)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_all_to_all(ranks: int, dtype: str, opened: OpenSession) -> None:
    run(opened(ranks), "all_to_alls", dtype)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_all_to_all_of_unequal_parts(ranks: int, dtype: str, opened: OpenSession) -> None:
    run(opened(ranks), "all_to_alls_of_parts", dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_one_answer_whatever_the_strategy_and_the_memory(
    ranks: int, dtype: str, opened: OpenSession
) -> None:
    digests = {
        digest
        for strategy in AllReduceStrategy
        for memory in MEMORIES
        for digest in run(opened(ranks), "allreduces_of_one", dtype, int(strategy), memory)
    }
    assert len(digests) == 1


SAME_CASES = """
import json, tvm, tvm_ffi, tvm_ipc
from tests.runtime.test_collectives import run

with tvm_ipc.Session(5, threads=True) as session:
    session.import_python_module("tests.runtime.collective_worker")
    digests = [run(session, "allreduces_of_one", t, 3, "mixed") for t in ("bfloat16", "float32")]
    info = json.loads(tvm_ffi.get_global_func("tvm_ipc.native_info")())
    print(info["instruction_set"], *(digest for ranks in digests for digest in ranks))
"""


def test_one_answer_whatever_the_instruction_set(run_python: Callable[..., str]) -> None:
    info = json.loads(tvm_ffi.get_global_func("tvm_ipc.native_info")())
    answers = set()
    for name in info["instruction_sets"]:
        used, *digests = run_python(SAME_CASES, TVM_IPC_ISA=name, TVM_USE_RUNTIME_LIB="1").split()
        assert used == name
        answers.add(tuple(digests))
    assert len(answers) == 1


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float32"])
@pytest.mark.parametrize("ranks", RANKS)
def test_gathers_and_scatters(ranks: int, dtype: str, opened: OpenSession) -> None:
    run(opened(ranks), "moves", dtype)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float32"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_gathers_and_scatters_with_roots(ranks: int, dtype: str, opened: OpenSession) -> None:
    run(opened(ranks), "rooted_moves", dtype)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_permute(ranks: int, dtype: str, opened: OpenSession) -> None:
    run(opened(ranks), "permutes", dtype)


@pytest.mark.parametrize("dtype", MOVED)
def test_every_type_moves(dtype: str, opened: OpenSession) -> None:
    run(opened(2), "moves", dtype)
    run(opened(2), "messages", dtype)


@pytest.mark.parametrize("ranks", RANKS)
def test_messages(ranks: int, opened: OpenSession) -> None:
    run(opened(ranks), "messages", "float32")
    run(opened(ranks), "messages", "int8")


@pytest.mark.parametrize(("ranks", "groups"), [(4, 2), (6, 3), (6, 2), (4, 4)])
def test_groups(ranks: int, groups: int, opened: OpenSession) -> None:
    session = opened(ranks, groups)
    for seed in range(3):
        # One after the other without waiting: ranks are in different teams at the same time.
        start(session, groups, True, "small_ones")
        start(session, groups, False, "small_ones")
        start(session, groups, True, "storm", seed, 30)
        start(session, groups, False, "storm", seed, 30)
    session.sync()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_many_in_a_row_over_the_same_memory(ranks: int, opened: OpenSession) -> None:
    for seed in range(5):
        start(opened(ranks), 1, True, "storm", seed, 60)
    opened(ranks).sync()


@pytest.mark.slow
def test_64_ranks() -> None:
    with tvm_ipc.Session(64, threads=True, timeout=100) as session:
        session.import_python_module("tests.runtime.collective_worker")
        run(session, "small_ones")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_between_processes(ranks: int, opened: OpenSession) -> None:
    session = opened(ranks, threads=False)
    for plan in (
        ("allreduces_by_type", "bfloat16"),
        ("allreduces_by_type", "float32"),
        ("moves", "float32"),
        ("messages", "float32"),
        ("storm", 1, 100),
    ):
        start(session, 1, True, *plan)
    session.sync()


def test_what_is_larger_than_the_caches(opened: OpenSession) -> None:
    run(opened(2), "beyond_the_caches")


# ---- what is refused ------------------------------------------------------------------------


def refused(session: tvm_ipc.Session, kind: str, message: str, *ranks: int) -> None:
    """Expect an error of that kind on these ranks, and a session that works afterwards.

    Where every rank would fail, the first one may stop the others before they get that far.
    """
    assert disco_kinds.refused(session, kind, message) <= set(ranks)
    assert session.usable
    run(session, "one_of_each")


@pytest.fixture
def trio(opened: OpenSession) -> Iterator[tvm_ipc.Session]:
    yield opened(3)
    run(opened(3), "small_ones")


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("kind", list(ReduceKind))
def test_reduction_of_8_bit_floats(kind: ReduceKind, dtype: str, trio: tvm_ipc.Session) -> None:
    x = trio.empty((4,), dtype)
    trio.allreduce(x, x, op=kind.name.lower())
    name = f"{kind.name.lower()} of {dtype} is not supported; cast to a type that is"
    refused(trio, "TypeError", name, 0, 1, 2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool"])
@pytest.mark.parametrize("op", ["band", "bor", "bxor"])
def test_bitwise_reductions_take_integers(op: str, dtype: str, trio: tvm_ipc.Session) -> None:
    x = trio.empty((4,), dtype)
    trio.allreduce(x, x, op=op)
    wanted = f"{op} of {dtype} is not supported; cast to a type that is, such as int32"
    refused(trio, "TypeError", wanted, 0, 1, 2)


def test_average_of_truth_values(trio: tvm_ipc.Session) -> None:
    x = trio.empty((4,), "bool")
    trio.allreduce(x, x, op="avg")
    refused(trio, "TypeError", "avg of bool is not supported", 0, 1, 2)


@pytest.mark.parametrize(
    ("kind", "strategy", "flags", "message"),
    [
        (
            *(9, 0, 0),
            "there is no reduction 9; 0 to 8 are sum, prod, min, max, avg, band, bor, bxor, "
            "tree_sum",
        ),
        (-1, 0, 0, "there is no reduction -1"),
        (0, 4, 0, "there is no strategy 4; 0 to 3 are ring, one-shot, two-shot, auto"),
        (0, -1, 0, "there is no strategy -1"),
        (0, 0, 2, "unknown flags 2"),
    ],
)
def test_numbers_without_a_meaning(
    kind: int, strategy: int, flags: int, message: str, trio: tvm_ipc.Session
) -> None:
    x = trio.empty((4,), "float32")
    trio.get_global_func("tvm_ipc.allreduce")(x, kind, True, strategy, flags, x)
    refused(trio, "ValueError", message, 0, 1, 2)


def test_allreduce_of_tensors_that_differ(trio: tvm_ipc.Session) -> None:
    send = trio.empty((2, 3), "float32")
    trio.allreduce(send, trio.empty((7,), "float32"))
    message = "send has 6 x float32, recv has 7 x float32; they must be equal"
    refused(trio, "ValueError", message, 0, 1, 2)
    trio.allreduce(send, trio.empty((2, 3), "int32"))
    refused(trio, "ValueError", "recv has 6 x int32", 0, 1, 2)
    # The number of elements decides, not the shape.
    trio.allreduce(send, trio.empty((6,), "float32"))
    trio.sync()


def view(session: tvm_ipc.Session, whole: Any, start: int, count: int) -> Any:
    """Some of the elements of a float32 tensor."""
    return session.get_global_func("tests.view")(whole, start, count)


def test_tensors_that_overlap_in_part(trio: tvm_ipc.Session) -> None:
    whole = trio.empty((16,), "float32")
    trio.allreduce(view(trio, whole, 0, 8), view(trio, whole, 1, 8))
    refused(trio, "ValueError", "send and recv overlap in part", 0, 1, 2)
    trio.all_to_all(whole, whole)
    refused(trio, "ValueError", "all_to_all: 16 elements cannot be divided", 0, 1, 2)
    trio.all_to_all(view(trio, whole, 0, 6), view(trio, whole, 0, 6))
    refused(trio, "ValueError", "all_to_all: send and recv overlap", 0, 1, 2)
    permute = trio.get_global_func("tvm_ipc.permute")
    permute(whole, tvm_ffi.Shape([1, 2, 0]), 0, 0, whole)
    refused(trio, "ValueError", "permute: send and recv overlap", 0, 1, 2)
    # Rank 1's part of the input is the second one.
    trio.reduce_scatter(view(trio, whole, 0, 12), view(trio, whole, 4, 4))
    refused(trio, "ValueError", "reduce_scatter: send and recv overlap", 0, 2)
    # Rank 1's place in the output is the second one.
    trio.allgather(view(trio, whole, 4, 4), view(trio, whole, 0, 12))
    refused(trio, "ValueError", "allgather: send and recv overlap", 0, 2)
    trio.broadcast_from_worker0(view(trio, whole, 0, 8), view(trio, whole, 4, 8))
    refused(trio, "ValueError", "broadcast: send and recv overlap", 0)
    trio.scatter_from_worker0(view(trio, whole, 0, 12), view(trio, whole, 4, 4))
    refused(trio, "ValueError", "scatter: send and recv overlap", 0)
    trio.gather_to_worker0(view(trio, whole, 4, 4), view(trio, whole, 0, 12))
    refused(trio, "ValueError", "gather: send and recv overlap", 0)


def test_counts_that_do_not_fit(trio: tvm_ipc.Session) -> None:
    def x(count: int, dtype: str = "float32") -> Any:
        return trio.empty((count,), dtype)

    trio.allgather(x(2), x(7))
    message = "allgather: recv has 7 elements, needed are 3 x 2"
    refused(trio, "ValueError", message, 0, 1, 2)
    trio.reduce_scatter(x(5), x(2))
    message = "reduce_scatter: send has 5 x float32, recv has 2 x float32; send must have 3 times"
    refused(trio, "ValueError", message, 0, 1, 2)
    trio.reduce_scatter(x(6), x(2, "int32"))
    refused(trio, "ValueError", "send has 6 x float32, recv has 2 x int32", 0, 1, 2)
    trio.reduce(x(6), x(3), root=2)
    refused(trio, "ValueError", "reduce: send has 6 x float32, recv has 3 x float32", 2)
    trio.get_global_func("tvm_ipc.reduce")(x(3), 0, 3, 0, 0, x(3))
    refused(trio, "ValueError", "reduce: there is no root 3 in a team of 3", 0, 1, 2)
    trio.get_global_func("tvm_ipc.reduce")(x(3), 0, 1, 0, 0, None)
    refused(trio, "ValueError", "reduce: the root has nowhere to receive", 1)
    trio.all_to_all(x(6), x(3))
    message = "all_to_all: send has 6 x float32, recv has 3 x float32; they must be equal"
    refused(trio, "ValueError", message, 0, 1, 2)
    trio.all_to_all(x(7), x(7))
    message = "all_to_all: 7 elements cannot be divided evenly among 3 workers"
    refused(trio, "ValueError", message, 0, 1, 2)
    trio.all_to_all(x(3), x(3), parts=[[1, 1], [1, 1]])
    message = "all_to_all: there are 4 parts; 3 workers have 9, one for each to each"
    refused(trio, "ValueError", message, 0, 1, 2)
    trio.all_to_all(x(3), x(3), parts=[[1, 1, 1], [1, 2, 1], [1, 1, 1]])
    message = "send has 3 elements and recv 3; by the parts worker 1 gives 4 and takes 4"
    refused(trio, "ValueError", message, 1)
    most = (1 << 63) - 1  # sums of which would wrap
    trio.all_to_all(x(3), x(3), parts=[[most, most, 5], [1, 1, 1], [1, 1, 1]])
    message = f"the part of worker 0 for worker 0 has {most} elements"
    refused(trio, "ValueError", message, 0, 1, 2)
    function = trio.get_global_func("tvm_ipc.all_to_all")
    function(x(3), tvm_ffi.Shape([1, 1, 1, 1, 1, 1, 1, 3, -1]), 0, 0, x(3))
    message = "all_to_all: the part of worker 2 for worker 2 has -1 elements"
    refused(trio, "ValueError", message, 0, 1, 2)
    trio.broadcast_from_worker0(x(2), x(3))
    refused(trio, "ValueError", "broadcast: send has 2 elements, recv has 3", 0)
    trio.scatter_from_worker0(x(7), x(2))
    message = "scatter: 7 elements cannot be divided evenly among 3 workers"
    refused(trio, "ValueError", message, 0)
    trio.scatter_from_worker0(x(9), x(2))
    refused(trio, "ValueError", "scatter: a part of send has 3 elements, recv has 2", 0)
    trio.gather_to_worker0(x(2), x(7))
    refused(trio, "ValueError", "gather: recv has 7 elements, needed are 3 x 2", 0)
    for collective, send, recv, ranks in (
        ("allgather", 2, 6, (0, 1, 2)),
        ("broadcast_from_worker0", 2, 2, (0,)),
        ("scatter_from_worker0", 6, 2, (0,)),
        ("gather_to_worker0", 2, 6, (0,)),
    ):
        getattr(trio, collective)(x(send), x(recv, "int32"))
        name = collective.partition("_")[0]
        refused(trio, "ValueError", f"{name}: send is float32, recv is int32", *ranks)


def test_nothing_where_something_is_needed(trio: tvm_ipc.Session) -> None:
    x = trio.empty((3,), "float32")
    for collective, arguments in (
        ("broadcast_from_worker0", (None, False, x)),
        ("scatter_from_worker0", (None, False, x)),
        ("gather_to_worker0", (x, False, None)),
    ):
        trio.get_global_func(PREFIX + collective)(*arguments)
        refused(trio, "ValueError", "the root has no", 0)


def test_messages_to_nobody(opened: OpenSession) -> None:
    session = opened(4, 2)
    x = session.empty((3,), "float32")
    call_on = session.get_global_func("tests.call_on")
    for rank, name, peer, message in (
        (1, "send_to_worker", (1,), "rank 1 is the caller itself"),
        (1, "send_to_worker", (4,), "there is no rank 4 among 4 workers"),
        (2, "recv_from_worker", (-1,), "there is no rank -1 among 4 workers"),
        (2, "recv_from_worker", (2,), "rank 2 is the caller itself"),
        (0, "recv_from_worker0", (), "rank 0 is the caller itself"),
        (3, "send_to_next_group", (), "rank 3 is in the last group"),
        (1, "recv_from_prev_group", (), "rank 1 is in the first group"),
    ):
        call_on(rank, PREFIX + name, x, *peer)
        with pytest.raises(WorkerError) as error:
            session.sync()
        assert [(e.rank, e.kind) for e in error.value.errors] == [(rank, "ValueError")]
        assert message in error.value.errors[0].message


def test_tensors_with_gaps(trio: tvm_ipc.Session) -> None:
    gaps = trio.get_global_func("tests.every_second_column")(4, 2)
    x = trio.empty((4, 2), "float32")
    trio.allreduce(gaps, x)
    message = "allreduce: send is not contiguous; make a contiguous copy first"
    refused(trio, "ValueError", message, 0, 1, 2)
    trio.allgather(x, gaps)
    refused(trio, "ValueError", "allgather: recv is not contiguous", 0, 1, 2)
