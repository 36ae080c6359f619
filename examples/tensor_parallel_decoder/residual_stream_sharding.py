# SPDX-License-Identifier: Apache-2.0
"""Place the residual stream: replicated on every worker, or sharded by rows.

Attention and MLP read all rows of the sequence and return partial sums of them. The embedding, the
norms and the residual additions work on the rows that the worker has.

                    replicated     sharded: n rows on w workers
    token rows      unchanged      take_shard: ceil(n / w) rows, padded with zeros
    before a block  nothing        all-gather
    after a block   all-reduce     reduce-scatter
    the last row    the last one   broadcast from the worker that has it

Shards have equal sizes, so the blocks compute up to w - 1 rows of padding, which are never read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import tvm
from tvm import tirx
from tvm.relax.frontend import nn

from tvm_ipc import comm
from tvm_ipc.tvm_moved_names import Analyzer
from tvm_ipc.tvm_private_names import expr_of


@dataclass(frozen=True)
class Replicated:
    """Every worker has all rows of the residual stream."""

    workers: int

    def own(self, tokens: nn.Tensor) -> nn.Tensor:
        """Return the tokens whose rows this worker has."""
        return tokens

    def gather(self, x: nn.Tensor) -> nn.Tensor:
        """Return the rows of all workers."""
        return x

    def reduce(self, x: nn.Tensor) -> nn.Tensor:
        """Return this worker's rows of the sum over all workers."""
        return nn.op.ccl_allreduce(x, "sum", in_group=False) if self.workers > 1 else x

    def last(self, x: nn.Tensor, count: Any) -> nn.Tensor:
        """Return row `count - 1`."""
        return _row(x, count - 1)


@dataclass(frozen=True)
class SequenceParallel:
    """Each worker has a shard of the rows of the residual stream."""

    workers: int

    def own(self, tokens: nn.Tensor) -> nn.Tensor:
        """Return the tokens whose rows this worker has, padded with zeros."""
        shard = comm.take_shard(expr_of(tokens), axis=0, workers=self.workers, uneven=True)
        return nn.op.wrap_nested(shard, "own_tokens")

    def gather(self, x: nn.Tensor) -> nn.Tensor:
        """Return the rows of all workers, including the padding."""
        return nn.op.wrap_nested(comm.allgather(expr_of(x), workers=self.workers), "gathered")

    def reduce(self, x: nn.Tensor) -> nn.Tensor:
        """Return this worker's rows of the sum over all workers."""
        own = comm.reduce_scatter(expr_of(x), "sum", workers=self.workers)
        return nn.op.wrap_nested(own, "own_rows")

    def last(self, x: nn.Tensor, count: Any) -> nn.Tensor:
        """Return row `count - 1` of all workers' rows, from the worker that has it."""
        # The maximum avoids a division by zero for an empty sequence.
        rows_per_worker = tirx.max(x.shape[0], 1)
        index = count - 1
        row = _row(x, tirx.floormod(index, rows_per_worker))
        root = Analyzer().simplify(tirx.floordiv(index, rows_per_worker))
        return nn.op.wrap_nested(comm.broadcast(expr_of(row), root), "last_row")


Residual: TypeAlias = Replicated | SequenceParallel


def _row(x: nn.Tensor, index: Any) -> nn.Tensor:
    """Return one row, as a tensor with one row."""
    rows, width = x.shape
    if isinstance(rows, int) and rows == 1:
        return x

    def row(tensor: Any, position: Any) -> Any:
        return tvm.te.compute((1, width), lambda _, j: tensor[position, j], name="last")

    return nn.op.tensor_expr_op(row, "last", [x, index])
