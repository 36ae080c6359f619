# SPDX-License-Identifier: Apache-2.0
"""The pass `AsyncCollectives`, which starts collectives early and waits for them late."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate
from math import inf
from operator import attrgetter
from typing import Final

import tvm
from tvm import relax

from tvm_ipc.analysis.alias_facts import (
    AliasFacts,
    Allocation,
    MemoryObject,
)
from tvm_ipc.analysis.binding_builders import ALLOC, do
from tvm_ipc.analysis.branch_collective_groups import Counterparts
from tvm_ipc.analysis.collective_calls import start_of
from tvm_ipc.analysis.find_aliases import ModuleAliasFacts
from tvm_ipc.analysis.memory_write_events import ModRef
from tvm_ipc.analysis.program_order import Region, Step
from tvm_ipc.analysis.stream_regions import stream_call
from tvm_ipc.analysis.views_and_writes_of_calls import viewed
from tvm_ipc.analysis.walk_and_rewrite_bindings import Edits, change_functions
from tvm_ipc.packed_functions import AllReduceStrategy, CollectiveFlag, Function
from tvm_ipc.packed_functions.collective_declarations import (
    ALLGATHER,
    ALLREDUCE,
    COLLECTIVES,
    DISCO_ALLGATHER,
    DISCO_ALLREDUCE,
)
from tvm_ipc.packed_functions.program_function_declarations import WAIT
from tvm_ipc.transform.gc_paused import gc_paused
from tvm_ipc.transform.module_pass import ModulePass, module_pass
from tvm_ipc.transform.report import Decision, note

_NAME: Final = "AsyncCollectives"
#: Values before which requests are waited for.
_BOUNDARIES: Final = (relax.If, relax.Function, relax.SeqExpr)
#: The asynchronous form of each packed function, by its name.
_ASYNC: Final[dict[str, Function]] = {
    DISCO_ALLREDUCE.name: ALLREDUCE,
    DISCO_ALLGATHER.name: ALLGATHER,
    **{
        function.name: function
        for function in COLLECTIVES
        if function.parameter_of_type("CollectiveFlag")
    },
}


@module_pass
class AsyncCollectives(ModulePass):
    """Start collectives asynchronously, and wait before the next use of their operands.

    Before:

        R.call_packed("runtime.disco.allreduce", x, R.shape([0]), False, y)
        cls.matmul(a, b, c)                     # neither uses y nor writes x
        cls.add(y, c, d)

    After:

        request = R.call_packed("tvm_ipc.start", "tvm_ipc.allreduce", x, 0, 0, 3, 0, y)
        cls.matmul(a, b, c)
        R.call_packed("tvm_ipc.wait", request)
        cls.add(y, c, d)

    No call is moved: a collective whose result is used by the next call is skipped, and the report
    gives the reason. The pass pays where links are slower than cores, or where a core is free for
    the thread that runs asynchronous collectives. On GPUs they run on a stream of their own, beside
    the kernels.

    The pass runs after `CallTIRRewrite`, before `IPCAllReduceRewrite` and `StaticPlanBlockMemory`.

    Examples
    --------
    >>> import tvm
    >>> from tvm.relax.transform import CallTIRRewrite, RemovePurityChecking, ToNonDataflow
    >>> from tvm_ipc.transform import AsyncCollectives, LegalizeOps
    >>> mod = tvm.script.from_source('''
    ... @I.ir_module
    ... class Model:
    ...     @R.function
    ...     def main(x: R.Tensor((4,), "float32"), a: R.Tensor((8, 8), "float32")):
    ...         y = R.ccl.allreduce(x, "sum")
    ...         b = R.matmul(a, a)
    ...         return (y, b)
    ... ''')
    >>> passes = [LegalizeOps(), ToNonDataflow(), RemovePurityChecking(), CallTIRRewrite()]
    >>> mod = tvm.transform.Sequential([*passes, AsyncCollectives()])(mod)
    >>> mod.script().count("tvm_ipc.start"), mod.script().count("tvm_ipc.wait")
    (1, 1)
    """

    @gc_paused()
    def apply(self, mod: tvm.IRModule) -> tvm.IRModule:
        """Return the module with asynchronous collectives."""
        module = ModuleAliasFacts(mod)
        writes = ModRef(module)
        counterparts = Counterparts(module)

        def changed(name: str, function: relax.Function) -> relax.Function:
            facts = module.of(name)
            if facts is None:
                return function
            matching = {step for group in counterparts.groups(facts.collectives) for step in group}
            matching |= {
                step for step in facts.collectives if counterparts.crosses_functions(name, step)
            }
            return _Starts(facts, writes, matching).insert()

        return change_functions(mod, changed)


class _Starts:
    """Starts the collectives of one function asynchronously."""

    def __init__(self, facts: AliasFacts, writes: ModRef, matching: set[Step]) -> None:
        self._facts, self._writes = facts, writes
        self._matching = matching  #: collectives that may match one in another branch
        self._regions: dict[Region, _Steps] = {}
        self._edits = Edits()
        # An asynchronous collective synchronizes in a team of its own, which is no barrier of the
        # program.
        collectives = [step.collective for step in facts.collectives]
        self._relies_on_barriers = any(
            collective is not None and collective.flags for collective in collectives
        )

    def insert(self) -> relax.Function:
        """Return the function with asynchronous collectives."""
        for step in self._facts.collectives:
            self._try_start(step)
        return self._edits.apply(self._facts.program.function)

    def _try_start(self, step: Step) -> None:
        collective = step.collective
        assert collective is not None
        function = _ASYNC.get(collective.function.name)
        if function is None:
            self._skip(step, "it has no asynchronous form")
            return
        if self._relies_on_barriers:
            self._skip(step, "inputs without an exit barrier rely on later barriers of the program")
            return
        if step in self._matching:
            self._skip(step, "ranks in another branch may make the call that it matches")
            return
        recv = self._objects_of(collective.operands(collective.function.writes))
        if not recv or not all(isinstance(root, Allocation) for root in recv):
            self._skip(step, "its output is not allocated in this function")
            return
        if kept := [root.kept for root in recv if root.kept is not None]:
            self._skip(step, f"its output may be used at any time: {kept[0]}")
            return
        send = self._objects_of(collective.operands(collective.function.reads))
        if step.region not in self._regions:
            self._regions[step.region] = _Steps(self._facts.program.steps[step.region])
        steps = self._regions[step.region]
        stop = steps.index_of(self._first_conflict(step, send, recv), after=step)
        between = steps.calls_between(step, stop)
        if step.in_dataflow or not between:
            self._skip(step, "the next call needs it")
            return
        # An explicit strategy is kept. `IPCAllReduceRewrite` sets its own where the strategy is
        # AUTO, for asynchronous collectives as well.
        strategy = collective.numbers.get("strategy", AllReduceStrategy.AUTO)
        numbers = {"strategy": strategy, "flags": CollectiveFlag.NONE}
        request = relax.Var(f"request_of_{step.var.name}", relax.AnyType())
        start = start_of(collective.as_call_of(function, numbers))
        self._edits.replace(step.var, [relax.VarBinding(request, start)])
        wait = do(relax.ExternFunc(WAIT.name), [request])
        if stop < len(steps.steps):
            self._edits.insert_before(steps.steps[stop].var, [wait])
        else:
            self._edits.insert_after(steps.steps[-1].var, [wait])
        reason = f"it overlaps with {between} call{'s' * (between != 1)}"
        note(Decision(_NAME, self._facts.program.name, str(collective), "asynchronous", reason))

    def _objects_of(self, operands: list[relax.Expr]) -> set[MemoryObject]:
        return {root for operand in operands for root in self._facts.objects(operand)}

    def _first_conflict(
        self, step: Step, send: set[MemoryObject], recv: set[MemoryObject]
    ) -> float:
        """Return the first point that uses the output of a collective or writes its input."""
        points = [inf]
        for root in recv:
            next_use = bisect_right(root.uses, step.index, key=attrgetter("point"))
            uses = (use.point for use in root.uses[next_use:] if viewed(use.step.value) is None)
            points.append(next(uses, inf))
        for written in self._writes.points(self._facts.program.name, send):
            points += written[bisect_right(written, step.index) :][:1]
        return min(points)

    def _skip(self, step: Step, reason: str) -> None:
        subject = str(step.collective)
        note(Decision(_NAME, self._facts.program.name, subject, "skipped", reason))


class _Steps:
    """The bindings of a region in program order."""

    def __init__(self, steps: list[Step]) -> None:
        self.steps = steps
        self._entries = [step.entry for step in steps]
        #: The indices of branches, local functions and calls that order streams, before which
        #: requests are waited for: a wait orders only the stream on which it is.
        self._boundaries = [
            k
            for k, step in enumerate(steps)
            if type(step.value) in _BOUNDARIES or stream_call(step) is not None
        ]
        self._num_calls = [0, *accumulate(map(_computes, steps))]

    def index_of(self, point: float, *, after: Step) -> int:
        """Return the index of the binding of a point, or of a boundary before it.

        The index after the last binding if there is neither.
        """
        index = bisect_right(self._boundaries, self._index(after))
        end = self._boundaries[index] if index < len(self._boundaries) else len(self.steps)
        if point > self.steps[-1].index:
            return end
        return min(end, bisect_right(self._entries, point) - 1)

    def calls_between(self, step: Step, stop: int) -> int:
        """Return the number of calls that take time between a binding and an index."""
        return self._num_calls[stop] - self._num_calls[self._index(step) + 1]

    def _index(self, step: Step) -> int:
        return bisect_left(self._entries, step.entry)


def _computes(step: Step) -> bool:
    """Return whether a binding calls something that takes time."""
    call = step.value
    if type(call) is not relax.Call or call.op.same_as(ALLOC) or viewed(call) is not None:
        return False
    return isinstance(call.op, (tvm.ir.GlobalVar, relax.ExternFunc)) and step.collective is None
