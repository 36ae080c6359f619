# SPDX-License-Identifier: Apache-2.0
"""A function run over abstract states, and a summary of what it does to its caller."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm
from tvm import relax

from tvm_ipc.transform.safety.evaluate import Evaluation
from tvm_ipc.transform.safety.extents import Extents
from tvm_ipc.transform.safety.hazards import Hazard, HazardKind
from tvm_ipc.transform.safety.memory import (
    Buffer,
    Leaf,
    Place,
    State,
    Storage,
    Summary,
    Value,
    objects,
    storage_of,
)
from tvm_ipc.transform.safety.prim_funcs import written_parameters
from tvm_ipc.transform.safety.usage import Usage, bindings, is_kill, variables


class Checker:
    """What is known of a module: its hazards so far, and summaries of its functions."""

    def __init__(self, mod: tvm.IRModule, assume_no_exit_barrier: bool) -> None:
        self.assume_no_exit_barrier = assume_no_exit_barrier
        self.extents = Extents()
        self.hazards: dict[tuple[Any, ...], Hazard] = {}
        self._functions = {g.name_hint: f for g, f in mod.functions_items()}
        self._summaries: dict[str, Summary] = {}
        self._running: set[str] = set()
        self._recursive: set[str] = set()
        self._written: dict[str, frozenset[int]] = {}

    def check(self) -> list[Hazard]:
        """Return every hazard of every function."""
        for name, function in self._functions.items():
            if isinstance(function, relax.Function):
                self.summary(name)
        return list(self.hazards.values())

    def function(self, name: str) -> Any:
        """Return a function of the module, or None."""
        return self._functions.get(name)

    def written(self, name: str) -> frozenset[int]:
        """Return which parameters a PrimFunc writes."""
        if name not in self._written:
            self._written[name] = written_parameters(self._functions[name])
        return self._written[name]

    def summary(self, name: str) -> Summary | None:
        """Return what a Relax function does, None for one that is being looked at: recursion."""
        if name in self._running:
            self._recursive.add(name)
            return None
        if name not in self._summaries:
            self._running.add(name)
            self._summaries[name] = Run(self, name).function(self._functions[name])
            self._running.remove(name)
        return self._summaries[name]

    def leaves_nothing(self, name: str, function: relax.Function) -> bool:
        """Whether no caller here takes over what is pending when a function returns."""
        return "global_symbol" in (function.attrs or {}) or name in self._recursive


class Run(Evaluation):
    """One function."""

    def __init__(self, checker: Checker, name: str) -> None:
        super().__init__(checker, name)
        self._checker = checker
        self._usage: Usage

    # ---- functions and sequences ----------------------------------------------------------

    def function(self, function: relax.Function, inner: bool = False) -> Summary:
        """Run the whole function."""
        upper = (function.attrs or {}).get("tir_var_upper_bound")
        if upper:
            self._extents.bound(
                relax.analysis.defined_symbolic_vars(function),
                {str(key): int(value) for key, value in upper.items()},
            )
        self._usage = Usage(function)
        for parameter in function.params:
            value = self._values[hash(parameter)] = self._parameter(parameter.name, parameter.ty)
            self._summary.parameters.append(value)
        place = Place(relax.Var("return", None), function.body.body)
        result = self._sequence(function.body, place)
        self._read(objects(result), place)
        kept = {storage_of(thing) for thing in objects(result)}
        for pending in self._state.pending:
            storage = storage_of(pending.memory)
            own = not storage.external and storage not in kept
            if own or inner or self._checker.leaves_nothing(self._name, function):
                self._endanger(HazardKind.RETURN, storage, place, pending)
            else:
                self._summary.pending += (pending,)
        self._summary.result = result
        self._summary.passed = self._state.passed
        return self._summary

    def _sequence(self, body: Any, place: Place) -> Value:
        """Run a sequence; its result is held once more when this returns."""
        own = []
        if isinstance(body, relax.SeqExpr):
            for binding in bindings(body):
                self._binding(binding)
                own.append(hash(binding.var))
            body = body.body
        result = self._value(body, place)
        self._state.hold(result)
        for variable in own:
            self._let_go(variable, place, HazardKind.RETURN)
        return result

    def _binding(self, binding: relax.Binding) -> None:
        variable, value = hash(binding.var), binding.value
        place = Place(binding.var, value)
        if is_kill(value):
            for killed in variables(value):
                self._let_go(killed, place)
            return
        if isinstance(value, relax.If):
            result = self._if(value, place)
            held = True
        else:
            result = self._value(value, place)
            held = False
        self._values[variable] = result
        if result:
            if not held:
                self._state.hold(result)
            self._state.holding.add(variable)
        for ended in self._usage.ends_after(variable):
            self._let_go(ended, place)

    def _let_go(self, variable: int, place: Place, kind: HazardKind = HazardKind.FREE) -> None:
        if variable not in self._state.holding:
            return
        self._state.holding.discard(variable)
        for storage in self._state.release(self._values[variable]):
            if storage.external:
                continue
            for pending in self._state.pending:
                if storage_of(pending.memory) is storage:
                    self._endanger(kind, storage, place, pending)

    def _if(self, expr: relax.If, place: Place) -> Value:
        self._read(objects(self._value(expr.cond, place)), place)
        before = self._state
        self._state = before.copy()
        first = self._sequence(expr.true_branch, place)
        first_state, self._state = self._state, before
        second = self._sequence(expr.false_branch, place)
        result = _merge(
            first,
            second,
            lambda leaf: self._continue(leaf, first_state),
            lambda leaf: self._continue(leaf, before),
        )
        before.join(first_state)
        return result

    def _continue(self, leaf: Leaf, state: State) -> Leaf:
        """Give what a branch results in another identity, intact as it is in that branch."""
        result: list[Storage | Buffer] = []
        for thing in leaf:
            if isinstance(thing, Buffer):
                origin = thing.origin or thing
                copy = Buffer(thing.name, thing.storage, thing.begin, thing.end, thing.weak, origin)
                if thing in state.lost:
                    state.lost[copy] = state.lost[thing]
                elif thing in state.intact.get(thing.storage, ()):
                    state.intact[thing.storage][copy] = None
                result.append(copy)
            else:
                result.append(thing)
        continued = frozenset(result)
        state.hold(continued)
        state.release(leaf)
        return continued

    def _literal(self, function: relax.Function, place: Place) -> Value:
        name = f"{self._name}.{place.variable.name}"
        Run(self._checker, name).function(function, inner=True)
        captured = variables(function) & set(self._values)
        return frozenset(t for v in captured for t in objects(self._values[v]))


def _merge(
    first: Value,
    second: Value,
    of_first: Callable[[Leaf], Leaf],
    of_second: Callable[[Leaf], Leaf],
) -> Value:
    if isinstance(first, tuple) and isinstance(second, tuple) and len(first) == len(second):
        return tuple(_merge(a, b, of_first, of_second) for a, b in zip(first, second, strict=True))
    a, b = frozenset(objects(first)), frozenset(objects(second))
    return a if a == b else of_first(a) | of_second(b)
