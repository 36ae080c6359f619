# SPDX-License-Identifier: Apache-2.0
"""Runs the cases of `collective_cases` on a worker, which checks its own results.

A session loads it with `import_python_module("tests.runtime.collective_worker")`, which registers
`tests.run_collectives`.
"""

from __future__ import annotations

import hashlib
import importlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import tvm
from tvm_ffi import Shape, get_global_func, register_global_func

from tests.runtime import collective_cases as cases
from tests.runtime import places
from tests.runtime.collective_cases import Array, Case
from tvm_ipc.packed_functions import KINDS

_CANARY = 0xA5
_MARGIN = 64


class Memory:
    """A tensor inside a storage, with bytes around it that nobody may write."""

    def __init__(self, in_arena: bool, dtype: str, count: int, offset: int) -> None:
        self.dtype, self.name = cases.numpy_type(dtype), dtype
        self.start = offset * self.dtype.itemsize
        self.end = self.start + count * self.dtype.itemsize
        size = self.end + _MARGIN
        if in_arena:
            allocate = get_global_func("runtime.disco.cuda_ipc.alloc_storage")
            self.storage = allocate(Shape([size]), tvm.DataType("uint8"))
            self.whole = self._tensor_of_storage(0, size, "uint8")
            self.tensor = self._tensor_of_storage(self.start, count, dtype)
        else:
            self.whole = places.empty((size,), "uint8")
            self.tensor = self.part(0, count)
        self.bytes = np.full(size, _CANARY, "uint8")
        self.whole.copyfrom(self.bytes)

    def _tensor_of_storage(self, offset: int, count: int, dtype: str) -> Any:
        make = get_global_func("vm.builtin.alloc_tensor")
        return make(self.storage, offset, Shape([count]), tvm.DataType(dtype))

    def part(self, start: int, count: int) -> Any:
        """A tensor of some of the elements."""
        where = self.start + start * self.dtype.itemsize
        return self.whole._create_view((count,), self.name, where)

    def write(self, values: Array, start: int = 0) -> None:
        where = self.start + start * self.dtype.itemsize
        self.bytes[where : where + values.nbytes] = np.ascontiguousarray(values).view("uint8")
        self.whole.copyfrom(self.bytes)

    def read(self) -> Array:
        """The values, after a look at the bytes around them."""
        now = self._now()
        around = np.concatenate([now[: self.start], now[self.end :]])
        assert (around == _CANARY).all(), "bytes outside of the output were written"
        return np.asarray(now[self.start : self.end].view(self.dtype))

    def unchanged(self) -> bool:
        return bool((self._now() == self.bytes).all())

    def _now(self) -> Array:
        places.settle()
        return np.asarray(self.whole.numpy())


