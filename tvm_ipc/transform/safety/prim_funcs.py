# SPDX-License-Identifier: Apache-2.0
"""Which parameters a PrimFunc writes."""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import s_tir, tirx


def written_parameters(function: tirx.PrimFunc) -> frozenset[int]:
    """Return the places of the parameters that the function may write.

    What is stored to counts, through buffers declared on a parameter's memory too; and so does
    what leaves as an address, for nobody can tell what is done with it.
    """
    touched: set[Any] = set()
    sources: dict[Any, set[Any]] = {}  # a buffer declared on the memory of others

    def store(node: tirx.BufferStore) -> None:
        touched.add(node.buffer)

    def declare(node: tirx.DeclBuffer) -> tvm_ffi.WalkResult:
        sources.setdefault(node.buffer, set()).update(_variables(node.data))
        return tvm_ffi.WalkResult.SKIP

    def match(node: Any) -> None:
        sources.setdefault(node.buffer, set()).add(node.source.source)

    def call(node: tvm.ir.Call) -> None:
        # A value is read with a TensorLoad; anything else is a buffer or an address.
        if getattr(node.op, "name", "") == "tirx.address_of":
            touched.update(_variables(node))
            return
        for argument in node.args:
            if isinstance(argument, tvm.ir.Var) and isinstance(argument.ty, tirx.BufferType):
                touched.add(argument)
            elif isinstance(argument, _REGION):
                touched.add(argument.source)

    tvm_ffi.structural_walk(
        function.body,
        [
            (tirx.BufferStore, store),
            (tirx.DeclBuffer, declare),
            (_MATCH, match),
            (tvm.ir.Call, call),
        ],
        order="pre",
    )
    rest = list(touched)
    while rest:
        new = sources.get(rest.pop(), set()) - touched
        touched |= new
        rest += new
    return frozenset(place for place, p in enumerate(function.params) if p in touched)


def _variables(expr: Any) -> set[Any]:
    found: set[Any] = set()
    tvm_ffi.structural_walk(expr, [(tvm.ir.Var, found.add)])
    return found


_REGION = tvm.ir.TensorRegion
_MATCH = s_tir.MatchBufferRegion
