# SPDX-License-Identifier: Apache-2.0
"""Compute with sizes of tensors in bytes: a factor times a unit, which may be symbolic.

A tensor of shape (n, 4096) and type float16 has 8192 * n bytes. Tensors with the same unit can be
packed as if they were static: the offset k * n is aligned for every n if k is aligned.

The attributes `tir_var_upper_bound` and `tir_var_lower_bound` of a function bound the variables of
its signature by name. An extent with an upper bound is replaced by that bound.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, tirx

from tvm_ipc.analysis.polynomials import Terms, plus, times
from tvm_ipc.comm.extent_arithmetic import constant, item_bytes
from tvm_ipc.errors import TransformError
from tvm_ipc.tvm_moved_names import Analyzer, ConstIntBound, IntervalSet, int_set


def extents_of(ty: Any) -> list[Any] | None:
    """Return the extents of the type of a tensor or a shape, None if they are unknown."""
    if isinstance(ty, relax.TensorType):
        ty = None if ty.shape is None else ty.shape.ty
    values = ty.values if isinstance(ty, relax.ShapeType) else None
    return None if values is None else list(values)


def product_of(extents: Sequence[Any], first: int = 1) -> Any:
    """Return `first` times the product of extents, an integer if all of them are constant."""
    product: Any = first
    for extent in extents:
        number = constant(extent)
        product = product * (extent if number is None else number)
    return product


@dataclass(frozen=True)
class Size:
    """A size of `factor` times `unit` bytes."""

    factor: int
    unit: int  #: the number of a unit of `ShapeAlgebra`; 0 is the unit 1

    @property
    def static(self) -> bool:
        """Return whether the size is a constant."""
        return self.unit == 0


class ShapeAlgebra:
    """The arithmetic of the sizes of the tensors of one function."""

    def __init__(self, name: str, function: relax.Function) -> None:
        self._sizes: dict[tuple[Any, ...], Size] = {}
        self._built: dict[tuple[int, int], Any] = {}
        self._atoms: list[Any] = []
        self._atom_of: dict[int, list[int]] = {}
        self._units: dict[frozenset[tuple[tuple[int, ...], int]], int] = {frozenset([((), 1)]): 0}
        self._exprs: list[Any] = [tirx.IntImm("int64", 1)]
        self._sums: list[bool] = [True]
        self._analyzer = Analyzer()
        self._domains: dict[Any, Any] = {}
        self._bounded: dict[int, list[tuple[Any, Any]]] = {}
        _bind_declared_bounds(name, function, self._analyzer, self._domains)

    def of(self, shape: Sequence[Any], dtype: Any) -> Size:
        """Return the size of a tensor, with its extents replaced by their upper bounds."""
        # The cache pays off because most shapes occur many times.
        key = (dtype, *(_key(extent) for extent in shape))
        size = self._sizes.get(key)
        if size is None:
            product: Terms = {(): item_bytes(dtype)}
            for extent in shape:
                product = times(product, self._polynomial(self.bound(extent)))
            size = self._sizes[key] = self._size(product)
        return size

    def bound(self, extent: Any) -> Any:
        """Return the upper bound of an extent, or the extent if it has none."""
        if isinstance(extent, tirx.IntImm):
            return extent
        if isinstance(extent, tvm.ir.Var) and not self._domains:
            return extent
        cached = self._bounded.setdefault(tvm_ffi.structural_hash(extent), [])
        for cached_extent, bound in cached:
            if tvm_ffi.structural_equal(cached_extent, extent):
                return bound
        most = int(self._analyzer.const_int_bound(extent).max_value)
        if _has_cast(extent):
            bound = extent  # the bound would be the limit of a narrower type
        elif most < ConstIntBound.POS_INF:
            bound = tirx.IntImm("int64", most)
        elif not self._domains:
            bound = extent
        else:
            interval = self._analyzer.int_set(extent, self._domains)
            bound = interval.max_value if _has_upper_bound(interval) else extent
        cached.append((extent, bound))
        return bound

    def bounds(self, extents: Iterable[Any]) -> Iterator[tuple[Any, int, int]]:
        """Yield the variables whose bounds the sizes of extents rely on, with both bounds."""
        bounded = [extent for extent in extents if not self.bound(extent).same_as(extent)]
        used = {var for extent in bounded for var in tirx.analysis.undefined_vars(extent)}
        for var, domain in self._domains.items():
            if var in used:
                yield var, int(domain.min_value), int(domain.max_value)

    def expr(self, factor: int, unit: int) -> Any:
        """Return factor * unit as an expression of type int64."""
        built = self._built.get((factor, unit))
        if built is None:
            number = tirx.IntImm("int64", factor)
            built = number if unit == 0 else self._exprs[unit] * number  # TVM folds 0 and 1
            self._built[factor, unit] = built
        return built

    def is_sum(self, unit: int) -> bool:
        """Return whether the unit is a sum of products of variables, which is never negative."""
        return self._sums[unit]

    def text(self, factor: int, unit: int) -> str:
        """Return factor * unit as text for reports."""
        if unit == 0 or factor == 0:
            return str(factor)
        text = plain(self._exprs[unit])
        return f"{factor} * {text if text.isidentifier() else f'({text})'}"

    def _size(self, polynomial: Terms) -> Size:
        """Return a polynomial as a factor and a unit; equal units get the same number."""
        terms = {product: factor for product, factor in polynomial.items() if factor}
        if not terms:
            return Size(0, 0)
        common = gcd(*terms.values())
        if set(terms) == {()}:
            return Size(terms[()], 0)
        key = frozenset((product, factor // common) for product, factor in terms.items())
        unit = self._units.get(key)
        if unit is None:
            unit = self._units[key] = len(self._exprs)
            self._exprs.append(self._build(sorted(key)))
            only_variables = all(
                isinstance(self._atoms[atom], tvm.ir.Var) for product, _ in key for atom in product
            )
            self._sums.append(only_variables and all(factor > 0 for _, factor in key))
        return Size(common, unit)

    def _build(self, terms: list[tuple[tuple[int, ...], int]]) -> Any:
        """Return a sum of products as an expression, the constant last."""
        total = None
        for product, factor in terms[1:] + terms[:1] if terms[0][0] == () else terms:
            term = None
            for atom in product:
                expr = self._atoms[atom]
                term = expr if term is None else term * expr
            number = tirx.IntImm("int64", factor)
            if term is None:
                term = number
            elif factor != 1:
                term = term * number
            total = term if total is None else total + term
        return total

    def _polynomial(self, expr: Any, simplified: bool = False) -> Terms:
        if isinstance(expr, tirx.IntImm):
            return {(): int(expr.value)}
        if isinstance(expr, (tirx.Mul, tirx.Add, tirx.Sub)):
            left, right = self._polynomial(expr.a, simplified), self._polynomial(expr.b, simplified)
            if isinstance(expr, tirx.Mul):
                return times(left, right)
            return plus(left, right, 1 if isinstance(expr, tirx.Add) else -1)
        if not simplified and not isinstance(expr, tvm.ir.Var):
            # TVM's operators leave extents such as n * 3 / 3, which equals n.
            return self._polynomial(self._analyzer.simplify(expr), True)
        return {(self._atom(expr),): 1}

    def _atom(self, expr: Any) -> int:
        """Return the number of an expression that is not a sum or a product."""
        candidates = self._atom_of.setdefault(tvm_ffi.structural_hash(expr), [])
        for atom in candidates:
            if tvm_ffi.structural_equal(self._atoms[atom], expr):
                return atom
        new = len(self._atoms)
        candidates.append(new)
        self._atoms.append(expr)
        return new


def _key(extent: Any) -> Any:
    """Return a hashable key: a number, or the address of an expression that the function holds."""
    return int(extent.value) if type(extent) is tirx.IntImm else (extent.__chandle__(),)


def _bind_declared_bounds(
    name: str, function: relax.Function, analyzer: Any, domains: dict[Any, Any]
) -> None:
    """Add the declared bounds of variables to the analyzer and to `domains`."""
    upper = _numbers(name, function, "tir_var_upper_bound")
    lower = _numbers(name, function, "tir_var_lower_bound")
    if not upper:
        return  # lower bounds do not limit a size
    non_negative = {str(var) for var in function.attrs.get("tir_non_negative_var", ())}
    non_negative.update(var for var, least in lower.items() if least >= 0)
    for var in relax.analysis.tir_vars_in_type(function.ty):
        if str(var.name) not in upper:
            if str(var.name) in non_negative:
                analyzer.update(var, ConstIntBound(0, ConstIntBound.POS_INF), True)
            continue
        least, most = lower.get(str(var.name), 0), upper[str(var.name)]
        if most < least:
            raise TransformError(
                f"StaticPlanBlockMemory: function {name!r}: variable {str(var.name)!r} has the "
                f"lower bound {least} and the upper bound {most}; correct tir_var_lower_bound or "
                "tir_var_upper_bound"
            )
        extent = tvm.ir.Range.from_min_extent(
            tirx.IntImm("int64", least), tirx.IntImm("int64", most - least + 1)
        )
        analyzer.bind(var, extent)
        domains[var] = IntervalSet(extent.min, tirx.IntImm("int64", most))


def _numbers(name: str, function: relax.Function, attribute: str) -> dict[str, int]:
    """Return an attribute that maps names of variables to integers, empty if it is missing."""
    table = function.attrs.get(attribute) if function.attrs is not None else None
    if table is None:
        return {}
    try:
        return {str(var): _int(number) for var, number in table.items()}
    except (AttributeError, TypeError, ValueError):
        raise TypeError(
            f"StaticPlanBlockMemory: function {name!r}: attribute {attribute!r} is {table}; it "
            "must map names of variables to integers"
        ) from None


def _int(number: Any) -> int:
    if isinstance(number, tirx.IntImm):
        return int(number.value)
    if isinstance(number, int):
        return number
    raise TypeError(number)


def _has_cast(extent: Any) -> bool:
    casts: list[Any] = []
    tvm_ffi.structural_walk(extent, [(tirx.Cast, casts.append)])
    return bool(casts)


def _has_upper_bound(interval: Any) -> bool:
    return not interval.max_value.same_as(int_set.pos_inf())


def plain(expr: Any) -> str:
    """Return the text of an integer expression, without the types of constants."""
    return re.sub(r"T\.int64\((-?\d+)\)", r"\1", str(expr))
