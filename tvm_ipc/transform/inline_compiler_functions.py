# SPDX-License-Identifier: Apache-2.0
"""The way back from `OutlineCompilerFunctions`: the callers get the bodies.

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

Composites inside of such a function are inlined too, so that nothing tells that the module was ever
partitioned: where an external compiler declines, TVM compiles what it would have compiled. Function
literals that have not been outlined yet are inlined as well. A function that nobody calls, such as
an entry of the module, stays, without its `Codegen` attribute; so does one that is used as a value.

Runs before anything that lowers operators.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import tvm
import tvm_ffi
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm.relax.utils import copy_with_new_vars

from tvm_ipc import arguments
from tvm_ipc.errors import TransformError
from tvm_ipc.transform.byoc.call_shapes import match_call
from tvm_ipc.transform.byoc.global_symbol_cache import FreshGlobalSymbols
from tvm_ipc.transform.byoc.literals import (
    CODEGEN,
    COMPOSITE,
    compiler_of,
    is_for,
    used_functions,
    used_global_vars,
)
from tvm_ipc.transform.ir.rewrite import walk
from tvm_ipc.transform.module_pass import module_pass, option
from tvm_ipc.transform.outline_compiler_functions import outline


def _names(name: str, functions: object) -> frozenset[str]:
    if isinstance(functions, Iterable) and not isinstance(functions, str):
        functions = [
            str(one.name_hint) if isinstance(one, tvm.ir.GlobalVar) else one for one in functions
        ]
    wanted = "a collection of names or GlobalVars, or None"
    return frozenset(arguments.texts(name, functions, wanted))


@module_pass
class InlineCompilerFunctions:
    """Inline functions that have a `Codegen` attribute into their callers.

    Parameters
    ----------
    compiler : only those of this compiler; None for all.
    functions : only these, by their names or global variables; None for all.

    Raises
    ------
    TransformError
        A function of `functions` is not there or is for no compiler, or functions call each
        other in a circle; the module that was given is as it was.
    """

    compiler: str | None = option(arguments.text, "a name or None", default=None)
    functions: Collection[str | tvm.ir.GlobalVar] | None = option(_names, default=None)

    def apply(self, mod: tvm.IRModule) -> tvm.IRModule:
        """Return the module with the functions inlined."""
        self._check_functions(mod)
        given = {global_var.name_hint for global_var in mod.get_global_vars()}
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
            given,
        )

    def _check_functions(self, mod: tvm.IRModule) -> None:
        by_name = {global_var.name_hint: mod[global_var] for global_var in mod.get_global_vars()}
        for name in sorted(self.functions or ()):
            if name not in by_name:
                raise TransformError(
                    f"InlineCompilerFunctions: the module has no function {name!r}, only "
                    f"{', '.join(map(repr, sorted(by_name)))}"
                )
            if not is_for(self.compiler)(by_name[name]):
                found = compiler_of(by_name[name])
                raise TransformError(
                    f"InlineCompilerFunctions: the function {name!r} is for "
                    f"{'no compiler' if found is None else f'the compiler {found!r}'}; only "
                    f"those of {self.compiler or 'a compiler'} can be inlined"
                )


def inline(
    mod: tvm.IRModule, chosen: Collection[tvm.ir.GlobalVar], entries: Collection[str]
) -> tvm.IRModule:
    """Inline functions into their callers; those of `entries` stay if they have none."""
    if not chosen:
        return mod
    # What is inside of them becomes functions of the module for a moment.
    only = tvm.IRModule({global_var: mod[global_var] for global_var in chosen})
    closed = outline(only, _is_composite, FreshGlobalSymbols(prefix="tvm_ipc_composite"))
    bodies = {
        global_var: function.without_attr(CODEGEN) if compiler_of(function) else function
        for global_var, function in closed.functions_items()
    }
    _refuse_recursion(bodies)
    return _apply(mod, bodies, chosen, entries)


def _is_composite(function: relax.Function) -> bool:
    return bool(function.attrs) and COMPOSITE in function.attrs


def _refuse_recursion(bodies: dict[tvm.ir.GlobalVar, relax.Function]) -> None:
    for group in relax.analysis.detect_recursion(tvm.IRModule(bodies)):
        names = ", ".join(repr(str(global_var.name_hint)) for global_var in group)
        raise TransformError(
            f"InlineCompilerFunctions: {names} call each other in a circle, which cannot be inlined"
        )


def _apply(
    mod: tvm.IRModule,
    bodies: dict[tvm.ir.GlobalVar, relax.Function],
    inlined: Collection[tvm.ir.GlobalVar],
    given: Collection[str],
) -> tvm.IRModule:
    called = used_functions(mod)
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
        # No dataflow block may hold a branch.
        callers = dict(relax.transform.ToNonDataflow()(tvm.IRModule(callers)).functions_items())
    inliner = _Inliner(mod, bodies)
    for global_var, function in callers.items():
        inliner.builder_.update_func(global_var, inliner.visit_expr(function))
    result = inliner.builder_.get()
    used = used_functions(result)
    for global_var in inlined:
        if global_var not in used and (global_var in called or global_var.name_hint not in given):
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
        for block in body.blocks:
            for binding in block.bindings:
                self.set_var_remap(binding.var, self._emit(binding))
        return self.visit_expr(body.body)

    def _emit(self, binding: relax.Binding) -> relax.Var:
        value = self.visit_expr(binding.value)
        if isinstance(binding, relax.MatchCast):
            return self.builder_.match_cast(value, binding.ty, binding.var.name)
        return self.builder_.emit(value, binding.var.name)
