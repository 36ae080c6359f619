# SPDX-License-Identifier: Apache-2.0
"""Functions of float32, expanded to vector operations.

TVM lowers `exp`, `tanh` and so on to a call of the C library for each element, and code generators
do not vectorize loops with calls. The functions of this module are within two units in the last
place of the exact result for every float32, including subnormal numbers, and preserve NaNs.

The coefficients are those of minimax polynomials, which minimize the largest relative error
(Remez algorithm with 120 bits), rounded to float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import tvm
import tvm_ffi
from tvm import tirx

from tvm_ipc.cpu.kernels.primfunc_stages import operator

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
#: Adding it to a number rounds the number to an integer, which is then in the low bits.
_MAGIC: Final = 12582912.0
_MAGIC_BITS: Final = 0x4B400000


class _LetBuilder:
    """A builder of nested `Let` expressions, which compute each value once."""

    def __init__(self) -> None:
        self._lets: list[tuple[Any, Any]] = []

    def let(self, value: Any) -> Any:
        """Return a variable that is bound to a value."""
        var = tirx.Var("t", value.ty)
        self._lets.append((var, value))
        return var

    def result(self, value: Any) -> Any:
        """Return a value inside the `Let` expressions of all variables."""
        for var, bound in reversed(self._lets):
            value = tirx.Let(var, bound, value)
        return value


def exp(x: Any) -> Any:
    """Return e**x."""
    lets = _LetBuilder()
    value, _ = _exp(lets, lets.let(x))
    return lets.result(value)


def sigmoid(x: Any) -> Any:
    """Return 1 / (1 + e**-x), accurate also for very negative x, where it is subnormal."""
    lets = _LetBuilder()
    x = lets.let(x)
    # For a negative x compute e**x / (1 + e**x), so that the exponential is at most 1.
    e, error = _exp(lets, lets.let(-_absolute(x)))
    e, error = lets.let(e), lets.let(error)
    denominator = lets.let(_float(1) + e)
    negative = x < _float(0)
    quotient = lets.let(tirx.Select(negative, e, _float(1)) / denominator)
    # The rounding errors of dividend and divisor; a few digits of them suffice.
    rounding_error = (e - (denominator - _float(1))) + error
    residual = tirx.Select(negative, error, _float(0)) - quotient * rounding_error
    reciprocal = _float(1.457) - _float(0.485) * denominator
    return lets.result(quotient + residual * reciprocal)


def tanh(x: Any) -> Any:
    """Return the hyperbolic tangent."""
    lets = _LetBuilder()
    x = lets.let(x)
    size = lets.let(_absolute(x))
    square = lets.let(size * size)
    small = size + size * (square * _polynomial(_TANH, square))
    e, _ = _exp(lets, lets.let(_float(2) * size))
    large = _float(1) - _float(2) / (_float(1) + e)
    value = tirx.Select(size < _float(_TANH_SMALL), small, large)
    return lets.result(_with_sign_of(x, value))


def erf(x: Any) -> Any:
    """Return the error function."""
    lets = _LetBuilder()
    x = lets.let(x)
    size = lets.let(_absolute(x))
    small = size + size * _polynomial(_ERF, lets.let(size * size))
    # Beyond 4 the function is 1. The comparison is false for a NaN, which is preserved.
    clamped = lets.let(tirx.Select(size > _float(4), _float(4), size))
    e, _ = _exp(lets, lets.let(-_polynomial(_LOG_ERFC, clamped)))
    value = tirx.Select(size < _float(_ERF_SMALL), small, _float(1) - e)
    return lets.result(_with_sign_of(x, value))


#: The functions by the names of TVM's operators that they replace.
FUNCTIONS: Final[dict[str, Callable[[Any], Any]]] = {
    "exp": exp,
    "sigmoid": sigmoid,
    "tanh": tanh,
    "erf": erf,
}


def vector_function(call: tvm.ir.Call) -> Any:
    """Return a call of a function expanded to vector operations, or the call itself.

    A call whose argument contains an expanded function is not expanded: TVM's analyses substitute
    the value of each `Let` for its variable, which becomes slow for nested ones.
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


def has_functions(statement: Any) -> bool:
    """Return whether a statement has functions that `vector_function` could expand."""
    found: list[Any] = []

    def visit(call: Any) -> None:
        is_float32 = str(getattr(call.ty, "dtype", "")) == "float32"
        is_square = operator(call) == "pow" and _is_two(call.args[1])
        if is_float32 and (operator(call) in FUNCTIONS or is_square):
            found.append(call)

    tvm_ffi.structural_walk(statement, [(tvm.ir.Call, visit)])
    return bool(found)


def _is_two(value: Any) -> bool:
    return isinstance(value, tirx.FloatImm) and float(value.value) == 2.0


def _binds(value: Any) -> bool:
    lets: list[Any] = []
    tvm_ffi.structural_walk(value, [(tirx.Let, lets.append)])
    return bool(lets)


def _power(call: Any) -> Any:
    base, exponent = call.args
    if _is_two(exponent):
        if not _binds(base):
            return base * base
        lets = _LetBuilder()
        base = lets.let(base)
        return lets.result(base * base)
    return call


def _exp(lets: _LetBuilder, x: Any) -> tuple[Any, Any]:
    """Return e**x of a variable, computed as 2**n * e**r with a small r, and its rounding error."""
    # Beyond these bounds the result is 0 or infinity. Unlike max and min, comparisons keep a NaN.
    x = lets.let(tirx.Select(x < _float(-104), _float(-104), x))
    x = lets.let(tirx.Select(x > _float(89), _float(89), x))
    shifted = lets.let(x * _float(1.4426950408889634) + _float(_MAGIC))
    count = lets.let(shifted - _float(_MAGIC))
    # r is split in two, since more digits of it are needed when it is added to 1. The upper part of
    # ln 2 has trailing zeros, so that its products and the difference are exact.
    upper = lets.let(x - count * _float(0.693359375))
    lower = lets.let(count * _float(2.12194440e-4))
    r = lets.let(upper + lower)
    fraction = lets.let(upper + (lower + r * r * _polynomial(_EXP, r)))
    value = lets.let(_float(1) + fraction)
    error = fraction - (value - _float(1))
    # 2**n may be subnormal while the result is normal, and the other way round.
    n = lets.let(tirx.reinterpret("int32", shifted) - _integer(_MAGIC_BITS))
    half = lets.let(n >> _integer(1))
    factor, other_factor = lets.let(_power_of_two(half)), lets.let(_power_of_two(n - half))
    return value * factor * other_factor, error * factor * other_factor


def _power_of_two(n: Any) -> Any:
    return tirx.reinterpret("float32", (n + _integer(127)) << _integer(23))


def _polynomial(coefficients: tuple[float, ...], x: Any) -> Any:
    *rest, value = (_float(coefficient) for coefficient in coefficients)
    for coefficient in reversed(rest):
        value = value * x + coefficient
    return value


def _absolute(x: Any) -> Any:
    bits = tirx.reinterpret("int32", x) & _integer(0x7FFFFFFF)
    return tirx.reinterpret("float32", bits)


def _with_sign_of(x: Any, size: Any) -> Any:
    """Return a non-negative number with the sign of x; a zero gets the sign too."""
    sign = tirx.reinterpret("int32", x) & _integer(-0x80000000)
    return tirx.reinterpret("float32", tirx.reinterpret("int32", size) | sign)


def _float(value: float) -> Any:
    return tirx.const(value, "float32")


def _integer(value: int) -> Any:
    return tirx.const(value, "int32")
