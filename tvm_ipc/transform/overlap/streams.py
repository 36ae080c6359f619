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
from typing import Any, TypeAlias

import tvm
from tvm import relax, tirx

from tvm_ipc import comm
from tvm_ipc.comm.extents import constant
from tvm_ipc.contract.programs import KERNEL_ALIGNMENT
from tvm_ipc.transform.ir.build import alloc
from tvm_ipc.transform.ir.collectives import name_of
from tvm_ipc.transform.ir.rewrite import rewrite
from tvm_ipc.transform.ir.uses import Place, Uses, binds
from tvm_ipc.transform.overlap.chunks import Emission, Piece, pieces
from tvm_ipc.transform.overlap.find import check_written, collective_of, find_gather
from tvm_ipc.transform.overlap.site import Layout, LeftAloneError, MatrixProduct, OverlapSite

#: In how many chunks something is, or why it is left alone.
InChunks: TypeAlias = "int | LeftAloneError"


def in_streams(
    function: relax.Function, marked: Sequence[tuple[relax.Expr, int]], streams: int
) -> tuple[relax.Function, list[InChunks]]:
    """Return a function with what is marked in chunks, one for each index along an axis.

    And what became of each. The function has no dataflow blocks.
    """
    change = _Change(function, streams)
    said: list[InChunks] = []
    for variable, axis in marked:
        try:
            site = change.gathers.site(variable)
            said.append(change.divide(site, _blocks(site, axis)))
        except LeftAloneError as refusal:
            said.append(refusal)
    return change.changed(), said


def gathers_in_streams(
    function: relax.Function, chunks: int, streams: int
) -> tuple[relax.Function, list[tuple[str, InChunks]]]:
    """Return a function with all products of what is gathered in chunks.

    And what became of each gather, by the name of what is gathered. The function has no dataflow
    blocks.
    """
    change = _Change(function, streams)
    said: list[tuple[str, InChunks]] = []
    for name, found in change.gathers.found:
        try:
            if isinstance(found, LeftAloneError):
                raise found
            said.append((name, change.divide(found, _pieces(found, chunks))))
        except LeftAloneError as refusal:
            said.append((name, refusal))
    return change.changed(), said


class _Change:
    """A function, and what stands in the places of its bindings."""

    def __init__(self, function: relax.Function, streams: int) -> None:
        self._function, self._streams = function, streams
        self._uses = Uses()
        self._uses.read(function.body)
        self.gathers = _Gathers(self._uses)
        self._instead: dict[Any, list[relax.Binding]] = {}

    def divide(self, site: OverlapSite, chunks: list[Piece]) -> int:
        """Do a site in chunks, of which the number is returned."""
        _check_users(site, self._uses)
        if site.collective.binding.var not in self._instead:  # else another product of it is marked
            self._instead |= _instead(site, chunks, self._streams, self._uses)
        return len(chunks)

    def changed(self) -> relax.Function:
        """Return the function; itself if nothing was done."""
        if not self._instead:
            return self._function
        changed = rewrite(self._function, lambda binding, _: self._instead.get(binding.var))
        made_of = (changed.params, changed.body, changed.ret_ty)
        return relax.Function(*made_of, False, changed.attrs, changed.span)


def without_dataflow(function: relax.Function) -> relax.Function:
    """Return a function without dataflow blocks: works begin and end outside of them."""
    return _alone(relax.transform.ToNonDataflow(), function)


def with_dataflow(function: relax.Function) -> relax.Function:
    """Return a function with dataflow blocks of all that is pure."""
    return _alone(relax.transform.ConvertToDataflow(1), function)


def _alone(transform: tvm.transform.Pass, function: relax.Function) -> relax.Function:
    """Return what a pass makes of a function in a module of its own."""
    (result,) = transform(tvm.IRModule({"main": function})).functions.values()
    return result


def _check_users(site: OverlapSite, uses: Uses) -> None:
    """Raise an error if a product is used before all are there, which are made together."""
    end = max(one.at for one in _products(site))
    for product in site.products:
        if any(user.at < end for user in uses.users[product.last.binding.var]):
            raise LeftAloneError("what one product gives is used before another one is there")


