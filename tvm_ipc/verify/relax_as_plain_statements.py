# SPDX-License-Identifier: Apache-2.0
"""Represent a Relax function as plain Python objects, which are much faster to read than TVM's.

A variable is represented by its hash, which is its identity. A call through one of TVM's operators
or functions that take the callee as an argument is represented as a call of the callee. Every
statement also lists the variables whose last use it is: `KillAfterLastUse` will drop their values
there. Variables that the program kills itself are excluded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm
from tvm import relax

from tvm_ipc.analysis.ffi_arrays import as_list

#: The kinds of statements, by the value that a variable is bound to.
CALL_OPERATOR, CALL_PACKED, CALL_GLOBAL, CALL_UNKNOWN, KILL = range(5)
SAME, ITEM, IF, LITERAL = range(5, 9)

#: The functions of TVM that call another one when they capture a CUDA graph: the first one keeps
#: the storages that it returns, the second one replays its kernels.
GRAPH_ALLOC = "vm.builtin.cuda_graph.get_cached_alloc"
GRAPH_RUN = "vm.builtin.cuda_graph.run_or_capture"

_KILLS = frozenset(
    {"relax.memory.kill_tensor", "relax.memory.kill_storage", "relax.vm.kill_object"}
)

_VARIABLES = frozenset((relax.Var, relax.DataflowVar))
#: Expressions that contain others.
_NESTED = frozenset((relax.GlobalVar, relax.Tuple, relax.Call, relax.TupleGetItem))

#: The hash of a variable, a tuple of arguments, a nested statement, or any other expression.
Argument = Any


def _all_but_first(args: list[Argument]) -> list[Argument]:
    return args[1:]


def _fields_of_second(args: list[Argument]) -> list[Argument]:
    return [*args[1]] if type(args[1]) is tuple else [args[1]]


#: The operands of the callee, for the operators and functions whose first argument is the callee.
_CALLERS: dict[str, Callable[[list[Argument]], list[Argument]]] = {
    "relax.call_pure_packed": _all_but_first,
    "relax.call_builtin_with_ctx": _fields_of_second,
    "relax.vm.call_tir_dyn": _fields_of_second,
    "vm.builtin.call_tir_dyn": _all_but_first,
    GRAPH_ALLOC: lambda _: [],
    GRAPH_RUN: _fields_of_second,
}


class Statement:
    """One binding of a variable."""

    __slots__ = (
        *("args", "bound", "ends", "index", "kind", "name", "otherwise", "then", "through"),
        *("value", "variable"),
    )

    def __init__(self, bound: Any, value: Any) -> None:
        self.bound = bound  #: the variable itself
        self.variable = hash(bound)
        self.value = value
        self.kind = SAME
        self.name = ""  #: of the callee
        self.through = ""  #: the operator or function that calls the callee, if there is one
        self.args: list[Argument] = []
        self.ends: list[int] = []  #: variables that are used for the last time
        self.index: int  #: of a field of a tuple
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
        self.packed: set[str] = set()  #: names of called packed functions, those in branches too
        self.has_branches = False
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
            callee = value.op
            if type(callee) not in (tvm.ir.Op, relax.ExternFunc):
                callee = self._argument(callee, used)
            self._call(step, callee, [self._argument(arg, used) for arg in as_list(value.args)])
        elif kind is relax.TupleGetItem:
            step.kind = ITEM
            step.args, step.index = [self._argument(value.tuple_value, used)], int(value.index)
        elif kind is relax.If:
            step.kind = IF
            self.has_branches = True
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
            step.args = [self._argument(value, used)]
        return used

    def _call(self, step: Statement, callee: Any, args: list[Argument]) -> None:
        """Fill in the kind, name and arguments of a call."""
        kind = type(callee)
        step.args = args
        if kind is relax.GlobalVar:
            step.kind, step.name = CALL_GLOBAL, callee.name_hint
        elif kind is not tvm.ir.Op and kind is not relax.ExternFunc:
            step.kind, step.args = CALL_UNKNOWN, [callee, *args]
        else:
            is_operator = kind is tvm.ir.Op
            name = step.name = callee.name if is_operator else str(callee.global_symbol)
            if name in _CALLERS:
                step.through = name
                self._call(step, args[0], _CALLERS[name](args))
            elif is_operator:
                step.kind = KILL if name in _KILLS else CALL_OPERATOR
            else:
                step.kind = CALL_PACKED
                self.packed.add(name)

    def _argument(self, expr: Any, used: list[int]) -> Argument:
        """Return an expression as an argument, and add its variables to `used`."""
        kind = type(expr)
        if kind in _VARIABLES:
            variable = hash(expr)
            used.append(variable)
            if variable not in self.variables:
                self.variables[variable] = expr
            return variable
        if kind not in _NESTED:
            return expr
        if kind is relax.GlobalVar:
            self.references.append(expr.name_hint)
        if kind is relax.Tuple:
            return tuple([self._argument(field, used) for field in as_list(expr.fields)])
        if (kind is relax.Call and not tvm.ir.is_prim_expr(expr)) or kind is relax.TupleGetItem:
            step = Statement(relax.Var("", expr.ty), expr)
            used += self._fill(step)
            return step
        return expr


def extents_of(node: Any) -> Any:
    """Return the extents of a shape, or of a type of tensors or shapes, None if they are unknown.

    A list is returned as it is.
    """
    if isinstance(node, list):
        return node
    if isinstance(node, relax.TensorType):
        node = node.shape
    if isinstance(node, (relax.ShapeExpr, relax.ShapeType)):
        return None if node.values is None else as_list(node.values)
    return None


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
