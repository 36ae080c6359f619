# SPDX-License-Identifier: Apache-2.0
"""What the body of a PrimFunc does with the buffers that are its parameters.

A parameter's buffer may have other names in the body: `match_buffer` of a block, `decl_buffer` of
its pointer, and variables that are bound to the pointer. It is read and written under all of them.
Where its pointer goes where nothing is known of it, or anything else is done with it, it escapes:
it may be written, and may have names that nobody knows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import tvm
import tvm_ffi
from tvm import s_tir, tirx

_DATA = "tirx.buffer_data"
_ADDRESS_OF = "tirx.address_of"


@dataclass(eq=False)
class BufferParameter:
    """A parameter of a PrimFunc, and what its body does with it."""

    names: set[int] = field(default_factory=set)  #: hashes of variables, its own included
    read: bool = False
    written: bool = False
    escapes: str = ""  #: why nothing more is known of it, or nothing
    #: A name of it that was declared in a memory scope of its own, and how.
    declared_elsewhere: str = ""

    @property
    def may_be_written(self) -> bool:
        """Whether nothing proves that it is only read."""
        return self.written or bool(self.escapes)


def find_parameters(function: tirx.PrimFunc) -> list[BufferParameter]:
    """Return what the body of a function does with each of its parameters."""
    return _Body(function).parameters


def memory_scope(var: Any) -> str:
    """Return the scope of the memory that a variable names, "" where it names none."""
    return str(var.ty.storage_scope) if _has_memory(var) else ""


class _Body:
    """One walk over a body, then a closure over the names of each parameter."""

    def __init__(self, function: tirx.PrimFunc) -> None:
        self.parameters = [BufferParameter({hash(param)}) for param in function.params]
        self._of: dict[int, list[BufferParameter]] = {
            hash(param): [parameter]
            for param, parameter in zip(function.params, self.parameters, strict=True)
        }
        self._reads: list[tirx.Var] = []
        self._writes: list[tirx.Var] = []
        self._names: list[tuple[tirx.Var, list[tirx.Var], str]] = []
        self._known: set[int] = set()  #: uses of pointers that only give another name
        self._pointers: list[tuple[int, tirx.Var, str]] = []
        self._opaque = ""
        #: How often a variable is there, less those places of which it is known what they do.
        self._left: Counter[int] = Counter()
        tvm_ffi.structural_walk(
            function.body,
            [
                (tvm.ir.Var, self._variable),
                (tvm.ir.TensorLoad, self._load),
                (tvm.ir.TensorRegion, self._region),
                (tirx.BufferStore, self._store),
                (tvm.ir.Call, self._call),
                (tirx.Bind, self._bind),
                (tirx.DeclBuffer, self._declare),
                (s_tir.MatchBufferRegion, self._match),
                (tirx.TilePrimitiveCall, self._tile),
            ],
        )
        for target, sources, how in self._names:
            self._alias(target, sources, how)
        self._close()

    def _close(self) -> None:
        for var in self._reads:
            for parameter in self._of.get(hash(var), []):
                parameter.read = True
        for var in self._writes:
            for parameter in self._of.get(hash(var), []):
                parameter.written = True
        for name, left in self._left.items():
            for parameter in self._of.get(name, []) if left else []:
                parameter.escapes = "is used where nothing is known of it"
        for key, var, how in self._pointers:
            if key not in self._known:
                for parameter in self._of.get(hash(var), []):
                    parameter.escapes = how
        if self._opaque:
            for parameter in self.parameters:
                parameter.escapes = self._opaque

    def _variable(self, var: Any) -> None:
        if _has_memory(var):
            self._left[hash(var)] += 1

    def _load(self, node: Any) -> None:
        self._left[hash(node.source)] -= 1
        self._reads.append(node.source)

    def _region(self, node: Any) -> None:
        self._left[hash(node.source)] -= 1  # of what a block says that it reads and writes

    def _store(self, node: Any) -> None:
        self._left[hash(node.buffer)] -= 1
        self._writes.append(node.buffer)

    def _bind(self, node: Any) -> None:
        if isinstance(node.var.ty, tvm.ir.PointerType):
            self._name(node.var, node.value, "bound to a pointer")

    def _declare(self, node: Any) -> None:
        if node.data is not None:
            self._name(node.buffer, node.data, "declared by decl_buffer")

    def _match(self, node: Any) -> None:
        self._left[hash(node.buffer)] -= 1
        self._names.append((node.buffer, [node.source.source], "matched by match_buffer"))

    def _tile(self, _: Any) -> None:
        self._opaque = "is used by a tile primitive"

    def _name(self, target: tirx.Var, value: tirx.Expr, how: str) -> None:
        self._left[hash(target)] -= 1
        pointers = list(_pointers_in(value))
        for place, var in pointers:
            self._known.add(hash(place))
            if place is var:
                self._left[hash(var)] -= 1
        self._names.append((target, [var for _, var in pointers], how))

    def _call(self, call: tvm.ir.Call) -> None:
        name = str(call.op.name) if isinstance(call.op, tvm.ir.Op) else "a call"
        if name == _DATA:
            what = "has its pointer handed to what is not known"
            self._left[hash(call.args[0])] -= 1
            self._pointers.append((hash(call), call.args[0], what))
            return
        for argument in call.args:
            if isinstance(argument, tirx.Var) and _has_memory(argument):
                self._left[hash(argument)] -= 1
                self._pointers.append((hash(call), argument, f"is an operand of {name}"))
            elif isinstance(argument, tvm.ir.TensorRegion):
                self._pointers.append((hash(call), argument.source, f"is an operand of {name}"))
            elif isinstance(argument, tvm.ir.TensorLoad) and name == _ADDRESS_OF:
                what = "has the address of an element taken"
                self._pointers.append((hash(call), argument.source, what))

    def _alias(self, target: tirx.Var, sources: list[tirx.Var], how: str) -> None:
        parameters = [p for var in sources for p in self._of.get(hash(var), [])]
        found = list({id(parameter): parameter for parameter in parameters}.values())
        if not found:
            return
        self._of[hash(target)] = found
        scope = memory_scope(target)
        for parameter in found:
            parameter.names.add(hash(target))
            if len(found) > 1:
                parameter.escapes = f"shares {target.name} with another parameter"
            if scope not in ("", "global"):
                parameter.declared_elsewhere = f"{target.name}, {how} in scope {scope!r}"


def _has_memory(var: tirx.Var) -> bool:
    return isinstance(var.ty, tirx.BufferType | tvm.ir.PointerType)


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
