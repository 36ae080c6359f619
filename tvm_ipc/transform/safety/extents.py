# SPDX-License-Identifier: Apache-2.0
"""Byte offsets, static or symbolic, and what can be proved of them.

A symbolic number is a polynomial over shape variables, which are not negative, and over atoms:
expressions that are kept whole, such as quotients. Layers of a model repeat the same differences,
so TVM's analyzer is asked only once about each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

#: Monomials, as sorted indices of atoms, with their coefficients; () is the constant.
Polynomial = tuple[tuple[tuple[int, ...], int], ...]
Number = int | Polynomial


class Extents:
    """Arithmetic on numbers of bytes."""

    def __init__(self) -> None:
        self._atoms: list[Any] = []
        self._is_variable: list[bool] = []
        self._variables: dict[Any, int] = {}
        self._others: dict[int, list[int]] = {}
        self._bounds: dict[int, tuple[int, int]] = {}
        self._orders: dict[tuple[Number, Number], bool] = {}
        self._proofs: dict[Polynomial, bool] = {}
        self._analyzer: Any = None

    def bound(self, variables: Iterable[Any], upper: Mapping[str, int]) -> None:
        """Learn what a function's attribute `tir_var_upper_bound` says."""
        for variable in variables:
            if variable.name in upper:
                self._bounds[self._variable(variable)] = (0, upper[variable.name])

    def number(self, expr: Any) -> Number | None:
        """Return an integer expression as a number, None if it is no such thing."""
        if isinstance(expr, tirx.IntImm):
            return int(expr.value)
        if not tvm.ir.is_prim_expr(expr):
            return None
        return _pack(self._polynomial(expr))

    def size(self, shape: Iterable[Any], item_bytes: float) -> Number | None:
        """Return the bytes of a tensor."""
        static: float = item_bytes
        product: dict[tuple[int, ...], int] | None = None
        for dimension in shape:
            if isinstance(dimension, tirx.IntImm):
                static *= int(dimension.value)
            elif tvm.ir.is_prim_expr(dimension):
                factor = self._polynomial(dimension)
                product = factor if product is None else _times(product, factor)
            else:
                return None
        bytes_ = math.ceil(static)
        return bytes_ if product is None else _pack(_times({(): bytes_}, product))

    def add(self, a: Number, b: Number) -> Number:
        """Return the sum."""
        if isinstance(a, int) and isinstance(b, int):
            return a + b
        return _pack(_plus(_unpack(a), _unpack(b), 1))

    def at_most(self, a: Number, b: Number) -> bool:
        """Whether a <= b is proved for all values of the variables."""
        if isinstance(a, int) and isinstance(b, int):
            return a <= b
        known = self._orders.get((a, b))
        if known is None:
            difference = _pack(_plus(_unpack(b), _unpack(a), -1))
            if isinstance(difference, int):
                known = difference >= 0
            elif difference in self._proofs:
                known = self._proofs[difference]
            else:
                known = self._proofs[difference] = self._prove(difference)
            self._orders[a, b] = known
        return known

    def text(self, number: Number | None) -> str:
        """Return the number as people write it."""
        if number is None:
            return "?"
        return str(number) if isinstance(number, int) else str(self._expression(number))

    def _variable(self, variable: Any) -> int:
        index = self._variables.get(variable)
        if index is None:
            index = self._variables[variable] = self._atom(variable, True)
        return index

    def _atom(self, expr: Any, is_variable: bool) -> int:
        self._atoms.append(expr)
        self._is_variable.append(is_variable)
        return len(self._atoms) - 1

    def _polynomial(self, expr: Any) -> dict[tuple[int, ...], int]:
        if isinstance(expr, tirx.IntImm):
            return {(): int(expr.value)}
        if isinstance(expr, tirx.Add):
            return _plus(self._polynomial(expr.a), self._polynomial(expr.b), 1)
        if isinstance(expr, tirx.Sub):
            return _plus(self._polynomial(expr.a), self._polynomial(expr.b), -1)
        if isinstance(expr, tirx.Mul):
            return _times(self._polynomial(expr.a), self._polynomial(expr.b))
        if isinstance(expr, tirx.Cast):
            return self._polynomial(expr.value)
        if isinstance(expr, tvm.ir.Var):
            return {(self._variable(expr),): 1}
        same = self._others.setdefault(tvm_ffi.structural_hash(expr, map_free_vars=False), [])
        for index in same:
            if tvm_ffi.structural_equal(self._atoms[index], expr):
                return {(index,): 1}
        same.append(self._atom(expr, False))
        return {(same[-1],): 1}

    def _expression(self, number: Polynomial) -> Any:
        total: Any = tirx.IntImm("int64", 0)
        for monomial, coefficient in number:
            term: Any = tirx.IntImm("int64", coefficient)
            for index in monomial:
                atom = self._atoms[index]
                term = term * (atom if str(atom.ty) == "int64" else tirx.Cast("int64", atom))
            total = total + term
        return total

    def _prove(self, difference: Polynomial) -> bool:
        """Whether the polynomial is never negative."""
        without = self._without_quotients(difference)
        if isinstance(without, int):
            return without >= 0 or self._ask(difference)
        if all(self._is_variable[index] for monomial, _ in without for index in monomial) and all(
            coefficient >= 0 for _, coefficient in without
        ):
            return True
        return self._ask(difference)

    def _without_quotients(self, number: Polynomial) -> Number:
        """Return what is at most as large: c * (p // c) lies between p - c + 1 and p."""
        least: dict[tuple[int, ...], int] = {}
        for monomial, coefficient in number:
            term = {monomial: coefficient}
            for index in monomial:
                atom = self._atoms[index]
                divisor = atom.b if isinstance(atom, tirx.FloorDiv) else None
                if isinstance(divisor, tirx.IntImm) and coefficient % int(divisor.value) == 0:
                    by = int(divisor.value)
                    rest = list(monomial)
                    rest.remove(index)
                    bound = _plus(
                        self._polynomial(atom.a), {(): by - 1 if coefficient > 0 else 0}, -1
                    )
                    term = _times({tuple(rest): coefficient // by}, bound)
                    break
            least = _plus(least, term, 1)
        return _pack(least)

    def _ask(self, difference: Polynomial) -> bool:
        """Let TVM's analyzer prove it."""
        atoms = {index for monomial, _ in difference for index in monomial}
        simple = all(self._is_variable[index] for index in atoms)
        if simple and all(coefficient <= 0 for _, coefficient in difference):
            return False  # it is negative somewhere: every variable may be 1
        if self._analyzer is None:
            self._analyzer = tvm.sym.Analyzer()
        for variable, index in self._variables.items():
            low, high = self._bounds.get(index, (0, 2**40))
            self._analyzer.bind(variable, tvm.ir.Range(low, high + 1), allow_override=True)
        return bool(self._analyzer.can_prove(self._expression(difference) >= 0))


def _unpack(number: Number) -> dict[tuple[int, ...], int]:
    return {(): number} if isinstance(number, int) else dict(number)


def _pack(polynomial: dict[tuple[int, ...], int]) -> Number:
    terms = sorted((key, value) for key, value in polynomial.items() if value)
    if not terms:
        return 0
    return terms[0][1] if len(terms) == 1 and not terms[0][0] else tuple(terms)


def _plus(
    a: dict[tuple[int, ...], int], b: dict[tuple[int, ...], int], sign: int
) -> dict[tuple[int, ...], int]:
    total = dict(a)
    for key, value in b.items():
        total[key] = total.get(key, 0) + sign * value
    return total


def _times(
    a: dict[tuple[int, ...], int], b: dict[tuple[int, ...], int]
) -> dict[tuple[int, ...], int]:
    product: dict[tuple[int, ...], int] = {}
    for left, x in a.items():
        for right, y in b.items():
            key = tuple(sorted(left + right))
            product[key] = product.get(key, 0) + x * y
    return product
