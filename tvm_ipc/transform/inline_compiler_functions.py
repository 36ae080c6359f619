# SPDX-License-Identifier: Apache-2.0
"""The pass `InlineCompilerFunctions`, which reverts the partitioning for an external compiler."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import tvm
import tvm_ffi
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm.relax.utils import copy_with_new_vars

from tvm_ipc import arguments
from tvm_ipc.analysis.walk_and_rewrite_bindings import bindings_of, walk
from tvm_ipc.errors import TransformError
from tvm_ipc.transform.byoc.match_call_symbolic_shapes import match_call
from tvm_ipc.transform.byoc.nested_relax_functions import (
    CODEGEN,
    COMPOSITE,
    compiler_of,
    is_for,
    used_functions,
    used_global_vars,
)
from tvm_ipc.transform.byoc.outlined_function_symbol_policies import FreshGlobalSymbols
from tvm_ipc.transform.module_pass import ModulePass, module_pass, option
from tvm_ipc.transform.outline_compiler_functions import outline


def _names(name: str, functions: object) -> frozenset[str]:
    if isinstance(functions, Iterable) and not isinstance(functions, str):
        functions = [
            str(function.name_hint) if isinstance(function, tvm.ir.GlobalVar) else function
            for function in functions
        ]
    wanted = "a collection of names or GlobalVars, or None"
    return frozenset(arguments.texts(name, functions, wanted))


@module_pass
class InlineCompilerFunctions(ModulePass):
    """Inline functions that have a `Codegen` attribute into their callers.

    This is the inverse of `OutlineCompilerFunctions`.

    Before:

        @R.function
        def main_cc_0(a: R.Tensor(("n", 4), "float32"), b: R.Tensor(("n", 4), "float32")):
            R.func_attr({"Codegen": "cc"})
            return R.add(a, b)

        @R.function
        def main(x: R.Tensor(("n", 4), "float32")):
            y = cls.main_cc_0(x, x)

    After:

        @R.function
        def main(x: R.Tensor(("n", 4), "float32")):
            y = R.add(x, x)

    Composite functions inside of such a function are inlined too, so TVM compiles the same
    operators as without partitioning. Function literals that have not been outlined are inlined as
    well. A function without callers, such as an entry of the module, stays without its `Codegen`
    attribute; so does a function that is used as a value.

    Run the pass before passes that lower operators.

    Parameters
    ----------
    compiler : the compiler whose functions are inlined; None for all compilers.
    functions : the functions to inline, by name or global variable; None for all.

    Raises
    ------
    TransformError
        If a function of `functions` does not exist or has no compiler, or if functions call each
        other recursively.

    Examples
    --------
    >>> import tvm
    >>> from tvm_ipc.transform import InlineCompilerFunctions, OutlineCompilerFunctions
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
    >>> outlined = OutlineCompilerFunctions()(mod)
    >>> sorted(var.name_hint for var in outlined.get_global_vars())
    ['main', 'main_cc_0']
    >>> inlined = InlineCompilerFunctions("cc")(outlined)
    >>> [var.name_hint for var in inlined.get_global_vars()]
    ['main']
    """

    compiler: str | None = option(arguments.text, "a name or None", default=None)
    functions: Collection[str | tvm.ir.GlobalVar] | None = option(_names, default=None)

    def apply(self, mod: tvm.IRModule) -> tvm.IRModule:
        """Return the module with the functions inlined."""
        self._check_functions(mod)
        entries = {global_var.name_hint for global_var in mod.get_global_vars()}
        if self.functions is None:
            mod = outline(mod, is_for(self.compiler), FreshGlobalSymbols())
        return inline(
            mod,
            [
                global_var
                for global_var, function in mod.functions_items()
                if is_for(self.compiler)(function)
                and (self.functions is None or global_var.name_hint in self.functions)
            ],
            entries,
        )

    def _check_functions(self, mod: tvm.IRModule) -> None:
        by_name = {global_var.name_hint: mod[global_var] for global_var in mod.get_global_vars()}
        for name in sorted(self.functions or ()):
            if name not in by_name:
                raise TransformError(
                    f"InlineCompilerFunctions: the module has no function {name!r}; "
                    f"{arguments.listed('function', sorted(by_name))}"
                )
            if not is_for(self.compiler)(by_name[name]):
                compiler = compiler_of(by_name[name])
                raise TransformError(
                    f"InlineCompilerFunctions: the function {name!r} is for "
                    f"{'no compiler' if compiler is None else f'the compiler {compiler!r}'}; only "
                    f"functions for {self.compiler or 'a compiler'} can be inlined"
                )


def inline(
    mod: tvm.IRModule, inlined: Collection[tvm.ir.GlobalVar], entries: Collection[str]
) -> tvm.IRModule:
    """Inline functions into their callers; those of `entries` stay if they have no callers."""
    if not inlined:
        return mod
    # Composite literals are outlined first, and then inlined like the functions around them.
    inlined_only = tvm.IRModule({global_var: mod[global_var] for global_var in inlined})
    outlined = outline(inlined_only, _is_composite, FreshGlobalSymbols(prefix="tvm_ipc_composite"))
    bodies = {
        global_var: function.without_attr(CODEGEN) if compiler_of(function) else function
        for global_var, function in outlined.functions_items()
    }
    _check_recursion(bodies)
    return _apply(mod, bodies, inlined, entries)


def _is_composite(function: relax.Function) -> bool:
    return bool(function.attrs) and COMPOSITE in function.attrs


def _check_recursion(bodies: dict[tvm.ir.GlobalVar, relax.Function]) -> None:
    for group in relax.analysis.detect_recursion(tvm.IRModule(bodies)):
        names = [repr(str(global_var.name_hint)) for global_var in group]
        recursion = "calls itself" if len(names) == 1 else "call each other recursively"
        raise TransformError(
            f"InlineCompilerFunctions: {', '.join(names)} {recursion} and cannot be inlined"
        )


def _apply(
    mod: tvm.IRModule,
    bodies: dict[tvm.ir.GlobalVar, relax.Function],
    inlined: Collection[tvm.ir.GlobalVar],
    entries: Collection[str],
) -> tvm.IRModule:
    used_before = used_functions(mod)
    callers = {
        global_var: bodies.get(global_var, function)
        for global_var, function in mod.functions_items()
        if global_var in inlined
        or (
            isinstance(function, relax.Function)
            and any(used in bodies for used, _ in used_global_vars(function))
        )
    }
    if any(map(_has_branch, bodies.values())):
        # A dataflow block may not contain a branch.
        callers = dict(relax.transform.ToNonDataflow()(tvm.IRModule(callers)).functions_items())
    inliner = _Inliner(mod, bodies)
    for global_var, function in callers.items():
        inliner.builder_.update_func(global_var, inliner.visit_expr(function))
    result = inliner.builder_.get()
    used_after = used_functions(result)
    for global_var in inlined:
        if global_var not in used_after and (
            global_var in used_before or global_var.name_hint not in entries
        ):
            del result[global_var]
    return result


def _has_branch(function: relax.Function) -> bool:
    return any(isinstance(value, relax.If) for _, value in walk(function))


@mutator
class _Inliner(PyExprMutator):  # type: ignore[misc]
    def __init__(self, mod: tvm.IRModule, bodies: dict[tvm.ir.GlobalVar, relax.Function]) -> None:
        super().__init__(mod)
        self._bodies = bodies

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        if not isinstance(call.op, tvm.ir.GlobalVar) or call.op not in self._bodies:
            return super().visit_call_(call)
        function = copy_with_new_vars(self._bodies[call.op])
        arguments = [self.visit_expr(argument) for argument in call.args]
        shapes = match_call(
            [param.ty for param in function.params], [argument.ty for argument in arguments]
        )
        for index, ty in shapes.casts.items():
            arguments[index] = self.builder_.match_cast(arguments[index], ty)
        values = {**shapes.values, **dict(zip(function.params, arguments, strict=True))}
        body = tvm_ffi.structural_map(
            function.body, ((tvm.ir.Var, relax.DataflowVar), lambda var: values.get(var, var))
        )
        for binding in bindings_of(body):
            self.set_var_remap(binding.var, self._emit(binding))
        return self.visit_expr(body.body)

    def _emit(self, binding: relax.Binding) -> relax.Var:
        value = self.visit_expr(binding.value)
        if isinstance(binding, relax.MatchCast):
            return self.builder_.match_cast(value, binding.ty, binding.var.name)
        return self.builder_.emit(value, binding.var.name)
