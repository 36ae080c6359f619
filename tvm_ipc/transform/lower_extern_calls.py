# SPDX-License-Identifier: Apache-2.0
"""The pass `LowerExternCalls`, which lowers calls of functions that were compiled externally."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvm_ipc import arguments
from tvm_ipc.analysis.alias_facts import AliasFacts
from tvm_ipc.analysis.binding_builders import ALLOC, alloc, device_of
from tvm_ipc.analysis.find_aliases import ModuleAliasFacts
from tvm_ipc.analysis.program_order import Step
from tvm_ipc.analysis.shape_algebra import extents_of
from tvm_ipc.analysis.walk_and_rewrite_bindings import calls, has_dataflow, relax_functions
from tvm_ipc.errors import TransformError
from tvm_ipc.packed_functions.program_function_declarations import COPY
from tvm_ipc.transform.byoc.extern_declaration import SCOPES, WRITES, Extern, read
from tvm_ipc.transform.byoc.match_call_symbolic_shapes import CallShapes, match_call
from tvm_ipc.transform.byoc.nested_relax_functions import used_global_vars
from tvm_ipc.transform.module_pass import ModulePass, module_pass, option

_FORCE_PURE = "relax.force_pure"
_CALL_DPS_PACKED = tvm.ir.Op.get("relax.call_dps_packed")

Externs = dict[tvm.ir.GlobalVar, Extern]


@module_pass
class LowerExternCalls(ModulePass):
    """Lower calls of extern declarations to calls that take their outputs as arguments.

    Before, with `scaled` declared as (R.Tensor((m, 4)), R.Shape([k])) -> R.Tensor((m * k, 4)):

        y = cls.scaled(x, R.shape([2]))                 # x: R.Tensor((n, 4), "float32")

    After:

        alloc = R.builtin.alloc_tensor(R.shape([n * 2, 4]), "float32", 0, "global")
        _ = R.call_packed("scaled", x, R.shape([2]), alloc)
        y = alloc

    In a function that still tracks purity, the pass emits a pure call instead, which
    `CallTIRRewrite` lowers to the same:

        y = R.call_dps_packed("scaled", (x, R.shape([2])), out_ty=R.Tensor((n * 2, 4), "float32"))

    The pass may therefore run anywhere before the virtual machine's own lowering, and any pipeline
    of TVM can build the result. Of each declaration, `scaled = R.ExternFunc("scaled")` stays
    without a type. It reserves the symbol: calls refer to it by name, and TVM would otherwise give
    names such as "add" and "matmul" to its own kernels.

    The shapes of outputs are computed from those of arguments. If the type of an argument does not
    imply the signature, a `match_cast` before the call determines or checks the extents when the
    program runs. An output whose shape does not depend on the arguments alone is an error, since
    the caller could not allocate it. The outputs of a tuple are passed one by one, in order.

    The attributes of a declaration (`byoc/extern_declaration.py`) apply to every call. Outputs are
    allocated in their memory scopes, and an argument that may be in another scope is copied. An
    in-place output overwrites its argument if that is a tensor of this function that is not used
    again, by any name (`analysis/find_aliases.py`), and that no other argument of the call may
    alias; otherwise it overwrites a copy. The pass removes the dataflow blocks of functions with
    such calls, so it best runs right after `CallTIRRewrite`, which removes them anyway.

    The attribute `tvm_ipc.scopes` of a lowered callee has the scopes of all arguments, and
    `tvm_ipc.writes` the indices of those that it writes, its outputs. `PlanMemoryScopes` reads the
    scopes: with `place_arguments=False`, that pass allocates arguments in the right scope, or
    copies them.

    Parameters
    ----------
    place_arguments : whether arguments are copied into the scopes that declarations require. Pass
        False only if `PlanMemoryScopes` or `IPCAllReduceRewrite` runs later.

    Raises
    ------
    TransformError
        If the shape of an output does not follow from the arguments, an output is not a tensor, a
        declaration is used as a value, or its symbol is the name of another function.

    Examples
    --------
    >>> import tvm
    >>> from tvm_ipc.transform import (
    ...     LowerExternCalls, MarkCompilerFunctionsAsExtern, OutlineCompilerFunctions
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
    >>> "call_dps_packed" in LowerExternCalls()(mod).script()
    True
    """

    place_arguments: bool = option(arguments.flag, default=True)

    def apply(self, mod: tvm.IRModule) -> tvm.IRModule:
        """Return the lowered module."""
        return lower(mod, place_arguments=self.place_arguments)


def lower(mod: tvm.IRModule, *, place_arguments: bool = True) -> tvm.IRModule:
    """Lower all calls of extern declarations."""
    externs: Externs = {}
    for global_var, function in mod.functions_items():
        extern = read(function)
        if extern is not None:
            externs[global_var] = extern
    if not externs:
        return mod
    _check_symbols(mod, externs)
    callers = {
        global_var: function
        for global_var, function in relax_functions(mod)
        if any(used in externs for used, _ in used_global_vars(function))
    }
    for global_var, function in callers.items():
        _check(global_var.name_hint, function, externs)
    constrained = {
        global_var: _without_dataflow(global_var, function)
        for global_var, function in callers.items()
        if any(not externs[call.op].is_plain for call in _calls(function, externs))
    }
    lowering = _Lowering(mod, externs, place_arguments)
    facts = _facts(mod, constrained, externs)
    for global_var, function in callers.items():
        function = constrained.get(global_var, function)
        lowering.begin(function, facts.of(str(global_var.name_hint)) if facts else None)
        lowering.builder_.update_func(global_var, lowering.visit_expr(function))
    result = lowering.builder_.get()
    for global_var in externs:
        del result[global_var]
    _reserve_symbols(result, externs)
    return result


def _check_symbols(mod: tvm.IRModule, externs: Externs) -> None:
    names = {
        str(global_var.name_hint)
        for global_var, function in mod.functions_items()
        if not isinstance(function, relax.ExternFunc)
    }
    for extern in externs.values():
        if extern.symbol in names:
            raise TransformError(
                f"LowerExternCalls: {extern.symbol!r} is the symbol of an external function and "
                "the name of a function of the module, which would be called instead; rename one "
                "of them, or run RunModuleCodegen with lower=True, before TVM names its kernels"
            )


def _reserve_symbols(mod: tvm.IRModule, externs: Externs) -> None:
    """Keep a declaration of each symbol that TVM could give to one of its kernels."""
    taken = {str(global_var.name_hint) for global_var in mod.get_global_vars()}
    by_name = {str(global_var.name_hint): global_var for global_var in externs}
    for symbol in sorted({extern.symbol for extern in externs.values()} - taken):
        if symbol.isidentifier():
            mod[by_name.get(symbol) or tvm.ir.GlobalVar(symbol)] = relax.ExternFunc(symbol)


def _calls(function: relax.Function, externs: Externs) -> Iterator[relax.Call]:
    return (call for call in calls(function) if call.op in externs)


def _facts(
    mod: tvm.IRModule, constrained: dict[tvm.ir.GlobalVar, relax.Function], externs: Externs
) -> ModuleAliasFacts | None:
    """Return alias facts, None if no declaration has attributes that need them."""
    if not constrained:
        return None
    analyzed = mod.clone()
    for global_var, function in constrained.items():
        analyzed[global_var] = function
    return ModuleAliasFacts(analyzed, makers=[str(global_var.name_hint) for global_var in externs])


def _check(name: str, function: relax.Function, externs: Externs) -> None:
    for used, called in used_global_vars(function):
        if used in externs and not called:
            raise TransformError(
                f"LowerExternCalls: function {name!r} uses the extern {used.name_hint!r} as a "
                "value, but it can only be called; wrap it in a function of the module"
            )
    for call in _calls(function, externs):
        extern = externs[call.op]
        if len(call.args) != len(extern.params):
            raise TransformError(
                f"LowerExternCalls: function {name!r} calls the extern {extern.symbol!r} with "
                f"{arguments.counted(len(call.args), 'argument')}; expected {len(extern.params)}"
            )
        shapes = match_call(extern.params, [argument.ty for argument in call.args])
        for number, output in enumerate(extern.outputs):
            problem = _output_problem(output, shapes)
            if problem is not None:
                raise TransformError(
                    f"LowerExternCalls: function {name!r} calls the extern {extern.symbol!r}, "
                    f"whose output {number} is {output}: {problem}, so the caller cannot allocate "
                    "it; specify the largest output in terms of the parameters and slice it after "
                    "the call, or leave this function to TVM"
                )


def _output_problem(output: Any, shapes: CallShapes) -> str | None:
    if not isinstance(output, relax.TensorType):
        return "it is not a tensor"
    if not output.dtype:
        return "its element type is unknown"
    extents = extents_of(output)
    if extents is None:
        return "its shape depends on data, not on the arguments"
    for extent in extents:
        unknown = [v for v in _symbols(extent) if v not in shapes.values]
        if unknown:
            names = ", ".join(v.name for v in unknown)
            return f"its shape depends on {names}, which no parameter defines"
    return None


def _symbols(extent: Any) -> list[tvm.ir.Var]:
    """Return the symbolic variables of an expression."""
    return list(relax.analysis.tir_vars_in_type(relax.ShapeType([extent])))


def _without_dataflow(global_var: tvm.ir.GlobalVar, function: relax.Function) -> relax.Function:
    mod = tvm.IRModule({global_var: function})
    passes = [relax.transform.ToNonDataflow(), relax.transform.RemovePurityChecking()]
    return tvm.transform.Sequential(passes)(mod)[global_var]


def _tracks_purity(function: relax.Function) -> bool:
    forced = bool(function.attrs) and bool(function.attrs.get(_FORCE_PURE))
    return (bool(function.is_pure) and not forced) or has_dataflow(function.body)


@mutator
class _Lowering(PyExprMutator):  # type: ignore[misc]
    def __init__(self, mod: tvm.IRModule, externs: Externs, place_arguments: bool) -> None:
        super().__init__(mod)
        self._place_arguments = place_arguments
        self._externs = externs
        self._vdevices = list(mod.global_infos.get("vdevice") or [])
        self._tracked = False
        self._facts: AliasFacts | None = None
        self._steps: dict[relax.Var, Step] = {}
        self._current_var: relax.Var | None = None

    def begin(self, function: relax.Function, facts: AliasFacts | None) -> None:
        """Prepare for a function."""
        self._tracked = _tracks_purity(function)
        self._facts = facts
        self._steps = {step.var: step for step in facts.program.points} if facts else {}

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        self._current_var = binding.var
        super().visit_var_binding_(binding)

    def visit_match_cast_(self, binding: relax.MatchCast) -> None:
        self._current_var = binding.var
        super().visit_match_cast_(binding)

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        extern = self._externs.get(call.op) if isinstance(call.op, tvm.ir.GlobalVar) else None
        if extern is None:
            return super().visit_call_(call)
        arguments = [self.visit_expr(argument) for argument in call.args]
        shapes = match_call(extern.params, [argument.ty for argument in arguments])
        for index, ty in shapes.casts.items():
            arguments[index] = self.builder_.match_cast(arguments[index], ty)
        if self._tracked:
            callee = relax.ExternFunc(extern.symbol)
            ty = _at_call(extern.result, shapes)
            return relax.Call(_CALL_DPS_PACKED, [callee, relax.Tuple(arguments)], ty_args=[ty])
        results = self._lower_call(extern, call, arguments, shapes)
        return _unflatten(extern.result, iter(results))

    def _lower_call(
        self,
        extern: Extern,
        call: relax.Call,
        arguments: list[relax.Expr],
        shapes: CallShapes,
    ) -> list[relax.Expr]:
        """Emit the allocations, copies and the call; return the outputs."""
        # There are no facts about local functions.
        step = self._steps.get(self._current_var)
        not_copied = dict(enumerate(call.args))
        for index, scope in enumerate(extern.argument_scopes):
            may_copy = self._place_arguments and index not in extern.inplace
            if may_copy and scope and scope != self._scope(call.args[index]):
                arguments[index] = self._copy_to(
                    arguments[index], _at_call(extern.params[index], shapes), scope
                )
                del not_copied[index]
        results: list[relax.Expr] = []
        allocated: list[relax.Expr] = []
        scopes = list(extern.argument_scopes)
        outputs = [_at_call(output, shapes) for output in extern.outputs]
        for output, scope, index in zip(outputs, extern.output_scopes, extern.inplace, strict=True):
            if index == -1:
                results.append(self._allocate_tensor(output, scope))
                allocated.append(results[-1])
                scopes.append(scope)
                continue
            needed = scope or extern.argument_scopes[index]
            argument = not_copied.pop(index)
            misplaced = bool(needed) and needed != self._scope(argument)
            if misplaced or not self._may_overwrite(argument, step, not_copied.values()):
                arguments[index] = self._copy_to(arguments[index], output, needed)
            else:
                not_copied[index] = argument
            scopes[index] = needed
            results.append(arguments[index])
        written = [index for index in extern.inplace if index != -1]
        written += range(len(arguments), len(arguments) + len(allocated))
        callee = relax.ExternFunc(extern.symbol)
        if not extern.is_plain:
            callee = callee.with_attr(WRITES, written)
        if any(scopes):
            callee = callee.with_attr(SCOPES, scopes)
        self.builder_.emit(relax.Call(callee, [*arguments, *allocated]), "_")
        return results

    def _scope(self, value: relax.Expr) -> str | None:
        return self._facts.scope(value) if self._facts is not None else None

    def _may_overwrite(
        self, value: relax.Expr, step: Step | None, others: Iterable[relax.Expr]
    ) -> bool:
        """Return whether a call with other arguments may overwrite an argument."""
        facts = self._facts
        if facts is None or step is None or not facts.may_overwrite(value, step):
            return False
        return not any(facts.may_be_same(value, other) for other in others)

    def _allocate_tensor(self, ty: Any, scope: str) -> relax.Expr:
        own_scope = "global" if ty.vdevice is None else str(ty.vdevice.memory_scope)
        call = alloc(ty.shape, ty, device_of(ty, self._vdevices), scope or own_scope)
        # The form of allocations that `CallTIRRewrite` inserts.
        return self.builder_.emit(relax.Call(ALLOC, call.args, ty_args=[ty]), "alloc")

    def _copy_to(self, value: relax.Expr, ty: Any, scope: str) -> relax.Expr:
        copy = self._allocate_tensor(ty, scope)
        self.builder_.emit(relax.Call(relax.ExternFunc(COPY.name), [value, copy]), "_")
        return copy


def _at_call(ty: Any, shapes: CallShapes) -> Any:
    """Return the type of an output in the symbols of the caller."""
    if isinstance(ty, relax.TupleType):
        return relax.TupleType([_at_call(field, shapes) for field in ty.fields])
    extents = [shapes.extent(extent) for extent in extents_of(ty) or ()]
    return relax.TensorType(relax.ShapeExpr(extents), ty.dtype, ty.vdevice)


def _unflatten(ty: Any, outputs: Iterator[relax.Expr]) -> relax.Expr:
    """Return outputs in the tuples of the result type."""
    if isinstance(ty, relax.TupleType):
        return relax.Tuple([_unflatten(field, outputs) for field in ty.fields])
    return next(outputs)
