# SPDX-License-Identifier: Apache-2.0
"""What a function does with other ranks, step after step, with the functions that it calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cached_property
from typing import Any

from tvm_ipc.contract import Function, Meeting
from tvm_ipc.transform.safety.known import Known, Teams
from tvm_ipc.transform.safety.statements import Statement


class Does(Enum):
    """How a step has to do with other ranks."""

    MEET = auto()  #: returns when all ranks of the team are there
    EXCHANGE = auto()  #: one of them may return before
    SEND = auto()
    RECEIVE = auto()
    POST = auto()  #: has a thread do what is inside
    SHOW = auto()  #: waits for nobody
    WAIT = auto()  #: for works
    PEER = auto()  #: for what another rank shows


#: What ranks must do in the same order. The others are waits for something of the rank itself.
SHARED = frozenset({Does.MEET, Does.EXCHANGE, Does.SEND, Does.RECEIVE, Does.POST, Does.SHOW})

OF_MEETING = {
    Meeting.ALL: Does.MEET,
    Meeting.SOME: Does.EXCHANGE,
    Meeting.PAIR: Does.SEND,
    Meeting.NONE: None,
}


@dataclass(frozen=True)
class What:
    """What ranks that meet have to agree in; None where it is not known."""

    name: str
    details: tuple[tuple[str, Any], ...] = ()

    def may_agree(self, other: What) -> bool:
        """Whether what is known of both is the same."""
        mine, others = dict(self.details), dict(other.details)
        return self.name == other.name and all(
            None in (mine.get(key), others.get(key)) or mine[key] == others[key]
            for key in mine.keys() & others.keys()
        )


@dataclass(eq=False)
class Act:
    """One step."""

    does: Does
    step: Statement
    function: str  #: of the module, in which it is
    what: What = What("")
    teams: Teams | None = None  #: of each rank, None where that is not known
    #: Which of the teams of the same ranks: the session's own ones, or a copy.
    which: str = ""
    peers: tuple[int | None, ...] = ()  #: of a message, the other end of it, by rank
    posted: Act | None = None  #: what a post has a thread do
    #: The posts of one of which a wait waits for the work, or the shows of one of which it is.
    started: tuple[Act, ...] = ()
    shift: tuple[int, ...] | None = None  #: of each rank, whose it asks for


@dataclass(eq=False)
class Branch:
    """An `if`."""

    condition: Known
    step: Statement
    function: str
    then: list[Act | Branch] = field(default_factory=list)
    otherwise: list[Act | Branch] = field(default_factory=list)

    @cached_property
    def is_same(self) -> bool:
        """Whether ranks may take either branch while others take the other one."""
        return same(self.then, self.otherwise)

    @cached_property
    def shared(self) -> Acts:
        """What ranks do together in it: what either branch does where that is the same."""
        return _shared(self.then) if self.is_same else [self]

    @property
    def key(self) -> object:
        """What is the same for two of which the condition is the same."""
        return getattr(self.condition, "key", self)


Acts = list[Act | Branch]


def acts_of(acts: Acts) -> Iterator[Act]:
    """Yield all steps of all branches."""
    rest = [acts]
    while rest:
        for one in rest.pop():
            if isinstance(one, Branch):
                rest += [one.then, one.otherwise]
                continue
            yield one
            if one.posted is not None:
                yield one.posted


def branches_of(acts: Acts) -> Iterator[Branch]:
    """Yield all branches, those within others too."""
    rest = [acts]
    while rest:
        for one in rest.pop():
            if isinstance(one, Branch):
                rest += [one.then, one.otherwise]
                yield one


def same(one: Acts, other: Acts) -> bool:
    """Whether ranks may do the one while others do the other: nothing known tells them apart."""
    first, second = _shared(one), _shared(other)
    return len(first) == len(second) and all(map(_same, first, second))


def _same(one: Act | Branch, other: Act | Branch) -> bool:
    if isinstance(one, Branch) or isinstance(other, Branch):
        return (
            isinstance(one, Branch)
            and isinstance(other, Branch)
            and one.key == other.key
            and same(one.then, other.then)
            and same(one.otherwise, other.otherwise)
        )
    if one.posted is not None and other.posted is not None:
        return _same(one.posted, other.posted)
    return (
        (one.does, one.teams, one.which) == (other.does, other.teams, other.which)
        and one.peers == other.peers
        and one.what.may_agree(other.what)
        and (one.teams is not None or one.does in (Does.SEND, Does.RECEIVE))
    )


def _shared(acts: Acts) -> Acts:
    """Return what ranks must do in the same order, without branches that do not matter."""
    found: Acts = []
    for one in acts:
        if isinstance(one, Act):
            if one.does in SHARED:
                found.append(one)
        else:
            found += one.shared
    return found


def texts(one: Acts, other: Acts) -> tuple[str, str]:
    """Return what ranks do together in two branches, so that they are told apart."""
    found = _text(one, False), _text(other, False)
    return found if found[0] != found[1] else (_text(one, True), _text(other, True))


def _text(acts: Acts, details: bool) -> str:
    names: list[str] = []
    for one in _shared(acts):
        if isinstance(one, Branch) or details:
            names.append(f"`{one.step}`")
        elif one.posted is not None:
            names.append(f"post of {one.posted.what.name}")
        else:
            names.append(one.what.name or one.does.name.lower())
    return ", ".join(names) or "nothing"


def chosen(acts: Acts, rank: int, choose: Callable[[Branch], bool]) -> list[Act]:
    """Return what a rank does, where `choose` says what comes out of conditions not known."""
    found: list[Act] = []
    rest = [*reversed(acts)]
    while rest:
        one = rest.pop()
        if isinstance(one, Act):
            found.append(one)
            continue
        values = getattr(one.condition, "values", None)
        then = bool(values[rank]) if values is not None else choose(one)
        rest += reversed(one.then if then else one.otherwise)
    return found


def named(function: Function) -> str:
    """Return the name that ranks agree in, whichever backend and package a function is of."""
    return (function.general or function.name).rpartition(".")[2]
