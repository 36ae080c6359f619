# SPDX-License-Identifier: Apache-2.0
"""How the table says what a packed function is called with, and what it does to memory and ranks.

    Function(
        "mylib.exchange",
        "(send: Tensor, team: Team, flags: CollectiveFlag, recv: Tensor)",
        "every rank gets ...",
        reads=("send",),
        writes=("recv",),
        scopes={"send": IPC_MEMORY},
        peers_read=("send",),
        meets=Meeting.ALL,
    )

Effects name operands as the signature does. All that a function does has ended when it returns, but
for what peers do (see `Function.peers_read`), and for what a function starts (`Function.posts`,
`Function.shows`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum
from functools import cache, cached_property
from typing import Final, NamedTuple

#: Stands for the result of a function among its operands.
RESULT: Final = "return"

#: Stands for a memory scope where an operand may be in every one.
ANY: Final = "*"

#: Types of parameters that say more than how the value is passed, and how that is.
ROLES: Final[Mapping[str, str]] = {
    "Team": "int | Shape",  #: see values.AnyTeam
    "InGroup": "bool",  #: a Team as Disco has it: false is the world, true the group of the rank
    "ReduceKind": "int",
    "ReduceKindInShape": "Shape",  #: as Disco has it: a shape with one extent
    "AllReduceStrategy": "int",
    "CollectiveFlag": "int",
}


class Meeting(Enum):
    """Which ranks wait for each other in a function."""

    NONE = "no rank waits for another"
    PAIR = "what one rank sends another one receives"
    SOME = "the ranks of a team exchange data; one may return before others have entered"
    ALL = "no rank of a team returns before every one has entered"


class Registered(Enum):
    """Who makes a function known."""

    NATIVE = "the library, with the types of its parameters"
    UNTYPED = "the library; it reads its arguments itself"
    PYTHON = "the package, from Python"
    UPSTREAM = "TVM"


class Parameter(NamedTuple):
    """A parameter, or the values that a variadic one takes."""

    name: str
    type: str
    variadic: bool


@dataclass(frozen=True, eq=False)
class Function:
    """A packed function: how it is called, and what it does.

    Attributes
    ----------
    name : of the global function.
    signature : names and types of the parameters, and the type of the result if there is one. A
        name with a star takes any number of values. Types are those of tvm-ffi, and `ROLES`.
    summary : what it does in one line.
    reads : operands whose memory it reads.
    writes : operands whose memory it writes.
    scopes : the memory scopes in which operands must be, and in which a result is; `ANY` where an
        operand may be in every one. Otherwise that is "global", or what code for it works on.
    peers_read : operands that other ranks of the team may read where they lie, if they map the
        memory. They have done so when the function returns; but where a parameter of the type
        CollectiveFlag has NO_EXIT_BARRIER, only when the rank has passed a later meeting of the
        team, or of one that contains it.
    same : operands that are the same on all ranks of the team when the function has returned there,
        if so is what it reads and peers do not.
    result_of : the operand whose memory the result is; of several, any of them.
    shows : the operand that other ranks of the team may read where it lies from now on, until they
        have met with this rank in a function that hides the result.
    hides : the operands that nobody reads any more when the function returns; they are what
        functions with `shows` return.
    posts : the parameter that names a function which a thread of the rank does from now on; the
        operands are read and written until a wait for the result has returned.
    meets : which ranks wait for each other. Those of a team are those of the parameter of the type
        Team or InGroup; the whole world where there is none.
    general : a function that does the same and takes flags, where this one takes none.
    given : what `general` is given for the parameters that this function lacks.
    registered : who makes it known.
    """

    name: str
    signature: str
    summary: str
    _: KW_ONLY
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    scopes: Mapping[str, str] = field(default_factory=dict)
    peers_read: tuple[str, ...] = ()
    same: tuple[str, ...] = ()
    result_of: str = ""
    shows: str = ""
    hides: str = ""
    posts: str = ""
    meets: Meeting = Meeting.NONE
    general: str = ""
    given: Mapping[str, int] = field(default_factory=dict)
    registered: Registered = Registered.NATIVE

    def __post_init__(self) -> None:
        effects = (*self.reads, *self.writes, *self.peers_read, *self.same, *self.scopes)
        named = {*effects, self.result_of, self.shows, self.hides, self.posts}
        named -= {RESULT, ""}
        if named and (unknown := named - {parameter.name for parameter in self.parameters}):
            raise ValueError(
                f"{self.name}: effects name {', '.join(sorted(unknown))}, of which there is no "
                f"parameter in {self.signature}"
            )

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """The parameters of the signature."""
        inside = self.signature.partition(" -> ")[0].strip("()")
        parts = [part.split(": ") for part in inside.split(", ") if part]
        return tuple(Parameter(name.lstrip("*"), ty, name.startswith("*")) for name, ty in parts)

    @cached_property
    def result(self) -> str:
        """The type of the result, "None" where there is none."""
        return self.signature.partition(" -> ")[2] or "None"

    @cache  # noqa: B019 - functions of the table live as long as the program
    def bind(self, count: int) -> tuple[Parameter, ...] | None:
        """Return the parameter of each of so many arguments, None where they do not fit."""
        more = count - len(self.parameters)
        bound: list[Parameter] = []
        for parameter in self.parameters:
            bound += [parameter] * (1 + more if parameter.variadic else 1)
        return tuple(bound) if len(bound) == count else None

    @cache  # noqa: B019
    def places(self, names: tuple[str, ...], count: int) -> tuple[int, ...]:
        """Return which of so many arguments are those of some parameters, in their order."""
        bound = self.bind(count) or ()
        return tuple(k for k, parameter in enumerate(bound) if parameter.name in names)

    @cache  # noqa: B019
    def written(self, count: int) -> frozenset[int]:
        """Return which of so many arguments it may write: all of them where they do not fit."""
        places = range(count) if self.bind(count) is None else self.places(self.writes, count)
        return frozenset(places)

    @cache  # noqa: B019
    def demands(self, count: int) -> Mapping[int | str, str]:
        """Return the scopes that a call with so many arguments needs, by place, or by RESULT."""
        found: dict[int | str, str] = {
            k: self.scopes[parameter.name]
            for k, parameter in enumerate(self.bind(count) or ())
            if parameter.name in self.scopes
        }
        return {**found, RESULT: self.scopes[RESULT]} if RESULT in self.scopes else found

    @cache  # noqa: B019
    def named(self, *types: str) -> str | None:
        """Return the name of the parameter with one of some types, if there is one."""
        for parameter in self.parameters:
            if parameter.type in types:
                return parameter.name
        return None
