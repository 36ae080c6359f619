# SPDX-License-Identifier: Apache-2.0
"""The pass `RunModuleCodegen`, which compiles functions with an external compiler."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import tvm
import tvm_ffi
from tvm import relax
from tvm.relax.utils import copy_with_new_vars

from tvm_ipc import arguments
from tvm_ipc.analysis.walk_and_rewrite_bindings import typed
from tvm_ipc.errors import TransformError
from tvm_ipc.transform.byoc.check_compiler_results import (
    Compiled,
    CompileError,
    as_compiled,
    check_compiled,
    declaration,
    defines,
    message,
    to_declare,
)
from tvm_ipc.transform.byoc.nested_relax_functions import is_for, used_functions, used_global_vars
from tvm_ipc.transform.byoc.outlined_function_symbol_policies import (
    GLOBAL_SYMBOL,
    GlobalSymbolCache,
    Names,
    own_symbol,
)
from tvm_ipc.transform.inline_compiler_functions import inline
from tvm_ipc.transform.lower_extern_calls import lower
from tvm_ipc.transform.module_pass import ModulePass, module_pass, option
from tvm_ipc.transform.outline_compiler_functions import outline

CompileFunction = Callable[[tvm.IRModule, Mapping[str, Any]], Any]

#: The most functions that a message names.
_MAX_LISTED = 8
_MODULES = "external_mods"
_CONSTANTS = "const_name_to_constant"


def _options(name: str, value: object) -> dict[str, Any]:
    return dict(arguments.instance(name, value, Mapping, "a mapping or None"))


@module_pass
class RunModuleCodegen(ModulePass):
    """Compile all functions of an external compiler, and attach the result to the module.

    An example of a compiler:

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

    The pass works in four steps:

    1. It outlines the functions (`OutlineCompilerFunctions`).
    2. It calls `compile_fn` with a module that contains only these functions. Their constants are
       not copied.
    3. It checks the result (`Compiled`), and attaches it where `relax.build` and `tvm.compile` find
       it.
    4. It replaces the functions by extern declarations (`MarkCompilerFunctionsAsExtern`), and
       lowers their calls (`LowerExternCalls`), so that any pipeline can build the module. With
       `lower=False` the declarations stay, for a pipeline that plans memory scopes and lowers calls
       later.

    A function that is an entry of the module keeps its name, and calls the compiled function. Every
    error is a `TransformError` that names the functions and contains the compiler's message. The
    module that was passed is not changed, and can be built without the compiler.

    Run the pass before passes that lower operators, once for each compiler.

    Parameters
    ----------
    compiler : the `Codegen` attribute of the functions.
    compile_fn : called with an `IRModule` and the options, unless there are no functions. Returns
        a runtime module, a list of them, or a `Compiled`.
    options : the options for compile_fn.
    cache : the policy that names the functions; see `OutlineCompilerFunctions`.
    lower : whether the pass lowers the calls.

    Raises
    ------
    TransformError
        If compile_fn raises an exception or returns a wrong result, or if the functions call other
        functions of the module.

    Examples
    --------
    The compiler of this package for matmuls. A compiler of your own returns a runtime module.

    >>> import tvm
    >>> from tvm_ipc.cpu import compile_blas
    >>> from tvm_ipc.transform import RunModuleCodegen
    >>> mod = tvm.script.from_source('''
    ... @I.ir_module
    ... class Model:
    ...     @R.function
    ...     def main(x: R.Tensor((4, 4), "float32")):
    ...         @R.function
    ...         def inner(a: R.Tensor((4, 4), "float32")):
    ...             R.func_attr({"Codegen": "blas"})
    ...             return R.matmul(a, a)
    ...         y = inner(x)
    ...         return y
    ... ''')
    >>> "tvm_ipc.blas.matmul" in RunModuleCodegen("blas", compile_blas)(mod).script()
    True
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
        entries = {str(global_var.name_hint) for global_var in mod.get_global_vars()}
        mod = outline(mod, is_for(self.compiler), self.cache)
        mod = _without_unused(mod, self.compiler, entries)
        functions = self._collect_functions(mod)
        if not functions.get_global_vars():
            return mod
        result = _with_result(
            mod, functions, self._compile(mod, functions), self._subject(functions)
        )
        return lower(result) if self.lower else result

    def _subject(self, functions: tvm.IRModule) -> str:
        names = sorted(
            repr(str(global_var.name_hint)) for global_var in functions.get_global_vars()
        )
        more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
        listed = ", ".join(names[:_MAX_LISTED])
        return f"RunModuleCodegen: the compiler {self.compiler!r}, given {listed}{more},"

    def _collect_functions(self, mod: tvm.IRModule) -> tvm.IRModule:
        """Return a module of the compiler's functions, each with a symbol."""
        functions: dict[tvm.ir.GlobalVar, relax.Function] = {}
        for global_var, function in mod.functions_items():
            if is_for(self.compiler)(function):
                symbol = own_symbol(function) or str(global_var.name_hint)
                functions[global_var] = function.with_attr(GLOBAL_SYMBOL, symbol)
        for global_var, function in functions.items():
            for used, _ in used_global_vars(function):
                if used not in functions:
                    raise TransformError(
                        f"RunModuleCodegen: the function {global_var.name_hint!r} is for the "
                        f"compiler {self.compiler!r}, but uses {used.name_hint!r}, which is not; "
                        "inline that function, or change the partitioning"
                    )
        return tvm.IRModule(functions, global_infos=mod.global_infos)

    def _compile(self, mod: tvm.IRModule, functions: tvm.IRModule) -> Compiled:
        where = self._subject(functions)
        try:
            returned = self.compile_fn(functions.clone(), dict(self.options or {}))
        except (Exception, SystemExit) as error:
            raise TransformError(
                f"{where} failed{_function_in(error, functions)}: {message(error)}"
            ) from error
        compiled = as_compiled(where, returned)
        names = {str(global_var.name_hint) for global_var in mod.get_global_vars()}
        check_compiled(where, functions, compiled, names)
        return compiled


