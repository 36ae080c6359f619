# SPDX-License-Identifier: Apache-2.0
"""Changes of placement, by one collective for each axis of the mesh along which they differ.

    R to S[a]        take_shard, which needs no communication
    S[a] to R        allgather
    S[a] to S[b]     all_to_all
    P to R           allreduce
    P to S[a]        reduce_scatter

Steps that make the tensor smaller come first. `reorder_indices_within_sharded_axis` handles shards
that are not consecutive.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tvm import relax

from tvm_ipc import comm
from tvm_ipc.comm import Division, Mesh, Partial, Placement, Replica, Shard
from tvm_ipc.comm.collective_relax_op import dtype_of, extents, same_extents
from tvm_ipc.comm.extent_arithmetic import constant, divides
from tvm_ipc.comm.placements import Placements
from tvm_ipc.spmd.placements.placed_tensor import (
    PlacedTensor,
    is_whole,
    local_type,
    sharded_axes,
    uneven,
)
from tvm_ipc.spmd.placements.reorder_indices_within_sharded_axis import (
    Rearrangement,
    order_of,
    positions_in,
    table_of,
)
from tvm_ipc.transform.report import Decision, note

NAME = "LowerPlacements"


class Redistribution:
    """Emits the collectives that move tensors of one function between ranks.

    Parameters
    ----------
    builder : builds the function that one rank runs.
    mesh : the mesh of all placements in the function.
    function : the name of the function.
    """

    def __init__(self, builder: relax.BlockBuilder, mesh: Mesh, function: str) -> None:
        self.builder = builder
        self.mesh = mesh
        self.function = function
        #: For each axis of the mesh, its teams and their size.
        self.teams = [mesh.teams(name) for name in mesh.axes]
        self.workers = list(mesh.axes.values())
        #: Masks of elements, by extent, and by axis of the mesh and division.
        self._masks: list[tuple[relax.Expr, tuple[int, Division | None], relax.Var]] = []
        self._ranks: dict[str, relax.Var] = {}

    def end_block(self) -> None:
        """Forget the cached variables of the block that ends."""
        self._masks, self._ranks = [], {}

    def placed(
        self,
        value: relax.Expr,
        whole: relax.TensorType,
        placements: Placements,
        zeros: frozenset[int] = frozenset(),
    ) -> PlacedTensor:
        """Return a placed tensor, after a cast of the value to the type of its shard if needed."""
        shard_type = local_type(self.mesh, whole, placements)
        value = self.builder.normalize(value)
        dims, value_dims = extents(shard_type), extents(value.ty)
        if dims is not None and not (value_dims is not None and same_extents(dims, value_dims)):
            value = self.builder.match_cast(self.bound(value), shard_type)
        zeros &= uneven(self.mesh, placements, whole)
        return PlacedTensor(value, whole, placements, zeros, mesh=self.mesh)

    def bound(self, value: relax.Expr) -> relax.Expr:
        """Return the value in a form that can be an argument of a call."""
        return self.builder.emit(value) if is_bindable(value) else value

    def move(
        self, x: PlacedTensor, target: Placements, subject: str, verdict: str, why: str
    ) -> PlacedTensor:
        """Return the tensor with the target placements, and report each collective it takes."""
        while x.placements != target:
            index, step = self._next(x, target)
            placements = (*x.placements[:index], step, *x.placements[index + 1 :])
            if is_whole(x.placements[index]) and is_whole(step):
                x = replace(x, placements=placements)
                continue
            by_table = _by_table(x.placements[index], step)
            move = self._step_by_table if by_table else self._step_by_blocks
            kind, result = move(x, index, step)
            collective = f"{kind} of {subject} along {list(self.mesh.axes)[index]!r}"
            note(Decision(NAME, self.function, collective, verdict, why))
            # Collectives fill padding with zeros, and joined shards have no padding.
            zeros = x.zeros | ({step.axis} if isinstance(step, Shard) else set())
            x = self.placed(result, x.whole, placements, zeros)
        return x

    def send(self, x: PlacedTensor, target: Mesh, subject: str, why: str) -> PlacedTensor:
        """Return a replicated tensor of this mesh, replicated on the ranks of another mesh."""
        replicas: Placements = (Replica(),) * len(target.axes)
        if set(target.ranks) <= set(self.mesh.ranks):
            return replace(x, placements=replicas, mesh=target)
        source = self.mesh.ranks[0]
        collective = f"broadcast of {subject} from rank {source} to {target}"
        note(Decision(NAME, self.function, collective, "made", why))
        sent = comm.broadcast(self.bound(x.value), root_rank=source, team=list(target.ranks))
        return PlacedTensor(self.builder.normalize(sent), x.whole, replicas, mesh=target)

    def report(self, kind: str, subject: str, mesh_axis: str, why: str) -> None:
        """Report a collective that the lowering of an operator inserts."""
        collective = f"{kind} of {subject} along {mesh_axis!r}"
        note(Decision(NAME, self.function, collective, "inserted", why))

    def _next(self, x: PlacedTensor, target: Placements) -> tuple[int, Placement]:
        """Return the axis of the mesh to change next, and the placement along it afterwards.

        An axis of a tensor is never sharded twice. If two mesh axes exchange their tensor axes, one
        is gathered in between.
        """
        current = x.placements
        taken = sharded_axes(self.mesh, current)
        differ = [k for k in range(len(current)) if current[k] != target[k]]
        free = [
            k for k in differ if not (isinstance(step := target[k], Shard) and step.axis in taken)
        ]
        for index in differ:
            if self._is_local(x, index, target[index]):
                return index, target[index]
        if not free:
            return differ[0], Replica()
        index = min(free, key=lambda k: _ORDER.index((type(current[k]), type(target[k]))))
        source, step = current[index], target[index]
        if isinstance(source, Shard) and isinstance(step, Shard) and _by_table(source, step):
            return index, Replica()
        return index, step

    def _is_local(self, x: PlacedTensor, index: int, target: Placement) -> bool:
        """Return whether each rank has all elements of its target shard of the same axis."""
        source = x.placements[index]
        if not (isinstance(source, Shard) and isinstance(target, Shard)):
            return False
        if source.axis != target.axis or not _by_table(source, target):
            return False
        return positions_in(*self._tables(x, index, source, target)) is not None

    def _tables(self, x: PlacedTensor, index: int, *shards: Shard) -> list[Any]:
        """Return for each placement the table of indices that ranks have."""
        workers = self.workers[index]
        return [table_of(shard, constant(x.dims[shard.axis]), workers) for shard in shards]

    def _step_by_blocks(
        self, x: PlacedTensor, index: int, target: Placement
    ) -> tuple[str, relax.Expr]:
        """Return the kind and result of a step between shards that are consecutive blocks."""
        team, workers, dims = self.teams[index], self.workers[index], x.dims
        source = x.placements[index]
        value = self.bound(x.value)
        uneven_target = isinstance(target, Shard) and not divides(workers, dims[target.axis])
        extent = None
        if isinstance(source, Shard) and (uneven_target or not divides(workers, dims[source.axis])):
            extent = dims[source.axis]
        if isinstance(source, Shard):
            if isinstance(target, Shard):
                call = comm.all_to_all(value, target.axis, source.axis, team=team, extent=extent)
            else:
                call = comm.allgather(value, axis=source.axis, team=team, extent=extent)
        elif isinstance(source, Partial):
            if isinstance(target, Shard):
                call = comm.reduce_scatter(
                    value, source.reduction, axis=target.axis, team=team, uneven=uneven_target
                )
            else:
                call = comm.allreduce(value, source.reduction, team=team)
        else:
            assert isinstance(target, Shard)
            call = comm.take_shard(value, axis=target.axis, team=team, uneven=uneven_target)
        return str(call.attrs.kind), call

    def _step_by_table(
        self, x: PlacedTensor, index: int, target: Placement
    ) -> tuple[str, relax.Expr]:
        """Return the kind and result of a step between shards that tables describe."""
        source = x.placements[index]
        value = self.bound(x.value)
        shard = source if isinstance(source, Shard) else target
        assert isinstance(shard, Shard)
        rearrange = self._rearrangement(index, shard.axis)
        team = rearrange.team
        (table,) = self._tables(x, index, shard)
        if isinstance(source, Shard):
            if isinstance(target, Shard):
                positions = positions_in(*self._tables(x, index, source, target))
                assert positions is not None
                result, take_row = rearrange.own(value, positions)
                return str(take_row.attrs.kind), result
            call = comm.allgather(value, axis=shard.axis, team=team)
            order = order_of(table)
            return str(call.attrs.kind), rearrange.ordered(self.builder.emit(call), order)
        if isinstance(source, Partial):
            value = rearrange.ordered(value, table.ravel())
            call = comm.reduce_scatter(value, source.reduction, axis=shard.axis, team=team)
            return str(call.attrs.kind), call
        result, take_row = rearrange.own(value, table)
        return str(take_row.attrs.kind), result

    def _rearrangement(self, index: int, axis: int) -> Rearrangement:
        return Rearrangement(self.builder, self.teams[index], self.workers[index], axis)

    def fill(
        self, x: PlacedTensor, axes: frozenset[int], value: float, subject: str, why: str
    ) -> PlacedTensor:
        """Return the tensor with a value in the padding of some axes."""
        sharded = {
            placement.axis: (placement, k)
            for k, placement in enumerate(x.placements)
            if isinstance(placement, Shard)
        }
        for axis in sorted(axes):
            padding = f"{subject} beyond the end of axis {axis}"
            note(Decision(NAME, self.function, padding, f"filled with {value}", why))
            mask = self._element_mask(x.dims[axis], *sharded[axis])
            count = len(x.dims)
            if count > 1:
                shape = [mask.ty.shape[0] if k == axis else 1 for k in range(count)]
                mask = self.builder.emit(relax.op.reshape(mask, shape))
            padding_value = relax.const(value, dtype_of(x.whole))
            # The mask is int32, since TVM's GPU kernels read bools from memory in pairs, wrongly.
            is_element = self.builder.emit(relax.op.greater(mask, relax.const(0, "int32")))
            filled = relax.op.where(is_element, self.bound(x.value), padding_value)
            x = replace(x, value=self.builder.normalize(filled))
        return replace(x, zeros=x.zeros | axes if value == 0 else x.zeros - axes)

    def rank(self, name: str) -> relax.Expr:
        """Return the index of the rank along an axis of the mesh, as an int64 tensor."""
        if name not in self._ranks:
            indices = self.builder.emit(relax.op.arange(self.mesh.extent(name), dtype="int64"))
            own = comm.take_shard(indices, team=self.mesh.teams(name))
            self._ranks[name] = self.builder.emit(own)
        return self._ranks[name]

    def _element_mask(self, extent: relax.Expr, placement: Shard, index: int) -> relax.Var:
        """Return an int32 mask that is 1 for the elements of a rank's shard, and 0 in padding."""
        key = (index, placement.division)
        for cached_extent, cached_key, mask in self._masks:
            if cached_key == key and same_extents([cached_extent], [extent]):
                return mask
        if placement.division is not None:
            mask = self._rearrangement(index, 0).is_element(placement.division)
        else:
            team, workers = self.teams[index], self.workers[index]
            ones = self.builder.emit(relax.op.ones((extent,), "int32"))
            call = comm.take_shard(ones, team=team, workers=workers, uneven=True)
            mask = self.builder.emit(call)
        self._masks.append((extent, key, mask))
        return mask


def _by_table(*placements: Placement) -> bool:
    """Return whether some of the placements have shards that are not consecutive blocks."""
    return any(isinstance(each, Shard) and each.division is not None for each in placements)


#: Steps that make the tensor smaller come first, and those that make it larger last.
_ORDER = [
    (Replica, Shard),
    (Partial, Shard),
    (Shard, Shard),
    (Partial, Replica),
    (Shard, Replica),
]


def is_bindable(value: relax.Expr) -> bool:
    """Return whether a value must be bound to a variable before it can be an argument."""
    return isinstance(value, (relax.Call, relax.TupleGetItem))
