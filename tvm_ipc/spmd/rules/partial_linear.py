# SPDX-License-Identifier: Apache-2.0
"""Common values of `Rule.partial_linear`: when a result is partial in the same way as operands.

Each function gets the placements of the operands along one axis of the mesh.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tvm_ipc.comm import Partial, Placement

_SUM: Final = Partial("sum")


def all_partial_alike(placements: Sequence[Placement]) -> bool:
    """Return whether all operands are partial in one way, for operators that only move elements."""
    return len(set(placements)) == 1


def all_partial_sums(placements: Sequence[Placement]) -> bool:
    """Return whether all are partial sums, for operators linear in all operands jointly."""
    return all(placement == _SUM for placement in placements)


def one_partial_sum(placements: Sequence[Placement]) -> bool:
    """Return whether one is a partial sum and the rest is replicated, for multilinear operators."""
    return sorted(map(str, placements)) == ["P[sum]", *["R"] * (len(placements) - 1)]


def first_partial_alike(placements: Sequence[Placement]) -> bool:
    """Return whether the first is partial and the rest, such as indices, is replicated."""
    return isinstance(placements[0], Partial) and all(
        str(placement) == "R" for placement in placements[1:]
    )
