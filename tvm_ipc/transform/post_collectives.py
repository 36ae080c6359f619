# SPDX-License-Identifier: Apache-2.0
"""Posts collectives, and waits where what they use is used next: what is between goes on meanwhile.

Before:
    R.call_packed("runtime.disco.allreduce", x, R.shape([0]), False, y)
    cls.matmul(a, b, c)                     # neither uses y nor writes x
    cls.add(y, c, d)

After:
    work = R.call_packed("tvm_ipc.post", "tvm_ipc.allreduce", x, 0, 0, 3, 0, y)
    cls.matmul(a, b, c)
    R.call_packed("tvm_ipc.wait", work)
    cls.add(y, c, d)

Nothing changes its place: a collective whose result is used at once stays as it is, with a note in
the report. It pays where links are slower than cores, or where there is a core for the thread that
does works; on GPUs, where works are on another stream, what takes their time goes on beside them.

Runs after `CallTIRRewrite`, before `IPCAllReduceRewrite` and `StaticPlanBlockMemory`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection
from itertools import accumulate
from math import inf
from typing import Final

import tvm
from tvm import relax

from tvm_ipc.contract import AllReduceStrategy, CollectiveFlag, Function, find
from tvm_ipc.contract.collectives import (
    ALLGATHER,
    ALLREDUCE,
    COLLECTIVES,
    DISCO_ALLGATHER,
    DISCO_ALLREDUCE,
)
from tvm_ipc.contract.programs import WAIT
from tvm_ipc.transform.collection import no_collection
from tvm_ipc.transform.ir.aliases import ModuleFacts
from tvm_ipc.transform.ir.build import ALLOC, do
from tvm_ipc.transform.ir.collectives import post_of
from tvm_ipc.transform.ir.prim_funcs import BufferParameter, find_parameters
from tvm_ipc.transform.ir.program import Region, Step
from tvm_ipc.transform.ir.rewrite import change_functions, rewrite
from tvm_ipc.transform.ir.roots import Allocation, Facts, Root, Use
from tvm_ipc.transform.ir.views import VIEWS
from tvm_ipc.transform.ir.writes import Writes
from tvm_ipc.transform.module_pass import module_pass
from tvm_ipc.transform.report import Decision, note

_NAME: Final = "PostCollectives"
_WALLS: Final = (relax.If, relax.Function, relax.SeqExpr)
#: What is posted, by the name of what a program calls.
_POSTED: Final[dict[str, Function]] = {
    DISCO_ALLREDUCE.name: ALLREDUCE,
    DISCO_ALLGATHER.name: ALLGATHER,
    **{one.name: one for one in COLLECTIVES if one.named("CollectiveFlag")},
}


@module_pass
class PostCollectives:
    """Post collectives behind which something follows that does not need them."""

    def apply(self, mod: tvm.IRModule) -> tvm.IRModule:
        """Return the module with works, and waits for them."""
        with no_collection():
            module = ModuleFacts(mod)
            writes = Writes(module, _Kernels(mod).may_write, _written)

            def changed(name: str, function: relax.Function) -> relax.Function:
                facts = module.of(name)
                return function if facts is None else _Works(facts, writes).post()

            return change_functions(mod, changed)


class _Works:
    """The works of one function."""

    def __init__(self, facts: Facts, writes: Writes) -> None:
        self._facts, self._writes = facts, writes
        self._regions: dict[Region, _Steps] = {}
        self._posts: dict[int, relax.Binding] = {}  #: by the variable of the collective
        self._before: defaultdict[int, list[relax.Binding]] = defaultdict(list)
        self._after: defaultdict[int, list[relax.Binding]] = defaultdict(list)
        # Works meet in teams of their own, which tell the program nothing.
        collectives = [step.collective for step in facts.collectives]
        self._relies_on_meetings = any(one is not None and one.flags for one in collectives)

    def post(self) -> relax.Function:
        """Return the function with works."""
        for step in self._facts.collectives:
            self._consider(step)
        if not self._posts:
            return self._facts.program.function

        def change(binding: relax.Binding, _: relax.Expr) -> list[relax.Binding] | None:
            key = binding.var.__chandle__()
            if not (key in self._posts or key in self._before or key in self._after):
                return None
            here = self._posts.get(key, binding)
            return [*self._before.get(key, ()), here, *self._after.get(key, ())]

        return rewrite(self._facts.program.function, change)

    def _consider(self, step: Step) -> None:
        collective = step.collective
        assert collective is not None
        function = _POSTED.get(collective.function.name)
        if function is None:
            self._leave(step, "no thread does it beside a program")
            return
        if self._relies_on_meetings:
            self._leave(step, "inputs without an exit barrier rely on the meetings of the program")
            return
        recv = self._roots(collective.operands(collective.function.writes))
        if not recv or not all(isinstance(root, Allocation) for root in recv):
            self._leave(step, "its output is not allocated in this function")
            return
        if kept := [root.kept for root in recv if root.kept is not None]:
            self._leave(step, f"its output may be used at any time: {kept[0]}")
            return
        send = self._roots(collective.operands(collective.function.reads))
        if step.region not in self._regions:
            self._regions[step.region] = _Steps(self._facts.program.steps[step.region])
        here = self._regions[step.region]
        stop = here.place_of(self._needed(step, send, recv), after=step)
        between = here.calls_between(step, stop)
        if type(step.region.blocks[step.block]) is relax.DataflowBlock or not between:
            self._leave(step, "what follows needs it")
            return
        # A strategy that is said stays; `IPCAllReduceRewrite` gives its own to those that leave it
        # open, posted or not.
        strategy = collective.numbers.get("strategy", AllReduceStrategy.AUTO)
        given = {"strategy": strategy, "flags": CollectiveFlag.NONE}
        work = relax.Var(f"work_of_{step.var.name}", relax.AnyType())
        posted = post_of(collective.as_call_of(function, given))
        self._posts[step.var.__chandle__()] = relax.VarBinding(work, posted)
        wait = do(relax.ExternFunc(WAIT.name), [work])
        if stop < len(here.steps):
            self._before[here.steps[stop].var.__chandle__()].append(wait)
        else:
            self._after[here.steps[-1].var.__chandle__()].append(wait)
        reason = f"{between} calls go on meanwhile"
        note(Decision(_NAME, self._facts.program.name, str(collective), "posted", reason))

    def _roots(self, operands: list[relax.Expr]) -> set[Root]:
        return {root for one in operands for root in self._facts.roots(one)}

    def _needed(self, step: Step, send: set[Root], recv: set[Root]) -> float:
        """Return the first event that uses what a work writes, or writes what it reads."""
        events = [inf]
        for root in recv:
            later = bisect_right(root.uses, step.index, key=_event)
            used = (use.event for use in root.uses[later:] if not _is_view(use.step.value))
            events.append(next(used, inf))
        for written in self._writes.events(self._facts.program.name, send):
            events += written[bisect_right(written, step.index) :][:1]
        return min(events)

    def _leave(self, step: Step, reason: str) -> None:
        subject = str(step.collective)
        note(Decision(_NAME, self._facts.program.name, subject, "left alone", reason))


class _Steps:
    """The bindings of a region in their order."""

    def __init__(self, steps: list[Step]) -> None:
        self.steps = steps
        self._begins = [step.entry for step in steps]
        #: Places of branches and local functions, which works are waited for before.
        self._walls = [k for k, step in enumerate(steps) if type(step.value) in _WALLS]
        self._calls = [0, *accumulate(map(_computes, steps))]

    def place_of(self, event: float, *, after: Step) -> int:
        """Return the place of what holds an event, or of a wall before; the end if none does."""
        wall = bisect_right(self._walls, self._place(after))
        end = self._walls[wall] if wall < len(self._walls) else len(self.steps)
        if event > self.steps[-1].index:
            return end
        return min(end, bisect_right(self._begins, event) - 1)

    def calls_between(self, step: Step, stop: int) -> int:
        """Return how many calls between a binding and a place take their time."""
        return self._calls[stop] - self._calls[self._place(step) + 1]

    def _place(self, step: Step) -> int:
        return bisect_left(self._begins, step.entry)


class _Kernels:
    """The PrimFuncs of a module, and which parameters they may write."""

    def __init__(self, mod: tvm.IRModule) -> None:
        self._mod = mod
        self._known: dict[str, list[BufferParameter]] = {}

    def may_write(self, name: str, place: int) -> bool:
        """Whether a PrimFunc may write a parameter."""
        if name not in self._known:
            self._known[name] = find_parameters(self._mod[name])
        return self._known[name][place].may_be_written


def _written(callee: relax.ExternFunc, count: int) -> Collection[int] | None:
    """Return the places of the arguments that a packed function may write, None for all."""
    function = find(str(callee.global_symbol))
    return None if function is None else function.written(count)


def _event(use: Use) -> int:
    return use.event


def _is_view(value: relax.Expr) -> bool:
    """Whether a call of a packed function only gives another name to memory."""
    called = type(value) is relax.Call and type(value.op) is relax.ExternFunc
    return called and str(value.op.global_symbol) in VIEWS


def _computes(step: Step) -> bool:
    """Whether a binding does something that takes its time."""
    call = step.value
    if type(call) is not relax.Call or call.op.same_as(ALLOC) or _is_view(call):
        return False
    return isinstance(call.op, (tvm.ir.GlobalVar, relax.ExternFunc)) and step.collective is None
