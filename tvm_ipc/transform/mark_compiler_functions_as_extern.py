# SPDX-License-Identifier: Apache-2.0
"""The pass `MarkCompilerFunctionsAsExtern`, which replaces compiled functions by declarations."""

from __future__ import annotations

from collections.abc import Iterable

import tvm

from tvm_ipc import arguments
from tvm_ipc.analysis.walk_and_rewrite_bindings import relax_functions
from tvm_ipc.errors import TransformError
from tvm_ipc.transform.byoc.extern_declaration import declare
from tvm_ipc.transform.byoc.nested_relax_functions import contains_literal, is_for
from tvm_ipc.transform.module_pass import ModulePass, module_pass, option


@module_pass
class MarkCompilerFunctionsAsExtern(ModulePass):
    """Replace the functions of one compiler, or of all, by extern declarations.

    Before:

        @R.function
        def scaled(a: R.Tensor(("m", 4), "float32")) -> R.Tensor(("m", 4), "float32"):
            R.func_attr({"Codegen": "cc", "Inline": True})
            return R.nn.relu(a)

        @R.function
        def main(x: R.Tensor(("n", 4), "float32")):
            y = cls.scaled(x)

    After:

        scaled = R.ExternFunc(
            "scaled",
            R.Callable((R.Tensor(("m", 4), "float32"),), R.Tensor(("m", 4), "float32"), True),
        )                                                           # {"tvm_ipc.extern": True}

        @R.function
        def main(x: R.Tensor(("n", 4), "float32")):
            y = cls.scaled(x)

    A declaration keeps the signature with its symbolic shapes, and the attributes that extend it
    (`byoc/extern_declaration.py`). All other attributes are removed: they concern compilation, and
    a declaration must not be compiled, fused or inlined. Callers are unchanged.

    Run the pass after the compiler, on functions of the module (`OutlineCompilerFunctions`). Later,
    `LowerExternCalls` must lower the calls. `RunModuleCodegen` does all of it.

    Parameters
    ----------
    compiler : the `Codegen` attribute of the functions; None for those of all compilers.

    Raises
    ------
    TransformError
        If one of the functions is a literal in another function, or declares inconsistent memory
        scopes or in-place outputs.

    Examples
    --------
    >>> import tvm
    >>> from tvm_ipc.transform import MarkCompilerFunctionsAsExtern, OutlineCompilerFunctions
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
    >>> mod["main_cc_0"].global_symbol
    'main_cc_0'
    >>> mod["main_cc_0"].ty.ret
    R.Tensor((n, 4), dtype="float32")
    """

    compiler: str | None = option(arguments.text, "a name or None", default=None)

    def apply(self, mod: tvm.IRModule) -> tvm.IRModule:
        """Return the module with the declarations."""
        is_compiled = is_for(self.compiler)
        for global_var, function in relax_functions(mod):
            if contains_literal(function, is_compiled):
                whose = "a compiler" if self.compiler is None else repr(self.compiler)
                raise TransformError(
                    f"MarkCompilerFunctionsAsExtern: {global_var.name_hint!r} contains a function "
                    f"literal for {whose}, which has no symbol; run "
                    "OutlineCompilerFunctions before the compiler"
                )
        return mark(
            "MarkCompilerFunctionsAsExtern",
            mod,
            [global_var for global_var, function in mod.functions_items() if is_compiled(function)],
        )


def mark(
    pass_name: str, mod: tvm.IRModule, global_vars: Iterable[tvm.ir.GlobalVar]
) -> tvm.IRModule:
    """Replace functions of a module by extern declarations; messages begin with the pass name."""
    declarations = {
        global_var: declare(pass_name, str(global_var.name_hint), mod[global_var])
        for global_var in global_vars
    }
    if not declarations:
        return mod
    result = mod.clone()
    for global_var, declaration in declarations.items():
        result[global_var] = declaration
    return result
