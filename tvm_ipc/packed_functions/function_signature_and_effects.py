# SPDX-License-Identifier: Apache-2.0
"""Define `Function`, an entry of the table: the signature of a packed function and its effects.

    Function(
        "mylib.exchange",
        "(send: Tensor, team: Team, flags: CollectiveFlag, recv: Tensor)",
        "every rank gets ...",
        reads=("send",),
        writes=("recv",),
        scopes={"send": IPC_MEMORY},
        peers_read=("send",),
        sync=Sync.BARRIER,
    )

Effects name operands by their parameters. The effects of a function have ended when it returns,
except reads by peers (see `Function.peers_read`) and what the function starts (`Function.starts`,
`Function.exposes`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum
from functools import cache, cached_property
from typing import Final, NamedTuple

#: The name of a function's result among its operands.
RESULT: Final = "return"

#: The memory scope of an operand that may be in any scope.
ANY: Final = "*"

#: Parameter types with a meaning for passes, and the types of tvm-ffi by which they are passed.
ROLES: Final[Mapping[str, str]] = {
    "Team": "int | Shape",  #: see constants.AnyTeam
    "InGroup": "bool",  #: Disco's form of a Team: false is the world, true the group of the rank
    "ReduceKind": "int",
    "ReduceKindInShape": "Shape",  #: Disco's form of a ReduceKind: a shape with one extent
    "AllReduceStrategy": "int",
    "CollectiveFlag": "int",
}


class Sync(Enum):
    """The ranks that wait for each other in a function."""

    NONE = "no rank waits for another"
    P2P = "one rank sends, and another one receives"
    PARTIAL = "the ranks of a team exchange data; one may return before others have entered"
    BARRIER = "no rank of a team returns before every one has entered"


class Registered(Enum):
    """The place where a function is registered."""

    NATIVE = "the native library, with the types of its parameters"
    UNTYPED = "the native library; the function reads its arguments itself"
    PYTHON = "a Python module of the package"
    UPSTREAM = "TVM"


class Parameter(NamedTuple):
    """A parameter of a packed function; a variadic one takes any number of values."""

    name: str
    type: str
    variadic: bool


@dataclass(frozen=True, eq=False)
class Function:
    """A packed function: its signature, and its effects on memory and ranks.

    Attributes
    ----------
    name : the name of the global function.
    signature : names and types of the parameters, and the type of the result if there is one. A
        name with a star takes any number of values. Types are those of tvm-ffi, and `ROLES`.
    summary : what the function does, in one line.
    reads : operands whose memory the function reads.
    writes : operands whose memory the function writes.
    scopes : the memory scopes that operands must be in, and the scope of the result; `ANY` if an
        operand may be in any scope. By default "global", or the scope that code for it supports.
    peers_read : operands that other ranks of the team may read in place, if they map the memory.
        The reads have ended when the function returns. If a parameter of type CollectiveFlag has
        NO_EXIT_BARRIER, they have ended only when the rank has passed a later barrier of the team,
        or of a team that contains it.
    replicated : operands that are the same on all ranks of the team once the function has returned,
        provided that the operands which it reads and peers do not read are the same.
    result_of : the operand whose memory the result shares; of several, any of them.
    exposes : the operand that other ranks of the team may read in place from now on, until they
        have passed a barrier with this rank in a function that releases the result.
    releases : the operands that no rank reads any more when the function returns. They are results
        of functions with `exposes`.
    starts : the parameter that names a function which a thread of the rank executes from now on.
        The operands are read and written until a wait for the result has returned.
    sets_stream : the parameter that numbers the stream of a GPU on which the calls after this one
        run; 0 is the stream on which the program began.
    waits_for_stream : the parameter that numbers a stream. Calls after this one, on the same
        stream, run after the calls on that stream so far.
    host_reads : operands whose values the host of a GPU reads in each call, so that a CUDA graph
        cannot repeat the function.
    sync : which ranks wait for each other. The team is the parameter of type Team or InGroup; the
        whole world if there is none.
    general_form : a function that does the same and takes flags, if this one takes none.
    defaults : the arguments of `general_form` for the parameters that this function lacks.
    registered : where the function is registered.
    """

    name: str
    signature: str
    summary: str
    _: KW_ONLY
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    scopes: Mapping[str, str] = field(default_factory=dict)
    peers_read: tuple[str, ...] = ()
    replicated: tuple[str, ...] = ()
    result_of: str = ""
    exposes: str = ""
    releases: str = ""
    starts: str = ""
    sets_stream: str = ""
    waits_for_stream: str = ""
    host_reads: tuple[str, ...] = ()
    sync: Sync = Sync.NONE
    general_form: str = ""
    defaults: Mapping[str, int] = field(default_factory=dict)
    registered: Registered = Registered.NATIVE

    def __post_init__(self) -> None:
        """Check that the effects name parameters of the function."""
        effects = (*self.reads, *self.writes, *self.peers_read, *self.replicated, *self.scopes)
        effects += self.host_reads
        operands = {*effects, self.result_of, self.exposes, self.releases, self.starts}
        operands |= {self.sets_stream, self.waits_for_stream}
        operands -= {RESULT, ""}
        if operands and (unknown := operands - {parameter.name for parameter in self.parameters}):
            raise ValueError(
                f"{self.name}: the effects name {', '.join(sorted(unknown))}, but the signature is "
                f"{self.signature}; name its parameters"
            )

    @property
    def orders_streams(self) -> bool:
        """Return whether the function sets the stream of later calls, or lets streams wait."""
        return bool(self.sets_stream or self.waits_for_stream)

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """The parameters of the signature."""
        listed = self.signature.partition(" -> ")[0].strip("()")
        pairs = [parameter.split(": ") for parameter in listed.split(", ") if parameter]
        return tuple(Parameter(name.lstrip("*"), ty, name.startswith("*")) for name, ty in pairs)

    @cached_property
    def result(self) -> str:
        """The type of the result; "None" if there is none."""
        return self.signature.partition(" -> ")[2] or "None"

    @cache  # noqa: B019 - functions of the table live as long as the program
    def bind(self, count: int) -> tuple[Parameter, ...] | None:
        """Return the parameter of each of `count` arguments; None if the count does not fit."""
        extra = count - len(self.parameters)
        bound: list[Parameter] = []
        for parameter in self.parameters:
            bound += [parameter] * (1 + extra if parameter.variadic else 1)
        return tuple(bound) if len(bound) == count else None

    @cache  # noqa: B019
    def positions(self, names: tuple[str, ...], count: int) -> tuple[int, ...]:
        """Return the positions, among `count` arguments, of those for some parameters."""
        bound = self.bind(count) or ()
        return tuple(k for k, parameter in enumerate(bound) if parameter.name in names)

    @cache  # noqa: B019
    def written(self, count: int) -> frozenset[int]:
        """Return the positions of arguments that may be written; all if the count does not fit."""
        if self.bind(count) is None:
            return frozenset(range(count))
        return frozenset(self.positions(self.writes, count))

    @cache  # noqa: B019
    def demands(self, count: int) -> Mapping[int | str, str]:
        """Return the scopes that a call with `count` arguments needs, by position or RESULT."""
        scopes: dict[int | str, str] = {
            k: self.scopes[parameter.name]
            for k, parameter in enumerate(self.bind(count) or ())
            if parameter.name in self.scopes
        }
        return {**scopes, RESULT: self.scopes[RESULT]} if RESULT in self.scopes else scopes

    @cache  # noqa: B019
    def parameter_of_type(self, *types: str) -> str | None:
        """Return the name of the first parameter of one of these types; None if there is none."""
        for parameter in self.parameters:
            if parameter.type in types:
                return parameter.name
        return None
