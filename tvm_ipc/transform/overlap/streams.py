# SPDX-License-Identifier: Apache-2.0
"""Chunks of a product whose rows are gathered by works: what an axis marked for streams becomes.

Before, with 2 workers, y marked along axis 0:
    whole = R.comm.allgather(x, axis=1, ...)     # x: (3, 1, m, k), whole: (3, 2, m, k)
    y = R.matmul(whole, w)

After, with 2 streams:
    gathered = R.builtin.alloc_tensor(R.shape([2, 2, m, k]), ...)
    rows = R.comm.view(gathered, <its first half>)
    work = R.comm.post(R.comm.allgather(<chunk 0 of x>, ...), rows)
    rows1 = R.comm.view(gathered, <its second half>)
    work1 = R.comm.post(R.comm.allgather(<chunk 1 of x>, ...), rows1)
    _ = R.comm.wait(work)
    part = R.matmul(rows, w)
    rows2 = R.comm.view(gathered, <its first half>)
    work2 = R.comm.post(R.comm.allgather(<chunk 2 of x>, ...), rows2)
    _ = R.comm.wait(work1)
    part1 = R.matmul(rows1, w)
    _ = R.comm.wait(work2)
    part2 = R.matmul(rows2, w)
    y = R.call_dps_packed("tvm_ipc.join", (0, R.shape([...]), part, part1, part2), ...)

On a GPU chunk i would be on stream i mod n: the gather of chunk i + n begins when the product of
chunk i is done, and all that was begun has ended at the end. On a CPU a rank has one thread for
works and one for the program, so a stream says nothing that the order of the posts does not: with n
streams the gathers up to that of chunk i + n - 1 are posted before the product of chunk i, and
there are n places to gather in. `PlaceParts` has the products written where they are joined.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import prod
from typing import Any

import tvm
from tvm import relax, tirx

from tvm_ipc import comm
from tvm_ipc.comm.operator import constant
from tvm_ipc.transform.ir.build import alloc
from tvm_ipc.transform.ir.collectives import name_of
from tvm_ipc.transform.ir.rewrite import rewrite
from tvm_ipc.transform.ir.uses import Place, Uses, binds
from tvm_ipc.transform.overlap.chunks import Emission
from tvm_ipc.transform.overlap.find import (
    ALIGNMENT,
    LeftAloneError,
    MatrixProduct,
    OverlapSite,
    check_written,
    collective_of,
    find_gather,
)


def in_streams(
    function: relax.Function, marked: Sequence[tuple[relax.Expr, int]], streams: int
) -> tuple[relax.Function, list[int | LeftAloneError]]:
    """Return a function with what is marked in chunks, each along an axis.

    And in how many chunks that is, or why it is left alone. The function has no dataflow blocks.
    """
    uses = Uses()
    uses.read(function.body)
    gathers = _Gathers(uses)
    instead: dict[Any, list[relax.Binding]] = {}  # by what is removed, what stands in its place
    said: list[int | LeftAloneError] = []
    for variable, axis in marked:
        try:
            site = gathers.site(variable)
            chunks = _chunks(site, axis)
            _check_users(site, uses)
        except LeftAloneError as refusal:
            said.append(refusal)
            continue
        said.append(chunks)
        if site.collective.binding.var not in instead:  # else another product of it is marked
            instead |= _instead(site, chunks, streams, uses)
    changed = rewrite(function, lambda binding, _: instead.get(binding.var))
    made_of = (changed.params, changed.body, changed.ret_ty)
    pure = function.is_pure and not instead
    return relax.Function(*made_of, pure, changed.attrs, changed.span), said


def _check_users(site: OverlapSite, uses: Uses) -> None:
    """Raise an error if a product is used before all are there, which are made together."""
    end = max(one.at for one in _products(site))
    for product in site.products:
        if any(user.at < end for user in uses.users[product.last.binding.var]):
            raise LeftAloneError("what one product gives is used before another one is there")


def _instead(
    site: OverlapSite, chunks: int, streams: int, uses: Uses
) -> dict[Any, list[relax.Binding]]:
    """Return by the variables of a site's bindings what stands in their places."""
    removed = {site.collective.binding.var, *(one.binding.var for one in _products(site))}
    for product in site.products:
        transposed = transposed_by(product.matmul.binding.value.args[1], uses)
        if transposed is not None:
            users = uses.users[transposed.binding.var]
            if all(one.binding is not None and one.binding.var in removed for one in users):
                removed.add(transposed.binding.var)
    # What chunks need has been bound when the last binding of them is reached.
    last = max(_products(site), key=lambda one: one.at).binding.var
    instead: dict[Any, list[relax.Binding]] = {variable: [] for variable in removed}
    instead[last] = _Pipeline(site, chunks, streams, uses).make()
    return instead


class _Gathers:
    """The all-gathers of a function, by what is made of them."""

    def __init__(self, uses: Uses) -> None:
        self._uses = uses
        self._sites: dict[Any, OverlapSite] = {}
        self._failed: list[tuple[int, str]] = []
        for place in uses.places.values():
            attrs = collective_of(place)
            if attrs is None or attrs.kind != "allgather" or not attrs.workers:
                continue
            try:
                site = find_gather(place, attrs, int(attrs.workers), uses)
                if attrs.uneven:
                    raise LeftAloneError("its parts are uneven")
                check_written(site, uses)
            except LeftAloneError as error:
                of = name_of(place.binding.value.args[0])
                self._failed.append((place.at, f"; of the all-gather of {of} before, {error}"))
                continue
            self._sites |= {one.binding.var: site for one in _products(site)}

    def site(self, marked: relax.Expr) -> OverlapSite:
        """Return the gather of which something marked is made, or raise why there is none."""
        place = self._uses.places.get(marked) if isinstance(marked, relax.Var) else None
        if place is None or place.binding.var not in self._sites:
            before = len(self._failed)
            if place is not None:
                before = bisect_left(self._failed, (place.at, ""))
            why = self._failed[before - 1][1] if before else ""
            raise LeftAloneError(f"it is no product of what an all-gather gives{why}")
        return self._sites[place.binding.var]


