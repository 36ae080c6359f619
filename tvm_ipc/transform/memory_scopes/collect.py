# SPDX-License-Identifier: Apache-2.0
"""Collects the constraints of a module: its tensor values, and the scope that each use needs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeAlias

import tvm
from tvm import relax, tirx

from tvm_ipc import packed_functions
from tvm_ipc.analysis.binding_builders import device_of, same_device
from tvm_ipc.analysis.ffi_arrays import as_list
from tvm_ipc.analysis.program_order import Region, Step, linearize
from tvm_ipc.analysis.views_and_writes_of_calls import ALLOCATING, PACKED_CALLERS, viewed
from tvm_ipc.arguments import counted
from tvm_ipc.errors import TransformError
from tvm_ipc.packed_functions import ANY, RESULT
from tvm_ipc.transform.byoc.extern_declaration import declared_scopes, declared_writes
from tvm_ipc.transform.memory_scopes.constraint_types import (
    OUT,
    VALUE,
    FunctionValue,
    PlannedInto,
    RelaxCall,
    ScopedFunction,
    ScopedUse,
    ScopeFacts,
    TensorRoot,
    TensorValue,
    Value,
    pairs,
    tensors,
    with_paths,
)
from tvm_ipc.transform.memory_scopes.make_allocations_explicit import may_allocate
from tvm_ipc.transform.memory_scopes.operator_scope_demands import GLOBAL, ScopeRegistry
from tvm_ipc.transform.memory_scopes.scopes_of_prim_func_params import PARAM_SCOPES, PrimFuncParams
from tvm_ipc.tvm_moved_names import GenericConst, StringImm

_STORAGES = {"relax.memory.alloc_storage": 2, "relax.vm.alloc_storage": 3}
_PLANNED = {"relax.memory.alloc_tensor", "relax.vm.alloc_tensor"}
_KILLS = {"relax.memory.kill_tensor", "relax.memory.kill_storage", "relax.vm.kill_object"}

#: The operands of a call, each with its path in the binding.
_Operands: TypeAlias = "list[tuple[Value, tuple[int, ...]]]"

#: Exact classes, because a look-up of the class is faster than `isinstance`.
_VARS = (relax.Var, relax.DataflowVar)
_TENSORS = (relax.TensorType, relax.AnyType)


def collect(
    module: tvm.IRModule, registry: ScopeRegistry, primfuncs: PrimFuncParams, *, every: bool
) -> ScopeFacts:
    """Return the constraints of a module.

    Parameters
    ----------
    every : read all calls. Otherwise calls without demands are read only if an opaque scope occurs,
        because they accept every transparent scope.

    Raises
    ------
    TransformError
        The module is malformed; the message names the function and the variable.
    """
    program = _Collector(module, registry, primfuncs, every).run()
    if program.opaque and not every:
        program = _Collector(module, registry, primfuncs, True).run()
    return program


class _Collector:
    """Walks over a module once and collects its constraints."""

    def __init__(
        self, module: tvm.IRModule, registry: ScopeRegistry, primfuncs: PrimFuncParams, every: bool
    ) -> None:
        self.program = ScopeFacts(module)
        self.every = every  #: whether calls without demands are read
        self.registry = registry
        self.devices = list(module.global_infos.get("vdevice", []))
        self.primfuncs = primfuncs
        self.globals: dict[str, Any] = {}
        self.values: dict[int, Value] = {}
        self._constants: dict[tuple[int, int], Value] = {}
        self.private: bool  #: whether the callers of some function may all be known
        self.function: ScopedFunction
        self.step: Step

    def run(self) -> ScopeFacts:
        """Visit all functions and return what was collected."""
        for global_var, function in self.program.module.functions_items():
            name = str(global_var.name_hint)
            if isinstance(function, relax.Function):
                attrs = function.attrs or {}
                facts = self.declare(name, function, local=False)
                facts.value.escapes = "global_symbol" in attrs
                self.globals[name] = facts
            else:
                self.globals[name] = function
        self.private = not all(facts.value.escapes for facts in self.program.functions)
        functions = [value for value in self.globals.values() if isinstance(value, ScopedFunction)]
        for facts in functions:
            self.visit_function(facts)
        for facts in self.program.functions:
            self.fix_boundary(facts)
        scopes = {scope for scope, _ in self.program.fixed.values()}
        scopes.update(use.exact for use in self.program.uses if use.exact is not None)
        self.program.opaque = not all(self.registry.scopes[scope] for scope in scopes)
        return self.program

    # Functions.

    def declare(self, name: str, function: relax.Function, *, local: bool) -> ScopedFunction:
        """Record a Relax function, with fresh values for its parameters and its result."""
        if not isinstance(function.body, relax.SeqExpr):
            raise TransformError(
                f"PlanMemoryScopes: the body of function {name!r} is a "
                f"{type(function.body).__name__}, not a sequence of bindings; run "
                "relax.transform.Normalize"
            )
        params = tuple(self.fresh(param.ty, TensorRoot(param)) for param in function.params)
        # No code reads the root of a result, so that a new variable will do.
        returned = self.fresh(function.ret_ty, TensorRoot(relax.Var(name)))
        value = FunctionValue(name, params, returned, local)
        result = ScopedFunction(name, function, value, linearize(name, function))
        attrs = function.attrs or {}
        result.pure = bool(function.is_pure) and not bool(attrs.get("relax.force_pure", False))
        bounds = attrs.get("tir_var_upper_bound", None)
        result.bounds = {str(k): int(v) for k, v in bounds.items()} if bounds else {}
        self.program.functions.append(result)
        return result

    def fix_boundary(self, facts: ScopedFunction) -> None:
        """Fix the scopes of a function's parameters and results that its callers do not determine.

        These are the parameters that its attribute names a scope for. If it has unknown callers,
        they are all parameters and results.
        """
        unknown = facts.value.escapes
        reason = "has unknown callers" if unknown else f"names its scope in {PARAM_SCOPES!r}"
        reason = f"is a parameter of {facts.name!r}, which {reason}"
        for scope, value in zip(self.param_scopes(facts), facts.value.params, strict=True):
            for tensor in tensors(value) if scope or unknown else ():
                self.program.fixed.setdefault(tensor.leaf, (scope or GLOBAL, reason))
        for tensor in tensors(facts.value.result) if unknown else ():
            self.program.fixed.setdefault(
                tensor.leaf, (GLOBAL, f"is returned by {facts.name!r}, which has unknown callers")
            )

    def param_scopes(self, facts: ScopedFunction) -> list[str]:
        """Return the scope of each parameter that an attribute specifies, "" for none."""
        count = len(facts.function.params)
        attribute = (facts.function.attrs or {}).get(PARAM_SCOPES, None)
        if attribute is None:
            return [""] * count
        scopes = [str(scope) for scope in attribute]
        if len(scopes) != count:
            raise TransformError(
                f"PlanMemoryScopes: function {facts.name!r} has {counted(count, 'parameter')}, "
                f"but its attribute {PARAM_SCOPES!r} has {counted(len(scopes), 'scope')}; name one "
                "for each"
            )
        for scope in scopes:
            self.check_scope(scope, f"the attribute {PARAM_SCOPES!r} of function {facts.name!r}")
        return scopes

    def visit_function(self, facts: ScopedFunction) -> None:
        """Collect the constraints of the body of a function."""
        for param, value in zip(facts.function.params, facts.value.params, strict=True):
            self.values[hash(param)] = value
        self.function = facts
        self.visit_region(facts.program.body)
        description = f"result of {facts.name!r}"
        self.tie_result(facts.program.body, facts.value.result, description)

    # Sequences of bindings.

    def visit_region(self, region: Region) -> None:
        """Collect the constraints of the bindings of a region."""
        for step in self.function.program.steps[region]:
            self.step = step
            self.values[hash(step.var)] = self.visit_binding(step)

    def tie_result(self, region: Region, result: Value, description: str) -> None:
        """Tie the value at the end of a region to `result`."""
        for path, tensor, target in pairs(self.value_of(region.result), result):
            use = ScopedUse(
                tensor, self.function, region, None, path, description, same=target.leaf
            )
            self.program.uses.append(use)

    def visit_binding(self, step: Step) -> Value:
        """Read a binding and return the value of its variable."""
        var, value = step.var, step.value
        kind = type(value)  # faster than `isinstance`
        if type(step.binding) is relax.MatchCast and kind is not relax.Call:
            return self.rerooted(self.value_of(value), TensorRoot(var))
        if kind is relax.Call:
            return self.visit_call(var, value)
        if kind is relax.If:
            return self.visit_if(step)
        if kind is relax.Function:
            return self.visit_local_function(step)
        if kind is relax.SeqExpr:
            raise TransformError(
                f"PlanMemoryScopes: in function {self.function.name!r} {var.name} is bound to "
                "a sequence of bindings; run relax.transform.Normalize"
            )
        return self.annotated(var, self.value_of(value), (VALUE,))

    def visit_if(self, step: Step) -> Value:
        """Read both branches of an if and return its value."""
        var = step.var
        result = self.fresh(var.ty, TensorRoot(var))
        for region in step.branches:
            if not isinstance(region.body, relax.SeqExpr):
                raise TransformError(
                    f"PlanMemoryScopes: in function {self.function.name!r} a branch of {var.name} "
                    "is not a sequence of bindings; run relax.transform.Normalize"
                )
            self.visit_region(region)
            self.tie_result(region, result, f"result {var.name} of an if")
        return result

    def visit_local_function(self, step: Step) -> Value:
        """Read a function that is defined inside another one, and return its value."""
        outer = self.function
        facts = self.declare(f"{outer.name}.{step.var.name}", step.value, local=True)
        self.values[hash(step.var)] = facts.value  # it may call itself
        self.private = True
        self.visit_function(facts)
        self.function, self.step = outer, step
        facts.outer = outer
        return facts.value

    # Calls.

    def visit_call(self, var: relax.Var, call: relax.Call) -> Value:
        """Read a call and return its value."""
        source, op = viewed(call), call.op
        if source is not None:
            return self.rerooted(self.value_of(source), TensorRoot(var))
        if type(op) is tvm.ir.Op:
            return self.visit_operator(var, call, op.name)
        if type(op) is relax.ExternFunc:
            name, count = str(op.global_symbol), len(call.args)
            declared = declared_scopes(op)
            # Operands are read if functions may be private: one that is passed here escapes.
            if declared or self.every or self.private or self.registry.demands(name, count):
                self.visit_packed(
                    name, self.operands(as_list(call.args)), declared, declared_writes(op)
                )
            return self.packed_result(var, name, count)
        if isinstance(op, tvm.ir.GlobalVar):
            name = str(op.name_hint)
            callee = self.globals.get(name)
            if isinstance(callee, tirx.PrimFunc):
                if self.every or any(self.primfuncs.scopes(name)):
                    self.visit_primfunc(name, self.operands(as_list(call.args)))
                return None  # a call in destination-passing style has no result
            if isinstance(callee, ScopedFunction):
                return self.visit_relax_call(var, call, callee.value)
            if callee is None:
                raise TransformError(
                    f"PlanMemoryScopes: function {self.function.name!r} calls {op.name_hint!r}, "
                    "which is not in the module; add it before this pass"
                )
        callee = self.values.get(hash(op)) if isinstance(op, relax.Var) else None
        if isinstance(callee, FunctionValue):
            return self.visit_relax_call(var, call, callee)
        self.visit_packed("", self.operands(as_list(call.args)))
        return self.packed_result(var, "", len(call.args))

    def operands(self, arguments: Iterable[relax.Expr], first: int = 0) -> _Operands:
        """Return the operands of a call in destination-passing style."""
        return [(self.value_of(argument), (k,)) for k, argument in enumerate(arguments, first)]

    def visit_relax_call(self, var: relax.Var, call: relax.Call, callee: FunctionValue) -> Value:
        """Tie arguments and result to the parameters and the result of a Relax function."""
        if len(call.args) != len(callee.params):
            raise TransformError(
                f"PlanMemoryScopes: function {self.function.name!r} calls {callee.name!r} with "
                f"{counted(len(call.args), 'argument')}, but it has "
                f"{counted(len(callee.params), 'parameter')}; pass one argument for each"
            )
        for k, (argument, param) in enumerate(zip(as_list(call.args), callee.params, strict=True)):
            for path, tensor, target in pairs(self.value_of(argument), param):
                self.use(tensor, (k, *path), f"argument {k} of {callee.name!r}", same=target.leaf)
        result = self.fresh(var.ty, TensorRoot(var))
        for path, source, target in pairs(callee.result, result):
            returned = TensorValue(source.leaf, target.root)
            self.use(returned, (OUT, *path), f"result of {callee.name!r}", same=target.leaf)
        self.function.calls.append(RelaxCall(self.step, callee))
        return result

    def visit_primfunc(self, name: str, operands: _Operands) -> None:
        """Record the scopes that a PrimFunc needs for its operands."""
        scopes = self.primfuncs.scopes(name)
        self.program.calls[name] += 1
        for k, (value, path) in enumerate(operands):
            if not isinstance(value, TensorValue):
                continue
            if k >= len(scopes):
                raise TransformError(
                    f"PlanMemoryScopes: function {self.function.name!r} calls {name!r} with more "
                    f"arguments than its {counted(len(scopes), 'parameter')}; pass one for each"
                )
            scope, param = scopes[k], (name, k)
            if scope is not None:
                self.check_scope(scope, f"parameter {k} of {name!r}")
            self.use(value, path, "", exact=scope, param=param, written=True)

    def visit_packed(
        self,
        name: str,
        operands: _Operands,
        declared: Mapping[int, str] | None = None,
        writes: Collection[int] | None = None,
    ) -> None:
        """Record the scopes that a packed function needs for its operands.

        Parameters
        ----------
        declared : scopes from the declaration of the callee; they override the registry.
        writes : the operands that the callee declares to write. The registry overrides it.
        """
        demands: dict[int | str, str] = {**self.registry.demands(name, len(operands))}
        demands.update(declared.items() if declared else ())
        registered_writes = self.registry.writes(name, len(operands))
        writes = writes if registered_writes is None else registered_writes
        for k, (value, operand_path) in enumerate(operands):
            for path, tensor in with_paths(value, operand_path):
                description = f"operand {k} of {name or 'a closure'}"
                scope = demands.get(k)
                if declared and k in declared:
                    self.check_scope(declared[k], description)
                written = writes is None or k in writes
                self.use(tensor, path, description, exact=scope, written=written)

    def packed_result(self, var: relax.Var, name: str, count: int = 0) -> Value:
        """Return the result of a packed function, of a closure, or of an operator."""
        function = packed_functions.find(name)
        scope = self.registry.demands(name, count).get(RESULT, GLOBAL)
        if function is not None and function.result == "PlannedInto":
            return PlannedInto(scope)
        result = self.fresh(var.ty, TensorRoot(var))
        for tensor in tensors(result):
            self.program.fixed.setdefault(tensor.leaf, (scope, f"comes from {name or 'a closure'}"))
        return result

    def visit_operator(self, var: relax.Var, call: relax.Call, name: str) -> Value:
        """Read a call of a Relax operator."""
        args = call.args
        if name == "relax.builtin.alloc_tensor":
            return self.visit_alloc(var, call)
        if name in _STORAGES:
            return PlannedInto(str(args[_STORAGES[name]].value))
        if name in _PLANNED:
            storage = self.values.get(hash(args[0]))
            scope = storage.scope if isinstance(storage, PlannedInto) else GLOBAL
            result = self.fresh(var.ty, TensorRoot(var))
            for tensor in tensors(result):
                self.program.fixed[tensor.leaf] = (scope, "is in a storage that was planned")
            return result
        if name in _KILLS:
            return None
        if name in ("relax.hint_on_device", "relax.to_vdevice"):
            return self.visit_move(var, call, name)
        if name in ALLOCATING:
            return self.visit_allocating(var, call, name)
        if name in PACKED_CALLERS:
            packed = args[0]
            symbol = str(packed.global_symbol) if isinstance(packed, relax.ExternFunc) else ""
            self.visit_packed(symbol, self.operands(as_list(args)[1:], first=1))
            return self.packed_result(var, symbol, len(args) - 1)
        demands = self.registry.demands(name, len(args))
        for k, argument in enumerate(as_list(args)):
            for path, tensor in with_paths(self.value_of(argument), (k,)):
                self.use(tensor, path, f"operand {k} of {name}", exact=demands.get(k))
        return self.packed_result(var, name, len(args))

    def visit_allocating(self, var: relax.Var, call: relax.Call, name: str) -> Value:
        """Read a call that allocates its outputs, or returns inputs as outputs.

        A call that can be lowered to explicit allocations is noted in `program.allocating`; it is
        lowered before scopes are planned.
        """
        callee, arguments = call.args[0], call.args[1]
        external = name == "relax.call_dps_packed"
        if not external and (len(call.args) > 2 or str(callee.name_hint) not in self.globals):
            raise TransformError(
                f"PlanMemoryScopes: in function {self.function.name!r}, {var.name} is bound to a "
                f"malformed {name}: {call}; call a PrimFunc of the module with a tuple of arguments"
            )
        if may_allocate(self.function, self.step):
            self.program.allocating.append((self.function, self.step))
        value = self.value_of(arguments)
        fields = value if isinstance(value, tuple) else (value,)
        operands: _Operands = [
            (field, (1, k) if isinstance(value, tuple) else (1,)) for k, field in enumerate(fields)
        ]
        result = self.fresh(var.ty, TensorRoot(var))
        outputs = tensors(result)
        if name == "relax.call_tir_inplace":
            indices = [int(i) for i in call.attrs.inplace_indices]
            alias: list[Value] = [
                self.rerooted(fields[i], out.root) if i >= 0 else out
                for i, out in zip(indices, outputs, strict=True)
            ]
            result = tuple(alias) if isinstance(result, tuple) and len(alias) > 1 else alias[0]
            outputs = [out for i, out in zip(indices, outputs, strict=True) if i < 0]
        for out in outputs:
            self.program.allocs.setdefault(out.leaf, []).append((self.function, self.step))
        operands += [(out, (OUT, j)) for j, out in enumerate(outputs)]
        if external:
            symbol = str(callee.global_symbol) if isinstance(callee, relax.ExternFunc) else ""
            self.visit_packed(symbol, operands, writes=range(len(fields), len(operands)))
        else:
            self.visit_primfunc(str(callee.name_hint), operands)
        return result

    def visit_alloc(self, var: relax.Var, call: relax.Call) -> Value:
        """Read an allocation; a scope other than "global" is fixed, "global" is a default."""
        scope = call.args[3]
        if not isinstance(scope, StringImm):
            raise TransformError(
                f"PlanMemoryScopes: the scope of {var.name} in function {self.function.name!r} is "
                f"{scope}; pass the name of a scope as a string"
            )
        result = self.fresh(var.ty, TensorRoot(var))
        if isinstance(result, TensorValue):
            self.program.allocs.setdefault(result.leaf, []).append((self.function, self.step))
            name = self.check_scope(str(scope.value), f"the allocation of {var.name}")
            if name not in ("", GLOBAL):
                self.program.fixed[result.leaf] = (name, f"was allocated there as {var.name}")
            if self.devices and var.ty.vdevice is not None:
                device = device_of(var.ty, self.devices)
                if getattr(call.args[2], "value", None) != device:
                    self.program.misplaced.append((result.leaf, self.function, self.step))
        return result

    def visit_move(self, var: relax.Var, call: relax.Call, name: str) -> Value:
        """Read a `relax.hint_on_device` or `relax.to_vdevice`.

        A move between scopes of one device becomes a copy of this pass, if one is necessary. A
        move between devices stays as it is.
        """
        value = self.value_of(call.args[0])
        if not isinstance(value, TensorValue):
            return value
        where = f"the {name} of {var.name}"
        if name == "relax.hint_on_device":
            scope = self.check_scope(str(call.attrs.memory_scope), where)
            if scope in ("", GLOBAL):
                self.program.hints.append((self.function, self.step))
                return self.rerooted(value, TensorRoot(var))
        else:
            target = call.attrs.dst_vdevice
            scope = self.check_scope(str(target.memory_scope), where)
            source = getattr(self.program.types[value.leaf], "vdevice", None)
            if source is None or not same_device(source, target):
                self.use(value, (0,), where)
                result = self.fresh(var.ty, TensorRoot(var))
                for tensor in tensors(result):
                    self.program.fixed[tensor.leaf] = (scope, f"was moved there as {var.name}")
                return result
        self.program.hints.append((self.function, self.step))
        return self.in_scope(var, value, scope, (VALUE,), f"is annotated as {var.name}")

    # Values.

    def fresh(self, ty: Any, root: TensorRoot) -> Value:
        """Return new leaves for a value of a type."""
        if type(ty) in _TENSORS:
            leaf = len(self.program.types)
            self.program.types.append(ty)
            scope = self.vdevice_scope(ty)
            if scope:
                self.program.fixed[leaf] = (scope, f"is on a VDevice as {root.name}")
            return TensorValue(leaf, root)
        if isinstance(ty, relax.TupleType):
            return tuple(
                self.fresh(field, TensorRoot(root.base, (*root.path, index)))
                for index, field in enumerate(as_list(ty.fields))
            )
        return None

    def vdevice_scope(self, ty: Any) -> str:
        """Return the scope that the VDevice of a type specifies, "" for none."""
        vdevice = getattr(ty, "vdevice", None)
        scope = str(vdevice.memory_scope) if vdevice is not None else ""
        if scope in ("", GLOBAL):
            return ""
        return self.check_scope(scope, "a VDevice")

    def check_scope(self, scope: str, where: str) -> str:
        """Return a registered scope, or raise a TransformError that mentions where it was named."""
        if scope and scope not in self.registry.scopes:
            raise TransformError(
                f"PlanMemoryScopes: {where} names the unknown memory scope {scope!r}; "
                f"{self.registry.known_scopes()}"
            )
        return scope

    def value_of(self, expr: Any) -> Value:
        """Return the value of an expression that is not a call."""
        kind = type(expr)  # faster than `isinstance`
        if kind in _VARS:
            value = self.values.get(hash(expr))
            if type(value) is FunctionValue:
                value.escapes = True  # `visit_call` does not look up its callee here
            return value
        if kind is GenericConst:
            if not isinstance(expr.ty, relax.TensorType):
                return None
            key = (id(self.function), hash(expr))
            constant = self._constants.get(key)
            if constant is None:
                constant = self._constants[key] = self.fresh(expr.ty, TensorRoot(expr))
                assert isinstance(constant, TensorValue)
                self.program.fixed.setdefault(constant.leaf, (GLOBAL, "is a constant"))
            return constant
        if kind is relax.Tuple:
            return tuple(map(self.value_of, as_list(expr.fields)))
        if kind is relax.TupleGetItem:
            value = self.value_of(expr.tuple_value)
            return value[int(expr.index)] if isinstance(value, tuple) else None
        if kind is tvm.ir.GlobalVar:
            self.program.referenced.add(str(expr.name_hint))
            facts = self.globals.get(str(expr.name_hint))
            if isinstance(facts, ScopedFunction):
                facts.value.escapes = True
            return None
        if isinstance(expr, relax.Call) and isinstance(expr.ty, relax.TensorType):
            raise TransformError(
                f"PlanMemoryScopes: in function {self.function.name!r} a call is nested in another "
                f"one: {expr}; run relax.transform.Normalize"
            )
        return None

    def rerooted(self, value: Value, root: TensorRoot) -> Value:
        """Return the same leaves, read through another variable."""
        if isinstance(value, TensorValue):
            return TensorValue(value.leaf, root)
        if isinstance(value, tuple):
            return tuple(
                self.rerooted(field, TensorRoot(root.base, (*root.path, index)))
                for index, field in enumerate(value)
            )
        return value

    def annotated(self, var: relax.Var, value: Value, path: tuple[int, ...]) -> Value:
        """Return the value of a variable, in the scope that the type of the variable specifies."""
        if isinstance(value, TensorValue):
            scope = self.vdevice_scope(var.ty)
            if scope and scope != self.vdevice_scope(self.program.types[value.leaf]):
                return self.in_scope(var, value, scope, path, f"is on a VDevice as {var.name}")
        return value

    def in_scope(
        self, var: relax.Var, value: TensorValue, scope: str, path: tuple[int, ...], why: str
    ) -> Value:
        """Return a value in a scope; it shares the memory of `value` if no copy is needed."""
        result = self.fresh(self.program.types[value.leaf], TensorRoot(var))
        assert isinstance(result, TensorValue)
        self.program.fixed[result.leaf] = (scope, why)
        self.use(value, path, f"annotation of {var.name}", same=result.leaf, moves=True)
        return result

    def use(
        self, tensor: TensorValue, path: tuple[int, ...], description: str, **needs: Any
    ) -> None:
        """Record a use in the current step."""
        use = ScopedUse(
            tensor, self.function, self.step.region, self.step, path, description, **needs
        )
        if use.exact != ANY:
            self.program.uses.append(use)
