# SPDX-License-Identifier: Apache-2.0
"""Programs with a collective and products, of which communication goes on beside the products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from tvm import relax, tirx

from tests.collective_results import join, results_of
from tests.end_to_end.compare_with_numpy import Example
from tvm_ipc import comm


@dataclass(frozen=True)
class Case:
    """A gather before products, or a product before a reduction."""

    kind: str
    ranks: int
    rows: int  #: of one rank, in each block
    inner: int
    columns: int
    blocks: tuple[int, ...] = ()  #: extents before the axis of the rows
    after: tuple[int, ...] = ()  #: and between it and the axis that is summed over
    products: int = 1
    bias: bool = False
    symbolic: bool = False
    dtype: str = "float32"
    reduction: str = "sum"
    wider: bool = False  #: products are float32, and rounded once
    ccl: bool = False
    team: Any = "world"

    @property
    def axis(self) -> int:
        return len(self.blocks)

    def shape(self, rows: Any, last: int) -> tuple[Any, ...]:
        return (*self.blocks, rows, *self.after, last)

    def module(self) -> tvm.IRModule:
        rows: Any = tirx.Var("m", "int64") if self.symbolic else self.rows
        gathers, scatters = self.kind == "allgather", self.kind == "reduce_scatter"
        given = rows * self.ranks if scatters else rows
        x = relax.Var("x", relax.TensorType(self.shape(given, self.inner), self.dtype))
        w, b = (
            [relax.Var(f"{name}{k}", relax.TensorType(shape, self.dtype)) for k in self.each]
            for name, shape in (("w", (self.inner, self.columns)), ("b", (self.columns,)))
        )
        more = [relax.Var("rows", relax.ShapeType([rows]))] if self.symbolic else []
        workers = {"workers": self.ranks} if isinstance(self.team, str) else {}
        builder = relax.BlockBuilder()
        with builder.function("main", [x, *w, *b, *more]):
            with builder.dataflow():
                if gathers and self.ccl:
                    whole = builder.emit(relax.op.ccl.allgather(x, self.ranks))
                elif gathers:
                    gathered = comm.allgather(x, axis=self.axis, team=self.team, **workers)
                    whole = builder.emit(gathered)
                results = []
                for k in self.each:
                    wide = "float32" if self.wider else None
                    y = builder.emit(relax.op.matmul(whole if gathers else x, w[k], wide))
                    if self.wider:
                        y = builder.emit(relax.op.astype(y, self.dtype))
                    if self.bias and gathers:
                        y = builder.emit(relax.op.nn.relu(builder.emit(relax.op.add(y, b[k]))))
                    if self.kind == "allreduce":
                        y = builder.emit(comm.allreduce(y, self.reduction, team=self.team))
                    if scatters:
                        scattered = comm.reduce_scatter(
                            y, self.reduction, axis=self.axis, team=self.team, **workers
                        )
                        y = builder.emit(scattered)
                    results.append(y)
                out = builder.emit_output(results[0] if len(results) == 1 else results)
            builder.emit_func_output(out)
        return builder.get()

    @property
    def each(self) -> range:
        return range(self.products)

    def example(self, seed: int, rows: int) -> Example:
        """Inputs of each rank, weights and biases, and what each rank gets."""
        drawn = np.random.default_rng(seed)
        given = rows * self.ranks if self.kind == "reduce_scatter" else rows
        ints = lambda shape: drawn.integers(-4, 5, shape).astype(self.dtype)  # noqa: E731
        xs = [ints(self.shape(given, self.inner)) for _ in range(self.ranks)]
        ws = [ints((self.inner, self.columns)) for _ in self.each]
        bs = [ints((self.columns,)) for _ in self.each]
        told = [tvm.runtime.ShapeTuple([rows])] if self.symbolic else []
        return xs, [*ws, *bs, *told], self._wanted(xs, ws, bs)

    def _wanted(self, xs: list[Any], ws: list[Any], bs: list[Any]) -> list[list[Any]]:
        found: list[Any] = []
        for w, b in zip(ws, bs, strict=True):
            if self.kind == "allgather":
                y = join(xs, self.axis) @ w
                found.append([np.maximum(y + b, 0) if self.bias else y] * self.ranks)
            else:
                options = {"reduction": self.reduction, "axis": self.axis}
                found.append(results_of(self.kind, [x @ w for x in xs], **options))
        return list(map(list, zip(*found, strict=True)))