def _products(site: OverlapSite) -> list[Place]:
    """Return the bindings of the products, and of what follows them."""
    return [one for product in site.products for one in (product.matmul, *product.following)]


def _chunks(site: OverlapSite, axis: int) -> int:
    """Return how many chunks there are, or raise an error if works cannot bring them."""
    shape, gathered = site.left.shape, site.left.axis
    between = [constant(extent) for extent in shape[1:gathered]]
    if axis != 0 or gathered == 0 or any(extent != 1 for extent in between):
        raise LeftAloneError(
            f"chunks along axis {axis} of what is gathered along axis {gathered} do not lie in one "
            "piece; let the tensor begin with the axes for chunks and for ranks, in this order"
        )
    chunks = constant(shape[0])
    if not chunks:
        raise LeftAloneError(f"there are {shape[0] if chunks is None else 0} chunks")
    return chunks


class _Pipeline(Emission):
    """The bindings of the chunks of a site."""

    def __init__(self, site: OverlapSite, chunks: int, streams: int, uses: Uses) -> None:
        super().__init__(site, 1)
        self._chunks, self._streams, self._uses = chunks, min(streams, chunks), uses

    def make(self) -> list[relax.Binding]:
        """Return them."""
        site = self._site
        slots = self._slots()
        rows: list[relax.Var] = []  # of the chunks whose gather has begun
        works: list[relax.Var] = []
        parts: list[list[relax.Expr]] = [[] for _ in site.products]
        for chunk in range(self._chunks):
            for ahead in range(len(works), min(chunk + self._streams, self._chunks)):
                # Each chunk names its rows anew: what is done with them is not what was done with
                # those that lay there before.
                rows.append(self._slice(*slots[ahead % self._streams], [1, *site.left.shape[1:]]))
                works.append(self._post(ahead, rows[ahead]))
            self._emit("_", comm.wait(works[chunk]))
            for k, product in enumerate(site.products):
                parts[k].append(self._chunk(product, rows[chunk]))
        for product, made, layout in zip(site.products, parts, site.right, strict=True):
            size = layout.row * _count(layout.shape[1 : layout.axis + 1])
            places = [n for chunk in range(self._chunks) for n in (0, 0, size * chunk)]
            self._join(product.last, places, made)
        return self.take()

    def _slots(self) -> list[tuple[relax.Var, int]]:
        """Return where the rows of chunks are gathered, in turns: slices of tensors."""
        left = self._site.left
        each = left.shape[1:]
        size = left.row * _count(each[: left.axis])
        if tvm.sym.Analyzer().can_prove_equal(tirx.floormod(size, ALIGNMENT), 0):
            whole = self._empty([self._streams, *each])
            return [(whole, k) for k in range(self._streams)]
        return [(self._empty([1, *each]), 0) for _ in range(self._streams)]

    def _empty(self, shape: list[Any]) -> relax.Var:
        ty = relax.TensorType(shape, self._site.left.dtype)
        return self._emit("gathered", alloc(relax.ShapeExpr(ty.shape.values), ty, 0, "global"))

    def _post(self, chunk: int, slot: relax.Expr) -> relax.Var:
        """Post the gather of the rows of a chunk."""
        site = self._site
        shape = _shape(site.given)[site.left.axis :]
        rows, attrs = self._slice(site.given, chunk, shape), site.attrs
        workers = attrs.workers if isinstance(attrs.team, str) else None
        gather = comm.allgather(rows, team=attrs.team, workers=workers, backend=attrs.backend)
        return self._emit("work", comm.post(gather, slot))

    def _slice(self, tensor: relax.Expr, at: int, shape: list[Any]) -> relax.Var:
        """Return a part of a tensor, of a shape and after so many of the same."""
        return self._emit("rows", comm.view(tensor, at * _count(shape), shape))

    def _chunk(self, product: MatrixProduct, rows: relax.Expr) -> relax.Var:
        """Return the product of some rows, with what follows it, and what transposes its matrix."""
        left, right = product.matmul.binding.value.args
        instead = {left: rows}
        transposed = transposed_by(right, self._uses)
        if transposed is not None:
            instead[right] = self._emit(str(right.name), transposed.binding.value)
        for place in (product.matmul, *product.following):
            value = place.binding.value
            given = [instead.get(x, x) if isinstance(x, relax.Var) else x for x in value.args]
            call = relax.Call(value.op, given, value.attrs, list(value.ty_args), value.span)
            rows = instead[place.binding.var] = self._emit(str(place.binding.var.name), call)
        return rows


def transposed_by(matrix: relax.Expr, uses: Uses) -> Place | None:
    """Return what transposes a matrix, if anything does."""
    place = uses.places.get(matrix) if isinstance(matrix, relax.Var) else None
    return place if place is not None and binds(place, "relax.permute_dims") else None


def _shape(tensor: relax.Expr) -> list[Any]:
    return list(tensor.ty.shape.ty.values)


def _count(extents: Sequence[Any]) -> Any:
    """Return how many elements there are."""
    numbers = [constant(extent) for extent in extents]
    return prod(e if n is None else n for e, n in zip(extents, numbers, strict=True))
