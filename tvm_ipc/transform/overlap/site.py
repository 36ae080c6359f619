# SPDX-License-Identifier: Apache-2.0
"""What is found: a collective, the products beside it, and how their rows lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, lcm
from typing import Any

import tvm
from tvm import tirx

from tvm_ipc.comm.attributes import CollectiveAttrs
from tvm_ipc.comm.extents import constant, item_bytes
from tvm_ipc.contract.programs import KERNEL_ALIGNMENT
from tvm_ipc.transform.ir.uses import Place


class LeftAloneError(Exception):
    """Why a collective is left alone."""


@dataclass
class MatrixProduct:
    """A matrix product, and what is done with it element by element, or reshaped by rows."""

    matmul: Place
    following: list[Place]
    #: What reshapes what is gathered for it.
    reshape: Place | None = None

    @property
    def last(self) -> Place:
        """The binding of its result."""
        return self.following[-1] if self.following else self.matmul

    @property
    def bindings(self) -> list[Place]:
        """All that stands for the product."""
        return [*([self.reshape] if self.reshape else []), self.matmul, *self.following]


def product_of(extents: Sequence[Any], first: int = 1) -> Any:
    """Return a number times extents, a number where all of these are."""
    found: Any = first
    for extent in extents:
        number = constant(extent)
        found = found * (extent if number is None else number)
    return found


@dataclass
class Layout:
    """How the rows of a tensor lie along an axis."""

    shape: list[Any]
    axis: int
    dtype: str

    @property
    def outer(self) -> int:
        """How many blocks of rows there are, one after the other."""
        found = 1
        for extent in self.shape[: self.axis]:
            found *= constant(extent) or 0
        return found

    @property
    def item_bytes(self) -> int:
        """The bytes of an element."""
        return item_bytes(tvm.DataType(self.dtype))

    @property
    def row(self) -> Any:
        """The bytes of a row, symbolic where they are not known."""
        return product_of(self.shape[self.axis + 1 :], self.item_bytes)

    def of_rows(self, rows: Any) -> list[Any]:
        """Return the shape of so many rows of one block."""
        one = tirx.IntImm("int64", 1)
        return [*([one] * self.axis), rows, *self.shape[self.axis + 1 :]]


@dataclass
class OverlapSite:
    """A collective, and the products that go on beside it."""

    collective: Place
    attrs: CollectiveAttrs
    ranks: int
    products: list[MatrixProduct]
    rows: Any  #: of the part of one rank, in each block
    given: Any  #: the tensor whose rows the products multiply
    left: Layout  #: of what they multiply, all ranks together
    right: list[Layout]  #: of what they give, likewise
    #: Rows of each block that there are, fewer than those of the parts if these are uneven.
    extent: Any
    #: Rows of an all-reduce that are left over, fewer than there are ranks, times the unit.
    rest: Any = 0

    @property
    def kind(self) -> str:
        """What the collective is."""
        return str(self.attrs.kind)

    @property
    def uneven(self) -> bool:
        """Whether parts have rows beyond the end."""
        return bool(self.attrs.uneven)

    @property
    def unit(self) -> int:
        """Chunks of a multiple of so many rows begin where kernels expect it."""
        return unit_of(self.all)

    @property
    def all(self) -> list[Layout]:
        """The layouts of what is multiplied, and of what is given."""
        return [self.left, *self.right]


def unit_of(layouts: Sequence[Layout]) -> int:
    """Return of how many rows chunks are multiples, so that all begin where kernels expect it."""
    rows = [constant(one.row) if not isinstance(one.row, int) else one.row for one in layouts]
    return lcm(*(KERNEL_ALIGNMENT // gcd(KERNEL_ALIGNMENT, one) for one in rows if one))
