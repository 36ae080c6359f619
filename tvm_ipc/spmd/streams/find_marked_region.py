# SPDX-License-Identifier: Apache-2.0
"""Analysis that finds the operators and collectives which compute a marked tensor chunk by chunk.

    h = R.matmul(x, w)                        # x: (4, 8, 16), chunks along axis 0
    y = R.comm.allreduce(h, "sum")
    z = R.comm.place(y, mesh, ..., stream=0)  # y is marked

The sharding rules of operators relate the marked axis of a result to axes of the operands: chunks
along an axis of a tensor are computed from chunks of the operands as shards are from shards. The
analysis follows the axis upwards, from the marked tensor through its operands. The region has the
collectives that are found in this way, everything between them and the marked tensor, and the
matmuls before them. It ends before a second collective upwards of a matmul, and at operators whose
rules do not allow it. Operands from outside of the region are sliced, or used as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from tvm import relax

from tvm_ipc.analysis.program_order import Step
from tvm_ipc.analysis.uses import Uses, binds
from tvm_ipc.analysis.views_and_writes_of_calls import operator_of
from tvm_ipc.comm import CollectiveAttrs, Shard
from tvm_ipc.comm.collective_relax_op import NAME as COLLECTIVE
from tvm_ipc.comm.collective_relax_op import extents
from tvm_ipc.comm.extent_arithmetic import constant, divides
from tvm_ipc.spmd.rules.axis_label_rule import Refusal, Rule
from tvm_ipc.spmd.rules.operation import callee_of, operation_of, short_name, tensors_among
from tvm_ipc.spmd.rules.operator_rule_table import rule_of
from tvm_ipc.transform.overlap.candidate_types import NotOverlappableError

#: Collectives that `R.comm.place` inserts and that move data.
_KINDS: Final = ("allgather", "allreduce", "reduce_scatter", "all_to_all")


@dataclass(eq=False)
class Member:
    """An operator or a collective of a region.

    Attributes
    ----------
    step : its binding.
    axis : the axis of its result along which it is split into chunks.
    operands : its tensors, each with the axis along which it is split; None for a whole tensor.
    attrs : the attributes of a collective, None for an operator.
    rule : the sharding rule of an operator, None for a collective.
    label : the label of the axis in the rule.
    stage : the number of collectives before it on the longest path in the region.
    """

    step: Step
    axis: int
    operands: list[tuple[Any, int | None]]
    attrs: CollectiveAttrs | None = None
    rule: Rule | None = None
    label: int = -1
    stage: int = 0

    @property
    def is_matmul(self) -> bool:
        """Return whether it is a matmul."""
        return binds(self.step, "relax.matmul")


@dataclass(eq=False)
class MarkedRegion:
    """The operators and collectives that are split into chunks.

    Attributes
    ----------
    target : the tensor that they compute.
    axis : its axis along which it is split.
    chunks : the number of chunks.
    members : by variable, in program order.
    ring : the all-gather or reduce-scatter along the axis itself, in which chunks are the shards of
        ranks; None if there is no such collective. It is not a member.
    """

    target: Step
    axis: int
    chunks: int
    members: dict[Any, Member] = field(default_factory=dict)
    ring: Member | None = None

    @property
    def collectives(self) -> list[Member]:
        """The collectives among the members."""
        return [member for member in self.members.values() if member.attrs is not None]

    @property
    def steps(self) -> list[Step]:
        """The bindings that the region replaces, in program order."""
        members = [*self.members.values(), *([self.ring] if self.ring else [])]
        return sorted((member.step for member in members), key=lambda step: step.entry)


def find_marked_region(
    target: Any, axis: int, uses: Uses, boundaries: Iterable[Any]
) -> MarkedRegion:
    """Return the region that computes a marked tensor; raise the reason if there is none.

    Parameters
    ----------
    target : the variable of the marked tensor.
    axis : the marked axis.
    uses : the uses of the function.
    boundaries : variables that do not belong to the region, such as other marked tensors.
    """
    step = uses.binding_of(target)
    if step is None:
        raise NotOverlappableError("it is not the result of an operator or a collective")
    finder = _RegionFinder(uses, set(boundaries) - {step.var})
    region = finder.region(step, axis)
    _check_written(region, uses)
    return region


def _check_written(region: MarkedRegion, uses: Uses) -> None:
    """Raise an error if a call between the members may write into tensors that they read."""
    steps = region.steps
    if uses.written(steps[0].entry, steps[-1].entry):
        raise NotOverlappableError("a call between its operators may write into their inputs")


class _RegionFinder:
    """Finds regions in one function."""

    def __init__(self, uses: Uses, boundaries: set[Any]) -> None:
        self._uses, self._boundaries = uses, boundaries

    def region(self, target: Step, axis: int) -> MarkedRegion:
        """Return the region of a marked tensor."""
        dims = _dims(target.var)
        if dims is None or axis >= len(dims):
            raise NotOverlappableError("its shape is unknown")
        scatter = self._ring_at_end(target, axis)
        if scatter is not None:
            return self._before_ring_scatter(scatter)
        chunks = constant(dims[axis])
        members, ring, reasons = self._grow(target, axis, chunks)
        if ring is not None:
            assert ring.attrs is not None, "a ring is a collective"
            members, ring, reasons = self._grow(target, axis, int(ring.attrs.workers), ring)
        region = MarkedRegion(target, axis, 0, members, ring)
        if ring is not None:
            assert ring.attrs is not None, "a ring is a collective"
            region.chunks = int(ring.attrs.workers)
            _check_even(ring)
        else:
            if not region.collectives:
                reason = f": {reasons[0]}" if reasons else ""
                raise NotOverlappableError(
                    f"no collective computes it, or only after other operators{reason}"
                )
            if not chunks:
                number = dims[axis] if chunks is None else 0
                raise NotOverlappableError(
                    f"the number of chunks is {number}; expected a constant above 0"
                )
            region.chunks = chunks
            _trim(region)
        for member in region.members.values():
            if 0 in map(constant, _dims(member.step.var) or ()):
                raise NotOverlappableError(f"{member.step.var.name} has no elements")
        _set_stages(region)
        return region

    def _ring_at_end(self, target: Step, axis: int) -> Member | None:
        """Return a reduce-scatter along the marked axis, after which come only elementwise steps.

        Its chunks are computed before it, so the operators after it do not change.
        """
        step: Step | None = target
        while step is not None:
            attrs = _attrs_of(step)
            if attrs is not None:
                splits = attrs.kind == "reduce_scatter" and int(attrs.split_axis or 0) == axis
                operand = step.value.args[0]
                return Member(step, axis, [(operand, axis)], attrs) if splits else None
            try:
                member = _member_of_operator(step, axis, 1)
            except NotOverlappableError:
                return None
            chunked = [operand for operand, at in member.operands if at == axis]
            if member.is_matmul or not chunked:
                return None
            step = next(filter(None, map(self._uses.binding_of, chunked)), None)
        return None

    def _before_ring_scatter(self, scatter: Member) -> MarkedRegion:
        """Return the region of a reduce-scatter in a ring: the matmul before it."""
        _check_even(scatter)
        assert scatter.attrs is not None, "it is a collective"
        ranks = int(scatter.attrs.workers)
        region = MarkedRegion(scatter.step, scatter.axis, ranks, ring=scatter)
        operand = self._uses.binding_of(scatter.step.value.args[0])
        if operand is not None and self._only_used_by(operand, {scatter.step.var}):
            with suppress(NotOverlappableError):  # without a matmul, the operand is scattered
                members, _, _ = self._grow(operand, scatter.axis, ranks, scatter)
                region.members = _up_to_matmuls(members, [operand.var])
        return region

    def _only_used_by(self, step: Step, variables: set[Any]) -> bool:
        return all(user.var in variables for user in self._uses.users[step.var])

    def _grow(
        self, target: Step, axis: int, chunks: int | None, ring: Member | None = None
    ) -> tuple[dict[Any, Member], Member | None, list[str]]:
        """Return the members upwards of a tensor, a ring among them, and why others are none.

        With a ring, it is the only collective: chunks are at different ranks at a time.
        """
        members: dict[Any, Member] = {}
        reasons: list[str] = []
        #: For each tensor, the axes that its users need, and whether a matmul is among them.
        axes: dict[Any, set[int]] = {target.var: {axis}}
        after_matmul: dict[Any, bool] = {target.var: False}
        found: Member | None = None
        pending = {target.var: target}
        while pending:
            step = max(pending.values(), key=lambda pending_step: pending_step.entry)
            del pending[step.var]
            member = None
            try:
                self._check(step, target, axes[step.var], members)
                (at,) = axes[step.var]
                member = self._member(step, at, chunks or 1, ring)
            except NotOverlappableError as reason:
                reasons.append(str(reason))
                if step is target:
                    raise
                continue
            if member.attrs is not None and _is_ring(member):
                if found is None and not any(other.attrs for other in members.values()):
                    found = member
                continue
            members[step.var] = member
            if member.attrs is not None and after_matmul[step.var]:
                continue
            for operand, operand_axis in member.operands:
                bound = self._uses.binding_of(operand)
                if bound is None or operand_axis is None:
                    continue
                axes.setdefault(bound.var, set()).add(operand_axis)
                after = after_matmul[step.var] or member.is_matmul
                after_matmul[bound.var] = after_matmul.get(bound.var, False) or after
                pending[bound.var] = bound
        ordered = sorted(members.items(), key=lambda item: item[1].step.entry)
        return dict(ordered), found, reasons

    def _check(self, step: Step, target: Step, axes: set[int], members: dict[Any, Member]) -> None:
        """Raise an error if a binding cannot belong to the region of a target."""
        name = step.var.name
        if step is target:
            return
        if step.var in self._boundaries:
            raise NotOverlappableError(f"{name} is marked, or computed in chunks already")
        if not step.shares_block(target):
            raise NotOverlappableError(f"{name} is computed in another block of bindings")
        if not self._only_used_by(step, set(members)):
            raise NotOverlappableError(f"{name} has other uses")
        if len(axes) > 1:
            raise NotOverlappableError(f"{name} is needed in chunks along two axes")

    def _member(self, step: Step, axis: int, chunks: int, ring: Member | None) -> Member:
        attrs = _attrs_of(step)
        if attrs is None:
            return _member_of_operator(step, axis, chunks)
        if ring is not None and step.var is not ring.step.var:
            raise NotOverlappableError(f"{attrs.kind} is another collective than that of the ring")
        if attrs.kind not in _KINDS:
            raise NotOverlappableError(f"{attrs.kind} is not computed in chunks")
        member = Member(step, axis, [(step.value.args[0], axis)], attrs)
        if attrs.uneven:
            raise NotOverlappableError(f"the shards of the {attrs.kind} are uneven")
        if attrs.scale is not None:
            raise NotOverlappableError("its sum is scaled; multiply the operand instead")
        if axis in _axes_of(attrs) and not _is_ring(member):
            raise NotOverlappableError(
                f"the {attrs.kind} splits axis {axis} itself; mark another axis"
            )
        return member


def _attrs_of(step: Step) -> CollectiveAttrs | None:
    """Return the attributes of a collective, None for anything else."""
    if not binds(step, COLLECTIVE):
        return None
    return CollectiveAttrs.of(step.value)


def _axes_of(attrs: CollectiveAttrs) -> list[int]:
    """Return the axes that a collective splits or concatenates."""
    return [int(axis) for axis in (attrs.split_axis, attrs.concat_axis) if axis is not None]


def _is_ring(member: Member) -> bool:
    """Return whether a collective gathers along the axis of chunks, which are then shards."""
    attrs = member.attrs
    return attrs is not None and attrs.kind == "allgather" and member.axis in _axes_of(attrs)


def _check_even(ring: Member) -> None:
    """Raise an error if a ring has uneven shards or one rank."""
    attrs = ring.attrs
    assert attrs is not None, "a ring is a collective"
    if attrs.uneven:
        raise NotOverlappableError(f"the shards of the {attrs.kind} are uneven")
    if attrs.scale is not None:
        raise NotOverlappableError("its sum is scaled; multiply the operand instead")
    if int(attrs.workers) < 2:
        raise NotOverlappableError("its team has one rank")


def _member_of_operator(step: Step, axis: int, chunks: int) -> Member:
    """Return the member of an operator; raise the reason if its rule does not allow chunks."""
    name = operator_of(step.value).removeprefix("relax.")
    if not name or callee_of(step.value) is not None:
        raise NotOverlappableError(f"{step.var.name} is not computed by an operator")
    name = short_name(step.value)
    operation = operation_of(step.value, step.var.ty)
    try:
        rule = None if operation is None else rule_of(operation)
    except Refusal as refusal:
        raise NotOverlappableError(f"R.{name}: {refusal}") from None
    if rule is None or not isinstance(step.var.ty, relax.TensorType):
        raise NotOverlappableError(f"R.{name} has no rule for its axes")
    label = rule.results[0][axis]
    if label is None or label in rule.related:
        raise NotOverlappableError(f"R.{name} repeats axis {axis} of its result")
    tensors = list(tensors_among(step.value.args))
    if not any(label in labels for labels in rule.operands):
        raise NotOverlappableError(f"no operand of R.{name} has axis {axis} of its result")
    reason = rule.why_not(label, chunks)
    placed = [] if reason else rule.result_placements((label, None), chunks)
    if reason or placed != [Shard(axis)]:
        raise NotOverlappableError(
            f"R.{name} cannot be computed in chunks along axis {axis}: "
            f"{reason or 'its result is split otherwise'}"
        )
    operands = [
        (tensor, labels.index(label) if label in labels else None)
        for tensor, labels in zip(tensors, rule.operands, strict=True)
    ]
    for tensor, at in operands:
        dims = _dims(tensor)
        if at is not None and (dims is None or not divides(chunks, dims[at])):
            raise NotOverlappableError(
                f"axis {at} of an operand of R.{name} is not a multiple of {chunks} long"
            )
    return Member(step, axis, operands, None, rule, label)


def _dims(tensor: Any) -> list[Any] | None:
    ty = tensor.ty
    if not isinstance(ty, relax.TensorType) or ty.dtype is None or ty.vdevice is not None:
        return None
    return extents(ty)


def _trim(region: MarkedRegion) -> None:
    """Remove members before the first collective, except the matmuls next to it."""
    downstream: set[Any] = set()
    for var, member in region.members.items():
        operands = [operand for operand, _ in member.operands]
        if member.attrs is not None or any(operand in downstream for operand in operands):
            downstream.add(var)
    sent = [
        operand
        for member in region.collectives
        for operand, _ in member.operands
        if operand in region.members
    ]
    kept = _up_to_matmuls(region.members, [var for var in sent if var not in downstream])
    region.members = {
        var: member for var, member in region.members.items() if var in downstream or var in kept
    }


def _up_to_matmuls(members: dict[Any, Member], variables: Sequence[Any]) -> dict[Any, Member]:
    """Return the members on the paths from some variables up to the nearest matmuls."""
    kept: set[Any] = set()

    def leads_to_matmul(variable: Any) -> bool:
        member = members.get(variable)
        if member is None:
            return False
        reached = member.is_matmul
        if not reached:
            for operand, axis in member.operands:
                if axis is not None and isinstance(operand, relax.Var) and leads_to_matmul(operand):
                    reached = True
        if reached:
            kept.add(variable)
        return reached

    for variable in variables:
        leads_to_matmul(variable)
    return {var: member for var, member in members.items() if var in kept}


def _set_stages(region: MarkedRegion) -> None:
    """Set the stage of each member: a collective ends the stage in which it is started."""
    for member in region.members.values():
        before = [
            region.members[operand]
            for operand, _ in member.operands
            if isinstance(operand, relax.Var) and operand in region.members
        ]
        stages = [other.stage + (other.attrs is not None) for other in before]
        member.stage = max(stages, default=0)
