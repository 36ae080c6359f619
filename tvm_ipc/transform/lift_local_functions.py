# SPDX-License-Identifier: Apache-2.0
"""Turns the local functions of a module into private functions, before the passes of a pipeline."""

from __future__ import annotations

from collections.abc import Collection

import tvm
from tvm import relax

from tvm_ipc.analysis.ffi_arrays import as_list
from tvm_ipc.analysis.uses import variables_in
from tvm_ipc.analysis.views_and_writes_of_calls import operator_of
from tvm_ipc.analysis.walk_and_rewrite_bindings import (
    Edits,
    belongs_to_others,
    change_functions,
    relax_functions,
    walk,
    with_value,
)
from tvm_ipc.errors import TransformError
from tvm_ipc.transform.byoc.nested_relax_functions import compiler_of
from tvm_ipc.transform.report import Decision, note

_MAKE = "relax.make_closure"
_INVOKE = frozenset(("relax.invoke_pure_closure", "relax.invoke_closure"))


def lift_local_functions(
    where: str, mod: tvm.IRModule, compilers: Collection[str] = ()
) -> tvm.IRModule:
    """Return a module whose functions contain no other functions; itself if none does.

    TVM's `LambdaLift` makes a closure of a function that uses variables around it, and calls it as
    if it had no effects, so that a call whose result is unused would be removed. Here a closure
    that is only called is replaced by its function, which gets these variables as arguments.

    Parameters
    ----------
    where : the beginning of messages.
    mod : the module.
    compilers : the compilers whose functions a later pass compiles; they are not lifted.

    Raises
    ------
    TransformError
        A local function is for another compiler, or it has effects and is not only called. Or
        functions for compilers contain functions, which `LambdaLift` would lift too.
    """
    nested = []
    for global_var, function in relax_functions(mod):
        name = str(global_var.name_hint)
        literals = [] if belongs_to_others(function) else _literals(function)
        _refuse_uncompiled(where, name, literals, compilers)
        if not all(map(belongs_to_others, literals)):
            nested.append(name)
    if not nested:
        return mod
    names = ", ".join(map(repr, nested))
    for global_var, function in relax_functions(mod):
        literals = _literals(function)
        if literals and (belongs_to_others(function) or any(map(belongs_to_others, literals))):
            raise TransformError(
                f"{where}: function {global_var.name_hint!r} has functions for a compiler, and "
                f"there are local functions in {names}; run relax.transform.LambdaLift before you "
                "partition the module"
            )
    try:
        lifted = relax.transform.LambdaLift()(mod)
    except RuntimeError as error:
        raise TransformError(
            f"{where}: TVM's LambdaLift cannot lift the local functions of {names}; call a local "
            f"function by the name that it is defined with, and let it return no function: {error}"
        ) from None
    for name in nested:
        note(Decision("LambdaLift", name, "local functions", "lifted", "passes see their callers"))
    return change_functions(lifted, lambda name, function: _call(where, lifted, name, function))


def _literals(function: relax.Function) -> list[relax.Function]:
    """Return the functions that are defined in a function, also those in them."""
    return [value for _, value in walk(function) if type(value) is relax.Function]


def _refuse_uncompiled(
    where: str, name: str, literals: list[relax.Function], compilers: Collection[str]
) -> None:
    for literal in literals:
        compiler = compiler_of(literal)
        if compiler is not None and compiler not in compilers:
            raise TransformError(
                f"{where}: function {name!r} contains a function for the compiler {compiler!r}, "
                "which has not compiled it; run RunModuleCodegen before"
            )


def _call(where: str, mod: tvm.IRModule, name: str, function: relax.Function) -> relax.Function:
    """Return a function that calls the functions of its closures directly."""
    closures = {
        binding.var: value
        for binding, value in walk(function)
        if binding is not None and operator_of(value) == _MAKE
    }
    edits = Edits()
    used: set[relax.Var] = set()
    for binding, value in walk(function):
        closure = closures.get(value.args[0]) if operator_of(value) in _INVOKE else None
        if binding is None or closure is None:
            used.update(variables_in(value))
            continue
        callee, captured = closure.args
        arguments = [*as_list(value.args[1].fields), *as_list(captured.fields)]
        call = relax.Call(callee, arguments, ret_ty=value.ty)
        edits.replace(binding.var, [with_value(binding, call)])
    for var, closure in closures.items():
        if var not in used:
            edits.replace(var, [])
        elif not mod[closure.args[0]].is_pure:
            raise TransformError(
                f"{where}: function {name!r} uses its local function {var.name!r}, which has "
                "effects, as a value; only call it, or pass what it captures as arguments"
            )
    return edits.apply(function)
