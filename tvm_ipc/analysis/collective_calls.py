# SPDX-License-Identifier: Apache-2.0
"""Read and create calls of collectives in destination-passing style.

`LegalizeOps` and `CallTIRRewrite` lower `R.ccl.*` to such calls. The signatures in
`packed_functions` describe what they do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Final

from tvm import relax, tirx

from tvm_ipc.analysis.binding_builders import NOTHING, replace_call
from tvm_ipc.analysis.ffi_arrays import as_list
from tvm_ipc.packed_functions import (
    PROGRAMS,
    AllReduceStrategy,
    AnyTeam,
    CollectiveFlag,
    Function,
    ReduceKind,
    Sync,
    Team,
    find,
)
from tvm_ipc.packed_functions.collective_kind import DISCO
from tvm_ipc.packed_functions.program_function_declarations import RUN_BY, START
from tvm_ipc.tvm_moved_names import GenericConst, StringImm


@dataclass(eq=False)
class Collective:
    """A call of a collective whose team and options are constants."""

    function: Function
    call: relax.Call
    arguments: list[relax.Expr]  #: of the call; cached because access to the IR is slow
    #: Constant arguments and defaults, by the names of parameters, also those of `general_form`.
    numbers: Mapping[str, int]
    division: tuple[int, ...] = ()  #: the teams as a list of ranks, () if the team is an id

    @cached_property
    def team(self) -> AnyTeam:
        """Return the team whose ranks exchange data."""
        return self.division or self._number("Team", "InGroup") or Team.WORLD

    @property
    def is_barrier(self) -> bool:
        """Return whether no rank returns before all ranks of the team have entered."""
        return self.function.sync is Sync.BARRIER

    @property
    def kind(self) -> ReduceKind | None:
        """Return the kind of reduction, None if the collective does not reduce."""
        kind = self._number("ReduceKind", "ReduceKindInShape")
        return None if kind is None else _reduce_kind(kind)

    @property
    def flags(self) -> CollectiveFlag | None:
        """Return the flags that the compiler sets, None if the function takes none."""
        flags = self._number("CollectiveFlag")
        return None if flags is None else _flag(flags)

    @property
    def general_form(self) -> Function:
        """Return the equivalent function that takes all options, else the function itself."""
        return PROGRAMS.get(self.function.general_form, self.function)

    @property
    def peers_read(self) -> list[relax.Expr]:
        """Return the operands that peers read in place, if peers map their memory."""
        return self.operands(self.function.peers_read)

    def operands(self, names: tuple[str, ...]) -> list[relax.Expr]:
        """Return the arguments of some parameters."""
        positions = self.function.positions(names, len(self.arguments))
        return [self.arguments[position] for position in positions]

    def with_flags(self, flags: CollectiveFlag) -> relax.Call:
        """Return an equivalent call with other flags."""
        return self.as_call_of(
            self.general_form, {self.general_form.parameter_of_type("CollectiveFlag") or "": flags}
        )

    def as_call_of(self, function: Function, overrides: Mapping[str, int]) -> relax.Call:
        """Return a call of another function with the same operands and constants.

        `overrides` replaces constants, by the names of parameters.
        """
        numbers = {**self.numbers, **overrides}
        arguments: list[relax.Expr] = []
        for parameter in function.parameters:
            if parameter.name in numbers:
                arguments.append(_constant(int(numbers[parameter.name])))
            else:
                arguments += self.operands((parameter.name,))
        return replace_call(self.call, relax.ExternFunc(function.name), arguments)

    def _number(self, *types: str) -> int | None:
        """Return the constant of the parameter with one of some types, None if there is none."""
        name = self.general_form.parameter_of_type(*types)
        return None if name is None else self.numbers[name]

    def __str__(self) -> str:
        """Return the text that names the call in messages, such as "allreduce of x (sum)"."""
        name = self.function.name.rpartition(".")[2]
        kind = f" ({self.kind.name.lower()})" if self.kind is not None else ""
        operands = ", ".join(map(name_of, self.operands(self.function.reads)))
        return f"{name} of {operands}{kind}{_describe_teams(self.division)}"


def match_collective(expr: relax.Expr) -> Collective | None:
    """Return the collective that an expression calls, None if it calls none or is not constant."""
    if type(expr) is not relax.Call or type(expr.op) is not relax.ExternFunc:
        return None
    function = find(str(expr.op.global_symbol))
    if function is None or function.sync not in (Sync.PARTIAL, Sync.BARRIER):
        return None
    arguments = as_list(expr.args)
    constants = _constants(function, len(arguments))
    if constants is None:
        return None
    numbers = dict(function.defaults)
    division: tuple[int, ...] = ()
    try:
        for position, name, is_team, read in constants:
            argument = arguments[position]
            if is_team and isinstance(argument, relax.ShapeExpr):
                division = tuple(map(int, argument.values))
                if not division:
                    return None  # the runtime raises an error for it
            else:
                numbers[name] = read(argument)
    except (AttributeError, IndexError, TypeError, ValueError):
        return None  # an option is not constant
    return Collective(function, expr, arguments, numbers, division)


@cache
def _constants(
    function: Function, count: int
) -> list[tuple[int, str, bool, Callable[[Any], int]]] | None:
    """Return the constants among `count` arguments, None if the function takes another number.

    Each has its position, its parameter, whether that is a team, and the function that reads it.
    """
    bound = function.bind(count)
    return (
        None
        if bound is None
        else [
            (position, parameter.name, parameter.type == "Team", _NUMBERS[parameter.type])
            for position, parameter in enumerate(bound)
            if parameter.type in _NUMBERS
        ]
    )


def match_start(expr: relax.Expr) -> Collective | None:
    """Return the collective that a call starts, None if it starts none or is not constant.

    `call` of the result is a call of the collective itself, which `start_of` reverses.
    """
    if not isinstance(expr, relax.Call) or not isinstance(expr.op, relax.ExternFunc):
        return None
    if str(expr.op.global_symbol) != START.name or not expr.args:
        return None
    name, *operands = expr.args
    if not isinstance(name, StringImm):
        return None
    return match_collective(
        relax.Call(relax.ExternFunc(str(name.value)), operands, ty_args=[NOTHING], ret_ty=NOTHING)
    )


def start_of(call: relax.Call) -> relax.Call:
    """Return a call that starts a collective, from a call of it; its value is the request."""
    arguments = [StringImm(str(call.op.global_symbol)), *call.args]
    request = relax.AnyType()
    return relax.Call(relax.ExternFunc(START.name), arguments, ty_args=[request], ret_ty=request)


def needs_peers(call: relax.Call) -> bool:
    """Return whether a call depends on the other workers.

    It does if it synchronizes or communicates with them, allocates memory for that, or returns the
    index of a worker in a team.
    """
    if not isinstance(call.op, relax.ExternFunc):
        return False
    name = str(call.op.global_symbol)
    function = find(name)
    if name.startswith(DISCO) or function is None:
        return name.startswith(DISCO)
    if function.sync is not Sync.NONE or function.parameter_of_type("Team") is not None:
        return True
    return bool(function.starts)


def running_ranks(function: relax.Function, world_size: int | None) -> Sequence[int] | None:
    """Return the ranks that run a function, None if they are unknown."""
    listed = (function.attrs or {}).get(RUN_BY, None)
    if listed is not None:
        return [int(rank) for rank in listed]
    return None if world_size is None else range(world_size)


@cache
def _constant(number: int) -> relax.Expr:
    """Return a number as an argument, cached because creating one is slow."""
    return relax.prim_value(number)


def _int(expr: relax.Expr) -> int:
    return int(expr.value if type(expr) in _WITH_VALUE else expr)


_WITH_VALUE: Final = frozenset((tirx.IntImm, GenericConst))
# Cached because each collective is read by many passes, and calls of enumerations are slow.
_reduce_kind = cache(ReduceKind)
_strategy = cache(AllReduceStrategy)
_flag = cache(CollectiveFlag)


#: Functions that read a constant argument, by the type of its parameter.
_NUMBERS: Final[dict[str, Callable[[Any], int]]] = {
    "Team": _int,
    "InGroup": lambda expr: Team(bool(_int(expr))),
    "ReduceKind": lambda expr: _reduce_kind(_int(expr)),
    "ReduceKindInShape": lambda expr: _reduce_kind(int(expr.values[0])),
    "AllReduceStrategy": lambda expr: _strategy(_int(expr)),
    "CollectiveFlag": lambda expr: _flag(_int(expr)),
}


#: The most ranks of a team that a description lists.
_SHOWN_RANKS: Final = 8


def _describe_teams(division: tuple[int, ...]) -> str:
    """Return the teams of a collective for its description, "" if the team is an id."""
    if not division:
        return ""
    size, *ranks = division
    first = ", ".join(map(str, ranks[: min(size, _SHOWN_RANKS)]))
    more = ", ..." if size > _SHOWN_RANKS else ""
    return f" in {'teams such as' if len(ranks) > size else 'the team'} [{first}{more}]"


def name_of(expr: relax.Expr) -> str:
    """Return the name of an operand in reports."""
    return str(expr.name) if isinstance(expr, relax.Var) else "a constant"
