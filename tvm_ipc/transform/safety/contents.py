# SPDX-License-Identifier: Apache-2.0
"""What is known of the contents of tensors at one point of a program."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from tvm_ipc.contract import Team
from tvm_ipc.transform.safety.known import Alike, Known, Lanes, World, alike, computed
from tvm_ipc.transform.safety.sequences import Act


@dataclass(eq=False)
class Cell:
    """A tensor's contents."""

    depth: int  #: the number of branches in which it was made
    parts: tuple[Cell, ...] = ()  #: one of which it is, after an `if`


@dataclass(frozen=True)
class Held:
    """A tensor, or a part of one."""

    cell: Cell
    whole: bool = True
    of_rank: bool = False  #: which part it is may differ among ranks


@dataclass(frozen=True)
class Ranks:
    """A team that the program asked for, or the caller's rank as a shape."""

    team: tuple[int, ...] | None
    copy: int | None = 0


@dataclass(frozen=True)
class Started:
    """The work of one of some posts, or what one of some shows shows."""

    acts: tuple[Act, ...]
    tensor: Held | None = None


#: Of a variable: None where nothing is known.
Thing = Any
_BLANK = "blank"  #: the contents of a tensor that nobody wrote


class Contents:
    """What each rank knows of what it has."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._contents: dict[Cell, Any] = {}
        #: What there was before the branch that is being looked at, and how many it is in.
        self._before: dict[Cell, Any] = {}
        self._depth = 0
        everyone = world.teams(Team.WORLD)
        assert everyone is not None
        self._everyone = everyone

    def _known(self, thing: Thing) -> Known:
        """Return what is known of a number, or of a tensor's contents."""
        if isinstance(thing, tuple):
            return computed([self._known(part) for part in thing], self._world)
        if isinstance(thing, (Lanes, Alike)):
            return thing
        if not isinstance(thing, Held) or thing.of_rank:
            return None
        found = self._contents.get(thing.cell)
        if found is _BLANK:
            return alike(self._everyone)
        if thing.whole or found is None:
            return found
        return computed([found], self._world)

    def _write(self, thing: Thing, known: Known, beside: bool = True) -> None:
        """Write; unless all of it is sure to be new, `beside` what there was."""
        if isinstance(thing, tuple):
            for part in thing:
                self._write(part, known, beside)
        if not isinstance(thing, Held):
            return
        before = self._contents.get(thing.cell)
        if before is not _BLANK and (beside or not thing.whole):
            known = computed([before, known], self._world)
        elif not thing.whole and isinstance(known, Lanes):
            known = computed([known], self._world)
        self._change(thing.cell, known)
        rest = list(thing.cell.parts)
        while rest:
            part = rest.pop()
            self._change(part, None)
            rest += part.parts

    def _anything(self, things: Iterable[Thing]) -> Thing:
        """Let something be done of which nothing is known."""
        for thing in things:
            self._write(thing, None, beside=False)
        return None

    def _fresh(self) -> Held:
        return self._made(_BLANK)

    def _made(self, known: Any, parts: tuple[Cell, ...] = ()) -> Held:
        """Return a tensor of which something is known."""
        cell = Cell(self._depth, parts)
        self._contents[cell] = known
        return Held(cell)

    def _part(self, thing: Thing, is_part: bool = True) -> Thing:
        if not isinstance(thing, Held):
            return None
        return replace(thing, whole=thing.whole and not is_part)

    # ---- branches ---------------------------------------------------------------------------

    def _change(self, cell: Cell, known: Any) -> None:
        if cell.depth < self._depth and cell not in self._before:
            self._before[cell] = self._contents[cell]
        self._contents[cell] = known

    def _undo(self) -> dict[Cell, Any]:
        """Go back to the begin of a branch; return what has changed in it."""
        changed = {cell: self._contents[cell] for cell in self._before}
        self._contents.update(self._before)
        self._before = {}
        return changed

    def _join(self, condition: Known, then: dict[Cell, Any], otherwise: dict[Cell, Any]) -> None:
        """Have what either branch has changed."""
        for cell in dict.fromkeys([*then, *otherwise]):
            before = self._contents[cell]
            ends = then.get(cell, before), otherwise.get(cell, before)
            self._change(cell, self._either(condition, *ends))

    def _either(self, condition: Known, one: Any, other: Any) -> Any:
        if one == other or other is _BLANK:
            return one
        if one is _BLANK:
            return other
        if all(isinstance(known, Lanes) for known in (condition, one, other)):
            lanes = zip(condition.values, one.values, other.values, strict=True)  # type: ignore[union-attr]
            return Lanes(tuple(a if chosen else b for chosen, a, b in lanes))
        return computed([condition, one, other], self._world)

    def _merge(self, condition: Known, one: Thing, other: Thing) -> Thing:
        if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
            return tuple(self._merge(condition, a, b) for a, b in zip(one, other, strict=True))
        if one == other:
            return one
        if isinstance(one, Started) and isinstance(other, Started):
            return Started(one.acts + other.acts)
        if isinstance(one, Held) and isinstance(other, Held):
            known = self._either(condition, self._known(one), self._known(other))
            whole, of_rank = one.whole and other.whole, one.of_rank or other.of_rank
            return Held(self._made(known, (one.cell, other.cell)).cell, whole, of_rank)
        if isinstance(one, (Lanes, Alike)) and isinstance(other, (Lanes, Alike)):
            return self._either(condition, one, other)
        return None
