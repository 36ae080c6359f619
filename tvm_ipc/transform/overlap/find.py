# SPDX-License-Identifier: Apache-2.0
"""Matrix products whose rows are gathered before them, or summed over ranks after them.

    whole = R.comm.allgather(x, axis=a)       y = R.matmul(x, w, out_dtype="float32")
    h = R.matmul(whole, w)                    h = R.astype(y, "bfloat16")
    z = R.nn.relu(R.add(h, bias))             z = R.comm.reduce_scatter(h, "sum", axis=a)
                                              or R.comm.allreduce(h, "sum")

The rows of a product do not depend on each other, nor does what is done element by element
afterwards, so any number of rows can be done when they are there. Several products may share what
is gathered. Reshapes that leave rows as they are, such as those of a batch to a matrix, may stand
between; those of an all-reduce are counted through.

Analysis only: what is found are sites, and the pass puts chunks in their places.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import tvm
from tvm import relax, tirx

from tvm_ipc.comm.attributes import CollectiveAttrs
from tvm_ipc.comm.extents import constant, divides, show_extent
from tvm_ipc.comm.operator import NAME as COLLECTIVE
from tvm_ipc.comm.operator import dtype_of, extents, same_extents
from tvm_ipc.contract.programs import KERNEL_ALIGNMENT
from tvm_ipc.transform.convert_ccl import from_ccl
from tvm_ipc.transform.ir.uses import Place, Uses, binds, operator_of
from tvm_ipc.transform.overlap.site import (
    Layout,
    LeftAloneError,
    MatrixProduct,
    OverlapSite,
    product_of,
    unit_of,
)
from tvm_ipc.transform.rules.elementwise import BROADCASTING, UNARY

_KINDS: Final = ("allgather", "reduce_scatter", "allreduce")
_MATMUL: Final = "relax.matmul"
_RESHAPE: Final = "relax.reshape"
#: What gives zeros of zeros.
_KEEP_ZEROS: Final = ("relax.astype", "relax.negative", _RESHAPE)
_ELEMENTWISE: Final = tuple(f"relax.{name}" for name in (*UNARY, *BROADCASTING))


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
    find = _gather if attrs.kind == "allgather" else _sum
    site = find(place, attrs, ranks, uses)
    if site.left.outer < 1:
        raise LeftAloneError("how many blocks of rows there are is not known")
    aligned = tvm.sym.Analyzer().can_prove_equal
    block = site.rows * _row(site.left)
    begins = site.kind != "allgather" or site.left.outer > 1
    if begins and not aligned(tirx.floormod(block, KERNEL_ALIGNMENT), 0):
        raise LeftAloneError(
            f"a rank has {show_extent(block)} bytes of rows: kernels could not begin at each "
            f"rank's, for these are no multiple of {KERNEL_ALIGNMENT}"
        )
    check_written(site, uses)
    return site


def _row(layout: Layout) -> int:
    if not isinstance(layout.row, int):
        raise LeftAloneError("the extents of its rows are not known")
    return layout.row


def check_written(site: OverlapSite, uses: Uses) -> None:
    """Raise an error if something may be written between a collective and its products."""
    if uses.written(*_extent(site)):
        raise LeftAloneError("a call before the end of the products may write into what is read")


def _extent(site: OverlapSite) -> tuple[int, int]:
    """Return the first and the last place of a site."""
    places = [site.collective.at]
    places += [one.at for product in site.products for one in product.bindings]
    return min(places), max(places)


def find_gather(place: Place, attrs: CollectiveAttrs, ranks: int, uses: Uses) -> OverlapSite:
    """Return the site of an all-gather, or raise why products are not done row by row."""
    if attrs.uneven:
        raise LeftAloneError("its parts are uneven")
    site = _gather(place, attrs, ranks, uses)
    if any(product.reshape for product in site.products):
        raise LeftAloneError("something else than a matrix product uses what is gathered")
    return site


def _gather(place: Place, attrs: CollectiveAttrs, ranks: int, uses: Uses) -> OverlapSite:
    whole = place.binding.var
    shape = _shape("what is gathered", whole)
    given = place.binding.value.args[0]
    axis = int(attrs.concat_axis or 0)
    if not isinstance(given, relax.Var):
        raise LeftAloneError("what is gathered is no variable")
    products = []
    for user, reshape in _users_by_rows(whole, uses):
        if user.block is not place.block or not binds(user, _MATMUL):
            raise LeftAloneError("something else than a matrix product uses what is gathered")
        product = MatrixProduct(user, [], reshape)
        _check_matmul(user.binding.value, whole if reshape is None else reshape.binding.var)
        _check_axis(axis, shape)
        _follow(product, len(shape), axis, uses)
        products.append(product)
    if not products:
        raise LeftAloneError("nothing uses what is gathered")
    rows = _shape("x", given)[axis]
    of_all = [*shape[:axis], rows * ranks, *shape[axis + 1 : -1]]
    left = Layout([*of_all, shape[-1]], axis, dtype_of(whole.ty))
    right = [_layout(product, of_all, axis) for product in products]
    return OverlapSite(place, attrs, ranks, products, rows, given, left, right, shape[axis])


def _users_by_rows(variable: Any, uses: Uses) -> Iterator[tuple[Place, Place | None]]:
    """Yield who uses a tensor, also after a reshape, and the reshape."""
    for user in uses.users[variable]:
        if binds(user, _RESHAPE) and _keeps_rows(user) and uses.users[user.binding.var]:
            for one in uses.users[user.binding.var]:
                yield one, user
        else:
            yield user, None


def _sum(place: Place, attrs: CollectiveAttrs, ranks: int, uses: Uses) -> OverlapSite:
    partial = place.binding.value.args[0]
    shape = _shape("what it reduces", partial)
    scatters = attrs.kind == "reduce_scatter"
    product = MatrixProduct(_product_of(partial, place, uses), [])
    given = product.matmul.binding.value.args[0]
    _check_matmul(product.matmul.binding.value, given)
    inner = _shape("the left operand", given)[-1]
    if scatters:
        axis, extent = int(attrs.split_axis or 0), shape[int(attrs.split_axis or 0)]
        _check_axis(axis, shape)
        rows: Any = _shape("what it gives", place.binding.var)[axis]
        of_all = [*shape[:axis], rows * ranks, *shape[axis + 1 : -1]]
    else:
        axis, extent, of_all = 0, _product_of_extents(shape[:-1]), [1]
    _follow(product, len(of_all) + 1, axis, uses)
    if not product.last.binding.var.same_as(partial):
        raise LeftAloneError("what follows the matrix product needs other rows, too")
    if len(uses.users[partial]) != 1:
        raise LeftAloneError("something else uses the matrix product, too")
    left = Layout([*of_all, inner], axis, dtype_of(given.ty))
    right = [_layout(product, of_all, axis)]
    if scatters:
        if attrs.uneven and any(not binds(one, *_KEEP_ZEROS) for one in product.following):
            raise LeftAloneError(
                "its parts are uneven, and what follows the matrix product makes something of the "
                "zeros beyond the end"
            )
        return OverlapSite(place, attrs, ranks, [product], rows, given, left, right, extent)
    _row(left), _row(right[0])
    unit = unit_of([left, *right])
    rows, rest = _divided(extent, ranks, unit)
    if constant(rows) == 0 and constant(extent) != 0:
        each = f"{unit} row{'s' * (unit != 1)}"
        raise LeftAloneError(
            f"it has {show_extent(extent)} rows, too few for {ranks} ranks to have {each} each"
        )
    left.shape[0] = right[0].shape[0] = rows * ranks
    return OverlapSite(place, attrs, ranks, [product], rows, given, left, right, extent, rest)


def _divided(extent: Any, ranks: int, unit: int) -> tuple[Any, Any]:
    """Return how many rows each rank has if it has whole units of them, and what is left over."""
    analyzer, number = tvm.sym.Analyzer(), constant(extent)
    if number is not None:
        rows = number // (ranks * unit) * unit
        return rows, number - ranks * rows
    rows = analyzer.simplify(tirx.floordiv(extent, ranks * unit) * unit)
    rest = analyzer.simplify(extent - rows * ranks)
    return rows, 0 if divides(ranks * unit, extent) else rest


def _product_of_extents(shape: list[Any]) -> Any:
    found = product_of(shape)
    return found if isinstance(found, int) else tvm.sym.Analyzer().simplify(found)


def _product_of(partial: Any, collective: Place, uses: Uses) -> Place:
    """Return the matrix product that something is, or is made of element by element."""
    while isinstance(partial, relax.Var):
        place = uses.places.get(partial)
        if place is None or place.block is not collective.block:
            break
        if binds(place, _MATMUL):
            return place
        if not (binds(place, *_ELEMENTWISE) or (binds(place, _RESHAPE) and _keeps_rows(place))):
            break
        partial = place.binding.value.args[0]
    raise LeftAloneError("what it reduces is no matrix product")


def _keeps_rows(reshape: Place) -> bool:
    """Whether a reshape leaves the last axis as it is."""
    before, after = (
        extents(one.ty) if isinstance(one.ty, relax.TensorType) else None
        for one in (reshape.binding.value.args[0], reshape.binding.var)
    )
    if not before or not after or min(len(before), len(after)) < 2:
        return False
    return constant(before[-1]) != 0 and same_extents(before[-1:], after[-1:])


def _check_matmul(matmul: relax.Call, left: Any) -> None:
    first, second = matmul.args
    if not isinstance(left, relax.Var) or not first.same_as(left):
        raise LeftAloneError("it is not the left operand of the matrix product")
    if second.same_as(left) or not isinstance(second.ty, relax.TensorType) or second.ty.ndim != 2:
        raise LeftAloneError("the right operand of the matrix product is no matrix")


def _check_axis(axis: int, shape: list[Any]) -> None:
    if axis >= len(shape) - 1:
        raise LeftAloneError("it is along the axis over which the matrix product sums")


def _follow(product: MatrixProduct, ndim: int, axis: int, uses: Uses) -> None:
    """Find what is done by rows with a product, as long as nothing else uses it.

    Parameters
    ----------
    ndim : of what is gathered, or summed.
    axis : of it, along which the rows are.
    """
    # Of what is reshaped only the columns are certainly within a row.
    shaped = product.reshape is None and int(product.matmul.binding.var.ty.ndim) == ndim
    while True:
        variable = product.last.binding.var
        users = uses.users[variable]
        if len(users) != 1 or users[0].block is not product.matmul.block:
            return
        (user,) = users
        if binds(user, _RESHAPE) and _keeps_rows(user):
            shaped = False
        else:
            within = ndim - axis - 1 if shaped else 1
            if not binds(user, *_ELEMENTWISE) or not _by_rows(user, variable, within):
                return
        product.following.append(user)


def _by_rows(user: Place, variable: Any, within: int) -> bool:
    """Whether rows of the result need these rows, and nothing else that depends on rows.

    Parameters
    ----------
    within : how many axes at the end are within a row.
    """
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
        leading = dims[: max(0, len(dims) - within)]
        if any(constant(extent) != 1 for extent in leading):
            return False
    return True


def _layout(product: MatrixProduct, rows: list[Any], axis: int) -> Layout:
    last = product.last.binding.var
    return Layout([*rows, _shape("a product", last)[-1]], axis, dtype_of(last.ty))


def _shape(what: str, tensor: Any) -> list[Any]:
    ty = tensor.ty
    dims = extents(ty) if isinstance(ty, relax.TensorType) and ty.dtype is not None else None
    if dims is not None and ty.vdevice is not None:
        raise LeftAloneError(f"{what} is bound to a device")
    if dims is None:
        raise LeftAloneError(f"the shape of {what} is not known")
    return dims
