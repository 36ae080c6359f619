# SPDX-License-Identifier: Apache-2.0
"""Lets parts be made where they are joined, and hides what was shown when nobody reads it.

Before:
    part = R.builtin.alloc_tensor(R.shape([2, 8]), ...)
    cls.matmul(rows, w, part)
    whole = R.builtin.alloc_tensor(R.shape([4, 8]), ...)
    R.call_packed("tvm_ipc.join", 0, R.shape([1, 64, 0]), part, whole)

After:
    whole = R.builtin.alloc_tensor(R.shape([4, 8]), ...)
    part = R.call_packed("tvm_ipc.part", whole, 0, 1, 64, 0, R.shape([2, 8]))
    cls.matmul(rows, w, part)

A part stays apart, and is copied, where it is used for something else too, or where it would not
begin at a multiple of 64 bytes. What `tvm_ipc.show` shows is hidden after the last use of what
peers gave in return, that of several at once where they overlap; what the program hides itself is
left to it.

Runs after `CallTIRRewrite`, before `StaticPlanBlockMemory`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import tvm
import tvm_ffi
from tvm import relax, tirx

from tvm_ipc.contract.programs import HIDE, JOIN, KERNEL_ALIGNMENT, PART, PEER, SHOW
from tvm_ipc.transform.collection import no_collection
from tvm_ipc.transform.ir.aliases import ModuleFacts
from tvm_ipc.transform.ir.build import do
from tvm_ipc.transform.ir.program import Step
from tvm_ipc.transform.ir.rewrite import calls, change_functions, rewrite
from tvm_ipc.transform.ir.roots import Allocation, Facts
from tvm_ipc.transform.module_pass import module_pass
from tvm_ipc.transform.report import Decision, note

_NAME: Final = "PlaceParts"


@module_pass
class PlaceParts:
    """Make parts where they are joined, and hide what was shown after its last use."""

    def apply(self, mod: tvm.IRModule) -> tvm.IRModule:
        """Return the module with parts in their places."""
        names = {JOIN.name, SHOW.name}
        functions = [one for _, one in mod.functions_items() if isinstance(one, relax.Function)]
        if not any(_calls(call, *names) for one in functions for call in calls(one)):
            return mod
        with no_collection():
            facts = ModuleFacts(mod)

            def changed(name: str, function: relax.Function) -> relax.Function:
                found = facts.of(name)
                return function if found is None else _Parts(found).change()

            return change_functions(mod, changed)


def _calls(value: Any, *names: str) -> bool:
    is_packed = type(value) is relax.Call and isinstance(value.op, relax.ExternFunc)
    return is_packed and str(value.op.global_symbol) in names


@dataclass
class _Shown:
    """What was shown, and until where it is used."""

    team: relax.Expr
    first: Step
    last: Step
    variables: list[Any]


@dataclass
class _Parts:
    """One function, and what becomes of its bindings."""

    facts: Facts
    names: dict[int, Any] = field(default_factory=dict)  #: of which variables are other names
    before: defaultdict[int, list[relax.Binding]] = field(default_factory=lambda: defaultdict(list))
    after: defaultdict[int, list[relax.Binding]] = field(default_factory=lambda: defaultdict(list))
    instead: dict[int, relax.Binding | None] = field(default_factory=dict)

    def change(self) -> relax.Function:
        for step in self.facts.program.events:
            if isinstance(step.value, relax.Var):
                self.names[step.var.__chandle__()] = step.value
            if _calls(step.value, JOIN.name):
                self._place(step)
        for steps in self.facts.program.steps.values():
            self._hide(steps)

        def change(binding: relax.Binding, _: relax.Expr) -> Sequence[relax.Binding] | None:
            key = binding.var.__chandle__()
            if not (key in self.instead or key in self.before or key in self.after):
                return None
            here = self.instead.get(key, binding)
            kept = [] if here is None else [here]
            return [*self.before.get(key, ()), *kept, *self.after.get(key, ())]

        return rewrite(self.facts.program.function, change)

    # ---- parts ----------------------------------------------------------------------------

    def _place(self, join: Step) -> None:
        team, places, *parts, whole = join.value.args
        roots = [*self.facts.roots(whole)]
        root = roots[0] if len(roots) == 1 else None
        placed: list[Allocation] = []
        if isinstance(root, Allocation) and root.step.region is join.region:
            for k, part in enumerate(parts):
                place = places.values[3 * k : 3 * k + 3]
                allocation = self._own(part, join)
                if allocation is not None and allocation is not root and _aligned(place):
                    placed.append(allocation)
                    self._make_part(allocation, root, team, place)
        rest = [k for k, part in enumerate(parts) if self._own(part, join) not in placed]
        if isinstance(root, Allocation) and placed:
            self._move(root, min(placed, key=lambda one: one.step.index))
            self.instead[join.var.__chandle__()] = self._joined(join, rest) if rest else None
        verdict = f"{len(placed)} of {len(parts)} parts in their places"
        reason = "others are used otherwise, or begin where kernels do not expect it"
        reason = reason if rest else "nothing is copied"
        note(Decision(_NAME, self.facts.program.name, f"join of {whole}", verdict, reason))

    def _own(self, part: relax.Expr, join: Step) -> Allocation | None:
        """Return the allocation of a part, if nobody but who makes it and the join need it."""
        roots = self.facts.roots(part)
        root = next(iter(roots), None)
        if len(roots) != 1 or not isinstance(root, Allocation) or root.step.region != join.region:
            return None
        if root.kept is not None or root.returned or not self._named(part).same_as(root.step.var):
            return None
        shown = any(_calls(use.step.value, SHOW.name) for use in root.uses)
        apart = all(use.event <= join.index and use.region is join.region for use in root.uses)
        joins = sum(use.step is join for use in root.uses)
        return root if apart and joins == 1 and not shown else None

    def _named(self, part: Any) -> Any:
        """Return the variable of which a part is another name."""
        while part.__chandle__() in self.names:
            part = self.names[part.__chandle__()]
        return part

    def _make_part(
        self, allocation: Allocation, whole: Allocation, team: relax.Expr, place: Sequence[Any]
    ) -> None:
        step = allocation.step
        given = [whole.step.var, team, *map(relax.prim_value, place), step.value.args[0]]
        types = {"ty_args": [step.var.ty], "ret_ty": step.var.ty}
        call = relax.Call(relax.ExternFunc(PART.name), given, **types)
        self.instead[step.var.__chandle__()] = relax.VarBinding(step.var, call)

    def _move(self, whole: Allocation, first: Allocation) -> None:
        """Allocate what parts are joined in before the first one."""
        if whole.step.index > first.step.index:
            self.instead[whole.step.var.__chandle__()] = None
            self.before[first.step.var.__chandle__()].append(whole.step.binding)

    def _joined(self, join: Step, rest: list[int]) -> relax.Binding:
        team, places, *parts, whole = join.value.args
        left = [one for k in rest for one in places.values[3 * k : 3 * k + 3]]
        given = [team, relax.ShapeExpr(left), *(parts[k] for k in rest), whole]
        return do(relax.ExternFunc(JOIN.name), given)

    # ---- what is shown --------------------------------------------------------------------

    def _hide(self, steps: list[Step]) -> None:
        groups: list[_Shown] = []
        for one in self._shown(steps):
            joined = [other for other in groups if _together(one, other)]
            for other in joined:
                one.last = max(one.last, other.last, key=lambda step: step.index)
                one.variables = [*other.variables, *one.variables]
            groups = [*(other for other in groups if other not in joined), one]
        for one in groups:
            hide = do(relax.ExternFunc(HIDE.name), [one.team, *one.variables])
            self.after[one.last.var.__chandle__()].append(hide)

    def _shown(self, steps: list[Step]) -> list[_Shown]:
        """Return what is shown in a region and not hidden, with its last use."""
        of: dict[int, _Shown] = {}  # by variables that are it, or rows of it
        hidden: list[_Shown] = []
        for step in steps:
            value = step.value
            used = [of[one] for one in _variables(value) if one in of]
            for one in used:
                one.last = step
            if _calls(value, SHOW.name):
                of[step.var.__chandle__()] = _Shown(value.args[1], step, step, [step.var])
            elif _calls(value, HIDE.name):
                hidden += used
            elif used and (_calls(value, PEER.name) or type(value) is not relax.Call):
                of[step.var.__chandle__()] = used[0]
        found = list({id(one): one for one in of.values()}.values())
        return [one for one in found if not any(one is other for other in hidden)]


def _variables(value: Any) -> list[int]:
    """Return the variables that an expression uses."""
    if type(value) is relax.Call:
        return [key for argument in value.args[:] for key in _variables(argument)]
    if type(value) is relax.Tuple:
        return [key for part in value.fields[:] for key in _variables(part)]
    if isinstance(value, relax.Var):
        return [value.__chandle__()]
    if type(value) in (relax.If, relax.Function, relax.TupleGetItem):
        return [one.__chandle__() for one in relax.analysis.free_vars(value)]
    return []


def _together(one: _Shown, other: _Shown) -> bool:
    apart = one.last.index < other.first.index or other.last.index < one.first.index
    return not apart and tvm_ffi.structural_equal(one.team, other.team)


def _aligned(place: Sequence[Any]) -> bool:
    """Whether a part certainly begins where kernels expect it."""
    _, stride, offset = place
    analyzer = tvm.sym.Analyzer()
    strides = [] if analyzer.can_prove_equal(stride, 0) else [stride]
    return all(
        analyzer.can_prove_equal(tirx.floormod(one, KERNEL_ALIGNMENT), 0)
        for one in (*strides, offset)
    )
