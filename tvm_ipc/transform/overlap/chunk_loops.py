# SPDX-License-Identifier: Apache-2.0
"""Loops over chunks: private functions that a program calls for each chunk.

Relax has no statement for loops. A loop is a private function that runs its body for the first
index of a range, and calls itself for both halves of the rest. Its depth is the logarithm of the
number of indices, so 2 ** 20 chunks need 20 frames of the virtual machine:

    @R.function(private=True, pure=False)
    def loop(bounds: R.Shape(["begin", "end"]), x, out):
        if begin < end:
            body(R.shape([begin]), x, out)
            if begin + 1 < end:
                loop(R.shape([begin + 1, (begin + 2 + end) // 2]), x, out)
                if begin + 2 < end:
                    loop(R.shape([(begin + 2 + end) // 2, end]), x, out)

`tvm_ipc.verify` recognizes functions of this form, and checks them as loops. Functions return an
empty shape: TVM's virtual machine cannot discard the result of a call without a result.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.relax.utils import copy_with_new_vars

from tvm_ipc.analysis.walk_and_rewrite_bindings import bindings_of, typed
from tvm_ipc.comm.extent_arithmetic import constant, simplified
from tvm_ipc.packed_functions.program_function_declarations import INTERNAL, NO_ALIAS
from tvm_ipc.transform.byoc.nested_relax_functions import close

#: The most chunks that are unrolled; more, or a symbolic number, become a loop.
MOST_UNROLLED: Final = 8

#: The value that functions of a loop return.
_RESULT: Final = relax.ShapeExpr([])


@dataclass(frozen=True, eq=False)
class Callee:
    """A private function whose own parameters come first, and then variables of its caller."""

    global_var: tvm.ir.GlobalVar
    variables: tuple[relax.Var, ...]  #: of the caller
    params: tuple[relax.Var, ...]  #: stand for `variables` in functions that pass them on
    symbols: tuple[Any, ...]  #: of the caller

    def call(self, *arguments: relax.Expr) -> relax.Call:
        """Return a call with arguments for the function's own parameters."""
        return self.call_with(arguments, self.variables)

    def call_with(
        self, arguments: Sequence[relax.Expr], variables: Sequence[relax.Var]
    ) -> relax.Call:
        """Return a call with arguments for all parameters except symbolic extents."""
        symbols = [relax.ShapeExpr([*self.symbols])] if self.symbols else []
        return _call(self.global_var, [*arguments, *variables, *symbols])


@dataclass(eq=False)
class PrivateFunctions:
    """The private functions that a pass adds to a module."""

    taken: set[str]  #: names of the module's functions
    added: dict[tvm.ir.GlobalVar, relax.Function] = field(default_factory=dict)

    @staticmethod
    def of(mod: tvm.IRModule) -> PrivateFunctions:
        """Return an empty collection of functions to add to a module."""
        return PrivateFunctions({str(variable.name_hint) for variable in mod.get_global_vars()})

    def add_to(self, mod: tvm.IRModule) -> tvm.IRModule:
        """Return a module with the functions; the same module if there are none."""
        if not self.added:
            return mod
        result = mod.clone()
        for global_var, function in self.added.items():
            result.update_func(global_var, function)
        return result

    def extend(self, other: PrivateFunctions) -> None:
        """Add the functions of another collection, whose names differ from those here."""
        self.taken |= other.taken
        self.added |= other.added

    def outline(
        self,
        name: str,
        params: Sequence[relax.Var],
        bindings: Sequence[relax.Binding],
        no_alias: Sequence[relax.Var] = (),
        shapeless: Sequence[relax.Var] = (),
    ) -> Callee:
        """Add a function that runs some bindings; their free variables become parameters.

        Parameters
        ----------
        name : a name, which is made unique.
        params : the function's own parameters.
        bindings : the bindings, outside of dataflow blocks.
        no_alias : own parameters and free variables whose tensors alias no other argument in any
            call. They are passed only to packed functions.
        shapeless : other free variables that are passed only to packed functions.
        """
        literal = relax.Function([*params], sequence(bindings), _RESULT.ty, False)
        free = [*relax.analysis.free_vars(literal), *relax.analysis.free_symbolic_vars(literal)]
        variables = [var for var in dict.fromkeys(free) if not isinstance(var.ty, tvm.ir.PrimType)]
        stand_ins = {var: relax.Var(var.name, _with_plain_extents(var.ty)) for var in variables}
        anonymous = [*no_alias, *shapeless]
        casts = [
            relax.MatchCast(var, stand_in, var.ty)
            for var, stand_in in stand_ins.items()
            if not stand_in.ty.same_as(var.ty) and not any(map(var.same_as, anonymous))
        ]
        cast = [binding.var for binding in casts]
        new = {
            var: stand_in for var, stand_in in stand_ins.items() if not any(map(var.same_as, cast))
        }
        literal = tvm_ffi.structural_map(
            literal, ((tvm.ir.Var, relax.DataflowVar), lambda var: new.get(var, var))
        )
        body = sequence([*casts, *bindings_of(literal.body)])
        closed = close(relax.Function([*literal.params], body, _RESULT.ty, False))
        originals = {stand_in: var for var, stand_in in stand_ins.items()}
        captured = tuple(originals[var] for var in closed.variables)
        names = [
            str(param.name)
            for param, var in zip(closed.function.params, (*params, *captured), strict=False)
            if any(map(var.same_as, no_alias))
        ]
        function = closed.function.with_attr(INTERNAL, True)
        function = function.with_attr(NO_ALIAS, names) if names else function
        global_var = self._global_var(name)
        self.added[global_var] = function = _with_dataflow(function)
        typed(global_var, function.ty)
        return Callee(global_var, captured, closed.variables, closed.symbols)

    def add_loop(self, name: str, body: Callee, more: Sequence[relax.Var] = ()) -> Callee:
        """Add a function that calls another one for each index from a begin to before an end.

        The body's first own parameter is a shape, the index; that of the loop is a shape, the begin
        and the end. `more` are the other own parameters of the body, which the loop has too.
        """
        begin, end = tirx.Var("begin", "int64"), tirx.Var("end", "int64")
        middle = tirx.floordiv(begin + 2 + end, 2)
        global_var = self._global_var(name)
        loop = Callee(global_var, body.variables, body.params, body.symbols)

        def again(first: Any, last: Any) -> relax.Binding:
            bounds = relax.ShapeExpr([first, last])
            return bind(loop.call_with([bounds, *more], body.params))

        params = [relax.Var("bounds", relax.ShapeType([begin, end])), *more, *body.params]
        if body.symbols:
            params.append(relax.Var("symbols", relax.ShapeType([*body.symbols])))
        types = [param.ty for param in params]
        typed(global_var, relax.FuncType(types, _RESULT.ty, False))
        once = bind(body.call_with([relax.ShapeExpr([begin]), *more], body.params))
        second = branch(begin + 2 < end, [again(middle, end)], [])
        rest = branch(begin + 1 < end, [again(begin + 1, middle), second], [])
        branches = sequence([branch(begin < end, [once, rest], [])])
        function = relax.Function(params, branches, _RESULT.ty, False)
        self.added[global_var] = copy_with_new_vars(function).with_attr(INTERNAL, True)
        return loop

    def _global_var(self, name: str) -> tvm.ir.GlobalVar:
        unique, number = name, 0
        while unique in self.taken:
            number += 1
            unique = f"{name}_{number}"
        self.taken.add(unique)
        return tvm.ir.GlobalVar(unique)


