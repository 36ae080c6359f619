# SPDX-License-Identifier: Apache-2.0
"""When variables let go of what they hold, as `KillAfterLastUse` will have it.

Variables are known by their hash here, which is their identity: to compare the variables themselves
takes TVM a hundred times as long.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tvm import relax

_KILLS = frozenset(
    {"relax.memory.kill_tensor", "relax.memory.kill_storage", "relax.vm.kill_object"}
)


def is_kill(value: Any) -> bool:
    """Whether an expression ends a variable by hand."""
    return isinstance(value, relax.Call) and getattr(value.op, "name", None) in _KILLS


def bindings(sequence: relax.SeqExpr) -> Iterator[relax.Binding]:
    """Every binding of a sequence, in order."""
    for block in sequence.blocks:
        yield from block.bindings[:]


class Usage:
    """The last use of every variable of a function, in the sequence that binds it.

    Variables that are killed by hand are not among them: the kill is what ends them.
    """

    def __init__(self, function: relax.Function) -> None:
        self._ends: dict[int, list[int]] = {}
        self._killed: set[int] = set()
        self._scope(function.body)
        for ended in self._ends.values():
            ended[:] = [variable for variable in ended if variable not in self._killed]

    def ends_after(self, variable: int) -> list[int]:
        """Return the variables that are last used by the binding of this one."""
        return self._ends.get(variable, [])

    def _scope(self, body: Any) -> set[int]:
        """Note last uses in a sequence; return what it uses of others."""
        if not isinstance(body, relax.SeqExpr):
            return variables(body)
        last: dict[int, int] = {}
        own: set[int] = set()
        for binding in bindings(body):
            variable = hash(binding.var)
            own.add(variable)
            value = binding.value
            if is_kill(value):
                self._killed.update(variables(value))
                continue
            for used in self._used(value):
                last[used] = variable
        outer = set(last) - own
        for used in variables(body.body):
            if used in own:
                last.pop(used, None)
            else:
                outer.add(used)
        for used, variable in last.items():
            if used in own:
                self._ends.setdefault(variable, []).append(used)
        return outer

    def _used(self, value: Any) -> set[int]:
        if isinstance(value, relax.If):
            return (
                variables(value.cond)
                | self._scope(value.true_branch)
                | self._scope(value.false_branch)
            )
        if isinstance(value, relax.Function):
            return self._scope(value.body) - {hash(parameter) for parameter in value.params}
        return variables(value)


def variables(expr: Any) -> set[int]:
    """Return the variables of an expression that holds no bindings."""
    kind = type(expr)
    if kind is relax.Var or kind is relax.DataflowVar:
        return {hash(expr)}
    if kind is relax.Call:
        found: set[int] = set()
        for argument in expr.args[:]:
            found |= variables(argument)
        if isinstance(expr.op, relax.Var):
            found.add(hash(expr.op))
        return found
    if kind is relax.Tuple:
        return set().union(*(variables(field) for field in expr.fields[:]))
    if kind is relax.TupleGetItem:
        return variables(expr.tuple_value)
    if isinstance(expr, relax.SeqExpr):
        found = variables(expr.body)
        for binding in bindings(expr):
            found |= variables(binding.value)
        return found
    if isinstance(expr, relax.Function):
        return variables(expr.body)
    if isinstance(expr, relax.If):
        return variables(expr.cond) | variables(expr.true_branch) | variables(expr.false_branch)
    return set()
