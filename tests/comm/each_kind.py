# SPDX-License-Identifier: Apache-2.0
"""A collective of each kind: what its parameters are given follows from their names."""

from __future__ import annotations

import inspect
from typing import Any

from tvm import relax

from tvm_ipc import comm

PAIRS = [[0, 1], [2, 3]]
_GIVEN = {
    "reduction": "max",
    "root": 1,
    "concat_axis": 0,
    "pairs": [[0, 1]],
    "source": 0,
    "target": 1,
    "workers": 2,
}


def collective_of(name: str, x: relax.Expr, axis: int = 1, team: Any = PAIRS) -> relax.Call:
    """Return a collective among teams of two ranks, along an axis where the kind has one."""
    function = getattr(comm, name)
    given = {**_GIVEN, "axis": axis, "split_axis": axis, "team": team}
    parameters = inspect.signature(function).parameters
    return function(x, **{key: given[key] for key in parameters if key in given})
