# SPDX-License-Identifier: Apache-2.0
"""Extern declarations, which replace functions that an external compiler has compiled.

A declaration is a `relax.ExternFunc` of the module, with the function's symbol and its signature,
symbolic shapes included, as its type. Calls of the global variable do not change and stay
well-formed. TVM's passes change neither, and JSON preserves both. (TVM's printer supports symbolic
shapes only in functions: `print(mod)` prints an address for a declaration that has some. Use
`script(mod)` to print such a module.)

The declaration is not the calling convention. A `relax.ExternFunc` of TVM returns its result; an
extern declaration takes its outputs as further arguments, which `LowerExternCalls` adds. The
attribute `tvm_ipc.extern` distinguishes the two. Three more attributes hold the part of the
signature that a type cannot express; set them on the function before it is marked:

    tvm_ipc.argument_scopes   memory scope of each parameter, "" for any
    tvm_ipc.output_scopes     memory scope of each output
    tvm_ipc.inplace_outputs   for each output the parameter that it overwrites, -1 for none;
                              such an output is not a further argument
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
from tvm_ipc.transform.byoc.outlined_function_symbol_policies import own_symbol

EXTERN = "tvm_ipc.extern"
ARGUMENT_SCOPES = "tvm_ipc.argument_scopes"
OUTPUT_SCOPES = "tvm_ipc.output_scopes"
INPLACE_OUTPUTS = "tvm_ipc.inplace_outputs"
#: Attribute of the callee of a lowered call: the memory scope of each argument, with outputs.
SCOPES = "tvm_ipc.scopes"
#: Attribute of the callee of a lowered call: the indices of the arguments that it writes.
WRITES = "tvm_ipc.writes"


@dataclass(frozen=True, eq=False)
class Extern:
    """The contents of an extern declaration."""

    symbol: str
    params: tuple[Any, ...]  #: the types of the parameters
    result: Any  #: the type of the result
    argument_scopes: tuple[str, ...]
    output_scopes: tuple[str, ...]
    inplace: tuple[int, ...]

    @property
    def outputs(self) -> tuple[Any, ...]:
        """The types of the outputs, with tuples flattened."""
        return tuple(leaves(self.result))

    @property
    def is_plain(self) -> bool:
        """Return whether the type is the whole signature."""
        return not any([*self.argument_scopes, *self.output_scopes]) and set(self.inplace) <= {-1}


def declare(
    where: str, name: str, function: relax.Function, symbol: str | None = None
) -> relax.ExternFunc:
    """Return the declaration that replaces a function.

    Parameters
    ----------
    where : the beginning of messages.
    name : the name of the function.
    function : the function, whose attributes become those of the declaration.
    symbol : the symbol; None for the function's own.
    """
    symbol = symbol or own_symbol(function) or name
    attrs = {
        key: function.attrs[key]
        for key in (ARGUMENT_SCOPES, OUTPUT_SCOPES, INPLACE_OUTPUTS)
        if function.attrs and key in function.attrs
    }
    for key, value in attrs.items():
        kind, expected = (int, "parameter indices") if key == INPLACE_OUTPUTS else (str, "scopes")
        if not _is_list(value, kind):
            raise TransformError(
                f"{where}: function {name!r}: {key} is a list of {expected}, not {value!r}"
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
    """Return the contents of an extern declaration, None for any other function."""
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
    """Return the required memory scope of each argument of a lowered call that has one."""
    scopes = callee.attrs.get(SCOPES) if callee.attrs else None
    return {index: str(scope) for index, scope in enumerate(scopes or []) if scope}


def declared_writes(callee: relax.ExternFunc) -> tuple[int, ...] | None:
    """Return the indices of the arguments that a lowered call writes, None if undeclared."""
    writes = callee.attrs.get(WRITES) if callee.attrs else None
    return None if writes is None else tuple(map(int, writes))


def script(mod: tvm.IRModule) -> str:
    """Return a module as TVMScript, with the signatures of extern declarations as comments.

    Parameters
    ----------
    mod : the module.

    Returns
    -------
    str
        The text; without extern declarations that of `mod.script()`.

    Examples
    --------
    >>> import tvm
    >>> from tvm_ipc.transform import (
    ...     MarkCompilerFunctionsAsExtern, OutlineCompilerFunctions, script
    ... )
    >>> mod = tvm.script.from_source('''
    ... @I.ir_module
    ... class Model:
    ...     @R.function
    ...     def main(x: R.Tensor(("n", 4), "float32")):
    ...         @R.function
    ...         def inner(a: R.Tensor(("n", 4), "float32")):
    ...             R.func_attr({"Codegen": "cc"})
    ...             return R.nn.relu(a)
    ...         y = inner(x)
    ...         return y
    ... ''')
    >>> mod = MarkCompilerFunctionsAsExtern("cc")(OutlineCompilerFunctions()(mod))
    >>> print(script(mod).splitlines()[0][:26])
    # main_cc_0: R.Callable((R
    """
    arguments.instance("script: mod", mod, tvm.IRModule, "an IRModule")
    printable, signatures = mod.clone(), []
    for global_var, function in mod.functions_items():
        if read(function) is not None:
            printable[global_var] = relax.ExternFunc(function.global_symbol)
            signatures.append(f"# {global_var.name_hint}: {function.ty}\n")
    return "".join([*signatures, printable.script()])


def leaves(ty: Any) -> Iterator[Any]:
    """Yield the leaves of a type, with tuples flattened."""
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
    return all(isinstance(item, kinds) and not isinstance(item, bool) for item in value)


def _problems(extern: Extern) -> Iterator[str]:
    params, outputs = extern.params, extern.outputs
    for key, entries, needed in (
        (ARGUMENT_SCOPES, extern.argument_scopes, len(params)),
        (OUTPUT_SCOPES, extern.output_scopes, len(outputs)),
        (INPLACE_OUTPUTS, extern.inplace, len(outputs)),
    ):
        if len(entries) != needed:
            yield f"{key} has {arguments.counted(len(entries), 'entry')}; expected {needed}"
            return
    for index, scope in enumerate(extern.argument_scopes):
        if scope and not isinstance(params[index], relax.TensorType):
            yield f"{ARGUMENT_SCOPES} sets a scope for parameter {index}, which is not a tensor"
    overwritten = [index for index in extern.inplace if index != -1]
    if len(set(overwritten)) != len(overwritten):
        yield f"{INPLACE_OUTPUTS} {list(extern.inplace)} overwrites a parameter twice"
    for output, index in zip(outputs, extern.inplace, strict=True):
        if index == -1:
            continue
        if not 0 <= index < len(params):
            yield (
                f"{INPLACE_OUTPUTS} has the index {index}; expected an index of one of the "
                f"{arguments.counted(len(params), 'parameter')}, or -1"
            )
        elif not tvm_ffi.structural_equal(params[index], output, map_free_vars=False):
            yield (
                f"an output of the type {output} cannot overwrite parameter {index}, whose type is "
                f"{params[index]}"
            )
