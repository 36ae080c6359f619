# SPDX-License-Identifier: Apache-2.0
"""The table of sharding rules, and `declare_rule` for the functions and operators of users.

Operators without a rule need all of each tensor. The rule of a PrimFunc without a declared rule
follows from its body: see `primfunc`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from difflib import get_close_matches
from typing import Final

import tvm
from tvm import tirx
from tvm.relax.analysis import has_reshape_pattern

from tvm_ipc import arguments
from tvm_ipc.spmd.rules import (
    convolution_pooling_resize,
    data_movement,
    elementwise,
    experts,
    gather_scatter,
    matmul_attention,
    normalizations,
    reductions_sorts_and_scans,
    reshape,
)
from tvm_ipc.spmd.rules.axis_label_rule import Refusal, Rule
from tvm_ipc.spmd.rules.operation import OPERATORS, Operation, short_name
from tvm_ipc.spmd.rules.primfunc import primfunc_rule
from tvm_ipc.spmd.rules.user_rules_in_einsum_notation import EinsumRule

#: The arguments of `call_tir` without symbolic values: the function and its operands.
_ARGUMENTS_OF_CALL_TIR: Final = 2

#: Rules by the names of operators as TVMScript has them after `R.`.
RULES: Final[dict[str, Callable[[Operation], Rule]]] = {
    **elementwise.RULES,
    **matmul_attention.RULES,
    **reductions_sorts_and_scans.RULES,
    **normalizations.RULES,
    **reshape.RULES,
    **data_movement.RULES,
    **gather_scatter.RULES,
    **experts.RULES,
    **convolution_pooling_resize.RULES,
}

#: The module whose PrimFuncs calls refer to.
_MODULE: Final[ContextVar[tvm.IRModule | None]] = ContextVar("_MODULE", default=None)
#: Rules of users, by the name of an operator or a function.
_DECLARED: Final[dict[str, EinsumRule]] = {}


def declare_rule(
    name: str,
    axes: str,
    *,
    whole: str = "",
    reduced: Mapping[str, str] | None = None,
    linear: bool = False,
    zeros: bool = False,
) -> None:
    """Declare which axes of an operator's or a function's tensors may be sharded.

    `LowerPlacements` has each rank call it with the shards of the rank. A PrimFunc must have
    symbolic extents where shards have other extents than the whole tensors.

    Parameters
    ----------
    name : the name of an operator, such as "relax.my.gather", of a PrimFunc that `call_tir` calls,
        or of a packed function.
    axes : the names of the axes of each operand and, after an arrow, of each result. Axes with the
        same name are sharded together. "1" is an axis of extent 1 that is broadcast.
    whole : names of axes that must not be sharded, separated by spaces.
    reduced : for names that no result has, the reduction that combines the partial results: "sum",
        "prod", "min" or "max".
    linear : whether it is linear in each operand, so that one partial sum among replicated operands
        gives a partial sum.
    zeros : whether the results are 0 where all operands are 0.

    Raises
    ------
    ValueError
        The axes do not form a rule, the operator does not exist or has a built-in rule, or another
        rule of this name is declared already.

    Examples
    --------
    A packed function with three operands. Ranks may share `b` and `s`, and each needs all of `h`:

    >>> import tvm
    >>> from tvm_ipc.spmd import LowerPlacements, declare_rule
    >>> declare_rule("my.gated_norm", "b s h, b s h, h -> b s h", whole="h")
    >>> mod = tvm.script.from_source('''
    ... @I.ir_module
    ... class Model:
    ...     @R.function
    ...     def main(x: R.Tensor((4, 6, 8), "float32"), w: R.Tensor((8,), "float32")):
    ...         rows = R.comm.place(x, [["tp", 2]], ["S[0]"])
    ...         y = R.call_dps_packed("my.gated_norm", (rows, rows, w), out_ty=rows.ty)
    ...         z = R.comm.place(y, [["tp", 2]], ["S[0]"])
    ...         return z
    ... ''')
    >>> lowered = LowerPlacements()(mod)
    >>> lowered["main"].ret_ty
    R.Tensor((2, 6, 8), dtype="float32")
    """
    _check_name(name)
    rule = EinsumRule(name, axes, whole, {} if reduced is None else reduced, linear, zeros)
    if _DECLARED.setdefault(name, rule) != rule:
        raise ValueError(
            f"declare_rule: {name!r} already has another rule, and {axes!r} differs from it; "
            "declare one rule for all programs of the process"
        )


def _check_name(name: str) -> None:
    """Raise an error if the name is that of an operator with a rule, or of an unknown operator."""
    arguments.text("declare_rule: name", name, "the name of an operator or a function")
    if not name.startswith(OPERATORS):
        return
    if name.removeprefix(OPERATORS) in RULES:
        raise ValueError(
            f"declare_rule: {name!r} has a built-in rule, which cannot be replaced; declare a rule "
            "for an operator without one"
        )
    operators = list(tvm.ir.Op.list_op_names())
    if name not in operators:
        near = get_close_matches(name, operators)
        hint = arguments.similar(near) if near else "no operator has a similar name"
        raise ValueError(f"declare_rule: there is no operator {name!r}; {hint}")


def rule_for(op: Operation | None) -> Rule | None:
    """Return the rule of a call, or None if no rule supports it."""
    try:
        return None if op is None else rule_of(op)
    except Refusal:
        return None


def rule_of(op: Operation) -> Rule | None:
    """Return the rule of a call, or None if it has none; raise `Refusal` with the reason."""
    make = RULES.get(op.operator)
    make = make or _DECLARED.get(op.declared_as)
    if make is not None:
        return make(op)
    function = called_primfunc(op)
    if function is None or len(op.call.args) > _ARGUMENTS_OF_CALL_TIR:
        return None
    if len(op.operands) == len(op.results) == 1 and has_reshape_pattern(function):
        return reshape.reshape_by_function(op)
    return primfunc_rule(function, len(op.operands), len(op.results))


def has_declared_rule(op: Operation) -> bool:
    """Return whether a user declared the rule of a call."""
    return op.declared_as in _DECLARED


def called_primfunc(op: Operation) -> tirx.PrimFunc | None:
    """Return the PrimFunc that `call_tir` calls, or None for other calls.

    It is looked up in the module of `use_primfuncs`.
    """
    mod, callee = _MODULE.get(), op.callee
    if mod is None or not isinstance(callee, tvm.ir.GlobalVar) or short_name(op.call) != "call_tir":
        return None
    name = str(callee.name_hint)
    names = [str(variable.name_hint) for variable in mod.get_global_vars()]
    function = mod[name] if name in names else None
    return function if isinstance(function, tirx.PrimFunc) else None


@contextmanager
def use_primfuncs(mod: tvm.IRModule) -> Iterator[None]:
    """Derive rules from the PrimFuncs of a module in this context.

    Parameters
    ----------
    mod : the module of the functions that are transformed.
    """
    token = _MODULE.set(mod)
    try:
        yield
    finally:
        _MODULE.reset(token)
