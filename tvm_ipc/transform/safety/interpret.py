# SPDX-License-Identifier: Apache-2.0
"""A function run over abstract states, and a summary of what it does to its caller."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import tvm
from tvm import relax, tirx

from tvm_ipc.contract import MAX_WORKERS
from tvm_ipc.contract.programs import WORKER_RANK
from tvm_ipc.transform.safety.buffers import Buffer, Leaf, Storage, Value, objects, storage_of
from tvm_ipc.transform.safety.evaluate import Evaluation
from tvm_ipc.transform.safety.extents import Extents
from tvm_ipc.transform.safety.hazards import Alone, Hazard, HazardKind
from tvm_ipc.transform.safety.known import World
from tvm_ipc.transform.safety.order import Order
from tvm_ipc.transform.safety.prim_funcs import written_parameters
from tvm_ipc.transform.safety.state import State, Summary
from tvm_ipc.transform.safety.statements import (
    IF,
    KILL,
    SAME,
    Argument,
    Sequence,
    Statement,
    Statements,
)


class Checker:
    """What is known of a module: its hazards so far, and summaries of its functions."""

    def __init__(
        self, mod: tvm.IRModule, assume_no_exit_barrier: bool, world: World | None
    ) -> None:
        self.assume_no_exit_barrier = assume_no_exit_barrier
        self._world = world
        self.workers = MAX_WORKERS if world is None else world.size
        self.extents = Extents()
        self.hazards: dict[tuple[Any, ...], Hazard] = {}
        self.alone: dict[tuple[str, int], Alone] = {}
        self._functions = {g.name_hint: f for g, f in mod.functions_items()}
        self._steps: dict[str, Statements] = {}
        self._once: set[str] = set()
        self._seen: set[str] = set()
        self._summaries: dict[str, Summary] = {}
        self._running: set[str] = set()
        self._recursive: set[str] = set()
        self._written: dict[str, frozenset[int] | None] = {}

    def check(self) -> list[Hazard]:
        """Return every hazard of every function."""
        names = [n for n, f in self._functions.items() if isinstance(f, relax.Function)]
        for name in names:
            self._steps[name] = Statements(self._functions[name])
        references = Counter(name for steps in self._steps.values() for name in steps.references)
        self._once = {
            name
            for name in names
            if references[name] == 1 and "global_symbol" not in (self._functions[name].attrs or {})
        }
        for name in names:
            if name not in self._once:
                self.summary(name)
        for name in names:
            if name not in self._seen:  # called by nobody, or in ways that are not known
                self._recursive.add(name)
                self._once.discard(name)
                self.summary(name)
        return [*self.hazards.values(), *Order(self, names, self._world).hazards()]

    def steps(self, name: str) -> Statements:
        """Return a function of the module as plain objects."""
        return self._steps[name]

    def called_once(self, name: str) -> Statements | None:
        """Return what a function does that only the call at hand calls, None for any other."""
        if name not in self._once or name in self._seen:
            return None
        self._seen.add(name)
        return self._steps[name]

    def function(self, name: str) -> Any:
        """Return a function of the module, or None."""
        return self._functions.get(name)

    def written(self, name: str) -> frozenset[int] | None:
        """Return which parameters a PrimFunc writes, None for what is none."""
        if name not in self._written:
            function = self._functions.get(name)
            is_kernel = isinstance(function, tirx.PrimFunc)
            self._written[name] = written_parameters(function) if is_kernel else None
        return self._written[name]

    def summary(self, name: str) -> Summary | None:
        """Return what a Relax function does, None for one that is being looked at: recursion."""
        if name in self._running:
            self._recursive.add(name)
            return None
        if name not in self._summaries:
            self._running.add(name)
            self._seen.add(name)
            run = Run(self, name, self._functions[name], self._steps[name])
            self._summaries[name] = run.run()
            self._running.remove(name)
        return self._summaries[name]

    def leaves_nothing(self, name: str, function: relax.Function) -> bool:
        """Whether no caller here takes over what is pending when a function returns."""
        return "global_symbol" in (function.attrs or {}) or name in self._recursive


class Run(Evaluation):
    """One function."""

    def __init__(
        self,
        checker: Checker,
        name: str,
        function: relax.Function,
        steps: Statements,
        inner: bool = False,
    ) -> None:
        super().__init__(checker, name, steps)
        self._checker = checker
        self._function = function
        self._inner = inner  #: within another function
        self._outer: set[Value] = set()  #: what the parameters reach

    def run(self) -> Summary:
        """Run the whole function."""
        function = self._function
        self._bound(function)
        for parameter in function.params:
            value = self._values[hash(parameter)] = self._parameter(parameter.name, parameter.ty)
            self._summary.parameters.append(value)
            self._outer.update(_leaves(value))
        step = Statement(relax.Var("return", None), function.body.body)
        result = self._sequence(self._steps.body, step)
        self._read(objects(result), step)
        self._give_away(objects(result), step)
        for work in self._state.works.values():
            self._never_waited(work, step, "")
        kept = {storage_of(thing) for thing in objects(result)}
        for pending in self._state.pending:
            storage = storage_of(pending.memory)
            own = not storage.external and storage not in kept
            if own or self._inner or self._checker.leaves_nothing(self._name, function):
                self._endanger(HazardKind.RETURN, storage, step, pending)
            else:
                self._summary.pending += (pending,)
        self._summary.result = result
        self._summary.passed = self._state.passed
        return self._summary

    def _bound(self, function: relax.Function) -> None:
        attributes = function.attrs or {}
        lower, upper = (
            {str(key): int(value) for key, value in attributes.get(name, {}).items()}
            for name in ("tir_var_lower_bound", "tir_var_upper_bound")
        )
        if lower or upper:
            variables = relax.analysis.tir_vars_in_type(function.ty)
            self._extents.bound(variables, lower, upper)

    def _packed(self, name: str, args: list[Argument], step: Statement) -> Value:
        if name == WORKER_RANK.name:
            limits = {str(step.bound.name): self._checker.workers - 1}
            self._extents.bound([step.bound], {}, limits)
        return super()._packed(name, args, step)

    def _inline(self, name: str, steps: Statements, values: list[Value], step: Statement) -> Value:
        """Run a function in the place of its only call: what its parameters are is known here."""
        function = self._checker.function(name)
        self._bound(function)
        self._values.update(zip(map(hash, function.params), values, strict=True))
        self._steps.variables.update(steps.variables)
        caller, self._name = self._name, name
        result = self._sequence(steps.body, step)
        self._name, self._held = caller, True
        return result

    def _sequence(self, sequence: Sequence, around: Statement) -> Value:
        """Run a sequence; its result is held once more when this returns."""
        values, outer = self._values, self._outer
        for step in sequence.steps:
            if step.kind == KILL:
                for killed in step.args:
                    self._let_go(killed, step)
                continue
            variable = step.variable
            if step.kind == IF:
                values[variable] = self._if(step)
                self._state.holding.add(variable)
            else:
                result = values[variable] = self._evaluate(step)
                if step.kind == SAME and step.ends == step.args:
                    # It goes on under another name.
                    if step.ends[0] in self._state.holding:
                        self._state.holding.discard(step.ends[0])
                        self._state.holding.add(variable)
                    continue
                if self._held:
                    self._held = False
                    self._state.holding.add(variable)
                # Parameters are the caller's; nothing frees them here.
                elif result and result not in outer:
                    self._state.hold(result)
                    self._state.holding.add(variable)
            for ended in step.ends:
                self._let_go(ended, step)
        result = self._value(sequence.result)
        self._state.hold(result)
        for step in sequence.steps:
            if step.variable in self._state.holding:
                self._let_go(step.variable, around, HazardKind.RETURN)
        return result

    def _let_go(self, variable: int, step: Statement, kind: HazardKind = HazardKind.FREE) -> None:
        if variable not in self._state.holding:
            return
        self._state.holding.discard(variable)
        freed = self._state.release(self._values[variable])
        if self._state.pending:
            for storage in freed:
                for pending in self._state.pending:
                    if storage_of(pending.memory) is storage and not storage.external:
                        self._endanger(kind, storage, step, pending)

    def _if(self, step: Statement) -> Value:
        self._read(objects(self._value(step.args[0])), step)
        before = self._state
        self._state = before.copy()
        first = self._sequence(step.then, step)
        first_state, self._state = self._state, before
        second = self._sequence(step.otherwise, step)
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
                copy = replace(thing, origin=thing.origin or thing)
                if thing in state.lost:
                    state.lost[copy] = state.lost[thing]
                if thing in state.intact.get(thing.storage, ()):
                    state.intact[thing.storage].add(copy)
                result.append(copy)
            else:
                result.append(thing)
        continued = frozenset(result)
        state.hold(continued)
        state.release(leaf)
        return continued

    def _literal(self, step: Statement) -> Value:
        name = f"{self._name}.{step.bound.name}"
        Run(self._checker, name, step.value, Statements(step.value), inner=True).run()
        return frozenset(thing for value in self._arguments(step.args) for thing in objects(value))


def _leaves(value: Value) -> Iterator[Leaf]:
    if isinstance(value, frozenset):
        yield value
    else:
        for part in value:
            yield from _leaves(part)


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
