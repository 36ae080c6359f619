# SPDX-License-Identifier: Apache-2.0
"""Calls of collectives in destination-passing style, as the contract says what they do.

`LegalizeOps` and `CallTIRRewrite` turn `R.ccl.*` into them. This module is where passes recognise
such calls, and where they make others of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Final

import tvm
from tvm import relax

from tvm_ipc.contract import (
    PROGRAMS,
    AllReduceStrategy,
    AnyTeam,
    CollectiveFlag,
    Function,
    Meeting,
    ReduceKind,
    Team,
    find,
)
from tvm_ipc.contract.collectives import DISCO
from tvm_ipc.contract.programs import POST
from tvm_ipc.transform.ir.build import NOTHING, replace_call


@dataclass(frozen=True, eq=False)
class Collective:
    """A call of a collective whose team and manner are known."""

    function: Function
    call: relax.Call
    arguments: list[relax.Expr]  #: of the call: every look into the IR takes its time
    #: What is said with constants, by the names of parameters; those of `general` too.
    numbers: Mapping[str, int]
    division: tuple[int, ...] = ()  #: what the team is given as, if that is not its id

    @cached_property
    def team(self) -> AnyTeam:
        """The team whose ranks exchange data."""
        return self.division or self._number("Team", "InGroup") or Team.WORLD

    @property
    def is_meeting(self) -> bool:
        """Whether every rank of the team has entered when one of them returns."""
        return self.function.meets is Meeting.ALL

    @cached_property
    def kind(self) -> ReduceKind | None:
        """The reduction, if it is one."""
        kind = self._number("ReduceKind", "ReduceKindInShape")
        return None if kind is None else ReduceKind(kind)

    @cached_property
    def flags(self) -> CollectiveFlag | None:
        """What the compiler promises of the call, None where it can promise nothing."""
        flags = self._number("CollectiveFlag")
        return None if flags is None else CollectiveFlag(flags)

    @cached_property
    def general(self) -> Function:
        """The function that does the same and takes flags, if any does."""
        return PROGRAMS.get(self.function.general, self.function)

    @property
    def peers_read(self) -> list[relax.Expr]:
        """What peers read where it lies, if that is memory which they map."""
        return self.operands(self.function.peers_read)

    def operands(self, names: tuple[str, ...]) -> list[relax.Expr]:
        """Return the arguments of some parameters."""
        places = self.function.places(names, len(self.arguments))
        return [self.arguments[place] for place in places]

    def with_flags(self, flags: CollectiveFlag) -> relax.Call:
        """Return a call that does the same with other promises."""
        return self.as_call_of(self.general, {self.general.named("CollectiveFlag") or "": flags})

    def as_call_of(self, function: Function, given: Mapping[str, int]) -> relax.Call:
        """Return a call of another function with the same operands, and with numbers.

        Those that are given, by the names of parameters, take the place of what was said.
        """
        numbers = {**self.numbers, **given}
        arguments: list[relax.Expr] = []
        for parameter in function.parameters:
            if parameter.name in numbers:
                arguments.append(_constant(int(numbers[parameter.name])))
            else:
                arguments += self.operands((parameter.name,))
        return replace_call(self.call, relax.ExternFunc(function.name), arguments)

    def _number(self, *types: str) -> int | None:
        name = self.general.named(*types)
        return None if name is None else self.numbers[name]

    def __str__(self) -> str:
        name = self.function.name.rpartition(".")[2]
        kind = f" ({self.kind.name.lower()})" if self.kind is not None else ""
        of = ", ".join(map(name_of, self.operands(self.function.reads)))
        return f"{name} of {of}{kind}{_where(self.division)}"


def match_collective(expr: relax.Expr) -> Collective | None:
    """Return what the call does, or None if it is no collective, or not one that can be read."""
    if not isinstance(expr, relax.Call) or not isinstance(expr.op, relax.ExternFunc):
        return None
    function = find(str(expr.op.global_symbol))
    if function is None or function.meets not in (Meeting.SOME, Meeting.ALL):
        return None
    arguments = expr.args[:]
    numbers = dict(function.given)
    division: tuple[int, ...] = ()
    try:
        for parameter, argument in zip(function.bind(len(arguments)) or (), arguments, strict=True):
            if parameter.type == "Team" and isinstance(argument, relax.ShapeExpr):
                division = tuple(map(int, argument.values))
                if not division:
                    return None  # the runtime will refuse it
            elif parameter.type in _NUMBERS:
                numbers[parameter.name] = _NUMBERS[parameter.type](argument)
    except (AttributeError, IndexError, TypeError, ValueError):
        return None  # not so many arguments, or not constants: nothing can be said about the call
    return Collective(function, expr, arguments, numbers, division)


def match_post(expr: relax.Expr) -> Collective | None:
    """Return the collective that a call posts, or None if it posts none, or none that can be read.

    Its call is that of the collective; `post_of` makes one of the work again.
    """
    if not isinstance(expr, relax.Call) or not isinstance(expr.op, relax.ExternFunc):
        return None
    if str(expr.op.global_symbol) != POST.name or not expr.args:
        return None
    name, *operands = expr.args
    if not isinstance(name, tvm.ir.StringImm):
        return None
    return match_collective(
        relax.Call(relax.ExternFunc(str(name.value)), operands, ty_args=[NOTHING], ret_ty=NOTHING)
    )


def post_of(call: relax.Call) -> relax.Call:
    """Return a call that posts what the call of a collective does; its value is the work."""
    given = [tvm.ir.StringImm(str(call.op.global_symbol)), *call.args]
    work = relax.AnyType()
    return relax.Call(relax.ExternFunc(POST.name), given, ty_args=[work], ret_ty=work)


def needs_peers(call: relax.Call) -> bool:
    """Whether the call is of a function that depends on who the other workers are.

    Workers meet in it, or it makes memory for that, or tells the place of one in a team.
    """
    if not isinstance(call.op, relax.ExternFunc):
        return False
    name = str(call.op.global_symbol)
    function = find(name)
    if name.startswith(DISCO) or function is None:
        return name.startswith(DISCO)
    if function.meets is not Meeting.NONE or function.named("Team") is not None:
        return True
    return bool(function.posts)


@cache
def _constant(number: int) -> relax.Expr:
    """Return a number as an argument; it is one object, since to make one takes its time."""
    return relax.prim_value(number)


def _int(expr: relax.Expr) -> int:
    value = expr.value if isinstance(expr, tvm.ir.GenericConst) else expr
    return int(value)


#: How the numbers of a call are read, by the types of parameters.
_NUMBERS: Final[dict[str, Callable[[Any], int]]] = {
    "Team": _int,
    "InGroup": lambda expr: Team(bool(_int(expr))),
    "ReduceKind": lambda expr: ReduceKind(_int(expr)),
    "ReduceKindInShape": lambda expr: ReduceKind(int(expr.values[0])),
    "AllReduceStrategy": lambda expr: AllReduceStrategy(_int(expr)),
    "CollectiveFlag": lambda expr: CollectiveFlag(_int(expr)),
}


#: Of a team, in words about a collective.
_SHOWN_RANKS: Final = 8


def _where(division: tuple[int, ...]) -> str:
    """Say between which ranks it is, where they are divided into teams."""
    if not division:
        return ""
    size, *ranks = division
    first = ", ".join(map(str, ranks[: min(size, _SHOWN_RANKS)]))
    more = ", ..." if size > _SHOWN_RANKS else ""
    return f" in {'teams such as' if len(ranks) > size else 'the team'} [{first}{more}]"


def name_of(expr: relax.Expr) -> str:
    """Return what reports call an operand."""
    return str(expr.name) if isinstance(expr, relax.Var) else "a constant"
