# SPDX-License-Identifier: Apache-2.0
"""Operators and packed functions that make no memory: one list, by their names."""

from __future__ import annotations

from typing import Final

import tvm

from tvm_ipc.contract.programs import VIEW

#: The result is the first argument, or a part of it, seen otherwise.
VIEWS: Final = frozenset(
    (
        *(
            tvm.ir.Op.get(name).name  # which raises an error if TVM has no such operator
            for name in ("relax.reshape", "relax.memory.view", "relax.memory.ensure_zero_offset")
        ),
        "vm.builtin.reshape",
        VIEW.name,
    )
)
