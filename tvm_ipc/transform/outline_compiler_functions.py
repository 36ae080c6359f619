# SPDX-License-Identifier: Apache-2.0
"""The pass `OutlineCompilerFunctions`, which moves function literals for an external compiler."""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvm_ipc import arguments
from tvm_ipc.analysis.walk_and_rewrite_bindings import relax_functions, typed
from tvm_ipc.errors import TransformError
from tvm_ipc.transform.byoc.nested_relax_functions import (
    COMPOSITE,
    Equals,
    close,
    compiler_of,
    contains_literal,
    is_for,
)
from tvm_ipc.transform.byoc.outlined_function_symbol_policies import (
    GLOBAL_SYMBOL,
    ExistingGlobalSymbols,
    FreshGlobalSymbols,
    GlobalSymbolCache,
    Names,
    Site,
)
from tvm_ipc.transform.module_pass import ModulePass, module_pass, option


@module_pass
class OutlineCompilerFunctions(ModulePass):
    """Outline function literals that have a `Codegen` attribute to functions of the module.

    Before:

        @R.function
        def main(x: R.Tensor(("n", 4), "float32")):
            @R.function
            def inner(a: R.Tensor((n, 4), "float32")):
                R.func_attr({"Codegen": "cc", "Inline": True})
                return R.add(a, x)
            y = inner(x)
            z = inner(y)

    After:

        @R.function
        def main_cc_0(a: R.Tensor(("n", 4), "float32"), x: R.Tensor(("n", 4), "float32")):
            R.func_attr({"Codegen": "cc", "Inline": True})
            return R.add(a, x)

        @R.function
        def main(x: R.Tensor(("n", 4), "float32")):
            y = cls.main_cc_0(x, x)
            z = cls.main_cc_0(y, x)

    Literals are outlined wherever they occur: called in place, bound to a variable, nested, in a
    branch, or in a dataflow block. Functions inside of them without the attribute, such as
    composites, are not outlined. Free variables become parameters; symbolic variables that no
    parameter's type defines become one more parameter, a shape. All attributes are kept, including
    `Inline`: a function that may be inlined still needs a symbol to be compiled externally.
    `global_symbol` is the new name. Structurally equal functions are shared, also with functions of
    the module.

    A literal that is used as a value is replaced by a function without attributes that calls the
    outlined one.

    Run the pass first, before passes that lower operators. A `GlobalSymbolCache` determines names
    and which functions are shared. The pass is idempotent.

    Parameters
    ----------
    compiler : the compiler whose literals are outlined; None for all compilers.
    cache : the policy that names the functions. By default, functions with a `global_symbol` keep
        it, and others are named after the enclosing function and the compiler.

    Raises
    ------
    TransformError
        If two different functions would get the same symbol, or if a function calls itself.

    Examples
    --------
    >>> import tvm
    >>> from tvm_ipc.transform import OutlineCompilerFunctions
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
    """

    compiler: str | None = option(arguments.text, "a name or None", default=None)
    cache: GlobalSymbolCache | None = option(
        arguments.instance, GlobalSymbolCache, "a GlobalSymbolCache or None", default=None
    )

    def apply(self, mod: tvm.IRModule) -> tvm.IRModule:
        """Return the module with the functions outlined."""
        return outline(mod, is_for(self.compiler), self.cache)


def outline(
    mod: tvm.IRModule,
    selected: Callable[[relax.Function], bool],
    cache: GlobalSymbolCache | None = None,
) -> tvm.IRModule:
    """Outline the selected literals.

    Without a policy, literals with a symbol keep it, and others get new symbols.
    """
    functions = [
        (global_var, function)
        for global_var, function in relax_functions(mod)
        if contains_literal(function, selected)
    ]
    if not functions:
        return mod
    table = _Table(mod, cache or ExistingGlobalSymbols(otherwise=FreshGlobalSymbols()))
    outliner = _Outliner(mod, selected, table)
    for global_var, function in functions:
        outliner.function_name = global_var.name_hint
        outliner.builder_.update_func(global_var, outliner.visit_expr(function))
    if table.problem is not None:
        raise table.problem
    result = outliner.builder_.get()
    for global_var, function in table.outlined:
        result[global_var] = function
    return result


