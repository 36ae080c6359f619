# SPDX-License-Identifier: Apache-2.0
"""The values of expressions: which tensors they are, and where to read them."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax

from tvm_ipc.contract import ANY
from tvm_ipc.errors import TransformError
from tvm_ipc.transform.ir.program import Step
from tvm_ipc.transform.scopes.demands import GLOBAL, ScopeRegistry
from tvm_ipc.transform.scopes.facts import (
    FunctionFacts,
    FunctionValue,
    ScopedUse,
    ScopeFacts,
    TensorRoot,
    TensorValue,
    Value,
)
from tvm_ipc.transform.scopes.primfunc import PrimFuncs

#: What variables are, and types of what may be a tensor; faster to ask for than `isinstance`.
_VARS = (relax.Var, relax.DataflowVar)
_TENSORS = (relax.TensorType, relax.AnyType)


class Values:
    """The state of a walk over a module, and what expressions stand for at a place of it."""

    def __init__(
        self, module: tvm.IRModule, registry: ScopeRegistry, primfuncs: PrimFuncs, every: bool
    ) -> None:
        self.program = ScopeFacts(module)
        self.every = every  #: whether calls are read that demand nothing
        self.registry = registry
        self.devices = list(module.global_infos.get("vdevice", []))
        self.primfuncs = primfuncs
        self.globals: dict[str, Any] = {}
        self.values: dict[int, Value] = {}
        self._names: dict[int, str] = {}
        self._constants: dict[tuple[int, int], Value] = {}
        self.private: bool  #: whether there are functions whose callers may all be known
        self.function: FunctionFacts
        self.step: Step

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
                self.fresh(part, TensorRoot(root.base, (*root.path, index)))
                for index, part in enumerate(ty.fields[:])
            )
        return None

    def name_of(self, op: tvm.ir.Op | tvm.ir.GlobalVar) -> str:
        """Return the name of an operator or a global function."""
        known = self._names.get(hash(op))
        if known is None:
            known = str(op.name if isinstance(op, tvm.ir.Op) else op.name_hint)
            self._names[hash(op)] = known
        return known

    def vdevice_scope(self, ty: Any) -> str:
        """Return the scope that a type asks for, or nothing."""
        vdevice = getattr(ty, "vdevice", None)
        scope = str(vdevice.memory_scope) if vdevice is not None else ""
        if scope in ("", GLOBAL):
            return ""
        return self.check_scope(scope, "a VDevice")

    def check_scope(self, scope: str, where: str) -> str:
        """Return a scope that is known, or raise a TransformError that says who named it."""
        if scope and scope not in self.registry.scopes:
            raise TransformError(
                f"PlanMemoryScopes: {where} names the unknown memory scope {scope!r}; "
                f"{self.registry.known_scopes()}"
            )
        return scope

    def value_of(self, expr: Any) -> Value:
        """Return what an expression stands for that is no call."""
        kind = type(expr)  # told faster than whether it is an instance
        if kind in _VARS:
            value = self.values.get(hash(expr))
            if type(value) is FunctionValue:
                value.escapes = True  # `visit_call` does not ask here for what it calls
            return value
        if kind is tvm.ir.GenericConst:
            if not isinstance(expr.ty, relax.TensorType):
                return None
            key = (id(self.function), hash(expr))
            known = self._constants.get(key)
            if known is None:
                known = self._constants[key] = self.fresh(expr.ty, TensorRoot(expr))
                assert isinstance(known, TensorValue)
                self.program.fixed.setdefault(known.leaf, (GLOBAL, "is a constant"))
            return known
        if kind is relax.Tuple:
            return tuple(map(self.value_of, expr.fields[:]))
        if kind is relax.TupleGetItem:
            value = self.value_of(expr.tuple_value)
            return value[int(expr.index)] if isinstance(value, tuple) else None
        if kind is tvm.ir.GlobalVar:
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

    def rerooted(self, value: Value, root: TensorRoot) -> Value:
        """Return the same memory, read through another variable."""
        if isinstance(value, TensorValue):
            return TensorValue(value.leaf, root)
        if isinstance(value, tuple):
            return tuple(
                self.rerooted(part, TensorRoot(root.base, (*root.path, index)))
                for index, part in enumerate(value)
            )
        return value

    def annotated(self, var: relax.Var, value: Value, path: tuple[int, ...]) -> Value:
        """Return the value of a variable whose type may say another scope than the value's."""
        if isinstance(value, TensorValue):
            scope = self.vdevice_scope(var.ty)
            if scope and scope != self.vdevice_scope(self.program.types[value.leaf]):
                return self.moved(var, value, scope, path, f"is on a VDevice as {var.name}")
        return value

    def moved(
        self, var: relax.Var, value: TensorValue, scope: str, path: tuple[int, ...], why: str
    ) -> Value:
        """Return a value that is in a scope, the same memory where that is possible."""
        result = self.fresh(self.program.types[value.leaf], TensorRoot(var))
        assert isinstance(result, TensorValue)
        self.program.fixed[result.leaf] = (scope, why)
        self.use(value, path, f"annotation of {var.name}", same=result.leaf, moves=True)
        return result

    def use(self, tensor: TensorValue, path: tuple[int, ...], what: str, **needs: Any) -> ScopedUse:
        """Note a use in the current step."""
        use = ScopedUse(tensor, self.function, self.step.region, self.step, path, what, **needs)
        if use.exact != ANY:
            self.program.uses.append(use)
        return use
