# SPDX-License-Identifier: Apache-2.0
"""Sums of products of atoms are worth what their arithmetic says."""

from __future__ import annotations

import random
from fractions import Fraction
from math import prod

import pytest

from tvm_ipc.analysis.polynomials import (
    Number,
    Terms,
    is_multiple,
    pack,
    plus,
    replaced,
    times,
    unpack,
)


def worth(number: Number | Terms, atoms: list[Fraction]) -> Fraction:
    terms = unpack(number) if isinstance(number, (int, tuple)) else number
    return sum(
        (factor * prod((atoms[i] for i in product), start=Fraction(1)))
        for product, factor in terms.items()
    )


@pytest.mark.parametrize("seed", range(30))
def test_arithmetic(seed: int) -> None:
    rng = random.Random(seed)
    atoms = [Fraction(rng.randint(0, 9)) for _ in range(3)]

    def terms() -> Terms:
        products = (tuple(sorted(rng.choices(range(3), k=rng.randint(0, 2)))) for _ in range(3))
        return {product: rng.randint(-3, 3) for product in products}

    a, b = terms(), terms()
    assert worth(plus(a, b), atoms) == worth(a, atoms) + worth(b, atoms)
    assert worth(plus(a, b, -1), atoms) == worth(a, atoms) - worth(b, atoms)
    assert worth(times(a, b), atoms) == worth(a, atoms) * worth(b, atoms)
    assert worth(pack(a), atoms) == worth(a, atoms)
    assert pack(plus(a, a, -1)) == 0
    assert pack(plus(a, b)) == pack(plus(b, a))
    packed = pack(a)
    if isinstance(packed, tuple):
        for product, _ in packed:
            for atom in product:
                by, divisor = pack(b), rng.randint(1, 4)
                # Of one term one atom becomes `by / divisor`, and all is multiplied by `divisor`.
                rest = list(product)
                rest.remove(atom)
                one = {product: dict(packed)[product]}
                put = times({tuple(rest): dict(packed)[product]}, b)
                expected = (worth(packed, atoms) - worth(one, atoms)) * divisor + worth(put, atoms)
                assert worth(replaced(packed, product, atom, by, divisor), atoms) == expected


def test_constants_are_numbers() -> None:
    assert pack({(): 3, (0,): 0}) == 3
    assert pack({}) == pack({(): 0}) == 0
    assert pack({(0,): 1}) == (((0,), 1),)
    assert unpack(4) == {(): 4}


def test_what_is_a_positive_multiple() -> None:
    n, m, one = (0,), (1,), ()
    a = ((one, 2), (n, 4))
    assert is_multiple(a, ((one, 1), (n, 2)))
    assert is_multiple(((one, 1), (n, 2)), a)
    assert is_multiple(((one, -1), (n, -2)), ((one, -3), (n, -6)))
    assert not is_multiple(a, ((one, -1), (n, -2)))
    assert not is_multiple(a, ((one, 1), (n, 3)))
    assert not is_multiple(a, ((one, 1), (m, 2)))
    assert not is_multiple(a, ((n, 2), (m, 4)))
    assert not is_multiple(a, ((one, 1),))
