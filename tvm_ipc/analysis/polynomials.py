# SPDX-License-Identifier: Apache-2.0
"""Compute with symbolic sizes: polynomials over numbered atoms, such as shape variables."""

from __future__ import annotations

from collections.abc import Mapping

#: The coefficient of each monomial, which is a sorted tuple of atoms; () is the constant.
Terms = dict[tuple[int, ...], int]
#: Sorted terms, so that equal polynomials are equal keys.
Polynomial = tuple[tuple[tuple[int, ...], int], ...]
Number = int | Polynomial


def unpack(number: Number) -> Terms:
    """Return the terms of a number."""
    return {(): number} if isinstance(number, int) else dict(number)


def pack(terms: Mapping[tuple[int, ...], int]) -> Number:
    """Return the number that consists of some terms."""
    kept = sorted((monomial, factor) for monomial, factor in terms.items() if factor)
    if not kept:
        return 0
    return kept[0][1] if len(kept) == 1 and not kept[0][0] else tuple(kept)


def plus(a: Terms, b: Terms, sign: int = 1) -> Terms:
    """Return a + sign * b."""
    total = dict(a)
    for monomial, factor in b.items():
        total[monomial] = total.get(monomial, 0) + sign * factor
    return total


def times(a: Terms, b: Terms) -> Terms:
    """Return the product."""
    product: Terms = {}
    for left, x in a.items():
        for right, y in b.items():
            monomial = tuple(sorted(left + right))
            product[monomial] = product.get(monomial, 0) + x * y
    return product


def is_multiple(a: Polynomial, b: Polynomial) -> bool:
    """Return whether a is b times a positive number."""
    if len(a) != len(b):
        return False
    (_, x), (_, y) = a[0], b[0]
    return (x > 0) is (y > 0) and all(
        left == right and p * y == q * x for (left, p), (right, q) in zip(a, b, strict=True)
    )


def replaced(
    number: Polynomial, monomial: tuple[int, ...], atom: int, by: Number, divisor: int
) -> Number:
    """Return `divisor` times the number in which `by / divisor` replaces an atom of a monomial."""
    terms = {key: factor * divisor for key, factor in number}
    factor = terms.pop(monomial) // divisor
    rest = list(monomial)
    rest.remove(atom)
    return pack(plus(terms, times({tuple(rest): factor}, unpack(by))))
