# SPDX-License-Identifier: Apache-2.0
"""What an external compiler gives back, checked against what it was given."""

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
from tvm_ipc.transform.byoc.extern import Extern, declare, read
from tvm_ipc.transform.byoc.global_symbol_cache import own_symbol
from tvm_ipc.transform.byoc.literals import compiler_of


@dataclass(frozen=True)
class Compiled:
    """The result of an external compiler.

    Every function that it was given is defined by one of the modules, or left to TVM, or is a
    packed function that exists at run time.
    """

    #: Runtime modules that define functions by their symbols.
    modules: Sequence[Any] = ()
    #: Names of functions that TVM compiles after all; they are inlined into their callers.
    declined: Collection[str] = ()
    #: Changed functions by name, of the same signature. One that still has the `Codegen` attribute
    #: has been compiled, and says what its declaration shall say; one without is TVM's. Further
    #: names are new functions that these call.
    functions: Mapping[str, Any] = field(default_factory=dict)
    #: Names of functions, and of the packed functions that they are.
    registered: Mapping[str, str] = field(default_factory=dict)
    #: Tensors that the modules find by name when they are loaded, as TVM's own external modules do
    #: (`get_const_vars`); they are stored in the executable, not copied.
    constants: Mapping[str, Any] = field(default_factory=dict)


