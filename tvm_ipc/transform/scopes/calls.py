# SPDX-License-Identifier: Apache-2.0
"""What calls make of tensors, and need of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

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
    AllocSite,
    CallRecord,
    DeferredCall,
    FunctionFacts,
    FunctionValue,
    Root,
    Storage,
    Tensor,
    Use,
    Value,
    Write,
    pairs,
    tensors,
)
from tvm_ipc.transform.scopes.values import Values

_STORAGES = {"relax.memory.alloc_storage": 2, "relax.vm.alloc_storage": 3}
_PLANNED = {"relax.memory.alloc_tensor", "relax.vm.alloc_tensor"}
_KILLS = {"relax.memory.kill_tensor", "relax.memory.kill_storage", "relax.vm.kill_object"}


class Calls(Values):
    """Reads calls: of operators, packed functions, PrimFuncs and Relax functions."""

    def visit_call(self, var: relax.Var, call: relax.Call) -> Value:
        """Read a call and return its value."""
        op = call.op
        if type(op) is tvm.ir.Op:
            return self.visit_operator(var, call, self.name_of(op))
        if type(op) is relax.ExternFunc:
            name = str(op.global_symbol)
            declared = declared_scopes(op)
            if declared or self.private or self.registry.demands(name, len(call.args)):
                self.visit_packed_call(name, call)
            else:
                self.defer(name, call)
            return self.packed_result(var, name, call.args)
        if isinstance(op, tvm.ir.GlobalVar):
            name = self.name_of(op)
            callee = self.globals.get(name)
            if isinstance(callee, tirx.PrimFunc):
                if any(self.primfuncs.scopes(name)):
                    self.visit_destination_passing(name, call)
                else:
                    self.defer(name, call)
                return None  # in destination-passing form there is no result
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
        self.visit_packed("", enumerate(call.args), len(call.args))
        return self.packed_result(var, "", call.args)

    def visit_relax_call(self, var: relax.Var, call: relax.Call, callee: FunctionValue) -> Value:
        """Tie arguments and result to the parameters and the result of a Relax function."""
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

    def visit_destination_passing(self, name: str, call: relax.Call) -> None:
        """Read a call of a PrimFunc that takes its outputs."""
        self.visit_primfunc(name, [(self.value_of(arg), (k,)) for k, arg in enumerate(call.args)])

    def defer(self, name: str, call: relax.Call) -> None:
        """Leave a call that demands nothing for later."""
        place = (self.number, self.region, self.index)
        self.function.deferred.append(DeferredCall(*place, name, call))

    def read_deferred(self) -> None:
        """Read the calls that were deferred."""
        for facts in self.program.functions:
            self.function = facts
            deferred, facts.deferred = facts.deferred, []
            for call in deferred:
                self.number, self.region, self.index = call.number, call.region, call.index
                if type(call.call.op) is relax.ExternFunc:
                    self.visit_packed_call(call.name, call.call)
                else:
                    self.visit_destination_passing(call.name, call.call)

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
            scope, param = scopes[k], (name, k)
            if scope is not None:
                self.check_scope(scope, f"parameter {k} of {name!r}")
            use = self.use(value, path, "", exact=scope, param=param, written=True)
            use.fresh = fresh is not None and k >= fresh
            self.function.writes.append(Write(self.number, value.leaf, param))

    def visit_packed_call(self, name: str, call: relax.Call) -> None:
        """Read a call of a packed function, which may say of itself what it needs and writes."""
        self.visit_packed(
            name,
            enumerate(call.args),
            len(call.args),
            declared=declared_scopes(call.op),
            writes=declared_writes(call.op),
        )

    def visit_packed(
        self,
        name: str,
        arguments: Iterable[tuple[int, relax.Expr]],
        count: int,
        first: int = 0,
        declared: Mapping[int, str] | None = None,
        writes: Collection[int] | None = None,
    ) -> None:
        """Note what a packed function needs of its operands."""
        demands: dict[int | str, str] = {**self.registry.demands(name, count)}
        demands.update(declared.items() if declared else ())
        known = self.registry.writes(name, count)
        writes = writes if known is None else known
        for place, argument in arguments:
            k = place - first
            written = writes is None or k in writes
            for path, tensor in _with_paths(self.value_of(argument)):
                what = f"operand {k} of {name}" if name else f"operand {k} of a closure"
                scope = demands.get(k)
                if declared and k in declared:
                    self.check_scope(declared[k], what)
                self.use(tensor, (place, *path), what, exact=scope, written=written)
                if written:
                    self.function.writes.append(Write(self.number, tensor.leaf, None))

    def packed_result(self, var: relax.Var, name: str, operands: Any = None) -> Value:
        """Return the result of a packed function, of a closure, or of an operator that calls one.

        It may be one of the operands where nothing else is known. Most functions return nothing,
        which nothing ever reads.
        """
        count = 0 if operands is None else len(operands)
        function = contract.find(name)
        if function is not None:
            operands = [operands[k] for k in function.places((function.result_of,), count)]
        elif self.registry.writes(name, count) is not None:
            operands = None
        if operands:
            self.handed_on[hash(var)] = operands
        scope = self.registry.demands(name, count).get(RESULT, GLOBAL)
        if function is not None and function.result == "Storage":
            return Storage(scope)
        result = self.fresh(var.ty, Root(var))
        for tensor in tensors(result):
            self.program.fixed.setdefault(tensor.leaf, (scope, f"comes from {name or 'a closure'}"))
        return result

    def visit_operator(self, var: relax.Var, call: relax.Call, name: str) -> Value:
        """Read a call of a Relax operator."""
        args = call.args
        if name == "relax.builtin.alloc_tensor":
            return self.visit_alloc(var, call)
        if name in VIEWS:
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
            return self.packed_result(var, symbol, args[1:])
        demands = self.registry.demands(name, len(args))
        for k, argument in enumerate(args):
            for path, tensor in _with_paths(self.value_of(argument)):
                self.use(tensor, (k, *path), f"operand {k} of {name}", exact=demands.get(k))
        if name.startswith(("relax.call_builtin_with_ctx", "relax.invoke")):
            for tensor in tensors(tuple(map(self.value_of, args))):
                self.function.writes.append(Write(self.number, tensor.leaf, None))
            return self.packed_result(var, name, args)
        return self.packed_result(var, name)

    def visit_alloc(self, var: relax.Var, call: relax.Call) -> Value:
        """Read an allocation, which is in "global" memory where nothing else was asked for."""
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
            if self.devices and var.ty.vdevice is not None:
                device = device_of(var.ty, self.devices)
                if getattr(call.args[2], "value", None) != device:
                    self.program.misplaced.append((result.leaf, self.region, self.index))
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
                self.program.hints.append((self.region, self.index))
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
        """Read a call that allocates the outputs of a PrimFunc, or takes them from its inputs."""
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
        """Read a call that allocates the outputs of a packed function."""
        packed, arguments = call.args[0], call.args[1]
        symbol = str(packed.global_symbol) if isinstance(packed, relax.ExternFunc) else ""
        value = self.value_of(arguments)
        fields = value if isinstance(value, tuple) else (value,)
        result = self.fresh(var.ty, Root(var))
        demands = self.registry.demands(symbol, len(fields) + len(tensors(result)))
        inline = isinstance(arguments, relax.Tuple)
        for k, part in enumerate(fields):
            for path, tensor in _with_paths(part):
                place = (1, k, *path) if inline or len(fields) > 1 else (1, *path)
                self.use(tensor, place, f"operand {k} of {symbol}", exact=demands.get(k))
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
