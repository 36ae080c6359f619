# SPDX-License-Identifier: Apache-2.0
"""What an extern declaration is.

A function that something else has compiled is a `relax.ExternFunc` of the module: its symbol, and
the signature with its symbolic shapes as its type. Calls of its global variable stay as they were
and are as well-formed as before, every pass of TVM leaves both alone, and JSON keeps them. (TVM's
printer knows symbolic shapes in functions only: `print(mod)` shows an address where a declaration
has some; `script(mod)` prints the module.)

The declaration is not how the symbol is called. TVM's own `ExternFunc` returns what it computed;
ours gets its outputs as further arguments, which is what `LowerExternCalls` makes of the calls. The
attribute `tvm_ipc.extern` tells the two apart. Three more are the part of the signature that a type
cannot say; set them on the function before it is marked:

    tvm_ipc.argument_scopes   memory scope of each parameter, "" where any will do
    tvm_ipc.output_scopes     memory scope of each output
    tvm_ipc.inplace_outputs   for each output the parameter that it overwrites, -1 for none;
                              such an output is no argument of its own
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, tirx

from tvm_ipc import arguments
from tvm_ipc.errors import TransformError
from tvm_ipc.transform.byoc.global_symbol_cache import own_symbol

EXTERN = "tvm_ipc.extern"
ARGUMENT_SCOPES = "tvm_ipc.argument_scopes"
OUTPUT_SCOPES = "tvm_ipc.output_scopes"
INPLACE_OUTPUTS = "tvm_ipc.inplace_outputs"
#: Of the callee of a lowered call: the memory scope of each argument, outputs included.
SCOPES = "tvm_ipc.scopes"
#: Of the callee of a lowered call: the places of the arguments that it writes.
WRITES = "tvm_ipc.writes"


@dataclass(frozen=True)
class Extern:
    """An extern declaration."""

    symbol: str
    params: tuple[Any, ...]  #: types
    result: Any  #: type
    argument_scopes: tuple[str, ...]
    output_scopes: tuple[str, ...]
    inplace: tuple[int, ...]

    @property
    def outputs(self) -> tuple[Any, ...]:
        """The types of the outputs; those of tuples one by one."""
        return tuple(leaves(self.result))

    @property
    def is_plain(self) -> bool:
        """Whether the type says all."""
        return not any([*self.argument_scopes, *self.output_scopes]) and set(self.inplace) <= {-1}


def declare(
    where: str, name: str, function: relax.Function, symbol: str | None = None
) -> relax.ExternFunc:
    """Return the declaration that takes the place of a function.

    Its symbol is the function's own where none is given. `where` begins messages.
    """
    symbol = symbol or own_symbol(function) or name
    attrs = {
        key: function.attrs[key]
        for key in (ARGUMENT_SCOPES, OUTPUT_SCOPES, INPLACE_OUTPUTS)
        if function.attrs and key in function.attrs
    }
    for key, value in attrs.items():
        kind, what = (int, "places of parameters") if key == INPLACE_OUTPUTS else (str, "scopes")
        if not _is_list(value, kind):
            raise TransformError(
                f"{where}: function {name!r}: {key} is a list of {what}, not {value!r}"
            )
    declaration = relax.ExternFunc(symbol, function.ty).with_attr(EXTERN, True)
    for key, value in attrs.items():
        declaration = declaration.with_attr(key, value)
    extern = read(declaration)
    assert extern is not None
    for problem in _problems(extern):
        raise TransformError(f"{where}: function {name!r}: {problem}")
    return declaration


def read(function: object) -> Extern | None:
    """Return what a declaration says; None for anything else."""
    if not isinstance(function, relax.ExternFunc) or not function.attrs:
        return None
    if EXTERN not in function.attrs:
        return None
    ty = function.ty
    outputs = len(list(leaves(ty.ret)))
    return Extern(
        symbol=str(function.global_symbol),
        params=tuple(ty.params),
        result=ty.ret,
        argument_scopes=_strings(function, ARGUMENT_SCOPES, len(ty.params)),
        output_scopes=_strings(function, OUTPUT_SCOPES, outputs),
        inplace=tuple(map(int, function.attrs.get(INPLACE_OUTPUTS) or [-1] * outputs)),
    )


def declared_scopes(callee: relax.ExternFunc) -> dict[int, str]:
    """Return the memory scopes that a lowered call needs its arguments in, where it matters."""
    scopes = callee.attrs.get(SCOPES) if callee.attrs else None
    return {index: str(scope) for index, scope in enumerate(scopes or []) if scope}


def declared_writes(callee: relax.ExternFunc) -> tuple[int, ...] | None:
    """Return the places of the arguments that a lowered call writes, None where nothing is said."""
    writes = callee.attrs.get(WRITES) if callee.attrs else None
    return None if writes is None else tuple(map(int, writes))


def script(mod: tvm.IRModule) -> str:
    """Return a module as TVMScript, the signatures of extern declarations as comments."""
    arguments.instance("script: mod", mod, tvm.IRModule, "an IRModule")
    printable, signatures = mod.clone(), []
    for global_var, function in mod.functions_items():
        if read(function) is not None:
            printable[global_var] = relax.ExternFunc(function.global_symbol)
            signatures.append(f"# {global_var.name_hint}: {function.ty}\n")
    return "".join([*signatures, printable.script()])


def leaves(ty: Any) -> Iterator[Any]:
    """Iterate over what a type is made of, tuples opened."""
    if isinstance(ty, relax.TupleType):
        for field in ty.fields:
            yield from leaves(field)
    else:
        yield ty


def _strings(function: relax.ExternFunc, key: str, length: int) -> tuple[str, ...]:
    return tuple(map(str, function.attrs.get(key) or [""] * length))


def _is_list(value: object, kind: type) -> bool:
    if not isinstance(value, tvm_ffi.Array | list | tuple):
        return False
    kinds = (int, tirx.IntImm) if kind is int else kind
    return all(isinstance(one, kinds) and not isinstance(one, bool) for one in value)


def _problems(extern: Extern) -> Iterator[str]:
    params, outputs = extern.params, extern.outputs
    for key, given, needed in (
        (ARGUMENT_SCOPES, extern.argument_scopes, len(params)),
        (OUTPUT_SCOPES, extern.output_scopes, len(outputs)),
        (INPLACE_OUTPUTS, extern.inplace, len(outputs)),
    ):
        if len(given) != needed:
            yield f"{key} has {len(given)} entries, and needs {needed}"
            return
    for index, scope in enumerate(extern.argument_scopes):
        if scope and not isinstance(params[index], relax.TensorType):
            yield f"parameter {index} is no tensor, so {ARGUMENT_SCOPES} cannot place it"
    overwritten = [index for index in extern.inplace if index != -1]
    if len(set(overwritten)) != len(overwritten):
        yield f"{INPLACE_OUTPUTS} {list(extern.inplace)} overwrites a parameter twice"
    for output, index in zip(outputs, extern.inplace, strict=True):
        if index == -1:
            continue
        if not 0 <= index < len(params):
            yield f"{INPLACE_OUTPUTS} names parameter {index} of {len(params)}"
        elif not tvm_ffi.structural_equal(params[index], output, map_free_vars=False):
            yield (
                f"an output of the type {output} cannot be in place of parameter {index}, "
                f"which is {params[index]}"
            )
