# SPDX-License-Identifier: Apache-2.0
"""Collects the facts of a module: its tensor values, and what each place needs of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import tvm
from tvm import relax, tirx

from tvm_ipc.contract import IPC_MEMORY
from tvm_ipc.errors import TransformError
from tvm_ipc.transform.byoc.extern import declared_scopes
from tvm_ipc.transform.scopes.build import same_device
from tvm_ipc.transform.scopes.demands import ANY, GLOBAL, RESULT, ScopeRegistry
from tvm_ipc.transform.scopes.facts import (
    OUT,
    VALUE,
    AllocSite,
    CallRecord,
    FunctionFacts,
    FunctionValue,
    Program,
    Region,
    Root,
    Storage,
    Tensor,
    Use,
    Value,
    Write,
    pairs,
    tensors,
)
from tvm_ipc.transform.scopes.primfunc import PARAM_SCOPES, PrimFuncs

_ALIASES = {"relax.reshape", "relax.memory.view", "relax.memory.ensure_zero_offset"}
_STORAGES = {"relax.memory.alloc_storage": 2, "relax.vm.alloc_storage": 3}
_PLANNED = {"relax.memory.alloc_tensor", "relax.vm.alloc_tensor"}
_KILLS = {"relax.memory.kill_tensor", "relax.memory.kill_storage", "relax.vm.kill_object"}


def collect(module: tvm.IRModule, registry: ScopeRegistry, primfuncs: PrimFuncs) -> Program:
    """Return the facts of a module, or raise a TransformError that names what is malformed."""
    return _Collector(module, registry, primfuncs).run()


class _Collector:
    def __init__(self, module: tvm.IRModule, registry: ScopeRegistry, primfuncs: PrimFuncs) -> None:
        self.program = Program(module)
        self.registry = registry
        self.primfuncs = primfuncs
        self.globals: dict[str, Any] = {}
        self.values: dict[int, Value] = {}
        self.number = 0
        self.function: FunctionFacts
        self.region: Region
        self.index = 0

    def run(self) -> Program:
        for global_var, function in self.program.module.functions_items():
            name = str(global_var.name_hint)
            if isinstance(function, relax.Function):
                attrs = function.attrs or {}
                facts = self.declare(name, function, local=False)
                facts.value.escapes = "global_symbol" in attrs
                self.globals[name] = facts
            else:
                self.globals[name] = function
        functions = [value for value in self.globals.values() if isinstance(value, FunctionFacts)]
        for facts in functions:
            self.visit_function(facts, None)
        for facts in self.program.functions:
            if facts.value.escapes:
                self.fix_boundary(facts)
        return self.program

    # Functions.

    def declare(self, name: str, function: relax.Function, *, local: bool) -> FunctionFacts:
        result: FunctionFacts = FunctionFacts(name, function, FunctionValue(name, (), None, local))
        result.value.params = tuple(self.fresh(p.ty, Root(p), result) for p in function.params)
        # Nothing is read from the root of a result.
        result.value.result = self.fresh(function.ret_ty, Root(relax.Var(name)), result)
        attrs = function.attrs or {}
        result.pure = bool(function.is_pure) and not bool(attrs.get("relax.force_pure", False))
        bounds = attrs.get("tir_var_upper_bound", None)
        result.bounds = {str(k): int(v) for k, v in bounds.items()} if bounds else {}
        self.program.functions.append(result)
        return result

    def fix_boundary(self, facts: FunctionFacts) -> None:
        given = self.param_scopes(facts)
        for scope, value in zip(given, facts.value.params, strict=True):
            for tensor in tensors(value):
                self.program.fixed.setdefault(
                    tensor.leaf,
                    (
                        scope or GLOBAL,
                        f"is a parameter of {facts.name!r}, which is called from outside",
                    ),
                )
        for tensor in tensors(facts.value.result):
            self.program.fixed.setdefault(
                tensor.leaf, (GLOBAL, f"is returned by {facts.name!r} to the outside")
            )

    def param_scopes(self, facts: FunctionFacts) -> list[str]:
        count = len(facts.function.params)
        given = (facts.function.attrs or {}).get(PARAM_SCOPES, None)
        if given is None:
            return [""] * count
        scopes = [str(scope) for scope in given]
        if len(scopes) != count:
            raise TransformError(
                f"PlanMemoryScopes: function {facts.name!r} has {count} parameters, and its "
                f"attribute {PARAM_SCOPES!r} names {len(scopes)} scopes; name one for each"
            )
        for scope in scopes:
            self.check_scope(scope, f"the attribute {PARAM_SCOPES!r} of function {facts.name!r}")
        return scopes

    def visit_function(self, facts: FunctionFacts, parent: Region | None) -> None:
        for param, value in zip(facts.function.params, facts.value.params, strict=True):
            self.values[hash(param)] = value
        saved = (getattr(self, "function", None), getattr(self, "region", None), self.index)
        self.function = facts
        body = facts.function.body
        if not isinstance(body, relax.SeqExpr):
            raise TransformError(
                f"PlanMemoryScopes: the body of function {facts.name!r} is a "
                f"{type(body).__name__}, not a sequence of bindings; run relax.transform.Normalize"
            )
        facts.region = self.visit_sequence(body, parent, self.index, 1.0)
        self.leave(facts.region, body.body, facts.value.result, f"result of {facts.name!r}")
        self.function, self.region, self.index = saved  # type: ignore[assignment]

    # Sequences of bindings.

    def visit_sequence(
        self, sequence: relax.SeqExpr, parent: Region | None, at: int, frequency: float
    ) -> Region:
        region = Region(self.function, parent, at, frequency, sequence)
        region.depth = parent.depth + 1 if parent else 0
        for block in sequence.blocks:
            dataflow = isinstance(block, relax.DataflowBlock)
            for binding in block.bindings:
                region.bindings.append(binding)
                region.dataflow.append(dataflow)
        for index, binding in enumerate(region.bindings):
            self.region, self.index = region, index
            self.number += 1
            region.numbers.append(self.number)
            self.visit_binding(binding)
        self.region, self.index = region, len(region.bindings)
        self.number += 1
        region.numbers.append(self.number)
        return region

    def leave(self, region: Region, body: relax.Expr, result: Value, what: str) -> None:
        """Note that the value at the end of a region goes on as `result`."""
        value = self.value_of(body)
        for path, tensor, target in pairs(value, result):
            self.program.unite(tensor.leaf, target.leaf)
            self.program.uses.append(
                Use(tensor, region, len(region.bindings), path, what, same=target.leaf)
            )

    def visit_binding(self, binding: relax.Binding) -> None:
        var, value = binding.var, binding.value
        if isinstance(binding, relax.MatchCast):
            result = self.rerooted(self.value_of(value), Root(var))
        elif isinstance(value, relax.Call):
            result = self.visit_call(var, value)
        elif isinstance(value, relax.If):
            result = self.visit_if(var, value)
        elif isinstance(value, relax.Function):
            result = self.visit_local_function(var, value)
        elif isinstance(value, relax.SeqExpr):
            raise TransformError(
                f"PlanMemoryScopes: in function {self.function.name!r} {var.name} is bound to "
                "a sequence of bindings; run relax.transform.Normalize"
            )
        else:
            result = self.annotated(var, self.value_of(value), (VALUE,))
        self.values[hash(var)] = result

    def visit_if(self, var: relax.Var, value: relax.If) -> Value:
        region, index = self.region, self.index
        result = self.fresh(var.ty, Root(var))
        children = region.children.setdefault(index, [])
        for branch in (value.true_branch, value.false_branch):
            if not isinstance(branch, relax.SeqExpr):
                raise TransformError(
                    f"PlanMemoryScopes: in function {self.function.name!r} a branch of {var.name} "
                    "is no sequence of bindings; run relax.transform.Normalize"
                )
            child = self.visit_sequence(branch, region, index, region.frequency / 2)
            children.append(child)
            self.leave(child, branch.body, result, f"result {var.name} of an if")
        self.region, self.index = region, index
        return result

    def visit_local_function(self, var: relax.Var, value: relax.Function) -> Value:
        facts = self.declare(f"{self.function.name}.{var.name}", value, local=True)
        self.values[hash(var)] = facts.value  # it may call itself
        region, index = self.region, self.index
        self.visit_function(facts, None)
        self.region, self.index = region, index
        assert facts.region is not None
        region.children.setdefault(index, []).append(facts.region)
        return facts.value

    # Values.

    def fresh(self, ty: Any, root: Root, owner: FunctionFacts | None = None) -> Value:
        """Return new leaves for a value of a type."""
        if isinstance(ty, relax.TensorType | relax.AnyType):
            leaf = len(self.program.memory)
            self.program.memory.append(leaf)
            self.program.types.append(ty)
            self.program.owners.append(owner or self.function)
            scope = self.vdevice_scope(ty)
            if scope:
                self.program.fixed[leaf] = (scope, f"is on a VDevice as {root.name}")
            return Tensor(leaf, root)
        if isinstance(ty, relax.TupleType):
            return tuple(
                self.fresh(part, Root(root.base, (*root.path, index)), owner)
                for index, part in enumerate(ty.fields)
            )
        return None

    def vdevice_scope(self, ty: Any) -> str:
        vdevice = getattr(ty, "vdevice", None)
        scope = str(vdevice.memory_scope) if vdevice is not None else ""
        if scope in ("", GLOBAL):
            return ""
        return self.check_scope(scope, "a VDevice")

    def check_scope(self, scope: str, where: str) -> str:
        if scope and scope not in self.registry.scopes:
            raise TransformError(
                f"PlanMemoryScopes: {where} names the unknown memory scope {scope!r}; "
                f"{self.registry.known_scopes()}"
            )
        return scope

    def value_of(self, expr: Any) -> Value:
        if isinstance(expr, relax.Var):
            value = self.values.get(hash(expr))
            if isinstance(value, FunctionValue):
                value.escapes = True  # `visit_call` does not ask here for what it calls
            return value
        if isinstance(expr, tvm.ir.GenericConst):
            if not isinstance(expr.ty, relax.TensorType):
                return None
            known = self.values.get(hash(expr))
            if known is None:
                known = self.fresh(expr.ty, Root(expr))
                self.values[hash(expr)] = known
                assert isinstance(known, Tensor)
                self.program.fixed.setdefault(known.leaf, (GLOBAL, "is a constant"))
            return known
        if isinstance(expr, relax.Tuple):
            return tuple(self.value_of(part) for part in expr.fields)
        if isinstance(expr, relax.TupleGetItem):
            value = self.value_of(expr.tuple_value)
            return value[int(expr.index)] if isinstance(value, tuple) else None
        if isinstance(expr, tvm.ir.GlobalVar):
            self.program.referenced.add(str(expr.name_hint))
            facts = self.globals.get(str(expr.name_hint))
            if isinstance(facts, FunctionFacts):
                facts.value.escapes = True
            return None
        if isinstance(expr, relax.Call) and isinstance(expr.ty, relax.TensorType):
            raise TransformError(
                f"PlanMemoryScopes: in function {self.function.name!r} a call is nested in another "
                f"one: {expr}; run relax.transform.Normalize"
            )
        return None

    def rerooted(self, value: Value, root: Root) -> Value:
        """Return the same memory, read through another variable."""
        if isinstance(value, Tensor):
            return Tensor(value.leaf, root)
        if isinstance(value, tuple):
            return tuple(
                self.rerooted(part, Root(root.base, (*root.path, index)))
                for index, part in enumerate(value)
            )
        return value

    def annotated(self, var: relax.Var, value: Value, path: tuple[int, ...]) -> Value:
        """Return the value of a variable whose type may say another scope than the value's."""
        if isinstance(value, Tensor):
            scope = self.vdevice_scope(var.ty)
            if scope and scope != self.vdevice_scope(self.program.types[value.leaf]):
                return self.moved(var, value, scope, path, f"is on a VDevice as {var.name}")
        return value

    def moved(
        self, var: relax.Var, value: Tensor, scope: str, path: tuple[int, ...], why: str
    ) -> Value:
        """Return a value that is in a scope, the same memory where that is possible."""
        result = self.fresh(self.program.types[value.leaf], Root(var))
        assert isinstance(result, Tensor)
        self.program.fixed[result.leaf] = (scope, why)
        self.program.unite(value.leaf, result.leaf)
        self.use(value, path, f"annotation of {var.name}", same=result.leaf, moves=True)
        return result

    def use(self, tensor: Tensor, path: tuple[int, ...], what: str, **needs: Any) -> Use:
        use = Use(tensor, self.region, self.index, path, what, **needs)
        if use.exact != ANY:
            self.program.uses.append(use)
        return use

    # Calls.

    def visit_call(self, var: relax.Var, call: relax.Call) -> Value:
        op = call.op
        if isinstance(op, tvm.ir.Op):
            return self.visit_operator(var, call, str(op.name))
        if isinstance(op, relax.ExternFunc):
            name = str(op.global_symbol)
            declared = declared_scopes(op)
            self.visit_packed(name, enumerate(call.args), len(call.args), declared=declared)
            return self.packed_result(var, name)
        if isinstance(op, tvm.ir.GlobalVar):
            callee = self.globals.get(str(op.name_hint))
            if isinstance(callee, FunctionFacts):
                return self.visit_relax_call(var, call, callee.value)
            if isinstance(callee, tirx.PrimFunc):
                arguments = [(self.value_of(arg), (k,)) for k, arg in enumerate(call.args)]
                self.visit_primfunc(str(op.name_hint), arguments)
                return self.fresh(var.ty, Root(var))
            if callee is None:
                raise TransformError(
                    f"PlanMemoryScopes: function {self.function.name!r} calls {op.name_hint!r}, "
                    "which the module does not have"
                )
        callee = self.values.get(hash(op)) if isinstance(op, relax.Var) else None
        if isinstance(callee, FunctionValue):
            return self.visit_relax_call(var, call, callee)
        self.visit_packed("", enumerate(call.args), len(call.args))
        return self.packed_result(var, "")

    def visit_relax_call(self, var: relax.Var, call: relax.Call, callee: FunctionValue) -> Value:
        if len(call.args) != len(callee.params):
            raise TransformError(
                f"PlanMemoryScopes: function {self.function.name!r} calls {callee.name!r} with "
                f"{len(call.args)} arguments; it has {len(callee.params)} parameters"
            )
        arguments = tuple(map(self.value_of, call.args))
        for k, (argument, param) in enumerate(zip(arguments, callee.params, strict=True)):
            for path, tensor, target in pairs(argument, param):
                what = f"argument {k} of {callee.name!r}"
                self.use(tensor, (k, *path), what, same=target.leaf)
        result = self.fresh(var.ty, Root(var))
        for path, source, target in pairs(callee.result, result):
            use = Use(
                Tensor(source.leaf, target.root),
                self.region,
                self.index + 1,
                (OUT, *path),
                f"result of {callee.name!r}",
                same=target.leaf,
            )
            self.program.uses.append(use)
        record = CallRecord(self.number, self.region, callee, arguments, result)
        self.function.calls.append(record)
        return result

    def visit_primfunc(
        self,
        name: str,
        arguments: Iterable[tuple[Value, tuple[int, ...]]],
        fresh: int | None = None,
    ) -> None:
        """Note what a PrimFunc needs of its operands; those from `fresh` on hold nothing yet."""
        scopes = self.primfuncs.scopes(name)
        self.program.calls.setdefault(name, []).append((self.region, self.index))
        for k, (value, path) in enumerate(arguments):
            if not isinstance(value, Tensor):
                continue
            if k >= len(scopes):
                raise TransformError(
                    f"PlanMemoryScopes: function {self.function.name!r} calls {name!r} with more "
                    f"arguments than its {len(scopes)} parameters"
                )
            what = f"parameter {k} of {name!r}"
            scope = scopes[k]
            if scope is not None:
                self.check_scope(scope, what)
            use = self.use(value, path, what, exact=scope, param=(name, k), written=True)
            use.fresh = fresh is not None and k >= fresh
            self.function.writes.append(Write(self.number, value.leaf, (name, k)))

    def visit_packed(
        self,
        name: str,
        arguments: Iterable[tuple[int, relax.Expr]],
        count: int,
        first: int = 0,
        declared: Mapping[int, str] | None = None,
    ) -> None:
        """Note what a packed function needs of its operands."""
        demands = {**self.registry.demands.get(name, {}), **(declared or {})}
        writes = self.registry.writes.get(name)
        for place, argument in arguments:
            k = place - first
            written = writes is None or k in writes or k - count in writes
            for path, tensor in _with_paths(self.value_of(argument)):
                what = f"operand {k} of {name}" if name else f"operand {k} of a closure"
                scope = demands.get(k)
                if declared and k in declared:
                    self.check_scope(declared[k], what)
                self.use(tensor, (place, *path), what, exact=scope, written=written)
                if written:
                    self.function.writes.append(Write(self.number, tensor.leaf, None))

    def packed_result(self, var: relax.Var, name: str) -> Value:
        if name == "runtime.disco.cuda_ipc.alloc_storage":
            return Storage(IPC_MEMORY)
        scope = self.registry.demands.get(name, {}).get(RESULT, GLOBAL)
        result = self.fresh(var.ty, Root(var))
        for tensor in tensors(result):
            self.program.fixed.setdefault(tensor.leaf, (scope, f"comes from {name or 'a closure'}"))
        return result

    def visit_operator(self, var: relax.Var, call: relax.Call, name: str) -> Value:
        args = call.args
        if name == "relax.builtin.alloc_tensor":
            return self.visit_alloc(var, call)
        if name in _ALIASES:
            return self.rerooted(self.value_of(args[0]), Root(var))
        if name in _STORAGES:
            return Storage(str(args[_STORAGES[name]].value))
        if name in _PLANNED:
            storage = self.values.get(hash(args[0]))
            scope = storage.scope if isinstance(storage, Storage) else GLOBAL
            result = self.fresh(var.ty, Root(var))
            for tensor in tensors(result):
                self.program.fixed[tensor.leaf] = (scope, "lies in a storage that was planned")
            return result
        if name in _KILLS:
            return None
        if name in ("relax.hint_on_device", "relax.to_vdevice"):
            return self.visit_move(var, call, name)
        if name in ("relax.call_tir", "relax.call_tir_inplace"):
            return self.visit_call_tir(var, call, name)
        if name == "relax.call_dps_packed":
            return self.visit_call_dps_packed(var, call)
        if name in ("relax.call_pure_packed", "relax.call_inplace_packed"):
            packed = args[0]
            symbol = str(packed.global_symbol) if isinstance(packed, relax.ExternFunc) else ""
            self.visit_packed(symbol, list(enumerate(args))[1:], len(args) - 1, first=1)
            return self.packed_result(var, symbol)
        demands = self.registry.demands.get(name, {})
        for k, argument in enumerate(args):
            for path, tensor in _with_paths(self.value_of(argument)):
                self.use(tensor, (k, *path), f"operand {k} of {name}", exact=demands.get(k))
        if name.startswith(("relax.call_builtin_with_ctx", "relax.invoke")):
            for tensor in tensors(tuple(map(self.value_of, args))):
                self.function.writes.append(Write(self.number, tensor.leaf, None))
        return self.packed_result(var, name)

    def visit_alloc(self, var: relax.Var, call: relax.Call) -> Value:
        scope = call.args[3]
        if not isinstance(scope, tvm.ir.StringImm):
            raise TransformError(
                f"PlanMemoryScopes: the scope of {var.name} in function {self.function.name!r} is "
                f"{scope}, not a string"
            )
        result = self.fresh(var.ty, Root(var))
        if isinstance(result, Tensor):
            self.program.allocs.setdefault(result.leaf, []).append(
                AllocSite(self.region, self.index, None)
            )
            name = self.check_scope(str(scope.value), f"the allocation of {var.name}")
            if name not in ("", GLOBAL):
                self.program.fixed[result.leaf] = (name, f"was allocated there as {var.name}")
        return result

    def visit_move(self, var: relax.Var, call: relax.Call, name: str) -> Value:
        """A move between scopes of one device is ours; one between devices is TVM's."""
        value = self.value_of(call.args[0])
        if not isinstance(value, Tensor):
            return value
        where = f"the {name} of {var.name}"
        if name == "relax.hint_on_device":
            scope = self.check_scope(str(call.attrs.memory_scope), where)
            if scope in ("", GLOBAL):
                return self.rerooted(value, Root(var))
        else:
            scope = self.check_scope(str(call.attrs.dst_vdevice.memory_scope), where)
            if not _same_device(self.program.types[value.leaf], call.attrs.dst_vdevice):
                self.use(value, (0,), where)
                result = self.fresh(var.ty, Root(var))
                for tensor in tensors(result):
                    self.program.fixed[tensor.leaf] = (scope, f"was moved there as {var.name}")
                return result
        self.program.hints.append((self.region, self.index))
        return self.moved(var, value, scope, (VALUE,), f"is annotated as {var.name}")

    def visit_call_tir(self, var: relax.Var, call: relax.Call, name: str) -> Value:
        callee, packed = call.args[0], call.args[1]
        if len(call.args) > 2 or str(callee.name_hint) not in self.globals:
            raise TransformError(
                f"PlanMemoryScopes: in function {self.function.name!r}, {var.name} is made by a "
                f"{name} that cannot be read: {call}"
            )
        value = self.value_of(packed)
        inline = isinstance(packed, relax.Tuple)
        fields = value if isinstance(value, tuple) else (value,)
        arguments: list[tuple[Value, tuple[int, ...]]] = [
            (field, (1, j) if inline or len(fields) > 1 else (1,)) for j, field in enumerate(fields)
        ]
        result = self.fresh(var.ty, Root(var))
        outputs = tensors(result)
        if name == "relax.call_tir_inplace":
            indices = [int(i) for i in call.attrs.inplace_indices]
            alias: list[Value] = [
                self.rerooted(fields[i], out.root) if i >= 0 else out
                for i, out in zip(indices, outputs, strict=True)
            ]
            result = tuple(alias) if isinstance(result, tuple) and len(alias) > 1 else alias[0]
            outputs = [out for i, out in zip(indices, outputs, strict=True) if i < 0]
        for j, out in enumerate(outputs):
            site = AllocSite(self.region, self.index, j)
            self.program.allocs.setdefault(out.leaf, []).append(site)
        arguments += [(out, (OUT, j)) for j, out in enumerate(outputs)]
        self.visit_primfunc(str(callee.name_hint), arguments, fresh=len(fields))
        return result

    def visit_call_dps_packed(self, var: relax.Var, call: relax.Call) -> Value:
        packed, arguments = call.args[0], call.args[1]
        symbol = str(packed.global_symbol) if isinstance(packed, relax.ExternFunc) else ""
        demands = self.registry.demands.get(symbol, {})
        value = self.value_of(arguments)
        fields = value if isinstance(value, tuple) else (value,)
        inline = isinstance(arguments, relax.Tuple)
        for k, part in enumerate(fields):
            for path, tensor in _with_paths(part):
                place = (1, k, *path) if inline or len(fields) > 1 else (1, *path)
                self.use(tensor, place, f"operand {k} of {symbol}", exact=demands.get(k))
        result = self.fresh(var.ty, Root(var))
        for j, out in enumerate(tensors(result)):
            site = AllocSite(self.region, self.index, j)
            self.program.allocs.setdefault(out.leaf, []).append(site)
            k = len(fields) + j
            use = self.use(out, (OUT, j), f"operand {k} of {symbol}", exact=demands.get(k))
            use.written = use.fresh = True
            self.function.writes.append(Write(self.number, out.leaf, None))
        return result


def _with_paths(
    value: Value, path: tuple[int, ...] = ()
) -> Iterable[tuple[tuple[int, ...], Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, tuple):
        for index, part in enumerate(value):
            yield from _with_paths(part, (*path, index))


def _same_device(ty: Any, target: relax.VDevice) -> bool:
    source = getattr(ty, "vdevice", None)
    return source is not None and same_device(source, target)
