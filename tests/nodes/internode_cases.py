# SPDX-License-Identifier: Apache-2.0
"""Collectives to try between workers of several nodes, for `tests.run_collectives`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from tests.runtime.collective_cases import (
    APART,
    EXCHANGES,
    GATHERS,
    MEMORIES,
    MOVED,
    REDUCED,
    REDUCTIONS,
    Case,
    reductions,
    storm,
)
from tvm_ipc.packed_functions import REDUCED_TYPES, AllReduceStrategy, ReduceKind

#: None, one, less than a line, and several pieces that nothing divides.
COUNTS = (0, 1, 33, 5003, 70001)


def members(ranks: int, nodes: int) -> tuple[int, ...]:
    """The node of each rank."""
    each, more = divmod(ranks, nodes)
    return tuple(node for node in range(nodes) for _ in range(each + (node < more)))


def reductions_across(ranks: int, nodes: int, dtype: str) -> Iterator[Case]:
    """Every reduction, and every size and operation; the rest takes turns."""
    on = members(ranks, nodes)
    turn, kinds = itertools.count(len(dtype)), reductions(dtype)
    for count, operation in itertools.product((*COUNTS, 300_007), REDUCTIONS):
        i = next(turn)
        kind, flags, memory = kinds[i % len(kinds)], i // 2 % 2, MEMORIES[i % 3]
        way, offset = i % 4 if operation == "allreduce" else 0, (0, 1, 5)[i % 3]
        in_place = i % 2 == 0 and operation not in APART
        yield Case(operation, count, dtype, kind, way, flags, memory, in_place, offset, nodes=on)
    for kind in kinds:
        yield Case("allreduce", 1000, dtype, kind, nodes=on)


def moves_across(ranks: int, dtype: str, counts: tuple[int, ...] = COUNTS) -> Iterator[Case]:
    """Every size and operation; the rest takes turns."""
    turn = itertools.count(len(dtype))
    for operation, count in itertools.product((*GATHERS, *EXCHANGES, "ring", "exchange"), counts):
        if operation == "exchange" and count > 100:
            continue  # both send first, what has to be small
        i = next(turn)
        rooted = operation in GATHERS and i % 2 == 0
        flags = i // 2 % 2 if rooted or operation in EXCHANGES else 0
        in_place = i % 3 == 0 and operation in GATHERS
        memory, offset = MEMORIES[i % 3], (0, 1, 5)[i % 3]
        yield Case(operation, count, dtype, 0, 0, flags, memory, in_place, offset, rooted)


def storm_across(ranks: int, nodes: int, seed: int, count: int) -> Iterator[Case]:
    """Many in a row in no order, each over memory that the one before it used."""
    for case in storm(ranks, seed, count):
        yield replace(case, nodes=members(ranks, nodes))


def all_across(ranks: int, nodes: int) -> Iterator[Case]:
    """All of it, of every type."""
    for dtype in REDUCED:
        yield from reductions_across(ranks, nodes, dtype)
    for dtype in MOVED:
        # Bytes, whatever they mean: of four widths in every size.
        whole = dtype in ("float8_e4m3fn", "bfloat16", "float32", "float64")
        yield from moves_across(ranks, dtype, COUNTS if whole else (33,))
    yield from storm_across(ranks, nodes, 1, 30)


def some_across(ranks: int, nodes: int) -> Iterator[Case]:
    """A bit of everything."""
    on = members(ranks, nodes)
    for i, operation in enumerate((*REDUCTIONS, *EXCHANGES, *GATHERS, "ring")):
        for count in (300, 20_003):
            memory = MEMORIES[(i + count) % 3]
            yield Case(operation, count, "bfloat16", memory=memory, nodes=on)
    yield Case("allreduce", 300_007, strategy=AllReduceStrategy.AUTO, nodes=on)


def pairs_anywhere(ranks: int) -> Iterator[Case]:
    """A bit of everything in teams of two, for which it makes no difference where they are."""
    for case in some_across(ranks, 1):
        if case.operation != "ring":
            yield replace(case, rounds=2)


# ---- in any team, with the node of each member ----------------------------------------------

#: What all members get alike.
ALIKE = ("allreduce", "allgather", "broadcast")
#: Of which only neighbours' ranks are known.
BY_RANK = ("ring", "exchange")


def _of_type(ranks: int, on: tuple[int, ...], dtype: str) -> Iterator[Case]:
    if dtype in REDUCED_TYPES:
        yield from reductions_across(ranks, 1, dtype)
    yield from moves_across(ranks, dtype)
    for case in storm(ranks, len(on), 30):
        if case.operation not in REDUCTIONS or ReduceKind(case.kind).takes(dtype):
            yield replace(case, dtype=dtype)


def alike(ranks: int, on: tuple[int, ...], dtype: str) -> Iterator[Case]:
    """Every size of one type, and every reduction, of what all members get alike."""
    for case in _of_type(ranks, on, dtype):
        if case.operation in ALIKE:
            yield replace(case, nodes=on)


def unlike(ranks: int, on: tuple[int, ...], dtype: str) -> Iterator[Case]:
    """Likewise, of all other operations."""
    for case in _of_type(ranks, on, dtype):
        if case.operation not in ALIKE:
            yield replace(case, nodes=on)


def in_some_types(ranks: int, on: tuple[int, ...]) -> Iterator[Case]:
    """All operations, between members of any ranks."""
    for dtype in ("bfloat16", "float64", "int8"):
        for case in _of_type(ranks, on, dtype):
            if case.operation not in BY_RANK:
                yield replace(case, nodes=on)


def posted(ranks: int, on: tuple[int, ...]) -> Iterator[Case]:
    """A bit of everything that may be posted."""
    for case in some_across(ranks, 1):
        if case.operation != "ring":
            yield replace(case, nodes=on, rooted=case.operation in GATHERS, rounds=3)
