# SPDX-License-Identifier: Apache-2.0
"""Applies a plan to Relax functions: allocation scopes, copies, calls of specialised functions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import tvm
from tvm import relax

from tvm_ipc.analysis.binding_builders import (
    ALLOC,
    device_of,
    emit,
    emit_alloc,
    emit_call,
    get,
    match_shape,
    replace_call,
    with_scope,
)
from tvm_ipc.analysis.ffi_arrays import as_list
from tvm_ipc.analysis.program_order import Region, Step
from tvm_ipc.analysis.walk_and_rewrite_bindings import rewrite, with_value
from tvm_ipc.errors import TransformError
from tvm_ipc.packed_functions.program_function_declarations import COPY
from tvm_ipc.transform.memory_scopes.constraint_types import ScopedFunction, TensorRoot
from tvm_ipc.transform.memory_scopes.copy_sites import Copy, CopyPlan
from tvm_ipc.transform.memory_scopes.operator_scope_demands import GLOBAL
from tvm_ipc.transform.memory_scopes.solve import PLAIN, Solution
from tvm_ipc.transform.memory_scopes.specialise_primfuncs_for_scopes import SpecialisedCalls


@dataclass(eq=False)
class _Edit:
    """The changes at a step, or at the end of a region."""

    function: ScopedFunction
    step: Step | None  #: None: the end of the region
    before: list[Copy] = field(default_factory=list)  #: copies to insert before the step
    operands: dict[tuple[int, ...], Copy] = field(default_factory=dict)  #: by path, to replace
    around: list[Copy] = field(default_factory=list)  #: copies that are copied back afterwards
    results: list[Copy] = field(default_factory=list)  #: copies of results
    scope: str | None = None  #: the new scope of an allocation
    callee: tvm.ir.GlobalVar | None = None  #: the specialised PrimFunc to call
    hint: bool = False  #: whether the step is a hint, which its operand replaces


class Rewriter:
    """Applies a plan to the Relax functions of a module.

    The constructor raises a TransformError if the plan cannot be applied, before any change.
    """

    def __init__(self, solution: Solution, plan: CopyPlan, specialised: SpecialisedCalls) -> None:
        self._devices = list(solution.program.module.global_infos.get("vdevice", []))
        self._copies: dict[int, relax.Var] = {}
        #: By global function, then by hash of a variable or of a sequence.
        self._edits: dict[ScopedFunction, dict[int, _Edit]] = {}
        for copy in plan.copies:
            self._at(copy.function, copy.region, copy.step).before.append(copy)
            for use in copy.uses:
                self._at(use.function, use.region, use.step).operands[use.path] = copy
        for copy in plan.around:
            self._at(copy.function, copy.region, copy.step).around.append(copy)
        for copy in plan.results:
            self._at(copy.function, copy.region, copy.step).results.append(copy)
        program = solution.program
        for leaf, sites in program.allocs.items():
            scope = solution.scopes[leaf]
            for function, step in sites:
                if scope not in (PLAIN, GLOBAL) and _scope_of(step) != scope:
                    self._at(function, step.region, step).scope = scope
        for leaf, function, step in program.misplaced:
            self._at(function, step.region, step).scope = solution.scopes[leaf] or GLOBAL
        for (function, step), callee in specialised.callees.items():
            self._at(function, step.region, step).callee = callee
        for function, step in program.hints:
            self._at(function, step.region, step).hint = True
        for copy in [*plan.copies, *plan.around, *plan.results]:
            _check_type(copy)
        for edits in self._edits.values():
            for edit in edits.values():
                _check_copy_site(edit)

    def functions(self) -> Iterator[tuple[str, relax.Function]]:
        """Yield the names of the global functions that change, and the new functions."""
        for facts, edits in self._edits.items():

            def change(
                binding: relax.Binding, _: relax.Expr, edits: dict[int, _Edit] = edits
            ) -> list[relax.Binding] | None:
                edit = edits.get(hash(binding.var))
                return self._rewrite_binding(edit, binding) if edit is not None else None

            def end(
                sequence: relax.SeqExpr, edits: dict[int, _Edit] = edits
            ) -> tuple[list[relax.Binding], relax.Expr] | None:
                edit = edits.get(hash(sequence))
                return self._rewrite_end(edit, sequence) if edit is not None else None

            yield facts.name, rewrite(facts.function, change, end)

    def _at(self, function: ScopedFunction, region: Region, step: Step | None) -> _Edit:
        """Return the edit of a step, or of the end of a region if `step` is None."""
        target = region.body if step is None else step.var
        outermost = function
        while outermost.outer is not None:
            outermost = outermost.outer
        edits = self._edits.setdefault(outermost, {})
        return edits.setdefault(hash(target), _Edit(function, step))

    def _rewrite_end(
        self, edit: _Edit, sequence: relax.SeqExpr
    ) -> tuple[list[relax.Binding], relax.Expr]:
        """Return the bindings to add at the end of a sequence, and its new result."""
        out: list[relax.Binding] = []
        for copy in edit.before:
            self._emit_copy(copy, out)
        result = self._replace(sequence.body, edit.operands, (), out)
        if isinstance(result, relax.Tuple):
            result = emit("result", result, sequence.ty, out)
        return out, result

    def _rewrite_binding(self, edit: _Edit, binding: relax.Binding) -> list[relax.Binding]:
        """Return the bindings that replace a binding."""
        out: list[relax.Binding] = []
        for copy in edit.before:
            self._emit_copy(copy, out)
        var, original = binding.var, binding.value
        value = original.args[0] if edit.hint else original
        after: list[relax.Binding] = []
        if isinstance(value, relax.Call):
            value = self._replace_operands(value, edit.operands, out)
            if edit.callee is not None:
                value = _with_callee(value, edit.callee)
            if edit.scope is not None:
                value = with_scope(value, edit.scope, device_of(var.ty, self._devices))
            value, after = self._copy_around(value, edit.around, out)
        elif edit.operands:
            replacements = {path[1:]: copy for path, copy in edit.operands.items()}
            value = self._replace(value, replacements, (), out)
        if edit.results:
            raw = relax.Var(f"{var.name}_raw", var.ty)
            out.append(relax.VarBinding(raw, value))
            value = self._copy_results(raw, edit.results, out)
        # The walk itself rewrites values that contain bindings, such as ifs.
        return [*out, binding if value is original else with_value(binding, value), *after]

    def _replace_operands(
        self, call: relax.Call, operands: dict[tuple[int, ...], Copy], out: list[relax.Binding]
    ) -> relax.Call:
        """Return the call with copies in place of operands, or of fields of operands."""
        if not operands:
            return call
        args = as_list(call.args)
        by_argument: dict[int, dict[tuple[int, ...], Copy]] = {}
        for path, copy in operands.items():
            by_argument.setdefault(path[0], {})[path[1:]] = copy
        for k, replacements in by_argument.items():
            args[k] = self._replace(args[k], replacements, (), out)
        return replace_call(call, call.op, args)

    def _replace(
        self,
        expr: relax.Expr,
        replacements: dict[tuple[int, ...], Copy],
        path: tuple[int, ...],
        out: list[relax.Binding],
    ) -> relax.Expr:
        """Return the expression with the tensors at the paths of `replacements` replaced."""
        if path in replacements:
            return self._copies[id(replacements[path])]
        if not any(replaced[: len(path)] == path for replaced in replacements):
            return expr
        if isinstance(expr, relax.Tuple):
            fields = list(expr.fields)
        else:
            fields = [get(expr, index) for index in range(len(expr.ty.fields))]
        fields = [
            self._bind(self._replace(field_expr, replacements, (*path, index), out), out)
            for index, field_expr in enumerate(fields)
        ]
        result = relax.Tuple(fields)
        if not path and not isinstance(expr, relax.Tuple):
            return self._bind(result, out)
        return result

    def _bind(self, expr: relax.Expr, out: list[relax.Binding]) -> relax.Expr:
        """Bind an expression that may not be nested in another one to a variable."""
        if not isinstance(expr, relax.TupleGetItem):
            return expr
        return emit("field", expr, expr.ty, out)

    def _copy_results(
        self, raw: relax.Var, copies: list[Copy], out: list[relax.Binding]
    ) -> relax.Expr:
        """Return the result of a call with some of its tensors copied."""
        replacements: dict[tuple[int, ...], Copy] = {}
        for copy in copies:
            path = copy.uses[0].path[1:]
            self._emit_copy(copy, out, TensorRoot(raw, path))
            replacements[path] = copy
        return self._replace(raw, replacements, (), out)

    def _copy_around(
        self, call: relax.Call, around: list[Copy], out: list[relax.Binding]
    ) -> tuple[relax.Call, list[relax.Binding]]:
        """Return a call that writes copies of operands, and the bindings that copy them back."""
        after: list[relax.Binding] = []
        for copy in around:
            use = copy.uses[0]
            operand = call.args[use.path[0]]
            for index in use.path[1:]:
                operand = self._bind(get(operand, index), out)
            temporary = emit_alloc(
                copy.tensor.root.name, operand.ty, copy.scope, self._devices, out
            )
            self._copies[id(copy)] = temporary
            if not use.fresh:
                emit_call(COPY.name, [operand, temporary], out)
            call = self._replace_operands(call, {use.path: copy}, out)
            emit_call(COPY.name, [temporary, operand], after)
        return call, after

    def _emit_copy(
        self, copy: Copy, out: list[relax.Binding], root: TensorRoot | None = None
    ) -> None:
        """Emit an allocation and a copy to it, from `root` if given."""
        root = root or copy.tensor.root
        source: relax.Expr = root.base
        for index in root.path:
            source = emit(root.name, get(source, index), source.ty.fields[index], out)
        if not isinstance(source.ty.shape, relax.ShapeExpr):
            source = match_shape(source, out)
        target = emit_alloc(copy.tensor.root.name, source.ty, copy.scope, self._devices, out)
        emit_call(COPY.name, [source, target], out)
        self._copies[id(copy)] = target


def _with_callee(call: relax.Call, callee: tvm.ir.GlobalVar) -> relax.Call:
    """Return a call, direct or by `R.call_tir`, of another PrimFunc."""
    if isinstance(call.op, tvm.ir.Op):
        return replace_call(call, call.op, [callee, *call.args[1:]])
    return replace_call(call, callee, as_list(call.args))


def _check_copy_site(edit: _Edit) -> None:
    """Raise a TransformError if an edit needs an allocation where none is allowed."""
    if edit.step is not None and edit.step.in_dataflow:
        problem, passes = "is in a dataflow block", "ToNonDataflow and RemovePurityChecking"
    elif edit.function.pure:
        problem, passes = "is in a pure function", "RemovePurityChecking"
    else:
        return
    allocates = edit.scope is not None and edit.step is not None and _scope_of(edit.step) is None
    if not (edit.before or edit.around or edit.results or allocates):
        return
    where = "at its end" if edit.step is None else f"at {edit.step.var.name}"
    raise TransformError(
        f"PlanMemoryScopes: function {edit.function.name!r} needs a copy or an allocation {where}, "
        f"which {problem}; run relax.transform.{passes} before"
    )


def _check_type(copy: Copy) -> None:
    """Raise a TransformError if the type of a tensor does not suffice to allocate a copy."""
    ty = copy.tensor.root.ty
    if not isinstance(ty, relax.TensorType) or ty.dtype is None or int(ty.ndim) < 0:
        raise TransformError(
            f"PlanMemoryScopes: in function {copy.function.name!r} {copy.tensor.root.name} "
            f"must be copied to {copy.scope!r} for {copy.uses[0]}, but its type {ty} does not "
            "specify how large it is; bind it to a variable of a known type with R.match_cast"
        )


def _scope_of(step: Step) -> str | None:
    """Return the scope of a step that is an allocation, None for any other step."""
    value = step.value
    if isinstance(value, relax.Call) and value.op == ALLOC:
        return str(value.args[3].value)
    return None
