# SPDX-License-Identifier: Apache-2.0
"""Scheduling of stages in one loop over their common rows, so that a row stays in the cache.

m[i] = max over k of a[i, k]            for i in range(n):
e[i, j] = exp(a[i, j] - m[i])               m = max over k of a[i, k]
s[i] = sum over k of e[i, k]                e[j] = exp(a[i, j] - m)   for all j
b[i, j] = e[i, j] / s[i]                    s = sum over k of e[k]
                                            b[i, j] = e[j] / s        for all j
"""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import tirx

from tvm_ipc.cpu.kernels.inline_stages import inline
from tvm_ipc.cpu.kernels.primfunc_stages import (
    Axis,
    Stage,
    Stages,
    is_index_of,
    key,
    loads,
    substitute,
)
from tvm_ipc.cpu.kernels.stage_to_vector_loops import LoopBuilder, loops, sequence
from tvm_ipc.cpu.kernels.widen_16bit_floats import widen_between
from tvm_ipc.tvm_moved_names import SBlock, SBlockRealize, TensorLoad


def schedule(stages: Stages, lanes: int, *, reproducible: bool = False) -> tirx.PrimFunc:
    """Return the function of the stages, with loops for vectors of `lanes` float32.

    If `reproducible`, the bits of the result of each stage do not depend on the other stages.
    """
    buffers = dict(stages.own)
    inlined = inline(stages, reproducible=reproducible)
    remaining = widen_between(inlined, buffers, reproducible=reproducible)
    own = {key(stage.buffer) for stage in remaining if key(stage.buffer) in buffers}
    rows = _num_common_axes(remaining, own)
    builder = LoopBuilder(lanes)
    if rows:
        axes, row_stages, intermediates = _split_rows(remaining, own, rows)
        bodies = [builder.stage(stage, axes, num_outer) for stage, num_outer in row_stages]
        body = loops(axes, sequence(bodies))
    else:
        intermediates = [stage.buffer for stage in remaining if key(stage.buffer) in own]
        body = sequence([builder.stage(stage, [], 0) for stage in remaining])
    function = stages.function
    block = SBlock([], [], [], "root", body, alloc_buffers=[*intermediates, *builder.buffers])
    realize = SBlockRealize([], tirx.const(True, "bool"), block)
    return function.with_body(realize)


def _num_common_axes(stages: list[Stage], own: set[int]) -> int:
    """Return the number of leading axes that all stages share, 0 if there is only one stage."""
    if len(stages) < 2:
        return 0
    last = stages[-1]
    rows = min(len(stage.axes) for stage in stages)
    for stage in stages:
        for axis in range(rows):
            if not tvm_ffi.structural_equal(stage.axes[axis].extent, last.axes[axis].extent):
                rows = axis
                break
    written = {key(stage.buffer) for stage in stages}
    for stage in stages:
        for load in (*loads(stage.value), *loads(stage.init)):
            if key(load.source) not in written:
                continue
            for axis in range(rows):
                if not is_index_of(load.indices[axis], stage.axes[axis]):
                    rows = axis
                    break
    return rows


def _split_rows(
    stages: list[Stage], own: set[int], rows: int
) -> tuple[list[Axis], list[tuple[Stage, int]], list[Any]]:
    """Return the common axes, stages that compute one row, and buffers of one row.

    Each stage comes with the number of its axes that the common loops cover.
    """
    axes = [
        Axis(tirx.Var(f"row{n}", a.var.ty), a.extent) for n, a in enumerate(stages[-1].axes[:rows])
    ]
    row_buffers: dict[int, Any] = {}
    for stage in stages:
        if key(stage.buffer) in own:
            shape = list(stage.buffer.ty.shape[rows:]) or [tirx.const(1, "int64")]
            dtype = str(stage.buffer.ty.dtype)
            row_buffers[key(stage.buffer)] = tirx.decl_buffer(
                shape, dtype, name=stage.buffer.name, layout=None
            )

    def load(node: Any) -> Any:
        row = row_buffers.get(key(node.source))
        return node if row is None else tirx.BufferLoad(row, row_indices(node.indices))

    def row_indices(indices: Any) -> list[Any]:
        return list(indices[rows:]) or [tirx.const(0, "int64")]

    row_stages = []
    for stage in stages:
        values = {old.var: new.var for old, new in zip(stage.axes, axes, strict=False)}
        value, init = (
            None
            if expr is None
            else tvm_ffi.structural_map(substitute(expr, values), (TensorLoad, load))
            for expr in (stage.value, stage.init)
        )
        row = row_buffers.get(key(stage.buffer))
        if row is None:
            row_stages.append(
                (Stage(stage.buffer, [*axes, *stage.axes[rows:]], stage.reduced, value, init), rows)
            )
            continue
        inner = stage.axes[rows:]
        covered = 0 if inner else 1
        inner = inner or [Axis(tirx.const(0, "int64"), tirx.const(1, "int64"))]
        row_stages.append((Stage(row, inner, stage.reduced, value, init), covered))
    return axes, row_stages, list(row_buffers.values())
