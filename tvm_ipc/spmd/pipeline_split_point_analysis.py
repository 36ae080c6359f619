# SPDX-License-Identifier: Apache-2.0
"""The sequence of operators of a function, which pipeline stages split among them.

    positions = R.arange(n)               from inputs only: each stage that needs it computes it
    wide = R.permute_dims(w1)             from weights only: the stages with the weight compute it
    y = R.matmul(x, wide)                 position 0: from both
    z = R.nn.relu(y)                      position 1
    ---- a stage may end here: z is sent
    out = R.matmul(z, w2)                 position 2

Values that depend on inputs and on weights have a position in the sequence. A stage sends the
values that are live at its end to the next stage.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cached_property

from tvm import relax

from tvm_ipc.analysis.resolve_variables import expanded, leaves_of, values_of, variables_of
from tvm_ipc.analysis.walk_and_rewrite_bindings import walk
from tvm_ipc.comm.collective_relax_op import extents
from tvm_ipc.errors import TransformError
from tvm_ipc.spmd.op_costs import Costs, seconds_of, shape_of


class OpOrder:
    """The operators of a function in the order in which one rank would run all of them.

    Parameters
    ----------
    name : the name of the function.
    function : a function without branches and effects.
    weights : the names of the parameters that are weights.
    """

    def __init__(
        self, name: str, function: relax.Function, weights: Mapping[relax.Var, str]
    ) -> None:
        self.name, self.function, self.weights = name, function, weights
        self.bindings = _bindings(name, function)
        self.values = values_of(function)
        self.result = expanded(function.body.body, self.values)
        tuples = self._tuples_in(function.body.body)
        for binding in self.bindings:
            shared = tuples.intersection(variables_of(binding.value))
            if shared and binding.var not in tuples:
                raise TransformError(
                    f"parallelize: function {name!r} returns the tuple {shared.pop().name!r}, and "
                    f"also uses it for {binding.var.name!r}; use its fields there"
                )
        #: The weights, and values that depend on weights only, with the names of their weights.
        self.of_weights = {var: frozenset((weight,)) for var, weight in weights.items()}
        weights_used = self._weights_used(tuples)
        order = self._in_order(weights_used)
        #: The position of each value, in order.
        self.positions = {var: position for position, var in enumerate(order)}
        #: The weights that the operator at each position uses.
        self.weights_at = [weights_used[var] for var in order]
        self.bindings = self._sorted()

    def _weights_used(self, tuples: Collection[relax.Var]) -> dict[relax.Var, frozenset[str]]:
        """Return the values that depend on inputs and on weights, with the weights they use."""
        of_inputs = set(self.function.params) - set(self.weights)
        nothing: frozenset[str] = frozenset()
        weights_used: dict[relax.Var, frozenset[str]] = {}
        for binding in self.bindings:
            used = list(variables_of(binding.value))
            direct = nothing.union(*(self.of_weights.get(var, nothing) for var in used))
            uses_inputs = any(var in of_inputs for var in used)
            if binding.var in tuples:
                continue  # each field of a returned tuple has its own position
            if any(var in weights_used for var in used) or (uses_inputs and direct):
                weights_used[binding.var] = direct
            elif direct:
                self.of_weights[binding.var] = direct
            elif uses_inputs:
                of_inputs.add(binding.var)
        return weights_used

    def _in_order(self, weights_used: Mapping[relax.Var, Collection[str]]) -> list[relax.Var]:
        """Return the values in the order of the program, but results right after their operands.

        A value from which nothing with weights is computed, such as a gather of a result at the
        end of the program, belongs to the stage that has its operands.
        """
        leads_to_weights: set[relax.Var] = set()
        for var in reversed(weights_used):
            if weights_used[var] or var in leads_to_weights:
                leads_to_weights.update(variables_of(self.values[var]))
        keys: dict[relax.Var, tuple[int, bool, int]] = {}
        for k, var in enumerate(weights_used):
            if weights_used[var] or var in leads_to_weights:
                keys[var] = (k, False, k)
            else:
                after = max(keys[x][0] for x in variables_of(self.values[var]) if x in keys)
                keys[var] = (after, True, k)
        return sorted(keys, key=keys.__getitem__)

    def _sorted(self) -> list[relax.Binding]:
        """Return the bindings by position, each after the values without a position it needs."""
        binding_of = {binding.var: binding for binding in self.bindings}
        done: dict[relax.Var, relax.Binding] = {}

        def add(var: relax.Var) -> None:
            if var in done or var not in binding_of:
                return
            for x in variables_of(self.values[var]):
                if x not in self.positions:
                    add(x)
            done[var] = binding_of[var]

        for var in (*self.positions, *binding_of):
            add(var)
        return list(done.values())

    @cached_property
    def live(self) -> list[tuple[relax.Var, ...]]:
        """Return for each position the values computed before it and used at it or later."""
        last: dict[relax.Var, int] = {}
        for binding in self.bindings:
            position = self.positions.get(binding.var)
            if position is not None:  # values without a position keep nothing alive
                used = variables_of(binding.value)
                last.update((var, position) for var in used if var in self.positions)
        live: list[tuple[relax.Var, ...]] = [()]
        for var in self.positions:
            position = self.positions[var] + 1
            live.append(tuple(x for x in (*live[-1], var) if last.get(x, -1) >= position))
        return live

    def seconds(self, costs: Costs) -> list[float]:
        """Return the predicted seconds of the operator at each position."""
        return [seconds_of(var, self.values[var], costs).total for var in self.positions]

    def first(self, weights: Collection[str]) -> int | None:
        """Return the first position whose operator uses one of some weights, or None."""
        names = set(weights)
        return next((k for k, used in enumerate(self.weights_at) if used & names), None)

    def begin(self, position: int) -> int:
        """Return the begin of a stage whose first operator with weights is at a position.

        It is the last position with the fewest live bytes since the previous operator with weights.
        """
        after = next((k + 1 for k in range(position - 1, -1, -1) if self.weights_at[k]), 0)
        best = min(range(position, after - 1, -1), key=self._live_bytes)
        if self._live_bytes(best) == float("inf"):
            received = ", ".join(f"{var.name}: {var.ty}" for var in self.live[position])
            raise TransformError(
                f"parallelize: function {self.name!r}: a stage that begins at "
                f"{list(self.positions)[position].name!r} receives {received}; only tensors of "
                "known extents can be sent; choose another begin with stages="
            )
        return best

    def _live_bytes(self, position: int) -> float:
        live = self.live[position]
        if not all(isinstance(x.ty, relax.TensorType) and extents(x.ty) is not None for x in live):
            return float("inf")
        return sum(shape_of(var.ty).bytes for var in live)

    def _tuples_in(self, result: relax.Expr) -> set[relax.Var]:
        """Return the variables of tuples in a result."""
        tuples: set[relax.Var] = set()
        for var in leaves_of(result):
            value = self.values.get(var) if isinstance(var, relax.Var) else None
            if isinstance(value, relax.Tuple):
                tuples.add(var)
            if isinstance(value, (relax.Tuple, relax.Var)):
                tuples |= self._tuples_in(value)
        return tuples


def _bindings(name: str, function: relax.Function) -> list[relax.Binding]:
    if not function.is_pure:
        raise TransformError(
            f"parallelize: function {name!r} has effects, but only functions without effects can "
            "be split into pipeline stages; remove the effects, or the axis 'pp' of the mesh"
        )
    bindings = []
    for binding, value in walk(function):
        if binding is not None and isinstance(value, (relax.If, relax.Function)):
            raise TransformError(
                f"parallelize: function {name!r} has a branch or a nested function at "
                f"{binding.var.name!r}; pipeline stages need a function without branches"
            )
        if binding is not None:
            bindings.append(binding)
    return bindings
