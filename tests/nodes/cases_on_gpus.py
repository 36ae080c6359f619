# SPDX-License-Identifier: Apache-2.0
"""Collectives to try between GPUs of several nodes, for `tests.run_collectives`.

NCCL adds in an order of its own, so what is tried has one right answer in any: integers, minima and
maxima, and sums of two floats.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from tests.runtime.collective_cases import APART, EXCHANGES, GATHERS, MEMORIES, REDUCTIONS, Case
from tvm_ipc.packed_functions import ReduceKind

_INTEGERS = ("int8", "uint8", "int32", "int64", "uint64", "bool")
_FLOATS = ("float16", "bfloat16", "float32", "float64")
#: Inputs of more elements have some that are not a number, of which NCCL promises nothing.
_FEW = 31


def kinds(ranks: int, dtype: str) -> tuple[ReduceKind, ...]:
    """Reductions of a type that give the same in any order."""
    if dtype in _INTEGERS:
        return (ReduceKind.SUM, ReduceKind.PROD, ReduceKind.MIN, ReduceKind.MAX)
    done = (kind for kind in ReduceKind if kind != ReduceKind.TREE_SUM)  # which NCCL refuses
    ordered = tuple(kind for kind in done if kind.takes(dtype))
    return ordered if ranks == 2 else (ReduceKind.MIN, ReduceKind.MAX)


def all_on_gpus(ranks: int) -> Iterator[Case]:
    """Every collective of every type, and a few sizes."""
    turn = itertools.count()

    def case(operation: str, count: int, dtype: str, kind: int = 0) -> Case:
        i = next(turn)
        memory, offset = MEMORIES[i % 3], (0, 1, 5)[i % 3]
        rooted = operation in GATHERS and i % 2 == 0
        in_place = i % 3 == 0 and operation not in APART
        return Case(operation, count, dtype, kind, 0, 0, memory, in_place, offset, rooted)

    for dtype in (*_INTEGERS, *_FLOATS):
        for kind, operation in itertools.product(kinds(ranks, dtype), REDUCTIONS):
            yield case(operation, _FEW // ranks, dtype, kind)
    for operation, count in itertools.product(REDUCTIONS, (0, 1, 5003, 70001)):
        yield case(operation, count, "int32")
    for operation in (*GATHERS, *EXCHANGES, "ring"):
        for count, dtype in ((0, "float32"), (33, "float8_e4m3fn"), (70001, "bfloat16")):
            yield case(operation, count, dtype)


def few_on_gpus(ranks: int) -> Iterator[Case]:
    """A bit of everything, for teams."""
    for turn, operation in enumerate((*REDUCTIONS, *GATHERS, *EXCHANGES)):
        yield Case(operation, 33 + turn, "int32", memory=MEMORIES[turn % 3])