def _instead(
    site: OverlapSite, chunks: list[Piece], streams: int, uses: Uses
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
        #: In their order, by the names of what is gathered.
        self.found: list[tuple[str, OverlapSite | LeftAloneError]] = []
        self._sites: dict[Any, OverlapSite] = {}
        self._failed: list[tuple[int, str]] = []
        for place in uses.places.values():
            attrs = collective_of(place)
            if attrs is None or attrs.kind != "allgather" or not attrs.workers:
                continue
            name = name_of(place.binding.value.args[0])
            try:
                site = find_gather(place, attrs, int(attrs.workers), uses)
                if attrs.uneven:
                    raise LeftAloneError("its parts are uneven")
                check_written(site, uses)
            except LeftAloneError as error:
                self.found.append((name, error))
                self._failed.append((place.at, f"; of the all-gather of {name} before, {error}"))
                continue
            self.found.append((name, site))
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


def _blocks(site: OverlapSite, axis: int) -> list[Piece]:
    """Return a chunk for each index along an axis, or raise an error if works cannot bring it."""
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
    return [Piece(block, 0, site.rows) for block in range(chunks)]


def _pieces(site: OverlapSite, chunks: int) -> list[Piece]:
    """Return about so many chunks of the rows of a rank."""
    if site.ranks == 1:
        raise LeftAloneError("it is of one rank")
    if site.left.outer < 1:
        raise LeftAloneError("how many blocks of rows there are is not known")
    if constant(site.rows) is None or any(constant(one.row) is None for one in site.all):
        raise LeftAloneError("how large its chunks are is not known")
    return pieces(site, chunks)


class _Pipeline(Emission):
    """The bindings of the chunks of a site."""

    def __init__(self, site: OverlapSite, chunks: list[Piece], streams: int, uses: Uses) -> None:
        super().__init__(site, 1)
        self._chunks, self._streams, self._uses = chunks, min(streams, len(chunks)), uses
        #: The extents of a row.
        self._rest = site.left.shape[site.left.axis + 1 :]

    def make(self) -> list[relax.Binding]:
        """Return them."""
        slots = self._slots()
        rows: list[relax.Var] = []  # of the chunks whose gather has begun
        works: list[relax.Var] = []
        parts: list[list[relax.Expr]] = [[] for _ in self._site.products]
        places: list[list[Any]] = [[] for _ in self._site.products]
        for number, piece in enumerate(self._chunks):
            for ahead in range(len(works), min(number + self._streams, len(self._chunks))):
                # Each chunk names its rows anew: what is done with them is not what was done with
                # those that lay there before.
                later = self._chunks[ahead]
                whole = later.rows * self._ranks
                rows.append(self._rows_of(*slots[ahead % self._streams], whole))
                works.append(self._post(later, rows[ahead]))
            self._emit("_", comm.wait(works[number]))
            for k, product in enumerate(self._site.products):
                made = self._chunk(product, rows[number], piece)
                parts[k] += made
                places[k] += self._places(self._site.right[k], piece, len(made))
        for k, product in enumerate(self._site.products):
            self._join(product.last, places[k], parts[k])
        return self.take()

    def _slots(self) -> list[tuple[relax.Var, Any]]:
        """Return where the rows of chunks are gathered, in turns: tensors, and rows of them."""
        most = max((piece.rows for piece in self._chunks), key=lambda rows: constant(rows) or 0)
        rows = most * self._ranks
        if tvm.sym.Analyzer().can_prove_equal(
            tirx.floormod(rows * self._site.left.row, KERNEL_ALIGNMENT), 0
        ):
            whole = self._empty([self._streams, rows, *self._rest])
            return [(whole, rows * k) for k in range(self._streams)]
        return [(self._empty([1, rows, *self._rest]), 0) for _ in range(self._streams)]

    def _empty(self, shape: list[Any]) -> relax.Var:
        ty = relax.TensorType(shape, self._site.left.dtype)
        return self._emit("gathered", alloc(relax.ShapeExpr(ty.shape.values), ty, 0, "global"))

    def _post(self, piece: Piece, into: relax.Expr) -> relax.Var:
        """Post the gather of a chunk."""
        site, attrs = self._site, self._site.attrs
        start = (site.rows * piece.block + piece.start) * _count(self._rest)
        own = self._emit("rows", comm.view(site.given, start, [piece.rows, *self._rest]))
        workers = attrs.workers if isinstance(attrs.team, str) else None
        gather = comm.allgather(own, team=attrs.team, workers=workers, backend=attrs.backend)
        return self._emit("work", comm.post(gather, into))

    def _rows_of(self, tensor: relax.Expr, start: Any, rows: Any) -> relax.Var:
        """Return so many rows of a tensor, after some, as products take them."""
        shape = [
            *([1] * self._site.left.axis),
            rows,
            *tensor.ty.shape.ty.values[-len(self._rest) :],
        ]
        last = shape[self._site.left.axis + 1 :]
        return self._emit("rows", comm.view(tensor, start * _count(last), shape))

    def _chunk(self, product: MatrixProduct, rows: relax.Expr, piece: Piece) -> list[relax.Var]:
        """Return the products of the rows of a chunk: one, or one for each rank."""
        if tvm.sym.Analyzer().can_prove_equal(piece.rows, self._site.rows):  # they lie together
            return [self._product_of(product, rows)]
        starts = [piece.rows * rank for rank in range(self._ranks)]
        if piece.rows * self._site.left.row % KERNEL_ALIGNMENT == 0:
            own = [self._rows_of(rows, start, piece.rows) for start in starts]
            return [self._product_of(product, one) for one in own]
        result = self._product_of(product, rows)
        return [self._rows_of(result, start, piece.rows) for start in starts]

    def _places(self, layout: Layout, piece: Piece, parts: int) -> list[Any]:
        """Return where the products of a chunk lie among all: for each a shift, stride, offset."""
        blocks = [piece.block * self._ranks + rank for rank in range(parts)]
        starts = [(self._site.rows * block + piece.start) * layout.row for block in blocks]
        return [number for start in starts for number in (0, 0, start)]

    def _product_of(self, product: MatrixProduct, rows: relax.Expr) -> relax.Var:
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


def _count(extents: Sequence[Any]) -> Any:
    """Return how many elements there are."""
    numbers = [constant(extent) for extent in extents]
    return prod(e if n is None else n for e, n in zip(extents, numbers, strict=True))