def run_loop(loop: Callee, count: Any, *more: relax.Expr) -> relax.Binding:
    """Return a binding that runs a loop for the indices below a count, which may be 0."""
    return bind(loop.call(relax.ShapeExpr([tirx.IntImm("int64", 0), _extent(count)]), *more))


def run_if(
    condition: Any, then: Sequence[relax.Binding], otherwise: Sequence[relax.Binding] = ()
) -> list[relax.Binding]:
    """Return bindings that run others under a condition; only those that can run."""
    decided = constant_truth(condition)
    if decided is None:
        return [branch(condition, then, otherwise)]
    return [*(then if decided else otherwise)]


def constant_truth(condition: Any) -> bool | None:
    """Return whether a condition holds, None if it depends on sizes."""
    if isinstance(condition, bool):
        return condition
    value = simplified(condition)
    return bool(value.value) if isinstance(value, tirx.IntImm) else None


def branch(
    condition: Any, then: Sequence[relax.Binding], otherwise: Sequence[relax.Binding]
) -> relax.Binding:
    """Return a binding that runs one of two lists of bindings."""
    chosen = relax.If(relax.prim_value(condition), sequence(then), sequence(otherwise))
    return bind(typed(chosen, _RESULT.ty))


def sequence(bindings: Iterable[relax.Binding]) -> relax.SeqExpr:
    """Return bindings as a sequence whose result is an empty shape."""
    return typed(relax.SeqExpr([relax.BindingBlock([*bindings])], _RESULT), _RESULT.ty)


def is_looped(count: Any) -> bool:
    """Return whether a number of chunks becomes a loop."""
    number = constant(count)
    return number is None or number > MOST_UNROLLED


def _call(callee: tvm.ir.GlobalVar, arguments: list[relax.Expr]) -> relax.Call:
    return relax.Call(callee, arguments, ret_ty=_RESULT.ty)


def bind(value: relax.Expr) -> relax.Binding:
    """Return a binding of a call whose result is not used."""
    return relax.VarBinding(relax.Var("_", _RESULT.ty), value)


def _extent(number: Any) -> Any:
    return tirx.IntImm("int64", number) if isinstance(number, int) else number


def _with_plain_extents(ty: Any) -> Any:
    """Return a type whose symbolic extents are variables: only those define a function's sizes."""
    if not isinstance(ty, relax.TensorType) or not isinstance(ty.shape, relax.ShapeExpr):
        return ty
    extents = [
        extent if isinstance(extent, (tirx.IntImm, tvm.ir.Var)) else tirx.Var("extent", "int64")
        for extent in ty.shape.values
    ]
    if all(new.same_as(old) for new, old in zip(extents, ty.shape.values, strict=True)):
        return ty
    return relax.TensorType(extents, ty.dtype, ty.vdevice)


def _with_dataflow(function: relax.Function) -> relax.Function:
    """Return a function with its pure bindings in dataflow blocks, where they are fused."""
    mod = relax.transform.ConvertToDataflow(1)(tvm.IRModule({"main": function}))
    (result,) = mod.functions.values()
    return result
