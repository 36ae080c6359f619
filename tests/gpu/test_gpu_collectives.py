# SPDX-License-Identifier: Apache-2.0
"""All-reduces on GPUs: sizes that nothing divides, the bits of CPUs, streams and CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tvm_ffi

import tvm_ipc
from tests.gpu.gpu_sessions import HELPERS, open_session
from tvm_ipc.errors import WorkerError
from tvm_ipc.gpu.discovery import Gpu
from tvm_ipc.packed_functions import AllReduceStrategy, ReduceKind

pytestmark = pytest.mark.gpu
assert HELPERS.is_dir()
Opened = Callable[..., tvm_ipc.Session]
#: Elements; around what one thread, one block, and each way of doing it takes.
COUNTS = (0, 1, 7, 36, 2047, 4096, 65_537, 300_001)
PLACES = pytest.mark.parametrize("threads", [True, False], ids=["threads", "processes"])


def call(session: tvm_ipc.Session, name: str, *arguments: Any) -> Any:
    result = session.get_global_func(f"tests.gpu.{name}")(*arguments)
    session.sync()
    return result


def bits(session: tvm_ipc.Session, *arguments: Any) -> list[bytes]:
    """What comes out on each worker."""
    found = call(session, "digest_of_cases", *arguments)
    return [bytes(found.debug_get_from_remote(rank)) for rank in range(session.num_workers)]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64", "int8", "int64"])
@pytest.mark.parametrize("ranks", range(2, 9))
def test_bits_are_those_of_cpus(ranks: int, dtype: str, opened: Opened) -> None:
    counts = tvm_ffi.Shape(COUNTS)
    for kind in (kind for kind in ReduceKind if kind.takes(dtype)):
        auto = int(AllReduceStrategy.AUTO)
        (wanted,) = set(bits(opened(ranks, True, "cpu"), counts, dtype, int(kind), auto))
        assert set(bits(opened(ranks), counts, dtype, int(kind), auto)) == {wanted}


@PLACES
def test_strategies_have_the_same_bits(threads: bool, opened: Opened) -> None:
    counts = tvm_ffi.Shape(COUNTS)
    found = {
        digest
        for strategy in AllReduceStrategy
        for digest in bits(opened(2, threads), counts, "bfloat16", 0, int(strategy))
    }
    assert len(found) == 1


@pytest.mark.parametrize(
    ("ranks", "count", "dtype"),
    [
        (4, 2880 * 402, "bfloat16"),
        (8, 7168 * 149, "bfloat16"),
        (8, 5120 * 205, "bfloat16"),
        (8, 36, "float32"),
    ],
)
def test_tails(ranks: int, count: int, dtype: str, opened: Opened) -> None:
    """Sizes at which others lost the end."""
    for strategy in AllReduceStrategy:
        shape = tvm_ffi.Shape([count])
        assert len(set(bits(opened(ranks), shape, dtype, 0, int(strategy)))) == 1


@PLACES
@pytest.mark.parametrize("memory", ["private", "arena"])
@pytest.mark.parametrize("counts", [(5,), (5, 4097, 300_001)], ids=["one", "three"])
def test_graphs_are_replayed(
    counts: tuple[int, ...], memory: str, threads: bool, opened: Opened
) -> None:
    """Odd numbers of operations and of replays, with others between them."""
    auto = int(AllReduceStrategy.AUTO)
    call(opened(2, threads), "replays", tvm_ffi.Shape(counts), "float32", auto, memory, 7)


@PLACES
@pytest.mark.parametrize("strategy", [AllReduceStrategy.TWOSHOT, AllReduceStrategy.AUTO])
def test_a_graph_is_replayed_after_memory_has_grown(
    strategy: AllReduceStrategy, threads: bool, opened: Opened
) -> None:
    call(opened(2, threads), "replays_after_growth", 70_001, 300_001, "float32", int(strategy))


@pytest.mark.parametrize("strategy", AllReduceStrategy)
@pytest.mark.parametrize("ranks", [3, 5, 8])
def test_graphs_of_more_ranks(ranks: int, strategy: int, opened: Opened) -> None:
    counts = tvm_ffi.Shape([1000, 70_001])
    call(opened(ranks), "replays", counts, "bfloat16", int(strategy), "private", 3)


def test_graphs_of_ranks_that_share_a_gpu_want_queues(
    devices: tuple[Gpu, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a kernel may be queued behind one that waits for it."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    reason = "3 workers of this process share a GPU. They need 12 hardware queues, but CUDA has 8"
    first = devices[0].id
    three = open_session(3, device_ids=[first] * 3)
    with three, pytest.raises(WorkerError, match=reason):
        call(three, "replays", tvm_ffi.Shape([1000]), "float32", 0, "private", 3)
    with open_session(2, device_ids=[first] * 2) as session:
        call(session, "replays", tvm_ffi.Shape([1000]), "float32", 0, "private", 3)


@PLACES
@pytest.mark.parametrize("count", [100, 300_001])
def test_a_team_on_two_streams(count: int, threads: bool, opened: Opened) -> None:
    call(opened(2, threads), "takes_turns_on_streams", count, "float32", 5)


@PLACES
@pytest.mark.parametrize("count", [100, 300_001])
def test_a_graph_of_another_stream(count: int, threads: bool, opened: Opened) -> None:
    call(opened(2, threads), "captures_on_another_stream", count, 5)
