# SPDX-License-Identifier: Apache-2.0
"""Which parameters a kernel only reads."""

from __future__ import annotations

from collections import Counter
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.s_tir import MatchBufferRegion

_ADDRESS_OF = "tirx.address_of"


def read_only(function: tirx.PrimFunc) -> frozenset[int]:
    """Return the places of the buffers that are loaded from and never anything else.

    Whatever else happens to a buffer may write it: its address is taken, it gets another name.
    """
    seen: Counter[Any] = Counter()
    loaded: Counter[Any] = Counter()

    def visit_call(call: Any) -> None:
        if isinstance(call.op, tvm.ir.Op) and call.op.name == _ADDRESS_OF:
            for argument in call.args[:]:
                if isinstance(argument, tvm.ir.TensorLoad):
                    loaded[argument.source] -= 1

    def visit_alias(region: Any) -> None:
        loaded[region.source.source] -= 1

    def visit_source(node: Any) -> None:
        loaded[node.source] += 1

    def visit_var(var: Any) -> None:
        seen[var] += 1

    tvm_ffi.structural_walk(
        function.body,
        (
            (tvm.ir.Var, visit_var),
            ((tvm.ir.TensorLoad, tvm.ir.TensorRegion), visit_source),
            (tvm.ir.Call, visit_call),
            (MatchBufferRegion, visit_alias),
        ),
    )
    return frozenset(
        place for place, param in enumerate(function.params) if seen[param] == loaded[param]
    )
