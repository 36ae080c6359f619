# SPDX-License-Identifier: Apache-2.0
"""Applies a solution: scopes of allocations, copies, and calls in destination-passing form."""

from __future__ import annotations

from dataclasses import dataclass, field

import tvm
from tvm import relax
from tvm.relax.expr import _update_type

from tvm_ipc.contract.programs import COPY
from tvm_ipc.errors import TransformError
from tvm_ipc.transform.ir.build import (
    ALLOC,
    alloc,
    device_of,
    emit,
    emit_alloc,
    emit_call,
    get,
    match_shape,
    replace_call,
    with_scope,
)
from tvm_ipc.transform.ir.rewrite import with_body
from tvm_ipc.transform.scopes.demands import GLOBAL
from tvm_ipc.transform.scopes.facts import OUT, FunctionFacts, Region, Root
from tvm_ipc.transform.scopes.place import Copy, Plan
from tvm_ipc.transform.scopes.solve import PLAIN, Solution


@dataclass(eq=False)
class _Edits:
    """What changes in one region."""

    before: dict[int, list[Copy]] = field(default_factory=dict)
    operands: dict[int, dict[tuple[int, ...], Copy]] = field(default_factory=dict)
    around: dict[int, list[Copy]] = field(default_factory=dict)
    results: dict[int, list[Copy]] = field(default_factory=dict)
    scopes: dict[int, dict[int | None, str]] = field(default_factory=dict)
    callees: dict[int, tvm.ir.GlobalVar] = field(default_factory=dict)
    hints: set[int] = field(default_factory=set)

    def indices(self) -> set[int]:
        """Return the bindings that something changes at."""
        parts = (self.before, self.operands, self.around, self.results, self.scopes, self.callees)
        return {index for part in parts for index in part} | self.hints


