# SPDX-License-Identifier: Apache-2.0
"""What calls make of tensors, and need of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeAlias

import tvm
from tvm import relax, tirx

from tvm_ipc import contract
from tvm_ipc.contract import RESULT
from tvm_ipc.errors import TransformError
from tvm_ipc.transform.byoc.extern import declared_scopes, declared_writes
from tvm_ipc.transform.ir.build import device_of, same_device
from tvm_ipc.transform.ir.views import VIEWS
from tvm_ipc.transform.scopes.demands import GLOBAL
from tvm_ipc.transform.scopes.facts import (
    OUT,
    VALUE,
    FunctionFacts,
    FunctionValue,
    PlannedInto,
    RelaxCall,
    TensorRoot,
    TensorValue,
    Value,
    pairs,
    tensors,
)
from tvm_ipc.transform.scopes.lower_calls import ALLOCATING, may_allocate
from tvm_ipc.transform.scopes.values import Values

_STORAGES = {"relax.memory.alloc_storage": 2, "relax.vm.alloc_storage": 3}
_PLANNED = {"relax.memory.alloc_tensor", "relax.vm.alloc_tensor"}
_KILLS = {"relax.memory.kill_tensor", "relax.memory.kill_storage", "relax.vm.kill_object"}

#: The operands of a call, and where each of them is in its binding.
_Operands: TypeAlias = "list[tuple[Value, tuple[int, ...]]]"


class Calls(Values):
    """Reads calls: of operators, packed functions, PrimFuncs and Relax functions."""

    def visit_call(self, var: relax.Var, call: relax.Call) -> Value:
        """Read a call and return its value."""
        op = call.op
        if type(op) is tvm.ir.Op:
            return self.visit_operator(var, call, self.name_of(op))
        if type(op) is relax.ExternFunc:
            name, count = str(op.global_symbol), len(call.args)
            if name in VIEWS:
                return self.rerooted(self.value_of(call.args[0]), TensorRoot(var))
            declared = declared_scopes(op)
            # A function that is passed on may be called from anywhere.
            if declared or self.every or self.private or self.registry.demands(name, count):
                self.visit_packed(name, self.operands(call.args), declared, declared_writes(op))
            return self.packed_result(var, name, count)
        if isinstance(op, tvm.ir.GlobalVar):
            name = self.name_of(op)
            callee = self.globals.get(name)
            if isinstance(callee, tirx.PrimFunc):
                if self.every or any(self.primfuncs.scopes(name)):
                    self.visit_primfunc(name, self.operands(call.args))
                return None  # in destination-passing style there is no result
            if isinstance(callee, FunctionFacts):
                return self.visit_relax_call(var, call, callee.value)
            if callee is None:
                raise TransformError(
                    f"PlanMemoryScopes: function {self.function.name!r} calls {op.name_hint!r}, "
                    "which the module does not have"
                )
        callee = self.values.get(hash(op)) if isinstance(op, relax.Var) else None
        if isinstance(callee, FunctionValue):
            return self.visit_relax_call(var, call, callee)
        self.visit_packed("", self.operands(call.args))
        return self.packed_result(var, "", len(call.args))

    def operands(self, arguments: Iterable[relax.Expr], first: int = 0) -> _Operands:
        """Return the operands of a call in destination-passing style."""
        return [(self.value_of(argument), (k,)) for k, argument in enumerate(arguments, first)]

    def visit_relax_call(self, var: relax.Var, call: relax.Call, callee: FunctionValue) -> Value:
        """Tie arguments and result to the parameters and the result of a Relax function."""
        if len(call.args) != len(callee.params):
            raise TransformError(
                f"PlanMemoryScopes: function {self.function.name!r} calls {callee.name!r} with "
                f"{len(call.args)} arguments; it has {len(callee.params)} parameters"
            )
        for k, (argument, param) in enumerate(zip(call.args, callee.params, strict=True)):
            for path, tensor, target in pairs(self.value_of(argument), param):
                what = f"argument {k} of {callee.name!r}"
                self.use(tensor, (k, *path), what, same=target.leaf)
        result = self.fresh(var.ty, TensorRoot(var))
        for path, source, target in pairs(callee.result, result):
            returned = TensorValue(source.leaf, target.root)
            what = f"result of {callee.name!r}"
            self.use(returned, (OUT, *path), what, same=target.leaf)
        self.function.calls.append(RelaxCall(self.step, callee))
        return result

    def visit_primfunc(self, name: str, operands: _Operands) -> None:
        """Note what a PrimFunc needs of its operands."""
        scopes = self.primfuncs.scopes(name)
        self.program.calls[name] += 1
        for k, (value, path) in enumerate(operands):
            if not isinstance(value, TensorValue):
                continue
            if k >= len(scopes):
                raise TransformError(
                    f"PlanMemoryScopes: function {self.function.name!r} calls {name!r} with more "
                    f"arguments than its {len(scopes)} parameters"
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
        """Note what a packed function needs of its operands.

        It may say of itself what that is, and what it writes.
        """
        demands: dict[int | str, str] = {**self.registry.demands(name, len(operands))}
        demands.update(declared.items() if declared else ())
        known = self.registry.writes(name, len(operands))
        writes = writes if known is None else known
        for k, (value, place) in enumerate(operands):
            for path, tensor in _with_paths(value, place):
                what = f"operand {k} of {name}" if name else f"operand {k} of a closure"
                scope = demands.get(k)
                if declared and k in declared:
                    self.check_scope(declared[k], what)
                written = writes is None or k in writes
                self.use(tensor, path, what, exact=scope, written=written)

    def packed_result(self, var: relax.Var, name: str, count: int = 0) -> Value:
        """Return the result of a packed function, of a closure, or of an operator."""
        function = contract.find(name)
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
        if name in VIEWS:
            return self.rerooted(self.value_of(args[0]), TensorRoot(var))
        if name in _STORAGES:
            return PlannedInto(str(args[_STORAGES[name]].value))
        if name in _PLANNED:
            storage = self.values.get(hash(args[0]))
            scope = storage.scope if isinstance(storage, PlannedInto) else GLOBAL
            result = self.fresh(var.ty, TensorRoot(var))
            for tensor in tensors(result):
                self.program.fixed[tensor.leaf] = (scope, "lies in a storage that was planned")
            return result
        if name in _KILLS:
            return None
        if name in ("relax.hint_on_device", "relax.to_vdevice"):
            return self.visit_move(var, call, name)
        if name in ALLOCATING:
            return self.visit_allocating(var, call, name)
        if name in ("relax.call_pure_packed", "relax.call_inplace_packed"):
            packed = args[0]
            symbol = str(packed.global_symbol) if isinstance(packed, relax.ExternFunc) else ""
            if symbol in VIEWS:
                return self.rerooted(self.value_of(args[1]), TensorRoot(var))
            self.visit_packed(symbol, self.operands(args[1:], first=1))
            return self.packed_result(var, symbol, len(args) - 1)
        demands = self.registry.demands(name, len(args))
        for k, argument in enumerate(args):
            for path, tensor in _with_paths(self.value_of(argument), (k,)):
                self.use(tensor, path, f"operand {k} of {name}", exact=demands.get(k))
        return self.packed_result(var, name, len(args))

    def visit_allocating(self, var: relax.Var, call: relax.Call, name: str) -> Value:
        """Read a call that allocates its outputs, or takes them from its inputs.

        Where allocations may stand it is lowered before scopes are planned.
        """
        callee, packed = call.args[0], call.args[1]
        foreign = name == "relax.call_dps_packed"
        if not foreign and (len(call.args) > 2 or str(callee.name_hint) not in self.globals):
            raise TransformError(
                f"PlanMemoryScopes: in function {self.function.name!r}, {var.name} is made by a "
                f"{name} that cannot be read: {call}"
            )
        if may_allocate(self.function, self.step):
            self.program.allocating.append((self.function, self.step))
        value = self.value_of(packed)
        fields = value if isinstance(value, tuple) else (value,)
        operands: _Operands = [
            (part, (1, k) if isinstance(value, tuple) else (1,)) for k, part in enumerate(fields)
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
        if foreign:
            symbol = str(callee.global_symbol) if isinstance(callee, relax.ExternFunc) else ""
            self.visit_packed(symbol, operands, writes=range(len(fields), len(operands)))
        else:
            self.visit_primfunc(str(callee.name_hint), operands)
        return result

    def visit_alloc(self, var: relax.Var, call: relax.Call) -> Value:
        """Read an allocation, which is in "global" memory where nothing else was asked for."""
        scope = call.args[3]
        if not isinstance(scope, tvm.ir.StringImm):
            raise TransformError(
                f"PlanMemoryScopes: the scope of {var.name} in function {self.function.name!r} is "
                f"{scope}, not a string"
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
        """A move between scopes of one device is ours; one between devices is TVM's."""
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
            scope = self.check_scope(str(call.attrs.dst_vdevice.memory_scope), where)
            if not _same_device(self.program.types[value.leaf], call.attrs.dst_vdevice):
                self.use(value, (0,), where)
                result = self.fresh(var.ty, TensorRoot(var))
                for tensor in tensors(result):
                    self.program.fixed[tensor.leaf] = (scope, f"was moved there as {var.name}")
                return result
        self.program.hints.append((self.function, self.step))
        return self.moved(var, value, scope, (VALUE,), f"is annotated as {var.name}")


def _with_paths(
    value: Value, path: tuple[int, ...]
) -> Iterable[tuple[tuple[int, ...], TensorValue]]:
    if isinstance(value, TensorValue):
        yield path, value
    elif isinstance(value, tuple):
        for index, part in enumerate(value):
            yield from _with_paths(part, (*path, index))


def _same_device(ty: Any, target: relax.VDevice) -> bool:
    source = getattr(ty, "vdevice", None)
    return source is not None and same_device(source, target)
