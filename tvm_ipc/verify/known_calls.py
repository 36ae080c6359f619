# SPDX-License-Identifier: Apache-2.0
"""Read calls of functions in `packed_functions`, and list what TVM's own functions do to memory.

A function that is in neither of them may do anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from tvm import relax, tirx

from tvm_ipc.analysis.ffi_arrays import as_list
from tvm_ipc.packed_functions import (
    AllReduceStrategy,
    AnyTeam,
    CollectiveFlag,
    Function,
    Parameter,
    Sync,
    Team,
    find,
)
from tvm_ipc.tvm_moved_names import GenericConst, StringImm
from tvm_ipc.verify.relax_as_plain_statements import Argument

#: The strategies whose kernels end with a barrier in upstream's implementation.
_UPSTREAM_EXIT_BARRIERS = {
    strategy for strategy in AllReduceStrategy if strategy.ends_with_barrier_upstream
}
_TEAM_TYPES = ("Team", "InGroup")


class KnownCall:
    """A call of a function in `packed_functions`, whose arguments are found by parameter names.

    `values` are those of the arguments, in the domain of the walk.
    """

    def __init__(self, function: Function, arguments: list[Argument], values: list[Any]) -> None:
        self.function = function
        self.arguments = arguments
        self.values = values

    @property
    def bound(self) -> Iterator[tuple[Parameter, Any]]:
        """The parameter and the value of each argument."""
        return zip(self.function.bind(len(self.values)) or (), self.values, strict=True)

    def positions(self, *names: str) -> tuple[int, ...]:
        """Return the positions of the arguments of some parameters."""
        return self.function.positions(names, len(self.arguments))

    def argument(self, name: str) -> Argument:
        """Return the argument of a parameter that takes exactly one."""
        (position,) = self.positions(name)
        return self.arguments[position]

    def operands(self, *names: str) -> tuple[Any, ...]:
        """Return the values of the arguments of some parameters."""
        return tuple([self.values[position] for position in self.positions(*names)])

    def value(self, name: str) -> Any:
        """Return the value of the argument of a parameter that takes exactly one."""
        (value,) = self.operands(name)
        return value

    def _constant(self, *types: str) -> int | None:
        """Return the constant argument of the parameter with one of some types, else None."""
        name = self.function.parameter_of_type(*types)
        return None if name is None else constant(self.argument(name))

    def team(self) -> AnyTeam | None:
        """Return the team whose ranks exchange data, None where it is unknown."""
        name = self.function.parameter_of_type(*_TEAM_TYPES)
        if name is None:
            return Team(self.function.defaults.get("team", Team.WORLD))
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


def known_call(name: str, arguments: list[Argument], values: list[Any]) -> KnownCall | None:
    """Return a call of a packed function, None if its effects or its parameters are unknown."""
    function = find(name)
    if function is None or function.bind(len(arguments)) is None:
        return None
    return KnownCall(function, arguments, values)


def constant(expr: Any) -> int | None:
    """Return the value of a constant integer argument, None for any other argument."""
    return int(expr.value) if type(expr) in _CONSTANTS else None


def text_of(expr: Any) -> str | None:
    """Return the value of a string constant, None for any other expression."""
    return str(expr.value) if isinstance(expr, StringImm) else None


_CONSTANTS: Final = frozenset((tirx.IntImm, GenericConst))

#: Operators that allocate a storage or a tensor.
ALLOCATIONS = frozenset(
    (
        *("relax.memory.alloc_storage", "relax.memory.alloc_tensor"),
        *("relax.vm.alloc_storage", "relax.vm.alloc_tensor", "relax.builtin.alloc_tensor"),
    )
)

#: Packed functions whose result is, or may be, their first argument in another shape.
VIEWS = frozenset(("vm.builtin.reshape", "vm.builtin.copy", "vm.builtin.to_device"))

#: Packed functions that only read their arguments and return none of their memory.
READERS = frozenset(
    f"vm.builtin.{name}"
    for name in (
        *("match_shape", "match_prim_value", "check_tensor_info", "check_shape_info"),
        *("check_prim_value_info", "check_tuple_info", "check_func_info", "shape_of"),
        *("tensor_to_shape", "make_shape", "make_prim_value", "alloc_shape_heap"),
        *("read_if_cond", "null_value"),
    )
)

#: Operators whose result is, or may be, their first argument.
VIEW_OPERATORS = frozenset(
    (
        *("relax.reshape", "relax.memory.view", "relax.memory.ensure_zero_offset"),
        *("relax.builtin.stop_lift_params", "relax.to_vdevice", "relax.hint_on_device"),
    )
)

#: Of `VIEWS` and `VIEW_OPERATORS`, those that read no elements: they only return a view.
SAME_MEMORY = frozenset(
    (
        *("relax.reshape", "relax.memory.view", "relax.memory.ensure_zero_offset"),
        "vm.builtin.reshape",
    )
)

#: Operators that may do anything to their arguments.
UNKNOWN_OPERATORS = frozenset(
    (
        *("relax.invoke_closure", "relax.invoke_pure_closure", "relax.call_inplace_packed"),
        "relax.call_py_func",
    )
)
