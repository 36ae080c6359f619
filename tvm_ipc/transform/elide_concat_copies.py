# SPDX-License-Identifier: Apache-2.0
"""The pass `ElideConcatCopies`, which removes concatenation copies and releases exposed tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import tvm
import tvm_ffi
from tvm import relax, tirx

from tvm_ipc.analysis.alias_facts import AliasFacts, Allocation
from tvm_ipc.analysis.binding_builders import do
from tvm_ipc.analysis.find_aliases import ModuleAliasFacts
from tvm_ipc.analysis.program_order import Step
from tvm_ipc.analysis.uses import variables_in
from tvm_ipc.analysis.views_and_writes_of_calls import name_of_callee
from tvm_ipc.analysis.walk_and_rewrite_bindings import (
    Edits,
    calls,
    change_functions,
    relax_functions,
)
from tvm_ipc.packed_functions.program_function_declarations import (
    ASSEMBLE,
    EXPOSE,
    KERNEL_ALIGNMENT,
    NO_ALIAS,
    OWN_SLICE,
    PEER_VIEW,
    RELEASE,
)
from tvm_ipc.transform.gc_paused import gc_paused
from tvm_ipc.transform.module_pass import ModulePass, module_pass
from tvm_ipc.transform.report import Decision, note
from tvm_ipc.tvm_moved_names import Analyzer

_NAME: Final = "ElideConcatCopies"


@module_pass
class ElideConcatCopies(ModulePass):
    """Compute slices directly in the buffer that concatenates them, and release exposed tensors.

    Before:

        part = R.builtin.alloc_tensor(R.shape([2, 8]), ...)
        cls.matmul(rows, w, part)
        whole = R.builtin.alloc_tensor(R.shape([4, 8]), ...)
        R.call_packed("tvm_ipc.assemble", 0, R.shape([1, 64, 0]), part, whole)

    After:

        whole = R.builtin.alloc_tensor(R.shape([4, 8]), ...)
        part = R.call_packed("tvm_ipc.own_slice", whole, 0, 1, 64, 0, R.shape([2, 8]))
        cls.matmul(rows, w, part)

    A slice keeps its own buffer, and is copied, if it has other uses or would not start at a
    multiple of 64 bytes.

    Each tensor that `tvm_ipc.expose` exposes is released after the last use of its peer views.
    Tensors whose lifetimes overlap are released together. Tensors that the program releases itself
    are skipped.

    Run this pass after `CallTIRRewrite` and before `StaticPlanBlockMemory`.

    Examples
    --------
    `OverlapCommunication` computes the parts of a matmul separately, and concatenates them:

    >>> import tvm
    >>> from tvm.relax.transform import CallTIRRewrite, RemovePurityChecking, ToNonDataflow
    >>> from tvm_ipc.transform import ElideConcatCopies, LegalizeOps, OverlapCommunication
    >>> mod = tvm.script.from_source('''
    ... @I.ir_module
    ... class Model:
    ...     @R.function
    ...     def main(x: R.Tensor((64, 32), "float32"), w: R.Tensor((32, 16), "float32")):
    ...         whole = R.comm.allgather(x, workers=2)
    ...         y = R.matmul(whole, w)
    ...         return y
    ... ''')
    >>> passes = [LegalizeOps(), ToNonDataflow(), RemovePurityChecking(), CallTIRRewrite()]
    >>> mod = tvm.transform.Sequential([OverlapCommunication(chunks=1), *passes])(mod)
    >>> "tvm_ipc.assemble" in mod.script()
    True
    >>> "tvm_ipc.assemble" in ElideConcatCopies()(mod).script()
    False
    """

    @gc_paused()
    def apply(self, mod: tvm.IRModule) -> tvm.IRModule:
        """Return the module without the copies, and with the releases."""
        names = {ASSEMBLE.name, EXPOSE.name}
        every_call = (call for _, function in relax_functions(mod) for call in calls(function))
        if not any(_calls(call, *names) for call in every_call):
            return mod
        module_facts = ModuleAliasFacts(mod)

        def change(name: str, function: relax.Function) -> relax.Function:
            facts = module_facts.of(name)
            return function if facts is None else _Elision(facts).change()

        return change_functions(mod, change)


def _calls(value: Any, *names: str) -> bool:
    """Return whether an expression is a call of one of the packed functions."""
    return type(value) is relax.Call and name_of_callee(value.op) in names


@dataclass(eq=False)
class _Exposed:
    """An exposed tensor, or several that are released together."""

    team: relax.Expr
    first: Step  #: the step that exposes it
    last: Step  #: the last use of it or of its peer views
    variables: list[Any]


@dataclass(eq=False)
class _Elision:
    """The changes of one function."""

    facts: AliasFacts
    edits: Edits = field(default_factory=Edits)
    #: By address of a variable, the variable that it is another name of.
    aliases: dict[int, Any] = field(default_factory=dict)

    def change(self) -> relax.Function:
        """Return the changed function."""
        for step in self.facts.program.points:
            if isinstance(step.value, relax.Var):
                self.aliases[step.var.__chandle__()] = step.value
            if _calls(step.value, ASSEMBLE.name):
                self._elide_copies(step)
        for steps in self.facts.program.steps.values():
            self._add_releases(steps)
        return self.edits.apply(self.facts.program.function)

    # Concatenations.

    def _elide_copies(self, assembly: Step) -> None:
        """Replace the buffers of the slices of a concatenation by slices of its result."""
        team, positions, *slices, whole = assembly.value.args
        objects = [*self.facts.objects(whole)]
        result = objects[0] if len(objects) == 1 else None
        is_local = isinstance(result, Allocation) and result.step.region is assembly.region
        elided: list[Allocation] = []
        if is_local or self._is_only_assembled(whole, assembly):
            buffer = result.step.var if isinstance(result, Allocation) else whole
            for k, slice_ in enumerate(slices):
                position = positions.values[3 * k : 3 * k + 3]
                allocation = self._own_buffer(slice_, assembly)
                if allocation is not None and allocation is not result and _is_aligned(position):
                    elided.append(allocation)
                    self._replace_by_slice(allocation, buffer, team, position)
        copied = [k for k, x in enumerate(slices) if self._own_buffer(x, assembly) not in elided]
        if elided:
            if isinstance(result, Allocation):
                self._allocate_before(result, min(elided, key=lambda item: item.step.index))
            remaining = [self._assemble_only(assembly, copied)] if copied else []
            self.edits.replace(assembly.var, remaining)
        verdict = f"{len(elided)} of {len(slices)} slices in place"
        reason = "the others have other uses, or would not be aligned for kernels"
        reason = reason if copied else "nothing is copied"
        note(Decision(_NAME, self.facts.program.name, f"assemble of {whole}", verdict, reason))

    def _is_only_assembled(self, whole: relax.Expr, assembly: Step) -> bool:
        """Return whether a tensor is a parameter that aliases no other and is only assembled."""
        function = self.facts.program.function
        names = {str(name) for name in (function.attrs or {}).get(NO_ALIAS, ())}
        if not any(whole.same_as(param) and param.name in names for param in function.params):
            return False
        users = (
            step
            for step in self.facts.program.points
            if any(variable.same_as(whole) for variable in variables_in(step.value))
        )
        # Assembled slices do not overlap, so that their order does not matter.
        return all(
            _calls(step.value, ASSEMBLE.name) and step.region is assembly.region for step in users
        )

    def _own_buffer(self, slice_: relax.Expr, assembly: Step) -> Allocation | None:
        """Return the allocation of a slice if only its producer and the assembly use it."""
        objects = self.facts.objects(slice_)
        allocation = next(iter(objects), None)
        if (
            len(objects) != 1
            or not isinstance(allocation, Allocation)
            or allocation.step.region != assembly.region
        ):
            return None
        if (
            allocation.kept is not None
            or allocation.returned
            or not self._resolve_alias(slice_).same_as(allocation.step.var)
        ):
            return None
        is_exposed = any(_calls(use.step.value, EXPOSE.name) for use in allocation.uses)
        no_later_use = all(
            use.point <= assembly.index and use.region is assembly.region for use in allocation.uses
        )
        assemblies = sum(use.step is assembly for use in allocation.uses)
        return allocation if no_later_use and assemblies == 1 and not is_exposed else None

    def _resolve_alias(self, var: Any) -> Any:
        """Return the variable that a variable is another name of."""
        while var.__chandle__() in self.aliases:
            var = self.aliases[var.__chandle__()]
        return var

    def _replace_by_slice(
        self, allocation: Allocation, whole: relax.Expr, team: relax.Expr, position: Sequence[Any]
    ) -> None:
        """Replace an allocation by a slice of the concatenation."""
        step = allocation.step
        arguments = [whole, team, *map(relax.prim_value, position), step.value.args[0]]
        types = {"ty_args": [step.var.ty], "ret_ty": step.var.ty}
        call = relax.Call(relax.ExternFunc(OWN_SLICE.name), arguments, **types)
        self.edits.replace(step.var, [relax.VarBinding(step.var, call)])

    def _allocate_before(self, whole: Allocation, first: Allocation) -> None:
        """Move the allocation of the concatenation before the one of its first slice."""
        if whole.step.index > first.step.index:
            self.edits.replace(whole.step.var, [])
            self.edits.insert_before(first.step.var, [whole.step.binding])

    def _assemble_only(self, assembly: Step, copied: list[int]) -> relax.Binding:
        """Return the concatenation with only the slices that are still copied."""
        team, positions, *slices, whole = assembly.value.args
        remaining = [value for k in copied for value in positions.values[3 * k : 3 * k + 3]]
        arguments = [team, relax.ShapeExpr(remaining), *(slices[k] for k in copied), whole]
        return do(relax.ExternFunc(ASSEMBLE.name), arguments)

    # Exposed tensors.

    def _add_releases(self, steps: list[Step]) -> None:
        """Release the tensors that are exposed in a region after their last use."""
        groups: list[_Exposed] = []
        for exposed in self._unreleased(steps):
            merged = [group for group in groups if _overlap(exposed, group)]
            for group in merged:
                exposed.last = max(exposed.last, group.last, key=lambda step: step.index)
                exposed.variables = [*group.variables, *exposed.variables]
            groups = [*(group for group in groups if group not in merged), exposed]
        for group in groups:
            release = do(relax.ExternFunc(RELEASE.name), [group.team, *group.variables])
            self.edits.insert_after(group.last.var, [release])

    def _unreleased(self, steps: list[Step]) -> list[_Exposed]:
        """Return the tensors that a region exposes and does not release, with their last uses."""
        exposed_of: dict[int, _Exposed] = {}  # by variable, also of peer views
        released: list[_Exposed] = []
        for step in steps:
            value = step.value
            keys = [variable.__chandle__() for variable in variables_in(value)]
            used = [exposed_of[key] for key in keys if key in exposed_of]
            for exposed in used:
                exposed.last = step
            if _calls(value, EXPOSE.name):
                exposed = _Exposed(value.args[1], step, step, [step.var])
                exposed_of[step.var.__chandle__()] = exposed
            elif _calls(value, RELEASE.name):
                released += used
            elif used and (_calls(value, PEER_VIEW.name) or type(value) is not relax.Call):
                exposed_of[step.var.__chandle__()] = used[0]
        unique = list({id(exposed): exposed for exposed in exposed_of.values()}.values())
        return [exposed for exposed in unique if not any(exposed is item for item in released)]


def _overlap(left: _Exposed, right: _Exposed) -> bool:
    """Return whether the lifetimes of exposed tensors of one team overlap."""
    disjoint = left.last.index < right.first.index or right.last.index < left.first.index
    return not disjoint and tvm_ffi.structural_equal(left.team, right.team)


def _is_aligned(position: Sequence[Any]) -> bool:
    """Return whether a slice provably starts at the alignment that kernels expect."""
    _, stride, offset = position
    analyzer = Analyzer()
    strides = [] if analyzer.can_prove_equal(stride, 0) else [stride]
    return all(
        analyzer.can_prove_equal(tirx.floormod(value, KERNEL_ALIGNMENT), 0)
        for value in (*strides, offset)
    )
