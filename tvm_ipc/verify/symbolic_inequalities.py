# SPDX-License-Identifier: Apache-2.0
"""Represent sizes and offsets in bytes, static or symbolic, and prove inequalities between them.

A symbolic number is a polynomial over non-negative shape variables and over atoms. An atom is an
expression that is not expanded further, such as a quotient. An inequality is proved for all sizes
at which certain numbers are not negative, refuted by an example, or neither. Layers of a model
repeat the same differences, so every result is cached.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import cache
from typing import Any

import tvm_ffi
from tvm import ir, tirx

from tvm_ipc.analysis.polynomials import (
    Number,
    Polynomial,
    Terms,
    is_multiple,
    pack,
    plus,
    replaced,
    times,
    unpack,
)
from tvm_ipc.tvm_moved_names import Analyzer, ConstIntBound
from tvm_ipc.verify.evaluate_at_sample_points import POINTS, coordinate, evaluate

#: Numbers that are assumed not to be negative, such as the extents of an existing tensor.
Assumptions = tuple[Polynomial, ...]
#: Sizes at which something holds, such as "n = 1"; "" where no size is symbolic.
Example = str
#: The largest value that a shape variable is assumed to have.
_LARGEST = 2**40
#: The most numbers that one proof may examine.
_MAX_PROOF_STEPS = 200


class Extents:
    """The numbers of a module: arithmetic on them, proofs of inequalities, and counterexamples."""

    def __init__(self) -> None:
        #: Shape variables and the other expressions that polynomials refer to by index.
        self._atoms: list[Any] = []
        self._variables: dict[Any, int] = {}
        #: The values of shape variables of functions that are interpreted where they are called.
        self._defined: dict[Any, Any] = {}
        #: Terms of expressions that are no variables, by structural hash.
        self._expression_terms: dict[int, list[tuple[Any, Terms]]] = {}
        self._bounds: dict[int, tuple[int, int]] = {}
        self._analyzer: Any = Analyzer()
        self._orders: dict[tuple[Number, Number, Assumptions], bool] = {}
        self._proofs: dict[tuple[Polynomial, Assumptions], bool] = {}
        #: Returns sizes at which no number is negative, None if none were found.
        self.example: Callable[..., Example | None] = cache(self._find_example)
        self._is_not_negative = cache(self._find_is_not_negative)
        self._value_at = cache(self._evaluate_at)
        self._steps_left = 0

    # ---- arithmetic -----------------------------------------------------------------------

    def bound(
        self, variables: Iterable[Any], lower: Mapping[str, int], upper: Mapping[str, int]
    ) -> None:
        """Restrict variables to the bounds that the attributes of a function specify, by name."""
        for variable in variables:
            least = max(lower.get(variable.name, 0), 0)
            most = upper.get(variable.name, _LARGEST)
            if variable not in self._variables and (least, most) != (0, _LARGEST):
                self._index_of(variable, least, most)

    def define(self, variable: Any, expr: Any) -> None:
        """Give a variable the value of an expression, until it is given another one."""
        value = self._substituted(expr)
        self._defined.pop(variable, None)
        if not any(variable.same_as(used) for used in _variables_of(value)):
            self._defined[variable] = value

    def _substituted(self, expr: Any) -> Any:
        """Return an expression with the values of defined variables."""
        if not self._defined or isinstance(expr, tirx.IntImm):
            return expr
        return tvm_ffi.structural_map(expr, (ir.Var, lambda var: self._defined.get(var, var)))

    def number(self, expr: Any) -> Number | None:
        """Return an integer expression as a number, None for any other expression."""
        if isinstance(expr, tirx.IntImm):
            return int(expr.value)
        if not ir.is_prim_expr(expr):
            return None
        return pack(self._terms(expr))

    def size(self, shape: Iterable[Any], item_bytes: float) -> Number | None:
        """Return the size of a tensor in bytes, None if an extent is no expression."""
        static: float = item_bytes
        product: Terms | None = None
        for dimension in shape:
            if isinstance(dimension, tirx.IntImm):
                static *= int(dimension.value)
            elif ir.is_prim_expr(dimension):
                factor = self._terms(dimension)
                product = factor if product is None else times(product, factor)
            else:
                return None
        bytes_ = math.ceil(static)
        return bytes_ if product is None else pack(times({(): bytes_}, product))

    def add(self, a: Number, b: Number) -> Number:
        """Return the sum."""
        if isinstance(a, int) and isinstance(b, int):
            return a + b
        return pack(plus(unpack(a), unpack(b)))

    def subtract(self, a: Number, b: Number) -> Number:
        """Return the difference."""
        return pack(plus(unpack(a), unpack(b), -1))

    def text(self, number: Number | None) -> str:
        """Return the number as an expression for messages."""
        if number is None:
            return "?"
        return str(number) if isinstance(number, int) else str(self._expression(number))

    def _index_of(self, variable: Any, least: int = 0, most: int = _LARGEST) -> int:
        index = self._variables.get(variable)
        if index is None:
            index = self._variables[variable] = len(self._atoms)
            self._atoms.append(variable)
            self._bounds[index] = (least, most)
            self._analyzer.bind(variable, ir.Range(least, most + 1))
        return index

    def _add_variable(self, variable: Any) -> None:
        self._index_of(variable)

    def _terms(self, expr: Any, simplified: bool = False) -> Terms:
        """Return the terms of an expression; if it is simplified, unknown kinds become atoms."""
        if isinstance(expr, tirx.IntImm):
            return {(): int(expr.value)}
        if isinstance(expr, tirx.Add):
            return plus(self._terms(expr.a, simplified), self._terms(expr.b, simplified))
        if isinstance(expr, tirx.Sub):
            return plus(self._terms(expr.a, simplified), self._terms(expr.b, simplified), -1)
        if isinstance(expr, tirx.Mul):
            return times(self._terms(expr.a, simplified), self._terms(expr.b, simplified))
        if isinstance(expr, tirx.Cast):
            return self._terms(expr.value, simplified)
        if isinstance(expr, ir.Var):
            value = self._defined.get(expr)
            return {(self._index_of(expr),): 1} if value is None else self._terms(value)
        if not simplified:
            expr = self._substituted(expr)
        same = self._expression_terms.setdefault(
            tvm_ffi.structural_hash(expr, map_free_vars=False), []
        )
        for known, terms in same:
            if tvm_ffi.structural_equal(known, expr):
                return terms
        if simplified:
            self._atoms.append(expr)
            terms = {(len(self._atoms) - 1,): 1}
        else:
            tvm_ffi.structural_walk(expr, [(ir.Var, self._add_variable)])
            terms = self._terms(self._analyzer.simplify(_without_casts(expr)), simplified=True)
        same.append((expr, terms))
        return terms

    def _expression(self, number: Polynomial) -> Any:
        total: Any = tirx.IntImm("int64", 0)
        for monomial, coefficient in number:
            term: Any = tirx.IntImm("int64", coefficient)
            for index in monomial:
                atom = self._atoms[index]
                term = term * (atom if str(atom.ty) == "int64" else tirx.Cast("int64", atom))
            total = total + term
        return total

    # ---- inequalities ---------------------------------------------------------------------

    def assumptions(self, numbers: list[Number | None]) -> Assumptions:
        """Return the numbers for which it is not obvious that they are not negative."""
        return tuple(
            dict.fromkeys(
                number
                for number in numbers
                if isinstance(number, tuple) and not self._is_sum(number)
            )
        )

    def at_most(self, a: Number, b: Number, assumptions: Assumptions = ()) -> bool:
        """Return whether a <= b is proved under some assumptions."""
        if isinstance(a, int) and isinstance(b, int):
            return a <= b
        is_proved = self._orders.get((a, b, assumptions))
        if is_proved is None:
            self._steps_left = _MAX_PROOF_STEPS
            is_proved = self._orders[a, b, assumptions] = self._proves(
                self.subtract(b, a), assumptions
            )
        return is_proved

    # ---- proofs ---------------------------------------------------------------------------

    def _proves(self, number: Number, assumptions: Assumptions) -> bool:
        """Return whether it is proved that a number is never negative."""
        if isinstance(number, int):
            return number >= 0
        is_proved = self._proofs.get((number, assumptions))
        if is_proved is None:
            self._steps_left -= 1
            if self._steps_left < 0:
                return False
            is_proved = self._proofs[number, assumptions] = (
                self._is_sum(number)
                or any(is_multiple(number, assumed) for assumed in assumptions)
                or (
                    self.example(*assumptions, self.subtract(-1, number)) is None
                    and (
                        self._proves_by_atoms(number, assumptions)
                        or self._ask_analyzer(number, assumptions)
                    )
                )
            )
        return is_proved

    def _is_sum(self, number: Polynomial) -> bool:
        """Return whether every term of a number is a product of non-negative factors."""
        return all(
            factor >= 0 and all(map(self._is_not_negative, monomial)) for monomial, factor in number
        )

    def _find_is_not_negative(self, index: int) -> bool:
        """Return whether the atom of an index is never negative."""
        atom = self._atoms[index]
        return isinstance(atom, ir.Var) or bool(self._analyzer.can_prove(atom >= 0))

    def _proves_by_atoms(self, number: Polynomial, assumptions: Assumptions) -> bool:
        """Try to prove that a number is not negative by substituting bounds or cases of an atom."""
        occurrences = [(monomial, index) for monomial, _ in number for index in monomial]
        for index in dict.fromkeys(index for _, index in occurrences):
            extremes = self._at_limits(number, index)
            if extremes and all(self._proves(extreme, assumptions) for extreme in extremes):
                return True
        factors = dict(number)
        for monomial, index in occurrences:
            atom = self._atoms[index]
            cases = [replaced(number, monomial, index, case, 1) for case in self._cases(atom)]
            if cases and all(self._proves(case, assumptions) for case in cases):
                return True
            rest = list(monomial)
            rest.remove(index)
            factor = factors[monomial]
            # Dividing by the factor leaves whole numbers, with which the atom is compared.
            whole = not rest and all(value % factor == 0 for value in factors.values())
            if all(map(self._is_not_negative, rest)):
                for bound in self._bounds_of(atom, factor > 0, whole):
                    if self._proves(replaced(number, monomial, index, *bound), assumptions):
                        return True
        return False

    def _at_limits(self, number: Polynomial, index: int) -> list[Number]:
        """Return a number with an atom replaced by its lower and its upper bound.

        If the number is linear in the atom, its minimum is at one of them. The list is empty if
        the atom has no bounds or the number is not linear in it.
        """
        bound = self._analyzer.const_int_bound(self._atoms[index])
        limits = [int(bound.min_value), int(bound.max_value)]
        if limits[0] == ConstIntBound.NEG_INF or limits[1] >= _LARGEST:
            return []
        if any(monomial.count(index) > 1 for monomial, _ in number):
            return []
        values: list[Number] = []
        for limit in limits:
            value: Number = number
            for monomial, _ in number:
                if index in monomial and not isinstance(value, int):
                    value = replaced(value, monomial, index, limit, 1)
            values.append(value)
        return values

    def _cases(self, atom: Any) -> list[Number]:
        """Return the alternatives of an atom that is always equal to one of them, else []."""
        if isinstance(atom, (tirx.Max, tirx.Min)):
            cases = [atom.a, atom.b]
        elif isinstance(atom, tirx.Select):
            cases = [atom.true_value, atom.false_value]
        elif isinstance(atom, ir.Call) and getattr(atom.op, "name", "") == "prim.if_then_else":
            cases = list(atom.args)[1:]
        else:
            return []
        return [pack(self._terms(case)) for case in cases]

    def _bounds_of(self, atom: Any, lower: bool, whole: bool) -> list[tuple[Number, int]]:
        """Return lower or upper bounds of an atom, each as a numerator and a denominator.

        If `whole`, the atom is only compared with whole numbers, which allows tighter bounds.
        """
        if isinstance(atom, tirx.Max if lower else tirx.Min):
            return [(case, 1) for case in self._cases(atom)]
        if isinstance(atom, tirx.FloorDiv) and isinstance(atom.b, tirx.IntImm):
            by = int(atom.b.value)
            if by > 0:  # a - by + 1 <= by * (a // by) <= a
                dividend = pack(self._terms(atom.a))
                # a // by >= m is a >= by * m, and a // by <= m is a - by + 1 <= by * m.
                less = by - 1 if lower is not whole else 0
                return [(self.subtract(dividend, less), by)]
        return []

    def _ask_analyzer(self, number: Polynomial, assumptions: Assumptions) -> bool:
        """Return whether TVM's analyzer proves that a number is not negative."""
        analyzer = self._analyzer
        with ExitStack() as stack:
            for assumed in assumptions:
                constraint = analyzer.simplify(self._expression(assumed) >= 0)
                stack.enter_context(analyzer.constraint_scope(constraint))
            return bool(analyzer.can_prove(self._expression(number) >= 0))

    # ---- examples -------------------------------------------------------------------------

    def _find_example(self, *numbers: Number) -> Example | None:
        variables = self.variables(*numbers)
        for point in range(POINTS if variables else 1):
            if all(self._is_not_negative_at(number, point) for number in numbers):
                return ", ".join(
                    f"{variable.name} = {self._coordinate(variable, point)}"
                    for variable in variables
                )
        return None

    def variables(self, *numbers: Number) -> list[Any]:
        """Return the variables of some numbers, in the order in which they first occurred."""
        indices: set[int] = set()
        atoms = {
            index for number in numbers for monomial, _ in _terms_of(number) for index in monomial
        }
        for index in atoms:
            tvm_ffi.structural_walk(
                self._atoms[index],
                [(ir.Var, lambda variable: indices.add(self._variables[variable]))],
            )
        return [self._atoms[index] for index in sorted(indices)]

    def _coordinate(self, variable: Any, point: int) -> int:
        """Return the value of a variable at a sample point."""
        index = self._variables[variable]
        least, most = self._bounds[index]
        return least + coordinate(point, index) % (most - least + 1)

    def _evaluate_at(self, index: int, point: int) -> int | None:
        """Return the value of an atom at a sample point, None if it has none there."""
        return evaluate(self._atoms[index], lambda variable: self._coordinate(variable, point))

    def _is_not_negative_at(self, number: Number, point: int) -> bool:
        """Return whether a number is defined at a sample point and not negative there."""
        total = 0
        for monomial, factor in _terms_of(number):
            for index in monomial:
                value = self._value_at(index, point)
                if value is None:
                    return False
                factor *= value
            total += factor
        return total >= 0


def _variables_of(expr: Any) -> list[Any]:
    """Return the variables of an expression."""
    variables: list[Any] = []
    tvm_ffi.structural_walk(expr, [(ir.Var, variables.append)])
    return variables


def _terms_of(number: Number) -> Polynomial:
    return (((), number),) if isinstance(number, int) else number


def _without_casts(expr: Any) -> Any:
    """Return the expression without casts: sizes are too small for them to change a value."""
    if isinstance(expr, tirx.Cast):
        return _without_casts(expr.value)
    if isinstance(expr, tirx.IntImm):
        return tirx.IntImm("int64", int(expr.value))
    if isinstance(expr, _ARITHMETIC):
        return type(expr)(_without_casts(expr.a), _without_casts(expr.b))
    return expr if str(expr.ty) == "int64" else tirx.Cast("int64", expr)


_ARITHMETIC = (
    *(tirx.Add, tirx.Sub, tirx.Mul, tirx.Min, tirx.Max),
    *(tirx.FloorDiv, tirx.FloorMod, tirx.Div, tirx.Mod),
)
