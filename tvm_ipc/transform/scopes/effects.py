# SPDX-License-Identifier: Apache-2.0
"""When memory may be written: whether a copy is still what it was copied from."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter

from tvm_ipc.transform.scopes.facts import (
    CallRecord,
    FunctionFacts,
    Program,
    Region,
    Tensor,
    Use,
    Write,
    pairs,
    tensors,
)
from tvm_ipc.transform.scopes.primfunc import PrimFuncs


class Effects:
    """Writes of a program, by class of memory; also through calls of its Relax functions."""

    def __init__(self, program: Program, primfuncs: PrimFuncs) -> None:
        self._program = program
        self._primfuncs = primfuncs
        self._of = {id(facts.value): facts for facts in program.functions}
        self._known_outside: dict[int, set[int]] = {}
        self._calls: dict[int, list[tuple[FunctionFacts, CallRecord]]] = {}
        for facts in program.functions:
            for record in facts.calls:
                self._calls.setdefault(id(record.callee), []).append((facts, record))
        self._alias_through_calls()
        self._events: dict[int, dict[int, list[Write]]] = {}
        self._numbers: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self._wild: set[int] = set()
        self._ready = False

    def version(self, function: FunctionFacts, leaf: int, number: int) -> int:
        """Return a number that is the same where nothing was written in between; -1: never."""
        self._prepare()
        if self._program.find(leaf) in self._wild:
            return -1
        return bisect_left(self._writes(function, leaf), (number, -1))

    def written_later(self, region: Region, leaf: int, number: int, own: bool) -> bool:
        """Whether memory may be written after a point of a region, or `own`: at it, too."""
        self._prepare()
        if self._program.find(leaf) in self._wild:
            return True
        writes = self._writes(region.function, leaf)
        low = number if own else number + 1
        current: Region | None = region
        while current is not None:
            first = bisect_left(writes, (low, -1))
            last = bisect_right(writes, (current.numbers[-1] + 1, -1))
            # What was allocated since is not what the leaf was then.
            if any(born < number for _, born in writes[first:last]):
                return True
            if current.parent is None:
                return False
            low, current = current.parent.numbers[current.at + 1], current.parent
        return False

    def may_cut(self, use: Use) -> bool:
        """Whether a copy may stand between a value and what it goes on as."""
        assert use.same is not None
        if use.moves:
            return True
        region, leaf = use.region, use.tensor.leaf
        here = leaf if region.function is self._program.owners[leaf] else use.same
        if here == leaf:
            number = self._program.number(use)
            end = use.index == len(region.bindings)
            last = end and region.parent is None
            if not last and self.written_later(region, leaf, number, not end):
                return False
        elif self.written_later(region, use.same, self._program.number(use), True):
            return False  # the result of a call
        return self._may_return_copy(region.function, here, set())

    def _may_return_copy(self, function: FunctionFacts, leaf: int, seen: set[int]) -> bool:
        """Whether callers cannot tell what is returned from its copy."""
        find = self._program.find
        known = self._known_outside.get(id(function))
        if known is None:
            known = self._known_outside[id(function)] = self._find_known_outside(function)
        if find(leaf) not in known or id(function) in seen:
            return True
        seen.add(id(function))
        for caller, record in self._calls.get(id(function.value), []):
            for _, source, result in pairs(function.value.result, record.result):
                if find(source.leaf) != find(leaf):
                    continue
                if self.written_later(record.region, result.leaf, record.number, False):
                    return False
                if not self._may_return_copy(caller, result.leaf, seen):
                    return False
        return True

    def _find_known_outside(self, function: FunctionFacts) -> set[int]:
        """Return the memory that callers know by another name too, if it is returned."""
        known = {self._program.find(tensor.leaf) for tensor in tensors(function.value.params)}
        results = Counter(
            self._program.find(tensor.leaf) for tensor in tensors(function.value.result)
        )
        return known | {result for result, count in results.items() if count > 1}

    # How it is found.

    def _prepare(self) -> None:
        """Find all writes. Most modules never ask for one."""
        if self._ready:
            return
        self._ready = True
        self._program.read_deferred()
        self._write_through_calls()
        # A write in a nested function happens whenever that is called.
        self._wild = {
            self._program.find(write.leaf)
            for facts in self._program.functions
            for write in facts.writes
            if self._program.owners[write.leaf] is not facts and self._is_write(write)
        }

    def _alias_through_calls(self) -> None:
        changed = True
        while changed:
            changed = False
            for facts in self._program.functions:
                for record in facts.calls:
                    changed |= self._alias_of_call(record)

    def _alias_of_call(self, record: CallRecord) -> bool:
        """Note which results of a call may be its arguments, and which parameters may be one."""
        find, unite = self._program.find, self._program.unite
        here: dict[int, list[int]] = {}
        there: dict[int, int] = {}
        changed = False
        for _, argument, param in self._bound(record):
            known = there.setdefault(find(argument.leaf), param.leaf)
            changed |= unite(known, param.leaf)
        for _, argument, param in self._bound(record):
            here.setdefault(find(param.leaf), []).append(argument.leaf)
        for _, source, result in pairs(record.callee.result, record.result):
            names = here.setdefault(find(source.leaf), [])
            for name in names:
                changed |= unite(name, result.leaf)
            names.append(result.leaf)
        return changed

    def _bound(self, record: CallRecord) -> list[tuple[tuple[int, ...], Tensor, Tensor]]:
        return pairs(record.arguments, record.callee.params)

    def _write_through_calls(self) -> None:
        for facts in self._program.functions:
            by_class = self._events.setdefault(id(facts), {})
            for write in facts.writes:
                by_class.setdefault(self._program.find(write.leaf), []).append(write)
        changed = True
        while changed:
            changed = False
            for facts in self._program.functions:
                for record in facts.calls:
                    changed |= self._writes_of_call(facts, record)

    def _writes_of_call(self, facts: FunctionFacts, record: CallRecord) -> bool:
        callee = self._events[id(self._of[id(record.callee)])]
        events = self._events[id(facts)]
        changed = False
        for _, argument, param in self._bound(record):
            written = callee.get(self._program.find(param.leaf), [])
            if any(map(self._is_write, written)):
                event = Write(record.number, argument.leaf, None)
                known = events.setdefault(self._program.find(argument.leaf), [])
                if event not in known:
                    known.append(event)
                    changed = True
        return changed

    def _writes(self, function: FunctionFacts, leaf: int) -> list[tuple[int, int]]:
        """Return when memory is written, and when that was allocated, in order."""
        key = (id(function), self._program.find(leaf))
        known = self._numbers.get(key)
        if known is None:
            events = self._events[id(function)].get(key[1], [])
            known = sorted(
                {
                    (event.number, self._born(event.leaf))
                    for event in events
                    if self._is_write(event)
                }
            )
            self._numbers[key] = known
        return known

    def _born(self, leaf: int) -> int:
        sites = self._program.allocs.get(leaf)
        return sites[0].region.numbers[sites[0].index] if sites else -1

    def _is_write(self, write: Write) -> bool:
        return write.param is None or self._primfuncs.writes(*write.param)
