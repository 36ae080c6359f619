# SPDX-License-Identifier: Apache-2.0
"""List the names of TVM operators that are elementwise."""

from __future__ import annotations

from typing import Final

#: Elementwise operators with one operand that map zero to zero.
ZERO_PRESERVING_UNARY: Final = (
    *("abs", "asin", "asinh", "astype", "atan", "ceil", "erf", "floor", "negative", "nn.gelu"),
    *("nn.gelu_tanh", "nn.leakyrelu", "nn.relu", "nn.selu", "nn.silu", "round", "sign", "sin"),
    *("sinh", "sqrt", "square", "tan", "tanh", "trunc"),
)
#: All elementwise operators with one operand.
UNARY: Final = (
    *ZERO_PRESERVING_UNARY,
    *("acos", "acosh", "atanh", "bitwise_not", "clip", "cos", "cosh", "exp", "isfinite", "isinf"),
    *("isnan", "log", "logical_not", "nn.softplus", "rsqrt", "sigmoid"),
)
#: Elementwise operators with several operands, which are broadcast, that map zeros to zero.
ZERO_PRESERVING_BROADCASTING: Final = ("add", "subtract", "multiply", "maximum", "minimum")
#: All elementwise operators with several operands, which are broadcast.
BROADCASTING: Final = (
    *ZERO_PRESERVING_BROADCASTING,
    *("atan2", "bitwise_and", "bitwise_or", "bitwise_xor", "divide", "equal", "floor_divide"),
    *("floor_mod", "greater", "greater_equal", "left_shift", "less", "less_equal"),
    *("log_add_exp", "logical_and", "logical_or", "logical_xor", "mod", "not_equal", "power"),
    *("right_shift", "where"),
)
