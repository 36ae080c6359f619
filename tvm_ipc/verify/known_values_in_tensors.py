# SPDX-License-Identifier: Apache-2.0
"""Track what is known of the contents of tensors at one point of a program."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tvm_ipc.verify.comm_trace_types import Action
from tvm_ipc.verify.per_rank_and_uniform_values import (
    KnownValue,
    PerRank,
    RankModel,
    Uniform,
    computed,
)


@dataclass(eq=False)
class Store:
    """The contents of one tensor."""

    depth: int  #: the number of branches around its allocation
    alternatives: tuple[Store, ...] = ()  #: the stores of which it is one, after an `if`


@dataclass(frozen=True)
class TensorRef:
    """A tensor, or a part of one."""

    store: Store
    is_whole: bool = True
    differs_by_rank: bool = False  #: whether ranks may refer to different parts


@dataclass(frozen=True)
class Ranks:
    """A team that the program requested, or with None the caller's rank as a shape."""

    team: tuple[int, ...] | None
    copy: int | None = 0


@dataclass(frozen=True)
class PendingRequest:
    """The request that one of some actions started, or the buffer that one of them exposed."""

    actions: tuple[Action, ...]
    tensor: TensorRef | None = None


#: A `KnownValue`, `TensorRef`, `Ranks`, `PendingRequest` or tuple of them; None: nothing is known.
AbstractValue = Any
_BLANK = "blank"  #: the contents of a tensor that was never written


class TensorContents:
    """Maps tensors to what each rank knows of their contents.

    Between `enter_branch` and `leave_branch` changes are recorded, so that they can be undone.
    """

    def __init__(self, ranks: RankModel) -> None:
        self._ranks = ranks
        self._contents: dict[Store, Any] = {}
        #: The contents before the current branch of the stores that it has changed.
        self._before: dict[Store, Any] = {}
        self._enclosing: list[dict[Store, Any]] = []  #: `_before` of the branches around it

    def known(self, value: AbstractValue) -> KnownValue:
        """Return what is known of a number, or of a tensor's contents."""
        if isinstance(value, tuple):
            return computed([self.known(field) for field in value], self._ranks)
        if isinstance(value, (PerRank, Uniform)):
            return value
        if not isinstance(value, TensorRef) or value.differs_by_rank:
            return None
        contents = self._contents.get(value.store)
        if contents is _BLANK:
            return None
        if value.is_whole or contents is None:
            return contents
        return computed([contents], self._ranks)

    def write(self, value: AbstractValue, known: KnownValue, may_keep: bool = True) -> None:
        """Write to a tensor; `may_keep` if the write may leave some elements as they were."""
        if isinstance(value, tuple):
            for field in value:
                self.write(field, known, may_keep)
        if not isinstance(value, TensorRef):
            return
        before = self._contents.get(value.store)
        if before is not _BLANK and (may_keep or not value.is_whole):
            known = computed([before, known], self._ranks)
        elif not value.is_whole and isinstance(known, PerRank):
            known = computed([known], self._ranks)
        self._change(value.store, known)
        aliases = list(value.store.alternatives)
        while aliases:
            alias = aliases.pop()
            self._change(alias, None)
            aliases += alias.alternatives

    def clobber(self, values: Iterable[AbstractValue]) -> None:
        """Let unknown code write to some tensors."""
        for value in values:
            self.write(value, None, may_keep=False)

    def allocate(self) -> TensorRef:
        """Return a new tensor that was never written."""
        return self.tensor(_BLANK)

    def tensor(self, known: Any, alternatives: tuple[Store, ...] = ()) -> TensorRef:
        """Return a new tensor of known contents (None: unknown)."""
        store = Store(len(self._enclosing), alternatives)
        self._contents[store] = known
        return TensorRef(store)

    # ---- branches ---------------------------------------------------------------------------

    def _change(self, store: Store, known: Any) -> None:
        if store.depth < len(self._enclosing) and store not in self._before:
            self._before[store] = self._contents[store]
        self._contents[store] = known

    def enter_branch(self) -> None:
        """Begin to record changes."""
        self._enclosing.append(self._before)
        self._before = {}

    def leave_branch(self) -> dict[Store, Any]:
        """Undo the changes of a branch, and return them."""
        changed = {store: self._contents[store] for store in self._before}
        self._contents.update(self._before)
        self._before = self._enclosing.pop()
        return changed

    def join(
        self,
        condition: KnownValue,
        then_changes: dict[Store, Any],
        else_changes: dict[Store, Any],
    ) -> None:
        """Apply the changes of two branches, of which a condition chooses one."""
        for store in dict.fromkeys([*then_changes, *else_changes]):
            before = self._contents[store]
            ends = then_changes.get(store, before), else_changes.get(store, before)
            self._change(store, self._select(condition, *ends))

    def _select(self, condition: KnownValue, a: Any, b: Any) -> Any:
        """Return what is known of contents that are `a` or `b`."""
        if a == b or b is _BLANK:
            return a
        if a is _BLANK:
            return b
        if all(isinstance(known, PerRank) for known in (condition, a, b)):
            choices = zip(condition.values, a.values, b.values, strict=True)  # type: ignore[union-attr]
            return PerRank(tuple(x if chosen else y for chosen, x, y in choices))
        return computed([condition, a, b], self._ranks)

    def select(self, condition: KnownValue, a: AbstractValue, b: AbstractValue) -> AbstractValue:
        """Return the value that is `a` where a condition holds, else `b`."""
        if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
            return tuple(self.select(condition, x, y) for x, y in zip(a, b, strict=True))
        if a == b:
            return a
        if isinstance(a, PendingRequest) and isinstance(b, PendingRequest):
            return PendingRequest(a.actions + b.actions)
        if isinstance(a, TensorRef) and isinstance(b, TensorRef):
            known = self._select(condition, self.known(a), self.known(b))
            store = self.tensor(known, (a.store, b.store)).store
            is_whole = a.is_whole and b.is_whole
            return TensorRef(store, is_whole, a.differs_by_rank or b.differs_by_rank)
        if isinstance(a, (PerRank, Uniform)) and isinstance(b, (PerRank, Uniform)):
            return self._select(condition, a, b)
        return None
