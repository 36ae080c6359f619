# SPDX-License-Identifier: Apache-2.0
"""A function as the line of operators that stages of a pipeline divide among them.

    places = R.arange(n)                  of the inputs: each stage that needs it computes it
    wide = R.permute_dims(w1)             of weights: that too, where the weights are
    y = R.matmul(x, wide)                 0: of both
    z = R.nn.relu(y)                      1
    ---- a stage may end here: z is sent
    out = R.matmul(z, w2)                 2

What is made of inputs and of weights has a place in the line. What is live between two places goes
from one stage to the next.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cached_property

from tvm import relax

from tvm_ipc.comm.operator import extents
from tvm_ipc.errors import TransformError
from tvm_ipc.parallel.costs import Costs, seconds_of, shape_of
from tvm_ipc.parallel.uses import variables_of
from tvm_ipc.transform.ir.rewrite import walk


class Line:
    """The operators of a function, as one rank would run all of them.

    Parameters
    ----------
    name : of the function.
    function : without branches and effects.
    weights : names of the parameters that are weights.
    """

    def __init__(
        self, name: str, function: relax.Function, weights: Mapping[relax.Var, str]
    ) -> None:
        self.name, self.function, self.weights = name, function, weights
        self.bindings = _bindings(name, function)
        self.values = {one.var: one.value for one in self.bindings}
        tuples: set[relax.Var] = set()
        self.result = self._resolved(function.body.body, tuples)
        for one in self.bindings:
            shared = tuples.intersection(variables_of(one.value))
            if shared and one.var not in tuples:
                raise TransformError(
                    f"parallelize: function {name!r} returns the tuple {shared.pop().name!r}, and "
                    f"uses it for {one.var.name!r} too; use its fields there"
                )
        #: Of what is made of weights alone, and of weights: which ones.
        self.of_weights = {var: frozenset((one,)) for var, one in weights.items()}
        found = self._found(tuples)
        order = self._in_order(found)
        #: What has a place in the line, in order, and for each place the weights that it is given.
        self.places = {var: place for place, var in enumerate(order)}
        self.given = [found[var] for var in order]
        self.bindings = self._sorted()

    def _found(self, tuples: Collection[relax.Var]) -> dict[relax.Var, frozenset[str]]:
        """Return what is made of inputs and of weights, and the weights that each is given."""
        of_inputs = set(self.function.params) - set(self.weights)
        nothing: frozenset[str] = frozenset()
        found: dict[relax.Var, frozenset[str]] = {}
        for one in self.bindings:
            used = list(variables_of(one.value))
            direct = nothing.union(*(self.of_weights.get(var, nothing) for var in used))
            by_inputs = any(var in of_inputs for var in used)
            if one.var in tuples:
                continue  # of results: each of them is where it is made
            if any(var in found for var in used) or (by_inputs and direct):
                found[one.var] = direct
            elif direct:
                self.of_weights[one.var] = direct
            elif by_inputs:
                of_inputs.add(one.var)
        return found

    def _in_order(self, found: Mapping[relax.Var, Collection[str]]) -> list[relax.Var]:
        """Return what is found in the order of the program, but results soon after what they need.

        That of which nothing with weights is made, such as a gather of a result at the end of the
        program, is in the stage that has what it is made of.
        """
        leads: set[relax.Var] = set()
        for var in reversed(found):
            if found[var] or var in leads:
                leads.update(variables_of(self.values[var]))
        keys: dict[relax.Var, tuple[int, bool, int]] = {}
        for k, var in enumerate(found):
            if found[var] or var in leads:
                keys[var] = (k, False, k)
            else:
                after = max(keys[x][0] for x in variables_of(self.values[var]) if x in keys)
                keys[var] = (after, True, k)
        return sorted(keys, key=keys.__getitem__)

    def _sorted(self) -> list[relax.Binding]:
        """Return the bindings in the order of the line, what else they need before them."""
        binding_of = {one.var: one for one in self.bindings}
        done: dict[relax.Var, relax.Binding] = {}

        def need(var: relax.Var) -> None:
            if var in done or var not in binding_of:
                return
            for x in variables_of(self.values[var]):
                if x not in self.places:
                    need(x)
            done[var] = binding_of[var]

        for var in (*self.places, *binding_of):
            need(var)
        return list(done.values())

    @cached_property
    def live(self) -> list[tuple[relax.Var, ...]]:
        """What is made before each place, and used there or after it."""
        last: dict[relax.Var, int] = {}
        for one in self.bindings:
            at = self.places.get(one.var)
            if at is not None:  # what only results are made of is not used
                last.update((var, at) for var in variables_of(one.value) if var in self.places)
        found: list[tuple[relax.Var, ...]] = [()]
        for var in self.places:
            at = self.places[var] + 1
            found.append(tuple(x for x in (*found[-1], var) if last.get(x, -1) >= at))
        return found

    def seconds(self, costs: Costs) -> list[float]:
        """Return what is predicted for each place."""
        return [seconds_of(var, self.values[var], costs).total for var in self.places]

    def first(self, weights: Collection[str]) -> int | None:
        """Return the first place that is given one of some weights."""
        wanted = set(weights)
        return next((k for k, given in enumerate(self.given) if given & wanted), None)

    def begin(self, place: int) -> int:
        """Return where a stage begins that begins with what is given weights at a place.

        Of the places since the one before that is given weights it is the last one before which
        the fewest bytes are live.
        """
        after = next((k + 1 for k in range(place - 1, -1, -1) if self.given[k]), 0)
        best = min(range(place, after - 1, -1), key=self._bytes)
        if self._bytes(best) == float("inf"):
            shown = ", ".join(f"{var.name}: {var.ty}" for var in self.live[place])
            raise TransformError(
                f"parallelize: function {self.name!r}: a stage that begins at "
                f"{list(self.places)[place].name!r} is sent {shown}; it can be sent tensors of "
                "known extents; let it begin elsewhere, with stages="
            )
        return best

    def _bytes(self, place: int) -> float:
        live = self.live[place]
        if not all(isinstance(x.ty, relax.TensorType) and extents(x.ty) is not None for x in live):
            return float("inf")
        return sum(shape_of(var.ty).bytes for var in live)

    def _resolved(self, result: relax.Expr, tuples: set[relax.Var]) -> relax.Expr:
        """Return a result with tuples in the place of variables that are bound to tuples."""
        value = self.values.get(result) if isinstance(result, relax.Var) else None
        if isinstance(value, relax.Tuple):
            tuples.add(result)
        if isinstance(value, (relax.Tuple, relax.Var)):
            return self._resolved(value, tuples)
        if isinstance(result, relax.Tuple):
            return relax.Tuple([self._resolved(field, tuples) for field in result.fields])
        return result


def _bindings(name: str, function: relax.Function) -> list[relax.Binding]:
    if not function.is_pure:
        raise TransformError(
            f"parallelize: function {name!r} has effects, and stages of a pipeline are of "
            "functions that have none; leave out the axis 'pp' of the mesh, or the effects"
        )
    found = []
    for binding, value in walk(function):
        if binding is not None and isinstance(value, (relax.If, relax.Function)):
            raise TransformError(
                f"parallelize: function {name!r} has a branch, or a function within, at "
                f"{binding.var.name!r}; stages of a pipeline divide operators one after the other"
            )
        if binding is not None:
            found.append(binding)
    return found
