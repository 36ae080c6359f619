# SPDX-License-Identifier: Apache-2.0
"""Propagation of the placements that a program specifies, forwards and backwards, to all tensors.

    h = R.matmul(x, up)                         up is S[1], because h is
    a = R.nn.gelu(h)                            h is S[1], because a is
    b = R.comm.place(a, mesh, ["S[1]"])         b is S[1], so a is too
    y = R.matmul(b, down)                       down is S[0]: the matmul sums over it

Each step reads the sharding rule of its operator in both directions. Forward and backward sweeps
alternate until nothing changes, and the first placement that reaches a tensor holds:

1. A placement that the program, the plan or a cache specifies never changes.
2. Forward sweeps precede backward sweeps, so operands decide before results do.
3. A forward sweep follows the program, a backward sweep its reverse order.
4. If operands are sharded along different axes, the operator shards the one that moves the fewest
   bytes.

Where two placements meet, the tensor is redistributed. Between an annotation and the operator
whose result flows into it, this happens at the tensor with the fewest bytes; of several such
tensors at the last one.

An operand that is needed whole, because it is a result of the function or an operand of an operator
without a rule, is not sharded: the operator slices it without communication. A parameter is not
sharded if it has fewer elements along the axis than there are ranks, or if its
extent is a symbol that results have and that may not be a multiple of the ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tvm import relax, tirx

from tvm_ipc.analysis.resolve_variables import (
    body_bindings,
    expanded,
    leaves_of,
    values_of,
    variables_of,
)
from tvm_ipc.comm import Mesh, Placement, Replica, Shard
from tvm_ipc.comm.collective_relax_op import extents
from tvm_ipc.comm.extent_arithmetic import constant, divides
from tvm_ipc.comm.place_op import PlaceAttrs, is_place
from tvm_ipc.comm.placements import Placements, placements_of
from tvm_ipc.spmd.axis_relation_graph import Tensor, tensors_of
from tvm_ipc.spmd.extents_known_on_ranks import symbols_of_results
from tvm_ipc.spmd.insert_reshards import Flow, resolve_with_rule, transfer_bytes
from tvm_ipc.spmd.placements.place_calls import place_calls
from tvm_ipc.spmd.rules.axis_label_rule import Choice, Rule
from tvm_ipc.spmd.rules.operation import operation_of, tensors_among
from tvm_ipc.spmd.rules.operator_rule_table import rule_for


@dataclass(frozen=True)
class Propagated:
    """Placements that follow from the annotations of a program.

    Attributes
    ----------
    params : the placements of the parameters that annotations reach, by name.
    flows : the choices of each function, by its name.
    """

    params: dict[str, Placements] = field(default_factory=dict)
    flows: dict[str, Flow] = field(default_factory=dict)


def propagate_annotations(
    functions: Mapping[str, relax.Function],
    mesh: Mesh,
    names: Mapping[relax.Var, str],
    specified: Mapping[str, Placements],
    planned: Mapping[str, Placements],
    free: Collection[str],
) -> Propagated:
    """Return the placements that follow from `R.comm.place` in some functions.

    Parameters
    ----------
    functions : the functions of a global program.
    mesh : the mesh of its ranks.
    names : the names of parameters; parameters with one name are one tensor.
    specified : the placements of parameters that the program specifies.
    planned : the placements of parameters that a plan specifies. They flow through the program, but
        shard no other parameters.
    free : the names of the parameters that annotations may shard.
    """
    if not any(
        not PlaceAttrs.of(call).inserted for f in functions.values() for call in place_calls(f)
    ):
        return Propagated()
    return _Propagation(functions, mesh, names, specified, planned, frozenset(free)).result()


@dataclass(frozen=True)
class _Fact:
    """The placement of a tensor along one axis of the mesh.

    Attributes
    ----------
    placement : the placement.
    annotated : whether it follows from an annotation of the program.
    """

    placement: Placement
    annotated: bool


@dataclass(eq=False)
class _Step:
    """A binding with its tensors.

    Attributes
    ----------
    function, var, value : the function, the variable and the value of the binding.
    operands, results : the tensors of the call; those of other values pass unchanged.
    rule : the rule of the call; None if it is no call.
    choices : by axis of the mesh, the label that the call shards, and whether it follows from an
        annotation.
    """

    function: str
    var: relax.Var
    value: relax.Expr
    operands: list[tuple[Tensor, relax.TensorType]]
    results: list[tuple[Tensor, relax.TensorType]]
    rule: Rule | None
    choices: dict[int, tuple[Choice, bool]] = field(default_factory=dict)

    @property
    def is_place(self) -> bool:
        return is_place(self.value)


class _Propagation:
    """The sweeps over some functions."""

    def __init__(
        self,
        functions: Mapping[str, relax.Function],
        mesh: Mesh,
        names: Mapping[relax.Var, str],
        specified: Mapping[str, Placements],
        planned: Mapping[str, Placements],
        free: frozenset[str],
    ) -> None:
        self.mesh, self.names, self.free = mesh, names, free
        self.axes = [Mesh({name: extent}) for name, extent in mesh.axes.items()]
        self.facts: dict[tuple[Tensor, int], _Fact] = {}
        self.fixed: set[Tensor] = set()
        self.uses: dict[str, Counter[relax.Var]] = {}
        #: The types of the parameters that annotations may shard.
        self.types: dict[Tensor, relax.TensorType] = {}
        self.params = {param for function in functions.values() for param in function.params}
        #: Tensors that are needed whole: results of functions, and operands without a rule.
        self.whole: set[Tensor] = set()
        #: The symbols of results, which every rank has to know.
        self.returned = symbols_of_results(functions)
        self.steps: list[_Step] = []
        for name, function in functions.items():
            self.steps += self._steps(name, function)
        for placements_by_name, annotated in ((specified, True), (planned, False)):
            for name, placements in placements_by_name.items():
                self._fix((name, ()), placements, annotated)
        for step in self.steps:
            if step.is_place and not PlaceAttrs.of(step.value).inserted:
                placements = placements_of(mesh, step.value.attrs.placements)
                self._fix(step.results[0][0], placements, annotated=True)
        while self._sweep(self.steps, self._forward) | self._sweep(
            self.steps[::-1], self._backward
        ):
            pass

    def result(self) -> Propagated:
        """Return the placements of parameters and the flows of functions."""
        flows: dict[str, Flow] = {}
        for step in self.steps:
            flow = flows.setdefault(step.function, Flow())
            if step.rule is None:
                continue
            flow.choices[step.var] = {k: choice for k, (choice, _) in step.choices.items()}
            if isinstance(step.var.ty, relax.TensorType):
                placements = self._placements(step.results[0][0])
                if any(isinstance(placement, Shard) for placement in placements):
                    flow.results[step.var] = placements
        producers = {step.var: step for step in self.steps}
        for step in self.steps:
            if step.is_place:
                self._move_early(step, producers, flows[step.function])
        params = {}
        for tensor in self.types:
            placements = self._placements(tensor)
            if tensor not in self.fixed and any(isinstance(each, Shard) for each in placements):
                params[tensor[0]] = placements
        return Propagated(params, flows)

    # ---- the program ------------------------------------------------------------------------

    def _steps(self, name: str, function: relax.Function) -> Iterator[_Step]:
        for param in function.params:
            for tensor, ty in self._tensors(param):
                if not tensor[1] and tensor[0] in self.free:
                    self.types.setdefault(tensor, ty)
        uses = self.uses[name] = Counter(variables_of(function.body.body))
        values = values_of(function)
        for result in leaves_of(expanded(function.body.body, values)):
            self.whole.update(tensor for tensor, _ in self._tensors(result))
        for binding in body_bindings(function):
            var, value = binding.var, binding.value
            uses.update(variables_of(value))
            if isinstance(binding, relax.MatchCast):
                self.whole.update(tensor for tensor, _ in self._tensors(value))
                continue
            results = list(self._tensors(var))
            if isinstance(value, relax.Call):
                operands = [pair for x in value.args for pair in self._tensors(x)]
                rule = None if is_place(value) else rule_for(operation_of(value, var.ty))
                if rule is None and not is_place(value):
                    self.whole.update(tensor for tensor, _ in operands)
                else:
                    yield _Step(name, var, value, operands, results, rule)
            elif isinstance(value, (relax.Var, relax.Tuple, relax.TupleGetItem)):
                yield _Step(name, var, value, list(self._tensors(value)), results, None)

    def _tensors(self, x: relax.Expr) -> Iterator[tuple[Tensor, relax.TensorType]]:
        for (key, path), ty in tensors_of(x):
            name = self.names.get(key, key) if isinstance(key, relax.Var) else key
            yield (name, path), ty

    # ---- facts ------------------------------------------------------------------------------

    def _placement(self, tensor: Tensor, index: int) -> Placement:
        fact = self.facts.get((tensor, index))
        return Replica() if fact is None else fact.placement

    def _placements(self, tensor: Tensor) -> Placements:
        return tuple(self._placement(tensor, index) for index in range(len(self.axes)))

    def _fix(self, tensor: Tensor, placements: Placements, annotated: bool) -> None:
        self.fixed.add(tensor)
        for index, placement in enumerate(placements):
            self.facts[tensor, index] = _Fact(placement, annotated)

    def _set_operand(
        self, tensor: Tensor, index: int, placement: Placement, annotated: bool
    ) -> bool:
        """Set the placement of an operand that has none, unless it is needed whole."""
        return tensor not in self.whole and self._set(tensor, index, placement, annotated)

    def _set(self, tensor: Tensor, index: int, placement: Placement, annotated: bool) -> bool:
        """Set the placement of a tensor that has none; return whether it is new."""
        if not isinstance(placement, Shard) or tensor in self.fixed:
            return False
        if (tensor, index) in self.facts or not self._may_shard(tensor, index, placement):
            return False
        is_param = isinstance(tensor[0], str) or tensor[0] in self.params
        if is_param and not (annotated and self._may_shard_param(tensor, index, placement)):
            return False
        self.facts[tensor, index] = _Fact(placement, annotated)
        return True

    def _may_shard(self, tensor: Tensor, index: int, placement: Shard) -> bool:
        """Return whether no other axis of the mesh shards the same axis of a tensor."""
        others = (self._placement(tensor, k) for k in range(len(self.axes)) if k != index)
        return all(not isinstance(x, Shard) or x.axis != placement.axis for x in others)

    def _may_shard_param(self, tensor: Tensor, index: int, placement: Shard) -> bool:
        """Return whether callers may pass shards of a parameter."""
        if tensor not in self.types:
            return False
        extent = (extents(self.types[tensor]) or [])[placement.axis]
        number, workers = constant(extent), self._workers(index)
        if number is None:
            return divides(workers, extent) or not self.returned.intersection(
                tirx.analysis.undefined_vars(extent)
            )
        return number >= workers

    def _workers(self, index: int) -> int:
        return len(self.axes[index].ranks)

    # ---- sweeps -----------------------------------------------------------------------------

    def _sweep(self, steps: Sequence[_Step], move: Callable[[_Step, int], bool]) -> bool:
        """Return whether a sweep over the steps in this order set a placement."""
        moved = [move(step, index) for step in steps for index in range(len(self.axes))]
        return any(moved)

    def _forward(self, step: _Step, index: int) -> bool:
        if step.rule is None:
            copied = () if step.is_place else zip(step.operands, step.results, strict=True)
            moved = [self._copy(pair, index, self._set) for pair in copied]
            return any(moved)
        if index not in step.choices:
            facts = [self.facts.get((tensor, index)) for tensor, _ in step.operands]
            current = [(Replica() if fact is None else fact.placement,) for fact in facts]
            if not any(isinstance(placement, Shard) for (placement,) in current):
                return False
            mesh, operands = self.axes[index], list(tensors_among(step.value.args))
            resolved = resolve_with_rule(
                mesh, step.rule, step.value, step.var.ty, operands, current
            )
            choice = None if resolved is None else resolved.choices[0]
            if choice is None:
                return False
            labels = zip(facts, step.rule.operands, strict=True)
            annotated = any(
                fact.annotated and axes[fact.placement.axis] == choice[0]
                for fact, axes in labels
                if fact is not None and isinstance(fact.placement, Shard)
            )
            step.choices[index] = choice, annotated
        return self._apply(step, index)

    def _backward(self, step: _Step, index: int) -> bool:
        if step.rule is None:
            pairs = zip(step.results, step.operands, strict=True)
            moved = [self._copy(pair, index, self._set_operand) for pair in pairs]
            return any(moved)
        for k, (tensor, _) in enumerate(step.results if index not in step.choices else ()):
            fact = self.facts.get((tensor, index))
            if fact is None or not isinstance(fact.placement, Shard):
                continue
            choice = step.rule.choice_of_result(k, fact.placement, self._workers(index))
            if choice is not None:
                step.choices[index] = choice, fact.annotated
                break
        return self._apply(step, index)

    def _copy(
        self,
        pair: tuple[tuple[Tensor, relax.TensorType], tuple[Tensor, relax.TensorType]],
        index: int,
        set_placement: Callable[[Tensor, int, Placement, bool], bool],
    ) -> bool:
        """Give a tensor the placement of an equal one; return whether it is new."""
        (source, _), (target, _) = pair
        fact = self.facts.get((source, index))
        return fact is not None and set_placement(target, index, fact.placement, fact.annotated)

    def _apply(self, step: _Step, index: int) -> bool:
        """Set the placements of operands and results that follow from the choice of a call."""
        if index not in step.choices:
            return False
        assert step.rule is not None
        choice, annotated = step.choices[index]
        workers = self._workers(index)
        needed = [
            step.rule.operand_placement(k, choice, workers) for k in range(len(step.operands))
        ]
        made = step.rule.result_placements(choice, workers)
        moved = [
            set_placement(tensor, index, placement, annotated)
            for tensors, placements, set_placement in (
                (step.operands, needed, self._set_operand),
                (step.results, made, self._set),
            )
            for (tensor, _), placement in zip(tensors, placements, strict=True)
        ]
        return any(moved)

    # ---- redistribution ---------------------------------------------------------------------

    def _move_early(self, step: _Step, producers: Mapping[relax.Var, _Step], flow: Flow) -> None:
        """Redistribute a tensor before the annotation if an earlier tensor has fewer bytes."""
        operand, target = step.operands[0][0], self._placements(step.results[0][0])
        var = step.value.args[0]
        source = self._placements(operand)
        meet = [
            isinstance(a, Shard) and isinstance(b, Shard) and a != b
            for a, b in zip(source, target, strict=True)
        ]
        if not any(meet) or not isinstance(var, relax.Var):
            return
        least = transfer_bytes(self.mesh, var.ty, source, target)
        path: list[_Reversed] = []
        shortest = 0
        while (reversed_step := self._reversed(var, target, producers)) is not None:
            path.append(reversed_step)
            var, target = reversed_step.operand, reversed_step.placements
            source = self._placements(next(self._tensors(var))[0])
            size = transfer_bytes(self.mesh, var.ty, source, target)
            if size < least:
                least, shortest = size, len(path)
        for reversed_step in path[:shortest]:
            flow.choices[reversed_step.var] = dict(enumerate(reversed_step.choices))
            flow.results.pop(reversed_step.var, None)
            for tensor, placements in reversed_step.params.items():
                for index, placement in enumerate(placements):
                    self.facts[tensor, index] = _Fact(placement, annotated=True)
        if shortest:
            flow.moved[path[shortest - 1].operand] = path[shortest - 1].placements

    def _reversed(
        self, var: relax.Var, target: Placements, producers: Mapping[relax.Var, _Step]
    ) -> _Reversed | None:
        """Return how a call computes a tensor in another placement from one moved operand.

        The result is None if the tensor has further uses, or if another operand would move too.
        """
        step = producers.get(var)
        if step is None or step.rule is None or len(step.results) != 1:
            return None
        uses = self.uses[step.function]
        if uses[var] != 1:
            return None
        choices: list[Choice] = []
        for index, placement in enumerate(target):
            choice = None
            if isinstance(placement, Shard):
                choice = step.rule.choice_of_result(0, placement, self._workers(index))
                if choice is None:
                    return None
            choices.append(choice)
        moved: dict[relax.Var, Placements] = {}
        params: dict[Tensor, Placements] = {}
        operands = zip(step.operands, tensors_among(step.value.args), strict=True)
        for k, ((tensor, _), x) in enumerate(operands):
            needed = tuple(
                step.rule.operand_placement(k, choice, self._workers(index))
                for index, choice in enumerate(choices)
            )
            current = self._placements(tensor)
            if current == needed or not any(isinstance(each, Shard) for each in current):
                continue
            if tensor in self.types and tensor not in self.fixed and uses[x] == 1:
                params[tensor] = needed
            elif isinstance(x, relax.Var) and x not in self.params:
                moved[x] = needed
            else:
                return None
        if len(moved) != 1:
            return None
        ((operand, placements),) = moved.items()
        if uses[operand] != 1:
            return None
        return _Reversed(var, tuple(choices), operand, placements, params)


@dataclass(frozen=True, eq=False)
class _Reversed:
    """A call on the way from an annotation back to where another placement comes from.

    Attributes
    ----------
    var : the variable of the call.
    choices : by axis of the mesh, the label that the call has to shard.
    operand : the operand that has to move.
    placements : its placements afterwards.
    params : the placements of the parameters that have no other use.
    """

    var: relax.Var
    choices: tuple[Choice, ...]
    operand: relax.Var
    placements: Placements
    params: dict[Tensor, Placements]
