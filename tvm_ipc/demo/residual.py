# SPDX-License-Identifier: Apache-2.0
"""Where the residual stream lies: all rows on every worker, or on each worker some of them.

What the layers between do is the same. Attention and MLP take whole rows of the whole sequence, and
give summands of such; the embedding, the norms and the additions take the rows that are there.

                    on every worker      in parts, of n rows on w workers
    rows of tokens  as they are          take_part: ceil(n / w), with zeros after the end
    before a block  nothing              all-gather
    after a block   all-reduce           reduce-scatter
    the last row    the last one         broadcast of the worker that has it

Parts are equal, so the blocks compute up to w - 1 rows after the end, which nothing else looks at.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import tvm
from tvm import tirx
from tvm.relax.frontend import nn

from tvm_ipc import comm


@dataclass(frozen=True)
class OnEveryWorker:
    """Each worker has all rows, and does norms and additions of all of them."""

    workers: int

    def own(self, tokens: nn.Tensor) -> nn.Tensor:
        """Return the tokens whose rows the worker has."""
        return tokens

    def gather(self, x: nn.Tensor) -> nn.Tensor:
        """Return the rows of all workers."""
        return x

    def reduce(self, x: nn.Tensor) -> nn.Tensor:
        """Return the worker's rows of the sum over all workers."""
        return nn.op.ccl_allreduce(x, "sum", in_group=False) if self.workers > 1 else x

    def last(self, x: nn.Tensor, count: Any) -> nn.Tensor:
        """Return the last of so many rows."""
        return _row(x, count - 1)


@dataclass(frozen=True)
class InParts:
    """Each worker has some rows, one part of the sequence."""

    workers: int

    def own(self, tokens: nn.Tensor) -> nn.Tensor:
        """Return the tokens whose rows the worker has, and some zeros if those are too few."""
        part = comm.take_part(tokens._expr, axis=0, workers=self.workers, uneven=True)
        return nn.op.wrap_nested(part, "own_tokens")

    def gather(self, x: nn.Tensor) -> nn.Tensor:
        """Return the rows of all workers, and what is after their end."""
        return nn.op.wrap_nested(comm.allgather(x._expr, workers=self.workers), "gathered")

    def reduce(self, x: nn.Tensor) -> nn.Tensor:
        """Return the worker's rows of the sum over all workers."""
        own = comm.reduce_scatter(x._expr, "sum", workers=self.workers)
        return nn.op.wrap_nested(own, "own_rows")

    def last(self, x: nn.Tensor, count: Any) -> nn.Tensor:
        """Return the last of so many rows, of all workers together."""
        # Without rows there is no last one; but nobody divides by zero.
        part = tirx.max(x.shape[0], 1)
        place = count - 1
        row = _row(x, tirx.floormod(place, part))
        root = tvm.sym.Analyzer().simplify(tirx.floordiv(place, part))
        return nn.op.wrap_nested(comm.broadcast(row._expr, root), "last_row")


Residual: TypeAlias = OnEveryWorker | InParts


def _row(x: nn.Tensor, place: Any) -> nn.Tensor:
    """Return a row."""
    rows, width = x.shape
    if isinstance(rows, int) and rows == 1:
        return x

    def row(every: Any, place: Any) -> Any:
        return tvm.te.compute((1, width), lambda _, j: every[place, j], name="last")

    return nn.op.tensor_expr_op(row, "last", [x, place])
