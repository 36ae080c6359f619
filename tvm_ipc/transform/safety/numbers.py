# SPDX-License-Identifier: Apache-2.0
"""Sizes and offsets in bytes, static or symbolic.

A symbolic number is a polynomial over shape variables, which are not negative, and over atoms:
expressions that are kept whole, such as quotients.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

from tvm_ipc.transform.ir.polynomials import (
    Number,
    Polynomial,
    Terms,
    pack,
    plus,
    times,
    unpack,
)

#: No variable is larger.
MOST = 2**40


class Numbers:
    """The numbers of a module, and arithmetic on them."""

    def __init__(self) -> None:
        self._atoms: list[Any] = []
        self._variables: dict[Any, int] = {}
        self._others: dict[int, list[tuple[Any, Terms]]] = {}
        self._bounds: dict[int, tuple[int, int]] = {}
        self._analyzer: Any = tvm.sym.Analyzer()

    def bound(
        self, variables: Iterable[Any], lower: Mapping[str, int], upper: Mapping[str, int]
    ) -> None:
        """Learn what a function's attributes `tir_var_lower_bound` and `_upper_bound` say."""
        for variable in variables:
            least = max(lower.get(variable.name, 0), 0)
            most = upper.get(variable.name, MOST)
            if variable not in self._variables and (least, most) != (0, MOST):
                self._variable(variable, least, most)

    def number(self, expr: Any) -> Number | None:
        """Return an integer expression as a number, None if it is no such thing."""
        if isinstance(expr, tirx.IntImm):
            return int(expr.value)
        if not tvm.ir.is_prim_expr(expr):
            return None
        return pack(self._terms(expr))

    def size(self, shape: Iterable[Any], item_bytes: float) -> Number | None:
        """Return the bytes of a tensor."""
        static: float = item_bytes
        product: Terms | None = None
        for dimension in shape:
            if isinstance(dimension, tirx.IntImm):
                static *= int(dimension.value)
            elif tvm.ir.is_prim_expr(dimension):
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
        """Return the number as people write it."""
        if number is None:
            return "?"
        return str(number) if isinstance(number, int) else str(self._expression(number))

    def _variable(self, variable: Any, least: int = 0, most: int = MOST) -> int:
        index = self._variables.get(variable)
        if index is None:
            index = self._variables[variable] = len(self._atoms)
            self._atoms.append(variable)
            self._bounds[index] = (least, most)
            self._analyzer.bind(variable, tvm.ir.Range(least, most + 1))
        return index

    def _meet(self, variable: Any) -> None:
        self._variable(variable)

    def _terms(self, expr: Any, simplified: bool = False) -> Terms:
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
        if isinstance(expr, tvm.ir.Var):
            return {(self._variable(expr),): 1}
        same = self._others.setdefault(tvm_ffi.structural_hash(expr, map_free_vars=False), [])
        for other, terms in same:
            if tvm_ffi.structural_equal(other, expr):
                return terms
        if simplified:
            self._atoms.append(expr)
            terms = {(len(self._atoms) - 1,): 1}
        else:
            tvm_ffi.structural_walk(expr, [(tvm.ir.Var, self._meet)])
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


def _without_casts(expr: Any) -> Any:
    """Return the expression with casts of shape variables left out: no size is that large."""
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
