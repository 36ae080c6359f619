# SPDX-License-Identifier: Apache-2.0
"""What operators and packed functions do to the memory that they are given, by their names."""

from __future__ import annotations

from typing import Final

import tvm

from tvm_ipc.contract.programs import PART, VIEW

#: The result is the first argument, or a part of it, seen otherwise.
VIEWS: Final = frozenset(
    (
        *(
            tvm.ir.Op.get(name).name  # which raises an error if TVM has no such operator
            for name in ("relax.reshape", "relax.memory.view", "relax.memory.ensure_zero_offset")
        ),
        "vm.builtin.reshape",
        VIEW.name,
        PART.name,
    )
)

#: Operators that may write into their arguments, as may all calls of something else.
WRITERS: Final = (
    "relax.call_tir_inplace",
    "relax.call_inplace_packed",
    "relax.call_builtin_with_ctx",
    "relax.call_py_func",
    "relax.invoke_closure",
    "relax.invoke_pure_closure",
)