class Rewriter:
    """Applies a plan to the Relax functions of a module; nothing is half done if it refuses."""

    def __init__(
        self, solution: Solution, plan: Plan, callees: dict[tuple[Region, int], tvm.ir.GlobalVar]
    ) -> None:
        self._solution = solution
        self._edits: dict[Region, _Edits] = {}
        self._copies: dict[int, relax.Var] = {}
        self._devices = list(solution.program.module.global_infos.get("vdevice", []))
        for copy in plan.copies:
            self._at(copy.region).before.setdefault(copy.index, []).append(copy)
            for use in copy.uses:
                places = self._at(use.region).operands.setdefault(use.index, {})
                places[use.path] = copy
        for copy in plan.around:
            self._at(copy.region).around.setdefault(copy.index, []).append(copy)
        for copy in plan.results:
            self._at(copy.region).results.setdefault(copy.index - 1, []).append(copy)
        program = solution.program
        for leaf, sites in program.allocs.items():
            scope = solution.scopes[leaf]
            for site in sites:
                if scope not in (PLAIN, GLOBAL) and _scope_of(site.region, site.index) != scope:
                    scopes = self._at(site.region).scopes.setdefault(site.index, {})
                    scopes[site.output] = scope
        for leaf, region, index in program.misplaced:
            self._at(region).scopes[index] = {None: solution.scopes[leaf] or GLOBAL}
        for (region, index), callee in callees.items():
            self._at(region).callees[index] = callee
        for region, index in program.hints:
            self._at(region).hints.add(index)
        self._touched: set[Region] = set()
        for region in self._edits:
            above: Region | None = region
            while above is not None and above not in self._touched:
                self._touched.add(above)
                above = above.parent or above.outer
        self._local: dict[int, FunctionFacts] = {
            id(facts.region): facts for facts in program.functions if facts.value.local
        }
        for copy in [*plan.copies, *plan.around, *plan.results]:
            _check_type(copy)
        self._check()

    @property
    def changes(self) -> bool:
        """Whether anything is to do."""
        return bool(self._edits)

    def functions(self) -> list[tuple[str, relax.Function]]:
        """Return the global functions that change, rewritten."""
        changed = []
        for facts in self._solution.program.functions:
            if not facts.value.local and facts.region is not None and facts.region in self._touched:
                changed.append((facts.name, self._function(facts)))
        return changed

    def _at(self, region: Region) -> _Edits:
        return self._edits.setdefault(region, _Edits())

    # What cannot be done is found before anything is.

    def _check(self) -> None:
        for region, edits in self._edits.items():
            impure = {*edits.before, *edits.around, *edits.results}
            impure |= {
                index
                for index, scopes in edits.scopes.items()
                if any(output is not None for output in scopes)
            }
            for index in sorted(impure):
                self._check_place(region, index)

    def _check_place(self, region: Region, index: int) -> None:
        function = region.function
        where = (
            f"at {region.bindings[index].var.name}"
            if index < len(region.bindings)
            else "at its end"
        )
        if index < len(region.bindings) and region.dataflow[index]:
            problem, passes = "is in a dataflow block", "ToNonDataflow and RemovePurityChecking"
        elif function.pure:
            problem, passes = "is in a pure function", "RemovePurityChecking"
        else:
            return
        raise TransformError(
            f"PlanMemoryScopes: function {function.name!r} needs a copy or an allocation {where}, "
            f"which {problem}; run relax.transform.{passes} before"
        )

    # Rewriting.

    def _function(self, facts: FunctionFacts) -> relax.Function:
        function = facts.function
        assert facts.region is not None
        return with_body(function, self._region(facts.region))

    def _region(self, region: Region) -> relax.SeqExpr:
        if region not in self._touched:
            return region.sequence
        edits = self._edits.get(region, _Edits())
        edited = edits.indices()
        for index, children in region.children.items():
            if any(child in self._touched for child in children):
                edited.add(index)
        blocks: list[relax.BindingBlock] = []
        index = 0
        for block in region.sequence.blocks:
            out: list[relax.Binding] = []
            same = True
            for _ in range(len(block.bindings)):
                binding = region.bindings[index]
                if index in edited:
                    same = False
                    self._binding(region, edits, index, binding, out)
                else:
                    out.append(binding)
                index += 1
            blocks.append(block if same else type(block)(out, block.span))
        end: list[relax.Binding] = []
        for copy in edits.before.get(index, []):
            self._emit_copy(copy, end)
        body = region.sequence.body
        if index in edits.operands:
            body = self._replace(body, edits.operands[index], (), end)
            if isinstance(body, relax.Tuple):
                body = emit("result", body, region.sequence.ty, end)
        if end:
            if blocks and not isinstance(blocks[-1], relax.DataflowBlock):
                end = [*blocks.pop().bindings, *end]
            blocks.append(relax.BindingBlock(end))
        sequence = relax.SeqExpr(blocks, body, region.sequence.span)
        _update_type(sequence, region.sequence.ty)
        return sequence

    def _binding(
        self,
        region: Region,
        edits: _Edits,
        index: int,
        binding: relax.Binding,
        out: list[relax.Binding],
    ) -> None:
        for copy in edits.before.get(index, []):
            self._emit_copy(copy, out)
        children = [c for c in region.children.get(index, []) if c in self._touched]
        var, value = binding.var, binding.value
        if children:
            value = self._with_children(value, region.children[index])
        if index in edits.hints:
            value = value.args[0]
        operands = edits.operands.get(index, {})
        if isinstance(value, relax.Call):
            value = self._operands(value, operands, out)
            if index in edits.callees:
                value = self._with_callee(value, edits.callees[index])
        elif operands:
            value = self._replace(
                value, {path[1:]: copy for path, copy in operands.items()}, (), out
            )
        scopes = edits.scopes.get(index, {})
        around = edits.around.get(index, [])
        after: list[relax.Binding] = []
        if None in scopes:
            value = with_scope(value, scopes[None], device_of(var.ty, self._devices))
        elif scopes or around:
            result: relax.Expr | None = None
            if isinstance(value.op, tvm.ir.Op) and str(value.op.name) in _ALLOCATING:
                value, result = self._to_destination(value, scopes, around, out)
            value, after = self._around(value, around, out)
            if result is not None:
                out.append(relax.VarBinding(relax.Var("_", value.ty), value))
                out.extend(after)
                value, after = result, []
        results = edits.results.get(index, [])
        if results:
            raw = relax.Var(f"{var.name}_raw", var.ty)
            out.append(relax.VarBinding(raw, value))
            value = self._copy_results(raw, results, out)
        if isinstance(binding, relax.MatchCast):
            out.append(relax.MatchCast(var, value, binding.ty, binding.span))
        else:
            out.append(relax.VarBinding(var, value, binding.span))
        out.extend(after)

    def _with_children(self, value: relax.Expr, children: list[Region]) -> relax.Expr:
        if isinstance(value, relax.Function):
            return self._function(self._local[id(children[0])])
        true, false = map(self._region, children)
        result = relax.If(value.cond, true, false, value.span)
        _update_type(result, value.ty)
        return result

    def _operands(
        self, call: relax.Call, operands: dict[tuple[int, ...], Copy], out: list[relax.Binding]
    ) -> relax.Call:
        if not operands:
            return call
        args = call.args[:]
        by_argument: dict[int, dict[tuple[int, ...], Copy]] = {}
        for path, copy in operands.items():
            by_argument.setdefault(path[0], {})[path[1:]] = copy
        for k, inner in by_argument.items():
            args[k] = self._replace(args[k], inner, (), out)
        return replace_call(call, call.op, args)

    def _with_callee(self, call: relax.Call, callee: tvm.ir.GlobalVar) -> relax.Call:
        if isinstance(call.op, tvm.ir.Op):
            return replace_call(call, call.op, [callee, *call.args[1:]])
        return replace_call(call, callee, call.args[:])

    def _replace(
        self,
        expr: relax.Expr,
        places: dict[tuple[int, ...], Copy],
        path: tuple[int, ...],
        out: list[relax.Binding],
    ) -> relax.Expr:
        """Return the expression with copies at some of its tensors."""
        if path in places:
            return self._copies[id(places[path])]
        if not any(place[: len(path)] == path for place in places):
            return expr
        if isinstance(expr, relax.Tuple):
            fields = list(expr.fields)
        else:
            fields = [get(expr, index) for index in range(len(expr.ty.fields))]
        fields = [
            self._named(self._replace(part, places, (*path, index), out), out)
            for index, part in enumerate(fields)
        ]
        result = relax.Tuple(fields)
        if not path and not isinstance(expr, relax.Tuple):
            return self._named(result, out)
        return result

    def _named(self, expr: relax.Expr, out: list[relax.Binding]) -> relax.Expr:
        """Bind what may not stand inside another expression."""
        if not isinstance(expr, relax.TupleGetItem):
            return expr
        return emit("field", expr, expr.ty, out)

    def _copy_results(
        self, raw: relax.Var, copies: list[Copy], out: list[relax.Binding]
    ) -> relax.Expr:
        places: dict[tuple[int, ...], Copy] = {}
        for copy in copies:
            path = copy.uses[0].path[1:]
            self._emit_copy(copy, out, Root(raw, path))
            places[path] = copy
        return self._replace(raw, places, (), out)

    def _around(
        self, call: relax.Call, around: list[Copy], out: list[relax.Binding]
    ) -> tuple[relax.Call, list[relax.Binding]]:
        """Return a call that writes copies of operands, and what copies them back after it."""
        after: list[relax.Binding] = []
        for copy in around:
            use = copy.uses[0]
            operand = call.args[use.path[0]]
            for index in use.path[1:]:
                operand = self._named(get(operand, index), out)
            temporary = emit_alloc(
                copy.tensor.root.name, operand.ty, copy.scope, self._devices, out
            )
            self._copies[id(copy)] = temporary
            if not use.fresh:
                emit_call(COPY.name, [operand, temporary], out)
            call = self._operands(call, {use.path: copy}, out)
            emit_call(COPY.name, [temporary, operand], after)
        return call, after

    def _to_destination(
        self,
        call: relax.Call,
        scopes: dict[int | None, str],
        around: list[Copy],
        out: list[relax.Binding],
    ) -> tuple[relax.Call, relax.Expr]:
        """Return a call_tir in destination-passing form, and the value that it had.

        The places of the copies around it change with it.
        """
        callee, packed = call.args[0], call.args[1]
        if isinstance(packed, relax.Tuple):
            inputs = list(packed.fields)
        elif isinstance(packed.ty, relax.TupleType):
            count = len(packed.ty.fields)
            inputs = [self._named(get(packed, index), out) for index in range(count)]
        else:
            inputs = [packed]
        many = isinstance(call.ty, relax.TupleType)
        types = list(call.ty.fields) if many else [call.ty]
        places = [-1] * len(types)
        if str(call.op.name) == "relax.call_tir_inplace":
            places = [int(index) for index in call.attrs.inplace_indices]
        results: list[relax.Expr] = []
        fresh: list[relax.Expr] = []
        for ty, place in zip(types, places, strict=True):
            if place >= 0:
                results.append(inputs[place])
                continue
            scope = scopes.get(len(fresh), GLOBAL)
            device = device_of(ty, self._devices)
            name = f"alloc{len(fresh)}" if many else "alloc"
            fresh.append(emit(name, alloc(ty.shape, ty, device, scope), ty, out))
            results.append(fresh[-1])
        for copy in around:
            use = copy.uses[0]
            if use.path[0] == OUT:
                use.path = (len(inputs) + use.path[1],)
            else:
                use.path = use.path[1:] or (0,)
        ty = relax.AnyType() if isinstance(callee, relax.ExternFunc) else relax.TupleType([])
        new = relax.Call(callee, [*inputs, *fresh], ret_ty=ty)
        return new, relax.Tuple(results) if many else results[0]

    # New bindings.

    def _emit_copy(self, copy: Copy, out: list[relax.Binding], root: Root | None = None) -> None:
        root = root or copy.tensor.root
        source: relax.Expr = root.base
        for index in root.path:
            source = emit(root.name, get(source, index), source.ty.fields[index], out)
        if not isinstance(source.ty.shape, relax.ShapeExpr):
            source = match_shape(source, out)
        target = emit_alloc(copy.tensor.root.name, source.ty, copy.scope, self._devices, out)
        emit_call(COPY.name, [source, target], out)
        self._copies[id(copy)] = target


#: Calls that allocate their outputs.
_ALLOCATING = {"relax.call_tir", "relax.call_tir_inplace", "relax.call_dps_packed"}


def _check_type(copy: Copy) -> None:
    ty = copy.tensor.root.ty
    if not isinstance(ty, relax.TensorType) or ty.dtype is None or int(ty.ndim) < 0:
        raise TransformError(
            f"PlanMemoryScopes: in function {copy.region.function.name!r} {copy.tensor.root.name} "
            f"must be copied to {copy.scope!r} for {copy.uses[0]}, and its type does not say how "
            f"large it is: {ty}; bind it to a variable of a known type with R.match_cast before"
        )


def _scope_of(region: Region, index: int) -> str | None:
    value = region.bindings[index].value
    if isinstance(value, relax.Call) and value.op == ALLOC:
        return str(value.args[3].value)
    return None
