# SPDX-License-Identifier: Apache-2.0
"""Predicted costs of calls and of the reshards that they need, for the search of a plan.

The reshards are those that `insert_reshards` would insert. Equal calls are evaluated once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm import relax

from tvm_ipc.comm import Mesh, Partial, Placement, Replica, Shard
from tvm_ipc.comm.place_op import is_place
from tvm_ipc.comm.placements import placements_of
from tvm_ipc.spmd.insert_reshards import resolve
from tvm_ipc.spmd.op_costs import Costs, Shape, shape_of
from tvm_ipc.spmd.rules.axis_label_rule import Choice
from tvm_ipc.spmd.rules.decompose_along_sharded_axis import decompose
from tvm_ipc.spmd.rules.operation import short_name, tensor_types, tensors_among

#: The placement of a tensor, or a tuple of those of its fields.
ResultPlacements = Any


@dataclass(frozen=True)
class CallCost:
    """The reshards of a call and its predicted times.

    Attributes
    ----------
    placements : the placements of the results.
    targets : the placements that the operands are moved to.
    moves : the seconds that the move of each operand takes.
    reduces : the seconds of each reduction of a partial result that is used several times.
    seconds : the seconds of the call itself.
    """

    placements: ResultPlacements
    targets: tuple[Placement, ...]
    moves: tuple[float, ...]
    reduces: tuple[float, ...]
    seconds: float


class CallCosts:
    """The costs of the calls of a program, on a mesh with one axis."""

    def __init__(self, mesh: Mesh, costs: Costs) -> None:
        self.mesh, self.costs = mesh, costs
        (self.workers,) = mesh.axes.values()
        self._cache: dict[Any, CallCost] = {}
        self._builder = relax.BlockBuilder()

    def of(
        self,
        key: int,
        call: relax.Call,
        ty: relax.Type,
        operands: Sequence[relax.Expr],
        current: tuple[Placement, ...],
        several_uses: bool,
        preferred: Choice = None,
    ) -> CallCost:
        """Return the cost of a call.

        Parameters
        ----------
        key : a number that equal calls share.
        call : the call.
        ty : the type of its result.
        operands : the tensors among its arguments.
        current : the placements of the operands.
        several_uses : whether its result is used more than once.
        preferred : the label to shard if the operands shard none; equal for equal keys.
        """
        cost = self._cache.get((key, current, several_uses))
        if cost is None:
            cost = self._of(call, ty, operands, current, several_uses, preferred)
            self._cache[key, current, several_uses] = cost
        return cost

    def _of(
        self,
        call: relax.Call,
        ty: relax.Type,
        operands: Sequence[relax.Expr],
        current: tuple[Placement, ...],
        several_uses: bool,
        preferred: Choice = None,
    ) -> CallCost:
        shapes = [shape_of(x.ty) for x in operands]
        if is_place(call):
            (target,) = placements_of(self.mesh, call.attrs.placements)
            seconds = self.move(shapes[0], current[0], target)
            return CallCost(target, (target,), (seconds,), (), 0.0)
        result_shapes = [shape_of(field) for field in tensor_types(ty)]
        resolved = resolve(
            self.mesh,
            call,
            ty,
            operands,
            [(placement,) for placement in current],
            {} if preferred is None else {0: preferred},
        )
        if resolved is None:
            return self._decomposed(call, operands, current)
        targets = [placement for (placement,) in resolved.operands]
        results: list[Placement] = [placement for (placement,) in resolved.results]
        results = results or [Replica() for _ in result_shapes]
        seconds = self.costs.operator(
            short_name(call),
            list(map(self._local_shape, shapes, targets)),
            list(map(self._local_shape, result_shapes, results)),
        )
        reduces = []
        if several_uses:
            for index, (shape, placement) in enumerate(zip(result_shapes, results, strict=True)):
                if isinstance(placement, Partial):
                    reduces.append(self.move(shape, placement, Replica()))
                    results[index] = Replica()
        is_tensor = isinstance(ty, relax.TensorType)
        return CallCost(
            (results[0] if results else None) if is_tensor else tuple(results),
            tuple(targets),
            tuple(map(self.move, shapes, current, targets)),
            tuple(reduces),
            seconds,
        )

    def _decomposed(
        self, call: relax.Call, operands: Sequence[relax.Expr], current: tuple[Placement, ...]
    ) -> CallCost:
        """Return the cost of the decomposition of a call."""
        placements: dict[relax.Expr, ResultPlacements] = dict(zip(operands, current, strict=True))
        moves: list[float] = []
        seconds = 0.0

        def emit(step: relax.Call) -> relax.Var:
            nonlocal seconds
            step = self._builder.normalize(step)
            tensors = list(tensors_among(step.args))
            of_tensors = tuple(placements.get(x, Replica()) for x in tensors)
            cost = self._of(step, step.ty, tensors, of_tensors, several_uses=False)
            seconds += cost.seconds
            moves.extend((*cost.moves, *cost.reduces))
            var = relax.Var(short_name(step), step.ty)
            placements[var] = cost.placements
            return var

        result = decompose(short_name(call), call, emit)
        return CallCost(placements[result], current, (0.0,) * len(current), tuple(moves), seconds)

    def _local_shape(self, shape: Shape, placement: Placement) -> Shape:
        if not isinstance(placement, Shard):
            return shape
        dims = list(shape.extents)
        dims[placement.axis] = -(-dims[placement.axis] // self.workers)
        return Shape(tuple(dims), shape.item)

    def move(self, shape: Shape, source: Placement, target: Placement) -> float:
        """Return the predicted seconds of a change of placement."""
        if source == target or self.workers == 1:
            return 0.0
        if isinstance(source, Replica):
            kind = "take_shard"
        elif isinstance(source, Shard):
            kind = "all_to_all" if isinstance(target, Shard) else "allgather"
        else:
            kind = "reduce_scatter" if isinstance(target, Shard) else "allreduce"
        held = shape.bytes / self.workers if isinstance(source, Shard) else shape.bytes
        return self.costs.collective(kind, held)
