# SPDX-License-Identifier: Apache-2.0
"""The rule of each operator, and rules that users add. Others need all of each tensor.

    declare_rule("my.gated_norm", "b s h, b s h, h -> b s h", whole="h")

says of a packed function what `einsum` would: three operands, whose axes have names. Where `b` or
`s` is divided, each rank calls it with its parts; of `h` every rank needs all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Final

import tvm

from tvm_ipc import arguments
from tvm_ipc.transform.rules import (
    elementwise,
    images,
    indexing,
    moving,
    norms,
    products,
    reductions,
    reshape,
)
from tvm_ipc.transform.rules.operation import OPERATORS, Operation, callee_of
from tvm_ipc.transform.rules.rule import Rule
from tvm_ipc.transform.rules.spelled import SpelledRule

#: By names as programs have them after `R.`.
RULES: Final[dict[str, Callable[[Operation], Rule]]] = {
    **elementwise.RULES,
    **products.RULES,
    **reductions.RULES,
    **norms.RULES,
    **reshape.RULES,
    **moving.RULES,
    **indexing.RULES,
    **images.RULES,
}

#: By the name of an operator, or of a function.
_DECLARED: Final[dict[str, SpelledRule]] = {}


def declare_rule(
    name: str,
    axes: str,
    *,
    whole: str = "",
    reduced: Mapping[str, str] | None = None,
    linear: bool = False,
    zeros: bool = False,
) -> None:
    """Say which axes of an operator's or a function's tensors may be divided.

    `LowerPlacements` has each rank call it with what the rank has of the operands. A PrimFunc must
    have symbolic extents where that differs.

    Parameters
    ----------
    name : of an operator, such as "relax.my.gather", of a function of the module that `call_tir`
        calls, or of a packed function.
    axes : for each tensor that it is given, and after an arrow for each one that it gives, names of
        its axes: operands that are divided along axes of one name are divided together, and so are
        results. "1" is an axis of extent 1 that is repeated.
    whole : names of axes of which every rank needs all.
    reduced : for names that no result has, with which reduction the results of parts make the
        result: "sum", "prod", "min" or "max".
    linear : whether it is linear in each operand: given a partial sum, and otherwise what all ranks
        have, it gives a partial sum.
    zeros : whether the results are 0 where all operands are.
    """
    _check_name(name)
    spelled = SpelledRule(name, axes, whole, {} if reduced is None else reduced, linear, zeros)
    known = _DECLARED.setdefault(name, spelled)
    if known != spelled:
        raise ValueError(
            f"declare_rule: {name!r} has another rule already; found {axes!r}; one rule serves "
            "all programs of a process"
        )


def _check_name(name: str) -> None:
    """Check that a name is not that of an operator with a rule, or of one that there is not."""
    arguments.text("declare_rule: name", name, "the name of an operator or a function")
    if not name.startswith(OPERATORS):
        return
    if name.removeprefix(OPERATORS) in RULES:
        raise ValueError(f"declare_rule: {name!r} has a rule already, which programs rely on")
    known = list(tvm.ir.Op.list_op_names())
    if name not in known:
        near = ", ".join(map(repr, get_close_matches(name, known))) or "none with a name near it"
        raise ValueError(f"declare_rule: there is no operator {name!r}; there is {near}")


def rule_of(op: Operation) -> Rule | None:
    """Return what an operator does to axes, None where that is not known."""
    make = RULES.get(op.name) if callee_of(op.call) is None else None
    make = make or _DECLARED.get(op.declared_as)
    return None if make is None else make(op)