class _Table:
    """The outlined functions.

    The first error is kept as `problem` and raised at the end: an exception in the middle of a
    function would leave TVM's builder with an open block.
    """

    def __init__(self, mod: tvm.IRModule, cache: GlobalSymbolCache) -> None:
        self.outlined: list[tuple[tvm.ir.GlobalVar, relax.Function]] = []
        self.problem: Exception | None = None
        self._cache = cache
        self._equals = Equals()
        self._names = Names([])
        for global_var, function in mod.functions_items():
            self._names.take(global_var.name_hint)
            if function.attrs and GLOBAL_SYMBOL in function.attrs:
                self._names.take(str(function.attrs[GLOBAL_SYMBOL]))
            if compiler_of(function) is not None:
                if not isinstance(global_var.ty, relax.FuncType):
                    typed(global_var, function.ty)  # its calls need a type
                self._equals.add(function, global_var)

    def global_var(self, function: relax.Function, site: Site) -> tvm.ir.GlobalVar:
        """Return the global variable of an equal function, or a new one."""
        try:
            shared = self._equals.find(
                function,
                lambda other: self._cache.shares(str(other.name_hint), function, site),
            )
            if shared is not None:
                return shared
            symbol = self._symbol(function, site)
        except Exception as error:
            self.problem = self.problem or error
            symbol = ""
        global_var = typed(tvm.ir.GlobalVar(symbol), function.ty)
        self._names.take(symbol)
        self._equals.add(function, global_var)
        self.outlined.append((global_var, function.with_attr(GLOBAL_SYMBOL, symbol)))
        return global_var

    def _symbol(self, function: relax.Function, site: Site) -> str:
        symbol = self._cache.symbol(function, site, self._names)
        policy = type(self._cache).__name__
        if not isinstance(symbol, str) or not symbol:
            raise TransformError(
                f"OutlineCompilerFunctions: {policy} returned the symbol {symbol!r} for {site}; "
                "expected a name"
            )
        if self._names.taken(symbol):
            raise TransformError(
                f"OutlineCompilerFunctions: {policy} returned the symbol {symbol!r} for {site}, "
                "but a different function of the module has this symbol; rename one of them, or "
                "use another policy, such as FreshGlobalSymbols()"
            )
        return symbol


@mutator
class _Outliner(PyExprMutator):  # type: ignore[misc]
    def __init__(
        self, mod: tvm.IRModule, selected: Callable[[relax.Function], bool], table: _Table
    ) -> None:
        super().__init__(mod)
        self.function_name = ""
        self._selected = selected
        self._table = table
        self._callees: dict[relax.Var, tuple[tvm.ir.GlobalVar, list[relax.Expr]]] = {}

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        value, var = binding.value, binding.var
        if isinstance(value, relax.Function) and self._selected(value):
            self._callees[var] = self._outline(value, var)
        elif isinstance(value, relax.Var) and value in self._callees:
            self._callees[var] = self._callees[value]
        else:
            super().visit_var_binding_(binding)

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        if isinstance(call.op, relax.Function) and self._selected(call.op):
            callee = self._outline(call.op, None)
        elif isinstance(call.op, relax.Var) and call.op in self._callees:
            callee = self._callees[call.op]
        else:
            return super().visit_call_(call)
        global_var, extra = callee
        return relax.Call(global_var, [*map(self.visit_expr, call.args), *extra])

    def visit_var_(self, var: relax.Var) -> relax.Expr:
        return self._as_value(var) if var in self._callees else super().visit_var_(var)

    def visit_dataflow_var_(self, var: relax.DataflowVar) -> relax.Expr:
        return self._as_value(var) if var in self._callees else super().visit_dataflow_var_(var)

    def _outline(
        self, literal: relax.Function, var: relax.Var | None
    ) -> tuple[tvm.ir.GlobalVar, list[relax.Expr]]:
        name = "a literal" if var is None else var.name
        site = Site(
            self.function_name, name, compiler_of(literal) or str(literal.attrs.get(COMPOSITE))
        )
        closed = close(self.visit_expr(literal))
        if var in closed.variables:
            self._table.problem = TransformError(
                f"OutlineCompilerFunctions: {site} calls itself; make it a module-level function"
            )
        global_var = self._table.global_var(closed.function, site)
        extra = closed.arguments()
        if var is not None and not isinstance(var, relax.DataflowVar):
            # If the variable is an output of its dataflow block, its free variables must be too.
            extra = [
                self.builder_.emit_output(value) if isinstance(value, relax.DataflowVar) else value
                for value in extra
            ]
        return global_var, extra

    def _as_value(self, var: relax.Var) -> relax.Expr:
        global_var, extra = self._callees[var]
        if not extra:
            return global_var
        ty = var.ty
        params = [relax.Var(f"arg{i}", param) for i, param in enumerate(ty.params)]
        result = relax.Var("result", ty.ret)
        call = relax.VarBinding(result, relax.Call(global_var, [*params, *extra]))
        body = relax.SeqExpr([relax.BindingBlock([call])], result)
        return self.builder_.emit(relax.Function(params, body, ty.ret, bool(ty.purity)))
