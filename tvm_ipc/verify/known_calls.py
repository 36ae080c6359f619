# SPDX-License-Identifier: Apache-2.0
"""Read calls of functions in `packed_functions`, and list what TVM's own functions do to memory.

A function that is in neither of them may do anything.
"""

from __future__ import annotations

from typing import Any, Final

import tvm
from tvm import relax, tirx

from tvm_ipc.analysis.ffi_arrays import as_list
from tvm_ipc.packed_functions import (
    AllReduceStrategy,
    AnyTeam,
    CollectiveFlag,
    Function,
    Sync,
    Team,
)
from tvm_ipc.verify.relax_as_plain_statements import Argument

#: The strategies whose kernels end with a barrier in upstream's implementation.
_UPSTREAM_EXIT_BARRIERS = {
    strategy for strategy in AllReduceStrategy if strategy.ends_with_barrier_upstream
}
_TEAM_TYPES = ("Team", "InGroup")


class KnownCall:
    """A call of a function in `packed_functions`, whose arguments are found by parameter names."""

    def __init__(self, function: Function, arguments: list[Argument]) -> None:
        self.function = function
        self._arguments = arguments

    def fits(self) -> bool:
        """Return whether the function accepts this number of arguments."""
        return self.function.bind(len(self._arguments)) is not None

    def positions(self, *names: str) -> tuple[int, ...]:
        """Return the positions of the arguments of some parameters."""
        return self.function.positions(names, len(self._arguments))

    def argument(self, name: str) -> Argument:
        """Return the argument of a parameter that takes exactly one."""
        (position,) = self.positions(name)
        return self.at(position)

    def at(self, position: int) -> Argument:
        """Return the argument at a position."""
        return self._arguments[position]

    def _constant(self, *types: str) -> int | None:
        """Return the constant argument of the parameter with one of some types, else None."""
        name = self.function.parameter_of_type(*types)
        return None if name is None else constant(self.argument(name))

    def team(self) -> AnyTeam | None:
        """Return the team whose ranks exchange data, None where it is unknown."""
        name = self.function.parameter_of_type(*_TEAM_TYPES)
        if name is None:
            return Team.WORLD
        argument = self.argument(name)
        if type(argument) is relax.ShapeExpr:
            numbers = [constant(extent) for extent in as_list(argument.values)]
            known = tuple(number for number in numbers if number is not None)
            return known if known and len(known) == len(numbers) else None
        return constant(argument)

    def barrier_team(self) -> AnyTeam | None:
        """Return a team whose ranks have all entered when the call returns, else None."""
        if self.function.sync is not Sync.BARRIER:
            return None
        team = self.team()
        # It is the group or all workers, and the workers contain the group.
        return Team.GROUP if team is None and self.function.parameter_of_type("InGroup") else team

    def leaves_pending(self, assume_no_exit_barrier: bool) -> bool:
        """Return whether peers may still read operands after the call has returned."""
        if not self.function.peers_read:
            return False
        if self.function.parameter_of_type("CollectiveFlag") is not None:
            flags = self._constant("CollectiveFlag")
            if flags is None or flags & CollectiveFlag.NO_EXIT_BARRIER:
                return True
        has_strategy = self.function.parameter_of_type("AllReduceStrategy") is not None
        if not assume_no_exit_barrier or not has_strategy:
            return False
        return self._constant("AllReduceStrategy") not in _UPSTREAM_EXIT_BARRIERS


def constant(expr: Any) -> int | None:
    """Return the value of a constant integer argument, None for any other argument."""
    return int(expr.value) if type(expr) in _CONSTANTS else None


_CONSTANTS: Final = frozenset((tirx.IntImm, tvm.ir.GenericConst))

#: Packed functions whose result is, or may be, their first argument in another shape.
VIEWS = frozenset({"vm.builtin.reshape", "vm.builtin.copy", "vm.builtin.to_device"})

#: Packed functions that only read their arguments and return none of their memory.
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

#: Of `VIEWS` and `VIEW_OPERATORS`, those that read no elements: they only return a view.
SAME_MEMORY = frozenset(
    {
        "relax.reshape",
        "relax.memory.view",
        "relax.memory.ensure_zero_offset",
        "vm.builtin.reshape",
    }
)

#: Operators that may do anything to their arguments.
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
