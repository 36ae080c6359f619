# SPDX-License-Identifier: Apache-2.0
"""Find the parameters that a PrimFunc may write, and whether it allocates memory."""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

from tvm_ipc.tvm_moved_names import MatchBufferRegion, SBlock, TensorRegion


def written_parameters(function: tirx.PrimFunc) -> frozenset[int]:
    """Return the positions of the parameters that the function may write.

    They are those with stores, also through buffers declared on the memory of a parameter, and
    those whose address is taken, since its uses are unknown.
    """
    written: set[Any] = set()
    sources: dict[Any, set[Any]] = {}  # by buffer, the buffers on whose memory it is declared

    def store(node: tirx.BufferStore) -> None:
        written.add(node.buffer)

    def declare(node: tirx.DeclBuffer) -> tvm_ffi.WalkResult:
        sources.setdefault(node.buffer, set()).update(_variables(node.data))
        return tvm_ffi.WalkResult.SKIP

    def match(node: Any) -> None:
        sources.setdefault(node.buffer, set()).add(node.source.source)

    def call(node: tvm.ir.Call) -> None:
        # A TensorLoad reads a value; any other use of a buffer passes the buffer or its address.
        if getattr(node.op, "name", "") == "tirx.address_of":
            written.update(_variables(node))
            return
        for argument in node.args:
            if isinstance(argument, tvm.ir.Var) and isinstance(argument.ty, tirx.BufferType):
                written.add(argument)
            elif isinstance(argument, _REGION):
                written.add(argument.source)

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
    unvisited = list(written)
    while unvisited:
        new = sources.get(unvisited.pop(), set()) - written
        written |= new
        unvisited += new
    return frozenset(k for k, parameter in enumerate(function.params) if parameter in written)


def allocates_workspace(function: tirx.PrimFunc) -> bool:
    """Return whether the function allocates a buffer in the memory of the device for each call."""
    found: list[bool] = []

    def block(node: Any) -> None:
        found.extend(buffer.scope() == "global" for buffer in node.alloc_buffers)

    def allocate(node: Any) -> None:
        found.append(node.buffer.scope() == "global")

    tvm_ffi.structural_walk(
        function.body, [(SBlock, block), (tirx.AllocBuffer, allocate)], order="pre"
    )
    return any(found)


def _variables(expr: Any) -> set[Any]:
    variables: set[Any] = set()
    tvm_ffi.structural_walk(expr, [(tvm.ir.Var, variables.add)])
    return variables


_REGION = TensorRegion
_MATCH = MatchBufferRegion
