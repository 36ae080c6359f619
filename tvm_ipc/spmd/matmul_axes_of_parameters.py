# SPDX-License-Identifier: Apache-2.0
"""The feature axes of parameters: which axis a matmul sums over, and which one its result has.

h = R.matmul(x, up)                     (8, 6): inputs are axis 0, outputs are axis 1
h = R.matmul(x, R.permute_dims(up))     (6, 8): inputs are axis 1, outputs are axis 0
e = R.take(table, ids, axis=0)          (10, 8): rows are axis 0

An axis is traced from the parameter through operators that combine it with other parameters and
constants only, such as a cast, a slice or a scale, to the first matmul, einsum or convolution.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from tvm import relax

from tvm_ipc.analysis.resolve_variables import variables_of
from tvm_ipc.analysis.walk_and_rewrite_bindings import walk
from tvm_ipc.spmd.axis_relation_graph import Tensor, tensors_of
from tvm_ipc.spmd.rules.axis_label_rule import Labels, Rule
from tvm_ipc.spmd.rules.operation import Operation, axis_of, operation_of
from tvm_ipc.spmd.rules.operator_rule_table import rule_for
from tvm_ipc.spmd.rules.reshape import RULES as RESHAPES
from tvm_ipc.spmd.rules.reshape import groups_of
from tvm_ipc.spmd.weight_placements_of_styles import Matmul, Use

#: By axis of a tensor, the axes of the parameter that it consists of.
_Origins: TypeAlias = tuple[frozenset[int], ...]


def record_uses(function: relax.Function, uses: Mapping[relax.Var, Use]) -> None:
    """Add the feature axes of parameters in a function to the uses of these parameters."""
    _Trace(function, uses)


class _Trace:
    """Traces the axes of parameters through a function, and records their uses."""

    def __init__(self, function: relax.Function, uses: Mapping[relax.Var, Use]) -> None:
        self.uses = uses
        #: The traced tensors, each with the parameters that it is computed from.
        self._origins: dict[Tensor, dict[relax.Var, _Origins]] = {
            (param, ()): {param: tuple(frozenset({axis}) for axis in range(int(param.ty.ndim)))}
            for param in uses
        }
        for binding, value in walk(function):
            for var in variables_of(value.cond if isinstance(value, relax.If) else value):
                if var in uses:
                    uses[var].unused = False
            if binding is None:
                continue
            results = [tensor for tensor, _ in tensors_of(binding.var)]
            if isinstance(value, relax.Call):
                tensors = [tensor for x in value.args for tensor, _ in tensors_of(x)]
                traced = {k: self._origins[x] for k, x in enumerate(tensors) if x in self._origins}
                operation = operation_of(value, binding.var.ty) if traced else None
                if operation is not None:
                    self._call(operation, binding.var, tensors, traced, results)
            elif isinstance(value, (relax.Var, relax.Tuple, relax.TupleGetItem)):
                for result, (tensor, _) in zip(results, tensors_of(value), strict=True):
                    if tensor in self._origins:
                        self._origins[result] = self._origins[tensor]

    def _call(
        self,
        op: Operation,
        var: relax.Var,
        tensors: Sequence[Tensor],
        traced: dict[int, dict[relax.Var, _Origins]],
        results: Sequence[Tensor],
    ) -> None:
        """Record the feature axes in a call, or trace the axes on to its results."""
        if op.operator in RESHAPES or op.operator == "comm.place":
            groups = [([axis], [axis]) for axis in range(op.ndim())]
            if op.operator in RESHAPES:
                groups = groups_of(op.dims(), op.result_dims())
            old_of = {new: olds for olds, news in groups for new in news}
            for param, origins in traced.get(0, {}).items():
                self._trace(
                    results[0],
                    param,
                    [
                        frozenset().union(*(origins[old] for old in old_of.get(axis, ())))
                        for axis in range(len(op.result_dims()))
                    ],
                )
            return
        if op.operator == "take" and op.ndim() == 2:
            # A take from a stack of matrices, such as those of experts, returns matrices.
            for param, origins in traced.get(0, {}).items():
                self.uses[param].rows |= origins[axis_of(op.attrs.axis or 0, 2)]
            return
        rule = rule_for(op)
        if rule is None:
            return
        in_results = {label for labels in rule.results for label in labels}
        if self._records_matmul(rule, in_results, var, traced):
            return
        others = set(range(1 if op.operator == "take" else len(tensors))).difference(traced)
        if any(isinstance(tensors[k][0], relax.Var) for k in others):
            return  # an activation: no weight is computed
        for k, by_param in traced.items():
            for param, origins in by_param.items():
                for result, labels in zip(results, rule.results, strict=True):
                    self._trace(result, param, _origins_of(labels, rule.operands[k], origins))

    def _records_matmul(
        self,
        rule: Rule,
        in_results: set[int | None],
        var: relax.Var,
        traced: dict[int, dict[relax.Var, _Origins]],
    ) -> bool:
        """Record a call that sums over an axis of two operands; return whether it does."""
        is_matmul = False
        for k, labels in enumerate(rule.operands):
            in_others = {label for n, each in enumerate(rule.operands) if n != k for label in each}
            inputs = [
                label is not None and label in in_others and label not in in_results
                for label in labels
            ]
            outputs = [
                label is not None and label in in_results and label not in in_others
                for label in labels
            ]
            is_matmul = is_matmul or any(inputs)
            if not any(inputs):
                continue
            for param, origins in traced.get(k, {}).items():
                self.uses[param].matmuls.append(
                    Matmul(
                        str(var.name),
                        frozenset().union(*(o for o, x in zip(origins, outputs, strict=True) if x)),
                        frozenset().union(*(o for o, x in zip(origins, inputs, strict=True) if x)),
                    )
                )
        return is_matmul

    def _trace(self, result: Tensor, param: relax.Var, origins: Sequence[frozenset[int]]) -> None:
        """Record that a result is computed from a parameter."""
        by_param = self._origins.setdefault(result, {})
        earlier = by_param.get(param, (frozenset(),) * len(origins))
        by_param[param] = tuple(a | b for a, b in zip(earlier, origins, strict=True))


def _origins_of(
    result_labels: Labels, labels: Labels, origins: Sequence[frozenset[int]]
) -> list[frozenset[int]]:
    """Return the origins of the axes of a result, of one operand with labels and origins."""
    by_label = dict(zip(labels, origins, strict=True))
    return [
        frozenset() if label is None else by_label.get(label, frozenset())
        for label in result_labels
    ]
