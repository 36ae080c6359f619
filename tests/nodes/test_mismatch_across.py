# SPDX-License-Identifier: Apache-2.0
"""Ranks of several nodes that call different collectives: both calls are named, long before the
deadline, whichever they are."""

from __future__ import annotations

import itertools
import random
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
import tvm_ffi

import tvm_ipc
from tvm_ipc.errors import WorkerError
from tvm_ipc.nodes.find_mpi_installation import Mpi

#: Of the sessions, in seconds; a mismatch takes a small part of it.
DEADLINE = 60.0
SOON = 5.0
#: An error names two calls.
BOTH = re.compile(r"disagree.*: rank \d.* called .*; rank \d.* called ")


@pytest.fixture(scope="module", params=[(2, 2), (3, 3), (2, 3)], ids=str)
def session(mpi: Mpi, request: pytest.FixtureRequest) -> Iterator[tvm_ipc.Session]:
    nodes, workers = request.param
    with tvm_ipc.Session(workers, hosts=nodes, timeout=DEADLINE) as session:
        session.import_python_module("tests.runtime.worker_functions")
        yield session


def calls(session: tvm_ipc.Session) -> list[tuple[Any, ...]]:
    """Calls that all differ: each operation, with other roots, kinds, types and sizes."""
    size = session.num_workers

    def reduce(count: int = 6, dtype: str = "float32", kind: int = 0) -> tuple[Any, ...]:
        x = session.empty((count * size,), dtype)
        return ("tvm_ipc.allreduce", x, kind, 0, 1, 0, x)

    def rooted(name: str, root: int, count: int = 6) -> tuple[Any, ...]:
        part, whole = (session.empty((n,), "float32") for n in (count, count * size))
        first = {"broadcast": (part, part), "scatter": (whole, part), "gather": (part, whole)}
        return (f"tvm_ipc.{name}", first[name][0], root, 0, 0, first[name][1])

    def permute(*sources: int) -> tuple[Any, ...]:
        x, y = (session.empty((6,), "float32") for _ in range(2))
        return ("tvm_ipc.permute", x, tvm_ffi.Shape(sources), 0, 0, y)

    part, whole = (session.empty((n,), "float32") for n in (6, 6 * size))
    other = session.empty((6 * size,), "float32")
    last = size - 1
    return [
        reduce(),
        reduce(count=7),
        reduce(count=100_000),
        reduce(dtype="int32"),
        reduce(kind=3),
        ("tvm_ipc.allgather", part, 0, 0, whole),
        ("tvm_ipc.reduce_scatter", whole, 0, 0, 0, part),
        ("tvm_ipc.all_to_all", whole, tvm_ffi.Shape([]), 0, 0, other),
        permute(*range(1, size), 0),
        permute(*range(size)),
        *(rooted(name, root) for name in ("broadcast", "scatter", "gather") for root in (0, last)),
        *(rooted(name, 0, 50_000) for name in ("broadcast", "scatter", "gather")),
    ]


def expect_mismatch(
    session: tvm_ipc.Session, rank: int, one: tuple[Any, ...], other: tuple[Any, ...]
) -> None:
    elsewhere = session.get_global_func("tests.call_elsewhere")
    begin = time.monotonic()
    elsewhere(rank, one[0], other[0], len(one) - 1, *one[1:], *other[1:])
    with pytest.raises(WorkerError) as error:
        session.sync()
    seconds = time.monotonic() - begin
    told = f"rank {rank} calls {one[0]}, others {other[0]}: {error.value}"
    assert {found.kind for found in error.value.errors} == {"MismatchError"}, told
    assert all(BOTH.search(found.message) for found in error.value.errors), told
    names = {one[0].rpartition(".")[2], other[0].rpartition(".")[2]}
    assert all(name in error.value.errors[0].message for name in names), told
    assert seconds < SOON, f"{seconds:.1f} s: {told}"


def test_each_call_against_each_other_one(session: tvm_ipc.Session) -> None:
    draw = random.Random(3)
    for one, other in itertools.permutations(calls(session), 2):
        expect_mismatch(session, draw.randrange(session.num_workers), one, other)
    x = session.empty((4,), "float32")
    session.allreduce(x, x)
    session.sync()
