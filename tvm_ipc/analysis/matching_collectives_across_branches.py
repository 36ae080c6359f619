# SPDX-License-Identifier: Apache-2.0
"""Find collectives that ranks may call together from different branches of an `if`.

    if c:
        y = R.ccl.allreduce(a, "sum")     # rank 0 is here
    else:
        y = R.ccl.allreduce(b, "sum")     # while rank 1 is here

A pass that changes one of them has to change all of them.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, TypeAlias

import tvm_ffi
from tvm import relax

from tvm_ipc.analysis.ffi_arrays import as_list
from tvm_ipc.comm.collective_relax_op import NAME as COLLECTIVE

_CCL = "relax.ccl."
#: The arguments in which matching calls agree, without sizes: those may be symbolic.
_Signature: TypeAlias = "tuple[Any, ...]"
#: The branches around a call: for each, its condition and which branch it is.
_Path: TypeAlias = "tuple[tuple[Any, int], ...]"


def matching_collectives(body: Any) -> dict[Any, _Signature]:
    """Return the variables of collectives that collectives in other branches may match.

    The values are signatures, which are equal for collectives that may match each other.
    """
    calls: defaultdict[_Signature, list[tuple[_Path, Any]]] = defaultdict(list)
    _visit(body, (), calls)
    return {
        variable: signature
        for signature, members in calls.items()
        if len({path for path, _ in members}) > 1
        for _, variable in members
    }


def _visit(body: Any, path: _Path, calls: dict[_Signature, list[tuple[_Path, Any]]]) -> None:
    """Add the collectives of a body to `calls`, by their signatures."""
    for block in as_list(body.blocks) if isinstance(body, relax.SeqExpr) else ():
        for binding in as_list(block.bindings):
            value = binding.value
            if isinstance(value, relax.If):
                condition = condition_key(value.cond)
                for branch, inner in enumerate((value.true_branch, value.false_branch)):
                    _visit(inner, (*path, (condition, branch)), calls)
            elif path and isinstance(value, relax.Call):
                signature = _signature(value)
                if signature is not None:
                    calls[signature].append((path, binding.var))


def _signature(call: relax.Call) -> _Signature | None:
    """Return the signature of a collective, None for any other call."""
    name = str(getattr(call.op, "name", ""))
    if name == COLLECTIVE:
        return (str(call.attrs.kind),)
    return (name.removeprefix(_CCL),) if name.startswith(_CCL) else None


def condition_key(condition: Any) -> Any:
    """Return a key that equal conditions share."""
    if isinstance(condition, relax.Var):
        return condition.__chandle__()
    return tvm_ffi.structural_hash(condition, map_free_vars=False)
