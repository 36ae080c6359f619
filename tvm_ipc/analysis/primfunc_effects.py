# SPDX-License-Identifier: Apache-2.0
"""Find what the body of a PrimFunc does with the buffers of its parameters.

The buffer of a parameter may have aliases in the body: by `match_buffer` in a block, by
`decl_buffer` of its pointer, and by variables that are bound to the pointer. Reads and writes
through all of them count. A buffer escapes if its pointer is passed to unknown code or is used in
an unknown way. It may then be written, and may have unknown aliases.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

from tvm_ipc.tvm_moved_names import MatchBufferRegion, TensorLoad, TensorRegion

_DATA = "tirx.buffer_data"
_ADDRESS_OF = "tirx.address_of"


@dataclass(eq=False)
class BufferParameter:
    """The uses of a parameter in the body of a PrimFunc."""

    aliases: set[int] = field(default_factory=set)  #: hashes of variables, its own included
    read: bool = False
    written: bool = False
    escapes: str = ""  #: why it escapes, "" if it does not
    #: An alias that is declared in a memory scope of its own, and how it is declared.
    declared_elsewhere: str = ""

    @property
    def may_be_written(self) -> bool:
        """Return whether it may be written: it is, or it escapes."""
        return self.written or bool(self.escapes)


class PrimFuncs:
    """The PrimFuncs of a module, whose parameters are analysed on demand."""

    def __init__(self, mod: tvm.IRModule) -> None:
        self.functions: dict[str, tirx.PrimFunc] = {
            str(var.name_hint): function
            for var, function in mod.functions_items()
            if isinstance(function, tirx.PrimFunc)
        }
        self._parameters: dict[str, list[BufferParameter]] = {}

    def parameters(self, name: str) -> list[BufferParameter]:
        """Return the uses of each parameter of a PrimFunc."""
        parameters = self._parameters.get(name)
        if parameters is None:
            parameters = self._parameters[name] = find_parameters(self.functions[name])
        return parameters


def find_parameters(function: tirx.PrimFunc) -> list[BufferParameter]:
    """Return the uses of each parameter of a function."""
    return _Body(function).parameters


def memory_scope(var: Any) -> str:
    """Return the memory scope of a buffer or pointer variable, "" for any other variable."""
    return str(var.ty.storage_scope) if _has_memory(var) else ""


class _Body:
    """Collects accesses in one walk over a body, then propagates them to parameters."""

    def __init__(self, function: tirx.PrimFunc) -> None:
        self.parameters = [BufferParameter({hash(param)}) for param in function.params]
        self._of: dict[int, list[BufferParameter]] = {
            hash(param): [parameter]
            for param, parameter in zip(function.params, self.parameters, strict=True)
        }
        self._reads: list[tirx.Var] = []
        self._writes: list[tirx.Var] = []
        #: Aliases, the variables that they refer to, and how they are declared.
        self._aliases: list[tuple[tirx.Var, list[tirx.Var], str]] = []
        self._understood: set[int] = set()  #: uses of pointers that only declare an alias
        self._pointers: list[tuple[int, tirx.Var, str]] = []
        self._opaque = ""
        #: The number of occurrences of each variable, less those whose effect is known.
        self._left: Counter[int] = Counter()
        tvm_ffi.structural_walk(
            function.body,
            [
                (tvm.ir.Var, self._variable),
                (TensorLoad, self._load),
                (TensorRegion, self._region),
                (tirx.BufferStore, self._store),
                (tvm.ir.Call, self._call),
                (tirx.Bind, self._bind),
                (tirx.DeclBuffer, self._declare),
                (MatchBufferRegion, self._match),
                (tirx.TilePrimitiveCall, self._tile),
            ],
        )
        for target, sources, how in self._aliases:
            self._add_alias(target, sources, how)
        self._summarize()

    def _summarize(self) -> None:
        """Set the fields of the parameters from the accesses to their aliases."""
        for var in self._reads:
            for parameter in self._of.get(hash(var), []):
                parameter.read = True
        for var in self._writes:
            for parameter in self._of.get(hash(var), []):
                parameter.written = True
        for name, left in self._left.items():
            for parameter in self._of.get(name, []) if left else []:
                parameter.escapes = "is used in an unknown way"
        for key, var, how in self._pointers:
            if key not in self._understood:
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
        self._left[hash(node.source)] -= 1  # in the declared reads and writes of a block

    def _store(self, node: Any) -> None:
        self._left[hash(node.buffer)] -= 1
        self._writes.append(node.buffer)

    def _bind(self, node: Any) -> None:
        if isinstance(node.var.ty, tvm.ir.PointerType):
            self._declare_alias(node.var, node.value, "bound to a pointer")

    def _declare(self, node: Any) -> None:
        if node.data is not None:
            self._declare_alias(node.buffer, node.data, "declared by decl_buffer")

    def _match(self, node: Any) -> None:
        self._left[hash(node.buffer)] -= 1
        self._aliases.append((node.buffer, [node.source.source], "matched by match_buffer"))

    def _tile(self, _: Any) -> None:
        self._opaque = "is used by a tile primitive"

    def _declare_alias(self, target: tirx.Var, value: tirx.Expr, how: str) -> None:
        self._left[hash(target)] -= 1
        pointers = list(_pointers_in(value))
        for pointer, var in pointers:
            self._understood.add(hash(pointer))
            if pointer is var:
                self._left[hash(var)] -= 1
        self._aliases.append((target, [var for _, var in pointers], how))

    def _call(self, call: tvm.ir.Call) -> None:
        name = str(call.op.name) if isinstance(call.op, tvm.ir.Op) else "a call"
        if name == _DATA:
            self._left[hash(call.args[0])] -= 1
            how = "has its pointer passed to unknown code"
            self._pointers.append((hash(call), call.args[0], how))
            return
        for argument in call.args:
            if isinstance(argument, tirx.Var) and _has_memory(argument):
                self._left[hash(argument)] -= 1
                self._pointers.append((hash(call), argument, f"is an operand of {name}"))
            elif isinstance(argument, TensorRegion):
                self._pointers.append((hash(call), argument.source, f"is an operand of {name}"))
            elif isinstance(argument, TensorLoad) and name == _ADDRESS_OF:
                how = "has the address of an element taken"
                self._pointers.append((hash(call), argument.source, how))

    def _add_alias(self, target: tirx.Var, sources: list[tirx.Var], how: str) -> None:
        """Make a variable an alias of the parameters that its sources refer to."""
        of_sources = [p for var in sources for p in self._of.get(hash(var), [])]
        parameters = list({id(parameter): parameter for parameter in of_sources}.values())
        if not parameters:
            return
        self._of[hash(target)] = parameters
        scope = memory_scope(target)
        for parameter in parameters:
            parameter.aliases.add(hash(target))
            if len(parameters) > 1:
                parameter.escapes = f"shares {target.name} with another parameter"
            if scope not in ("", "global"):
                parameter.declared_elsewhere = f"{target.name}, {how} in scope {scope!r}"


def _has_memory(var: tirx.Var) -> bool:
    return isinstance(var.ty, tirx.BufferType | tvm.ir.PointerType)


def _pointers_in(value: tirx.Expr) -> Iterator[tuple[tvm.ir.Call | tirx.Var, tirx.Var]]:
    """Yield the pointers in an expression, and the variables whose memory they point to."""
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
