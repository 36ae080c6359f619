# SPDX-License-Identifier: Apache-2.0
"""Represent a Relax function as plain Python objects, which are much faster to read than TVM's.

A variable is represented by its hash, which is its identity. Every statement also lists the
variables whose last use it is: `KillAfterLastUse` will drop their values there. Variables that the
program kills itself are excluded.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax

from tvm_ipc.analysis.ffi_arrays import as_list

#: The kinds of statements, by the value that a variable is bound to.
CALL_OPERATOR, CALL_PACKED, CALL_GLOBAL, CALL_UNKNOWN, KILL = range(5)
SAME, ITEM, IF, LITERAL, NOTHING = range(5, 10)

_KILLS = frozenset(
    {"relax.memory.kill_tensor", "relax.memory.kill_storage", "relax.vm.kill_object"}
)

#: The hash of a variable, a tuple of arguments, a nested statement, or any other expression.
Argument = Any


class Statement:
    """One binding of a variable."""

    __slots__ = ("args", "bound", "ends", "kind", "name", "otherwise", "then", "value", "variable")

    def __init__(self, bound: Any, value: Any) -> None:
        self.bound = bound  #: the variable itself
        self.variable = hash(bound)
        self.value = value
        self.kind = NOTHING
        self.name = ""  #: of the callee
        self.args: list[Argument] = []
        self.ends: list[int] = []  #: variables that are used for the last time
        self.then: Sequence
        self.otherwise: Sequence

    def __str__(self) -> str:
        """Return the binding as messages print it."""
        return f"{self.bound.name} = {_text(self.value)}"


class Sequence:
    """The bindings of a function body or branch, and its result."""

    __slots__ = ("result", "steps")

    def __init__(self) -> None:
        self.steps: list[Statement] = []
        self.result: Argument = None


class Statements:
    """The statements of a function, in nested sequences."""

    def __init__(self, function: relax.Function) -> None:
        self.variables: dict[int, Any] = {}  #: used variables, by hash
        self.references: list[str] = []  #: names of functions, once per reference
        self._killed: set[int] = set()
        self._ending: list[Statement] = []
        self.body, self.free = self._sequence(function.body)
        if self._killed:
            for step in self._ending:
                step.ends = [variable for variable in step.ends if variable not in self._killed]

    def _sequence(self, body: Any) -> tuple[Sequence, set[int]]:
        """Return the statements of a body, and the free variables that it uses."""
        sequence = Sequence()
        last_uses: dict[int, Statement] = {}
        own: set[int] = set()
        if isinstance(body, relax.SeqExpr):
            for block in as_list(body.blocks):
                for binding in as_list(block.bindings):
                    step = Statement(binding.var, binding.value)
                    own.add(step.variable)
                    used = self._fill(step)
                    if step.kind == KILL:
                        self._killed.update(used)
                    else:
                        for variable in used:
                            last_uses[variable] = step
                    sequence.steps.append(step)
            body = body.body
        returned: list[int] = []
        sequence.result = self._argument(body, returned)
        free = set(returned) - own
        for variable in returned:
            last_uses.pop(variable, None)
        for variable, step in last_uses.items():
            if variable in own:
                if not step.ends:
                    self._ending.append(step)
                step.ends.append(variable)
            else:
                free.add(variable)
        return sequence, free

    def _fill(self, step: Statement) -> list[int]:
        """Fill in the kind and the arguments of a statement; return the variables that it uses."""
        value = step.value
        used: list[int] = []
        kind = type(value)
        if kind is relax.Call:
            op = value.op
            callee = type(op)
            if callee is tvm.ir.Op:
                step.name = op.name
                step.kind = KILL if step.name in _KILLS else CALL_OPERATOR
            elif callee is relax.GlobalVar:
                step.kind, step.name = CALL_GLOBAL, op.name_hint
                self.references.append(step.name)
            elif callee is relax.ExternFunc:
                step.kind, step.name = CALL_PACKED, str(op.global_symbol)
            else:
                step.kind = CALL_UNKNOWN
                step.args.append(self._argument(op, used))
            for argument in as_list(value.args):
                step.args.append(self._argument(argument, used))
        elif kind is relax.TupleGetItem:
            step.kind = ITEM
            step.args = [self._argument(value.tuple_value, used), int(value.index)]
        elif kind is relax.If:
            step.kind = IF
            step.args = [self._argument(value.cond, used)]
            step.then, in_then = self._sequence(value.true_branch)
            step.otherwise, in_otherwise = self._sequence(value.false_branch)
            used += in_then | in_otherwise
        elif kind is relax.Function:
            step.kind = LITERAL
            inner = Statements(value)
            self.variables.update(inner.variables)
            self.references += inner.references
            used += inner.free - {hash(parameter) for parameter in value.params}
            step.args = list(used)
        else:
            step.kind = SAME
            step.args = [self._argument(value, used)]
        return used

    def _argument(self, expr: Any, used: list[int]) -> Argument:
        """Return an expression as an argument, and add its variables to `used`."""
        kind = type(expr)
        if kind is relax.Var or kind is relax.DataflowVar:
            variable = hash(expr)
            used.append(variable)
            if variable not in self.variables:
                self.variables[variable] = expr
            return variable
        if kind is relax.GlobalVar:
            self.references.append(expr.name_hint)
        if kind is relax.Tuple:
            return tuple([self._argument(field, used) for field in as_list(expr.fields)])
        if (kind is relax.Call and not tvm.ir.is_prim_expr(expr)) or kind is relax.TupleGetItem:
            step = Statement(relax.Var("", expr.ty), expr)
            used += self._fill(step)
            return step
        return expr


def _text(expr: Any) -> str:
    """Return an expression as messages show it."""
    if isinstance(expr, relax.Call):
        name = getattr(expr.op, "global_symbol", None) or getattr(expr.op, "name", None)
        name = name or getattr(expr.op, "name_hint", "?")
        return f"{name}({', '.join(map(_text, expr.args))})"
    if isinstance(expr, relax.If):
        return f"if {_text(expr.cond)}"
    if isinstance(expr, (relax.SeqExpr, relax.Function)):
        return "..."
    return str(getattr(expr, "name", None) or str(expr).splitlines()[0])
