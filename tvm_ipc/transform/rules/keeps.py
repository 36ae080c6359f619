# SPDX-License-Identifier: Apache-2.0
"""When results are partial in the way that operands are: what `Rule.keeps` is for most operators.

Each is given the placements of the operands along an axis of the mesh.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tvm_ipc.comm import Partial, Placement

#: Of a partial sum, as messages and tests print it.
_SUM: Final = Partial("sum")


def all_alike(here: Sequence[Placement]) -> bool:
    """Elements are moved as they are: all operands are partial in one way."""
    return len(set(here)) == 1


def all_sums(here: Sequence[Placement]) -> bool:
    """Linear in all operands together: all are partial sums."""
    return all(one == _SUM for one in here)


def one_sum(here: Sequence[Placement]) -> bool:
    """Linear in each operand: one is a partial sum, and the others are replicated."""
    return sorted(map(str, here)) == ["P[sum]", *["R"] * (len(here) - 1)]


def first_sum(here: Sequence[Placement]) -> bool:
    """Linear in the first operand alone."""
    return here[0] == _SUM and all(str(one) == "R" for one in here[1:])


def first_alike(here: Sequence[Placement]) -> bool:
    """Elements of the first operand are moved as the others say, which every rank has."""
    return isinstance(here[0], Partial) and all(str(one) == "R" for one in here[1:])
