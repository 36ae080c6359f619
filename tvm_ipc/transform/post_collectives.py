# SPDX-License-Identifier: Apache-2.0
"""Posts collectives, and waits where what they use is used next: what is between goes on meanwhile.

Before:
    R.call_packed("runtime.disco.allreduce", x, R.shape([0]), False, y)
    cls.matmul(a, b, c)                     # neither reads y nor writes x
    cls.add(y, c, d)

After:
    work = R.call_packed("tvm_ipc.post", "tvm_ipc.allreduce", x, 0, 0, 3, 0, y)
    cls.matmul(a, b, c)
    R.call_packed("tvm_ipc.wait", work)
    cls.add(y, c, d)

Nothing changes its place: a collective whose result is used at once stays as it is, with a note in
the report. It pays where links are slower than cores, or where there is a core for the thread that
does works.

Runs after `CallTIRRewrite`, before `IPCAllReduceRewrite` and `StaticPlanBlockMemory`.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Final

import tvm
from tvm import relax

from tvm_ipc.comm.kinds import KINDS
from tvm_ipc.contract import AllReduceStrategy, CollectiveFlag, Function
from tvm_ipc.contract.collectives import (
    ALLGATHER,
    ALLREDUCE,
    DISCO_ALLGATHER,
    DISCO_ALLREDUCE,
)
from tvm_ipc.contract.programs import WAIT
from tvm_ipc.transform.collection import no_collection
from tvm_ipc.transform.ir.aliases import ModuleFacts
from tvm_ipc.transform.ir.build import ALLOC, do
from tvm_ipc.transform.ir.collectives import post_of
from tvm_ipc.transform.ir.program import Step
from tvm_ipc.transform.ir.rewrite import change_functions, rewrite
from tvm_ipc.transform.ir.roots import Allocation, Facts
from tvm_ipc.transform.module_pass import module_pass
from tvm_ipc.transform.report import Decision, note

_NAME: Final = "PostCollectives"
#: What is posted, by the name of what a program calls.
_POSTED: Final[dict[str, Function]] = {
    DISCO_ALLREDUCE.name: ALLREDUCE,
    DISCO_ALLGATHER.name: ALLGATHER,
    **{
        kind.function.name: kind.function
        for kind in KINDS.values()
        if kind.function.named("CollectiveFlag")
    },
}


@module_pass
class PostCollectives:
    """Post collectives behind which something follows that does not need them."""

    def apply(self, mod: tvm.IRModule) -> tvm.IRModule:
        """Return the module with works, and waits for them."""
        with no_collection():
            facts = ModuleFacts(mod)

            def changed(name: str, function: relax.Function) -> relax.Function:
                found = facts.of(name)
                return function if found is None else _Works(found).post()

            return change_functions(mod, changed)


class _Works:
    """The works of one function."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
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
        recv = collective.operands(collective.function.writes)
        roots = [root for one in recv for root in self._facts.roots(one)]
        if not roots or not all(isinstance(root, Allocation) for root in roots):
            self._leave(step, "its output is not allocated in this function")
            return
        used = [*recv, *collective.operands(collective.function.reads)]
        later = self._facts.program.steps[step.region]
        later = later[later.index(step) + 1 :]
        stop = next((k for k, other in enumerate(later) if self._touches(other, used)), len(later))
        between = sum(map(_computes, later[:stop]))
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
        if stop < len(later):
            self._before[later[stop].var.__chandle__()].append(wait)
        else:
            self._after[later[-1].var.__chandle__()].append(wait)
        reason = f"{between} calls go on meanwhile"
        note(Decision(_NAME, self._facts.program.name, str(collective), "posted", reason))

    def _touches(self, step: Step, used: list[relax.Expr]) -> bool:
        """Whether a binding may use memory that a work uses."""
        value = step.value
        if type(value) in (relax.If, relax.Function, relax.SeqExpr):
            return True
        if type(value) is not relax.Call:
            return False  # another name for what there is
        arguments: list[Any] = []
        for argument in value.args[:]:
            arguments += argument.fields[:] if type(argument) is relax.Tuple else [argument]
        may_be_same = self._facts.may_be_same
        return any(may_be_same(one, other) for one in arguments for other in used)

    def _leave(self, step: Step, reason: str) -> None:
        subject = str(step.collective)
        note(Decision(_NAME, self._facts.program.name, subject, "left alone", reason))


def _computes(step: Step) -> bool:
    """Whether a binding does something that takes its time."""
    call = step.value
    if type(call) is not relax.Call or call.op.same_as(ALLOC):
        return False
    return isinstance(call.op, (tvm.ir.GlobalVar, relax.ExternFunc)) and step.collective is None
