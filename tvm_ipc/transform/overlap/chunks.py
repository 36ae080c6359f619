# SPDX-License-Identifier: Apache-2.0
"""The bindings of a product whose rows are done as they come, or go as they are done.

Rows that are gathered, with D ranks; what a rank has is shown in chunks, and multiplied where it
lies:

    shown = R.call_pure_packed("tvm_ipc.show", <chunk of x>, team)             for each chunk
    own = R.matmul(x, w)
    rows = R.call_pure_packed("tvm_ipc.peer", shown, k, R.shape([...]))        for k in 1 .. D - 1,
    part = R.matmul(rows, w)                                                   for each chunk
    z = R.call_dps_packed("tvm_ipc.join", (team, R.shape([...]), own, part, ...))

Sums that are scattered:

    rows = R.call_pure_packed("tvm_ipc.part", x, team, k, ...)                 for each chunk,
    shown = R.call_pure_packed("tvm_ipc.show", R.matmul(rows, w), team)        for k in 1 .. D - 1
    own = R.matmul(<the rows of this rank>, w)
    theirs = R.call_pure_packed("tvm_ipc.peer", shown, -k, R.shape([...]))
    sum = R.call_dps_packed("tvm_ipc.reduce_parts", (kind, team, own, theirs, ...))
    z = R.call_dps_packed("tvm_ipc.join", (team, R.shape([...]), sum, ...))

For an all-reduce sums are shown, too, and joined; rows that the ranks do not divide are multiplied
and shown by all of them, and each sums them. Where parts are uneven, rows beyond the end are zeros,
which what is scattered is padded with, and what is gathered ends before. All of it is pure, so that
products are fused, offloaded and lowered as others are. `PlaceParts` lets parts be made where they
are joined, and hides what is shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax, tirx

from tvm_ipc.comm.attributes import reduction_of
from tvm_ipc.comm.extents import constant
from tvm_ipc.comm.legalize import team_argument
from tvm_ipc.contract.programs import JOIN, PART, PEER, REDUCE_PARTS, SHOW, VIEW
from tvm_ipc.transform.ir.uses import Place, operator_of
from tvm_ipc.transform.overlap.site import Layout, MatrixProduct, OverlapSite


@dataclass(frozen=True)
class Piece:
    """Some rows of the shard of a rank."""

    block: int
    start: Any
    rows: Any


def pieces(site: OverlapSite, chunks: int) -> list[Piece]:
    """Return the rows of a shard in about so many chunks; a chunk has rows of one block."""
    blocks = range(site.left.outer)
    total, each = site.rows, -(-chunks // site.left.outer)
    known = constant(total)
    step = each * site.unit
    if known is not None:
        size = -(-known // step) * site.unit or 1
        starts = range(0, known, size) if known else (0,)
        return [Piece(b, at, min(size, known - at)) for b in blocks for at in starts]
    size = tirx.floordiv(total + (step - 1), step) * site.unit
    places = [tirx.min(total, size * k) if k else 0 for k in range(each)]
    return [Piece(b, at, tirx.min(size, total - at)) for b in blocks for at in places]


class Emission:
    """The bindings that stand in the places of a site's."""

    def __init__(self, site: OverlapSite, chunks: int) -> None:
        self._site = site
        self._team = team_argument(site.attrs.team)
        self._ranks = site.ranks
        self._pieces = pieces(site, chunks)
        self._whole = [Piece(block, 0, site.rows) for block in range(site.left.outer)]
        self._given = site.given
        self._builder = relax.BlockBuilder()
        inside = isinstance(site.collective.block, relax.DataflowBlock)
        self._new = relax.DataflowVar if inside else relax.Var
        self._shown: list[Any] = []
        self.bindings: list[relax.Binding] = []  #: those that were made so far

    def take(self) -> list[relax.Binding]:
        """Return the bindings that were made since they were taken last."""
        made, self.bindings = self.bindings, []
        return made

    # ---- rows that are gathered -----------------------------------------------------------

    def show(self) -> None:
        """Show the rows of this rank."""
        name = str(self._site.given.name)
        self._shown = [self._show(name, self._own(one, self._pieces)) for one in self._pieces]

    def multiply(self, products: Sequence[MatrixProduct]) -> None:
        """Multiply the own rows, and those of others as they come."""
        site = self._site
        parts: list[list[Any]] = [[] for _ in products]
        places: list[list[Any]] = [[] for _ in products]

        def add(rows: Any, shift: int, piece: Piece) -> None:
            for k, product in enumerate(products):
                layout = site.right[site.products.index(product)]
                parts[k].append(self._product(product, rows, self._left(product)))
                places[k] += self._place(layout, shift, piece)

        for piece in self._whole:
            add(self._own(piece, self._whole), 0, piece)
        for shift in range(1, self._ranks):
            for piece, shown in zip(self._pieces, self._shown, strict=True):
                add(self._peer(shown, shift, site.left, piece), shift, piece)
        for k, product in enumerate(products):
            if not site.uneven:
                self._join(product.last, places[k], parts[k])
                continue
            layout = site.right[site.products.index(product)]
            ty = relax.TensorType([_extent(one) for one in layout.shape], layout.dtype)
            self._cut(product.last, layout, self._joined(places[k], parts[k], ty))

    # ---- sums -----------------------------------------------------------------------------

    def sum(self) -> None:
        """Multiply the rows of other ranks, which are shown, and then the own ones; sum, and join.

        For an all-reduce sums are shown, too, and those of others joined with the own ones.
        """
        site, right = self._site, self._site.right[0]
        (product,) = site.products
        left = self._left(product)
        if site.uneven:
            self._given = self._padded()
        shown: list[list[Any]] = [[] for _ in self._pieces]
        # Peers ask for them in this order: what is asked for first must not be shown late.
        for piece, of_piece in zip(self._pieces, shown, strict=True):
            for shift in range(1, self._ranks):
                result = self._product(product, self._part(shift, piece), left)
                of_piece.append(self._show("product", result))
        if constant(site.rest) != 0:
            at, rest = site.rows * site.ranks, Piece(0, 0, site.rest)
            rows = self._view(site.given, at * site.left.row, site.left, rest)
            left_over = self._product(product, rows, left)
            left_over_shown = self._show("product", left_over)
        own = [self._product(product, self._part(0, piece), left) for piece in self._whole]
        sums = []
        for piece, of_peers in zip(self._pieces, shown, strict=True):
            mine = own[piece.block]
            if len(self._pieces) > len(self._whole):
                mine = self._view(mine, right.row * piece.start, right, piece)
            rows = Piece(piece.block, piece.start, mine.ty.shape.ty.values[right.axis])
            theirs = [self._peer(one, -k, right, rows) for k, one in enumerate(of_peers, 1)]
            sums.append(self._sum_of([mine, *theirs]))
        if site.kind == "reduce_scatter":
            offsets = [self._offset(right, piece, 1) for piece in self._pieces]
            self._join(site.collective, [n for one in offsets for n in (0, 0, one)], sums)
            return
        places = [n for piece in self._pieces for n in self._place(right, 0, piece)]
        shown_sums = [self._show("sum", one) for one in sums]
        if constant(site.rest) != 0:
            rows = Piece(0, 0, left_over.ty.shape.ty.values[right.axis])
            shifts = range(1, self._ranks)
            theirs = [self._peer(left_over_shown, -k, right, rows) for k in shifts]
            sums.append(self._sum_of([left_over, *theirs]))
            places += [0, 0, at * right.row]
        for shift in range(1, self._ranks):
            for piece, one in zip(self._pieces, shown_sums, strict=True):
                sums.append(self._peer(one, shift, right, piece))
                places += self._place(right, shift, piece)
        self._join(site.collective, places, sums)

    def _sum_of(self, parts: list[Any]) -> Any:
        """Return the reduction of what the ranks have."""
        kind = relax.prim_value(int(reduction_of(self._site.attrs)))
        call = self._dps(REDUCE_PARTS.name, [kind, self._team, *parts], parts[0].ty)
        return self._emit("sum", call)

    # ---- rows beyond the end --------------------------------------------------------------

    def _padded(self) -> Any:
        """Return what is multiplied with zeros beyond the end, as many as parts have."""
        left, site = self._site.left, self._site
        shape = [_extent(one) for one in left.shape]
        shape[left.axis] = _extent(site.extent)
        zeros = [*shape]
        zeros[left.axis] = _extent(site.rows * site.ranks - site.extent)
        given = self._emit("given", relax.op.reshape(site.given, shape))
        beyond = self._emit("beyond", relax.op.zeros(zeros, left.dtype))
        return self._emit("padded", relax.op.concat([given, beyond], left.axis))

    def _cut(self, place: Place, layout: Layout, joined: Any) -> None:
        """Bind what is before the end to the variable that is bound there."""
        shape = place.binding.var.ty.shape
        if layout.outer == 1:
            cut = self._packed(VIEW.name, [joined, 0, shape], place.binding.var.ty)
        else:
            end = relax.prim_value(_extent(self._site.extent))
            rows = relax.op.strided_slice(joined, [layout.axis], [0], [end], assume_inbound=True)
            cut = relax.op.reshape(self._emit("rows", rows), shape)
        cut = self._builder.normalize(cut)
        self.bindings.append(relax.VarBinding(place.binding.var, cut, place.binding.span))

    # ---- pieces of rows -------------------------------------------------------------------

    def _own(self, piece: Piece, among: Sequence[Piece]) -> Any:
        """Return one of the pieces into which the rows of this rank are divided."""
        given, left = self._site.given, self._site.left
        if len(among) == 1:
            return given
        return self._view(given, self._offset(left, piece, 1), left, piece)

    # ---- single bindings ------------------------------------------------------------------

    def _left(self, product: MatrixProduct) -> Any:
        return product.matmul.binding.value.args[0]

    def _product(self, product: MatrixProduct, rows: Any, instead_of: Any) -> Any:
        """Return what a product is of other rows."""
        for place in (product.matmul, *product.following):
            value, variable = place.binding.value, place.binding.var
            if operator_of(value) != "relax.reshape":  # rows have a shape of their own
                given = [
                    rows if one.same_as(instead_of) else self._within(rows, one)
                    for one in value.args
                ]
                call = relax.Call(value.op, given, value.attrs, list(value.ty_args), value.span)
                rows = self._emit(str(variable.name), call)
            instead_of = variable
        return rows

    def _within(self, rows: Any, other: Any) -> Any:
        """Return what is the same for all rows, without axes of extent 1 that rows do not have."""
        if not isinstance(other.ty, relax.TensorType) or other.ty.ndim <= rows.ty.ndim:
            return other
        shape = other.ty.shape.values[int(other.ty.ndim) - int(rows.ty.ndim) :]
        return self._emit("same", relax.op.reshape(other, shape))

    def _offset(self, layout: Layout, piece: Piece, ranks: int) -> Any:
        """Return the byte at which rows begin where each block has those of some ranks."""
        return (self._site.rows * (piece.block * ranks) + piece.start) * layout.row

    def _place(self, layout: Layout, shift: int, piece: Piece) -> list[Any]:
        """Return where rows of the rank that comes so many places later lie among all."""
        return [shift, self._site.rows * layout.row, self._offset(layout, piece, self._ranks)]

    def _part(self, shift: int, piece: Piece) -> Any:
        """Return some rows of those that belong to the rank that comes so many places later."""
        site = self._site
        place = self._place(site.left, shift, piece)
        return self._rows(PART.name, [self._given, self._team, *place], site.left, piece)

    def _view(self, tensor: Any, offset: Any, layout: Layout, piece: Piece) -> Any:
        return self._rows(VIEW.name, [tensor, offset], layout, piece)

    def _peer(self, shown: Any, shift: int, layout: Layout, piece: Piece) -> Any:
        return self._rows(PEER.name, [shown, shift], layout, piece)

    def _rows(self, name: str, given: list[Any], layout: Layout, piece: Piece) -> Any:
        """Return rows that a packed function gives; how many has a name of its own."""
        shape = layout.of_rows(_extent(piece.rows))
        ty = relax.TensorType(shape, layout.dtype)
        rows = self._emit("rows", self._packed(name, [*given, relax.ShapeExpr(shape)], ty))
        if constant(piece.rows) is not None or isinstance(piece.rows, tirx.Var):
            return rows
        named = relax.TensorType(layout.of_rows(tirx.Var("rows", "int64")), layout.dtype)
        variable = self._new("rows", named)
        self.bindings.append(relax.MatchCast(variable, rows, named))
        return variable

    def _show(self, name: str, tensor: Any) -> Any:
        return self._emit(
            f"{name}_shown", self._packed(SHOW.name, [tensor, self._team], relax.AnyType())
        )

    def _join(self, place: Place, places: list[Any], parts: list[Any]) -> None:
        """Bind what parts are together to the variable that is bound there."""
        binding = place.binding
        call = self._builder.normalize(self._join_call(places, parts, binding.var.ty))
        self.bindings.append(relax.VarBinding(binding.var, call, binding.span))

    def _joined(self, places: list[Any], parts: list[Any], ty: Any) -> Any:
        return self._emit("joined", self._join_call(places, parts, ty))

    def _join_call(self, places: list[Any], parts: list[Any], ty: Any) -> relax.Call:
        given = [self._team, relax.ShapeExpr([_extent(one) for one in places]), *parts]
        return self._dps(JOIN.name, given, ty)

    def _dps(self, name: str, given: list[Any], ty: Any) -> relax.Call:
        return relax.op.call_dps_packed(name, relax.Tuple(given), out_ty=ty)

    def _packed(self, name: str, given: list[Any], ty: Any) -> relax.Call:
        arguments = [one if isinstance(one, relax.Expr) else _extent(one) for one in given]
        arguments = [
            relax.prim_value(one) if tvm.ir.is_prim_expr(one) else one for one in arguments
        ]
        return relax.op.call_pure_packed(name, *arguments, ty_args=[ty])

    def _emit(self, name: str, value: relax.Expr) -> Any:
        value = self._builder.normalize(value)
        variable = self._new(name, value.ty)
        self.bindings.append(relax.VarBinding(variable, value))
        return variable


def _extent(number: Any) -> Any:
    """Return a number as an extent."""
    return tirx.IntImm("int64", number) if isinstance(number, int) else number
