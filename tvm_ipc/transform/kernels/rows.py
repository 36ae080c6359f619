# SPDX-License-Identifier: Apache-2.0
"""Stages in one loop over the rows that they have in common, so that a row stays in a cache.

m[i] = max over k of a[i, k]            for i in range(n):
e[i, j] = exp(a[i, j] - m[i])               m = max over k of a[i, k]
s[i] = sum over k of e[i, k]                e[j] = exp(a[i, j] - m)   for all j
b[i, j] = e[i, j] / s[i]                    s = sum over k of e[k]
                                            b[i, j] = e[j] / s        for all j
"""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import s_tir, tirx

from tvm_ipc.transform.kernels.inline import inline
from tvm_ipc.transform.kernels.loops import Nests
from tvm_ipc.transform.kernels.stages import Axis, Stage, Stages, key, loads, substitute
from tvm_ipc.transform.kernels.widths import widen_between


def schedule(stages: Stages, lanes: int) -> tirx.PrimFunc:
    """Return the function with loops for vectors of so many float32."""
    buffers = dict(stages.own)
    left = widen_between(inline(stages), buffers)
    own = {key(one.buffer) for one in left if key(one.buffer) in buffers}
    rows = _common(left, own)
    nests = Nests(lanes)
    if rows:
        axes, staged, between = _on_rows(left, own, rows)
        bodies = [nests.stage(one, axes, rest) for one, rest in staged]
        body = _around(axes, bodies)
    else:
        between = [one.buffer for one in left if key(one.buffer) in own]
        body = _around([], [nests.stage(one, [], 0) for one in left])
    function = stages.function
    block = s_tir.SBlock([], [], [], "root", body, alloc_buffers=[*between, *nests.buffers])
    realize = s_tir.SBlockRealize([], tirx.const(True, "bool"), block)
    return function.with_body(realize)


def _around(axes: list[Axis], bodies: list[Any]) -> Any:
    body = bodies[0] if len(bodies) == 1 else tirx.SeqStmt(bodies)
    for axis in reversed(axes):
        zero = tirx.const(0, axis.var.ty.dtype)
        body = tirx.For(axis.var, zero, axis.extent, tirx.ForKind.SERIAL, body)
    return body


def _common(stages: list[Stage], own: set[int]) -> int:
    """Return how many leading axes all stages have in common, 0 where there is only one stage."""
    if len(stages) < 2:
        return 0
    last = stages[-1]
    rows = min(len(one.axes) for one in stages)
    for one in stages:
        for place in range(rows):
            if not tvm_ffi.structural_equal(one.axes[place].extent, last.axes[place].extent):
                rows = place
                break
    written = {key(one.buffer) for one in stages}
    for one in stages:
        for load in (*loads(one.value), *loads(one.init)):
            if key(load.source) not in written:
                continue
            for place in range(rows):
                index, var = load.indices[place], one.axes[place].var
                same = isinstance(index, tvm.ir.Var) and key(index) == key(var)
                if not same and not (_is(index, 0) and _is(one.axes[place].extent, 1)):
                    rows = place
                    break
    return rows


def _on_rows(
    stages: list[Stage], own: set[int], rows: int
) -> tuple[list[Axis], list[tuple[Stage, int]], list[Any]]:
    """Return the axes of the rows, stages that compute one row, and memory for one row of each."""
    axes = [
        Axis(tirx.Var(f"row{n}", a.var.ty), a.extent) for n, a in enumerate(stages[-1].axes[:rows])
    ]
    one_row: dict[int, Any] = {}
    for stage in stages:
        if key(stage.buffer) in own:
            shape = list(stage.buffer.ty.shape[rows:]) or [tirx.const(1, "int64")]
            dtype = str(stage.buffer.ty.dtype)
            one_row[key(stage.buffer)] = tirx.decl_buffer(
                shape, dtype, name=stage.buffer.name, layout=None
            )

    def load(node: Any) -> Any:
        row = one_row.get(key(node.source))
        return node if row is None else tirx.BufferLoad(row, _in_row(node.indices))

    def _in_row(indices: Any) -> list[Any]:
        return list(indices[rows:]) or [tirx.const(0, "int64")]

    made = []
    for stage in stages:
        values = {old.var: new.var for old, new in zip(stage.axes, axes, strict=False)}
        value, init = (
            None
            if expr is None
            else tvm_ffi.structural_map(substitute(expr, values), (tvm.ir.TensorLoad, load))
            for expr in (stage.value, stage.init)
        )
        row = one_row.get(key(stage.buffer))
        if row is None:
            made.append(
                (Stage(stage.buffer, [*axes, *stage.axes[rows:]], stage.reduced, value, init), rows)
            )
            continue
        inner = stage.axes[rows:]
        if not inner:
            inner = [Axis(tirx.const(0, "int64"), tirx.const(1, "int64"))]
            made.append((Stage(row, inner, stage.reduced, value, init), 1))
        else:
            made.append((Stage(row, inner, stage.reduced, value, init), 0))
    return axes, made, list(one_row.values())


def _is(value: Any, wanted: int) -> bool:
    return isinstance(value, tirx.IntImm) and int(value.value) == wanted
