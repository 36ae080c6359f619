# SPDX-License-Identifier: Apache-2.0
"""Recognize private functions that run another function again and again: loops.

Relax has no loops. A function is one if it calls only itself and one other function, and passes on
its own tensors, for example:

    if begin < end:
        body(R.shape([begin]), x)
        if begin + 1 < end:
            loop(R.shape([begin + 1, middle]), x)
            if begin + 2 < end:
                loop(R.shape([middle, end]), x)

The checks follow `body` twice, the second time in the state that the first time leaves, instead of
treating the function as an unknown recursive one. The memory that the body uses is the same each
time, so a third time would find nothing new. The number of times is known only for a function of
exactly this form with `middle = (begin + 2 + end) // 2`, which runs the body for each index from
`begin` to before `end`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi
from tvm import ir, relax, tirx

from tvm_ipc.tvm_moved_names import Analyzer
from tvm_ipc.verify.known_calls import READERS, constant
from tvm_ipc.verify.relax_as_plain_statements import (
    CALL_GLOBAL,
    CALL_PACKED,
    IF,
    KILL,
    Argument,
    Sequence,
    Statement,
    Statements,
    extents_of,
)

#: How often the checks follow the body of a loop.
PASSES = 2


@dataclass(frozen=True, eq=False)
class Bounds:
    """The variables of a loop over a range of indices."""

    begin: Any
    end: Any
    positions: dict[int, tuple[int, int]]  #: by hash of a variable: its parameter and its axis

    def argument(self, variable: Any, arguments: list[Argument]) -> Any:
        """Return the argument of a call for `begin` or `end`, None if it is unknown."""
        position, axis = self.positions[hash(variable)]
        extents = extents_of(arguments[position])
        return None if extents is None else extents[axis]


@dataclass(frozen=True, eq=False)
class Loop:
    """A function that calls another one any number of times."""

    once: Statement  #: the call of the body
    bounds: Bounds | None  #: None: how often it is called is unknown

    def passes(self, arguments: list[Argument]) -> tuple[int, bool]:
        """Return how often to follow the body of a call, and whether it may run less often."""
        first, last = None, None
        if self.bounds is not None:
            first = constant(self.bounds.argument(self.bounds.begin, arguments))
            last = constant(self.bounds.argument(self.bounds.end, arguments))
        if first is None or last is None:
            return PASSES, True
        return max(0, min(PASSES, last - first)), False


def find_loop(name: str, function: relax.Function, statements: Statements) -> Loop | None:
    """Return the loop that a function is, None if it is none."""
    if not isinstance(function.ret_ty, relax.ShapeType):
        return None
    tensors = {
        hash(parameter): position
        for position, parameter in enumerate(function.params)
        if not isinstance(parameter.ty, (relax.ShapeType, tvm.ir.PrimType))
    }
    bodies: list[Statement] = []
    calls_itself = False
    for step in _all_steps(statements.body):
        if step.kind == CALL_GLOBAL and step.name == name:
            calls_itself = True
            if any(step.args[position] != variable for variable, position in tensors.items()):
                return None
        elif step.kind == CALL_GLOBAL and not tensors.keys().isdisjoint(_variables(step.args)):
            bodies.append(step)
        elif not _ignores(step, tensors):
            return None
    if not calls_itself or len(bodies) != 1:
        return None
    return Loop(bodies[0], _bounds(name, function, statements))


def _ignores(step: Statement, tensors: dict[int, int]) -> bool:
    """Return whether a statement does nothing to the tensors of a function."""
    if step.kind in (IF, KILL) or (step.kind == CALL_PACKED and step.name in READERS):
        return True
    return tensors.keys().isdisjoint(_variables(step.args))


def _bounds(name: str, function: relax.Function, statements: Statements) -> Bounds | None:
    """Return the bounds of a loop over a range of indices; None for any other loop."""
    any_left = _only_branch(_steps(statements.body))
    if any_left is None or not isinstance(any_left.args[0], tirx.LT):
        return None
    begin, end = any_left.args[0].a, any_left.args[0].b
    if not isinstance(begin, ir.Var) or not isinstance(end, ir.Var):
        return None
    more_left = _only_branch(_steps(any_left.then)[1:])
    most_left = _only_branch(_steps(more_left.then)[1:]) if more_left else None
    if more_left is None or most_left is None:
        return None
    calls = [*_steps(any_left.then)[:1], *_steps(more_left.then)[:1], *_steps(most_left.then)]
    if (
        [step.kind for step in calls] != [CALL_GLOBAL] * 3
        or [step.name for step in calls[1:]] != [name, name]
        or not tvm_ffi.structural_equal(more_left.args[0], begin + 1 < end)
        or not tvm_ffi.structural_equal(most_left.args[0], begin + 2 < end)
    ):
        return None
    parameters = [*function.params]
    positions = {
        hash(extent): (position, axis)
        for position, parameter in enumerate(parameters)
        if isinstance(parameter.ty, relax.ShapeType)
        for axis, extent in enumerate(parameter.ty.values or ())
        if extent.same_as(begin) or extent.same_as(end)
    }
    if len(positions) != 2:
        return None
    middle = tirx.floordiv(begin + 2 + end, 2)

    def first_half(extent: Any) -> Any:
        return middle if extent.same_as(end) else begin + 1 if extent.same_as(begin) else extent

    def second_half(extent: Any) -> Any:
        return middle if extent.same_as(begin) else extent

    halves = zip(calls[1:], (first_half, second_half), strict=True)
    is_range = all(_passes(parameters, step.args, half) for step, half in halves)
    return Bounds(begin, end, positions) if is_range else None


def _only_branch(steps: list[Statement]) -> Statement | None:
    """Return the `if` that some statements are, which has nothing in its second branch."""
    if len(steps) != 1 or steps[0].kind != IF or _steps(steps[0].otherwise):
        return None
    return steps[0]


def _passes(
    parameters: list[Any], arguments: list[Argument], changed: Callable[[Any], Any]
) -> bool:
    """Return whether a call passes the function's own shapes, with some extents changed."""
    for parameter, argument in zip(parameters, arguments, strict=True):
        if not isinstance(parameter.ty, relax.ShapeType):
            continue
        extents = extents_of(parameter.ty)
        passed = extents if argument == hash(parameter) else extents_of(argument)
        if extents is None or passed is None or len(passed) != len(extents):
            return False
        pairs = zip(passed, extents, strict=True)
        if not all(_is_equal(a, changed(b)) for a, b in pairs):
            return False
    return True


def _is_equal(a: Any, b: Any) -> bool:
    """Return whether two expressions are equal, which passes may have simplified."""
    analyzer = Analyzer()
    return bool(tvm_ffi.structural_equal(analyzer.simplify(a), analyzer.simplify(b)))


def _steps(sequence: Sequence) -> list[Statement]:
    return [step for step in sequence.steps if step.kind != KILL]


def _all_steps(sequence: Sequence) -> Iterator[Statement]:
    """Yield the statements of a sequence and of its branches."""
    for step in sequence.steps:
        yield step
        if step.kind == IF:
            yield from _all_steps(step.then)
            yield from _all_steps(step.otherwise)


def _variables(arguments: Any) -> Iterator[int]:
    """Yield the variables of arguments, those of tuples and nested calls too."""
    for argument in arguments:
        if type(argument) is int:
            yield argument
        elif type(argument) is tuple:
            yield from _variables(argument)
        elif type(argument) is Statement:
            yield from _variables(argument.args)