class Member:
    """The calling worker as a member of a team: the world, its group, or its team of a division.

    It calls collectives of tvm_ipc, or posts them and waits.
    """

    def __init__(
        self, groups: int, in_group: bool, posts: bool = False, division: list[int] | None = None
    ) -> None:
        self.posts, self.work = posts, None
        self.rank = int(get_global_func("runtime.disco.worker_rank")())
        self.size = int(get_global_func("runtime.disco.world_size")())
        self.team: Any = in_group
        if in_group:
            self.size //= groups
        self.index = self.rank % self.size
        self.first = (
            self.rank - self.index
        )  #: of the ranks that count from there on; names the team
        if division:
            self.size, *ranks = division
            self.team, place = Shape(division), ranks.index(self.rank)
            self.index = place % self.size
            self.first = place - self.index

    def own(self, name: str) -> Any:
        """The function of a collective with flags, or what posts it."""
        function = f"tvm_ipc.{name}"
        if not self.posts:
            return get_global_func(function)

        def post(*arguments: Any) -> None:
            self.work = get_global_func("tvm_ipc.start")(function, *arguments)

        return post

    def run(self, case: Case) -> Array | None:
        """Do it, and check what came out and that nothing else changed."""
        memories = self.memories(case)
        for round_ in range(case.rounds):
            result = self.begin(replace(case, round=round_), *memories)()
        return result

    def begin(self, case: Case, send: Memory, recv: Memory) -> Callable[[], Array | None]:
        """Call it, or post it; what is returned waits if need be, and checks."""
        values = cases.inputs(case, self.size, self.first)[self.index]
        values = values[: cases.taken(case, self.size, self.index)]
        own_part = send is recv and case.operation in ("allgather", "gather")
        at = self.index * case.count if own_part else 0
        divides = case.operation in ("reduce_scatter", "scatter")
        to = self.index * case.count if send is recv and divides else 0
        send.write(values, at)
        do = {"ring": self._ring, "exchange": self._exchange}.get(case.operation, self._collective)
        do(
            case,
            send.part(at, len(values)) if self._sends(case) else None,
            recv.part(to, cases.given(case, self.size, self.index))
            if self._receives(case)
            else None,
        )
        work, self.work = self.work, None

        def finish() -> Array | None:
            if work is not None:
                get_global_func("tvm_ipc.wait")(work)
            return self._checked(case, send, recv, to)

        return finish

    def _checked(self, case: Case, send: Memory, recv: Memory, to: int) -> Array | None:
        if case.flags:
            # The promise was that the input stays until the next collective.
            one = places.tensor(np.zeros(1, "float32"))
            _disco("allreduce")(one, 0, self.team, one)
        if send is not recv:
            assert send.unchanged(), f"{case} on rank {self.rank}: the input was written"
        wanted = cases.expected(case, self.size, self.first, self.index)
        if wanted is None:
            return None
        result = recv.read()[to : to + len(wanted)]
        if not cases.same(result, wanted):
            where = np.flatnonzero(result.view("uint8") != wanted.view("uint8"))
            at = int(where[0]) // result.itemsize
            raise AssertionError(
                f"{case} on rank {self.rank}: element {at} is {result[at]!r}, "
                f"not {wanted[at]!r}; {len(where)} bytes of {result.nbytes} differ"
            )
        return result

    def _sends(self, case: Case) -> bool:
        kind = KINDS.get(case.operation)
        return not (kind and kind.source_on_root) or self.index == cases.root(case, self.size)

    def _receives(self, case: Case) -> bool:
        kind = KINDS.get(case.operation)
        return not (kind and kind.result_on_root) or self.index == cases.root(case, self.size)

    def memories(self, case: Case) -> tuple[Memory, Memory]:
        """Of input and output; the same if one is where its data belongs in the other."""
        in_arena = case.memory == "arena" or (case.memory == "mixed" and self.rank % 2 == 0)
        taken = cases.taken(case, self.size, self.index)
        results = cases.given(case, self.size, self.index)
        if case.in_place and self._sends(case) and self._receives(case):
            both = Memory(in_arena, case.dtype, max(taken, results), case.offset)
            return both, both
        return (
            Memory(in_arena, case.dtype, taken, case.offset),
            Memory(not in_arena, case.dtype, results, case.offset),
        )

    def _collective(self, case: Case, send: Any, recv: Any) -> None:
        kind = KINDS[case.operation.removesuffix("_parts")]
        as_disco = case.operation in cases.GATHERS and not case.rooted
        has_parts = case.operation == "all_to_all_parts"
        values = {
            "send": send,
            "kind": case.kind,
            "root": cases.root(case, self.size),
            "parts": Shape(cases.parts(case, self.size).reshape(-1).tolist() if has_parts else []),
            "sources": Shape(cases.sources(case, self.size)),
            "team": self.team,
            "strategy": case.strategy,
            "flags": case.flags,
            "recv": recv,
        }
        function = _disco(kind.disco) if as_disco else self.own(kind.name)
        signature = kind.function_of("shm") if as_disco else kind.function
        function(*(values[parameter.name] for parameter in signature.parameters))

    def _ring(self, case: Case, send: Any, recv: Any) -> None:
        if self.size == 1:
            recv.copyfrom(send)
            return
        after = self.first + (self.index + 1) % self.size
        before = self.first + (self.index - 1) % self.size
        if self.index % 2 == 0:
            _disco("send_to_worker")(send, after)
            _disco("recv_from_worker")(recv, before)
        else:
            _disco("recv_from_worker")(recv, before)
            _disco("send_to_worker")(send, after)

    def _exchange(self, case: Case, send: Any, recv: Any) -> None:
        other = cases.partner(self.size, self.index)
        if other == self.index:
            recv.copyfrom(send)
            return
        _disco("send_to_worker")(send, self.first + other)
        _disco("recv_from_worker")(recv, self.first + other)


def _disco(name: str) -> Any:
    return places.function(name)


@register_global_func("tests.run_collectives", override=True)
def run_collectives(groups: int, in_group: bool, plan: str, *arguments: Any) -> str:
    """Run the cases of a plan; return a digest of all results."""
    return _run(Member(groups, in_group), plan, *arguments)


@register_global_func("tests.post_collectives", override=True)
def async_collectives(groups: int, in_group: bool, plan: str, *arguments: Any) -> str:
    """Run the cases of a plan as works, as far as these are collectives with flags."""
    return _run(Member(groups, in_group, posts=True), plan, *arguments)


@register_global_func("tests.collectives_in_two_teams", override=True)
def collectives_in_two_teams(posts: bool, plan: str, *arguments: Any) -> int:
    """Run the cases of a plan along both axes of a mesh of 2 x 2; return how many there were."""
    divisions = [2, 0, 1, 2, 3], [2, 0, 2, 1, 3]
    members = [Member(1, False, posts, division) for division in divisions]
    done = 0
    for case in _cases(plan, 2, *arguments):
        memories = [member.memories(case) for member in members]
        for round_ in range(case.rounds):
            now = replace(case, round=round_)
            # Where they are posted, both are on their way at once.
            begun = [m.begin(now, *where) for m, where in zip(members, memories, strict=True)]
            done += len([finish() for finish in reversed(begun)])
    return done


def _cases(plan: str, *arguments: Any) -> Iterator[Case]:
    """The cases that the backend has, of `collective_cases` or of another module: `module.plan`."""
    module, _, name = plan.rpartition(".")
    backend = places.backend()
    for case in getattr(importlib.import_module(module or cases.__name__), name)(*arguments):
        if cases.runs_on(case.operation, backend):
            yield case


def _run(member: Member, plan: str, *arguments: Any) -> str:
    digest = hashlib.sha256()
    late = np.random.default_rng(member.rank)
    for case in _cases(plan, member.size, *arguments):
        if plan == "storm" and late.random() < 0.2:
            time.sleep(late.random() * 1e-3)
        result = member.run(case)
        if result is not None:
            digest.update(np.ascontiguousarray(result).view("uint8"))
    return digest.hexdigest()