def _function_in(error: BaseException, functions: tvm.IRModule) -> str:
    """Return which function an exception of the compiler names, "" if it names none or several."""
    if isinstance(error, CompileError):
        return f" on the function {error.function!r}"
    names, text = (
        [str(global_var.name_hint) for global_var in functions.get_global_vars()],
        message(error),
    )
    named = [name for name in names if re.search(rf"\b{re.escape(name)}\b", text)]
    return f" on the function {named[0]!r}" if len(named) == 1 else ""


def _without_unused(mod: tvm.IRModule, compiler: str, entries: set[str]) -> tvm.IRModule:
    """Remove outlined functions without callers; replace entries by callers of the same name."""
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
        names = Names(str(used_name.name_hint) for used_name in result.get_global_vars())
        for global_var, function in unused:
            if str(global_var.name_hint) not in entries:
                del result[global_var]
                continue
            name = names.fresh(f"{global_var.name_hint}_{compiler}")
            names.take(name)
            compiled = typed(tvm.ir.GlobalVar(name), function.ty)
            result[compiled] = copy_with_new_vars(function).with_attr(GLOBAL_SYMBOL, name)
            result[global_var] = _make_caller(compiled, function)


def _make_caller(compiled: tvm.ir.GlobalVar, function: relax.Function) -> relax.Function:
    """Return a function with another one's signature and symbol that calls the compiled one."""
    call = relax.Call(compiled, list(function.params))
    value = relax.Var("result", function.ret_ty)
    binding = relax.VarBinding(value, typed(call, function.ret_ty))
    body = typed(relax.SeqExpr([relax.BindingBlock([binding])], value), function.ret_ty)
    caller = relax.Function(function.params, body, function.ret_ty, function.is_pure)
    symbol = own_symbol(function)
    return caller if symbol is None else caller.with_attr(GLOBAL_SYMBOL, symbol)


def _add_functions(
    result: tvm.IRModule, compiled: Compiled, declared: set[str], where: str
) -> None:
    """Add the functions that a compiler returned, with the module's global variables."""
    added = {
        name: function for name, function in compiled.functions.items() if name not in declared
    }
    if not added:
        return
    global_vars = {str(global_var.name_hint): global_var for global_var in result.get_global_vars()}
    for name, function in added.items():
        if name not in global_vars:
            global_vars[name] = typed(tvm.ir.GlobalVar(name), function.ty)
    for name, function in added.items():
        if isinstance(function, relax.Function):
            for used, _ in used_global_vars(function):
                if str(used.name_hint) not in global_vars:
                    raise TransformError(
                        f"{where} returned the function {name!r}, which uses {used.name_hint!r}; "
                        "neither the module nor the result of the compiler has that function"
                    )
        result[global_vars[name]] = tvm_ffi.structural_map(
            function, (tvm.ir.GlobalVar, lambda var: global_vars.get(str(var.name_hint), var))
        )
    try:
        relax.analysis.well_formed(result, check_ty=False)
    except (TypeError, ValueError) as error:
        names = ", ".join(map(repr, added))
        raise TransformError(
            f"{where} returned {names}, with which the module is not well-formed: {message(error)}"
        ) from error


def _with_result(
    mod: tvm.IRModule, functions: tvm.IRModule, compiled: Compiled, where: str
) -> tvm.IRModule:
    result = mod.clone()
    declared = to_declare(functions, compiled)
    declined = []
    for global_var in functions.get_global_vars():
        name = str(global_var.name_hint)
        if name in declared:
            result[global_var] = declaration(where, name, functions, compiled)
        elif name not in compiled.functions:
            declined.append(global_var)
    _add_functions(result, compiled, declared, where)
    result = inline(result, declined, ())
    attrs = dict(mod.attrs.items()) if mod.attrs else {}
    attached = list(attrs.get(_MODULES, []))
    for name in sorted(declared - set(compiled.registered)):
        symbol = str(result[name].global_symbol)
        if any(defines(module, symbol) for module in attached):
            raise TransformError(
                f"{where} defines the symbol {symbol!r}, which an attached module already defines; "
                "use other names for the functions, for example FreshGlobalSymbols"
            )
    if compiled.modules:
        result = result.with_attr(_MODULES, [*attached, *compiled.modules])
    if compiled.constants:
        constants = dict(attrs.get(_CONSTANTS, {}))
        clash = sorted(set(constants) & set(compiled.constants))
        if clash:
            raise TransformError(
                f"{where} returned the constant {clash[0]!r}, which the module already has; use "
                "another name"
            )
        result = result.with_attr(_CONSTANTS, {**constants, **compiled.constants})
    return result
