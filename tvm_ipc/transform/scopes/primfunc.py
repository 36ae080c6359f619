# SPDX-License-Identifier: Apache-2.0
"""What PrimFuncs say of the scopes of their parameters, which they write, and what aliases them.

A parameter's buffer may have other names in the body: `match_buffer` of a block, `decl_buffer` of
its pointer, and variables that are bound to the pointer. Its scope can change only together with
theirs, and not at all where the pointer goes where nothing is known of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import tvm
import tvm_ffi
from tvm import s_tir, tirx

from tvm_ipc.transform.scopes.demands import GLOBAL

#: Attribute of a function: the scope of each parameter, "" where nothing is said. Of a Relax
#: function, what callers hand over; of a PrimFunc, what it was compiled for, "global" included.
PARAM_SCOPES = "tvm_ipc.param_scopes"

_DATA = "tirx.buffer_data"


@dataclass(eq=False)
class Parameter:
    """A buffer parameter of a PrimFunc, and what its body does with it."""

    aliases: set[int] = field(default_factory=set)  #: hashes of variables, its own included
    read: bool = False
    written: bool = False
    escapes: str = ""  #: why nothing more is known of it, or nothing
    foreign: str = ""  #: an alias that was declared in a scope of its own


class PrimFuncs:
    """Facts of the PrimFuncs of a module, found when they are asked for."""

    def __init__(self, module: tvm.IRModule) -> None:
        self.functions: dict[str, tirx.PrimFunc] = {
            str(global_var.name_hint): function
            for global_var, function in module.functions_items()
            if isinstance(function, tirx.PrimFunc)
        }
        self._scopes: dict[str, list[str | None]] = {}
        self._parameters: dict[str, list[Parameter]] = {}

    def scopes(self, name: str) -> list[str | None]:
        """Return the scope that each parameter must be in; None where any will do.

        A parameter that says "global" is taken to say nothing, unless an attribute pins it: TVM
        writes "global" where nobody said anything.
        """
        known = self._scopes.get(name)
        if known is None:
            function = self.functions[name]
            pinned = (function.attrs or {}).get(PARAM_SCOPES, None)
            known = []
            for k, param in enumerate(function.params):
                scope: str | None = scope_of(param)
                if scope in ("", GLOBAL):
                    scope = str(pinned[k]) or None if pinned is not None else None
                known.append(scope)
            self._scopes[name] = known
        return known

    def parameter(self, name: str, k: int) -> Parameter:
        """Return what the body of a PrimFunc does with a parameter."""
        known = self._parameters.get(name)
        if known is None:
            known = self._parameters[name] = find_parameters(self.functions[name])
        return known[k]

    def writes(self, name: str, k: int) -> bool:
        """Whether a PrimFunc may write a parameter."""
        parameter = self.parameter(name, k)
        return parameter.written or bool(parameter.escapes)

    def refusal(self, name: str, k: int) -> str | None:
        """Return why a parameter cannot be given another scope, or None if it can."""
        if not isinstance(self.functions[name].params[k].ty, tirx.BufferType):
            return f"parameter {k} of {name!r} is a bare pointer"
        parameter = self.parameter(name, k)
        if parameter.escapes:
            return f"parameter {k} of {name!r} {parameter.escapes}"
        if parameter.foreign:
            return f"parameter {k} of {name!r} is also {parameter.foreign}"
        return None


def scope_of(param: Any) -> str:
    """Return the scope that the type of a parameter names."""
    return str(param.ty.storage_scope) if isinstance(param.ty, tirx.BufferType) else ""


def find_parameters(function: tirx.PrimFunc) -> list[Parameter]:
    """Return what the body of a function does with each of its parameters."""
    return _Body(function).parameters


class _Body:
    """One walk over a body, then a closure over the names of each parameter."""

    def __init__(self, function: tirx.PrimFunc) -> None:
        self.parameters = [Parameter({hash(param)}) for param in function.params]
        self._of: dict[int, list[Parameter]] = {
            hash(param): [parameter]
            for param, parameter in zip(function.params, self.parameters, strict=True)
        }
        self._reads: list[tirx.Var] = []
        self._writes: list[tirx.Var] = []
        self._names: list[tuple[tirx.Var, list[tirx.Var], str]] = []
        self._known: set[int] = set()  #: uses of pointers that only give another name
        self._pointers: list[tuple[int, tirx.Var, str]] = []
        self._opaque = ""
        tvm_ffi.structural_walk(function.body, self._visit)
        for target, sources, how in self._names:
            self._alias(target, sources, how)
        for var in self._reads:
            for parameter in self._of.get(hash(var), []):
                parameter.read = True
        for var in self._writes:
            for parameter in self._of.get(hash(var), []):
                parameter.written = True
        for key, var, how in self._pointers:
            if key not in self._known:
                for parameter in self._of.get(hash(var), []):
                    parameter.escapes = how
        if self._opaque:
            for parameter in self.parameters:
                parameter.escapes = self._opaque

    def _visit(self, node: Any) -> None:
        if isinstance(node, tvm.ir.TensorLoad):
            self._reads.append(node.source)
        elif isinstance(node, tirx.BufferStore):
            self._writes.append(node.buffer)
        elif isinstance(node, tvm.ir.Call):
            self._visit_call(node)
        elif isinstance(node, tirx.Bind):
            if isinstance(node.var.ty, tvm.ir.PointerType):
                self._name(node.var, node.value, "bound to a pointer")
        elif isinstance(node, tirx.DeclBuffer):
            if node.data is not None:
                self._name(node.buffer, node.data, "declared by decl_buffer")
        elif isinstance(node, s_tir.MatchBufferRegion):
            how = "matched by match_buffer"
            self._names.append((node.buffer, [node.source.source], how))
        elif type(node).__name__ == "TilePrimitiveCall":
            self._opaque = "is used by a tile primitive"

    def _name(self, target: tirx.Var, value: tirx.Expr, how: str) -> None:
        pointers = list(_pointers_in(value))
        self._known.update(hash(call) for call, _ in pointers)
        self._names.append((target, [var for _, var in pointers], how))

    def _visit_call(self, call: tvm.ir.Call) -> None:
        name = str(call.op.name) if isinstance(call.op, tvm.ir.Op) else "a call"
        if name == _DATA:
            what = "has its pointer handed to what is not known"
            self._pointers.append((hash(call), call.args[0], what))
            return
        for argument in call.args:
            if isinstance(argument, tirx.Var) and _has_memory(argument):
                self._pointers.append((hash(call), argument, f"is an operand of {name}"))
            elif isinstance(argument, tvm.ir.TensorLoad) and name.endswith("address_of"):
                what = "has the address of an element taken"
                self._pointers.append((hash(call), argument.source, what))

    def _alias(self, target: tirx.Var, sources: list[tirx.Var], how: str) -> None:
        parameters = [p for var in sources for p in self._of.get(hash(var), [])]
        found = list({id(parameter): parameter for parameter in parameters}.values())
        if not found:
            return
        self._of[hash(target)] = found
        scope = _memory_scope(target)
        for parameter in found:
            parameter.aliases.add(hash(target))
            if len(found) > 1:
                parameter.escapes = f"shares {target.name} with another parameter"
            if scope not in ("", GLOBAL):
                parameter.foreign = f"{target.name}, {how} in scope {scope!r}"


def _has_memory(var: tirx.Var) -> bool:
    return isinstance(var.ty, tirx.BufferType | tvm.ir.PointerType)


def _memory_scope(var: tirx.Var) -> str:
    return str(var.ty.storage_scope) if _has_memory(var) else ""


def _pointers_in(value: tirx.Expr) -> Iterator[tuple[tvm.ir.Call | tirx.Var, tirx.Var]]:
    """Yield the places of an expression that point to memory, and the variables they name."""
    if isinstance(value, tirx.Var):
        if _has_memory(value):
            yield value, value
    elif isinstance(value, tvm.ir.Call):
        if isinstance(value.op, tvm.ir.Op) and str(value.op.name) == _DATA:
            yield value, value.args[0]
        else:
            for argument in value.args:
                for _, var in _pointers_in(argument):
                    yield value, var
