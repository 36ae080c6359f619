# SPDX-License-Identifier: Apache-2.0
"""Express the sizes and numbers that calls pass in the shape variables of the traced function.

A function that is called twice binds the same variables to different values, so its variables are
replaced by the expressions that its caller passes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, tirx

from tvm_ipc.analysis.ffi_arrays import as_list
from tvm_ipc.analysis.polynomials import Number, Terms, pack, times, unpack
from tvm_ipc.verify.compare_collective_arguments import (
    DetailPerRank,
    ShapeNumbers,
    SymbolicNumber,
    TensorSize,
)
from tvm_ipc.verify.per_rank_and_uniform_values import KnownValue, PerRank, RankModel
from tvm_ipc.verify.relax_as_plain_statements import Argument, Statement
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
        own: set[Any] = set()
        for parameter in parameters:
            _collect_variables(parameter.ty, own)
            if isinstance(parameter.ty, tvm.ir.PrimType):
                own.add(parameter)
        for parameter in parameters:
            self._cast.pop(hash(parameter), None)
        for variable in own:
            self._defined.discard(hash(variable))
            self._meanings.pop(hash(variable), None)
        if arguments is not None:
            # The arguments use the caller's variables: read all of them before any is redefined.
            types = [self._type(argument) for argument in arguments]
            for parameter, argument, ty in zip(parameters, arguments, types, strict=True):
                if isinstance(parameter.ty, tvm.ir.PrimType):
                    self._unify(parameter, self._expression(argument))
                else:
                    self._match(parameter.ty, ty)
        for variable in own:
            if hash(variable) not in self._defined:
                self._define(variable, variable if arguments is None else None)

    def bind(self, step: Statement) -> None:
        """Bind a variable to a value; its type may define new variables for the extents."""
        bound, value = step.bound, step.value
        if isinstance(bound.ty, tvm.ir.PrimType):
            self._define(bound, value if tvm.ir.is_prim_expr(value) else None)
            return
        argument = step.args[0]
        ty = self._type(argument)
        if ty is not None or type(argument) is not int:
            self._match(bound.ty, ty)
            return
        self._match(bound.ty, self._cast.get(argument))
        extents = _extents_of(bound.ty)
        if extents is not None:
            self._cast.setdefault(argument, [self._meaning(extent) for extent in extents])

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
        """Define the variables of a declared type from the type of the value."""
        if isinstance(declared, relax.TupleType):
            fields = actual.fields if isinstance(actual, relax.TupleType) else actual
            types = list(fields) if isinstance(fields, (list, tuple, tvm.ir.Array)) else []
            for k, field in enumerate(declared.fields):
                self._match(field, types[k] if k < len(types) else None)
            return
        values = _extents_of(actual)
        for k, extent in enumerate(_extents_of(declared) or ()):
            value = None
            if values is not None and k < len(values):
                value = values[k]
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

    def _type(self, argument: Argument) -> Any:
        """Return the extents of an argument, with their variables replaced; lists for tuples."""
        if type(argument) is tuple:
            return [self._type(field) for field in argument]
        if type(argument) is int:
            variable = self._variables.get(argument)
            ty = None if variable is None else variable.ty
        elif type(argument) is Statement:
            ty = argument.value.ty
        else:
            is_shape = isinstance(argument, relax.ShapeExpr)
            ty = argument if is_shape else getattr(argument, "ty", None)
        return self._resolved(ty)

    def _resolved(self, ty: Any) -> Any:
        if isinstance(ty, relax.TupleType):
            return [self._resolved(field) for field in ty.fields]
        extents = _extents_of(ty)
        return None if extents is None else [self._meaning(extent) for extent in extents]

    def _expression(self, argument: Argument) -> Any:
        expr = self._variables.get(argument) if type(argument) is int else argument
        return self._meaning(expr) if expr is not None and tvm.ir.is_prim_expr(expr) else None

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
        """Return the `TensorSize` of a tensor, per rank where ranks pass different ones."""
        variable = self._variables.get(argument) if type(argument) is int else None
        ty = None if variable is None else variable.ty
        if not isinstance(ty, relax.TensorType):
            return TensorSize(None, None)
        dtype = None if ty.dtype is None else str(ty.dtype.dtype)
        count = self._product(_extents_of(ty))
        if isinstance(count, DetailPerRank):
            return DetailPerRank(tuple(TensorSize(dtype, value) for value in count.values))
        return TensorSize(dtype, count)

    def element_count(self, argument: Argument) -> Any:
        """Return the number of elements of a tensor."""
        size = self.tensor_size(argument)
        if isinstance(size, DetailPerRank):
            return DetailPerRank(tuple(_as_detail(value.count) for value in size.values))
        return _as_detail(size.count)

    def shape_numbers(self, argument: Argument) -> Any:
        """Return the `ShapeNumbers` of a shape, None where it is unknown."""
        if not isinstance(argument, relax.ShapeExpr):
            return None
        numbers = [self._number(extent) for extent in as_list(argument.values)]
        if not any(isinstance(number, DetailPerRank) for number in numbers):
            return ShapeNumbers(tuple(numbers))
        shapes = [[_at(number, rank) for number in numbers] for rank in range(self._ranks.size)]
        return DetailPerRank(tuple(ShapeNumbers(tuple(shape)) for shape in shapes))

    def detail(self, argument: Argument) -> Any:
        """Return the number that is an argument, None where it is unknown."""
        if isinstance(argument, tvm.ir.GenericConst):
            value = argument.value
            return value if isinstance(value, (bool, int, float)) else None
        if isinstance(argument, tirx.FloatImm):
            return float(argument.value)
        if type(argument) is int or not tvm.ir.is_prim_expr(argument):
            return None
        number = self._number(argument)
        if isinstance(number, DetailPerRank):
            return DetailPerRank(tuple(map(_as_detail, number.values)))
        return _as_detail(number)

    def _product(self, extents: Any) -> Any:
        if extents is None:
            return None
        static, symbolic = 1, []
        for extent in extents:
            if isinstance(extent, tirx.IntImm):
                static *= int(extent)
            else:
                symbolic.append(self._number(extent))
        if not symbolic:
            return static
        if any(isinstance(number, DetailPerRank) for number in symbolic):
            ranks = range(self._ranks.size)
            factors = [[_at(number, rank) for number in symbolic] for rank in ranks]
            return DetailPerRank(tuple(_times(static, of_rank) for of_rank in factors))
        return _times(static, symbolic)

    def _number(self, expr: Any) -> Any:
        """Return an integer expression as a number, per rank where it depends on the rank."""
        if isinstance(expr, tirx.IntImm):
            return int(expr)
        expr = self._meaning(expr)
        variables: set[Any] = set()
        _collect_variables(expr, variables)
        per_rank: dict[int, PerRank] = {}
        for variable in variables:
            known = self._known_number(variable)
            if isinstance(known, PerRank):
                per_rank[hash(variable)] = known
            elif known is None and hash(variable) in self._computed:
                return None  # ranks may have computed different numbers
        if not per_rank:
            return self._extents.number(expr)
        numbers = []
        for rank in range(self._ranks.size):

            def value(variable: Any, rank: int = rank) -> Any:
                known = per_rank.get(hash(variable))
                return variable if known is None else tirx.IntImm("int64", known.values[rank])

            numbers.append(self._extents.number(tvm_ffi.structural_map(expr, (tvm.ir.Var, value))))
        return numbers[0] if len(set(numbers)) == 1 else DetailPerRank(tuple(numbers))


def _times(static: int, numbers: list[Number | None]) -> Number | None:
    product: Terms = {(): static}
    for number in numbers:
        if number is None:
            return None
        product = times(product, unpack(number))
    return pack(product)


def _as_detail(number: Number | None) -> Any:
    return SymbolicNumber(number) if isinstance(number, tuple) else number


def _at(value: Any, rank: int) -> Any:
    return value.values[rank] if isinstance(value, DetailPerRank) else value


def _extents_of(ty: Any) -> Any:
    """Return the extents of a tensor or shape type, None where they are unknown."""
    if isinstance(ty, list):
        return ty
    if isinstance(ty, relax.TensorType):
        ty = ty.shape
    if isinstance(ty, (relax.ShapeExpr, relax.ShapeType)):
        return None if ty.values is None else as_list(ty.values)
    return None


def _collect_variables(node: Any, variables: set[Any]) -> None:
    """Add the variables of an expression or a type to a set."""
    if isinstance(node, relax.TupleType):
        for field in node.fields:
            _collect_variables(field, variables)
    elif isinstance(node, (relax.TensorType, relax.ShapeType)):
        for extent in _extents_of(node) or ():
            _collect_variables(extent, variables)
    elif isinstance(node, tvm.ir.Var):
        variables.add(node)
    elif not isinstance(node, tirx.IntImm) and tvm.ir.is_prim_expr(node):
        tvm_ffi.structural_walk(node, [(tvm.ir.Var, variables.add)])
