# SPDX-License-Identifier: Apache-2.0
"""Candidates for overlap: a collective, its matmuls, and the layouts of their rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, lcm
from typing import Any

import tvm
from tvm import tirx

from tvm_ipc.analysis.program_order import Step
from tvm_ipc.analysis.shape_algebra import product_of
from tvm_ipc.comm.collective_attrs import CollectiveAttrs
from tvm_ipc.comm.extent_arithmetic import constant, item_bytes
from tvm_ipc.packed_functions.program_function_declarations import KERNEL_ALIGNMENT


class NotOverlappableError(Exception):
    """Raised for a collective that cannot be overlapped; the message is the reason."""


@dataclass(eq=False)
class MatmulChain:
    """A matmul and the elementwise operators and row-preserving reshapes around it."""

    matmul: Step
    #: The elementwise operators and reshapes after the matmul, in order.
    epilogue: list[Step]
    #: The reshape of the gathered tensor before the matmul.
    reshape: Step | None = None

    @property
    def last(self) -> Step:
        """The binding of the result."""
        return self.epilogue[-1] if self.epilogue else self.matmul

    @property
    def steps(self) -> list[Step]:
        """All bindings of the chain, in order."""
        return [*([self.reshape] if self.reshape else []), self.matmul, *self.epilogue]


@dataclass(eq=False)
class RowLayout:
    """The layout of a tensor as rows along an axis; axes before it enumerate blocks of rows."""

    shape: list[Any]
    axis: int
    dtype: str

    @property
    def blocks(self) -> int:
        """The number of blocks of rows; 0 if it is unknown."""
        blocks = 1
        for extent in self.shape[: self.axis]:
            blocks *= constant(extent) or 0
        return blocks

    @property
    def item_bytes(self) -> int:
        """The size of an element in bytes."""
        return item_bytes(tvm.DataType(self.dtype))

    @property
    def row_bytes(self) -> Any:
        """The size of a row in bytes, symbolic if it is unknown."""
        return product_of(self.shape[self.axis + 1 :], self.item_bytes)

    def shape_of_rows(self, rows: Any) -> list[Any]:
        """Return the shape of a number of rows of one block."""
        one = tirx.IntImm("int64", 1)
        return [*([one] * self.axis), rows, *self.shape[self.axis + 1 :]]


@dataclass(eq=False)
class Candidate:
    """A collective and the matmuls that can be overlapped with it."""

    collective: Step
    attrs: CollectiveAttrs
    ranks: int
    chains: list[MatmulChain]
    #: The number of rows in the shard of a rank, in each block.
    rows: Any
    #: The tensor whose rows are multiplied: the gathered shard, or the matmul's left operand.
    operand: Any
    #: The layout of the matmuls' left operand with the rows of all ranks.
    input_layout: RowLayout
    #: The layout of the result of each chain with the rows of all ranks.
    output_layouts: list[RowLayout]
    #: The number of rows in each block, fewer than those of all shards if shards are uneven.
    extent: Any
    #: The rows of an all-reduce that cannot be split evenly among the ranks.
    remainder: Any = 0

    @property
    def kind(self) -> str:
        """The kind of the collective."""
        return str(self.attrs.kind)

    @property
    def uneven(self) -> bool:
        """Return whether shards have rows beyond the end."""
        return bool(self.attrs.uneven)

    @property
    def unit(self) -> int:
        """The number of rows of which chunks must be multiples to be aligned for kernels."""
        return unit_of(self.layouts)

    @property
    def layouts(self) -> list[RowLayout]:
        """The layouts of the input and of the outputs."""
        return [self.input_layout, *self.output_layouts]


def unit_of(layouts: Sequence[RowLayout]) -> int:
    """Return the number of rows of which chunks must be multiples to be aligned for kernels."""
    sizes = [layout.row_bytes for layout in layouts]
    sizes = [size if isinstance(size, int) else constant(size) for size in sizes]
    return lcm(*(KERNEL_ALIGNMENT // gcd(KERNEL_ALIGNMENT, size) for size in sizes if size))
