# SPDX-License-Identifier: Apache-2.0
"""Sizes in bytes as a number times a unit: what they are worth, and which of them are equal."""

from __future__ import annotations

import random
from typing import Any

import pytest
import tvm
import tvm_ffi
from tvm import relax, tirx

from tvm_ipc.analysis.shape_algebra import ShapeAlgebra

N, M = (tirx.Var(name, "int64") for name in "nm")
FLOAT32, INT4 = tvm.DataType("float32"), tvm.DataType("int4")


def sizes(**bounds: dict[str, int]) -> ShapeAlgebra:
    x = relax.Var("x", relax.TensorType((N, M), "float32"))
    body = relax.SeqExpr([], x)
    function = relax.Function([x], relax.BlockBuilder().normalize(body), x.ty)
    for name, table in bounds.items():
        function = function.with_attr(name, table)
    return ShapeAlgebra("main", function)


def value(expr: Any, n: int, m: int) -> int:
    """Return what an expression is worth."""
    given = {N: tirx.IntImm("int64", n), M: tirx.IntImm("int64", m)}
    put = tvm_ffi.structural_map(expr, (tvm.ir.Var, lambda var: given.get(var, var)))
    return int(tvm.sym.Analyzer().simplify(put).value)


def number(given: int) -> Any:
    return tirx.IntImm("int64", given)


def extent(rng: random.Random, depth: int = 3) -> Any:
    """Return a random expression that is not negative for n and m from 0 on."""
    kind = rng.random()
    if depth == 0 or kind < 0.3:
        return rng.choice([N, M, number(rng.randint(1, 5))])
    one, other = extent(rng, depth - 1), extent(rng, depth - 1)
    if kind < 0.6:
        return one + other
    if kind < 0.85:
        return one * other
    return tirx.floordiv(one, number(rng.randint(1, 4)))


@pytest.mark.parametrize("seed", range(40))
def test_a_size_is_worth_what_its_shape_is(seed: int) -> None:
    rng = random.Random(seed)
    known = sizes()
    for _ in range(5):
        shape = [extent(rng) for _ in range(rng.randint(0, 3))]
        size = known.of(shape, FLOAT32)
        for n, m in ((0, 3), (1, 1), (2, 7), (13, 5)):
            expected = 4
            for one in shape:
                expected *= value(one, n, m)
            assert value(known.expr(size.factor, size.unit), n, m) == expected, shape


def test_equal_sizes_have_one_unit() -> None:
    known = sizes()
    one = known.of([N, number(2)], FLOAT32)
    assert known.of([N + N], FLOAT32) == one
    assert known.of([tirx.floordiv(N * 6, number(3))], FLOAT32) == one
    assert known.of([number(6), N], FLOAT32).unit == one.unit
    assert known.of([M, number(2)], FLOAT32).unit != one.unit
    both = known.of([N + M * 2], FLOAT32)
    assert known.of([M * 2 + N], FLOAT32) == both
    assert known.of([M * 3 + N], FLOAT32).unit != both.unit
    quotient = known.of([tirx.floordiv(N, number(3))], FLOAT32)
    assert known.of([tirx.floordiv(N, number(3)) * 5], FLOAT32).unit == quotient.unit
    assert known.of([tirx.floordiv(M, number(3))], FLOAT32).unit != quotient.unit


def test_a_size_without_variables_is_a_number_of_bytes() -> None:
    known = sizes()
    assert (known.of([], FLOAT32).factor, known.of([], FLOAT32).static) == (4, True)
    assert known.of([number(3)], INT4).factor == 3  # a byte each
    assert known.of([N - N], FLOAT32) == known.of([number(0)], FLOAT32)
    assert known.of([N], FLOAT32).static is False


def test_what_is_a_sum_and_how_it_is_written() -> None:
    known = sizes()
    for shape, a_sum, text in (
        ([N], True, "4 * n"),
        ([N + 1, number(2)], True, "8 * (n + 1)"),
        ([N - M], False, None),
        ([tirx.floordiv(N, number(2))], False, None),
        ([number(3)], True, "12"),
    ):
        size = known.of(shape, FLOAT32)
        assert known.is_sum(size.unit) is a_sum
        assert text in (None, known.text(size.factor, size.unit))


def test_a_bounded_extent_counts_as_its_bound() -> None:
    known = sizes(tir_var_upper_bound={"n": 16}, tir_var_lower_bound={"n": 2})
    assert known.of([N], FLOAT32).factor == 64
    assert known.of([N + 1, number(2)], FLOAT32).factor == 136
    assert known.of([number(20) - N], FLOAT32).factor == 72
    assert known.of([N, M], FLOAT32) == known.of([M, number(16)], FLOAT32)
    assert [(var.name, least, most) for var, least, most in known.bounds([N, M, number(3)])] == [
        ("n", 2, 16)
    ]
    assert list(known.bounds([M])) == []
