# SPDX-License-Identifier: Apache-2.0
"""From one placement to another one: a collective for each axis of the mesh where they differ.

    R to S[a]        take_part, which needs no other rank
    S[a] to R        allgather
    S[a] to S[b]     all_to_all
    P to R           allreduce
    P to S[a]        reduce_scatter

They are done in an order in which what comes later moves less. Where an axis is divided into other
parts than consecutive ones, see `rearrange`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tvm import relax

from tvm_ipc import comm
from tvm_ipc.comm import Division, Mesh, Partial, Placement, Replica, Shard
from tvm_ipc.comm.extents import constant, divides
from tvm_ipc.comm.operator import dtype_of, extents, same_extents
from tvm_ipc.comm.placements import Placements
from tvm_ipc.transform.placements.placed import Placed, divided, is_whole, local_type, uneven
from tvm_ipc.transform.placements.rearrange import Rearrangement, order_of, places_in, table_of
from tvm_ipc.transform.report import Decision, note

NAME = "LowerPlacements"


class Redistribution:
    """What moves tensors of one function between ranks.

    Parameters
    ----------
    builder : of the function that one rank runs.
    mesh : of all placements of the function.
    function : its name.
    """

    def __init__(self, builder: relax.BlockBuilder, mesh: Mesh, function: str) -> None:
        self.builder = builder
        self.mesh = mesh
        self.function = function
        #: By extent, axis of the mesh and division: which places of a part are no zeros.
        self._inside: list[tuple[relax.Expr, tuple[int, Division | None], relax.Var]] = []
        self._ranks: dict[str, relax.Var] = {}

    def end_block(self) -> None:
        """Forget variables that are of the block that ends."""
        self._inside, self._ranks = [], {}

    def placed(
        self,
        value: relax.Expr,
        whole: relax.TensorType,
        placements: Placements,
        zeros: frozenset[int] = frozenset(),
    ) -> Placed:
        """Return a tensor whose value has the extents that its placements say."""
        wanted = local_type(self.mesh, whole, placements)
        value = self.builder.normalize(value)
        dims, found = extents(wanted), extents(value.ty)
        if dims is not None and not (found is not None and same_extents(dims, found)):
            value = self.builder.match_cast(self.bound(value), wanted)
        return Placed(value, whole, placements, zeros & uneven(self.mesh, placements, whole))

    def bound(self, value: relax.Expr) -> relax.Expr:
        """Return the value as an argument of a call."""
        return self.builder.emit(value) if is_bindable(value) else value

    def move(self, x: Placed, target: Placements, subject: str, verdict: str, why: str) -> Placed:
        """Return a tensor as it is placed elsewhere, and note each collective that this takes."""
        while x.placements != target:
            index, step = self._next(x, target)
            name = list(self.mesh.axes)[index]
            if is_whole(x.placements[index]) and is_whole(step):
                placements = (*x.placements[:index], step, *x.placements[index + 1 :])
                x = replace(x, placements=placements)
                continue
            kind, moved = self._step(x, index, step)
            about = f"{kind} of {subject} along {name!r}"
            note(Decision(NAME, self.function, about, verdict, why))
            x = moved
        return x

    def _next(self, x: Placed, target: Placements) -> tuple[int, Placement]:
        """Return the axis of the mesh to do next, and what a tensor is along it afterwards.

        An axis of the tensor is divided once at any time. Where two of them change places, one is
        gathered in between.
        """
        found = x.placements
        taken = divided(self.mesh, found)
        differ = [k for k in range(len(found)) if found[k] != target[k]]
        free = [
            k for k in differ if not (isinstance(step := target[k], Shard) and step.axis in taken)
        ]
        for index in differ:
            if self._is_there(x, index, target[index]):
                return index, target[index]
        if not free:
            return differ[0], Replica()
        index = min(free, key=lambda k: _ORDER.index((type(found[k]), type(target[k]))))
        source, step = found[index], target[index]
        if isinstance(source, Shard) and isinstance(step, Shard) and _by_table(source, step):
            return index, Replica()
        return index, step

    def _is_there(self, x: Placed, index: int, target: Placement) -> bool:
        """Whether each rank has what it gets, in other parts of the same axis."""
        source = x.placements[index]
        if not (isinstance(source, Shard) and isinstance(target, Shard)):
            return False
        if source.axis != target.axis or not _by_table(source, target):
            return False
        return places_in(*self._tables(x, index, source, target)) is not None

    def _tables(self, x: Placed, index: int, *given: Shard) -> list[Any]:
        """Return the indices that ranks have of an axis, by how it is divided."""
        workers = list(self.mesh.axes.values())[index]
        dims = extents(x.whole)
        assert dims is not None, "only tensors of known shape are divided"
        return [table_of(one, constant(dims[one.axis]), workers) for one in given]

    def _step(self, x: Placed, index: int, target: Placement) -> tuple[str, Placed]:
        """Return what is done along one axis of the mesh, and the tensor afterwards."""
        name = list(self.mesh.axes)[index]
        team, workers = self.mesh.teams(name), self.mesh.extent(name)
        dims = extents(x.whole)
        assert dims is not None, "only tensors of known shape are divided"
        source = x.placements[index]
        value = self.bound(x.value)
        if _by_table(source, target):
            kind, made = self._step_by_table(x, index, target)
            placements = (*x.placements[:index], target, *x.placements[index + 1 :])
            zeros = x.zeros | ({target.axis} if isinstance(target, Shard) else set())
            return kind, self.placed(made, x.whole, placements, zeros)
        parts_differ = isinstance(target, Shard) and not divides(workers, dims[target.axis])
        extent = None
        if isinstance(source, Shard) and (parts_differ or not divides(workers, dims[source.axis])):
            extent = dims[source.axis]
        if isinstance(source, Shard):
            if isinstance(target, Shard):
                call = comm.all_to_all(value, target.axis, source.axis, team=team, extent=extent)
            else:
                call = comm.allgather(value, axis=source.axis, team=team, extent=extent)
        elif isinstance(source, Partial):
            if isinstance(target, Shard):
                call = comm.reduce_scatter(
                    value, source.reduction, axis=target.axis, team=team, uneven=parts_differ
                )
            else:
                call = comm.allreduce(value, source.reduction, team=team)
        else:
            assert isinstance(target, Shard)
            call = comm.take_part(value, axis=target.axis, team=team, uneven=parts_differ)
        placements = (*x.placements[:index], target, *x.placements[index + 1 :])
        # Collectives give zeros beyond the end, and what they join has no end within.
        zeros = x.zeros | ({target.axis} if isinstance(target, Shard) else set())
        return str(call.attrs.kind), self.placed(call, x.whole, placements, zeros)

    def _step_by_table(self, x: Placed, index: int, target: Placement) -> tuple[str, relax.Expr]:
        """Return what is done along one axis of the mesh where parts are those of a table."""
        source = x.placements[index]
        value = self.bound(x.value)
        one = source if isinstance(source, Shard) else target
        assert isinstance(one, Shard)
        rearrange = self._rearrangement(index, one.axis)
        team = rearrange.team
        (table,) = self._tables(x, index, one)
        if isinstance(source, Shard):
            if isinstance(target, Shard):
                places = places_in(*self._tables(x, index, source, target))
                assert places is not None
                made, chosen = rearrange.own(value, places)
                return str(chosen.attrs.kind), made
            call = comm.allgather(value, axis=one.axis, team=team)
            order = order_of(table)
            return str(call.attrs.kind), rearrange.ordered(self.builder.emit(call), order)
        if isinstance(source, Partial):
            value = rearrange.ordered(value, table.ravel())
            call = comm.reduce_scatter(value, source.reduction, axis=one.axis, team=team)
            return str(call.attrs.kind), call
        made, chosen = rearrange.own(value, table)
        return str(chosen.attrs.kind), made

    def _rearrangement(self, index: int, axis: int) -> Rearrangement:
        name = list(self.mesh.axes)[index]
        return Rearrangement(self.builder, self.mesh.teams(name), self.mesh.extent(name), axis)

    def fill(self, x: Placed, axes: frozenset[int], value: float, subject: str, why: str) -> Placed:
        """Return the tensor with a value beyond the ends of some axes."""
        by_axis = {one.axis: k for k, one in enumerate(x.placements) if isinstance(one, Shard)}
        dims = extents(x.whole)
        assert dims is not None
        for axis in sorted(axes):
            about = f"{subject} beyond the end of axis {axis}"
            note(Decision(NAME, self.function, about, f"filled with {value}", why))
            one = x.placements[by_axis[axis]]
            assert isinstance(one, Shard)
            inside = self._is_inside(dims[axis], one, by_axis[axis])
            count = len(dims)
            if count > 1:
                length = extents(inside.ty)
                assert length is not None
                shape = [length[0] if k == axis else 1 for k in range(count)]
                inside = self.builder.emit(relax.op.reshape(inside, shape))
            other = relax.const(value, dtype_of(x.whole))
            # Of int32 in memory: kernels for GPUs that TVM compiles read bools in pairs, and wrong.
            holds = self.builder.emit(relax.op.greater(inside, relax.const(0, "int32")))
            filled = relax.op.where(holds, self.bound(x.value), other)
            x = replace(x, value=self.builder.normalize(filled))
        return replace(x, zeros=x.zeros | axes if value == 0 else x.zeros - axes)

    def rank(self, name: str) -> relax.Expr:
        """Return the place of the rank along an axis of the mesh, a tensor of one int64."""
        if name not in self._ranks:
            places = self.builder.emit(relax.op.arange(self.mesh.extent(name), dtype="int64"))
            own = comm.take_part(places, team=self.mesh.teams(name))
            self._ranks[name] = self.builder.emit(own)
        return self._ranks[name]

    def _is_inside(self, extent: relax.Expr, one: Shard, index: int) -> relax.Var:
        """Return which places of a rank's part of an axis are no zeros."""
        how = (index, one.division)
        for known, of, inside in self._inside:
            if of == how and same_extents([known], [extent]):
                return inside
        if one.division is not None:
            inside = self._rearrangement(index, 0).inside(one.division)
        else:
            name = list(self.mesh.axes)[index]
            team, workers = self.mesh.teams(name), self.mesh.extent(name)
            ones = self.builder.emit(relax.op.ones((extent,), "int32"))
            call = comm.take_part(ones, team=team, workers=workers, uneven=True)
            inside = self.builder.emit(call)
        self._inside.append((extent, how, inside))
        return inside


def _by_table(*given: Placement) -> bool:
    """Whether a tensor is divided into other parts than consecutive ones."""
    return any(isinstance(one, Shard) and one.division is not None for one in given)


#: First what makes the tensor smaller, last what makes it larger.
_ORDER = [
    (Replica, Shard),
    (Partial, Shard),
    (Shard, Shard),
    (Partial, Replica),
    (Shard, Replica),
]


def is_bindable(value: relax.Expr) -> bool:
    """Whether a variable has to be bound to a value before it can be an argument."""
    return isinstance(value, (relax.Call, relax.TupleGetItem))
