# SPDX-License-Identifier: Apache-2.0
"""Matrix products whose rows are gathered before them, or summed over ranks after them.

    whole = R.comm.allgather(x, axis=a)       y = R.matmul(x, w, out_dtype="float32")
    h = R.matmul(whole, w)                    h = R.astype(y, "bfloat16")
    z = R.nn.relu(R.add(h, bias))             z = R.comm.reduce_scatter(h, "sum", axis=a)
                                              or R.comm.allreduce(h, "sum")

The rows of a product do not depend on each other, nor does what is done element by element
afterwards, so any number of rows can be done when they are there. Several products may share what
is gathered.

Analysis only: what is found are sites, and the pass puts chunks in their places.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, lcm
from typing import Any, Final

import tvm
from tvm import relax, tirx

from tvm_ipc.comm.attributes import CollectiveAttrs
from tvm_ipc.comm.operator import NAME as COLLECTIVE
from tvm_ipc.comm.operator import (
    constant,
    divides,
    dtype_of,
    extents,
    item_bytes,
    largest_part,
    same_extents,
    show_extent,
)
from tvm_ipc.contract.programs import KERNEL_ALIGNMENT
from tvm_ipc.transform.convert_ccl import from_ccl
from tvm_ipc.transform.ir.uses import Place, Uses, binds, operator_of
from tvm_ipc.transform.rules.elementwise import BROADCASTING, UNARY

_KINDS: Final = ("allgather", "reduce_scatter", "allreduce")
_MATMUL: Final = "relax.matmul"
_ELEMENTWISE: Final = tuple(f"relax.{name}" for name in (*UNARY, *BROADCASTING))


class LeftAloneError(Exception):
    """Why a collective is left alone."""


@dataclass
class MatrixProduct:
    """A matrix product, and what is done with it element by element."""

    matmul: Place
    following: list[Place]

    @property
    def last(self) -> Place:
        """The binding of its result."""
        return self.following[-1] if self.following else self.matmul


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
        found: Any = self.item_bytes
        for extent in self.shape[self.axis + 1 :]:
            number = constant(extent)
            found = found * (extent if number is None else number)
        return found

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

    @property
    def kind(self) -> str:
        """What the collective is."""
        return str(self.attrs.kind)

    @property
    def unit(self) -> int:
        """Chunks of a multiple of so many rows begin where kernels expect it."""
        rows = [constant(one.row) if not isinstance(one.row, int) else one.row for one in self.all]
        return lcm(*(KERNEL_ALIGNMENT // gcd(KERNEL_ALIGNMENT, one) for one in rows if one))

    @property
    def all(self) -> list[Layout]:
        """The layouts of what is multiplied, and of what is given."""
        return [self.left, *self.right]


def collective_of(place: Place) -> CollectiveAttrs | None:
    """Return what is gathered or summed there, if anything is."""
    if not isinstance(place.binding, relax.VarBinding):
        return None
    value = place.binding.value
    if operator_of(value) != COLLECTIVE:
        value = from_ccl(value)
    attrs = getattr(value, "attrs", None)
    return attrs if isinstance(attrs, CollectiveAttrs) and attrs.kind in _KINDS else None


def find_site(place: Place, attrs: CollectiveAttrs, ranks: int | None, uses: Uses) -> OverlapSite:
    """Return the site of a collective, or raise why it is left alone."""
    if ranks is None:
        raise LeftAloneError("of how many ranks it is, the pass was not told")
    if ranks == 1:
        raise LeftAloneError("it is of one rank")
    if attrs.uneven:
        raise LeftAloneError("its parts are uneven")
    find = find_gather if attrs.kind == "allgather" else _sum
    site = find(place, attrs, ranks, uses)
    if site.left.outer < 1:
        raise LeftAloneError("how many blocks of rows there are is not known")
    if not isinstance(site.left.row, int):
        raise LeftAloneError("the extents of its rows are not known")
    aligned = tvm.sym.Analyzer().can_prove_equal
    block = site.rows * site.left.row
    begins = site.kind != "allgather" or site.left.outer > 1
    if begins and not aligned(tirx.floormod(block, KERNEL_ALIGNMENT), 0):
        raise LeftAloneError(
            f"a rank has {show_extent(block)} bytes of rows: kernels could not begin at each "
            f"rank's, for these are no multiple of {KERNEL_ALIGNMENT}"
        )
    check_written(site, uses)
    return site


def check_written(site: OverlapSite, uses: Uses) -> None:
    """Raise an error if something may be written between a collective and its products."""
    if uses.written(*_extent(site)):
        raise LeftAloneError("a call before the end of the products may write into what is read")


def _extent(site: OverlapSite) -> tuple[int, int]:
    """Return the first and the last place of a site."""
    places = [site.collective.at]
    places += [one.at for product in site.products for one in (product.matmul, product.last)]
    return min(places), max(places)


def find_gather(place: Place, attrs: CollectiveAttrs, ranks: int, uses: Uses) -> OverlapSite:
    """Return the site of an all-gather, or raise why products are not done row by row."""
    whole = place.binding.var
    shape = _shape("what is gathered", whole)
    given = place.binding.value.args[0]
    axis = int(attrs.concat_axis or 0)
    if not isinstance(given, relax.Var):
        raise LeftAloneError("what is gathered is no variable")
    products = []
    for user in uses.users[whole]:
        if user.block is not place.block or not binds(user, _MATMUL):
            raise LeftAloneError("something else than a matrix product uses what is gathered")
        product = MatrixProduct(user, [])
        _check_matmul(user.binding.value, whole, axis)
        _follow(product, axis, uses)
        products.append(product)
    if not products:
        raise LeftAloneError("nothing uses what is gathered")
    left = Layout(shape, axis, dtype_of(whole.ty))
    right = [_layout(product.last.binding.var, axis) for product in products]
    rows = _shape("x", given)[axis]
    return OverlapSite(place, attrs, ranks, products, rows, given, left, right)


def _sum(place: Place, attrs: CollectiveAttrs, ranks: int, uses: Uses) -> OverlapSite:
    partial = place.binding.value.args[0]
    total = _shape("what it gives", place.binding.var)
    scatters = attrs.kind == "reduce_scatter"
    axis = int(attrs.split_axis or 0) if scatters else _rows_of(total)
    product = MatrixProduct(_product_of(partial, place, uses), [])
    given = product.matmul.binding.value.args[0]
    _check_matmul(product.matmul.binding.value, given, axis)
    _follow(product, axis, uses)
    if not product.last.binding.var.same_as(partial):
        raise LeftAloneError("what follows the matrix product needs other rows, too")
    if len(uses.users[partial]) != 1:
        raise LeftAloneError("something else uses the matrix product, too")
    left = Layout(_shape("the left operand", given), axis, dtype_of(given.ty))
    if not scatters and not divides(ranks, total[axis]):
        raise LeftAloneError(
            f"it has {show_extent(total[axis])} rows, which may not divide among ranks"
        )
    rows = total[axis] if scatters else largest_part(total[axis], ranks)
    right = [_layout(partial, axis)]
    return OverlapSite(place, attrs, ranks, [product], rows, given, left, right)


def _product_of(partial: Any, collective: Place, uses: Uses) -> Place:
    """Return the matrix product that something is, or is made of element by element."""
    while isinstance(partial, relax.Var):
        place = uses.places.get(partial)
        if place is None or place.block is not collective.block:
            break
        if binds(place, _MATMUL):
            return place
        if not binds(place, *_ELEMENTWISE):
            break
        partial = place.binding.value.args[0]
    raise LeftAloneError("what it reduces is no matrix product")


def _rows_of(shape: list[Any]) -> int:
    """Return the first axis along which there is more than one row."""
    axes = range(max(1, len(shape) - 1))
    return next((k for k in axes if constant(shape[k]) != 1), len(axes) - 1)


def _check_matmul(matmul: relax.Call, left: Any, axis: int) -> None:
    first, second = matmul.args
    if not isinstance(left, relax.Var) or not first.same_as(left):
        raise LeftAloneError("it is not the left operand of the matrix product")
    if second.same_as(left) or not isinstance(second.ty, relax.TensorType) or second.ty.ndim != 2:
        raise LeftAloneError("the right operand of the matrix product is no matrix")
    if axis >= int(left.ty.ndim) - 1:
        raise LeftAloneError("it is along the axis over which the matrix product sums")


def _follow(product: MatrixProduct, axis: int, uses: Uses) -> None:
    """Find what is done element by element with a product, as long as nothing else uses it."""
    while True:
        variable = product.last.binding.var
        users = uses.users[variable]
        if len(users) != 1 or users[0].block is not product.matmul.block:
            return
        (user,) = users
        if not binds(user, *_ELEMENTWISE) or not _by_rows(user, variable, axis):
            return
        product.following.append(user)


def _by_rows(user: Place, variable: Any, axis: int) -> bool:
    """Whether rows of the result need these rows, and nothing else that depends on rows."""
    result, ty = user.binding.var.ty, variable.ty
    if not isinstance(result, relax.TensorType) or not same_extents(
        extents(result) or [], extents(ty) or []
    ):
        return False
    for operand in user.binding.value.args:
        if operand.same_as(variable) or not isinstance(operand.ty, relax.TensorType):
            continue
        dims = extents(operand.ty)
        if dims is None:
            return False
        leading = dims[: max(0, len(dims) - (int(ty.ndim) - axis - 1))]
        if any(constant(extent) != 1 for extent in leading):
            return False
    return True


def _layout(variable: Any, axis: int) -> Layout:
    return Layout(_shape("a product", variable), axis, dtype_of(variable.ty))


def _shape(what: str, tensor: Any) -> list[Any]:
    ty = tensor.ty
    dims = extents(ty) if isinstance(ty, relax.TensorType) and ty.dtype is not None else None
    if dims is not None and ty.vdevice is not None:
        raise LeftAloneError(f"{what} is bound to a device")
    if dims is None:
        raise LeftAloneError(f"the shape of {what} is not known")
    return dims