def compile_each(
    compile_one: Callable[[relax.Function, Mapping[str, Any]], Any],
) -> Callable[[tvm.IRModule, Mapping[str, Any]], list[Any]]:
    """Make a compile_fn of a function that compiles one function.

    `compile_one` gets a function, whose symbol is its attribute `global_symbol`, and the options,
    and returns a runtime module. What it raises is said of that function.
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
    """What went wrong with one function; a compiler may raise it to say which."""

    def __init__(self, function: str, problem: BaseException | str) -> None:
        self.function = function
        self.problem = problem
        super().__init__(message(problem))


def message(problem: BaseException | str) -> str:
    """Return the kind and text of an exception, with what a process that failed has printed."""
    if isinstance(problem, str):
        return _text(problem)
    said = getattr(problem, "stderr", None) or ""
    said = said.decode(errors="replace") if isinstance(said, bytes) else _text(said)
    kind = "" if isinstance(problem, CompileError) else f"{type(problem).__name__}: "
    notes = map(_text, getattr(problem, "__notes__", ()))
    inside = getattr(problem, "exceptions", ())  # of a group
    inside = inside if isinstance(inside, tuple) else ()
    lines = [f"{kind}{_text(problem)}", *notes, said.strip(), *map(message, inside)]
    return "\n".join(line for line in lines if line)


def _text(value: object) -> str:
    """Return a text that can be encoded, whatever a compiler made: TVM crashes on others."""
    try:
        return str(value).encode(errors="backslashreplace").decode()
    except Exception as problem:
        return f"(its text cannot be had: {type(problem).__name__})"


def as_compiled(where: str, result: object) -> Compiled:
    """Accept a runtime module, several of them, or a `Compiled`."""
    if isinstance(result, Compiled):
        return result
    if isinstance(result, tvm.runtime.Module):
        return Compiled([result])
    if isinstance(result, Sequence | tvm_ffi.Array) and not isinstance(result, str | bytes):
        return Compiled(list(result))
    nothing = result is None
    raise TransformError(
        f"{where} returned {'nothing' if nothing else f'a {type(result).__name__}'}; a compiler "
        "returns a runtime module, a list of them, or a tvm_ipc.transform.Compiled"
    )


def check_compiled(where: str, given: tvm.IRModule, compiled: Compiled, taken: set[str]) -> None:
    """Refuse a result that does not fit what was given.

    `taken` are names in the rest of the module.
    """
    names = {str(global_var.name_hint) for global_var in given.get_global_vars()}
    _check_kinds(where, compiled)
    for what, known in (("declined", compiled.declined), ("registered", compiled.registered)):
        unknown = sorted(set(known) - names)
        if unknown:
            raise TransformError(
                f"{where} {what} {_quoted(unknown)}, which it was not given; it was given "
                f"{_quoted(sorted(names))}"
            )
    for name, function in compiled.functions.items():
        if name in names:
            _check_changed(where, name, given[name], function)
        else:
            _check_new(where, name, function, taken)
    for name in sorted(names):
        _check_one_answer(where, name, compiled)
        if compiled.registered.get(name) in taken - names:
            raise TransformError(
                f"{where} registered {name!r} as {compiled.registered[name]!r}, which is a "
                "function of the module and would be called instead"
            )
    for name in sorted(to_declare(given, compiled)):
        if name in compiled.registered:
            declaration(where, name, given, compiled)  # which may be refused
        else:
            _check_symbol(where, given, name, compiled)


def to_declare(given: tvm.IRModule, compiled: Compiled) -> set[str]:
    """Return the names of the functions that have been compiled."""
    names = {str(global_var.name_hint) for global_var in given.get_global_vars()}
    left = {name for name, function in compiled.functions.items() if compiler_of(function) is None}
    return names - left - set(compiled.declined)


def declaration(where: str, name: str, given: tvm.IRModule, compiled: Compiled) -> relax.ExternFunc:
    """Return the declaration of a function that has been compiled."""
    function = compiled.functions.get(name, given[name])
    return declare(where.rstrip(","), name, function, compiled.registered.get(name))


def _check_kinds(where: str, compiled: Compiled) -> None:
    """Refuse fields of a `Compiled` that are not what they should be."""
    kinds: list[tuple[str, Any, str]] = [
        ("modules", Sequence | tvm_ffi.Array, "a list of runtime modules"),
        ("declined", Collection, "names of functions"),
        ("functions", Mapping, "functions by name"),
        ("registered", Mapping, "names of packed functions by name"),
        ("constants", Mapping, "tensors by name"),
    ]
    for what, kind, wanted in kinds:
        value = getattr(compiled, what)
        if not isinstance(value, kind) or isinstance(value, str | bytes):
            raise TransformError(
                f"{where} returned Compiled({what}={reprlib.repr(value)}); {what} are {wanted}"
            )
        for name in () if what == "modules" else value:
            if not isinstance(name, str) or not name:
                raise TransformError(
                    f"{where} returned {name!r} as a name in Compiled({what}=...); {wanted}"
                )
    for module in compiled.modules:
        if not isinstance(module, tvm.runtime.Module):
            raise TransformError(
                f"{where} returned a {type(module).__name__} among its modules, which is no "
                "runtime module (of tvm.compile give the attribute `mod`)"
            )
    for name, symbol in compiled.registered.items():
        if not isinstance(symbol, str) or not symbol:
            raise TransformError(
                f"{where} registered {name!r} as {symbol!r}, which is no name of a packed function"
            )
    for name, constant in compiled.constants.items():
        if not isinstance(constant, tvm.runtime.Tensor):
            raise TransformError(
                f"{where} returned a {type(constant).__name__} as the constant {name!r}, which is "
                "no tensor (tvm.runtime.tensor makes one of an array)"
            )


def _check_one_answer(where: str, name: str, compiled: Compiled) -> None:
    changed = compiled.functions.get(name)
    kept = compiler_of(changed) is not None
    answers = [
        *(["declined it"] if name in compiled.declined else []),
        *(
            [f"registered it as {compiled.registered[name]!r}"]
            if name in compiled.registered
            else []
        ),
        *(["left a changed one to TVM"] if changed is not None and not kept else []),
    ]
    if kept and name in compiled.declined:
        answers.append("returned it as compiled")
    if len(answers) > 1:
        raise TransformError(
            f"{where} has {len(answers)} answers for the function {name!r}: it "
            f"{' and '.join(answers)}; give one"
        )


def _check_new(where: str, name: str, function: object, taken: set[str]) -> None:
    new = f"{where} returned a new function {name!r}"
    if name in taken:
        raise TransformError(f"{new}, and the module has one already")
    if not isinstance(function, relax.Function | tirx.PrimFunc):
        raise TransformError(
            f"{new} that is a {type(function).__name__}, neither a relax.Function nor a PrimFunc"
        )
    if compiler_of(function) is not None:
        raise TransformError(
            f"{new} with the attribute Codegen; it has its functions already, and nobody else "
            "compiles this one. Return it without"
        )
    symbol = own_symbol(function)
    if symbol not in (None, name):
        raise TransformError(f"{new} whose global_symbol is {symbol!r}; it has to be its name")


def _check_changed(where: str, name: str, given: relax.Function, changed: object) -> None:
    if not isinstance(changed, relax.Function):
        raise TransformError(
            f"{where} returned a {type(changed).__name__} for the function {name!r}; its callers "
            "need a relax.Function"
        )
    if compiler_of(changed) not in (None, compiler_of(given)):
        raise TransformError(
            f"{where} returned the function {name!r} for the compiler {compiler_of(changed)!r}; "
            "the attribute Codegen stays as it was, or goes"
        )
    if not tvm_ffi.structural_equal(changed.ty, given.ty, map_free_vars=True):
        raise TransformError(
            f"{where} changed the signature of {name!r}: it was {given.ty}, and is {changed.ty}; "
            "its callers need it as it was"
        )


def _check_symbol(where: str, given: tvm.IRModule, name: str, compiled: Compiled) -> None:
    extern = read(declaration(where, name, given, compiled))
    assert extern is not None
    owners = [one for one in compiled.modules if defines(one, extern.symbol)]
    if not owners:
        kinds = [str(module.kind) for module in compiled.modules]
        raise TransformError(
            f"{where} did not compile the function {name!r}: no module that it returned defines "
            f"the symbol {extern.symbol!r} ({len(kinds)} returned{_of_kinds(kinds)}). Functions "
            "that it leaves to TVM belong into Compiled(declined=[...])"
        )
    if len(owners) > 1:
        raise TransformError(
            f"{where} returned {len(owners)} modules that define the symbol {extern.symbol!r}"
        )
    found, needed = _arity(owners[0], extern.symbol), _needed(extern)
    if found is not None and found != needed:
        raise TransformError(
            f"{where} compiled the function {name!r} with {found} parameters, and its calls have "
            f"{needed}: {_signature(extern)}"
        )


def defines(module: tvm.runtime.Module, symbol: str) -> bool:
    """Return whether a runtime module defines a function."""
    # What TVM itself compiled to C source names the functions as they will be in the library.
    return any(module.implements_function(one, True) for one in (symbol, f"__tvm_ffi_{symbol}"))


def _arity(module: tvm.runtime.Module, symbol: str) -> int | None:
    """Return how many parameters a function has, where its module tells."""
    try:
        metadata = module.get_function_metadata(symbol, query_imports=True)
        schema = json.loads(metadata["type_schema"]) if metadata else {}
        return len(schema["args"]) - 1 if schema.get("args") else None
    except (AttributeError, KeyError, TypeError, ValueError):
        return None  # modules of other makers may say whatever they like


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
