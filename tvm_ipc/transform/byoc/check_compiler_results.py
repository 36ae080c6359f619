# SPDX-License-Identifier: Apache-2.0
"""The results of external compilers, and their checks against the functions to compile."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, tirx

from tvm_ipc import arguments
from tvm_ipc.errors import TransformError
from tvm_ipc.transform.byoc.extern_declaration import Extern, declare, read
from tvm_ipc.transform.byoc.nested_relax_functions import compiler_of
from tvm_ipc.transform.byoc.outlined_function_symbol_policies import own_symbol
from tvm_ipc.tvm_private_names import SYMBOL_PREFIX


@dataclass(frozen=True, eq=False)
class Compiled:
    """The result of an external compiler.

    Every function that was passed to the compiler is either defined by one of the modules, left to
    TVM, or a packed function that exists at run time.

    Attributes
    ----------
    modules : runtime modules that define functions by their symbols.
    declined : names of functions that the compiler leaves to TVM. They are inlined into
        their callers.
    functions : changed functions by name, with the same signature. A function that still has the
        `Codegen` attribute is compiled, and its attributes determine its declaration; one without
        the attribute is left to TVM. Other names are new functions that these call.
    registered : names of functions, each with the name of the packed function that implements it.
    constants : tensors that the modules look up by name when they are loaded, as TVM's own external
        modules do (`get_const_vars`). They are stored in the executable, not copied.

    Examples
    --------
    A compiler that leaves all functions to TVM:

    >>> from tvm_ipc.transform import Compiled
    >>> def compile_fn(functions, options):
    ...     return Compiled(declined=[var.name_hint for var in functions.get_global_vars()])
    """

    modules: Sequence[Any] = ()
    declined: Collection[str] = ()
    functions: Mapping[str, Any] = field(default_factory=dict)
    registered: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)


def compile_each(
    compile_one: Callable[[relax.Function, Mapping[str, Any]], Any],
) -> Callable[[tvm.IRModule, Mapping[str, Any]], list[Any]]:
    """Return a compile_fn that compiles functions one by one.

    Parameters
    ----------
    compile_one : called with a function, whose symbol is its attribute `global_symbol`, and the
        options. Returns a runtime module. The message of an exception that it raises names the
        function.

    Returns
    -------
    callable
        A function for `RunModuleCodegen`, which raises `CompileError` for the function that failed.

    Examples
    --------
    >>> import tvm
    >>> from tvm_ipc.errors import TransformError
    >>> from tvm_ipc.transform import RunModuleCodegen, compile_each
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
    >>> def compile_one(function, options):
    ...     raise NotImplementedError("no operators yet")
    >>> try:
    ...     RunModuleCodegen("cc", compile_each(compile_one))(mod)
    ... except TransformError as error:
    ...     print("main_cc_0" in str(error), "no operators yet" in str(error))
    True True
    """
    if not callable(compile_one):
        raise arguments.wrong_type("compile_each: compile_one", "a function", compile_one)

    def compile_fn(functions: tvm.IRModule, options: Mapping[str, Any]) -> list[Any]:
        modules = []
        for global_var in functions.get_global_vars():
            try:
                modules.append(compile_one(functions[global_var], options))
            except Exception as problem:
                raise CompileError(str(global_var.name_hint), problem) from problem
        return modules

    return compile_fn


class CompileError(Exception):
    """An error in one function; a compiler may raise it to name the function.

    Parameters
    ----------
    function : the name of the function.
    problem : the exception or its text, which the message of `RunModuleCodegen` contains.

    Examples
    --------
    >>> from tvm_ipc.transform import CompileError
    >>> def compile_fn(functions, options):
    ...     raise CompileError("main_cc_0", "convolutions need a GPU")
    """

    def __init__(self, function: str, problem: BaseException | str) -> None:
        self.function = function
        self.problem = problem
        super().__init__(message(problem))


def message(problem: BaseException | str) -> str:
    """Return the kind and text of an exception, with the error output of a failed process."""
    if isinstance(problem, str):
        return _text(problem)
    output = getattr(problem, "stderr", None) or ""
    output = output.decode(errors="replace") if isinstance(output, bytes) else _text(output)
    kind = "" if isinstance(problem, CompileError) else f"{type(problem).__name__}: "
    notes = map(_text, getattr(problem, "__notes__", ()))
    inside = getattr(problem, "exceptions", ())  # of a group
    inside = inside if isinstance(inside, tuple) else ()
    lines = [f"{kind}{_text(problem)}", *notes, output.strip(), *map(message, inside)]
    return "\n".join(line for line in lines if line)


def _text(value: object) -> str:
    """Return the text of a value so that it can be encoded: TVM crashes on other texts."""
    try:
        return str(value).encode(errors="backslashreplace").decode()
    except Exception as problem:
        return f"(it cannot be converted to text: {type(problem).__name__})"


def as_compiled(where: str, result: object) -> Compiled:
    """Convert a runtime module or a list of them to a `Compiled`; raise an error for others."""
    if isinstance(result, Compiled):
        return result
    if isinstance(result, tvm.runtime.Module):
        return Compiled([result])
    if isinstance(result, Sequence | tvm_ffi.Array) and not isinstance(result, str | bytes):
        return Compiled(list(result))
    returned = "None" if result is None else f"a {type(result).__name__}"
    raise TransformError(
        f"{where} returned {returned}; expected a runtime module, a list of them, or a "
        "tvm_ipc.transform.Compiled"
    )


def check_compiled(
    where: str, functions: tvm.IRModule, compiled: Compiled, taken: set[str]
) -> None:
    """Raise TransformError if a result does not fit the functions to compile.

    Parameters
    ----------
    where : the beginning of messages.
    functions : the functions that were passed to the compiler.
    compiled : its result.
    taken : the names in the rest of the module.
    """
    names = {str(global_var.name_hint) for global_var in functions.get_global_vars()}
    _check_kinds(where, compiled)
    for verb, listed in (("declined", compiled.declined), ("registered", compiled.registered)):
        unknown = sorted(set(listed) - names)
        if unknown:
            raise TransformError(
                f"{where} {verb} {_quoted(unknown)}; expected names among {_quoted(sorted(names))}"
            )
    for name, function in compiled.functions.items():
        if name in names:
            _check_changed(where, name, functions[name], function)
        else:
            _check_new(where, name, function, taken)
    for name in sorted(names):
        _check_one_answer(where, name, compiled)
        if compiled.registered.get(name) in taken - names:
            raise TransformError(
                f"{where} registered {name!r} as {compiled.registered[name]!r}, which is a "
                "function of the module and would be called instead"
            )
    for name in sorted(to_declare(functions, compiled)):
        if name in compiled.registered:
            declaration(where, name, functions, compiled)  # for its checks
        else:
            _check_symbol(where, functions, name, compiled)


def to_declare(functions: tvm.IRModule, compiled: Compiled) -> set[str]:
    """Return the names of the compiled functions."""
    names = {str(global_var.name_hint) for global_var in functions.get_global_vars()}
    left_to_tvm = {
        name for name, function in compiled.functions.items() if compiler_of(function) is None
    }
    return names - left_to_tvm - set(compiled.declined)


def declaration(
    where: str, name: str, functions: tvm.IRModule, compiled: Compiled
) -> relax.ExternFunc:
    """Return the declaration of a compiled function."""
    function = compiled.functions.get(name, functions[name])
    return declare(where.rstrip(","), name, function, compiled.registered.get(name))


def _check_kinds(where: str, compiled: Compiled) -> None:
    """Raise TransformError for a field of a `Compiled` that has the wrong type."""
    kinds: list[tuple[str, Any, str]] = [
        ("modules", Sequence | tvm_ffi.Array, "a list of runtime modules"),
        ("declined", Collection, "names of functions"),
        ("functions", Mapping, "functions by name"),
        ("registered", Mapping, "names of packed functions by name"),
        ("constants", Mapping, "tensors by name"),
    ]
    for attribute, kind, wanted in kinds:
        value = getattr(compiled, attribute)
        if not isinstance(value, kind) or isinstance(value, str | bytes):
            raise TransformError(
                f"{where} returned Compiled({attribute}={reprlib.repr(value)}); {attribute} must "
                f"be {wanted}"
            )
        for name in () if attribute == "modules" else value:
            if not isinstance(name, str) or not name:
                raise TransformError(
                    f"{where} returned {name!r} as a name in Compiled({attribute}=...); "
                    f"{attribute} must be {wanted}"
                )
    for module in compiled.modules:
        if not isinstance(module, tvm.runtime.Module):
            raise TransformError(
                f"{where} returned a {type(module).__name__} among its modules; expected runtime "
                "modules (of a result of tvm.compile, return the attribute `mod`)"
            )
    for name, symbol in compiled.registered.items():
        if not isinstance(symbol, str) or not symbol:
            raise TransformError(
                f"{where} registered {name!r} as {symbol!r}; expected the name of a packed function"
            )
    for name, constant in compiled.constants.items():
        if not isinstance(constant, tvm.runtime.Tensor):
            raise TransformError(
                f"{where} returned a {type(constant).__name__} as the constant {name!r}; expected "
                "a tensor (tvm.runtime.tensor converts an array)"
            )


def _check_one_answer(where: str, name: str, compiled: Compiled) -> None:
    function = compiled.functions.get(name)
    is_compiled = compiler_of(function) is not None
    outcomes = [
        *(["declined it"] if name in compiled.declined else []),
        *(
            [f"registered it as {compiled.registered[name]!r}"]
            if name in compiled.registered
            else []
        ),
        *(["left a changed one to TVM"] if function is not None and not is_compiled else []),
    ]
    if is_compiled and name in compiled.declined:
        outcomes.append("returned it as compiled")
    if len(outcomes) > 1:
        raise TransformError(
            f"{where} returned contradictory results for the function {name!r}: it "
            f"{' and '.join(outcomes)}; expected one result"
        )


def _check_new(where: str, name: str, function: object, taken: set[str]) -> None:
    new = f"{where} returned a new function {name!r}"
    if name in taken:
        raise TransformError(f"{new}, but the module already has a function of this name")
    if not isinstance(function, relax.Function | tirx.PrimFunc):
        raise TransformError(
            f"{new} that is a {type(function).__name__}; expected a relax.Function or a PrimFunc"
        )
    if compiler_of(function) is not None:
        raise TransformError(
            f"{new} with the attribute Codegen, but TVM compiles new functions; return it without "
            "the attribute"
        )
    symbol = own_symbol(function)
    if symbol not in (None, name):
        raise TransformError(f"{new} whose global_symbol is {symbol!r}; expected its name")


def _check_changed(where: str, name: str, original: relax.Function, changed: object) -> None:
    if not isinstance(changed, relax.Function):
        raise TransformError(
            f"{where} returned a {type(changed).__name__} for the function {name!r}; expected a "
            "relax.Function"
        )
    if compiler_of(changed) not in (None, compiler_of(original)):
        raise TransformError(
            f"{where} returned the function {name!r} for the compiler {compiler_of(changed)!r}; "
            "keep the attribute Codegen as it was, or remove it"
        )
    if not tvm_ffi.structural_equal(changed.ty, original.ty, map_free_vars=True):
        raise TransformError(
            f"{where} changed the signature of {name!r}: it was {original.ty} and is {changed.ty}; "
            "callers need the original signature"
        )


def _check_symbol(where: str, functions: tvm.IRModule, name: str, compiled: Compiled) -> None:
    extern = read(declaration(where, name, functions, compiled))
    assert extern is not None
    owners = [module for module in compiled.modules if defines(module, extern.symbol)]
    if not owners:
        kinds = [str(module.kind) for module in compiled.modules]
        raise TransformError(
            f"{where} did not compile the function {name!r}: no module that it returned defines "
            f"the symbol {extern.symbol!r} ({len(kinds)} returned{_of_kinds(kinds)}). Return the "
            "functions that are left to TVM in Compiled(declined=[...])"
        )
    if len(owners) > 1:
        raise TransformError(
            f"{where} returned {len(owners)} modules that define the symbol {extern.symbol!r}; "
            "expected one"
        )
    arity, needed = _arity(owners[0], extern.symbol), _needed(extern)
    if arity is not None and arity != needed:
        raise TransformError(
            f"{where} compiled the function {name!r} with {arguments.counted(arity, 'parameter')}, "
            f"but its calls have {needed}: {_signature(extern)}"
        )


def defines(module: tvm.runtime.Module, symbol: str) -> bool:
    """Return whether a runtime module defines a function."""
    # Modules of C source that TVM generated use the prefixed names of the library.
    return any(module.implements_function(name, True) for name in (symbol, SYMBOL_PREFIX + symbol))


def _arity(module: tvm.runtime.Module, symbol: str) -> int | None:
    """Return the number of a function's parameters, None if its module does not provide it."""
    try:
        metadata = module.get_function_metadata(symbol, query_imports=True)
        schema = json.loads(metadata["type_schema"]) if metadata else {}
        return len(schema["args"]) - 1 if schema.get("args") else None
    except (AttributeError, KeyError, TypeError, ValueError):
        return None  # modules of other compilers may have other metadata


def _needed(extern: Extern) -> int:
    return len(extern.params) + sum(index == -1 for index in extern.inplace)


def _signature(extern: Extern) -> str:
    arguments = [*map(str, extern.params)]
    outputs = [
        f"output {output}"
        for output, index in zip(extern.outputs, extern.inplace, strict=True)
        if index == -1
    ]
    return f"{extern.symbol}({', '.join([*arguments, *outputs])})"


def _of_kinds(kinds: Iterable[str]) -> str:
    text = ", ".join(kinds)
    return f", of the kinds {text}" if text else ""


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
