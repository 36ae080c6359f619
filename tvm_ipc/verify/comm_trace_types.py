# SPDX-License-Identifier: Apache-2.0
"""Represent what a function does together with other ranks: a list of actions and branches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cached_property

from tvm_ipc.packed_functions import Sync
from tvm_ipc.verify.compare_collective_arguments import Signature
from tvm_ipc.verify.per_rank_and_uniform_values import KnownValue, Teams
from tvm_ipc.verify.relax_as_plain_statements import Statement

_EMPTY_SIGNATURE = Signature("")


class ActionKind(Enum):
    """The way in which an action involves other ranks."""

    BARRIER = auto()  #: returns after all ranks of the team have entered
    PARTIAL = auto()  #: may return before all ranks of the team have entered
    SEND = auto()
    RECEIVE = auto()
    START = auto()  #: lets a thread of the rank run the started action
    EXPOSE = auto()  #: does not wait
    WAIT = auto()  #: waits for requests
    PEER_VIEW = auto()  #: waits for the exposed buffer of another rank


#: The kinds of actions that ranks must do in the same order. The others wait for the rank itself.
SHARED = frozenset(
    {
        ActionKind.BARRIER,
        ActionKind.PARTIAL,
        ActionKind.SEND,
        ActionKind.RECEIVE,
        ActionKind.START,
        ActionKind.EXPOSE,
    }
)

KIND_OF_SYNC = {
    Sync.BARRIER: ActionKind.BARRIER,
    Sync.PARTIAL: ActionKind.PARTIAL,
    Sync.P2P: ActionKind.SEND,
    Sync.NONE: None,
}


@dataclass(eq=False)
class Action:
    """One call that involves other ranks."""

    kind: ActionKind
    step: Statement
    function: str  #: the name of the function that contains the call
    signature: Signature = _EMPTY_SIGNATURE
    teams: Teams | None = None  #: None: unknown
    #: Tells teams of the same ranks apart: predefined teams, and copies of user-created ones.
    team_copy: str = ""
    #: The peer of each rank, for messages. None where the rank does not exist; empty if unknown.
    peers: tuple[int | None, ...] = ()
    started: Action | None = None  #: the action that a START lets a thread do
    #: The STARTs of which a WAIT awaits one, or the EXPOSEs of which a PEER_VIEW views one.
    starts: tuple[Action, ...] = ()
    shift: tuple[int, ...] | None = None  #: the shift to the peer of each rank, for PEER_VIEW

    @property
    def is_message(self) -> bool:
        """Return whether the action is one end of a message."""
        return self.kind in (ActionKind.SEND, ActionKind.RECEIVE)


@dataclass(eq=False)
class Branch:
    """An `if` and the actions of its branches."""

    condition: KnownValue
    step: Statement
    function: str
    then: list[Action | Branch] = field(default_factory=list)
    otherwise: list[Action | Branch] = field(default_factory=list)

    @cached_property
    def is_same(self) -> bool:
        """Return whether some ranks may take one branch while others take the other one."""
        return match(self.then, self.otherwise)

    @cached_property
    def shared(self) -> Actions:
        """Return the shared actions of either branch if they match, else the branch itself."""
        return _shared(self.then) if self.is_same else [self]

    @property
    def key(self) -> object:
        """Return a key that branches with the same condition share."""
        return getattr(self.condition, "key", self)


Actions = list[Action | Branch]


def items_of(actions: Actions) -> Iterator[Action | Branch]:
    """Yield all branches, and all actions of all branches, started ones included."""
    pending = [actions]
    while pending:
        for item in pending.pop():
            yield item
            if isinstance(item, Branch):
                pending += [item.then, item.otherwise]
            elif item.started is not None:
                yield item.started


def actions_of(actions: Actions) -> Iterator[Action]:
    """Yield all actions of all branches, started ones included."""
    return (item for item in items_of(actions) if isinstance(item, Action))


def match(a: Actions, b: Actions) -> bool:
    """Return whether some ranks may do `a` while others do `b`: they are known to match."""
    shared_a, shared_b = _shared(a), _shared(b)
    return len(shared_a) == len(shared_b) and all(map(_match, shared_a, shared_b))


def _match(a: Action | Branch, b: Action | Branch) -> bool:
    if isinstance(a, Branch) or isinstance(b, Branch):
        return (
            isinstance(a, Branch)
            and isinstance(b, Branch)
            and a.key == b.key
            and match(a.then, b.then)
            and match(a.otherwise, b.otherwise)
        )
    if a.started is not None and b.started is not None:
        return _match(a.started, b.started)
    return (
        (a.kind, a.teams, a.team_copy) == (b.kind, b.teams, b.team_copy)
        and a.peers == b.peers
        and a.signature.is_same(b.signature)
        and (a.peers != () if a.is_message else a.teams is not None)
    )


def _shared(actions: Actions) -> Actions:
    """Return the actions that ranks must do in the same order, and the branches that matter."""
    shared: Actions = []
    for item in actions:
        if isinstance(item, Action):
            if item.kind in SHARED:
                shared.append(item)
        else:
            shared += item.shared
    return shared


def describe_branches(a: Actions, b: Actions) -> tuple[str, str]:
    """Return descriptions of the shared actions of two branches that differ from each other."""
    names = _describe(a, False), _describe(b, False)
    return names if names[0] != names[1] else (_describe(a, True), _describe(b, True))


def _describe(actions: Actions, with_statements: bool) -> str:
    names: list[str] = []
    for item in _shared(actions):
        if isinstance(item, Branch) or with_statements:
            names.append(f"`{item.step}`")
        elif item.started is not None:
            names.append(f"start of {item.started.signature.name}")
        else:
            names.append(item.signature.name or item.kind.name.lower())
    return ", ".join(names) or "nothing"


def actions_of_rank(actions: Actions, rank: int, choose: Callable[[Branch], bool]) -> list[Action]:
    """Return the actions of a rank; `choose` decides branches with unknown conditions."""
    taken: list[Action] = []
    pending = [*reversed(actions)]
    while pending:
        item = pending.pop()
        if isinstance(item, Action):
            taken.append(item)
            continue
        values = getattr(item.condition, "values", None)
        then = bool(values[rank]) if values is not None else choose(item)
        pending += reversed(item.then if then else item.otherwise)
    return taken
