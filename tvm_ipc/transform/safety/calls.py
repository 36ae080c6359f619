# SPDX-License-Identifier: Apache-2.0
"""How calls of the contract's functions are read, and what TVM's own functions do to memory.

What is neither there nor here may do anything.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax, tirx

from tvm_ipc.contract import (
    AllReduceStrategy,
    AnyTeam,
    CollectiveFlag,
    Function,
    Meeting,
    Team,
)
from tvm_ipc.transform.safety.statements import Argument

_WAIT_UPSTREAM = {one for one in AllReduceStrategy if one.ends_with_barrier_upstream}


_TEAMS = ("Team", "InGroup")


class KnownCall:
    """A call of a function of the contract."""

    def __init__(self, function: Function, arguments: list[Argument]) -> None:
        self.function = function
        self._arguments = arguments

    def fits(self) -> bool:
        """Whether the function takes so many arguments."""
        return self.function.bind(len(self._arguments)) is not None

    def places(self, *names: str) -> tuple[int, ...]:
        """Return which arguments are those of some parameters."""
        return self.function.places(names, len(self._arguments))

    def argument(self, name: str) -> Argument:
        """Return the argument of a parameter that takes one."""
        (place,) = self.places(name)
        return self._arguments[place]

    def _constant(self, *types: str) -> int | None:
        """Return the number that the parameter with one of some types is given, if it is known."""
        name = self.function.named(*types)
        return None if name is None else constant(self.argument(name))

    def team(self) -> AnyTeam | None:
        """Return the team whose ranks exchange data, None where it is not known."""
        name = self.function.named(*_TEAMS)
        if name is None:
            return Team.WORLD
        given = self.argument(name)
        if isinstance(given, relax.ShapeExpr):
            numbers = [constant(one) for one in given.values]
            known = tuple(one for one in numbers if one is not None)
            return known if known and len(known) == len(numbers) else None
        return constant(given)

    def meets(self) -> AnyTeam | None:
        """Return a team of which every rank has entered when the call returns, if there is one."""
        if self.function.meets is not Meeting.ALL:
            return None
        team = self.team()
        # Either of two teams, the larger of which contains the other.
        return Team.GROUP if team is None and self.function.named("InGroup") else team

    def leaves_pending(self, assume_no_exit_barrier: bool) -> bool:
        """Whether peers may still read what they read when the call has returned."""
        if not self.function.peers_read:
            return False
        if self.function.named("CollectiveFlag") is not None:
            flags = self._constant("CollectiveFlag")
            if flags is None or flags & CollectiveFlag.NO_EXIT_BARRIER:
                return True
        if not assume_no_exit_barrier or self.function.named("AllReduceStrategy") is None:
            return False
        return self._constant("AllReduceStrategy") not in _WAIT_UPSTREAM


def constant(expr: Any) -> int | None:
    """Return an integer argument, None where it is not a constant."""
    return int(expr.value) if isinstance(expr, (tvm.ir.GenericConst, tirx.IntImm)) else None


#: Functions whose result is, or may be, their first argument in another shape.
VIEWS = frozenset({"vm.builtin.reshape", "vm.builtin.copy", "vm.builtin.to_device"})

#: Functions that only read, and give no memory that they were given.
READERS = frozenset(
    {
        "vm.builtin.match_shape",
        "vm.builtin.match_prim_value",
        "vm.builtin.check_tensor_info",
        "vm.builtin.check_shape_info",
        "vm.builtin.check_prim_value_info",
        "vm.builtin.check_tuple_info",
        "vm.builtin.check_func_info",
        "vm.builtin.shape_of",
        "vm.builtin.tensor_to_shape",
        "vm.builtin.make_shape",
        "vm.builtin.make_prim_value",
        "vm.builtin.alloc_shape_heap",
        "vm.builtin.read_if_cond",
        "vm.builtin.assert",
        "vm.builtin.print",
        "vm.builtin.null_value",
    }
)

#: Operators whose result is, or may be, their first argument.
VIEW_OPERATORS = frozenset(
    {
        "relax.reshape",
        "relax.memory.view",
        "relax.memory.ensure_zero_offset",
        "relax.builtin.stop_lift_params",
        "relax.to_vdevice",
        "relax.hint_on_device",
    }
)

#: Of both, those that look at no element: the result is the first argument, whatever follows.
SAME_MEMORY = frozenset(
    {
        "relax.reshape",
        "relax.memory.view",
        "relax.memory.ensure_zero_offset",
        "vm.builtin.reshape",
    }
)

#: Operators that may do anything to what they are given.
UNKNOWN_OPERATORS = frozenset(
    {
        "relax.invoke_closure",
        "relax.invoke_pure_closure",
        "relax.call_inplace_packed",
        "relax.call_py_func",
        "relax.run_backend",
        "relax.vm.invoke_closure",
    }
)
