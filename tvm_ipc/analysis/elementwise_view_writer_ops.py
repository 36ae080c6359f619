# SPDX-License-Identifier: Apache-2.0
"""List the names of TVM operators that are elementwise, and of those that view or write memory."""

from __future__ import annotations

from typing import Final

import tvm

from tvm_ipc.packed_functions.program_function_declarations import OWN_SLICE, VIEW

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

#: Operators and packed functions whose result is a view of their first argument or a part of it.
VIEWS: Final = frozenset(
    (
        *(
            tvm.ir.Op.get(name).name  # raises an error if TVM has no such operator
            for name in ("relax.reshape", "relax.memory.view", "relax.memory.ensure_zero_offset")
        ),
        "vm.builtin.reshape",
        VIEW.name,
        OWN_SLICE.name,
    )
)

#: Operators that may write their arguments. Calls of anything but an operator may write them too.
WRITERS: Final = (
    "relax.call_tir_inplace",
    "relax.call_inplace_packed",
    "relax.call_builtin_with_ctx",
    "relax.call_py_func",
    "relax.invoke_closure",
    "relax.invoke_pure_closure",
)
