# SPDX-License-Identifier: Apache-2.0
"""What becomes of calls whose operands lie somewhere: where they go, and what that costs.

Decided as `meet` decides it, and found out once for calls that are alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm import relax

from tvm_ipc.comm import Mesh, Partial, Placement, Replica, Shard
from tvm_ipc.comm.placements import placements_of
from tvm_ipc.parallel.cheapest import cheapest, rule_for
from tvm_ipc.parallel.costs import Costs, Shape, shape_of
from tvm_ipc.parallel.meet import PLACE, tensors_among
from tvm_ipc.transform.rules.composed import COMPOSED, composed
from tvm_ipc.transform.rules.operation import short_name, tensor_types
from tvm_ipc.transform.rules.rule import Refusal, decide

#: Of a tensor its placement, of a tuple those of its fields.
Lies = Any


@dataclass(frozen=True)
class Outcome:
    """What becomes of a call.

    Attributes
    ----------
    lies : where its results lie.
    targets : where its operands go.
    moves : the seconds that each of them needs for it.
    reduces : those for results that are reduced where they are made.
    seconds : those of the call.
    """

    lies: Lies
    targets: tuple[Placement, ...]
    moves: tuple[float, ...]
    reduces: tuple[float, ...]
    seconds: float


class Outcomes:
    """Outcomes of the calls of a program, on a mesh with one axis."""

    def __init__(self, mesh: Mesh, costs: Costs) -> None:
        self.mesh, self.costs = mesh, costs
        (self.workers,) = mesh.axes.values()
        self._known: dict[Any, Outcome] = {}
        self._builder = relax.BlockBuilder()

    def of(
        self,
        key: int,
        call: relax.Call,
        ty: relax.Type,
        operands: Sequence[relax.Expr],
        found: tuple[Placement, ...],
        several: bool,
    ) -> Outcome:
        """Return what becomes of a call.

        Parameters
        ----------
        key : the same for calls that are alike.
        ty : of its results.
        operands : its tensors, and where they are found.
        several : whether its result is used more than once.
        """
        known = self._known.get((key, found, several))
        if known is None:
            known = self._known[key, found, several] = self._of(call, ty, operands, found, several)
        return known

    def _of(
        self,
        call: relax.Call,
        ty: relax.Type,
        operands: Sequence[relax.Expr],
        found: tuple[Placement, ...],
        several: bool,
    ) -> Outcome:
        shapes = [shape_of(x.ty) for x in operands]
        if call.op.same_as(PLACE):
            (target,) = placements_of(self.mesh, call.attrs.placements)
            return Outcome(target, (target,), (self.move(shapes[0], found[0], target),), (), 0.0)
        made = [shape_of(one) for one in tensor_types(ty)]
        targets: Sequence[Placement] = [Replica()] * len(found)
        results: list[Placement] = [Replica()] * len(made)
        rule = None if list(found) == targets else rule_for(call, ty)
        if rule is not None:
            placements = [(one,) for one in found]
            try:
                decided = decide(self.mesh, rule, [str(x) for x in operands], placements)
            except Refusal:
                if short_name(call) in COMPOSED:
                    return self._composed(call, operands, found)
                decided = cheapest(self.mesh, rule, operands, placements, ty)
            targets = [one for (one,) in decided.operands]
            results = [one for (one,) in decided.results]
        seconds = self.costs.operator(
            short_name(call),
            [self._part(*one) for one in zip(shapes, targets, strict=True)],
            [self._part(*one) for one in zip(made, results, strict=True)],
        )
        reduces = []
        if several:
            for index, (shape, one) in enumerate(zip(made, results, strict=True)):
                if isinstance(one, Partial):
                    reduces.append(self.move(shape, one, Replica()))
                    results[index] = Replica()
        whole = isinstance(ty, relax.TensorType)
        return Outcome(
            (results[0] if results else None) if whole else tuple(results),
            tuple(targets),
            tuple(self.move(*one) for one in zip(shapes, found, targets, strict=True)),
            tuple(reduces),
            seconds,
        )

    def _composed(
        self, call: relax.Call, operands: Sequence[relax.Expr], found: tuple[Placement, ...]
    ) -> Outcome:
        """Return what becomes of the calls that stand for one."""
        lies: dict[relax.Expr, Lies] = dict(zip(operands, found, strict=True))
        moves: list[float] = []
        seconds = 0.0

        def compute(one: relax.Call) -> relax.Var:
            nonlocal seconds
            one = self._builder.normalize(one)
            given = list(tensors_among(one.args))
            at = tuple(lies.get(x, Replica()) for x in given)
            outcome = self._of(one, one.ty, given, at, several=False)
            seconds += outcome.seconds
            moves.extend((*outcome.moves, *outcome.reduces))
            var = relax.Var(short_name(one), one.ty)
            lies[var] = outcome.lies
            return var

        result = composed(short_name(call), call, compute)
        return Outcome(lies[result], found, (0.0,) * len(found), tuple(moves), seconds)

    def _part(self, shape: Shape, lies: Placement) -> Shape:
        if not isinstance(lies, Shard):
            return shape
        dims = list(shape.extents)
        dims[lies.axis] = -(-dims[lies.axis] // self.workers)
        return Shape(tuple(dims), shape.item)

    def move(self, shape: Shape, here: Placement, there: Placement) -> float:
        """Return the seconds that it takes to place a tensor elsewhere."""
        if here == there or self.workers == 1:
            return 0.0
        if isinstance(here, Replica):
            kind = "take_part"
        elif isinstance(here, Shard):
            kind = "all_to_all" if isinstance(there, Shard) else "allgather"
        else:
            kind = "reduce_scatter" if isinstance(there, Shard) else "allreduce"
        return self.costs.collective(kind, shape.bytes)
