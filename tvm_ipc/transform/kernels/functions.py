# SPDX-License-Identifier: Apache-2.0
"""Functions of float32 in operations that vectors have.

TVM makes calls of the C library of `exp`, `tanh` and the like, one for each number, and code
generators vectorise no loop with a call. These are within two units in the last place of the exact
result for every float32, those that are not normal too; what is no number stays none.

Coefficients are those of the polynomials whose largest relative error of the function is least
(Remez' algorithm in 120 bits), rounded to float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import tvm
import tvm_ffi
from tvm import tirx

from tvm_ipc.transform.kernels.stages import operator

#: (e**r - 1 - r) / r**2 where |r| is at most ln(2) / 2: 5e-11 of e**r.
_EXP: Final = (
    *(0.5000000068430986, 0.16666665859647684, 0.04166629217991247),
    *(0.008333498372419498, 0.0013944868159420111, 0.0001979011655002725),
)
#: (tanh(x) / x - 1) / x**2 of x**2, where |x| is at most 0.625: 1.5e-10 of tanh(x).
_TANH: Final = (
    *(-0.33333330906645453, 0.1333320976343876, -0.05394720426317026),
    *(0.021702967186369555, -0.008182674225534925, 0.002147537292044061),
)
_TANH_SMALL: Final = 0.625
#: erf(x) / x - 1 of x**2, where |x| is at most 0.92: 4e-10.
_ERF: Final = (
    *(0.12837916670290073, -0.37612634295691716, 0.1128370331586305, -0.0268597986456128),
    *(0.005201960328841839, -0.000815262890932658, 8.409924071556492e-05),
)
_ERF_SMALL: Final = 0.92
#: -log(1 - erf(x)), where x is between 0.92 and 4, from where on erf is 1: 5e-11 of erf(x).
_LOG_ERFC: Final = (
    *(-0.00017468298090834094, 1.1295149231638177, 0.6333469217003184, 0.1082800718037279),
    *(-0.025119415532552584, 0.004171058349810003, -0.0004344616145862472, 2.1094960526290753e-05),
)
#: A sum with it is rounded to an integer, which then is in the low bits.
_MAGIC: Final = 12582912.0
_MAGIC_BITS: Final = 0x4B400000


class _Bound:
    """Values that are computed once, one after the other, and then a result."""

    def __init__(self) -> None:
        self._lets: list[tuple[Any, Any]] = []

    def let(self, value: Any) -> Any:
        """Return a variable that is bound to a value."""
        var = tirx.Var("t", value.ty)
        self._lets.append((var, value))
        return var

    def result(self, value: Any) -> Any:
        """Return an expression that computes all of them and then a value."""
        for var, bound in reversed(self._lets):
            value = tirx.Let(var, bound, value)
        return value


def exp(x: Any) -> Any:
    """Return e**x."""
    steps = _Bound()
    value, _ = _exp(steps, steps.let(x))
    return steps.result(value)


def sigmoid(x: Any) -> Any:
    """Return 1 / (1 + e**-x), of very negative numbers too, where it is no normal number."""
    steps = _Bound()
    x = steps.let(x)
    # e**x / (1 + e**x) of a negative x: the exponential is 1 at most.
    e, error = _exp(steps, steps.let(-_absolute(x)))
    e, error = steps.let(e), steps.let(error)
    below = steps.let(_float(1) + e)
    negative = x < _float(0)
    quotient = steps.let(tirx.Select(negative, e, _float(1)) / below)
    # What rounding took from both sides of the division, of which a few digits do.
    rounded = (e - (below - _float(1))) + error
    rest = tirx.Select(negative, error, _float(0)) - quotient * rounded
    inverse = _float(1.457) - _float(0.485) * below
    return steps.result(quotient + rest * inverse)


def tanh(x: Any) -> Any:
    """Return the hyperbolic tangent."""
    steps = _Bound()
    x = steps.let(x)
    size = steps.let(_absolute(x))
    square = steps.let(size * size)
    small = size + size * (square * _polynomial(_TANH, square))
    e, _ = _exp(steps, steps.let(_float(2) * size))
    large = _float(1) - _float(2) / (_float(1) + e)
    value = tirx.Select(size < _float(_TANH_SMALL), small, large)
    return steps.result(_with_sign_of(x, value))


def erf(x: Any) -> Any:
    """Return the error function."""
    steps = _Bound()
    x = steps.let(x)
    size = steps.let(_absolute(x))
    small = size + size * _polynomial(_ERF, steps.let(size * size))
    # Beyond 4 it is 1. A NaN is not beyond.
    end = steps.let(tirx.Select(size > _float(4), _float(4), size))
    e, _ = _exp(steps, steps.let(-_polynomial(_LOG_ERFC, end)))
    value = tirx.Select(size < _float(_ERF_SMALL), small, _float(1) - e)
    return steps.result(_with_sign_of(x, value))


#: By the operator of TVM whose place a function takes.
FUNCTIONS: Final[dict[str, Callable[[Any], Any]]] = {
    "exp": exp,
    "sigmoid": sigmoid,
    "tanh": tanh,
    "erf": erf,
}


def vector_function(call: tvm.ir.Call) -> Any:
    """Return what a call of a function is in operations of vectors, or the call itself.

    That of what holds such a function already stays a call: TVM's analyses put the value of each
    `Let` in the place of its variable, which takes ever longer where one follows from another.
    """
    name = operator(call)
    if name == "pow":
        return _power(call)
    function = FUNCTIONS.get(name)
    if function is None or _binds(call.args[0]):
        return call
    dtype = str(call.args[0].ty.dtype)
    if dtype == "float32":
        return function(call.args[0])
    if dtype in ("float16", "bfloat16"):
        return tirx.Cast(dtype, function(tirx.Cast("float32", call.args[0])))
    return call


def _binds(value: Any) -> bool:
    found: list[Any] = []
    tvm_ffi.structural_walk(value, [(tirx.Let, found.append)])
    return bool(found)


def _power(call: Any) -> Any:
    base, exponent = call.args
    if isinstance(exponent, tirx.FloatImm) and float(exponent.value) == 2.0:
        if not _binds(base):
            return base * base
        steps = _Bound()
        base = steps.let(base)
        return steps.result(base * base)
    return call


def _exp(steps: _Bound, x: Any) -> tuple[Any, Any]:
    """Return e**x of a variable, and what rounding took from it: 2**n * e**r, r small."""
    # Beyond these it is 0 and infinity. Comparisons, not max and min, which lose a NaN.
    x = steps.let(tirx.Select(x < _float(-104), _float(-104), x))
    x = steps.let(tirx.Select(x > _float(89), _float(89), x))
    shifted = steps.let(x * _float(1.4426950408889634) + _float(_MAGIC))
    count = steps.let(shifted - _float(_MAGIC))
    # r in two parts, since it is added to 1 with more digits than it has. Of the parts of ln 2 the
    # first has trailing zeros, so that its products are exact, and the difference is, too.
    upper = steps.let(x - count * _float(0.693359375))
    lower = steps.let(count * _float(2.12194440e-4))
    r = steps.let(upper + lower)
    more = steps.let(upper + (lower + r * r * _polynomial(_EXP, r)))
    value = steps.let(_float(1) + more)
    error = more - (value - _float(1))
    # 2**n may be no normal number while the result is one, and the other way round.
    n = steps.let(tirx.reinterpret("int32", shifted) - _integer(_MAGIC_BITS))
    half = steps.let(n >> _integer(1))
    first, second = steps.let(_power_of_two(half)), steps.let(_power_of_two(n - half))
    return value * first * second, error * first * second


def _power_of_two(n: Any) -> Any:
    return tirx.reinterpret("float32", (n + _integer(127)) << _integer(23))


def _polynomial(coefficients: tuple[float, ...], x: Any) -> Any:
    *rest, value = (_float(one) for one in coefficients)
    for coefficient in reversed(rest):
        value = value * x + coefficient
    return value


def _absolute(x: Any) -> Any:
    bits = tirx.reinterpret("int32", x) & _integer(0x7FFFFFFF)
    return tirx.reinterpret("float32", bits)


def _with_sign_of(x: Any, size: Any) -> Any:
    """Return what is not negative with the sign of x, which a zero has, too."""
    sign = tirx.reinterpret("int32", x) & _integer(-0x80000000)
    return tirx.reinterpret("float32", tirx.reinterpret("int32", size) | sign)


def _float(value: float) -> Any:
    return tirx.const(value, "float32")


def _integer(value: int) -> Any:
    return tirx.const(value, "int32")
