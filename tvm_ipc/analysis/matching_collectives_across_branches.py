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
from collections.abc import Mapping
from typing import Any, TypeAlias

import tvm_ffi
from tvm import relax

from tvm_ipc.analysis.program_order import Linear, Region
from tvm_ipc.analysis.views_and_writes_of_calls import operator_of
from tvm_ipc.comm.collective_relax_op import NAME as COLLECTIVE

_CCL = "relax.ccl."
#: The arguments in which matching calls agree, without sizes: those may be symbolic.
_Signature: TypeAlias = "tuple[Any, ...]"
#: The branches around a call: for each, its condition and which branch it is.
BranchPath: TypeAlias = "tuple[tuple[Any, int], ...]"


def matching_collectives(program: Linear) -> dict[Any, _Signature]:
    """Return the variables of collectives that collectives in other branches may match.

    The values are signatures, which are equal for collectives that may match each other.
    """
    calls: defaultdict[_Signature, list[tuple[BranchPath, Any]]] = defaultdict(list)
    for step in program.points:
        signature = _signature(step.value) if step.region.path else None
        if signature is not None:
            calls[signature].append((branch_path(step.region), step.var))
    return {
        variable: signature
        for signature, members in calls.items()
        if len({path for path, _ in members}) > 1
        for _, variable in members
    }


def differing(matching: Mapping[Any, _Signature], lowerings: Mapping[Any, Any]) -> set[Any]:
    """Return the variables of matching collectives that would not all be lowered in one way.

    Parameters
    ----------
    matching : the result of `matching_collectives`.
    lowerings : a key of the lowering of each collective that a pass changes, by its variable.
    """
    keys: defaultdict[_Signature, set[Any]] = defaultdict(set)
    for variable, signature in matching.items():
        keys[signature].add(lowerings.get(variable))
    return {variable for variable, signature in matching.items() if len(keys[signature]) > 1}


def branch_path(region: Region) -> BranchPath:
    """Return the branches around a region, so that equal conditions are equal."""
    return tuple((_condition_key(step.value.cond), branch) for step, branch in region.path)


def _signature(call: relax.Expr) -> _Signature | None:
    """Return the signature of a collective, None for anything else."""
    name = operator_of(call)
    if name == COLLECTIVE:
        return (str(call.attrs.kind),)
    return (name.removeprefix(_CCL),) if name.startswith(_CCL) else None


def _condition_key(condition: Any) -> Any:
    """Return a key that equal conditions share."""
    if isinstance(condition, relax.Var):
        return condition.__chandle__()
    return tvm_ffi.structural_hash(condition, map_free_vars=False)
