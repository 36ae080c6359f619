# SPDX-License-Identifier: Apache-2.0
"""Hands all functions of a compiler to it at once, and builds what it returns into the executable.

    def compile_fn(functions: tvm.IRModule, options: Mapping[str, Any]):
        return tvm.runtime.load_static_library(path, [names of the functions])

    mod = RunModuleCodegen("cc", compile_fn, {"level": 3})(mod)
    executable = tvm.compile(mod, "llvm")

Before:
    @R.function
    def main(x: R.Tensor(("n", 4), "float32")):
        with R.dataflow():
            y = cls.scaled(x)                         # {"Codegen": "cc"}, or a function literal

After:
    I.module_attrs({"external_mods": [...]})

    @R.function
    def main(x: R.Tensor(("n", 4), "float32")):
        with R.dataflow():
            y = R.call_dps_packed("scaled", (x,), out_ty=R.Tensor((n, 4), "float32"))

The functions are outlined (`OutlineCompilerFunctions`); `compile_fn` gets a module of these and
only these, with the constants that they hold, not copies; what it returns is checked (`Compiled`),
and attached where `relax.build` and `tvm.compile` find it; the functions become extern
declarations (`MarkCompilerFunctionsAsExtern`) and their calls are lowered (`LowerExternCalls`), so
that any pipeline can build the module. With `lower=False` the declarations stay, for a pipeline
that lowers them later and places their memory scopes until then.

An entry of the module, which nobody calls, keeps its name and becomes a function that calls the
compiled one. Whatever goes wrong is a `TransformError` that names the functions and carries what
the compiler said; the module that was given is as it was, and can be built without the compiler.

Runs before anything that lowers operators; once for each compiler.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import tvm
import tvm_ffi
from tvm import relax
from tvm.relax.utils import copy_with_new_vars

from tvm_ipc import arguments
from tvm_ipc.errors import TransformError
from tvm_ipc.transform.byoc.compiled import (
    Compiled,
    CompileError,
    as_compiled,
    check_compiled,
    declaration,
    defines,
    message,
    to_declare,
)
from tvm_ipc.transform.byoc.global_symbol_cache import (
    GLOBAL_SYMBOL,
    GlobalSymbolCache,
    Names,
    own_symbol,
)
from tvm_ipc.transform.byoc.literals import is_for, used_functions, used_global_vars
from tvm_ipc.transform.inline_compiler_functions import inline
from tvm_ipc.transform.ir.rewrite import typed
from tvm_ipc.transform.lower_extern_calls import lower
from tvm_ipc.transform.module_pass import module_pass, option
from tvm_ipc.transform.outline_compiler_functions import outline

CompileFunction = Callable[[tvm.IRModule, Mapping[str, Any]], Any]

#: So many functions are named in a message.
_SHOWN = 8
_MODULES = "external_mods"
_CONSTANTS = "const_name_to_constant"


def _options(name: str, given: object) -> dict[str, Any]:
    return dict(arguments.instance(name, given, Mapping, "a mapping or None"))


@module_pass
class RunModuleCodegen:
    """Compile the functions of a compiler with it.

    Parameters
    ----------
    compiler : the `Codegen` attribute of the functions.
    compile_fn : called with an `IRModule` and the options, unless there are no functions. Returns
        a runtime module, a list of them, or a `Compiled`.
    options : handed to compile_fn.
    cache : names the functions; see `OutlineCompilerFunctions`.
    lower : whether calls are lowered here.

    Raises
    ------
    TransformError
        compile_fn raised, or did not return what is needed, or the functions call others of the
        module; the module that was given is as it was.
    """

    compiler: str = option(arguments.text)
    compile_fn: CompileFunction = option(arguments.function)
    options: Mapping[str, Any] | None = option(_options, default=None)
    cache: GlobalSymbolCache | None = option(
        arguments.instance, GlobalSymbolCache, "a GlobalSymbolCache or None", default=None
    )
    lower: bool = option(arguments.flag, default=True, kw_only=True)

    def apply(self, mod: tvm.IRModule) -> tvm.IRModule:
        """Return the module with the compiled functions."""
        entries = {str(one.name_hint) for one in mod.get_global_vars()}
        mod = outline(mod, is_for(self.compiler), self.cache)
        mod = _without_unused(mod, self.compiler, entries)
        given = self._functions(mod)
        if not given.get_global_vars():
            return mod
        result = _with_result(mod, given, self._compile(mod, given), self._where(given))
        return lower(result) if self.lower else result

    def _where(self, given: tvm.IRModule) -> str:
        names = sorted(repr(str(one.name_hint)) for one in given.get_global_vars())
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        shown = ", ".join(names[:_SHOWN])
        return f"RunModuleCodegen: the compiler {self.compiler!r}, given {shown}{more},"

    def _functions(self, mod: tvm.IRModule) -> tvm.IRModule:
        """Return the module of the functions, each with a symbol."""
        functions: dict[tvm.ir.GlobalVar, relax.Function] = {}
        for global_var, function in mod.functions_items():
            if is_for(self.compiler)(function):
                symbol = own_symbol(function) or str(global_var.name_hint)
                functions[global_var] = function.with_attr(GLOBAL_SYMBOL, symbol)
        for global_var, function in functions.items():
            for used, _ in used_global_vars(function):
                if used not in functions:
                    raise TransformError(
                        f"RunModuleCodegen: the function {global_var.name_hint!r} is for "
                        f"{self.compiler!r} and uses {used.name_hint!r}, which is not; a compiler "
                        "gets its functions and only these. Inline it, or partition otherwise"
                    )
        return tvm.IRModule(functions, global_infos=mod.global_infos)

    def _compile(self, mod: tvm.IRModule, given: tvm.IRModule) -> Compiled:
        where = self._where(given)
        try:
            returned = self.compile_fn(given.clone(), dict(self.options or {}))
        except (Exception, SystemExit) as problem:
            raise TransformError(
                f"{where} failed{_function_in(problem, given)}: {message(problem)}"
            ) from problem
        compiled = as_compiled(where, returned)
        names = {str(one.name_hint) for one in mod.get_global_vars()}
        check_compiled(where, given, compiled, names)
        return compiled


def _function_in(problem: BaseException, given: tvm.IRModule) -> str:
    """Say which function an exception of the compiler is about, if it names one."""
    if isinstance(problem, CompileError):
        return f" on the function {problem.function!r}"
    names, text = [str(one.name_hint) for one in given.get_global_vars()], message(problem)
    named = [name for name in names if re.search(rf"\b{re.escape(name)}\b", text)]
    return f" on the function {named[0]!r}" if len(named) == 1 else ""


def _without_unused(mod: tvm.IRModule, compiler: str, entries: set[str]) -> tvm.IRModule:
    """Drop literals that nobody called, and give entries a caller, which keeps their names."""
    result = mod.clone()
    while True:
        used = used_functions(result)
        unused = [
            (global_var, function)
            for global_var, function in result.functions_items()
            if is_for(compiler)(function) and global_var not in used
        ]
        if not unused:
            return result
        names = Names(str(one.name_hint) for one in result.get_global_vars())
        for global_var, function in unused:
            if str(global_var.name_hint) not in entries:
                del result[global_var]
                continue
            name = names.fresh(f"{global_var.name_hint}_{compiler}")
            names.take(name)
            compiled = typed(tvm.ir.GlobalVar(name), function.ty)
            result[compiled] = copy_with_new_vars(function).with_attr(GLOBAL_SYMBOL, name)
            result[global_var] = _calling(compiled, function)


def _calling(compiled: tvm.ir.GlobalVar, function: relax.Function) -> relax.Function:
    call = relax.Call(compiled, list(function.params))
    value = relax.Var("result", function.ret_ty)
    binding = relax.VarBinding(value, typed(call, function.ret_ty))
    body = typed(relax.SeqExpr([relax.BindingBlock([binding])], value), function.ret_ty)
    caller = relax.Function(function.params, body, function.ret_ty, function.is_pure)
    symbol = own_symbol(function)
    return caller if symbol is None else caller.with_attr(GLOBAL_SYMBOL, symbol)


def _add_functions(result: tvm.IRModule, compiled: Compiled, done: set[str], where: str) -> None:
    """Put the functions of a compiler into the module, which may come from a module of its own."""
    added = {name: one for name, one in compiled.functions.items() if name not in done}
    if not added:
        return
    known = {str(global_var.name_hint): global_var for global_var in result.get_global_vars()}
    for name, function in added.items():
        if name not in known:
            known[name] = typed(tvm.ir.GlobalVar(name), function.ty)
    for name, function in added.items():
        if isinstance(function, relax.Function):
            for used, _ in used_global_vars(function):
                if str(used.name_hint) not in known:
                    raise TransformError(
                        f"{where} returned the function {name!r}, which uses {used.name_hint!r}; "
                        "neither the module nor what the compiler returned has that"
                    )
        result[known[name]] = tvm_ffi.structural_map(
            function, (tvm.ir.GlobalVar, lambda var: known.get(str(var.name_hint), var))
        )
    try:
        relax.analysis.well_formed(result, check_ty=False)
    except (TypeError, ValueError) as problem:
        names = ", ".join(map(repr, added))
        raise TransformError(
            f"{where} returned {names}, and the module is not well-formed: {message(problem)}"
        ) from problem


def _with_result(
    mod: tvm.IRModule, given: tvm.IRModule, compiled: Compiled, where: str
) -> tvm.IRModule:
    result = mod.clone()
    done = to_declare(given, compiled)
    declined = []
    for global_var in given.get_global_vars():
        name = str(global_var.name_hint)
        if name in done:
            result[global_var] = declaration(where, name, given, compiled)
        elif name not in compiled.functions:
            declined.append(global_var)
    _add_functions(result, compiled, done, where)
    result = inline(result, declined, ())
    attrs = dict(mod.attrs.items()) if mod.attrs else {}
    before = list(attrs.get(_MODULES, []))
    for name in sorted(done - set(compiled.registered)):
        symbol = str(result[name].global_symbol)
        if any(defines(module, symbol) for module in before):
            raise TransformError(
                f"{where} defines the symbol {symbol!r}, and so does a module that was attached "
                "before; name the functions otherwise, with FreshGlobalSymbols for example"
            )
    if compiled.modules:
        result = result.with_attr(_MODULES, [*before, *compiled.modules])
    if compiled.constants:
        constants = dict(attrs.get(_CONSTANTS, {}))
        clash = sorted(set(constants) & set(compiled.constants))
        if clash:
            raise TransformError(f"{where} returned the constant {clash[0]!r}, which is there")
        result = result.with_attr(_CONSTANTS, {**constants, **compiled.constants})
    return result
