# SPDX-License-Identifier: Apache-2.0
"""Express the sizes and numbers that calls pass in the shape variables of the traced function.

A function that is called twice binds the same variables to different values, so its variables are
replaced by the expressions that its caller passes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, tirx

from tvm_ipc.analysis.ffi_arrays import as_list
from tvm_ipc.analysis.polynomials import Number, Terms, pack, times, unpack
from tvm_ipc.tvm_moved_names import GenericConst
from tvm_ipc.verify.per_rank_and_uniform_values import KnownValue, PerRank, RankModel, per_rank
from tvm_ipc.verify.relax_as_plain_statements import Argument, Statement, extents_of
from tvm_ipc.verify.symbolic_inequalities import Extents


class CallSizes:
    """Computes the sizes and numbers that the calls of one trace pass.

    `related` collects variables between which the program checks a relation at run time.
    `known_number` returns what is known of a number that the program computed. `variables` maps
    the hashes of the variables of all traced functions to the variables.
    """

    def __init__(
        self,
        ranks: RankModel,
        extents: Extents,
        related: set[Any],
        known_number: Callable[[Any], KnownValue],
        variables: Mapping[int, Any],
    ) -> None:
        self._ranks, self._extents = ranks, extents
        self._related, self._known_number = related, known_number
        self._variables = variables
        #: The expressions that variables stand for, by hash; other variables stand for themselves.
        self._meanings: dict[int, Any] = {}
        self._defined: set[int] = set()
        self._computed: set[int] = set()  #: hashes of numbers that calls return
        #: The extents that the first cast of a value gave it, by the hash of its variable, where
        #: the type of the value has none. Further casts of the value mean the same extents.
        self._cast: dict[int, list[Any]] = {}
        self._kept: list[Any] = []  #: variables whose hash is in use: it must not be reused

    # ---- variables ----------------------------------------------------------------------------

    def enter(self, parameters: list[Any], arguments: list[Argument] | None) -> None:
        """Bind the parameters of a function; without arguments, it is called from outside."""
        declared = [_extents(parameter.ty, parameter) for parameter in parameters]
        own: set[Any] = set()
        for parameter in parameters:
            _collect_variables(parameter.ty, own)
            if isinstance(parameter.ty, tvm.ir.PrimType):
                own.add(parameter)
            self._cast.pop(hash(parameter), None)
        for variable in own:
            self._defined.discard(hash(variable))
            self._meanings.pop(hash(variable), None)
        if arguments is not None:
            # The arguments use the caller's variables: read all of them before any is redefined.
            self._match(declared, [self._actual(argument) for argument in arguments])
        for variable in own:
            if hash(variable) not in self._defined:
                self._define(variable, variable if arguments is None else None)

    def bind(self, step: Statement) -> None:
        """Bind a variable to a value; its type may define new variables for the extents."""
        bound, argument = step.bound, step.args[0]
        actual = self._actual(argument)
        if isinstance(bound.ty, tvm.ir.PrimType):
            self._define(bound, None if actual is None else actual[0])
            return
        declared = _extents(bound.ty)
        if actual is not None or type(argument) is not int:
            self._match(declared, actual)
            return
        self._match(declared, self._cast.get(argument))
        if declared is not None:
            self._cast.setdefault(argument, self._resolved(declared))

    def rebind(self, variable: int) -> None:
        """Forget the casts of the value that a variable was bound to before."""
        self._cast.pop(variable, None)

    def compute(self, variable: Any) -> None:
        """Note that a call returned a number."""
        self._computed.add(hash(variable))

    def _define(self, variable: Any, value: Any) -> None:
        """Let a variable stand for an expression, or with None for an unknown number."""
        self._defined.add(hash(variable))
        if value is None:
            value = tirx.Var(variable.name, variable.ty)
        self._meanings[hash(variable)] = value
        self._kept += [variable, value]

    def _match(self, declared: Any, actual: Any) -> None:
        """Define the variables of declared extents from those of a value."""
        for k, extent in enumerate(declared or ()):
            value = actual[k] if actual is not None and k < len(actual) else None
            if isinstance(extent, list):
                self._match(extent, value)
            elif extent is not None:
                self._unify(extent, value)

    def _unify(self, declared: Any, value: Any) -> None:
        """Record that an extent of a declared type equals a value of the caller (None: unknown)."""
        if type(declared) is tirx.IntImm and type(value) is tirx.IntImm:
            return  # neither contains a variable
        if isinstance(declared, tvm.ir.Var) and hash(declared) not in self._defined:
            self._define(declared, value)
            return
        if value is None:
            _collect_variables(self._meaning(declared), self._related)
            return
        expected = self._meaning(declared)
        if not tvm_ffi.structural_equal(expected, value):
            _collect_variables(expected, self._related)
            _collect_variables(value, self._related)

    def _actual(self, argument: Argument) -> Any:
        """Return the extents of an argument, with their variables replaced."""
        if type(argument) is tuple:
            return [self._actual(field) for field in argument]
        expr = self._variables.get(argument) if type(argument) is int else argument
        expr = expr.value if type(expr) is Statement else expr
        extents = extents_of(expr)
        if extents is None:
            number = expr if expr is not None and tvm.ir.is_prim_expr(expr) else None
            extents = _extents(getattr(expr, "ty", None), number)
        return self._resolved(extents)

    def _resolved(self, extents: Any) -> Any:
        """Return extents with their variables replaced."""
        if isinstance(extents, list):
            return [self._resolved(extent) for extent in extents]
        return None if extents is None else self._meaning(extents)

    def _meaning(self, expr: Any) -> Any:
        """Return an expression with its variables replaced by what they stand for."""
        if isinstance(expr, tirx.IntImm):
            return expr
        if isinstance(expr, tvm.ir.Var):
            return self._meanings.get(hash(expr), expr)
        return tvm_ffi.structural_map(
            expr, (tvm.ir.Var, lambda variable: self._meanings.get(hash(variable), variable))
        )

    # ---- sizes and numbers --------------------------------------------------------------------

    def tensor_size(self, argument: Argument) -> Any:
        """Return the data type of a tensor and its number of elements."""
        variable = self._variables.get(argument) if type(argument) is int else None
        ty = None if variable is None else variable.ty
        if not isinstance(ty, relax.TensorType):
            return None, None
        dtype = None if ty.dtype is None else str(ty.dtype.dtype)
        extents = extents_of(ty)
        if extents is None:
            return dtype, None
        numbers = map(self._number, extents)
        return per_rank(lambda *numbers: (dtype, _product(numbers)), self._ranks, *numbers)

    def element_count(self, argument: Argument) -> Any:
        """Return the number of elements of a tensor."""
        return per_rank(lambda size: size[1:], self._ranks, self.tensor_size(argument))

    def shape_numbers(self, argument: Argument) -> Any:
        """Return the numbers of a shape, None where it is unknown."""
        if not isinstance(argument, relax.ShapeExpr):
            return None
        numbers = map(self._number, as_list(argument.values))
        return per_rank(lambda *numbers: numbers, self._ranks, *numbers)

    def number(self, argument: Argument) -> Any:
        """Return the number that is an argument, None where it is unknown."""
        if isinstance(argument, GenericConst):
            value = argument.value
            return value if isinstance(value, (bool, int, float)) else None
        if isinstance(argument, tirx.FloatImm):
            return float(argument.value)
        if type(argument) is int or not tvm.ir.is_prim_expr(argument):
            return None
        return self._number(argument)

    def _number(self, expr: Any) -> Any:
        """Return an integer expression as a number, per rank where it depends on the rank."""
        if isinstance(expr, tirx.IntImm):
            return int(expr)
        expr = self._meaning(expr)
        variables: set[Any] = set()
        _collect_variables(expr, variables)
        known = {variable: self._known_number(variable) for variable in variables}
        if any(
            value is None and hash(variable) in self._computed for variable, value in known.items()
        ):
            return None  # ranks may have computed different numbers
        varying = {
            variable: value for variable, value in known.items() if isinstance(value, PerRank)
        }

        def number(*values: int) -> Number | None:
            replaced = dict(zip(varying, map(partial(tirx.IntImm, "int64"), values), strict=True))
            new = tvm_ffi.structural_map(expr, (tvm.ir.Var, lambda var: replaced.get(var, var)))
            return self._extents.number(new)

        return (
            per_rank(number, self._ranks, *varying.values())
            if varying
            else self._extents.number(expr)
        )


def _product(numbers: Sequence[Number | None]) -> Number | None:
    """Return a product, None if a factor is unknown."""
    product: Terms = {(): 1}
    for number in numbers:
        if number is None:
            return None
        product = times(product, unpack(number))
    return pack(product)


def _extents(ty: Any, number: Any = None) -> Any:
    """Return the extents that a type specifies, None if there are none.

    A tuple has those of each field in a list of their own; a number is its only extent.
    """
    if isinstance(ty, relax.TupleType):
        return [_extents(field) for field in ty.fields]
    return [number] if isinstance(ty, tvm.ir.PrimType) else extents_of(ty)


def _collect_variables(node: Any, variables: set[Any]) -> None:
    """Add the variables of an expression or a type to a set."""
    tvm_ffi.structural_walk(node, [(tvm.ir.Var, variables.add)])
