# SPDX-License-Identifier: Apache-2.0
"""What a function is told of the module around it."""

from __future__ import annotations

from typing import Any, Protocol

from tvm_ipc.transform.safety.extents import Extents
from tvm_ipc.transform.safety.hazards import Alone, Hazard
from tvm_ipc.transform.safety.state import Summary
from tvm_ipc.transform.safety.statements import Statements


class Module(Protocol):
    """What is known of the module around a function."""

    assume_no_exit_barrier: bool
    extents: Extents
    hazards: dict[tuple[Any, ...], Hazard]
    alone: dict[tuple[str, int], Alone]

    def function(self, name: str) -> Any:
        """Return a function of the module, or None."""

    def written(self, name: str) -> frozenset[int] | None:
        """Return which parameters a PrimFunc writes, None for what is none."""

    def steps(self, name: str) -> Statements:
        """Return a function of the module as plain objects."""

    def called_once(self, name: str) -> Statements | None:
        """Return what a function does that only the call at hand calls, None for any other."""

    def summary(self, name: str) -> Summary | None:
        """Return what a Relax function does, None for one that is being looked at: recursion."""
