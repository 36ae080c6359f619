# SPDX-License-Identifier: Apache-2.0
"""Makes declarations of functions that an external compiler has compiled.

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
        "scaled", R.Callable((R.Tensor(("m", 4), "float32"),), R.Tensor(("m", 4), "float32"), True)
    )                                                               # {"tvm_ipc.extern": True}

    @R.function
    def main(x: R.Tensor(("n", 4), "float32")):
        y = cls.scaled(x)

The signature with its symbolic shapes stays, and what of it a type cannot say (`byoc/extern.py`).
All other attributes go: they told how to compile the function, and whoever meets the declaration
must not compile, fuse or inline it. Callers are unchanged.

Runs when the compiler is done, on functions of the module (`OutlineCompilerFunctions`). Later, and
before the virtual machine, `LowerExternCalls` makes the calls what the symbol expects.
`RunModuleCodegen` does all of it.
"""

from __future__ import annotations

from collections.abc import Iterable

import tvm
from tvm import relax

from tvm_ipc import arguments
from tvm_ipc.errors import TransformError
from tvm_ipc.transform.byoc.extern import declare
from tvm_ipc.transform.byoc.literals import compiler_of, contains_literal, is_for
from tvm_ipc.transform.module_pass import module_pass, option


@module_pass
class MarkCompilerFunctionsAsExtern:
    """Replace the functions of a compiler by extern declarations.

    Parameters
    ----------
    compiler : the `Codegen` attribute of the functions.

    Raises
    ------
    TransformError
        One of them is a literal in another function, or declares memory scopes or outputs in
        place that it cannot have; the module that was given is as it was.
    """

    compiler: str = option(arguments.text)

    def apply(self, mod: tvm.IRModule) -> tvm.IRModule:
        """Return the module with the declarations."""
        for global_var, function in mod.functions_items():
            if isinstance(function, relax.Function) and contains_literal(
                function, is_for(self.compiler)
            ):
                raise TransformError(
                    f"MarkCompilerFunctionsAsExtern: {global_var.name_hint!r} contains a function "
                    f"literal for {self.compiler!r}, which has no symbol; run "
                    "OutlineCompilerFunctions before the compiler"
                )
        return mark(
            "MarkCompilerFunctionsAsExtern",
            mod,
            [
                global_var
                for global_var, function in mod.functions_items()
                if compiler_of(function) == self.compiler
            ],
        )


def mark(
    pass_name: str, mod: tvm.IRModule, global_vars: Iterable[tvm.ir.GlobalVar]
) -> tvm.IRModule:
    """Replace functions of a module by declarations."""
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
